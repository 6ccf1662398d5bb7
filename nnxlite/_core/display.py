"""Shows objects: `display` where the program runs, `save_html` in a file for a browser.

Both show the Treescope view, with a picture of each array. Where no browser listens, `display`
prints the text of the object.
"""

import html
import os
import sys
import warnings
from pathlib import Path
from typing import Any

from nnxlite._core import render

_PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ margin: 2em; font-family: sans-serif; line-height: 1.5; }}
div {{ margin-bottom: 1.5em; overflow-x: auto; }}
p {{ margin: 2em 0 0.5em; font-weight: bold; white-space: pre-line; }}
</style>
</head>
<body>
{body}
</body>
</html>
"""


def display(*objects: Any) -> None:
    """Shows objects: as Treescope views in a notebook, as text elsewhere.

    In a view, parts fold and unfold, arrays are pictures, and a button beside each part copies the
    expression that leads to it.

    Args:
      *objects: Modules, Variables, States, GraphDefs, arrays, containers of these or anything else.
        A string is printed as it is: a title for what follows.

    Example:
      >>> nnx.display("The scale:", nnx.Param(jnp.ones(3)))
      The scale:
      Param(float32[3])  # 3 (12 B)
    """
    for shown in objects:
        if isinstance(shown, str):
            sys.stdout.write(f"{shown}\n")
        elif _in_notebook():
            import treescope

            treescope.display(shown, ignore_exceptions=True, autovisualize=True)
        else:
            sys.stdout.write(f"{render.text(shown)}\n")


def save_html(path: str | os.PathLike[str], *objects: Any) -> None:
    """Writes the Treescope views of objects into one HTML file that needs no other.

    The file has the pictures and the script for folding inside; it loads nothing from the network.
    All strings of the objects are escaped.

    Args:
      path: The file to write; one that is there is replaced, once all views are drawn.
      *objects: As for `display`. A string becomes a paragraph: a title for what follows.

    Raises:
      ValueError: No objects are given.

    Example:
      >>> import pathlib, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     file = pathlib.Path(folder, "model.html")
      ...     nnx.save_html(file, "A layer", nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      ...     file.read_text().count("<p>A layer</p>")
      1
    """
    if not objects:
        raise ValueError(
            f"save_html({os.fspath(path)!r}) was given nothing to show. Pass the objects after the "
            "path: nnx.save_html(path, model)."
        )
    file = Path(path)
    body = "\n".join(_section(shown) for shown in objects)
    page = _PAGE.format(title=html.escape(file.stem), body=body)
    file.write_text(page, encoding="utf-8", errors="backslashreplace")


def _section(shown: Any) -> str:
    import treescope

    if isinstance(shown, str):
        return f"<p>{html.escape(shown)}</p>"
    visualizer = treescope.default_magic_autovisualizer.get()
    with (
        treescope.active_autovisualizer.set_scoped(visualizer),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore", RuntimeWarning)  # an array of nan has no mean
        warnings.simplefilter("ignore", DeprecationWarning)  # treescope reads all names of NumPy
        return f"<div>{treescope.render_to_html(shown, ignore_exceptions=True)}</div>"


def _in_notebook() -> bool:
    """Tells whether a notebook shows HTML; IPython in a terminal does not."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None

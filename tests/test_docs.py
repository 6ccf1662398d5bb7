"""Everything the documentation shows runs, and prints what it says.

Docstrings: each `>>>` example, with its module's names and `nnx`, `jax`, `jnp`, `np` at hand.

Markdown: the `python` blocks of a file run top to bottom in one namespace. A `text` block that
follows one holds exactly what it prints; a warning prints as `Category: message`, and so does an
error that ends the block. Both may be wrapped anywhere. `...` stands for anything. A block that
cannot run says why: ```python no-run: needs two GPUs
"""

import ast
import contextlib
import doctest
import importlib
import io
import re
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

pytestmark = pytest.mark.standard_promotion  # what is shown are users' programs

ROOT = Path(__file__).parents[1]
PACKAGE = Path(nnx.__file__).parent
NAMES = {"nnx": nnx, "jax": jax, "jnp": jnp, "np": np}


def docstring_examples() -> Iterator[doctest.DocTest]:
    """Reads the sources, not the objects: decorated and wrapped methods hide nothing this way."""
    parser = doctest.DocTestParser()
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for path in sorted(PACKAGE.rglob("*.py")):
        module = ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, documented):
                continue
            text = ast.get_docstring(node, clean=False)
            if text and ">>>" in text:
                name = f"{module}:{getattr(node, 'name', '')}"
                line = node.body[0].lineno - 1
                yield parser.get_doctest(text, {"__name__": module}, name, str(path), line)


@pytest.mark.parametrize("example", list(docstring_examples()), ids=lambda example: example.name)
def test_docstring_example(example: doctest.DocTest) -> None:
    module = importlib.import_module(example.globs["__name__"].removesuffix(".__init__"))
    example.globs = NAMES | vars(module) | {"nnx": nnx}
    report = io.StringIO()
    doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=report.write)
    if report.getvalue():
        pytest.fail(report.getvalue(), pytrace=False)


class Block(NamedTuple):
    line: int  # of the opening fence, from 1
    info: str
    code: str


def blocks(text: str) -> list[Block]:
    fenced = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
    found = [
        Block(text.count("\n", 0, match.start()) + 1, match[1].strip(), match[2])
        for match in fenced.finditer(text)
    ]
    assert 2 * len(found) == len(re.findall("^ *```", text, re.MULTILINE)), "a fence is not closed"
    return found


def run_block(block: Block, path: Path, namespace: dict) -> tuple[str, bool]:
    """Returns what the block printed, and whether it warned or ended with an error."""
    printed = io.StringIO()
    noted: list[str] = []

    def note(category: type, message: object) -> None:
        noted.append(category.__name__)
        print(f"{category.__name__}: {message}")

    # Blank lines in front make the lines of a traceback those of the file.
    code = compile("\n" * block.line + block.code, str(path), "exec")
    with contextlib.redirect_stdout(printed), warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, category, *_: note(category, message)
        try:
            exec(code, namespace)
        except Exception as error:  # noqa: BLE001 - whatever it is, it is printed and compared
            note(type(error), error)
    return printed.getvalue(), bool(noted)


def agree(shown: str, printed: str, *, wrapped: bool) -> bool:
    flags = doctest.ELLIPSIS | (doctest.NORMALIZE_WHITESPACE if wrapped else 0)
    shown, printed = (re.sub(r"[ \t]+$", "", text, flags=re.M) for text in (shown, printed))
    return doctest.OutputChecker().check_output(shown, printed, flags)


def run_markdown(path: Path, text: str, namespace: dict) -> None:
    found = blocks(text)
    for block, after in zip(found, [*found[1:], Block(0, "", "")], strict=True):
        if block.info != "python":
            assert not block.info.startswith("python") or re.match(r"python no-run: \w", block.info)
            continue
        shown = after.code if after.info == "text" else ""
        printed, wrapped = run_block(block, path, namespace)
        if not agree(shown, printed, wrapped=wrapped):
            difference = f"printed\n{printed}\nbut the file shows\n{shown}"
            pytest.fail(f"{path.name}:{block.line} {difference}", pytrace=False)


MARKDOWN = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("guides/*.md"))]


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.name)
def test_markdown_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.ModuleType("shown_in_" + path.stem)
    monkeypatch.setitem(sys.modules, module.__name__, module)  # dataclasses and pickle look it up
    run_markdown(path, path.read_text(), vars(module))


@pytest.mark.parametrize("path", MARKDOWN, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", path.read_text())
    files = [target for target in targets if "://" not in target]
    assert not [target for target in files if not (path.parent / target).exists()]


def test_wrong_output_is_found() -> None:
    text = "```python\nprint(1)\n```\n\n```text\n2\n```\n"
    with pytest.raises(pytest.fail.Exception, match="printed\n1"):
        run_markdown(Path("wrong.md"), text, {})


def test_unshown_error_is_found() -> None:
    text = "```python\n1 / 0\n```\n"
    with pytest.raises(pytest.fail.Exception, match="ZeroDivisionError: division by zero"):
        run_markdown(Path("wrong.md"), text, {})

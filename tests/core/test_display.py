"""Showing objects in a notebook, on a terminal and in a file."""

import base64
import html.parser
import re
import sys
import types
import zlib
from pathlib import Path

import jax.numpy as jnp
import pytest
import treescope

import nnxlite as nnx


def notebook(monkeypatch: pytest.MonkeyPatch, shell: object) -> list[object]:
    """Pretends that IPython runs; returns the list of what it was asked to show."""
    shown: list[object] = []
    ipython = types.SimpleNamespace(get_ipython=lambda: shell)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setattr(treescope, "display", lambda value, **_: shown.append(value))
    return shown


def test_display_prints_text_where_no_notebook_is(capsys: pytest.CaptureFixture[str]) -> None:
    scale = nnx.Param(jnp.ones(3))
    nnx.display("A scale:", scale, 3)
    assert capsys.readouterr().out == f"A scale:\n{scale}\n3\n"


@pytest.mark.parametrize("shell", [None, types.SimpleNamespace()], ids=["python", "terminal"])
def test_display_prints_text_in_a_terminal(
    shell: object, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = notebook(monkeypatch, shell)
    nnx.display(nnx.Param(1.0))
    assert capsys.readouterr().out == "Param(float32[])\n"
    assert not shown


def test_display_shows_views_in_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = notebook(monkeypatch, types.SimpleNamespace(kernel=object()))
    scale = nnx.Param(1.0)
    nnx.display(scale, [scale])
    assert shown == [scale, [scale]]


class Page(html.parser.HTMLParser):
    """What a browser finds in a page, at first and after the views have unpacked themselves."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.links: list[str] = []
        self.views: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [str(value) for name, value in attrs if name in ("src", "href")]

    def handle_data(self, data: str) -> None:
        for packed in re.findall(r"[A-Za-z0-9+/]{100,}=*", data):
            self.views.append(zlib.decompress(base64.b64decode(packed)).decode())


def test_save_html_writes_one_file_that_needs_no_other(tmp_path: Path) -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    nnx.save_html(tmp_path / "model.html", "The model", model, "Its state", nnx.state(model))
    page = Page(tmp_path / "model.html")
    assert page.tags[:2] == ["html", "head"]
    assert page.tags.count("p") == 2
    assert page.links == []
    views = "".join(page.views)
    assert "Linear(" in views
    assert "State(" in views
    assert "http" not in re.sub(r"http://www.w3.org\S*", "", views)


def test_save_html_escapes_titles_and_the_name_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a<b>&.html"
    nnx.save_html(str(path), "<script>alert(1)</script>", nnx.Param(1.0))
    page = path.read_text()
    assert "<title>a&lt;b&gt;&amp;</title>" in page
    assert "<p>&lt;script&gt;alert(1)&lt;/script&gt;</p>" in page


def test_save_html_escapes_strings_in_objects(tmp_path: Path) -> None:
    layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    layer.note = "<script>alert(1)</script>"
    nnx.save_html(tmp_path / "page.html", layer)
    (found,) = [view for view in Page(tmp_path / "page.html").views if "alert" in view]
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in found
    assert "<script>alert" not in found


def test_save_html_draws_arrays_whatever_visualizer_is_active(tmp_path: Path) -> None:
    nnx.save_html(tmp_path / "page.html", nnx.Param(jnp.full((4, 4), jnp.nan)))
    assert any("arrayviz" in view for view in Page(tmp_path / "page.html").views)
    assert treescope.active_autovisualizer.get() is None


def test_a_string_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    nnx.save_html(tmp_path / "page.html", "\ud800", nnx.Param(1.0, note="\ud800"))
    assert "\\ud800" in (tmp_path / "page.html").read_text()


def test_save_html_of_nothing_is_an_error_and_writes_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nothing to show. Pass the objects after the path"):
        nnx.save_html(tmp_path / "page.html")
    assert not list(tmp_path.iterdir())

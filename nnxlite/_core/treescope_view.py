"""The Treescope view of an object, written from its description like its text.

Classes of the library have `treescope_repr` as their `__treescope_repr__`, the method by which
Treescope asks an object for its view. The object asked draws all that it holds, except for arrays
and for parts with a `__treescope_repr__` of their own: these go back to Treescope, whose array
visualizer draws the former. A part met again is one line that names the place where it is drawn,
and that place names the others, so that cycles end and nothing is drawn twice.

Strings of the user only become text parts, which Treescope escapes. It is imported when a view is
asked for, as it takes longer than the library itself.
"""

import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnxlite._core.describe import Description, describe
from nnxlite._core.errors import Path
from nnxlite._core.oneline import line
from nnxlite._core.render import brackets, expression, holdings, label

Renderer = Callable[..., Any]  # Treescope's way to draw a part: `(value, path=...)`

_MOST_ITEMS = 256  # children of one part; each array among them is a picture of some kB
_DEEPEST = (
    24  # levels; Treescope recurses some twenty frames for each, of the 1,000 that Python has
)
_MOST_PLACES = 3  # named beside a shared part


def treescope_repr(self: Any, path: str | None, subtree_renderer: Renderer) -> Any:
    """Returns the Treescope rendering of `self`.

    Args:
      self: What to show: an object, Variable, State or any other value.
      path: The expression that leads from the root of the view to `self`, if there is one.
      subtree_renderer: Draws arrays and parts of other libraries.
    """
    description = describe(self, depth=_DEEPEST, max_items=_MOST_ITEMS)
    return _View(description, path, subtree_renderer).part(description, path)


class _View:
    """One drawing of one root."""

    def __init__(self, root: Description, path: str | None, subtree_renderer: Renderer) -> None:
        from treescope import formatting_util, rendering_parts

        self.parts = rendering_parts
        self.color_of = formatting_util.color_from_string
        self.subtree_renderer = subtree_renderer
        self.root = root
        self.drawn: dict[Path, str] = {}  # objects, by path in the description -> their expression
        self.met_again = _places_met_again(root, path)

    def part(self, part: Description, path: str | None) -> Any:
        """Returns the rendering of a part that the expression `path` leads to."""
        if part.kind == "reference":
            return self.reference(part, path)
        if part is not self.root and _draws_itself(part.value):
            return self.foreign(part, path)
        if part.kind == "array":
            return self.array(part, path)
        if part.access != "value" and path is not None:
            self.drawn[part.path] = path
        if not part.children:
            return self.childless(part, path)
        comment = holdings(part).strip()
        opening, closing = brackets(part)
        last = None if part.hidden else part.children[-1]
        children = [self.child(child, path, child is last) for child in part.children]
        if part.hidden:
            children.append(self.comment(f"...  # {part.hidden:,} more"))
        node = self.parts.build_foldable_tree_node_from_children(
            prefix=opening,
            children=children,
            suffix=closing,
            path=path,
            background_color=self.color(part),
            first_line_annotation=self.comment(f"  {comment}") if comment else None,
        )
        return self.with_places(part, node)

    def child(self, part: Description, parent_path: str | None, is_last: bool) -> Any:
        """Returns the line of a child, with its name and the comma behind it."""
        rendering = self.part(part, _child_path(part, parent_path))
        one_line = self.parts.text("" if is_last else ", ")
        return self.parts.build_full_line_with_annotations(
            self.parts.siblings_with_annotations(label(part), rendering),
            self.parts.fold_condition(collapsed=one_line, expanded=self.parts.text(",")),
        )

    def childless(self, part: Description, path: str | None) -> Any:
        """Returns one line for a part of which nothing is shown below."""
        text = part.summary or ("..." if part.hidden else "").join(brackets(part))
        drawn = self.parts.text(text)
        if part.kind == "static":
            return drawn
        if part.kind == "error":
            drawn = self.parts.error_color(drawn)
        node = self.parts.build_one_line_tree_node(
            self.parts.siblings(drawn, self.comment(holdings(part))),
            path=path,
            background_color=self.color(part),
        )
        return self.with_places(part, node)

    def reference(self, part: Description, path: str | None) -> Any:
        """Returns the line that stands for a part met again; its button copies the first place."""
        target = part.target or ()
        place = self.drawn.get(target, "")
        relation = "cycle to" if part.cycle else "shared with"
        text = f"<{part.title} {relation} {place or expression(target)}>"
        return self.parts.build_one_line_tree_node(
            self.parts.abbreviation_color(self.parts.text(text)), path=place or path
        )

    def array(self, part: Description, path: str | None) -> Any:
        if _can_be_drawn(part.value):
            return self.foreign(part, path)
        return self.parts.build_one_line_tree_node(self.parts.text(part.summary), path=path)

    def foreign(self, part: Description, path: str | None) -> Any:
        """Lets Treescope draw an array, or a part that says itself how it is drawn."""
        try:
            with warnings.catch_warnings():  # an array of nan has no mean
                warnings.simplefilter("ignore", RuntimeWarning)
                return self.subtree_renderer(part.value, path=path)
        except Exception as error:  # noqa: BLE001 - a user's method, a transfer guard, ...
            if part.kind == "array":
                text = f"{part.summary}  # not drawn: {type(error).__name__}"
            else:
                text = f"<{part.title} that cannot be drawn: {type(error).__name__}>"
            return self.parts.build_one_line_tree_node(
                self.parts.error_color(self.parts.text(text)), path=path
            )

    def with_places(self, part: Description, node: Any) -> Any:
        """Adds to a shared part where else it is."""
        places = self.met_again.get(part.path, ()) if part.access != "value" else ()
        if not places:
            return node
        named = ", ".join(places[:_MOST_PLACES])
        more = f" and {len(places) - _MOST_PLACES:,} more" if len(places) > _MOST_PLACES else ""
        return self.parts.siblings_with_annotations(
            node, extra_annotations=[self.comment(f"  # also {named}{more}")]
        )

    def color(self, part: Description) -> str | None:
        return self.color_of(part.title) if part.kind in ("object", "variable", "leaf") else None

    def comment(self, text: str) -> Any:
        return self.parts.comment_color(self.parts.text(text))


def _child_path(part: Description, parent: str | None) -> str | None:
    """Returns the expression that leads to a part, written as code that can be pasted."""
    if parent is None:
        return None
    if part.access == "value":
        return f"{parent}.value"
    if part.access == "attribute" and isinstance(part.key, str) and part.key.isidentifier():
        return f"{parent}.{part.key}"
    return f"{parent}[{line(part.key)}]"


def _places_met_again(root: Description, path: str | None) -> dict[Path, list[str]]:
    """Returns, for each shared part, the expressions of the other places where it is."""
    places: dict[Path, list[str]] = {}
    stack = [(root, path)]
    while stack:
        part, place = stack.pop()
        if part.kind == "reference" and not part.cycle:
            places.setdefault(part.target or (), []).append(place or expression(part.path))
        stack.extend((child, _child_path(child, place)) for child in reversed(part.children))
    return places


def _draws_itself(value: Any) -> bool:
    """Tells whether the class of `value` has a view that is not the library's."""
    own = getattr(type(value), "__treescope_repr__", None)
    return own is not None and own is not treescope_repr


def _can_be_drawn(value: Any) -> bool:
    """Tells whether `value` is an array of numbers; Treescope fails on some of the others."""
    if isinstance(value, Tracer) or not isinstance(value, jax.Array | np.ndarray):
        return False
    if isinstance(value, jax.Array) and value.is_deleted():
        return False
    is_number = jnp.issubdtype(value.dtype, np.number) or value.dtype == np.bool_
    return bool(is_number and value.size)

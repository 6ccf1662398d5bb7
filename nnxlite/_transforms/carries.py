"""Carries: what a loop hands from step to step has to keep its structure, shapes and dtypes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._core.errors import StructureError
from nnxlite._core.graphdef import FILL_NODE
from nnxlite._core.oneline import types_line
from nnxlite._transforms.changes import result_text, structure_change, tree_text
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.packing import Out, OutDef


def check_carry(
    title: str,
    crossing: Crossing,
    out: Out,
    values: Sequence[Any],
    rest: Sequence[Any],
) -> list[int]:
    """Checks that a step returns what it got, and changes values alone.

    Args:
      title: How messages call the step.
      crossing: Of its arguments; the last one is carried.
      out: Abstractly, what it returns.
      values: Of the leaves of objects before it.
      rest: The other arguments.

    Returns:
      The positions, among all leaves of the arguments, of the arrays that are carried.

    Raises:
      StructureError: It does not; with the path, before and after.
    """
    definition = out.definition
    if definition.update is not None:
        change = structure_change(crossing, definition.update)
        raise StructureError(
            f"{title}: {change or 'the step returns a new object'} in the loop, which is compiled "
            "once for all steps: only values may change. Make the structure before the loop, and "
            "return the objects that came in."
        )
    positions, before_tree = jax.tree_util.tree_flatten(argument_at(crossing, -1))
    after = definition.numbered()
    if before_tree != jax.tree.structure(after):
        before = tree_text(before_tree, [_before(crossing, rest, n) for n in positions])
        raise StructureError(
            f"{title}: the value has to keep its structure. Before the step it is "
            f"{before}, after it {result_text(crossing, out)}."
        )
    found = _Found(title, crossing, positions, definition)
    arrays = iter(out.arrays)
    for place, position, entry in found.entries():
        if position in crossing.roots:
            found.check_object(place, position, entry)
        elif entry is not None:
            raise StructureError(f"{title}: {place} was an array and is an object now.")
        else:
            before = rest[crossing.rest.index(position)]
            check_same_type(title, place, before, next(arrays))
    for number, value in zip(definition.changed, out.changed, strict=True):
        check_same_type(title, crossing.leaf_path(number), values[number], value)
    return [position for position in positions if position not in crossing.roots]


def argument_at(crossing: Crossing, number: int) -> Any:
    """Returns an argument with the position of each leaf in its place."""
    args, _ = jax.tree_util.tree_unflatten(crossing.treedef, range(crossing.treedef.num_leaves))
    return args[number]


def _before(crossing: Crossing, rest: Sequence[Any], position: int) -> Any:
    """Returns the array, or the class of the object, at a position of the arguments."""
    if position not in crossing.roots:
        return rest[crossing.rest.index(position)]
    _, how, number = crossing.graphdef.skeleton.roots[crossing.roots.index(position)]
    graphdef = crossing.graphdef
    return graphdef.skeleton.records[number].cls if how == FILL_NODE else graphdef.leaves[number][0]


class _Found:
    """The value after a step, beside that before it."""

    def __init__(
        self, title: str, crossing: Crossing, positions: Sequence[int], definition: OutDef
    ) -> None:
        self.title, self.crossing = title, crossing
        self.positions, self.definition = positions, definition

    def entries(self) -> Any:
        """Yields where each leaf of the value is, its position before, and what is there after."""
        paths = jax.tree_util.tree_leaves_with_path(self.definition.numbered())
        spec = self.definition.spec or (None,) * len(paths)
        for (path, _), position, entry in zip(paths, self.positions, spec, strict=True):
            yield "the value" + jax.tree_util.keystr(path), position, entry

    def check_object(self, place: str, position: int, entry: Any) -> None:
        crossing = self.crossing
        if entry is None:
            raise StructureError(f"{self.title}: {place} was an object and is an array now.")
        _, how, payload = crossing.graphdef.skeleton.roots[crossing.roots.index(position)]
        if (how == FILL_NODE, payload) != entry:
            is_node, number = entry
            other = crossing.node_path(number) if is_node else crossing.leaf_path(number)
            raise StructureError(
                f"{self.title}: {place} is another object after the step than before it: {other} "
                "came in at another place. Return the same object, and write its Variables."
            )


def check_same_type(title: str, place: str, before: Any, after: Any) -> None:
    """Raises unless a carried value keeps its structure, shape and dtype."""
    before_leaves, before_tree = jax.tree_util.tree_flatten(before)
    after_leaves, after_tree = jax.tree_util.tree_flatten(after)
    if before_tree != after_tree:
        raise StructureError(
            f"{title}: the value of {place} is {types_line(before)} before the step and "
            f"{types_line(after)} after it. A carried value keeps its structure."
        )
    for a, b in zip(before_leaves, after_leaves, strict=True):
        weak = getattr(a, "weak_type", not hasattr(a, "dtype"))
        if jnp.shape(a) != jnp.shape(b) or (jnp.result_type(a) != jnp.result_type(b) and not weak):
            raise StructureError(
                f"{title}: {place} is {types_line(a)} before the step and {types_line(b)} after "
                "it. A carried value keeps its shape and dtype: convert it in the body."
            )

"""Graphs taken apart along an axis, and put together again: the oracle of mapped transforms.

A mapped function is a Python loop over slices. The first slice of a graph is the graph itself, cut
in place; the others are clones. After the loop all are joined into the first: its objects are the
caller's.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import nnxlite as nnx
from tests.isomorphism import (
    has_identity,
    is_array,
    is_object,
    items_of,
    reachable,
    rebuilt,
)
from tests.strategies import put

SIZE = 3  # no other axis is that long


class Unjoinable(Exception):
    """Graphs that differ in more than the values of their arrays."""


def map_arrays(root: Any, f: Callable[[Any], Any]) -> Any:
    """Replaces each array below `root`, in place where there is identity, else in a new value."""
    seen: dict[int, Any] = {}

    def new(value: Any) -> Any:
        if is_array(value) or isinstance(value, jax.ShapeDtypeStruct):
            return f(value)
        if has_identity(value):
            if id(value) not in seen:
                seen[id(value)] = value
                fill(value)
            return value
        children = [child for _, child in items_of(value) or ()]
        return _with_children(value, children, [new(child) for child in children])

    def fill(node: Any) -> None:
        if isinstance(node, nnx.Variable):
            node.set_value(jax.tree.map(f, node.get_value()))
            return
        for key, child in items_of(node) or ():
            found = new(child)
            if found is not child:
                put(node, key, found)

    return new(root)


def _with_children(value: Any, before: Sequence[Any], after: Sequence[Any]) -> Any:
    if all(a is b for a, b in zip(before, after, strict=True)):
        return value  # also methods and partials, which hold objects and no arrays
    return rebuilt(value, list(after))


def tiled(root: Any, axis: int = 0) -> Any:
    """Gives each array an axis with slices that differ."""

    def stacked(x: Any) -> jax.Array:
        return jnp.stack([jnp.asarray(x) + float(n) for n in range(SIZE)], axis)

    return map_arrays(root, stacked)


def cut(root: Any, n: int, axis: int = 0) -> Any:
    """Replaces each array by its n-th slice."""
    return map_arrays(root, lambda x: jnp.take(x, n, axis))


class Known:
    """What was below a root: of arrays, where they were.

    Arrays have no identity: what is written at a place is the new value of what was there.
    """

    def __init__(self, root: Any) -> None:
        self.nodes = reachable(root)
        self._ids = {id(node) for node in self.nodes}
        self._places = {
            (id(node), key)
            for node in self.nodes
            if not isinstance(node, nnx.Variable)
            for key, _ in items_of(node) or ()
        }

    def holds(self, node: Any) -> bool:
        """Tells whether a node was there."""
        return id(node) in self._ids

    def has_place(self, holder: Any, key: Any) -> bool:
        """Tells whether something was there at this key."""
        return (id(holder), key) in self._places


def joined(graphs: Sequence[Any], known: Known | None = None, axis: int = 0) -> Any:
    """Stacks the arrays of equal graphs into the first of them.

    What is one and the same object in all of them stays as it is. Arrays are stacked along `axis`
    if they were there before, as `known` says, else in front.

    Raises:
      Unjoinable: They differ in structure.
    """
    seen: dict[int, Any] = {}

    def join(values: Sequence[Any], axis: int) -> Any:
        first = values[0]
        if all(map(is_array, values)):
            _same([x.shape for x in values])
            return jnp.stack([jnp.asarray(x) for x in values], axis)
        _same(list(map(type, values)))
        if has_identity(first):
            if id(first) not in seen and not all(value is first for value in values):
                seen[id(first)] = values
                fill(values)
            return first
        rows = children(values)
        return _with_children(first, [row[0] for row in rows], [join(row, axis) for row in rows])

    def children(values: Sequence[Any]) -> list[list[Any]]:
        items = [items_of(value) or [] for value in values]
        _same([[key for key, _ in each] for each in items])
        return [[child for _, child in row] for row in zip(*items, strict=True)]

    def fill(nodes: Sequence[Any]) -> None:
        first = nodes[0]
        if isinstance(first, nnx.Variable):
            values = [node.get_value() for node in nodes]
            _same(list(map(jax.tree.structure, values)))
            along = axis if known is not None and known.holds(first) else 0
            first.set_value(jax.tree.map(lambda *xs: join(xs, along), *values))
            return
        keys = [key for key, _ in items_of(first) or ()]
        for key, row in zip(keys, children(nodes), strict=True):
            after = join(row, axis if known is not None and known.has_place(first, key) else 0)
            if after is not row[0]:
                put(first, key, after)

    return join(graphs, 0)


def _same(things: list[Any]) -> None:
    if any(thing != things[0] for thing in things):
        raise Unjoinable(str(things))


def arrays_of(tree: Any) -> list[Any]:
    """Returns the arrays of a result that are in no object."""
    if is_array(tree):
        return [tree]
    if is_object(tree) or isinstance(tree, nnx.Variable):
        return []
    return [array for _, child in items_of(tree) or () for array in arrays_of(child)]

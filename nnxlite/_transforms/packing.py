"""What a pure function returns: its result, and what changed on the objects it was given.

`pack` compares the clones after a call with what they were made of. As long as the structure is
the same, the new values of leaves are enough (`OutDef.changed`); else the whole graph is described
anew, and related to the one before (`Update`). All that is static rides in the auxiliary data of
`Out`.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax

from nnxlite._core.errors import TraceLevelError
from nnxlite._core.graph import Flat, flatten
from nnxlite._core.graphdef import ARRAY_LEAF, FILL_LEAF, FILL_VALUE, GraphDef
from nnxlite._core.trace import (
    FLATTENING,
    SPECIAL,
    Opaque,
    current_level,
)


class Update(NamedTuple):
    """How the structure changed: the new graph, and which of its parts existed before.

    Attributes:
      graphdef: Of all nodes and leaves there were, followed by the objects of the result.
      nodes: Per node of it, its number before, or -1.
      leaves: Per leaf of it, its number before, or -1; of an array, that of what was in its place.
      kept: Per leaf, whether its value is the one it had before.
      first_output: The number of roots that stand before the objects of the result.
    """

    graphdef: GraphDef[Any]
    nodes: tuple[int, ...]
    leaves: tuple[int, ...]
    kept: tuple[bool, ...]
    first_output: int


class OutDef(NamedTuple):
    """The static half of what a pure function returns.

    Attributes:
      tree: The result, with each object one leaf.
      spec: Per leaf of it None for an array, else (True, node number) or (False, leaf number);
        without any object, None.
      changed: The numbers of the leaves with a new value.
      update: How the structure changed, if it did; then `spec` counts its output roots.
    """

    tree: Any
    spec: tuple[Any, ...] | None
    changed: tuple[int, ...]
    update: Update | None

    def numbered(self) -> Any:
        """Returns the result with a number for each leaf."""
        return jax.tree_util.tree_unflatten(self.tree, range(self.tree.num_leaves))


class Out:
    """What a pure function returns: the arrays of the result, and the values that changed."""

    __slots__ = ("arrays", "changed", "definition", "extras")

    def __init__(
        self, arrays: list[Any], changed: list[Any], extras: Any, definition: OutDef
    ) -> None:
        self.arrays, self.changed, self.extras = arrays, changed, extras
        self.definition = definition


jax.tree_util.register_pytree_node(
    Out,
    lambda out: ((out.arrays, out.changed, out.extras), out.definition),
    lambda definition, children: Out(*children, definition),
)


def opaque_flatten(tree: Any, mode: Any = True) -> tuple[list[Any], Any]:
    """Flattens a tree with each object, State and Variable as one `Opaque` leaf.

    With `mode=OPEN_STATES` a State is flattened to its values.
    """
    before = FLATTENING.opaque
    FLATTENING.opaque = mode
    SPECIAL.append(None)
    try:
        return jax.tree_util.tree_flatten(tree)
    finally:
        SPECIAL.pop()
        FLATTENING.opaque = before


def pack(
    graphdef: GraphDef[Any],
    roots: tuple[Any, ...],
    nodes: list[Any],
    leaves: list[Any],
    values: Sequence[Any],
    result: tuple[list[Any], Any],
    extras: Any,
) -> Out:
    """Packs the flattened result of a function and what it changed on the clones it was given."""
    outputs, tree = result
    objects = [output.node for output in outputs if type(output) is Opaque]
    numbers = {id(node): (True, n) for n, node in enumerate(nodes)}
    numbers |= {
        id(leaf): (False, n)
        for n, (leaf, kind) in enumerate(zip(leaves, graphdef.leaves, strict=True))
        if kind is not ARRAY_LEAF
    }
    arrays = [output for output in outputs if type(output) is not Opaque]
    after = flatten(roots)
    if _same_structure(graphdef, nodes, leaves, after) and all(id(x) in numbers for x in objects):
        now = after.leaves
        changed = tuple(
            n
            for n, (leaf, kind, value) in enumerate(zip(now, graphdef.leaves, values, strict=True))
            if not same_value(leaf if kind is ARRAY_LEAF else leaf._value, value)
        )
        spec = None
        if objects:
            spec = tuple(numbers[id(x.node)] if type(x) is Opaque else None for x in outputs)
        new_values = [
            now[n] if graphdef.leaves[n] is ARRAY_LEAF else now[n]._value for n in changed
        ]
        return Out(arrays, new_values, extras, OutDef(tree, spec, changed, None))
    update, new_values = _pack_update(graphdef, nodes, leaves, values, objects)
    spec = None
    if objects:
        order = iter(range(len(objects)))
        spec = tuple(next(order) if type(x) is Opaque else None for x in outputs)
    return Out(arrays, new_values, extras, OutDef(tree, spec, (), update))


def _same_structure(
    graphdef: GraphDef[Any], nodes: list[Any], leaves: list[Any], after: Flat
) -> bool:
    return (
        after.graphdef is graphdef
        and all(a is b for a, b in zip(nodes, after.nodes, strict=True))
        and all(
            a is b
            for a, b, kind in zip(leaves, after.leaves, graphdef.leaves, strict=True)
            if kind is not ARRAY_LEAF
        )
    )


def same_value(new: Any, old: Any) -> bool:
    """Tells whether a leaf still has its value: the very same arrays."""
    if new is old:
        return True
    if isinstance(new, jax.Array) or isinstance(old, jax.Array):
        return False
    new_leaves, new_tree = jax.tree_util.tree_flatten(new)
    old_leaves, old_tree = jax.tree_util.tree_flatten(old)
    return new_tree == old_tree and all(a is b for a, b in zip(new_leaves, old_leaves, strict=True))


def _pack_update(
    graphdef: GraphDef[Any],
    nodes: list[Any],
    leaves: list[Any],
    values: Sequence[Any],
    objects: list[Any],
) -> tuple[Update, list[Any]]:
    # Everything there was is a root, so that changes to what was detached arrive as well.
    owned = [x for x, kind in zip(leaves, graphdef.leaves, strict=True) if kind is not ARRAY_LEAF]
    after = flatten((*nodes, *owned, *objects))
    _check_own(nodes, owned, after)
    node_numbers = {id(node): n for n, node in enumerate(nodes)}
    leaf_numbers = {id(leaf): n for n, leaf in enumerate(leaves)}
    in_place = _arrays_in_place(graphdef, after, node_numbers)
    kept, new_values, numbers = [], [], []
    for new, (leaf, kind) in enumerate(zip(after.leaves, after.graphdef.leaves, strict=True)):
        number = in_place.get(new, leaf_numbers.get(id(leaf), -1))
        if number >= 0 and (graphdef.leaves[number] is ARRAY_LEAF) != (kind is ARRAY_LEAF):
            number = -1
        value = leaf if kind is ARRAY_LEAF else leaf._value
        unchanged = number >= 0 and same_value(value, values[number])
        if not unchanged:
            new_values.append(value)
        kept.append(unchanged)
        numbers.append(number)
    update = Update(
        after.graphdef,
        tuple(node_numbers.get(id(node), -1) for node in after.nodes),
        tuple(numbers),
        tuple(kept),
        len(nodes) + len(owned),
    )
    return update, new_values


def _arrays_in_place(
    graphdef: GraphDef[Any], after: Flat, node_numbers: dict[int, int]
) -> dict[int, int]:
    """Returns for each array that stands where an array stood before the number of that one.

    Arrays have no identity: what is written at a place is the new value of what was there.
    """
    before = {place: leaf for leaf, place in _array_places(graphdef)}
    found: dict[int, int] = {}
    for leaf, (node, keys) in _array_places(after.graphdef):
        place = (node_numbers.get(id(after.nodes[node]), -1), keys)
        if place in before:
            found.setdefault(leaf, before[place])
    return found


def _array_places(graphdef: GraphDef[Any]) -> Iterator[tuple[int, tuple[int, tuple[Any, ...]]]]:
    """Yields the number of each array with its place: a node, and the keys below that."""
    for number, record in enumerate(graphdef.skeleton.records):
        stack: list[tuple[tuple[Any, ...], Any]] = [((), slot) for slot in record.slots]
        while stack:
            path, (key, how, payload) = stack.pop()
            if how == FILL_LEAF and graphdef.leaves[payload] is ARRAY_LEAF:
                yield payload, (number, (*path, key))
            elif how == FILL_VALUE:
                stack.extend(((*path, key), slot) for slot in payload[1])


def _check_own(nodes: list[Any], owned: list[Any], after: Flat) -> None:
    """Raises if an object that the function closed over became part of the result."""
    level = current_level()
    known = {id(x) for x in (*nodes, *owned)}
    variables = [x for x, place in zip(after.leaves, after.places, strict=True) if place is None]
    for node in (*after.nodes, *variables):
        if id(node) in known or type(node) in (list, dict):
            continue
        if node._level is not None and node._level != level:
            error = TraceLevelError(
                f"The function returns, or makes part of an argument, a {type(node).__name__} that "
                "it closes over: the caller would get a copy, not the object itself. Pass the "
                "object as an argument, or return nnx.clone(...) of it."
            )
            error.node = node
            raise error

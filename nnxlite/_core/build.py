"""Makes objects from a GraphDef, or brings existing ones into the shape that it describes.

`build` is the inverse of `flatten`: every node and Variable comes out fresh. `assemble` is the
general form: the caller says which nodes and leaves exist already, and those are changed in
place, which is how changes made inside a transform reach the caller's own objects.
"""

import operator
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from nnxlite._core import statics
from nnxlite._core.errors import StaticValueError
from nnxlite._core.graph import DATA, NUMBERS, Bare, mark_of
from nnxlite._core.graphdef import (
    ARRAY_LEAF,
    FILL_LEAF,
    FILL_METHOD,
    FILL_NODE,
    FILL_STATIC,
    FILL_VALUE,
    GraphDef,
    Leaf,
    Record,
    Skeleton,
    Slot,
    thaw_key,
)
from nnxlite._core.kinds import (
    ARRAY,
    METHOD,
    PARTIAL,
    SET,
    STATIC,
    is_value,
    kind_of,
    rebuild_value,
    value_children,
)
from nnxlite._core.node import settle_nodes
from nnxlite._core.spots import spots_of
from nnxlite._core.trace import Level
from nnxlite._core.versions import object_changed

_set = object.__setattr__


def build(
    graphdef: GraphDef[Any],
    values: Sequence[Any],
    level: Level,
    kinds: Sequence[Leaf] | None = None,
) -> tuple[list[Any], list[Any], list[Any]]:
    """Makes fresh objects.

    Args:
      graphdef: What to make.
      values: Per leaf the raw value of a Variable, the values of a State, or an array.
      level: The trace level that the objects belong to.
      kinds: Per leaf kind and metadata, if they are others than those of the GraphDef.

    Returns:
      The roots, all nodes by number, and all leaves by number.
    """
    kinds = graphdef.leaves if kinds is None else kinds
    leaves = make_leaves(kinds, values, level)
    nodes: list[Any] = [None] * len(graphdef.skeleton.records)
    roots = assemble(graphdef.skeleton, nodes, leaves, level)
    if ARRAY_LEAF in kinds:
        arrays = [n for n, kind in enumerate(kinds) if kind is ARRAY_LEAF]
        mark_bare(graphdef.skeleton, nodes, leaves, arrays)
    return roots, nodes, leaves


def make_leaves(kinds: Sequence[Leaf], values: Sequence[Any], level: Level) -> list[Any]:
    """Makes a fresh Variable or State around each value; arrays stay as they are."""
    return [
        value if kind is ARRAY_LEAF else kind[0]._make(value, kind[1], level)
        for kind, value in zip(kinds, values, strict=True)
    ]


def assemble(
    skeleton: Skeleton,
    nodes: list[Any],
    leaves: Sequence[Any],
    level: Level,
    check: Callable[[int], None] | None = None,
    version: int = 0,
) -> list[Any]:
    """Fills the nodes as the skeleton says, and returns the roots.

    Args:
      skeleton: The structure to reach.
      nodes: Per node the existing object, or None: then it is made, and put into the list.
      leaves: Per leaf the Variable, State or array to put there.
      level: The trace level of the nodes that are made.
      check: Called with the number of each existing node that will change, before any does.
    """
    if not any(node is not None for node in nodes):
        return _assemble_fresh(skeleton, nodes, leaves, level, version)
    records = skeleton.records
    order = _filling_order(records)
    existing = [number for number in order if nodes[number] is not None]
    fresh = [number for number in order if nodes[number] is None]
    for number in fresh:
        nodes[number] = _shell(records[number], level)
    for number in fresh:
        _fill(nodes[number], records[number].slots, nodes, leaves)
    changes = []
    for number in existing:
        items = _new_items(nodes[number], records[number], nodes, leaves)
        if items is not None:
            if check is not None:
                check(number)
            changes.append((nodes[number], records[number], items))
    for node, record, items in changes:
        _replace_items(node, record, items)
    return [content(slot, nodes, leaves) for slot in skeleton.roots]


def _filling_order(records: Sequence[Record]) -> list[int]:
    """Returns the numbers of the nodes, what a value may copy before what holds the value.

    A registered pytree may copy a list or dict that it is rebuilt around, so that has to be full.
    """

    def key(number: int) -> tuple[bool, bool, int]:
        record = records[number]
        is_container = record.cls is list or record.cls is dict
        return (not is_container, any(slot[1] == FILL_VALUE for slot in record.slots), -number)

    return sorted(range(len(records)), key=key)


def mark_bare(
    skeleton: Skeleton, nodes: Sequence[Any], leaves: Sequence[Any], numbers: Iterable[int]
) -> bool:
    """Marks what is no Variable and would not flatten to the same skeleton by its type alone.

    That is a leaf such as an axis or a label, which JAX puts in the place of an array, and an
    array that stands where a shared Variable was.

    Args:
      skeleton: What the nodes were made from.
      nodes: All nodes, by number.
      leaves: All leaves, by number.
      numbers: Those that may have to be marked.

    Returns:
      Whether any had to be.
    """
    spots = spots_of(skeleton)
    bare = {
        number: Bare()
        for number in numbers
        if number in spots.shared or kind_of(leaves[number]) != ARRAY
    }
    if not bare:
        return False
    for (number, attribute, steps), leaf in spots.leaves:
        if leaf not in bare:
            continue
        node = nodes[number]
        if not (isinstance(leaves[leaf], NUMBERS) and mark_of(node, attribute) == DATA):
            marks = {**(node._marks or {}), (attribute, *steps): bare[leaf]}
            _set(node, "_marks", marks)
    return True


def _assemble_fresh(
    skeleton: Skeleton, nodes: list[Any], leaves: Sequence[Any], level: Level, version: int = 0
) -> list[Any]:
    """`assemble` where nothing exists yet, by recipes that the skeleton keeps."""
    recipes = skeleton.cache.get("recipes")
    if recipes is None:
        recipes = skeleton.cache["recipes"] = _Recipes(skeleton)
    nodes[:] = [make(cls) for make, cls in recipes.shells]
    recipes.fill(nodes, leaves, level, version)
    for number, slots in recipes.rest:
        _fill(nodes[number], slots, nodes, leaves)
    return [content(slot, nodes, leaves) for slot in skeleton.roots]


class _Recipes:
    """How the nodes of a skeleton are made: what they hold is picked from a pool, all at once.

    Attributes:
      fixed: Static values: the pool is leaves, nodes and these.
      shells: Per node, what makes it without contents, and with which argument.
      objects: Numbers of the nodes that are objects.
      marks: Their marks.
      lists: Number, and what picks the elements.
      rest: Number and slots of what is made one by one: values, bound methods, mutable statics,
        and dicts, which keep their order.
    """

    __slots__ = ("_items", "_pick", "fixed", "lists", "marks", "objects", "rest", "shells")

    def __init__(self, skeleton: Skeleton) -> None:
        self.fixed: list[Any] = []
        self.shells: list[tuple[Callable[..., Any], Any]] = []
        self.objects: list[int] = []
        self.marks: list[dict[Hashable, Any] | None] = []
        self.lists: list[tuple[int, Any]] = []
        self.rest: list[tuple[int, tuple[Slot, ...]]] = []
        items: list[dict[Hashable, int]] = []
        for number, record in enumerate(skeleton.records):
            self._add(number, record, skeleton, items)
        place = {number: n for n, number in enumerate(_filling_order(skeleton.records))}
        self.rest.sort(key=lambda each: place[each[0]])
        # JAX builds dictionaries in C++, all in one call: a third of the time of `dict(zip(...))`.
        indices, self._items = jax.tree_util.tree_flatten(items)
        self._pick = _picker(indices)

    def fill(self, nodes: list[Any], leaves: Sequence[Any], level: Level, version: int) -> None:
        """Gives the nodes what they hold, but for `rest`."""
        pool = [*leaves, *nodes, *self.fixed]
        items = jax.tree_util.tree_unflatten(self._items, self._pick(pool))
        marks = [marks and dict(marks) for marks in self.marks]
        settle_nodes([nodes[n] for n in self.objects], version, level, marks, items)
        for number, pick in self.lists:
            nodes[number].extend(pick(pool))

    def _add(
        self, number: int, record: Record, skeleton: Skeleton, items: list[dict[Hashable, int]]
    ) -> None:
        indices = [self._index(slot, skeleton) for slot in record.slots]
        if record.cls is list or record.cls is dict:
            self.shells.append((_called, record.cls))
            known = [index for index in indices if index is not None]
            if record.cls is list and known == indices:
                self.lists.append((number, _picker(known)))
            elif record.slots:
                self.rest.append((number, record.slots))
            return
        self.shells.append((object.__new__, record.cls))
        self.objects.append(number)
        self.marks.append(dict(record.marks) or None)
        pairs = list(zip(record.slots, indices, strict=True))
        items.append({thaw_key(slot[0]): index for slot, index in pairs if index is not None})
        rest = tuple(slot for slot, index in pairs if index is None)
        if rest:
            self.rest.append((number, rest))

    def _index(self, slot: Slot, skeleton: Skeleton) -> int | None:
        """Returns where the content of a slot is in the pool, None if it is made anew each time."""
        _, how, payload = slot
        if how == FILL_LEAF:
            return payload
        if how == FILL_NODE:
            return skeleton.num_leaves + payload
        if how == FILL_STATIC and payload.value is payload.value:
            self.fixed.append(payload.value)
            return skeleton.num_leaves + len(skeleton.records) + len(self.fixed) - 1
        return None


def _called(cls: type) -> Any:
    return cls()


def _picker(indices: Sequence[int]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    if not indices:
        return lambda pool: ()
    if len(indices) == 1:
        (only,) = indices
        return lambda pool: (pool[only],)
    return operator.itemgetter(*indices)


def content(slot: Slot, nodes: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """Returns what a slot holds."""
    _, how, payload = slot
    if how == FILL_LEAF:
        return leaves[payload]
    if how == FILL_STATIC:
        return payload.value  # a set, which is mutable, comes as a copy
    if how == FILL_NODE:
        return nodes[payload]
    if how == FILL_METHOD:
        number, function = payload
        return types.MethodType(function.value, nodes[number])
    how, slots = payload
    return rebuild_value(how, [content(child, nodes, leaves) for child in slots])


def _shell(record: Record, level: Level) -> Any:
    if record.cls is list:
        return []
    if record.cls is dict:
        return {}
    return record.cls._node_new(level, dict(record.marks) or None)


def _fill(node: Any, slots: Iterable[Slot], nodes: Sequence[Any], leaves: Sequence[Any]) -> None:
    if type(node) is list:
        node.extend([content(slot, nodes, leaves) for slot in slots])
        return
    items = node if type(node) is dict else node._node_items()
    for slot in slots:
        how = slot[1]
        key = slot[0] if type(slot[0]) is str else thaw_key(slot[0])
        if how == FILL_LEAF:
            items[key] = leaves[slot[2]]
        elif how == FILL_NODE:
            items[key] = nodes[slot[2]]
        else:
            items[key] = content(slot, nodes, leaves)


def _new_items(
    node: Any, record: Record, nodes: Sequence[Any], leaves: Sequence[Any]
) -> dict[Any, Any] | None:
    """Returns what an existing node has to hold, or None if it does already."""
    before = _items_of(node)
    after = {
        thaw_key(slot[0]): _kept_or_new(before.get(thaw_key(slot[0])), slot, nodes, leaves)
        for slot in record.slots
    }
    if (
        before.keys() == after.keys()
        and all(before[key] is after[key] for key in after)
        and _marks_of(node) == (dict(record.marks) or None)
    ):
        return None
    return after


def _items_of(node: Any) -> dict[Any, Any]:
    if type(node) is list:
        return dict(enumerate(node))
    return node if type(node) is dict else node._node_items()


def _marks_of(node: Any) -> Any:
    return None if type(node) in (list, dict) else node._marks or None


def _replace_items(node: Any, record: Record, after: dict[Any, Any]) -> None:
    if type(node) is list:
        node[:] = after.values()
        return
    items = _items_of(node)
    for key in [key for key in items if key not in after]:
        del items[key]
    items.update(after)
    if type(node) is not dict:
        _set(node, "_marks", dict(record.marks) or None)
        object_changed(node)


def _kept_or_new(old: Any, slot: Slot, nodes: Sequence[Any], leaves: Sequence[Any]) -> Any:
    """Returns the old content where it is as good as the new one, so that identities last."""
    how, payload = slot[1], slot[2]
    if how == FILL_STATIC:
        try:
            return old if statics.static(old) is payload else payload.value
        except StaticValueError:
            return payload.value
    new = content(slot, nodes, leaves)
    return old if how in (FILL_METHOD, FILL_VALUE) and _same_value(old, new) else new


def _same_value(old: Any, new: Any) -> bool:
    """Tells whether two values, rebuilt at each use, hold the very same things."""
    if old is new:
        return True
    kind = kind_of(new)
    if type(old) is not type(new) or is_value(old) != is_value(new):
        return False
    if kind == METHOD:
        return old.__self__ is new.__self__ and old.__func__ is new.__func__
    if is_value(new):
        old_how, _, old_children = value_children(old)
        new_how, _, new_children = value_children(new)
        return (
            old_how == new_how
            and len(old_children) == len(new_children)
            and all(map(_same_value, old_children, new_children))
        )
    return kind in (STATIC, SET, PARTIAL) and statics.static(old) is statics.static(new)

"""Objects as JAX pytrees: one node per root, sharing and cycles kept inside.

A root flattens to the nested tree of its leaves, each once, at the place where it was first met;
the levels between root and leaves are `Level` nodes with JAX's usual key entries. Classes, static
values, sharing and cycles go into the auxiliary data: the `Skeleton`, interned and compared by
identity. Kinds and metadata are not in it, so trees with axes or shardings in the place of
Variables match.

Both directions run while JAX holds placeholders instead of arrays: nothing here validates,
converts, calls hooks or `__init__`, or looks at a value.
"""

import operator
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from nnxlite._core.build import assemble, mark_bare
from nnxlite._core.graph import Place
from nnxlite._core.graphdef import (
    FILL_LEAF,
    FILL_METHOD,
    FILL_NODE,
    FILL_VALUE,
    Skeleton,
    Slot,
    thaw_key,
)
from nnxlite._core.intern import InternTable
from nnxlite._core.kinds import STATE, VARIABLE, Foreign, kind_of
from nnxlite._core.plan import ArraySlot, Validity, Watch, follow, plan_of
from nnxlite._core.spots import spots_of
from nnxlite._core.trace import FLATTENING, OPAQUE, Opaque, current_level
from nnxlite._core.variable import Variable
from nnxlite._core.versions import EPOCH

_set = object.__setattr__


class Entries:
    """The key entries of one level; interned, compared by identity."""

    __slots__ = ("__weakref__", "key")

    key: tuple[Any, ...]

    @staticmethod
    def of(key: tuple[Any, ...]) -> "Entries":
        """Returns the one `Entries` with these key entries."""
        found = _ENTRIES.get(key)
        if found is None:
            new = Entries()
            new.key = key
            found = _ENTRIES.add(new)
        return found

    def __reduce__(self) -> Any:
        return Entries.of, (self.key,)

    def __repr__(self) -> str:
        return f"<{len(self.key)} children>"


_ENTRIES: InternTable[Entries] = InternTable()


class Level:
    """One level of a flattened object: the children of an object or container below the root."""

    __slots__ = ("children", "entries")

    entries: Entries
    children: Sequence[Any]


def _level(entries: Entries, children: Any) -> Level:
    level = _new(Level)  # no `__init__`: JAX makes one per level
    level.entries = entries
    level.children = children
    return level


_new = object.__new__

jax.tree_util.register_pytree_with_keys(
    Level,
    lambda level: (zip(level.entries.key, level.children, strict=True), level.entries),
    _level,
    operator.attrgetter("children", "entries"),
)


class Layout(NamedTuple):
    """The shape of a flattened object.

    Attributes:
      entries: The key entries of its children.
      children: Per child a leaf number, or the layout of a level below.
    """

    entries: Entries
    children: list[Any]


def layout_of(skeleton: Skeleton) -> Layout:
    """Returns the layout of the tree below the root of a skeleton."""
    found = skeleton.cache.get("layout")
    if found is None:
        found = skeleton.cache["layout"] = _LayoutWalk(skeleton).root()
    return found


class _LayoutWalk:
    def __init__(self, skeleton: Skeleton) -> None:
        self.skeleton = skeleton
        self.seen_nodes: set[int] = set()
        self.seen_leaves: set[int] = set()

    def root(self) -> Layout:
        ((_, _, number),) = self.skeleton.roots
        return self.node(number)

    def node(self, number: int) -> Layout:
        self.seen_nodes.add(number)
        record = self.skeleton.records[number]
        return self.level(record.cls, record.slots)

    def level(self, how: Any, slots: tuple[Slot, ...]) -> Layout:
        entries, children = [], []
        for index, (key, fill, payload) in enumerate(slots):
            child: Any = None
            if fill == FILL_LEAF:
                if payload not in self.seen_leaves:
                    self.seen_leaves.add(payload)
                    child = payload
            elif fill == FILL_VALUE:
                child = self.level(payload[0], payload[1])
            elif fill in (FILL_NODE, FILL_METHOD):
                number = payload if fill == FILL_NODE else payload[0]
                if number not in self.seen_nodes:
                    child = self.node(number)
            if child is not None and (type(child) is int or child.children):
                entries.append(_entry(how, index, thaw_key(key)))
                children.append(child)
        return Layout(Entries.of(tuple(entries)), children)


def _entry(how: Any, index: int, key: Hashable) -> Any:
    """Returns JAX's key entry for a child of a node or value."""
    if type(how) is Foreign:
        return how.entries[index]
    if how is dict:
        return DictKey(key)
    if isinstance(key, int):
        return getattr(how, "_int_entry", SequenceKey)(key)
    return GetAttrKey(key)


def _children(layout: Layout, leaves: Sequence[Any]) -> list[Any]:
    return [
        leaves[child] if type(child) is int else _level(child.entries, _children(child, leaves))
        for child in layout.children
    ]


def _leaves_of(skeleton: Skeleton, children: tuple[Any, ...]) -> tuple[list[Any], bool]:
    """Returns the leaves below the children of the root, and whether each level is there.

    What replaces a whole level stands for all leaves below.
    """
    tree, numbers = _tree_of(skeleton)
    try:
        found, whole = tree.flatten_up_to(children), True  # in C++: a fifth of the time of a walk
    except ValueError:
        found, whole = [None] * len(numbers), False
        _spread(layout_of(skeleton), children, found)
        return found, whole
    leaves: list[Any] = [None] * len(numbers)
    for number, leaf in zip(numbers, found, strict=True):
        leaves[number] = leaf
    return leaves, whole


def _tree_of(skeleton: Skeleton) -> tuple[Any, list[int]]:
    """Returns the tree of the children of a root, and the numbers of its leaves, in order."""
    found = skeleton.cache.get("tree")
    if found is None:
        layout = layout_of(skeleton)
        numbers, tree = jax.tree_util.tree_flatten(
            tuple(_children(layout, range(skeleton.num_leaves)))
        )
        found = skeleton.cache["tree"] = tree, numbers
    return found


def _spread(layout: Layout, children: Iterable[Any], leaves: list[Any]) -> None:
    for place, child in zip(layout.children, children, strict=True):
        if type(place) is int:
            leaves[place] = child
        else:
            below = child.children if type(child) is Level else [child] * len(place.children)
            _spread(place, below, leaves)


class Flattened(Validity):
    """The flattened form of one object, good until its structure changes.

    It is kept on the object, and keeps the Variables that it met alive as the object itself does;
    one that is taken out of a part of the object may live until the object is flattened again. Bare
    arrays change without a change of structure: they are read anew at each use, and not kept.
    """

    __slots__ = ("_arrays", "_children", "entries", "skeleton")

    def __init__(
        self,
        skeleton: Skeleton,
        leaves: list[Any],
        arrays: dict[int, ArraySlot],
        validity: tuple[Any, Any, Any, int],
        children: list[Any] | None = None,
    ) -> None:
        super().__init__(*validity)
        layout = layout_of(skeleton)
        self.skeleton, self.entries = skeleton, layout.entries.key
        self._children = _children(layout, leaves) if children is None else children
        self._arrays = _arrays(layout, arrays) if arrays else []

    def children(self) -> list[Any]:
        """Returns the children of the root."""
        return _filled(self._children, self._arrays) if self._arrays else self._children


# Where the bare arrays are among children: index, and the array's slot or where they are below.
_ArrayTree = list[tuple[int, Any]]


def _arrays(layout: Layout, arrays: dict[int, ArraySlot]) -> _ArrayTree:
    pairs = enumerate(layout.children)
    found = [
        (index, arrays.get(child) if type(child) is int else _arrays(child, arrays))
        for index, child in pairs
    ]
    return [(index, what) for index, what in found if what]


def _filled(children: list[Any], arrays: _ArrayTree) -> list[Any]:
    """Copies the levels that hold arrays, with the arrays in them."""
    filled = list(children)
    for index, what in arrays:
        if type(what) is ArraySlot:
            filled[index] = what._value
        else:
            level = children[index]
            filled[index] = _level(level.entries, _filled(level.children, what))
    return filled


def _flattened(root: Any) -> Flattened:
    kept = root._tree
    if kept is None or not kept.is_current():
        plan = plan_of(root)
        arrays = {n: each for n, each in enumerate(plan.handles) if isinstance(each, ArraySlot)}
        leaves = [None if n in arrays else each() for n, each in enumerate(plan.handles)]
        validity = plan.versioned, plan.versions, plan.watches, plan.epoch
        kept = Flattened(plan.graphdef.skeleton, leaves, arrays, validity)
        _set(root, "_tree", kept)
    return kept


def _flatten(root: Any) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        return (Opaque(root),), OPAQUE
    flattened = _flattened(root)
    return flattened.children(), flattened.skeleton


def _flatten_with_keys(root: Any) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        return ((GetAttrKey("node"), Opaque(root)),), OPAQUE
    flattened = _flattened(root)
    pairs = zip(flattened.entries, flattened.children(), strict=True)
    return list(pairs), flattened.skeleton


def _unflatten(skeleton: Any, children: Iterable[Any]) -> Any:
    if skeleton is OPAQUE:
        (child,) = children
        return child.node if type(child) is Opaque else child
    level, epoch = current_level(), EPOCH.now
    leaves, whole = _leaves_of(skeleton, tuple(children))
    nodes: list[Any] = [None] * len(skeleton.records)
    # They are planned below: JAX flattens what it just unflattened, in each trace.
    (root,) = assemble(skeleton, nodes, leaves, level, version=1)
    arrays: dict[int, ArraySlot] = {}
    if all([isinstance(leaf, Variable) for leaf in leaves]):  # noqa: C419  # a third faster
        for leaf in leaves:
            if leaf._level is None:
                leaf._level = level
    else:
        others = _settle(leaves, level)
        if mark_bare(skeleton, nodes, leaves, others):
            return root
        arrays = _slots(skeleton, nodes, others)
        leaves = [None if n in arrays else leaf for n, leaf in enumerate(leaves)]
    versioned = [
        weakref.ref(node) for node in nodes if type(node) is not list and type(node) is not dict
    ]
    watches = []
    for number, attribute, steps in spots_of(skeleton).watched:
        place = Place(nodes[number], attribute, steps)
        watches.append(Watch(place, follow(*place)))
    validity = versioned, [1] * len(versioned), watches, epoch
    kept = list(children) if whole and not arrays else None
    _set(root, "_tree", Flattened(skeleton, leaves, arrays, validity, kept))
    return root


def _settle(leaves: list[Any], level: Any) -> list[int]:
    """Gives pending Variables their level; returns the numbers of leaves without identity."""
    others = []
    for number, leaf in enumerate(leaves):
        kind = kind_of(leaf)
        if kind == VARIABLE:
            if leaf._level is None:
                leaf._level = level
        elif kind != STATE:
            others.append(number)
    return others


def _slots(skeleton: Skeleton, nodes: list[Any], numbers: list[int]) -> dict[int, ArraySlot]:
    """Returns, by leaf number, what reads these leaves where they hang."""
    spots = {leaf: spot for spot, leaf in reversed(spots_of(skeleton).leaves)}  # the first of each
    places = {n: Place(nodes[spots[n][0]], *spots[n][1:]) for n in numbers}
    return {number: ArraySlot(place) for number, place in places.items()}


def register_object(cls: type) -> None:
    """Registers an object class with JAX."""
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)

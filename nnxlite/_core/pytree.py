"""Objects as JAX pytrees: one node per root, sharing and cycles kept inside.

A root flattens to the nested tree of its leaves, each once, at the place where it was first met;
the levels between root and leaves are `Level` nodes with JAX's usual key entries. Classes, static
values, sharing and cycles go into the auxiliary data: the `Skeleton`, interned and compared by
identity. Kinds and metadata are not in it, so trees with axes or shardings in the place of
Variables match.

Both directions run while JAX holds placeholders instead of arrays: nothing here validates, converts,
calls hooks or `__init__`, or looks at a value.
"""

import threading
import weakref
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import jax
from jax.tree_util import DictKey, GetAttrKey, SequenceKey

from nnxlite._core.build import assemble
from nnxlite._core.graph import (
    ARRAY,
    ARRAY_LEAF,
    BARE,
    FILL_LEAF,
    FILL_METHOD,
    FILL_NODE,
    FILL_VALUE,
    STATE,
    VARIABLE,
    Place,
    Skeleton,
    Slot,
    kind_of,
    thaw_key,
)
from nnxlite._core.plan import Validity, follow, plan_of
from nnxlite._core.trace import FLATTENING, OPAQUE, Opaque, current_level
from nnxlite._core.versions import EPOCH

_LOCK = threading.Lock()
_ENTRIES: "weakref.WeakValueDictionary[Any, Entries]" = weakref.WeakValueDictionary()


class Entries:
    """The key entries of one level; interned, compared by identity."""

    __slots__ = ("__weakref__", "entries")

    entries: tuple[Any, ...]

    def __new__(cls, entries: tuple[Any, ...]) -> "Entries":
        with _LOCK:
            found = _ENTRIES.get(entries)
            if found is None:
                found = object.__new__(cls)
                found.entries = entries
                _ENTRIES[entries] = found
            return found

    def __reduce__(self) -> Any:
        return Entries, (self.entries,)

    def __repr__(self) -> str:
        return f"<{len(self.entries)} children>"


class Level:
    """One level of a flattened object: the children of an object or container below the root."""

    __slots__ = ("children", "entries")

    def __init__(self, entries: Entries, children: list[Any]) -> None:
        self.entries, self.children = entries, children


jax.tree_util.register_pytree_with_keys(
    Level,
    lambda level: (zip(level.entries.entries, level.children, strict=True), level.entries),
    lambda entries, children: Level(entries, list(children)),
    lambda level: (level.children, level.entries),
)

# The shape of a flattened object: its key entries, and per child a leaf number or the layout below.
Layout = tuple[Entries, list[Any]]


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

    def level(self, cls: Any, slots: tuple[Slot, ...]) -> Layout:
        entries, children = [], []
        for key, how, payload in slots:
            child: Any = None
            if how == FILL_LEAF:
                if payload not in self.seen_leaves:
                    self.seen_leaves.add(payload)
                    child = payload
            elif how == FILL_VALUE:
                child = self.level(payload[0], payload[1])
            elif how in (FILL_NODE, FILL_METHOD):
                number = payload if how == FILL_NODE else payload[0]
                if number not in self.seen_nodes:
                    child = self.node(number)
            if child is not None and (type(child) is int or child[1]):
                entries.append(_entry(cls, thaw_key(key)))
                children.append(child)
        return Entries(tuple(entries)), children


def _entry(cls: Any, key: Hashable) -> Any:
    style = getattr(cls, "_key_entry", None)
    if style is None:
        if cls is dict:
            style = DictKey
        elif isinstance(key, int):
            style = SequenceKey
        else:
            style = GetAttrKey
    return style(key)


def _children(layout: Layout, leaves: Sequence[Any]) -> list[Any]:
    return [
        leaves[child] if type(child) is int else Level(child[0], _children(child, leaves))
        for child in layout[1]
    ]


def _spread(layout: Layout, children: Iterable[Any], leaves: list[Any]) -> None:
    """Puts the children where they belong; one that replaces a whole level stands for all below."""
    for place, child in zip(layout[1], children, strict=True):
        if type(place) is int:
            leaves[place] = child
        else:
            below = child.children if type(child) is Level else [child] * len(place[1])
            _spread(place, below, leaves)


class TreeCache(Validity):
    """The flattened form of one object, kept on it until its structure changes."""

    __slots__ = ("children", "has_arrays", "layout", "skeleton")

    def __init__(
        self, skeleton: Skeleton, leaves: list[Any], has_arrays: bool, validity: Validity
    ) -> None:
        self.versioned, self.versions = validity.versioned, validity.versions
        self.watches, self.epoch = validity.watches, validity.epoch
        self.skeleton, self.layout = skeleton, layout_of(skeleton)
        self.has_arrays = has_arrays
        self.children = _children(self.layout, leaves)


def _cache_of(root: Any) -> TreeCache:
    cache = root._tree
    if cache is None or cache.has_arrays or not cache.is_current():
        plan = plan_of(root)
        kinds = plan.graphdef.leaves
        leaves = [
            handle()._value if kind is ARRAY_LEAF else handle()
            for handle, kind in zip(plan.handles, kinds, strict=True)
        ]
        cache = TreeCache(plan.graphdef.skeleton, leaves, ARRAY_LEAF in kinds, plan)
        root._tree = cache
    return cache


def _flatten(root: Any) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        return (Opaque(root),), OPAQUE
    cache = _cache_of(root)
    return cache.children, cache.skeleton


def _flatten_with_keys(root: Any) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        return ((GetAttrKey("node"), Opaque(root)),), OPAQUE
    cache = _cache_of(root)
    return list(zip(cache.layout[0].entries, cache.children, strict=True)), cache.skeleton


def _unflatten(skeleton: Any, children: Iterable[Any]) -> Any:
    if skeleton is OPAQUE:
        (child,) = children
        return child.node if type(child) is Opaque else child
    level = current_level()
    epoch = EPOCH.now
    leaves: list[Any] = [None] * skeleton.num_leaves
    _spread(layout_of(skeleton), children, leaves)
    nodes: list[Any] = [None] * len(skeleton.records)
    (root,) = assemble(skeleton, nodes, leaves, level)
    has_arrays, bare = False, []
    for number, leaf in enumerate(leaves):
        kind = kind_of(leaf)
        if kind == VARIABLE or kind == STATE:
            if leaf._level is None:
                leaf._level = level
        elif kind == ARRAY:
            has_arrays = True
        else:
            has_arrays = True
            bare.append(number)
    if bare:
        _mark_bare(skeleton, nodes, set(bare))
    # JAX flattens what it just unflattened, in each trace: keep the work.
    objects = [node for node in nodes if type(node) not in (list, dict)]
    for node in objects:
        node._version = 1
    versioned = [weakref.ref(node) for node in objects]
    watched = [
        (place, follow(*place))
        for place in (
            Place(nodes[number], attribute, steps)
            for number, attribute, steps in _watch_spots(skeleton)
        )
    ]
    validity = Validity(versioned, watched, epoch)
    root._tree = TreeCache(skeleton, leaves, has_arrays and not bare, validity)
    return root


def _mark_bare(skeleton: Skeleton, nodes: list[Any], bare: set[int]) -> None:
    """Notes where JAX put something that is no data by its type, so that it flattens as before."""
    for node, record in zip(nodes, skeleton.records, strict=True):
        if record.cls in (list, dict):
            continue
        for key, how, payload in record.slots:
            if how == FILL_LEAF and payload in bare:
                node._marks = {**(node._marks or {}), key: BARE}


def _watch_spots(skeleton: Skeleton) -> list[tuple[int, Any, tuple[Any, ...]]]:
    """Lists where mutable containers hang: object number, attribute, steps; as `flatten` finds them."""
    found = skeleton.cache.get("spots")
    if found is None:
        found = []
        seen: set[int] = set()
        for number, record in enumerate(skeleton.records):
            if record.cls not in (list, dict):
                for slot in record.slots:
                    _spots_below(skeleton, slot, number, slot[0], (), seen, found)
        skeleton.cache["spots"] = found
    return found


def _spots_below(
    skeleton: Skeleton,
    slot: Slot,
    holder: int,
    attribute: Any,
    steps: tuple[Any, ...],
    seen: set[int],
    found: list[Any],
) -> None:
    _, how, payload = slot
    if how == FILL_VALUE:
        kind, slots = payload
        if steps or not (isinstance(kind, type) and issubclass(kind, tuple)):
            found.append((holder, attribute, steps))
        for index, child in enumerate(slots):
            _spots_below(skeleton, child, holder, attribute, (*steps, index), seen, found)
    elif how == FILL_NODE and payload not in seen:
        record = skeleton.records[payload]
        if record.cls in (list, dict):
            seen.add(payload)
            found.append((holder, attribute, steps))
            for child in record.slots:
                inner = (*steps, thaw_key(child[0]))
                _spots_below(skeleton, child, holder, attribute, inner, seen, found)
    elif how == 0 and type(payload.value) is set:
        found.append((holder, attribute, steps))


def register_object(cls: type) -> None:
    """Registers an object class with JAX."""
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflatten, _flatten)

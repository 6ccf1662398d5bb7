"""The one walk that takes an object graph apart.

`flatten` goes through everything below its roots and numbers nodes and leaves in the order of
first meeting, children by sorted key. It gives a `GraphDef` of what it saw, and the live nodes
and leaves. Keeping such a flattening for the next call is `plan.py`.
"""

import types
from collections.abc import Hashable, Iterable
from typing import Any, ClassVar, NamedTuple

import numpy as np

from nnxlite._core import statics
from nnxlite._core.errors import Path, StaticValueError, StructureError, format_path
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
)
from nnxlite._core.kinds import (
    ARRAY,
    DICT,
    LIST,
    METHOD,
    OBJECT,
    SET,
    STATE,
    STATIC,
    TUPLE,
    VARIABLE,
    Foreign,
    has_data,
    is_graph_method,
    is_value,
    kind_of,
    value_children,
)
from nnxlite._core.statics import Static
from nnxlite._core.trace import Level, current_level

# What the user said of an attribute.
AUTO, DATA, HELD_STATIC = range(3)

_OWNED = (VARIABLE, STATE)
_CONTAINERS = (LIST, DICT)
_SCALARS = frozenset((str, int, bool, float, type(None)))
NUMBERS = (bool, int, float, complex, np.generic)
_set = object.__setattr__


class Bare:
    """The mark of a place where JAX put something that is no leaf by its type, such as an axis.

    It counts as a leaf there, and places with the same mark hold one leaf. In the marks of an
    object it stands under a tuple: the attribute, then steps through what it holds.
    """

    __slots__ = ()


Mark = int | Bare


class Place(NamedTuple):
    """Where something hangs: an attribute of an object, then steps through what it holds."""

    holder: Any
    attribute: Hashable
    steps: tuple[Hashable, ...]

    def step(self, key: Hashable) -> "Place":
        return Place(self.holder, self.attribute, (*self.steps, key))


class Roots:
    """Stands in for an object where plain containers or values are flattened on their own."""

    __slots__ = ("__weakref__", "_level", "items")

    _marks = None  # nothing was said of them
    _class_marks: ClassVar[dict[str, int]] = {}

    def __init__(self, items: dict[Hashable, Any]) -> None:
        self.items = items
        self._level: Level = current_level()

    def _node_items(self) -> dict[Hashable, Any]:
        return self.items


class Flat(NamedTuple):
    """An object graph taken apart. Holds the live objects: use it and let it go."""

    graphdef: GraphDef[Any]
    nodes: list[Any]  # objects, lists and dicts, by node number
    leaves: list[Any]  # Variables and States themselves, arrays by value; by leaf number
    places: list[Place | None]  # of array leaves; None for the others
    echoes: list[tuple[int, Place]]  # more places of array leaves that are marked as one
    watched: list[tuple[Place, Any]]  # what is mutable and has no version, with where it hangs
    node_versions: list[int]  # of the objects among the nodes, as they were when met
    leaf_versions: list[int]  # of the Variables and States among the leaves
    roots: Roots


def flatten(roots: tuple[Any, ...]) -> Flat:
    """Takes the object graph below `roots` apart; sharing is seen across all of them.

    Raises:
      StaticValueError: A static value cannot be keyed; the message has its path.
      StructureError: A dict that holds data mixes kinds of keys, or a set holds data.
    """
    walk = _Walk()
    holder = Roots(dict(enumerate(roots)))
    alone = len(roots) == 1
    slots = tuple(
        (number, *walk.fill(root, AUTO, () if alone else (number,), Place(holder, number, ())))
        for number, root in enumerate(roots)
    )
    skeleton = Skeleton.of(tuple(walk.records), slots, len(walk.leaves))
    graphdef = GraphDef.of(skeleton, tuple(walk.kinds))
    return Flat(
        graphdef,
        walk.nodes,
        walk.leaves,
        walk.places,
        walk.echoes,
        walk.watched,
        walk.node_versions,
        walk.leaf_versions,
        holder,
    )


def mark_of(holder: Any, attribute: Hashable) -> Mark:
    """Returns what was said of an attribute: by value, or by its class."""
    marks = holder._marks
    if marks:
        bare = marks.get((attribute,))
        if bare is not None:
            return bare
        if attribute in marks:
            return marks[attribute]
    return type(holder)._class_marks.get(attribute, AUTO)


class _Walk:
    """The state of one flattening."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.nodes: list[Any] = []
        self.leaves: list[Any] = []
        self.kinds: list[Leaf] = []
        self.places: list[Place | None] = []
        self.echoes: list[tuple[int, Place]] = []
        self.watched: list[tuple[Place, Any]] = []
        self.node_versions: list[int] = []
        self.leaf_versions: list[int] = []
        self.node_numbers: dict[int, int] = {}
        self.leaf_numbers: dict[int, int] = {}
        self.functions: dict[int, tuple[Any, Static]] = {}
        self.open: list[Any] = []  # values under way, from the last node on

    def fill(self, value: Any, mark: Mark, path: Path, place: Place) -> tuple[int, Any]:
        """Says how a slot that holds `value` is filled, and walks on below it."""
        kind = kind_of(value)
        if kind in _OWNED:
            if mark == HELD_STATIC:
                raise _static_holds_data(value, path)
            return FILL_LEAF, self.owned_leaf(value)
        if type(mark) is Bare:
            return FILL_LEAF, self.bare_leaf(value, mark, place)
        if kind == OBJECT:
            if mark == HELD_STATIC:
                raise _static_holds_data(value, path)
            return FILL_NODE, self.node(value, path)
        if kind == STATIC:
            if mark == DATA and isinstance(value, NUMBERS):
                return FILL_LEAF, self.array_leaf(value, place)
            return FILL_STATIC, self.static(value, path, place)
        if kind == ARRAY:
            if mark == HELD_STATIC:
                return FILL_STATIC, statics.static_by_identity(value, _Written(path))
            return FILL_LEAF, self.array_leaf(value, place)
        if kind in _CONTAINERS:
            return FILL_NODE, self.container(value, kind, mark, path, place)
        if kind == SET:
            return FILL_STATIC, self.static_set(value, path, place)
        if kind == METHOD and is_graph_method(value):
            function = self.static(value.__func__, path, place)
            return FILL_METHOD, (self.node(value.__self__, path), function)
        if is_value(value):
            return FILL_VALUE, self.value(value, kind, mark, path, place)
        return FILL_STATIC, self.static(value, path, place)

    def owned_leaf(self, leaf: Any) -> int:
        number = self.leaf_numbers.get(id(leaf))
        if number is None:
            number = self.leaf_numbers[id(leaf)] = len(self.leaves)
            if not leaf._version:
                leaf._version = 1
            self.leaf_versions.append(leaf._version)  # first: a change from now on is noticed
            self.leaves.append(leaf)
            self.kinds.append((type(leaf), leaf._meta))
            self.places.append(None)
        return number

    def array_leaf(self, value: Any, place: Place) -> int:
        self.leaves.append(value)
        self.kinds.append(ARRAY_LEAF)
        self.places.append(place)
        return len(self.leaves) - 1

    def bare_leaf(self, value: Any, mark: Bare, place: Place) -> int:
        number = self.leaf_numbers.get(id(mark))
        if number is None:
            number = self.leaf_numbers[id(mark)] = self.array_leaf(value, place)
        else:
            self.echoes.append((number, place))
        return number

    def static(self, value: Any, path: Path, place: Place) -> Static:
        if type(value) is types.FunctionType:
            # Keying a function costs microseconds, and layers share theirs.
            found = self.functions.get(id(value))
            if found is None:
                found = value, statics.static(value, _Written(path))
                self.functions[id(value)] = found
            return found[1]
        fixed = statics.static(value, _Written(path))
        if fixed._mutable:
            self.watched.append((place, value))
        return fixed

    def new_node(self, node: Any) -> int:
        number = self.node_numbers[id(node)] = len(self.nodes)
        self.nodes.append(node)
        self.records.append(None)
        return number

    def node(self, node: Any, path: Path) -> int:
        number = self.node_numbers.get(id(node))
        if number is not None:
            return number
        number = self.new_node(node)
        if not node._version:
            _set(node, "_version", 1)  # past what the class of the user does in `__setattr__`
        self.node_versions.append(node._version)  # first: a change from now on is noticed
        items = node._node_items()
        above, self.open = self.open, []
        marked = node._marks or type(node)._class_marks
        slots = []
        for key in sorted(items):
            value = items[key]
            mark = mark_of(node, key) if marked else AUTO
            if mark == AUTO and type(value) in _SCALARS:  # as most are: straight to the point
                slots.append((key, FILL_STATIC, statics.static(value)))
                continue
            slots.append((key, *self.fill(value, mark, (*path, key), Place(node, key, ()))))
        self.records[number] = Record(type(node), _said(node._marks), tuple(slots))
        self.open = above
        return number

    def container(self, value: Any, kind: int, mark: Mark, path: Path, place: Place) -> int:
        number = self.node_numbers.get(id(value))
        if number is not None:
            return number
        number = self.new_node(value)
        self.watched.append((place, value))
        keys: Iterable[Any] = range(len(value))
        if kind == DICT:
            if mark != HELD_STATIC and not _are_regular(value):
                _check_data_keys(value, value.values(), path)
            keys = sorted_keys(value)
        above, self.open = self.open, []
        bare = place.holder._marks
        slots = []
        for key in keys:
            inner = place.step(key)
            fill = self.fill(value[key], _mark_at(bare, inner, mark), (*path, key), inner)
            slots.append((_frozen_key(key, path) if kind == DICT else key, *fill))
        self.records[number] = Record(type(value), (), tuple(slots))
        self.open = above
        return number

    def value(self, value: Any, kind: int, mark: Mark, path: Path, place: Place) -> tuple[Any, Any]:
        how, keys, children = value_children(value)
        if any(value is each for each in self.open):
            raise StructureError(
                f"{format_path(path)} is one of the {type(value).__name__}s that it is in. "
                "Registered pytrees are values, which cannot hold themselves: use an object, such "
                "as an nnx.Pytree."
            )
        if type(how) is Foreign and not _are_regular(keys):
            _check_data_keys(keys, children, path)
        self.open.append(value)
        if kind != TUPLE or place.steps:
            # A tuple that is an attribute cannot change unseen; one in a list, or a foreign
            # object that may be mutable, has to be looked at again.
            self.watched.append((place, value))
        bare = place.holder._marks
        slots = []
        for index, (key, child) in enumerate(zip(keys, children, strict=True)):
            inner = place.step(index)
            fill = self.fill(child, _mark_at(bare, inner, mark), (*path, key), inner)
            slots.append((_frozen_key(key, path), *fill))
        self.open.pop()
        return how, tuple(slots)

    def static_set(self, value: set[Any], path: Path, place: Place) -> Static:
        for element in value:
            if has_data(element):
                raise StructureError(
                    f"{format_path(path)} is a set that holds a {type(element).__name__}: a set "
                    "has no order, so its state would have no stable paths. Use a list or a dict."
                )
        return self.static(value, path, place)


class _Written:
    """A path that is written only if a message needs it."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return format_path(self.path)


def _said(marks: dict[Hashable, Mark] | None) -> tuple[tuple[Hashable, int], ...]:
    if not marks:
        return ()
    said = [(key, mark) for key, mark in marks.items() if type(mark) is int]
    return tuple(sorted(said, key=repr))


def _mark_at(marks: dict[Hashable, Mark] | None, place: Place, mark: Mark) -> Mark:
    if not marks:
        return mark
    return marks.get((place.attribute, *place.steps), mark)


def _static_holds_data(value: Any, path: Path) -> StaticValueError:
    return StaticValueError(
        f"{format_path(path)} is marked static but holds a {type(value).__name__}, whose state "
        "would be frozen into every trace. Leave the mark out, or use nnx.data."
    )


def sorted_keys(mapping: dict[Any, Any]) -> list[Any]:
    """Returns the keys of a dict in an order that does not depend on how it was filled."""
    try:
        return sorted(mapping)
    except TypeError:
        return sorted(mapping, key=lambda key: (type(key).__qualname__, repr(key)))


def _frozen_key(key: Hashable, path: Path) -> Hashable:
    if type(key) is str or type(key) is int:
        return key
    return statics.static(key, _Written((*path, "keys()")))


def _are_regular(keys: Iterable[Any]) -> bool:
    found = {type(key) for key in keys}
    return not found or (len(found) == 1 and found <= {str, int})


def _check_data_keys(keys: Iterable[Any], children: Iterable[Any], path: Path) -> None:
    if any(has_data(child) for child in children):
        names = ", ".join(sorted({type(key).__name__ for key in keys}))
        raise StructureError(
            f"{format_path(path)} holds data and has keys of types {names}. The keys of a dict "
            "that holds Variables, arrays or objects must be all str or all int, since they become "
            "part of paths."
        )

"""GraphDef, and the one walk that flattens an object graph.

An object graph is made of *nodes* (objects, lists, dicts: things with identity that hold other
things), *leaves* (Variables and States, which have identity too, and arrays, which have none)
and static values. `flatten` numbers nodes and leaves in the order of first meeting, children by
sorted key, and writes down what it saw:

- a `Skeleton`: per node its class and its slots, per slot how it is filled (a node, a leaf, a
  static value, a value such as a tuple that holds any of these, a bound method of a node);
- the kind and metadata of each leaf. Skeleton and leaves together are the `GraphDef`.

Both are interned: equal ones are the same object. Making objects from them again is `build.py`;
keeping a flattening for the next call is `plan.py`.
"""

import functools
import threading
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from nnxlite._core import statics
from nnxlite._core.errors import Path, StaticValueError, StructureError, format_path
from nnxlite._core.statics import Static
from nnxlite._core.variable import Variable

# How a value takes part in the graph, by its type.
STATIC, ARRAY, VARIABLE, STATE, OBJECT, LIST, DICT, TUPLE, FOREIGN, SET, METHOD, PARTIAL = range(12)
# How a slot is filled. VALUE: a tuple or registered pytree, rebuilt from its own slots.
FILL_STATIC, FILL_LEAF, FILL_NODE, FILL_VALUE, FILL_METHOD = range(5)
# What the user said of an attribute. BARE: JAX put something there while it unflattened a tree.
AUTO, DATA, HELD_STATIC, BARE = range(4)

_NUMBERS = (bool, int, float, complex, np.generic)
_CONTAINERS = (LIST, DICT)

_KINDS: dict[type, int] = {
    **dict.fromkeys((str, bytes, int, float, bool, complex, type(None), type(...)), STATIC),
    **dict.fromkeys((types.FunctionType, types.BuiltinFunctionType, type, range, slice), STATIC),
    np.ndarray: ARRAY,
    jax.ShapeDtypeStruct: ARRAY,
    list: LIST,
    dict: DICT,
    tuple: TUPLE,
    set: SET,
    frozenset: STATIC,
    types.MethodType: METHOD,
    functools.partial: PARTIAL,
}


def register_kind(cls: type, kind: int) -> None:
    """Fixes the part that instances of exactly `cls` take in object graphs."""
    _KINDS[cls] = kind


def kind_of(value: Any) -> int:
    """Returns the part that `value` takes in an object graph when nothing is said of it."""
    kind = _KINDS.get(type(value))
    return _classify(value) if kind is None else kind


def _classify(value: Any) -> int:
    cls = type(value)
    if isinstance(value, Variable):
        kind = VARIABLE
    elif getattr(cls, "__nnx_node__", False):
        kind = OBJECT
    elif isinstance(value, (jax.Array, np.ndarray, jax.core.Tracer)):
        kind = ARRAY
    elif isinstance(value, tuple):
        kind = TUPLE
    elif is_registered(value):
        kind = FOREIGN
    else:
        return STATIC  # not remembered: the type may yet be registered with JAX
    _KINDS[cls] = kind
    return kind


def is_registered(value: Any) -> bool:
    """Tells whether JAX looks inside `value` as a pytree."""
    return not jax.tree_util.all_leaves([value])


def is_graph_method(value: Any) -> bool:
    """Tells whether `value` is a bound method of an object, or a partial of one."""
    while isinstance(value, functools.partial):
        value = value.func
    return isinstance(value, types.MethodType) and kind_of(value.__self__) == OBJECT


class Foreign:
    """One level of a registered pytree: its keys, and how to put it together again."""

    __slots__ = ("keys", "treedef")

    def __init__(self, keys: tuple[Hashable, ...], treedef: Any) -> None:
        self.keys, self.treedef = keys, treedef

    def __eq__(self, other: object) -> bool:
        return type(other) is Foreign and self.keys == other.keys and self.treedef == other.treedef

    def __hash__(self) -> int:
        return hash((self.keys, self.treedef))

    def __reduce__(self) -> Any:
        return Foreign, (self.keys, self.treedef)


def one_level(value: Any) -> tuple[Foreign, list[Any]]:
    """Takes a registered pytree apart by one level."""
    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda x: x is not value)
    keys = tuple(plain_key(path[0]) for path, _ in pairs)
    return Foreign(keys, treedef), [child for _, child in pairs]


def plain_key(entry: Any) -> Hashable:
    """Returns the name, key or index that a JAX key entry holds."""
    for field in ("key", "name", "idx"):
        if hasattr(entry, field):
            return getattr(entry, field)
    return str(entry)


def value_children(value: Any) -> tuple[Any, tuple[Hashable, ...], list[Any]]:
    """Returns how to rebuild a value (its class or `Foreign`), the keys and the children."""
    if type(value) is tuple:
        return tuple, tuple(range(len(value))), list(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value), tuple(value._fields), list(value)
    if isinstance(value, functools.partial) and not is_registered(value):
        return (
            functools.partial,
            ("func", "args", "keywords"),
            [
                value.func,
                value.args,
                tuple(sorted(value.keywords.items())),
            ],
        )
    foreign, children = one_level(value)
    return foreign, foreign.keys, children


def rebuild_value(how: Any, children: Iterable[Any]) -> Any:
    """The inverse of `value_children`."""
    if how is tuple:
        return tuple(children)
    if how is functools.partial:
        func, args, keywords = children
        return functools.partial(func, *args, **dict(keywords))
    if type(how) is Foreign:
        return jax.tree_util.tree_unflatten(how.treedef, children)
    return how._make(children)


# What one slot of a node looks like: (key, fill, payload). The payload is a Static, a leaf number,
# a node number, (how, slots) of a value, or (node number, Static function) of a bound method.
Slot = tuple[Hashable, int, Any]


class Record(NamedTuple):
    """One node of a skeleton: its class, what the user said of attributes, and its slots."""

    cls: type
    marks: tuple[tuple[str, int], ...]
    slots: tuple[Slot, ...]


_LOCK = threading.Lock()
_SKELETONS: "weakref.WeakValueDictionary[Any, Skeleton]" = weakref.WeakValueDictionary()
_GRAPHDEFS: "weakref.WeakValueDictionary[Any, GraphDef[Any]]" = weakref.WeakValueDictionary()


class Skeleton:
    """The structure of an object graph without the kinds of its leaves; interned, compared by identity."""

    __slots__ = ("__weakref__", "cache", "num_leaves", "records", "roots")

    records: tuple[Record, ...]
    roots: tuple[Slot, ...]
    num_leaves: int
    cache: dict[Any, Any]

    def __new__(
        cls, records: tuple[Record, ...], roots: tuple[Slot, ...], num_leaves: int
    ) -> "Skeleton":
        with _LOCK:
            key = (records, roots, num_leaves)
            found = _SKELETONS.get(key)
            if found is None:
                found = object.__new__(cls)
                found.records, found.roots, found.num_leaves, found.cache = *key, {}
                _SKELETONS[key] = found
            return found

    def __reduce__(self) -> Any:
        return Skeleton, (self.records, self.roots, self.num_leaves)

    def __repr__(self) -> str:
        statics_text = ", ".join(
            f"{key}={fill.value!r}"
            for record in self.records[:1]
            for key, how, fill in record.slots
            if how == FILL_STATIC
        )
        name = self.records[0].cls.__name__ if self.records else "empty"
        more = f", {len(self.records)} nodes, {self.num_leaves} leaves"
        return f"<{name}({statics_text[:200]}){more}>"


# Kind and metadata of one leaf: a Variable class and its `Meta`, or `State` and its `StateDef`.
Leaf: TypeAlias = tuple[type, Any]
ARRAY_LEAF: Leaf = (np.ndarray, None)

Node = TypeVar("Node")


class GraphDef(Generic[Node]):
    """The static half of a split object: types, names, sharing, static values, kinds, metadata.

    GraphDefs are interned: two objects of equal structure give the same GraphDef, whatever the
    order in which their attributes were assigned. Functions traced for one hold for the other.

    Example:
      >>> a, b = nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(2, 3, rngs=nnx.Rngs(1))
      >>> nnx.graphdef(a) is nnx.graphdef(b)
      True
    """

    __slots__ = ("__weakref__", "cache", "leaves", "skeleton")

    skeleton: Skeleton
    leaves: tuple[Leaf, ...]
    cache: dict[Any, Any]

    def __new__(cls, skeleton: Skeleton, leaves: tuple[Leaf, ...]) -> "GraphDef[Any]":
        with _LOCK:
            key = (skeleton, leaves)
            found = _GRAPHDEFS.get(key)
            if found is None:
                found = object.__new__(cls)
                found.skeleton, found.leaves, found.cache = skeleton, leaves, {}
                _GRAPHDEFS[key] = found
            return found

    def __reduce__(self) -> Any:
        return GraphDef, (self.skeleton, self.leaves)

    def __copy__(self) -> "GraphDef[Any]":
        return self

    def __deepcopy__(self, memo: Any) -> "GraphDef[Any]":
        return self

    def __repr__(self) -> str:
        records = self.skeleton.records
        name = records[0].cls.__name__ if records else "no node"
        return (
            f"<GraphDef of {name}: {len(records)} nodes, {len(self.leaves)} leaves, "
            f"{hash(self) & 0xFFFFFF:06x}>"
        )

    @property
    def paths(self) -> tuple[Path, ...]:
        """Per leaf, the path at which it was first met; with several roots it starts with the root."""
        found = self.cache.get("paths")
        if found is None:
            found = self.cache["paths"] = _leaf_paths(self.skeleton)
        return found

    def apply(self, state: Any, *states: Any) -> Callable[..., Any]:
        """Returns a function that merges the states, calls the object, and gives its result.

        Example:
          >>> graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
          >>> out, (graphdef, state) = graphdef.apply(state)(jnp.ones((1, 2)))
          >>> out.shape
          (1, 3)
        """
        from nnxlite._core.split import apply_graphdef  # the verb lives in a row below

        return apply_graphdef(self, state, *states)


# As a pytree it is all structure, so that `jax.jit` takes what `split` gave.
jax.tree_util.register_pytree_node(
    GraphDef, lambda graphdef: ((), graphdef), lambda graphdef, _: graphdef
)
register_kind(GraphDef, STATIC)


def _leaf_paths(skeleton: Skeleton) -> tuple[Path, ...]:
    alone = len(skeleton.roots) == 1
    starts = [(() if alone else (slot[0],), slot) for slot in skeleton.roots]
    found = leaf_paths(skeleton, starts)
    return tuple(found.get(number, ()) for number in range(skeleton.num_leaves))


def leaf_paths(skeleton: Skeleton, starts: Sequence[tuple[Path, Slot]]) -> dict[int, Path]:
    """Returns the paths at which leaves are first met from the given slots, in that order."""
    paths: dict[int, Path] = {}
    seen: set[int] = set()
    # Depth first, first slot first: the order in which `flatten` met them.
    stack = list(reversed(starts))
    while stack:
        path, (_, how, payload) = stack.pop()
        if how == FILL_LEAF:
            paths.setdefault(payload, path)
            continue
        if how == FILL_VALUE:
            slots = payload[1]
        elif how in (FILL_NODE, FILL_METHOD):
            number = payload if how == FILL_NODE else payload[0]
            if number in seen:
                continue
            seen.add(number)
            slots = skeleton.records[number].slots
        else:
            continue
        stack.extend(((*path, thaw_key(slot[0])), slot) for slot in reversed(slots))
    return paths


def node_paths(skeleton: Skeleton, starts: Sequence[tuple[Path, Slot]]) -> dict[int, Path]:
    """Returns the paths at which nodes are first met from the given slots, in that order."""
    paths: dict[int, Path] = {}
    stack = list(reversed(starts))
    while stack:
        path, (_, how, payload) = stack.pop()
        slots: tuple[Slot, ...] = ()
        if how == FILL_VALUE:
            slots = payload[1]
        elif how in (FILL_NODE, FILL_METHOD):
            number = payload if how == FILL_NODE else payload[0]
            if number not in paths:
                paths[number] = path
                slots = skeleton.records[number].slots
        stack.extend(((*path, thaw_key(slot[0])), slot) for slot in reversed(slots))
    return paths


def containers_of(records: Sequence[Record], slots: Iterable[Slot]) -> set[int]:
    """Returns the numbers of the lists and dicts that hang on these slots, in each other too."""
    found: set[int] = set()
    stack = list(slots)
    while stack:
        _, how, payload = stack.pop()
        if how == FILL_VALUE:
            stack.extend(payload[1])
        elif how == FILL_NODE and records[payload].cls in (list, dict) and payload not in found:
            found.add(payload)
            stack.extend(records[payload].slots)
    return found


def thaw_key(key: Hashable) -> Hashable:
    """Returns the key itself: keys that are neither str nor int are kept as typed statics."""
    return key.value if type(key) is Static else key


class Place(NamedTuple):
    """Where something hangs: an attribute of an object, then steps through what it holds."""

    holder: Any
    attribute: Hashable
    steps: tuple[Hashable, ...]

    def step(self, key: Hashable) -> "Place":
        return Place(self.holder, self.attribute, (*self.steps, key))


class Roots:
    """Stands in for an object where plain containers or values are flattened on their own."""

    __slots__ = ("__weakref__", "items")

    def __init__(self, items: dict[Hashable, Any]) -> None:
        self.items = items

    def _node_items(self) -> dict[Hashable, Any]:
        return self.items


class Flat(NamedTuple):
    """An object graph taken apart. Holds the live objects: use it and let it go."""

    graphdef: GraphDef[Any]
    nodes: list[Any]  # objects, lists and dicts, by node number
    leaves: list[Any]  # Variables and States themselves, arrays by value; by leaf number
    places: list[Place | None]  # of array leaves; None for the others
    watched: list[tuple[Place, Any]]  # mutable containers and values below them
    roots: Roots


def flatten(roots: tuple[Any, ...]) -> Flat:
    """Takes the object graph below `roots` apart; sharing is seen across all of them.

    Raises:
      StaticValueError: A static value cannot be keyed; the message has its path.
      StructureError: A dict that holds data mixes kinds of keys.
    """
    walk = _Walk()
    holder = Roots(dict(enumerate(roots)))
    alone = len(roots) == 1
    slots = tuple(
        (number, *walk.fill(root, AUTO, () if alone else (number,), Place(holder, number, ())))
        for number, root in enumerate(roots)
    )
    skeleton = Skeleton(tuple(walk.records), slots, len(walk.leaves))
    graphdef = GraphDef(skeleton, tuple(walk.kinds))
    return Flat(graphdef, walk.nodes, walk.leaves, walk.places, walk.watched, holder)


class _Where:
    """A path that is written out only when an error message needs it."""

    __slots__ = ("path",)

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return format_path(self.path)


class _Walk:
    """The state of one flattening."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.nodes: list[Any] = []
        self.leaves: list[Any] = []
        self.kinds: list[Leaf] = []
        self.places: list[Place | None] = []
        self.watched: list[tuple[Place, Any]] = []
        self.node_numbers: dict[int, int] = {}
        self.leaf_numbers: dict[int, int] = {}
        self.functions: dict[int, Static] = {}

    def fill(self, value: Any, mark: int, path: Path, place: Place) -> tuple[int, Any]:
        """Says how a slot that holds `value` is filled, and walks on below it."""
        kind = _KINDS.get(type(value))
        if kind is None:
            kind = _classify(value)
        if kind == VARIABLE or kind == STATE:
            if mark == HELD_STATIC:
                raise _static_holds_data(value, path)
            return FILL_LEAF, self.owned_leaf(value)
        if kind == OBJECT:
            if mark == HELD_STATIC:
                raise _static_holds_data(value, path)
            return FILL_NODE, self.node(value, path)
        if kind == STATIC:
            if mark == BARE or (mark == DATA and isinstance(value, _NUMBERS)):
                return FILL_LEAF, self.array_leaf(value, place)
            return FILL_STATIC, self.static(value, path)
        if kind == ARRAY:
            if mark == HELD_STATIC:
                return FILL_STATIC, statics.static_by_identity(value, _Where(path))
            return FILL_LEAF, self.array_leaf(value, place)
        if kind in _CONTAINERS:
            return FILL_NODE, self.container(value, mark, path, place)
        if kind == SET:
            return FILL_STATIC, self.static_set(value, path, place)
        if kind == METHOD and is_graph_method(value):
            return FILL_METHOD, (
                self.node(value.__self__, path),
                self.static(value.__func__, path),
            )
        if kind in (TUPLE, FOREIGN) or (kind == PARTIAL and is_graph_method(value)):
            return FILL_VALUE, self.value(value, kind, mark, path, place)
        return FILL_STATIC, statics.static(value, _Where(path))

    def static(self, value: Any, path: Path) -> Static:
        if type(value) is not types.FunctionType:
            return statics.static(value, _Where(path))
        # Keying a function costs microseconds, and layers share theirs.
        found = self.functions.get(id(value))
        if found is None:
            found = self.functions[id(value)] = statics.static(value, _Where(path))
        return found

    def owned_leaf(self, leaf: Any) -> int:
        number = self.leaf_numbers.get(id(leaf))
        if number is None:
            number = self.leaf_numbers[id(leaf)] = len(self.leaves)
            if not leaf._version:
                leaf._version = 1
            self.leaves.append(leaf)
            self.kinds.append((type(leaf), leaf._meta))
            self.places.append(None)
        return number

    def array_leaf(self, value: Any, place: Place) -> int:
        self.leaves.append(value)
        self.kinds.append(ARRAY_LEAF)
        self.places.append(place)
        return len(self.leaves) - 1

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
            node._version = 1
        items = node._node_items()
        marks, class_marks = node._marks, type(node)._class_marks
        slots = []
        for key in sorted(items):
            value = items[key]
            mark = marks.get(key, AUTO) if marks else AUTO
            if not mark and class_marks:
                mark = class_marks.get(key, AUTO)
            slots.append((key, *self.fill(value, mark, (*path, key), Place(node, key, ()))))
        said = tuple(sorted((k, m) for k, m in marks.items() if m != BARE)) if marks else ()
        self.records[number] = Record(type(node), said, tuple(slots))
        return number

    def container(self, value: Any, mark: int, path: Path, place: Place) -> int:
        number = self.node_numbers.get(id(value))
        if number is not None:
            return number
        number = self.new_node(value)
        self.watched.append((place, value))
        kind = list
        if isinstance(value, dict):
            kind = dict
            items = [(_frozen_key(key, path), key, value[key]) for key in _sorted_keys(value)]
        else:
            items = [(index, index, child) for index, child in enumerate(value)]
        slots = tuple(
            (frozen, *self.fill(child, mark, (*path, key), place.step(key)))
            for frozen, key, child in items
        )
        if kind is dict and any(fill != FILL_STATIC for _, fill, _ in slots):
            _check_data_keys(value, path)
        self.records[number] = Record(kind, (), slots)
        return number

    def value(self, value: Any, kind: int, mark: int, path: Path, place: Place) -> tuple[Any, Any]:
        how, keys, children = value_children(value)
        if kind != TUPLE or place.steps:
            # A tuple that is an attribute cannot change unseen; one in a list, or a foreign
            # object that may be mutable, has to be looked at again.
            self.watched.append((place, value))
        slots = tuple(
            (_frozen_key(key, path), *self.fill(child, mark, (*path, key), place.step(index)))
            for index, (key, child) in enumerate(zip(keys, children, strict=True))
        )
        return how, slots

    def static_set(self, value: set[Any], path: Path, place: Place) -> Static:
        for element in value:
            if kind_of(element) in (VARIABLE, OBJECT, ARRAY, STATE):
                raise StructureError(
                    f"{format_path(path)} is a set that holds a {type(element).__name__}: a set has "
                    "no order, so its state would have no stable paths. Use a list or a dict."
                )
        self.watched.append((place, value))
        return statics.static(value, _Where(path))


def _static_holds_data(value: Any, path: Path) -> StaticValueError:
    return StaticValueError(
        f"{format_path(path)} is marked static but holds a {type(value).__name__}, whose state "
        "would be frozen into every trace. Leave the mark out, or use nnx.data."
    )


def _sorted_keys(mapping: dict[Any, Any]) -> list[Any]:
    try:
        return sorted(mapping)
    except TypeError:
        return sorted(mapping, key=lambda key: (type(key).__qualname__, repr(key)))


def _frozen_key(key: Hashable, path: Path) -> Hashable:
    if type(key) is str or type(key) is int:
        return key
    return statics.static(key, _Where((*path, "keys()")))


def _check_data_keys(mapping: dict[Any, Any], path: Path) -> None:
    found = {type(key) for key in mapping}
    if len(found) > 1 or not found <= {str, int}:
        names = sorted(cls.__name__ for cls in found)
        raise StructureError(
            f"{format_path(path)} holds data and has keys of types {', '.join(names)}. The keys of "
            "a dict that holds Variables, arrays or objects must be all str or all int, since they "
            "become part of paths."
        )

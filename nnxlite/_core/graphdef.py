"""GraphDef: the static half of an object graph, and the skeleton in it.

A `Skeleton` says, per node, its class and its slots, and per slot how it is filled: by a leaf, a
node, a static value, a value such as a tuple that holds any of these, or a bound method of a node.
Nodes and leaves go by number, in the order in which they were first met, children by sorted key.
A `GraphDef` adds the kind and metadata of each leaf.

Both are interned: equal ones are the same object. Nothing here is an object of the user's graph;
`graph.py` makes GraphDefs of objects, `build.py` makes objects of GraphDefs.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

import jax
import numpy as np

from nnxlite._core.errors import Path
from nnxlite._core.intern import InternTable
from nnxlite._core.kinds import STATIC, register_kind
from nnxlite._core.statics import Static, short_text
from nnxlite._core.treescope_view import treescope_repr

# How a slot is filled. VALUE: a tuple or registered pytree, rebuilt from its own slots.
FILL_STATIC, FILL_LEAF, FILL_NODE, FILL_VALUE, FILL_METHOD = range(5)

# What one slot of a node looks like: (key, fill, payload). The payload is a Static, a leaf number,
# a node number, (how, slots) of a value, or (node number, Static function) of a bound method.
Slot: TypeAlias = tuple[Hashable, int, Any]

# Kind and metadata of one leaf: a Variable class and its `Meta`, or `State` and its `StateDef`.
Leaf: TypeAlias = tuple[type, Any]

Node = TypeVar("Node")


class _ArrayLeaf(tuple[type, Any]):
    """The kind of a bare array. There is one, so that `is` tells it, also after unpickling."""

    __slots__ = ()

    def __reduce__(self) -> str:
        return "ARRAY_LEAF"


ARRAY_LEAF: Leaf = _ArrayLeaf((np.ndarray, None))


class Record(NamedTuple):
    """One node of a skeleton: its class, what the user said of attributes, and its slots."""

    cls: type
    marks: tuple[tuple[Hashable, int], ...]
    slots: tuple[Slot, ...]


class Skeleton:
    """The structure of an object graph without the kinds of its leaves.

    Interned, so that JAX, which holds it as auxiliary data of objects, compares it by identity.
    """

    __slots__ = ("__weakref__", "cache", "num_leaves", "records", "roots")

    records: tuple[Record, ...]
    roots: tuple[Slot, ...]
    num_leaves: int
    cache: dict[Any, Any]

    @staticmethod
    def of(records: tuple[Record, ...], roots: tuple[Slot, ...], num_leaves: int) -> "Skeleton":
        """Returns the one `Skeleton` of these parts."""
        found = _SKELETONS.get((records, roots, num_leaves))
        if found is None:
            new = Skeleton()
            new.records, new.roots, new.num_leaves, new.cache = records, roots, num_leaves, {}
            found = _SKELETONS.add(new)
        return found

    @property
    def key(self) -> Hashable:
        """What makes it equal to another one."""
        return self.records, self.roots, self.num_leaves

    def __reduce__(self) -> Any:
        return Skeleton.of, (self.records, self.roots, self.num_leaves)

    def __copy__(self) -> "Skeleton":
        return self

    def __deepcopy__(self, memo: Any) -> "Skeleton":
        return self

    def __repr__(self) -> str:
        if not self.records:
            return f"<no object, {self.num_leaves} leaves>"
        first = self.records[0]
        statics = ", ".join(
            f"{key}={short_text(payload.value)}"
            for key, how, payload in first.slots
            if how == FILL_STATIC
        )
        counts = f"{len(self.records)} nodes, {self.num_leaves} leaves"
        return f"<{first.cls.__name__}({statics[:200]}), {counts}>"


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

    @staticmethod
    def of(skeleton: Skeleton, leaves: tuple[Leaf, ...]) -> "GraphDef[Any]":
        """Returns the one `GraphDef` of these parts."""
        found = _GRAPHDEFS.get((skeleton, leaves))
        if found is None:
            new: GraphDef[Any] = GraphDef()
            new.skeleton, new.leaves, new.cache = skeleton, leaves, {}
            found = _GRAPHDEFS.add(new)
        return found

    @property
    def key(self) -> Hashable:
        """What makes it equal to another one."""
        return self.skeleton, self.leaves

    def __reduce__(self) -> Any:
        return GraphDef.of, (self.skeleton, self.leaves)

    def __copy__(self) -> "GraphDef[Any]":
        return self

    def __deepcopy__(self, memo: Any) -> "GraphDef[Any]":
        return self

    def __repr__(self) -> str:
        records = self.skeleton.records
        name = records[0].cls.__name__ if records else "no object"
        return (
            f"<GraphDef of {name}: {len(records)} nodes, {len(self.leaves)} leaves, "
            f"{hash(self) & 0xFFFFFF:06x}>"
        )

    def __treescope_repr__(self, path: str | None, subtree_renderer: Any) -> Any:
        from nnxlite._core.outline import outline  # only where a view is asked for

        return treescope_repr(outline(self), None, subtree_renderer)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Per leaf, the path of its first meeting; with several roots it starts with the root."""
        found = self.cache.get("paths")
        if found is None:
            found = self.cache["paths"] = _all_leaf_paths(self.skeleton)
        return found

    def apply(self, state: Any, *states: Any) -> Callable[..., Any]:
        """Returns a function that merges the states, calls the object, and gives its result.

        Example:
          >>> graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
          >>> out, (graphdef, state) = graphdef.apply(state)(jnp.ones((1, 2)))
          >>> out.shape
          (1, 3)
        """
        from nnxlite._core.call import apply_graphdef  # the verb lives in a row below

        return apply_graphdef(self, state, *states)


_SKELETONS: InternTable[Skeleton] = InternTable()
_GRAPHDEFS: InternTable[GraphDef[Any]] = InternTable()

# As a pytree it is all structure, so that `jax.jit` takes what `split` gave.
jax.tree_util.register_pytree_node(
    GraphDef, lambda graphdef: ((), graphdef), lambda graphdef, _: graphdef
)
register_kind(GraphDef, STATIC)


def _all_leaf_paths(skeleton: Skeleton) -> tuple[Path, ...]:
    alone = len(skeleton.roots) == 1
    starts = [(() if alone else (slot[0],), slot) for slot in skeleton.roots]
    found = leaf_paths(skeleton, starts)
    return tuple(found[number] for number in range(skeleton.num_leaves))


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

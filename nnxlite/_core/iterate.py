"""Looking through an object graph: every node, every module, children, duplicates, maps.

Paths are those of first meeting; a shared object is visited once, and cycles end.
"""

from collections.abc import Callable, Iterator
from typing import Any

from nnxlite._core.build import assemble
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import Filter, to_predicate
from nnxlite._core.graph import sorted_keys
from nnxlite._core.graphdef import ARRAY_LEAF
from nnxlite._core.kinds import (
    ARRAY,
    DICT,
    FOREIGN,
    LIST,
    METHOD,
    OBJECT,
    STATE,
    STATIC,
    VARIABLE,
    is_graph_method,
    is_value,
    kind_of,
    rebuild_value,
    value_children,
)
from nnxlite._core.modes import graph_flag
from nnxlite._core.plan import Plan, plan_of
from nnxlite._core.state import State
from nnxlite._core.state_forms import map_state
from nnxlite._core.trace import check_writable, current_level
from nnxlite._core.variable import Variable

MODULE_TYPES: list[type] = []
"""The class Module, put here by its own file, which stands in a row below this one."""

_HAVE_IDENTITY = (OBJECT, LIST, DICT, VARIABLE, STATE)


def children_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns keys and contents of an object, container or value, by sorted key."""
    kind = kind_of(value)
    if kind == OBJECT:
        items = value._node_items()
        return [(key, items[key]) for key in sorted(items)]
    if kind == LIST:
        return list(enumerate(value))
    if kind == DICT:
        return [(key, value[key]) for key in sorted_keys(value)]
    if kind == STATE:
        return list(value._dicts().items())
    if is_value(value):
        _, keys, children = value_children(value)
        return list(zip(keys, children, strict=True))
    return []


@graph_flag
def iter_graph(node: Any, /) -> Iterator[tuple[Path, Any]]:
    """Yields path and value of everything in an object graph, contents before their holder.

    Objects, containers and Variables come once, at the path of first meeting; arrays and static
    values wherever they are. The object of a bound method comes at the path of the method.

    Example:
      >>> [
      ...     path
      ...     for path, x in nnx.iter_graph(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      ...     if isinstance(x, nnx.Variable)
      ... ]
      [('bias',), ('kernel',)]
    """
    seen: dict[int, Any] = {}  # holds what it has seen: the ids of dead objects come again
    stack: list[tuple[Path, Any, bool]] = [((), node, False)]
    while stack:
        path, value, below_done = stack.pop()
        kind = kind_of(value)
        if below_done or kind == STATIC:
            yield path, value
            if kind == FOREIGN:
                del seen[id(value)]
            continue
        if kind in _HAVE_IDENTITY or kind == FOREIGN:  # the latter may hold itself
            if id(value) in seen:
                continue
            seen[id(value)] = value
        stack.append((path, value, True))
        if kind == METHOD and is_graph_method(value):
            stack.append((path, value.__self__, False))
        for key, child in reversed(children_of(value)):
            stack.append(((*path, key), child, False))


@graph_flag
def iter_modules(node: Any, /) -> Iterator[tuple[Path, Any]]:
    """Yields path and Module for each module in an object or container, once each.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.nn.relu)
      >>> [(path, type(m).__name__) for path, m in nnx.iter_modules(model)]
      [(('layers', 0), 'Linear'), (('layers',), 'List'), ((), 'Sequential')]
    """
    modules = tuple(MODULE_TYPES)
    for path, value in iter_graph(node):
        if isinstance(value, modules):
            yield path, value


@graph_flag
def iter_children(node: Any, /) -> Iterator[tuple[Any, Any]]:
    """Yields name and child for the objects and Variables that are attributes of an object.

    Example:
      >>> [name for name, _ in nnx.iter_children(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))]
      ['bias', 'kernel']
    """
    for key, child in children_of(node):
        if kind_of(child) in (OBJECT, VARIABLE):
            yield key, child


@graph_flag
def iter_module_children(node: Any, /) -> Iterator[tuple[Any, Any]]:
    """Yields name and Module for the modules that are attributes of an object.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> [name for name, _ in nnx.iter_module_children(model.layers)]
      [0]
    """
    modules = tuple(MODULE_TYPES)
    for key, child in children_of(node):
        if isinstance(child, modules):
            yield key, child


def find_duplicates(node: Any, /, *, only: Filter = ...) -> list[list[Path]]:
    """Returns the paths of each object, Variable or State that is met at more than one place.

    Args:
      node: The object or container to look through.
      only: A filter, given the first path and the object.

    Example:
      >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> nnx.find_duplicates({"a": layer, "b": layer})
      [[('a',), ('b',)]]
    """
    predicate = to_predicate(only)
    found: dict[int, tuple[Any, list[Path]]] = {}
    stack: list[tuple[Path, Any, tuple[Any, ...]]] = [((), node, ())]
    while stack:
        path, value, holders = stack.pop()
        kind = kind_of(value)
        if kind in _HAVE_IDENTITY:
            known = found.setdefault(id(value), (value, []))[1]
            known.append(path)
            if len(known) > 1:
                continue
        elif kind == FOREIGN:
            if any(value is holder for holder in holders):
                continue
            holders = (*holders, value)
        for key, child in reversed(children_of(value)):
            stack.append(((*path, key), child, holders))
    return [
        paths
        for value, paths in found.values()
        if len(paths) > 1 and kind_of(value) not in (LIST, DICT) and predicate(paths[0], value)
    ]


def around_same_leaves(node: Any) -> Any:
    """Returns a copy of an object or container, with new objects around the same Variables."""
    plan = plan_of(node)
    return _rebuilt(plan, _leaves_of(plan))


def _leaves_of(plan: Plan) -> list[Any]:
    return [
        handle()._value if kind is ARRAY_LEAF else handle()
        for handle, kind in zip(plan.handles, plan.graphdef.leaves, strict=True)
    ]


def _rebuilt(plan: Plan, leaves: list[Any]) -> Any:
    nodes: list[Any] = [None] * len(plan.graphdef.skeleton.records)
    return assemble(plan.graphdef.skeleton, nodes, leaves, current_level())[0]


@graph_flag
def map(f: Callable[[Path, Any], Any], node: Any, /) -> Any:
    """Returns a copy of an object, or of a State, with each leaf replaced by `f(path, leaf)`.

    `f` gets the Variables themselves, and arrays as they are. A Variable that it returns is copied,
    so that the new object shares none with the old one. Sharing inside the object is kept.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> shapes = nnx.map(lambda path, leaf: leaf.shape, model)
      >>> shapes.kernel
      (2, 3)
    """
    if isinstance(node, State):
        return map_state(f, node)
    plan = plan_of(node)
    leaves = []
    for path, leaf in zip(plan.graphdef.paths, _leaves_of(plan), strict=True):
        if isinstance(leaf, State):
            new = map_state(lambda inner, x, path=path: f((*path, *inner), x), leaf)
        else:
            new = f(path, leaf)
        leaves.append(new.copy() if new is leaf and isinstance(new, Variable) else new)
    return _rebuilt(plan, leaves)


@graph_flag
def recursive_map(f: Callable[[Path, Any], Any], node: Any, /) -> Any:
    """Returns an object made bottom up by `f(path, x)` from copies of the nodes of another one.

    Each object, container and Variable is given to `f` once, its contents before itself. Objects
    and containers are copies, so that `node` stays as it is; Variables and arrays are those of
    `node`.

    Raises:
      StructureError: `f` replaces an object that something in it leads back to.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.nn.relu)
      >>> def widen(path, x):
      ...     return nnx.Linear(2, 5, rngs=nnx.Rngs(0)) if isinstance(x, nnx.Linear) else x
      >>> nnx.recursive_map(widen, model)(jnp.ones((1, 2))).shape
      (1, 5)
    """
    return _RecursiveMap(f).of(around_same_leaves(node), ())


class _RecursiveMap:
    def __init__(self, f: Callable[[Path, Any], Any]) -> None:
        self.f = f
        self.done: dict[int, tuple[Any, Any]] = {}  # what it was, what it became
        self.open: dict[int, bool] = {}  # whether a node under way was met again

    def of(self, value: Any, path: Path) -> Any:
        kind = kind_of(value)
        if kind not in _HAVE_IDENTITY:
            return self.value(value, kind, path)
        if id(value) in self.done:
            return self.done[id(value)][1]
        if id(value) in self.open:
            self.open[id(value)] = True
            return value
        self.open[id(value)] = False
        if kind in (OBJECT, LIST, DICT):
            self.contents(value, kind, path)
        new = self.f(path, value)
        if self.open.pop(id(value)) and new is not value:
            raise StructureError(
                f"recursive_map cannot replace {format_path(path)} ({type(value).__name__}): "
                "something in it leads back to it, and would keep the old object. Change the "
                "object in place and return it."
            )
        self.done[id(value)] = (value, new)
        return new

    def contents(self, holder: Any, kind: int, path: Path) -> None:
        for key, child in children_of(holder):
            new = self.of(child, (*path, key))
            if new is not child:
                if kind == OBJECT:
                    holder._node_set(key, new)
                else:
                    holder[key] = new

    def value(self, value: Any, kind: int, path: Path) -> Any:
        if kind == METHOD and is_graph_method(value):
            owner = self.of(value.__self__, path)
            return value if owner is value.__self__ else getattr(owner, value.__name__)
        if is_value(value):
            how, keys, children = value_children(value)
            new = [self.of(child, (*path, key)) for key, child in zip(keys, children, strict=True)]
            if any(a is not b for a, b in zip(children, new, strict=True)):
                value = rebuild_value(how, new)
        elif kind != ARRAY:
            return value
        return self.f(path, value)


def set_metadata(node: Any, /, *, only: Filter = Variable, **metadata: Any) -> None:
    """Sets metadata on the Variables of an object, in place.

    Args:
      node: The object.
      only: A filter for the Variables.
      **metadata: Names and static values.

    Raises:
      TraceLevelError: A Variable belongs to another trace level. Nothing is changed.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> nnx.set_metadata(model, only=nnx.Param, frozen=True)
      >>> model.kernel.frozen
      True
    """
    predicate = to_predicate(only)
    chosen = [
        value
        for path, value in iter_graph(node)
        if isinstance(value, Variable) and predicate(path, value)
    ]
    for variable in chosen:
        check_writable(variable, f"set metadata of {type(variable).__name__}")
    for variable in chosen:
        variable.set_metadata(**metadata)

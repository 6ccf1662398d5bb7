"""Looking through an object graph: every node, every module, children, duplicates, maps.

Paths are those of first meeting; a shared object is visited once, and cycles end.
"""

from collections.abc import Callable, Iterator
from typing import Any

from nnxlite._core import graph
from nnxlite._core.build import assemble
from nnxlite._core.errors import Path
from nnxlite._core.filters import Filter, to_predicate
from nnxlite._core.graph import kind_of
from nnxlite._core.plan import plan_of
from nnxlite._core.state import State, map_state
from nnxlite._core.trace import check_writable, current_level
from nnxlite._core.variable import Variable

MODULE_TYPES: list[type] = []
"""The class Module, put here by its own file, which stands in a row below this one."""


def children_of(value: Any) -> list[tuple[Any, Any]]:
    """Returns keys and contents of an object, container or value, by sorted key."""
    kind = kind_of(value)
    if kind == graph.OBJECT:
        items = value._node_items()
        return [(key, items[key]) for key in sorted(items)]
    if kind == graph.LIST:
        return list(enumerate(value))
    if kind in (graph.DICT, graph.STATE):
        return [(key, value[key]) for key in graph._sorted_keys(value)]
    if kind in (graph.TUPLE, graph.FOREIGN):
        _, keys, children = graph.value_children(value)
        return list(zip(keys, children, strict=True))
    return []


def iter_graph(node: Any, /) -> Iterator[tuple[Path, Any]]:
    """Yields path and value of everything in an object graph, contents before their holder.

    Objects, containers and Variables come once, at the path of first meeting; arrays and static
    values wherever they are.

    Example:
      >>> [
      ...     path
      ...     for path, x in nnx.iter_graph(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      ...     if isinstance(x, nnx.Variable)
      ... ]
      [('bias',), ('kernel',)]
    """
    yield from _iter_graph(node, (), set())


def _iter_graph(value: Any, path: Path, seen: set[int]) -> Iterator[tuple[Path, Any]]:
    kind = kind_of(value)
    if kind in (graph.OBJECT, graph.LIST, graph.DICT, graph.VARIABLE, graph.STATE):
        if id(value) in seen:
            return
        seen.add(id(value))
    for key, child in children_of(value):
        yield from _iter_graph(child, (*path, key), seen)
    yield path, value


def iter_modules(node: Any, /) -> Iterator[tuple[Path, Any]]:
    """Yields path and Module for each module in an object or container, once each.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.nn.relu)
      >>> [(path, type(m).__name__) for path, m in nnx.iter_modules(model)]
      [(('layers', 0), 'Linear'), ((), 'Sequential')]
    """
    modules = tuple(MODULE_TYPES)
    for path, value in iter_graph(node):
        if isinstance(value, modules):
            yield path, value


def iter_children(node: Any, /) -> Iterator[tuple[Any, Any]]:
    """Yields name and Module for the modules that are attributes of an object."""
    modules = tuple(MODULE_TYPES)
    for key, child in children_of(node):
        if isinstance(child, modules):
            yield key, child


def find_duplicates(node: Any, /, *, only: Filter = ...) -> list[list[Path]]:
    """Returns the paths of each object or Variable that is met at more than one place.

    Example:
      >>> layer = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> nnx.find_duplicates({"a": layer, "b": layer})
      [[('a',), ('b',)]]
    """
    predicate = to_predicate(only)
    found: dict[int, tuple[Any, list[Path]]] = {}
    stack: list[tuple[Path, Any]] = [((), node)]
    while stack:
        path, value = stack.pop()
        if kind_of(value) in (graph.OBJECT, graph.VARIABLE):
            if id(value) in found:
                found[id(value)][1].append(path)
                continue
            found[id(value)] = (value, [path])
        elif kind_of(value) in (graph.LIST, graph.DICT):
            if id(value) in found:
                continue
            found[id(value)] = (value, [])
        stack.extend(((*path, key), child) for key, child in reversed(children_of(value)))
    return [
        paths for value, paths in found.values() if len(paths) > 1 and predicate(paths[0], value)
    ]


def map(f: Callable[[Path, Any], Any], node: Any, /) -> Any:
    """Returns a copy of an object, or of a State, with each leaf replaced by `f(path, leaf)`.

    `f` gets the Variables themselves, and arrays as they are. Sharing is kept.

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
    for path, kind, handle in zip(
        plan.graphdef.paths, plan.graphdef.leaves, plan.handles, strict=True
    ):
        leaf = handle()._value if kind is graph.ARRAY_LEAF else handle()
        if isinstance(leaf, State):
            leaves.append(map_state(lambda inner, x, path=path: f((*path, *inner), x), leaf))
        else:
            leaves.append(f(path, leaf))
    nodes: list[Any] = [None] * len(plan.graphdef.skeleton.records)
    return assemble(plan.graphdef.skeleton, nodes, leaves, current_level())[0]


def recursive_map(f: Callable[[Path, Any], Any], node: Any, /) -> Any:
    """Replaces nodes and leaves bottom up by `f(path, x)`, in place, and returns the new root.

    Each object, container and Variable is given to `f` once, its contents before itself.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.nn.relu)
      >>> def widen(path, x):
      ...     return nnx.Linear(2, 5, rngs=nnx.Rngs(0)) if isinstance(x, nnx.Linear) else x
      >>> nnx.recursive_map(widen, model)(jnp.ones((1, 2))).shape
      (1, 5)
    """
    return _recursive_map(f, node, (), {})


def _recursive_map(
    f: Callable[[Path, Any], Any], value: Any, path: Path, done: dict[int, tuple[Any, Any]]
) -> Any:
    kind = kind_of(value)
    has_identity = kind in (graph.OBJECT, graph.LIST, graph.DICT, graph.VARIABLE)
    if has_identity:
        if id(value) in done:
            return done[id(value)][1]
        done[id(value)] = (value, value)  # what a cycle meets
    if kind in (graph.OBJECT, graph.LIST, graph.DICT):
        if kind == graph.OBJECT:
            check_writable(value, f"replace contents of {type(value).__name__}")
        for key, child in children_of(value):
            new = _recursive_map(f, child, (*path, key), done)
            if new is not child:
                _put(value, key, new)
    elif kind in (graph.TUPLE, graph.FOREIGN):
        how, keys, children = graph.value_children(value)
        new_children = [
            _recursive_map(f, child, (*path, key), done)
            for key, child in zip(keys, children, strict=True)
        ]
        if any(a is not b for a, b in zip(children, new_children, strict=True)):
            value = graph.rebuild_value(how, new_children)
    elif kind == graph.STATIC and not has_identity:
        return value
    new = f(path, value)
    if has_identity:
        done[id(value)] = (value, new)
    return new


def _put(holder: Any, key: Any, value: Any) -> None:
    if kind_of(holder) == graph.OBJECT and isinstance(key, str) and not _has_item_access(holder):
        setattr(holder, key, value)
    else:
        holder[key] = value


def _has_item_access(holder: Any) -> bool:
    return hasattr(type(holder), "_node_by_item")


def set_metadata(node: Any, /, *, only: Filter = Variable, **metadata: Any) -> None:
    """Sets metadata on the Variables of an object, in place.

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

"""Whether two object graphs are the same graph: an oracle that shares no code with the library.

Objects, Variables, lists and dicts have identity, so they must correspond one to one; tuples and
registered pytrees are values; arrays are compared by value; everything else is static and compared
by value *and type*, at every depth.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import numpy as np

import nnxlite as nnx


def assert_isomorphic(left: Any, right: Any, *, values: bool = True) -> None:
    """Fails with the path and nature of the first difference between two graphs.

    Args:
      left: Any nesting of objects, containers, arrays and static values.
      right: What it is compared with.
      values: Whether the contents of arrays count, or their presence alone.
    """
    found = difference(left, right, values=values)
    assert found is None, found


def difference(left: Any, right: Any, *, values: bool = True) -> str | None:
    """Returns the first difference between two graphs, or None."""
    try:
        _Comparison(values).compare(left, right, "root")
    except _Different as different:
        return str(different)
    return None


def is_object(value: Any) -> bool:
    return isinstance(value, nnx.Pytree)


def is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def has_identity(value: Any) -> bool:
    return is_object(value) or isinstance(value, nnx.Variable | list | dict)


def items_of(value: Any) -> list[tuple[Any, Any]] | None:
    """Returns the sorted `(key, child)` of a node or value, None for arrays, Variables, statics."""
    if is_object(value):
        return _by_key(value._node_items())
    if isinstance(value, dict):
        return _by_key(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, list | tuple):
        return list(enumerate(value))
    if isinstance(value, types.MethodType) and is_object(value.__self__):
        return [("__self__", value.__self__)]
    if isinstance(value, functools.partial):
        keywords = tuple(sorted(value.keywords.items()))
        return [("func", value.func), ("args", value.args), ("keywords", keywords)]
    if isinstance(value, nnx.Variable) or is_array(value) or jax.tree_util.all_leaves([value]):
        return None
    leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: x is not value)
    return [(jax.tree_util.keystr(path, simple=True), leaf) for path, leaf in leaves]


def rebuilt(value: Any, children: list[Any]) -> Any:
    """Returns a tuple or registered pytree like `value`, with these children for its own."""
    if type(value) is tuple:
        return tuple(children)
    if isinstance(value, tuple):
        return type(value)(*children)
    treedef = jax.tree_util.tree_structure(value, is_leaf=lambda x: x is not value)
    return jax.tree_util.tree_unflatten(treedef, children)


def _by_key(mapping: dict[Any, Any]) -> list[tuple[Any, Any]]:
    return sorted(mapping.items(), key=lambda item: (str(type(item[0])), item[0]))


def reachable(root: Any) -> list[Any]:
    """Returns each object, Variable, list and dict below `root` once, in a fixed order."""
    found: list[Any] = []
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if has_identity(value):
            if id(value) in seen:
                return
            seen.add(id(value))
            found.append(value)
        for _, child in items_of(value) or ():
            visit(child)

    visit(root)
    return found


class _Different(Exception):
    pass


class _Comparison:
    def __init__(self, values: bool) -> None:
        self.values = values
        self.there: dict[int, Any] = {}
        self.back: dict[int, Any] = {}

    def compare(self, a: Any, b: Any, path: str) -> None:
        if is_array(a) and is_array(b):
            return self._arrays(a, b, path)
        self._same(type(a), type(b), path, "type")
        if has_identity(a):
            if id(a) in self.there or id(b) in self.back:
                if self.there.get(id(a)) is not b or self.back.get(id(b)) is not a:
                    raise _Different(f"{path}: {type(a).__name__} is shared in one graph only")
                return None
            self.there[id(a)], self.back[id(b)] = b, a
        if isinstance(a, nnx.Variable):
            return self._variables(a, b, path)
        items, others = items_of(a), items_of(b)
        if items is None or others is None:
            return self._statics(a, b, path)
        self._same([k for k, _ in items], [k for k, _ in others], path, "keys")
        for (key, child), (_, other) in zip(items, others, strict=True):
            self.compare(child, other, f"{path}.{key}")
        if isinstance(a, types.MethodType):
            self._statics(a.__func__, b.__func__, path)
        elif not has_identity(a) and not isinstance(a, tuple | functools.partial):
            is_child = lambda tree: lambda x: x is not tree  # noqa: E731
            structures = [jax.tree_util.tree_structure(x, is_leaf=is_child(x)) for x in (a, b)]
            self._same(*structures, path, "registered pytree")
        return None

    def _variables(self, a: Any, b: Any, path: str) -> None:
        self._statics(dict(a.get_metadata()), dict(b.get_metadata()), f"{path} metadata")
        left, right = a.get_raw_value(), b.get_raw_value()
        self._same(*(jax.tree.structure(x) for x in (left, right)), path, "structure of value")
        for x, y in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
            self._arrays(x, y, f"{path}.value")

    def _arrays(self, a: Any, b: Any, path: str) -> None:
        self._same(np.shape(a), np.shape(b), path, "shape")
        self._same(a.dtype, b.dtype, path, "dtype")
        if self.values and not np.array_equal(np.asarray(a), np.asarray(b)):
            raise _Different(f"{path}: values {np.asarray(a)} and {np.asarray(b)}")

    def _statics(self, a: Any, b: Any, path: str) -> None:
        if a is b:
            return
        self._same(type(a), type(b), path, "type")
        if isinstance(a, float | complex):
            self._same(repr(a), repr(b), path, "static value")
        elif isinstance(a, list | tuple):
            self._same(len(a), len(b), path, "length")
            for i, (x, y) in enumerate(zip(a, b, strict=True)):
                self._statics(x, y, f"{path}[{i}]")
        elif isinstance(a, set | frozenset):
            self._same(*(sorted((str(type(e)), repr(e)) for e in s) for s in (a, b)), path, "set")
        elif isinstance(a, dict):
            self._same(set(map(_typed, a)), set(map(_typed, b)), path, "keys")
            for key in a:
                self._statics(a[key], b[key], f"{path}[{key!r}]")
        elif isinstance(a, types.FunctionType):
            self._same(a.__code__, b.__code__, path, "code")
            self._statics(_cells(a), _cells(b), f"{path} cells")
            self._statics(a.__defaults__, b.__defaults__, f"{path} defaults")
        elif dataclasses.is_dataclass(a) and not isinstance(a, type):
            self._statics(vars(a), vars(b), path)
        else:
            self._same(a, b, path, "static value")

    def _same(self, a: Any, b: Any, path: str, what: str) -> None:
        if a != b:
            raise _Different(f"{path}: {what} {a!r} and {b!r}")


def _typed(key: Any) -> tuple[type, Any]:
    return type(key), key


def _cells(function: types.FunctionType) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]

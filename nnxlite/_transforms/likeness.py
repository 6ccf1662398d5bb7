"""Likeness: whether functions that are made anew at each call do the same.

A loop or a branch gets its functions at the call, often lambdas. Two do the same if their code is
the same and whatever it reaches besides its arguments is: cells, defaults, globals, and what it
reads of classes and modules. Numbers, strings and the like are compared by value, and what comes
with Python or was installed by identity. What can change in place (a list, an array of NumPy, an
object of some class) cannot be compared at all, and neither are arrays, which a key would keep
alive: then a function is like itself only, as long as all these are the same objects. So is one
that looks things up by names that are made while it runs.
"""

import dis
import enum
import functools
import inspect
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._core.errors import StaticValueError
from nnxlite._core.keyer import Same
from nnxlite._core.keys import NO_KEY, is_value_dataclass, scalar_key, typed_key
from nnxlite._core.kinds import OBJECT, STATE, VARIABLE, kind_of
from nnxlite._core.plan import plan_of
from nnxlite._core.trace import Opaque
from nnxlite._transforms.arguments import Fixed
from nnxlite._transforms.packing import opaque_flatten


class Likeness(NamedTuple):
    """What a function does, as far as that can be told.

    Attributes:
      key: Equal for functions that reach the same.
      exact: Whether functions with equal keys do the same.
      holds_object: Whether it closes over an object or Variable.
    """

    key: Hashable
    exact: bool
    holds_object: bool


def likeness_of(function: Callable[..., Any]) -> Likeness:
    """Returns what a function does, as far as that can be told.

    Example:
      >>> def scale(by):
      ...     return lambda x: by * x
      >>> likeness_of(scale(2)).key == likeness_of(scale(2)).key
      True
      >>> likeness_of(scale(2)).key == likeness_of(scale(2.0)).key
      False
    """
    walk = _Walk()
    key = walk.of_function(function)
    return Likeness(key, walk.exact, walk.holds_object)


_STEADY = (enum.Enum, np.ufunc, np.dtype, jnp.ufunc, type(jnp.float32))
"""What stays as it is, and is compared by identity."""

_BY_VALUE = (np.generic, slice, range)


class _Walk:
    """The way through all that a function reaches."""

    def __init__(self) -> None:
        self.exact = True
        self.holds_object = False
        self._met: dict[int, int] = {}
        self._read: frozenset[str] = frozenset()  # names in the function under way

    def of_function(self, function: Callable[..., Any]) -> Hashable:
        """Returns the key of the function itself, by code where that is possible."""
        if isinstance(function, types.FunctionType | functools.partial | Fixed):
            return self._token(function, own=True)
        if kind_of(getattr(function, "__self__", None)) == OBJECT:
            self.holds_object = True
        return self._token(function, own=True)

    def _token(self, value: Any, own: bool) -> Hashable:
        """Keys one value; `own` for what the function closes over, else it is a global's."""
        key = scalar_key(value)
        if key is not NO_KEY:
            return key
        cls = type(value)
        if cls is types.FunctionType:
            return self._function(value)
        if isinstance(value, tuple):
            return (cls, *[self._token(item, own) for item in value])
        if isinstance(value, type | types.ModuleType):
            return self._namespace(value)
        if isinstance(value, _STEADY) or (_is_installed(value) and _is_global(value)):
            return Same(value)
        if isinstance(value, _BY_VALUE):
            return typed_key(value)
        if isinstance(value, functools.partial):
            named = sorted(value.keywords.items())
            return (cls, *[self._token(x, own) for x in (value.func, value.args, tuple(named))])
        if cls is Fixed:
            constants = (*value.positional.items(), *sorted(value.named.items()))
            return (cls, self._token(value.function, own), self._token(constants, own))
        if cls is types.BuiltinFunctionType and isinstance(value.__self__, types.ModuleType):
            return Same(value)
        if cls is types.MethodType and isinstance(value.__self__, type):  # of a class
            return (cls, Same(value.__self__), self._token(value.__func__, own))
        if is_value_dataclass(cls):
            return (cls, *[self._token(item, own) for item in vars(value).values()])
        return self._changeable(value, own)

    def _changeable(self, value: Any, own: bool) -> Hashable:
        """Keys what may change in place, or should not be kept alive, by identity."""
        self.exact = False
        if own and not self.holds_object:
            leaves = [value] if isinstance(value, jax.Array) else opaque_flatten(value)[0]
            self.holds_object = any(type(leaf) is Opaque for leaf in leaves)
        kind = kind_of(value)
        node: Any = value
        if kind == OBJECT:
            return _Weak.of(node), _structure_of(node)
        if kind in (VARIABLE, STATE):
            return _Weak.of(node), node._meta
        return _Weak.of(node)

    def _namespace(self, value: Any) -> Hashable:
        """Keys a class or a module by what the function may read of it."""
        if _is_installed(value):
            return Same(value)
        met = self._met.get(id(value))
        if met is not None:
            return Same(value), met
        self._met[id(value)] = len(self._met)
        found = [(name, inspect.getattr_static(value, name, None)) for name in sorted(self._read)]
        read = [(name, self._token(x, own=False)) for name, x in found if x is not None]
        del self._met[id(value)]  # another function may read something else of it
        return Same(value), tuple(read)

    def _function(self, function: types.FunctionType) -> Hashable:
        depth = self._met.get(id(function))
        if depth is not None:
            return (types.FunctionType, depth)
        if _is_installed(function) and _is_global(function):
            return Same(function)
        code, outer = function.__code__, self._read
        self._met[id(function)] = len(self._met)
        self._read, looks_up = _names_in(code)
        if looks_up:
            self.exact = False
        cells = [_content(cell) for cell in function.__closure__ or ()]
        defaults = (function.__defaults__ or (), function.__kwdefaults__ or {})
        own = {name: x for name, x in vars(function).items() if not name.startswith("__")}
        key = (
            code,
            function.__qualname__,
            tuple([self._token(content, own=True) for content in cells]),
            tuple([self._token(default, own=True) for default in defaults[0]]),
            tuple([(name, self._token(x, own=True)) for name, x in sorted(defaults[1].items())]),
            tuple([(name, self._token(x, own=True)) for name, x in sorted(own.items())]),
            id(function.__globals__),  # which the function holds
            tuple(self._globals(function.__globals__, code)),
        )
        self._read = outer
        return key

    def _globals(self, values: dict[str, Any], code: types.CodeType) -> Iterator[Hashable]:
        for name in _global_names(code):
            if name in values:  # else it is a builtin
                yield name, self._token(values[name], own=False)


def _is_global(value: Any) -> bool:
    """Tells whether something that can be called is found under its name in its module."""
    if not callable(value):
        return False
    name = getattr(value, "__qualname__", None)
    module = _module_of(value)
    return type(name) is str and module is not None and vars(module).get(name) is value


def _is_installed(value: Any) -> bool:
    """Tells whether a class, a function or a module comes with Python or was installed."""
    module = value if isinstance(value, types.ModuleType) else _module_of(value)
    file = getattr(module, "__file__", None)
    return module is not None and (file is None or file.startswith(_INSTALLED))


def _module_of(value: Any) -> types.ModuleType | None:
    return sys.modules.get(getattr(value, "__module__", None) or "")


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


@functools.lru_cache(maxsize=4096)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Lists the globals that a function reads, with the functions defined in it."""
    if code.co_filename.startswith(_LIBRARIES):
        return ()
    found = {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname in _LOADS
    }
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(_global_names(constant))
    return tuple(sorted(found))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], bool]:
    """Returns the names of globals and attributes in a code, and whether it may make up others."""
    names, looks_up = set(code.co_names), not _LOOKUPS.isdisjoint(code.co_names)
    looks_up |= any(each.opname == "IMPORT_NAME" for each in dis.get_instructions(code))
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner, inner_looks_up = _names_in(constant)
            names |= inner
            looks_up |= inner_looks_up
    return frozenset(names), looks_up and not code.co_filename.startswith(_LIBRARIES)


_LOOKUPS = frozenset(("environ", "eval", "exec", "getattr", "getenv", "globals", "vars"))

_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")

# What these read beside their arguments are settings that JAX's own caches are keyed by.
_LIBRARIES = tuple(
    os.path.dirname(path) + os.sep for path in (os.path.dirname(__file__), inspect.getfile(jax))
)

_INSTALLED = (
    *_LIBRARIES,
    *{
        path + os.sep
        for kind, path in sysconfig.get_paths().items()
        if kind in ("stdlib", "platstdlib", "purelib", "platlib")
    },
)


def _structure_of(node: Any) -> Hashable:
    try:
        return plan_of(node).graphdef
    except StaticValueError:  # a function that reads it will say so
        return object()


class _Weak:
    """A part of a key that is equal only for the same object; it holds that weakly if it can."""

    __slots__ = ("_hash", "ref")

    def __init__(self, ref: Callable[[], Any], hash_value: int) -> None:
        self.ref, self._hash = ref, hash_value

    @classmethod
    def of(cls, value: Any) -> Hashable:
        try:
            return cls(weakref.ref(value), id(value))
        except TypeError:  # lists and dicts
            return Same(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Weak and self.ref() is other.ref() is not None

    def __hash__(self) -> int:
        return self._hash


class Weakly:
    """A function that is held weakly by what is kept of it; whoever calls it holds it."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._ref = weakref.ref(function)

    @property
    def __wrapped__(self) -> Any:
        return self._ref()

    @property
    def __name__(self) -> str:
        return getattr(self._ref(), "__name__", "function")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        function: Any = self._ref()
        return function(*args, **kwargs)

"""Typed keys of functions: what they do, not which object they are.

A closure made anew, as when an optimizer is made anew, has the key of the old one: code, globals,
defaults, cells and attributes. Whatever can change in place (a list in a cell, a callable written
in C) makes the function its own key. A function must not hide an object or Variable: it would go
on reading the original.
"""

import functools
import types
from collections.abc import Callable, Hashable
from typing import Any

from nnxlite._core.errors import StaticValueError
from nnxlite._core.keyer import Keyer, is_node, single

JITTED = "__nnx_jits__"
"""The attribute in which a function keeps its jitted forms. It is no part of what it does."""


def key_builtin(keyer: Keyer, value: types.BuiltinFunctionType) -> Hashable:
    """Keys a function written in C, by itself, or a method of a built-in object."""
    owner = value.__self__
    if owner is None or isinstance(owner, types.ModuleType):
        return value
    # `obj.append` is a new object each time; what it acts on may change in place.
    return (type(value), value.__name__, single(owner))


def key_method(keyer: Keyer, value: types.MethodType) -> Hashable:
    """Keys a method by the identity of its receiver, and its function."""
    owner = value.__self__
    if is_node(owner):
        raise hidden_node(keyer, f"is a method of {type(owner).__name__}")
    return (types.MethodType, single(owner), keyer.key(value.__func__))


def key_partial(keyer: Keyer, value: functools.partial[Any]) -> Hashable:
    """Keys a partial by function and arguments."""
    return _key_holder(keyer, value, _partial_parts)


def _partial_parts(keyer: Keyer, value: functools.partial[Any]) -> Hashable:
    named = value.keywords.items()
    return (
        type(value),
        keyer.at(".{}", "func", value.func),
        tuple([keyer.at(" (argument {})", i, arg) for i, arg in enumerate(value.args)]),
        frozenset([(name, keyer.at(" (argument {!r})", name, arg)) for name, arg in named]),
        _attributes(keyer, value.__dict__),
    )


def key_function(keyer: Keyer, value: types.FunctionType) -> Hashable:
    """Keys a function by code, globals, defaults, cells and attributes."""
    # The defaults last: JAX audits each look at them, and at the code, for 0.4 us apiece.
    plain = (
        value.__closure__ is None
        and (not value.__dict__ or (len(value.__dict__) == 1 and JITTED in value.__dict__))
        and value.__defaults__ is None
        and value.__kwdefaults__ is None
    )
    if plain:
        return _FunctionKey((value.__code__, value.__qualname__), value.__globals__)
    return _key_holder(keyer, value, _function_parts)


def _function_parts(keyer: Keyer, value: types.FunctionType) -> Hashable:
    keyer.rebindable = True
    parts = (
        value.__code__,
        value.__qualname__,
        _defaults(keyer, value),
        _cells(keyer, value),
        _attributes(keyer, value.__dict__),
    )
    return _FunctionKey(parts, value.__globals__)


def _key_holder(keyer: Keyer, value: Any, parts_of: Callable[[Keyer, Any], Hashable]) -> Hashable:
    """Keys a function by its parts; by identity, if something in it can change in place."""
    depth = keyer.open.get(id(value))
    if depth is not None:
        return (types.FunctionType, depth)  # a closure that refers to itself
    mutable, holder = keyer.mutable, keyer.holder
    keyer.mutable, keyer.holder = False, value
    keyer.open[id(value)] = len(keyer.open)
    parts = parts_of(keyer, value)
    del keyer.open[id(value)]
    changeable = keyer.mutable
    keyer.mutable, keyer.holder = mutable, holder
    return single(value) if changeable else parts


def _defaults(keyer: Keyer, value: types.FunctionType) -> Hashable:
    positional, named = value.__defaults__, value.__kwdefaults__
    if positional is None and named is None:
        return None
    named = sorted((named or {}).items())
    return (
        tuple([keyer.at(" (default {})", i, item) for i, item in enumerate(positional or ())]),
        tuple([(name, keyer.at(" (default {!r})", name, item)) for name, item in named]),
    )


def _cells(keyer: Keyer, value: types.FunctionType) -> Hashable:
    if value.__closure__ is None:
        return None
    names = value.__code__.co_freevars
    return tuple([_cell(keyer, name, c) for name, c in zip(names, value.__closure__, strict=True)])


def _cell(keyer: Keyer, name: str, cell: types.CellType) -> Hashable:
    try:
        content = cell.cell_contents
    except ValueError:  # not filled yet
        return (types.CellType,)
    return keyer.at(" (cell {!r})", name, content)


def _attributes(keyer: Keyer, attributes: dict[str, Any]) -> Hashable:
    own = [(name, item) for name, item in attributes.items() if name != JITTED]
    if not own:
        return None
    return frozenset([(name, keyer.at(".{}", name, item)) for name, item in own])


def hidden_node(keyer: Keyer, found: str) -> StaticValueError:
    """Returns the error for an object that a function reads."""
    return keyer.error(
        f"{found}, and the function would go on reading it after a copy, a merge or a jit",
        "Make the function a method, or store the submodule as an attribute of its own.",
    )


class _FunctionKey:
    """The key of a function by what it does; globals, a dict, are compared by identity."""

    __slots__ = ("globals", "parts")

    def __init__(self, parts: tuple[Hashable, ...], globals: dict[str, Any]) -> None:
        self.parts = parts
        self.globals = globals

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is _FunctionKey
            and other.globals is self.globals
            and other.parts == self.parts
        )

    def __hash__(self) -> int:
        return hash(self.parts)

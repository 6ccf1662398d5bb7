"""Typed keys of static values: what a trace may depend on without being an array.

JAX compares static arguments with `==`, so (1,), (1.0,) and (True,) share one trace. Here a
value has a *typed key*: two keys are equal if and only if the values are equal and of the same
types, all the way down, so that equal keys may share a trace. -0.0 differs from 0.0, and
nan equals itself.

A key holds the objects that it compares by identity, never their bare ids, and nothing here keeps
a key alive. Objects of the graph, recognised by the class attribute `__nnx_node__`, are no static
values.
"""

import dataclasses
import enum
import functools
import types
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Hashable
from typing import Any

import jax
import numpy as np
from jax.core import Tracer

from nnxlite._core.function_keys import (
    hidden_node,
    key_builtin,
    key_function,
    key_method,
    key_partial,
)
from nnxlite._core.keyer import Keyer, Rule, Same, single


def typed_key(value: Any, where: object = "value") -> Hashable:
    """Returns a key that is equal for equal values of equal types, at every depth.

    Args:
      value: Anything a user may store as a static value.
      where: What an error writes for the place of `value`: "attribute 'sizes' of Block", say, or an
        object whose `str` is that.

    Raises:
      StaticValueError: `value` cannot be compared by value, or it is a function that holds an
        object or Variable.

    Example:
      >>> typed_key((1, "a")) == typed_key((1, "a")), typed_key((1,)) == typed_key((True,))
      (True, False)
    """
    key = scalar_key(value)
    return Keyer(where, _RULES).key(value) if key is NO_KEY else key


NO_KEY = object()
"""What `scalar_key` returns for a value that it has no key for."""


def scalar_key(value: Any) -> Hashable:
    """Returns the typed key of a scalar or of a flat tuple of scalars; `NO_KEY` for all else.

    Most static values are of this sort, such as names, sizes, shapes and flags, and need no keyer,
    which takes longer to make than their key.
    """
    cls = type(value)
    if cls is str or value is None:
        return value
    rule = _SCALARS.get(cls)
    if rule is not None:
        return rule(value)
    return _flat_tuple(value) if cls is tuple else NO_KEY


def keyed(value: Any, where: object = "value") -> tuple[Hashable, bool, bool]:
    """Returns the typed key of `value`, and what there is to know about the value.

    Returns:
      The key; whether a list, dict or set is in the value, to be copied before it is kept; whether
      a function is in it that may get another key later.
    """
    keyer = Keyer(where, _RULES)
    return keyer.key(value), keyer.mutable, keyer.rebindable


def is_mutable(value: Any) -> bool:
    """Tells whether a static value is, or holds, a list, dict or set."""
    return scalar_key(value) is NO_KEY and keyed(value)[1]


@functools.lru_cache(maxsize=1024)
def is_value_dataclass(cls: type) -> bool:
    """Tells whether `cls` is a frozen dataclass whose objects compare by their fields."""
    # An `__eq__` that `@dataclass` wrote has no file.
    params = cls.__dict__.get("__dataclass_params__")
    if params is None or not (params.frozen and params.eq):
        return False
    code = getattr(cls.__eq__, "__code__", None)
    return code is not None and code.co_filename == "<string>"


def _plain(value: Any) -> Hashable:
    return (type(value), value)


def _float(value: float) -> Hashable:
    # hex writes the sign of zero, and one name for every nan
    return (float, value if value and value * 0 == 0 else value.hex())


def _complex(value: complex) -> Hashable:
    return (complex, value.real.hex(), value.imag.hex())


def _flat_tuple(value: tuple[Any, ...]) -> Hashable:
    parts: list[Hashable] = [tuple]
    for item in value:
        cls = type(item)
        if cls is str or item is None:
            parts.append(item)
        elif cls in _SCALARS:
            parts.append(_SCALARS[cls](item))
        else:
            return NO_KEY
    return tuple(parts)


def _key_scalar(keyer: Keyer, value: Any) -> Hashable:
    return _SCALARS[type(value)](value)


def _key_range(keyer: Keyer, value: range) -> Hashable:
    return (range, value.start, value.stop, value.step)


def _key_slice(keyer: Keyer, value: slice) -> Hashable:
    return (slice, *keyer.items((value.start, value.stop, value.step)))


def _key_tuple(keyer: Keyer, value: tuple[Any, ...]) -> Hashable:
    return (type(value), *keyer.items(value))


def _key_list(keyer: Keyer, value: list[Any]) -> Hashable:
    keyer.mutable = True
    keyer.enter(value)
    key = (list, *keyer.items(value))
    keyer.leave(value)
    return key


def _key_set(keyer: Keyer, value: set[Any] | frozenset[Any]) -> Hashable:
    keyer.mutable |= type(value) is set
    return (type(value), frozenset([keyer.at("{{...}}", None, item) for item in value]))


def _key_dict(keyer: Keyer, value: Any) -> Hashable:
    keyer.mutable = True
    keyer.enter(value)
    key = (type(value), frozenset(_pairs(keyer, value)))
    keyer.leave(value)
    return key


def _key_ordered_dict(keyer: Keyer, value: OrderedDict[Any, Any]) -> Hashable:
    keyer.mutable = True
    keyer.enter(value)
    key = (OrderedDict, *_pairs(keyer, value))
    keyer.leave(value)
    return key


def _key_defaultdict(keyer: Keyer, value: defaultdict[Any, Any]) -> Hashable:
    return (_key_dict(keyer, value), keyer.at(".{}", "default_factory", value.default_factory))


def _pairs(keyer: Keyer, value: Any) -> list[tuple[Hashable, Hashable]]:
    return [
        (keyer.at(" (key {!r})", name, name), keyer.at("[{!r}]", name, item))
        for name, item in value.items()
    ]


def _key_single(keyer: Keyer, value: Any) -> Hashable:
    return single(value)


def _key_enum(keyer: Keyer, value: enum.Enum) -> Hashable:
    name = value._name_
    return (type(value), Same(value) if name is None else name)


def _rule_for(cls: type) -> Rule:
    """Returns the rule for a class that is not in the table."""
    if issubclass(cls, type | types.ModuleType):
        return _key_single
    if issubclass(cls, enum.Enum):
        return _key_enum
    if getattr(cls, "__nnx_node__", False) is True:
        return _key_node
    if issubclass(cls, np.generic) and not issubclass(cls, np.void):
        return _key_numpy_scalar
    if issubclass(cls, np.dtype):
        return _key_dtype
    if issubclass(cls, tuple):
        return _key_tuple
    if is_value_dataclass(cls):
        return _key_dataclass
    if issubclass(cls, functools.partial):
        return key_partial
    if issubclass(cls, jax.Array | np.ndarray | Tracer):
        return _key_array
    return _key_other


def _key_node(keyer: Keyer, value: Any) -> Hashable:
    found = f"is a {type(value).__name__}"
    if keyer.holder is None:
        raise keyer.error(found, "Objects and Variables are data: store them as such.")
    raise hidden_node(keyer, found)


def _key_numpy_scalar(keyer: Keyer, value: np.generic) -> Hashable:
    return (type(value), value.dtype, "nan" if value != value else value.tobytes())


def _key_dtype(keyer: Keyer, value: np.dtype) -> Hashable:
    return (np.dtype, value)


def _key_dataclass(keyer: Keyer, value: Any) -> Hashable:
    fields = dataclasses.fields(value)
    parts = [keyer.at(".{}", f.name, getattr(value, f.name)) for f in fields if f.compare]
    return (type(value), *parts)


def _key_array(keyer: Keyer, value: Any) -> Hashable:
    if keyer.holder is not None:
        return single(value)
    kind = "a traced array" if isinstance(value, Tracer) else "an array"
    raise keyer.error(f"is {kind} ({value.dtype}{list(value.shape)})")


def _key_other(keyer: Keyer, value: Any) -> Hashable:
    if keyer.holder is not None:
        return single(value)
    cls = type(value)
    try:
        hash(value)
    except TypeError:
        name = f"{cls.__module__}.{cls.__qualname__}"
        raise keyer.error(f"is of type {name}, which is not hashable") from None
    return (cls, value)


class _Rules(dict[type, Rule]):
    def __missing__(self, cls: type) -> Rule:
        rule = self[cls] = _rule_for(cls)
        return rule


_SCALARS: dict[type, Callable[[Any], Hashable]] = {
    int: _plain,
    bool: _plain,
    bytes: _plain,
    float: _float,
    complex: _complex,
}

_RULES = _Rules(
    {
        **dict.fromkeys(_SCALARS, _key_scalar),
        range: _key_range,
        slice: _key_slice,
        tuple: _key_tuple,
        list: _key_list,
        set: _key_set,
        frozenset: _key_set,
        dict: _key_dict,
        types.MappingProxyType: _key_dict,
        OrderedDict: _key_ordered_dict,
        defaultdict: _key_defaultdict,
        types.FunctionType: key_function,
        types.BuiltinFunctionType: key_builtin,
        types.MethodType: key_method,
        functools.partial: key_partial,
    }
)

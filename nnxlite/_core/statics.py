"""Static values, interned: one `Static` for all values with the same typed key.

A `Static` is what a GraphDef holds of an attribute that is not data. Comparing two is comparing
identity. What may be static, and which values count as equal, is decided in
`nnxlite._core.keys`.
"""

import dataclasses
import types
from collections import OrderedDict, defaultdict
from collections.abc import Hashable
from typing import Any

from jax.core import Tracer

from nnxlite._core.errors import StaticValueError
from nnxlite._core.intern import InternTable
from nnxlite._core.keyer import Same, is_node
from nnxlite._core.keys import (
    NO_KEY,
    is_mutable,
    is_value_dataclass,
    keyed,
    scalar_key,
    typed_key,
)

__all__ = [
    "Static",
    "copy_containers",
    "is_mutable",
    "is_node",
    "short_text",
    "static",
    "static_by_identity",
    "typed_key",
]


class Static:
    """One static value, interned: equal values of equal types are the same `Static`."""

    __slots__ = ("__weakref__", "_mutable", "_value", "key")

    _value: Any
    key: Hashable
    _mutable: bool

    @property
    def value(self) -> Any:
        """The value; where it holds a list, dict or set, a copy that is the caller's own."""
        return copy_containers(self._value) if self._mutable else self._value

    def __reduce__(self) -> tuple[Any, ...]:
        return (static, (self._value,))

    def __copy__(self) -> "Static":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Static":
        return self

    def __repr__(self) -> str:
        return f"Static({short_text(self._value)})"


_STATICS: InternTable[Static] = InternTable()

# Scalars come again and again, and keeping some costs nothing. Looking one up takes 0.2 us here
# and twice that in the table.
_SCALARS: dict[Hashable, Static] = {}
_MOST_SCALARS = 4096


def static(value: Any, where: object = "value") -> Static:
    """Returns the one `Static` for `value`.

    A list, dict or set inside of `value` is copied, so that changing it later does not change
    what others get who store an equal value.

    Args:
      value: Anything a user may store as a static value.
      where: How an error names the place of `value`.

    Raises:
      StaticValueError: As in `typed_key`.

    Example:
      >>> static([1, 2]) is static([1, 2]), static([1, 2]) is static([1.0, 2])
      (True, False)
    """
    key = scalar_key(value)
    if key is not NO_KEY:
        return _SCALARS.get(key) or _scalar(value, key)
    key, mutable, rebindable = keyed(value, where)
    found = _STATICS.get(key)
    if found is None:
        return _STATICS.add(_new(copy_containers(value) if mutable else value, key, mutable))
    if rebindable and _has_changed(found, value):
        return _STATICS.replace(_new(copy_containers(value) if mutable else value, key, mutable))
    return found


def static_by_identity(value: Any, where: object = "value") -> Static:
    """Returns the one `Static` for this very object, such as an array that is marked static.

    Raises:
      StaticValueError: `value` is traced: it has no meaning outside of its trace.

    Example:
      >>> mask = np.ones(3)
      >>> static_by_identity(mask) is static_by_identity(mask)
      True
      >>> static_by_identity(mask) is static_by_identity(mask.copy())
      False
    """
    if isinstance(value, Tracer):
        raise StaticValueError(
            f"{where} is a traced array, which cannot be static. Store it as data."
        )
    key = (Same, Same(value))
    return _STATICS.get(key) or _STATICS.add(_new(value, key, mutable=False))


def _new(value: Any, key: Hashable, mutable: bool) -> Static:
    new = object.__new__(Static)
    new._value = value
    new._mutable = mutable
    new.key = key
    return new


def _scalar(value: Any, key: Hashable) -> Static:
    it = _STATICS.get(key) or _STATICS.add(_new(value, key, mutable=False))
    if len(_SCALARS) >= _MOST_SCALARS:
        _SCALARS.clear()
    _SCALARS[key] = it
    return it


def _has_changed(found: Static, value: Any) -> bool:
    # A function may rebind its own cells (`nonlocal`): then the one interned under this key is
    # no longer the one that the key describes.
    if found._value is value:
        return False
    try:
        return typed_key(found._value) != found.key
    except StaticValueError:
        return True


def copy_containers(value: Any) -> Any:
    """Returns `value` with its lists, dicts and sets copied, at every depth; the rest is shared."""
    cls = type(value)
    if cls is list:
        return [copy_containers(item) for item in value]
    if cls is set:
        return set(value)
    if cls is dict:
        return {key: copy_containers(item) for key, item in value.items()}
    if cls is OrderedDict:
        return OrderedDict((key, copy_containers(item)) for key, item in value.items())
    if cls is defaultdict:
        items = {key: copy_containers(item) for key, item in value.items()}
        return defaultdict(value.default_factory, items)
    if cls is types.MappingProxyType:
        return types.MappingProxyType(copy_containers(dict(value)))
    if cls is tuple:
        return tuple([copy_containers(item) for item in value])
    if isinstance(value, tuple):
        return tuple.__new__(cls, [copy_containers(item) for item in value])
    if is_value_dataclass(cls):
        return _copy_dataclass(value)
    return value


def _copy_dataclass(value: Any) -> Any:
    new = object.__new__(type(value))
    for field in dataclasses.fields(value):
        object.__setattr__(new, field.name, copy_containers(getattr(value, field.name)))
    return new


def short_text(value: Any, limit: int = 60) -> str:
    """Writes `value` on one short line, functions by their name."""
    if isinstance(value, types.FunctionType):
        text = value.__qualname__
    else:
        text = " ".join(repr(value).split())
    return text if len(text) <= limit else text[: limit - 3] + "..."

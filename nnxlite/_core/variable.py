"""Variables: the named cells of a model that hold its arrays.

A Variable has a *value*, usually an array but any pytree will do, a *kind*, which is its class, and
*metadata* (`nnxlite._core.metadata`). The value may be read everywhere, and written only at the
trace level at which the Variable was made. As a pytree a Variable is a node with one child, its
value, so that `is_leaf=lambda x: isinstance(x, nnx.Variable)` works in JAX's tree functions.

The library itself reads and writes the slots; hooks, checks and conversions belong to the public
methods.
"""

import copy
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import jax
import numpy as np
from jax.tree_util import GetAttrKey

from nnxlite._core import render
from nnxlite._core.arithmetic import Arithmetic, value_of
from nnxlite._core.metadata import (
    EMPTY,
    HOOKS,
    Described,
    Meta,
    VariableMetadata,
    hooks_of,
    joined,
    meta_of,
    with_metadata,
    with_own_names,
)
from nnxlite._core.placement import place
from nnxlite._core.trace import (
    FLATTENING,
    FOREIGN_READS,
    OPAQUE,
    SPECIAL,
    Level,
    Opaque,
    check_writable,
    current_level,
    record_foreign_read,
)
from nnxlite._core.treescope_view import treescope_repr
from nnxlite._core.values import normalized, own, view_of, with_part

__all__ = [
    "BatchStat",
    "Cache",
    "Intermediate",
    "LoRAParam",
    "Meta",
    "OptArray",
    "OptState",
    "OptVariable",
    "Param",
    "Perturbation",
    "RngCount",
    "RngKey",
    "RngState",
    "Variable",
    "VariableMetadata",
    "VariableState",
    "with_metadata",
]

A = TypeVar("A")

_new = object.__new__
_MISSING: Any = object()


class _Slotted(type):
    """Gives every kind of Variable slots only, so that a misspelt attribute is an error.

    A `__setattr__` would do the same at ten times the cost of each write of the library.
    """

    def __new__(
        mcs, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **kwargs: Any
    ) -> type:
        namespace.setdefault("__slots__", ())
        return super().__new__(mcs, name, bases, namespace, **kwargs)


class Variable(Arithmetic, Described, Generic[A], metaclass=_Slotted):
    """A cell that holds a value, usually an array, under a kind and with metadata.

    Python numbers become arrays and weak types become strong ones, here and in every setter, so
    that eager and jitted code see the same types. A Variable calculates and compares as its value;
    other attributes are looked up in the metadata, then in the value.

    Args:
      value: An array or any pytree; or a Variable or `VariableMetadata`, whose value and metadata
        are taken.
      **metadata: Static values by name, as in `out_sharding=("data", None)`, and hooks:
        `on_create_value`, `on_get_value`, `on_set_value` take the Variable and a value and return
        one, `on_add_axis` and `on_remove_axis` take the Variable, an index and a name. A subclass
        may define the hooks as methods instead.

    Raises:
      StaticValueError: The metadata holds an array.

    Example:
      >>> count = nnx.Variable(0, unit="steps")
      >>> count[...] += 2
      >>> int(count[...]), count.unit, count.shape
      (2, 'steps', ())
    """

    __slots__ = ("__weakref__", "_level", "_meta", "_value", "_version")
    __nnx_node__ = True

    _value: A

    if TYPE_CHECKING:
        dtype: Any
        ndim: int
        size: int
        T: jax.Array
        at: Any

    def __init__(self, value: A | VariableMetadata | "Variable[A]", **metadata: Any) -> None:
        if isinstance(value, VariableMetadata):
            metadata = joined(value.metadata, metadata)
            value = value.raw_value
        if isinstance(value, Variable):
            metadata = {**value._meta.mapping, **with_own_names(metadata)}
            value = value.get_raw_value()
        self._meta = meta = meta_of(type(self), metadata) if metadata else EMPTY
        self._version = 0
        self._level = current_level()
        self._value = made = normalized(value)
        if meta.hooks or self._class_hooks:
            for hook in hooks_of(self, "on_create_value"):
                made = hook(self, made)
            self._value = made = normalized(made)
        if meta is not EMPTY and "out_sharding" in meta.mapping:
            self._value = place(made, meta.mapping)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls._class_hooks = {name: (getattr(cls, name),) for name in HOOKS if hasattr(cls, name)}
        _register(cls)

    @classmethod
    def _make(cls, value: Any, meta: Meta, level: Level) -> Self:
        """Returns a fresh Variable with exactly these slots; no hook, check or conversion runs."""
        variable = _new(cls)
        variable._value = value
        variable._meta = meta
        variable._level = level
        variable._version = 0
        return variable

    def get_value(self, *, index: Any = _MISSING) -> Any:
        """Returns the value, or the part of it at `index`, after the `on_get_value` hooks.

        Containers and NumPy arrays come as copies, which the caller may change.
        """
        if FOREIGN_READS.recorders:
            record_foreign_read(self)
        value: Any = self._value
        if index is not _MISSING and index is not ...:
            value = value[index]
        value = own(value)
        if self._meta.hooks or self._class_hooks:
            for hook in hooks_of(self, "on_get_value"):
                value = hook(self, value)
        return value

    def set_value(self, value: Any, *, index: Any = _MISSING) -> None:
        """Sets the value, or the part of it at `index`, after the `on_set_value` hooks.

        With an index, or `...` for all of it, an array keeps its shape and dtype. Without one the
        new value may be anything.

        Raises:
          TraceLevelError: The Variable belongs to another trace level.
        """
        check_writable(self, f"set the value of {type(self).__name__}")
        if self._meta.hooks or self._class_hooks:
            for hook in hooks_of(self, "on_set_value"):
                value = hook(self, value)
        if index is _MISSING:
            self._value = normalized(value)
        else:
            self._value = with_part(self._value, index, value_of(value))

    @property
    def value(self) -> A:
        """The value, as `get_value()` and `set_value(x)` give and take it."""
        return self.get_value()

    @value.setter
    def value(self, value: Any) -> None:
        self.set_value(value)

    def get_raw_value(self) -> A:
        """Returns the value itself, not a copy, without running hooks."""
        if FOREIGN_READS.recorders:
            record_foreign_read(self)
        return self._value

    def set_raw_value(self, value: Any) -> None:
        """Sets the value without running hooks."""
        check_writable(self, f"set the value of {type(self).__name__}")
        self._value = normalized(value)

    @property
    def raw_value(self) -> A:
        """The value, without hooks."""
        return self.get_raw_value()

    @raw_value.setter
    def raw_value(self, value: Any) -> None:
        self.set_raw_value(value)

    @property
    def type(self) -> "type[Variable[Any]]":
        """The kind of the Variable: its class."""
        return type(self)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the value."""
        return self.__getattr__("shape")

    @property
    def sharding_names(self) -> Any:
        """The metadata `out_sharding`, None if there is none; flax's older name of it."""
        return self._meta.mapping.get("out_sharding")

    def __getitem__(self, index: Any) -> Any:
        return self.get_value(index=index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self.set_value(value, index=index)

    def __getattr__(self, name: str) -> Any:
        if name in _SLOTS or (name[:2] == "__" and name not in _ARRAY_PROTOCOLS):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        fields = self._meta.mapping
        if name in fields:
            return fields[name]
        value: Any = self.get_raw_value()
        if type(value) is np.ndarray and not (self._meta.hooks or self._class_hooks):
            value = view_of(value)  # a copy, only to look at, could be dear
        else:
            value = self.get_value()
        try:
            return getattr(value, name)
        except AttributeError:
            kind = type(self).__name__
            raise AttributeError(
                f"{kind} has no attribute {name!r}: it is neither a method of {kind}, nor metadata "
                f"({', '.join(fields) or 'none'}), nor an attribute of its value, which is of type "
                f"{type(value).__name__}"
            ) from None

    def replace(self, value: Any = _MISSING, **metadata: Any) -> Self:
        """Returns a new Variable of this kind with another value, or with metadata added.

        No hooks run.

        Example:
          >>> nnx.Param(jnp.ones(2), note="a").replace(jnp.zeros(3)).shape
          (3,)
        """
        if value is _MISSING:
            value = self.get_raw_value()
        meta = self._meta
        if metadata:
            fields = {**meta.mapping, **with_own_names(metadata)}
            meta = meta_of(type(self), fields)
        return self._make(normalized(value), meta, current_level())

    copy = replace
    to_state = replace

    def copy_from(self, other: "Variable[A]") -> None:
        """Takes value and metadata of another Variable of the same kind.

        Raises:
          TypeError: `other` is of another kind.
          TraceLevelError: This Variable belongs to another trace level.
        """
        if type(self) is not type(other):
            raise TypeError(
                f"a {type(self).__name__} cannot copy from a {type(other).__name__}; expected the "
                "same kind"
            )
        self.update_from_state(other)

    def update_from_state(self, state: "Variable[A]") -> None:
        """Takes value and metadata of a Variable of any kind."""
        value = state.get_raw_value()
        self._set_meta(state._meta)
        self._value = value

    @classmethod
    def from_metadata(cls, value: Any, attributes: Mapping[str, Any]) -> Self:
        """Returns a Variable of this kind with this value and metadata; no hooks run."""
        return cls._make(normalized(value), meta_of(cls, attributes), current_level())

    def __copy__(self) -> Self:
        return self._make(self._value, self._meta, current_level())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self._make(copy.deepcopy(self._value, memo), self._meta, current_level())

    def __reduce__(self) -> tuple[Any, ...]:
        return (_restored, (type(self), self._value, self._meta))

    def __repr__(self) -> str:
        return render.text(self)

    __treescope_repr__ = treescope_repr


_SLOTS = frozenset(Variable.__slots__)

# Protocols by which other array libraries take the value over without a copy.
_ARRAY_PROTOCOLS = frozenset({"__dlpack__", "__dlpack_device__", "__cuda_array_interface__"})


def _restored(cls: type[Variable[Any]], value: Any, meta: Meta) -> Variable[Any]:
    return cls._make(value, meta, current_level())


def _flatten(variable: Variable[Any]) -> tuple[tuple[Any], Any]:
    if SPECIAL and FLATTENING.opaque is not False:
        if FLATTENING.opaque:
            return (Opaque(variable),), OPAQUE
        record_foreign_read(variable)
    return (variable._value,), variable._meta


_VALUE_KEY = GetAttrKey("value")


def _flatten_with_keys(variable: Variable[Any]) -> tuple[tuple[tuple[Any, Any]], Any]:
    if SPECIAL and FLATTENING.opaque is not False:
        if FLATTENING.opaque:
            return ((_VALUE_KEY, Opaque(variable)),), OPAQUE
        record_foreign_read(variable)
    return ((_VALUE_KEY, variable._value),), variable._meta


def _unflattener(cls: type[Variable[Any]]) -> Callable[[Any, Any], Any]:
    def unflatten(aux: Any, children: Any) -> Any:
        # JAX puts anything here: None, object(), axes, shardings. Nothing is checked.
        if aux is OPAQUE:
            (leaf,) = children
            return leaf.node if type(leaf) is Opaque else leaf
        variable = _new(cls)
        (variable._value,) = children
        variable._meta = aux
        variable._level = None
        variable._version = 0
        return variable

    return unflatten


def _register(cls: type[Variable[Any]]) -> None:
    jax.tree_util.register_pytree_with_keys(cls, _flatten_with_keys, _unflattener(cls), _flatten)


_register(Variable)

VariableState = Variable


class Param(Variable[A]):
    """A parameter that training changes."""


class BatchStat(Variable[A]):
    """A running statistic of the batches seen, such as the mean in `BatchNorm`."""


class Cache(Variable[A]):
    """What a layer remembers from step to step while decoding."""


class Intermediate(Variable[A]):
    """A value recorded during a call, by `sow` or by `capture`."""


class Perturbation(Intermediate[A]):
    """What `perturb` adds to an intermediate value; its gradient is that of the value."""


class RngState(Variable[A]):
    """The state of a stream of random numbers; `tag` in its metadata names the stream."""


class RngKey(RngState[A]):
    """The key that a stream of random numbers starts from."""


class RngCount(RngState[A]):
    """How many keys a stream of random numbers has given."""


class OptState(Variable[A]):
    """The state of an optimizer."""


class OptArray(OptState[A]):
    """An array of an optimizer's state that belongs to no single Variable."""


class OptVariable(OptState[A]):
    """A part of an optimizer's state that belongs to one Variable of the model."""


class LoRAParam(Param[A]):
    """A parameter of a low-rank adapter."""

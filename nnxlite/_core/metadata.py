"""Metadata: what is known about a Variable besides its value.

A Variable's metadata is static: it follows the rule of `nnxlite._core.statics` and is part of
what a trace depends on. Equal metadata is one `Meta`, shared by all Variables that carry it, so
that comparing it is comparing identity. *Hooks* are functions given as metadata under one of the
names in `HOOKS`, which the Variable calls when it is created, read, written, or gains or loses an
axis.
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import wraps
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

from nnxlite._core.intern import InternTable
from nnxlite._core.keys import NO_KEY, is_mutable, scalar_key, typed_key
from nnxlite._core.statics import copy_containers, short_text
from nnxlite._core.trace import Level, check_writable
from nnxlite._core.versions import structure_changed

Hook: TypeAlias = Callable[..., Any]
Hooks: TypeAlias = tuple[Hook, ...]

HOOKS = ("on_create_value", "on_get_value", "on_set_value", "on_add_axis", "on_remove_axis")

_MISSING: Any = object()

OTHER_NAMES = {"sharding": "out_sharding", "sharding_names": "out_sharding"}
"""Names under which a metadata field may be given or asked for besides its own."""


class Meta:
    """The metadata of a Variable, interned: equal fields of equal types are the same `Meta`.

    Attributes:
      key: The typed key of the fields.
      hooks: The hooks among the fields, each as a tuple of functions.
    """

    __slots__ = ("__weakref__", "_fields", "_plain", "hooks", "key")

    _fields: Mapping[str, Any]
    _plain: bool
    hooks: Mapping[str, Hooks]
    key: Hashable

    @staticmethod
    def of(fields: Mapping[str, Any], where: str = "Variable") -> "Meta":
        """Returns the one `Meta` with these fields.

        Args:
          fields: Names and static values.
          where: Whose metadata it is, for messages.

        Raises:
          StaticValueError: A field holds an array or something else that is not static.

        Example:
          >>> Meta.of({"sharding": ("data", None)}) is Meta.of({"sharding": ("data", None)})
          True
        """
        if not fields:
            return EMPTY
        pairs = []
        for name, item in fields.items():
            part = scalar_key(item)
            if part is NO_KEY:
                part = typed_key(item, _Place(where, name))
            pairs.append((name, part))
        key = frozenset(pairs)
        return _METAS.get(key) or _METAS.add(_new_meta(fields, key))

    @property
    def mapping(self) -> Mapping[str, Any]:
        """The fields, read-only; a list, dict or set among them is the caller's own copy."""
        if self._plain:
            return self._fields
        return MappingProxyType({n: copy_containers(item) for n, item in self._fields.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return (Meta.of, (dict(self._fields),))

    def __copy__(self) -> "Meta":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "Meta":
        return self

    def __repr__(self) -> str:
        fields = ", ".join(
            [f"{name}={short_text(item, 40)}" for name, item in self._fields.items()]
        )
        return f"Meta({fields})"


class _Place:
    """The place of a metadata field in a message, written only if there is one."""

    __slots__ = ("name", "owner")

    def __init__(self, owner: str, name: str) -> None:
        self.owner = owner
        self.name = name

    def __str__(self) -> str:
        return f"metadata {self.name!r} of {self.owner}"


_METAS: InternTable[Meta] = InternTable()


def _new_meta(fields: Mapping[str, Any], key: Hashable) -> Meta:
    for name in fields:
        if type(name) is not str:
            raise TypeError(f"metadata has the field name {name!r}; names are strings")
    new = object.__new__(Meta)
    new.key = key
    new._plain = not any(is_mutable(item) for item in fields.values())
    new._fields = MappingProxyType({name: copy_containers(fields[name]) for name in sorted(fields)})
    new.hooks = {name: as_hooks(fields[name]) for name in HOOKS if name in fields}
    return new


EMPTY = _METAS.add(_new_meta({}, frozenset()))
"""No metadata."""


def as_hooks(hooks: Hook | Iterable[Hook] | None) -> Hooks:
    """Returns one hook, several or none as a tuple."""
    if hooks is None:
        return ()
    return (hooks,) if callable(hooks) else tuple(hooks)


def with_own_names(fields: dict[str, Any]) -> dict[str, Any]:
    """Returns `fields` with each field under its own name.

    Raises:
      TypeError: Two names of one field are given.
    """
    for other, own in OTHER_NAMES.items():
        if other in fields:
            if own in fields:
                raise TypeError(f"metadata {other!r} and {own!r} are the same field; give one")
            fields = {own if name == other else name: item for name, item in fields.items()}
    return fields


class Described:
    """What gives an object with the slot `_meta` access to its metadata."""

    __slots__ = ()

    _meta: Meta
    _level: Level
    _version: int
    _class_hooks: ClassVar[Mapping[str, Hooks]] = {}

    def get_metadata(self, name: str | None = None, default: Any = _MISSING) -> Any:
        """Returns one metadata field, or without a name all of them as a new dict.

        Raises:
          KeyError: There is no such field, and no default.
        """
        fields = self._meta.mapping
        if name is None:
            return dict(fields)
        name = OTHER_NAMES.get(name, name)
        if name in fields:
            return fields[name]
        if default is _MISSING:
            raise KeyError(
                f"{type(self).__name__} has no metadata {name!r}; it has "
                f"{', '.join(fields) or 'none'}"
            )
        return default

    def set_metadata(self, *args: Any, **fields: Any) -> None:
        """Sets metadata: `set_metadata(name, value)` or `set_metadata(name=value, ...)`.

        `set_metadata({name: value, ...})` puts a mapping in the place of all fields.

        Raises:
          StaticValueError: A field holds an array.
          TraceLevelError: The Variable belongs to another trace level.
        """
        before = dict(self._meta.mapping)
        if fields and not args:
            after = before | with_own_names(fields)
        elif len(args) == 2 and isinstance(args[0], str) and not fields:
            after = before | with_own_names({args[0]: args[1]})
        elif len(args) == 1 and not fields and isinstance(args[0], Mapping):
            after = dict(args[0])
        else:
            raise TypeError(
                "set_metadata takes a name and a value, keywords, or one mapping; got "
                f"{len(args)} positional arguments and {len(fields)} keywords"
            )
        self._set_meta(meta_of(type(self), after))

    def has_metadata(self, name: str) -> bool:
        """Tells whether there is a metadata field of this name."""
        return OTHER_NAMES.get(name, name) in self._meta.mapping

    def del_metadata(self, name: str) -> None:
        """Removes a metadata field.

        Raises:
          KeyError: There is no such field.
        """
        self.get_metadata(name)
        after = dict(self._meta.mapping)
        del after[OTHER_NAMES.get(name, name)]
        self._set_meta(meta_of(type(self), after))

    def _set_meta(self, meta: Meta) -> None:
        check_writable(self, f"set the metadata of {type(self).__name__}")
        if meta is not self._meta:
            self._meta = meta
            structure_changed(self)

    def add_axis(self, index: int, name: str | None) -> None:
        """Runs the `on_add_axis` hooks: the value gained an axis at `index`."""
        for hook in hooks_of(self, "on_add_axis"):
            hook(self, index, name)

    def remove_axis(self, index: int, name: str | None) -> None:
        """Runs the `on_remove_axis` hooks: the value lost its axis at `index`."""
        for hook in hooks_of(self, "on_remove_axis"):
            hook(self, index, name)


def hooks_of(described: Described, name: str) -> Hooks:
    """Returns the hooks under a name: those of the metadata, or else the method of the class."""
    hooks = described._meta.hooks
    return hooks[name] if name in hooks else described._class_hooks.get(name, ())


# Flags of flax that change what a Variable is; here only their usual value exists.
_FLAX_FLAGS = ("hijax", "ref")


def meta_of(cls: type, fields: Mapping[str, Any]) -> Meta:
    """Returns the `Meta` for fields that a user gave to an object of class `cls`."""
    fields = with_own_names(dict(fields))
    for flag in _FLAX_FLAGS:
        if fields.pop(flag, False):
            raise ValueError(f"{cls.__name__}({flag}=True) is not supported; leave `{flag}` out")
    return Meta.of(fields, cls.__name__)


def joined(taken: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields an initializer brings, which win, with those given to a constructor.

    The hooks of the constructor win. Both is as in flax.
    """
    given = with_own_names(dict(given))
    taken = with_own_names(dict(taken))
    return {**given, **taken, **{name: given[name] for name in HOOKS if name in given}}


@dataclasses.dataclass(frozen=True, eq=False)
class VariableMetadata:
    """A value on its way into a Variable, with metadata that the Variable will take.

    Attributes:
      raw_value: The value.
      metadata: Fields and hooks for the Variable.
    """

    raw_value: Any
    metadata: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def with_metadata(initializer: Callable[..., Any], **metadata: Any) -> Callable[..., Any]:
    """Returns an initializer whose values bring metadata to the Variable that takes them.

    Args:
      initializer: Makes a value, such as `nnx.initializers.zeros`.
      **metadata: Fields and hooks for the Variable.

    Example:
      >>> init = nnx.with_metadata(jax.nn.initializers.zeros, note="bias")
      >>> nnx.Param(init(jax.random.key(0), (2,), jnp.float32)).get_metadata("note")
      'bias'
    """

    @wraps(initializer)
    def initialize(*args: Any, **kwargs: Any) -> VariableMetadata:
        return VariableMetadata(initializer(*args, **kwargs), metadata)

    return initialize

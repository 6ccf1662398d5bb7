"""Collection names, as Linen uses them: "params" and others, each for one kind of Variable."""

import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

from nnxlite._core.variable import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    Variable,
)

Kind = TypeVar("Kind", bound=type[Variable[Any]])

_KINDS: dict[str, type[Variable[Any]]] = {
    "params": Param,
    "batch_stats": BatchStat,
    "cache": Cache,
    "intermediates": Intermediate,
    "perturbations": Perturbation,
}


@overload
def register_variable_name(name: str, kind: Kind, *, overwrite: bool = False) -> Kind: ...


@overload
def register_variable_name(
    name: str, kind: None = None, *, overwrite: bool = False
) -> Callable[[Kind], Kind]: ...


def register_variable_name(name: str, kind: Any = None, *, overwrite: bool = False) -> Any:
    """Gives a kind of Variable a collection name; without a kind, a class decorator that does.

    Args:
      name: The collection, such as "params".
      kind: The class of Variables.
      overwrite: Whether the name may be taken from another class.

    Raises:
      ValueError: The name belongs to another class.

    Example:
      >>> @nnx.register_variable_name("masks", overwrite=True)
      ... class Mask(nnx.Variable):
      ...     pass
      >>> nnx.variable_type_from_name("masks") is Mask
      True
    """
    if kind is None:
        return lambda kind: register_variable_name(name, kind, overwrite=overwrite)
    known = _KINDS.get(name)
    if known is not None and known is not kind and not overwrite:
        raise ValueError(
            f"the name {name!r} belongs to {known.__name__}; to give it to {kind.__name__}, pass "
            "overwrite=True"
        )
    _KINDS[name] = kind
    return kind


def variable_type_from_name(
    name: str, /, *, base: type[Variable[Any]] = Variable, allow_register: bool = False
) -> type[Variable[Any]]:
    """Returns the kind of Variable that has this collection name.

    Args:
      name: The collection.
      base: What a kind made anew derives from.
      allow_register: Whether an unknown name makes a new kind.

    Raises:
      ValueError: The name is unknown.
    """
    if name not in _KINDS:
        if not allow_register:
            raise ValueError(
                f"no kind of Variable is named {name!r}, known are {', '.join(sorted(_KINDS))}. "
                "Use register_variable_name, or pass allow_register=True."
            )
        _KINDS[name] = types.new_class(name, (base,))
    return _KINDS[name]


def variable_name_from_type(kind: type[Variable[Any]], /, *, allow_register: bool = False) -> str:
    """Returns the collection name of a kind of Variable.

    Args:
      kind: The class.
      allow_register: Whether a kind without a name gets that of its class.

    Raises:
      ValueError: The kind has no name, or the name of its class belongs to another kind.
    """
    for name, known in _KINDS.items():
        if known is kind:
            return name
    if not allow_register:
        raise ValueError(
            f"{kind.__name__} has no collection name. Use register_variable_name, or pass "
            "allow_register=True."
        )
    register_variable_name(kind.__name__, kind)
    return kind.__name__

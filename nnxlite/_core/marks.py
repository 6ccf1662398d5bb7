"""Data or static: what the user says of an attribute where its type does not tell.

By default an attribute is data if it is a Variable, an array, an object, or a container that
holds any of these; everything else is static. `nnx.data` and `nnx.static` around a value, or the
annotations `nnx.Data[...]` and `nnx.Static[...]` in a class body, say otherwise.
"""

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, dataclass_transform, overload

from nnxlite._core.errors import StaticValueError
from nnxlite._core.graph import AUTO, DATA, HELD_STATIC
from nnxlite._core.kinds import ARRAY, has_data, has_nodes, register_kind

__all__ = [
    "Data",
    "Marked",
    "Static",
    "class_marks",
    "data",
    "dataclass",
    "has_data",
    "is_data",
    "register_data_type",
    "static",
    "unmarked",
]

A = TypeVar("A")
C = TypeVar("C", bound=type)
_MISSING: Any = dataclasses.MISSING
_FIELD_KEY = "nnxlite.mark"


class Marked:
    """A value on its way to an attribute, with what the user said of it."""

    __slots__ = ("mark", "value")

    def __init__(self, value: Any, mark: int) -> None:
        self.value, self.mark = value, mark


def unmarked(value: Any) -> tuple[Any, int]:
    """Returns a value, and what the user said of it as it was assigned."""
    return (value.value, value.mark) if type(value) is Marked else (value, AUTO)


def check_mark(holder: Any, place: str, value: Any, mark: object) -> None:
    """Raises if a value has to be static by its mark, and cannot be.

    Args:
      holder: The object that it is assigned to.
      place: Where, such as "attribute 'rate'".
      value: The value, without a mark of its own.
      mark: What was said of the place, or of the value.
    """
    if mark == HELD_STATIC and has_nodes(value):
        found = f"a {type(value).__name__}"
        if isinstance(value, list | dict | tuple):
            found += " that holds objects or Variables"
        raise StaticValueError(
            f"Cannot assign {found} to {place} of {type(holder).__name__}, which is marked static: "
            "its state would be frozen into every trace. Say that it is data now, with "
            "nnx.data(...) around the value, or take the mark away."
        )


def data(value: Any = _MISSING, /, **field: Any) -> Any:
    """Marks an attribute as data: numbers in it become leaves, whatever their type.

    Args:
      value: The value to assign. Left out, this is a field of a dataclass.
      **field: As for `dataclasses.field`.

    Example:
      >>> class Net(nnx.Module):
      ...     def __init__(self):
      ...         self.rate = nnx.data(0.5)
      >>> list(nnx.state(Net()))
      ['rate']
    """
    return _marked(value, DATA, field)


def static(value: Any = _MISSING, /, **field: Any) -> Any:
    """Marks an attribute as static: part of the GraphDef. Arrays count by identity then.

    Args:
      value: The value to assign. Left out, this is a field of a dataclass.
      **field: As for `dataclasses.field`.

    Example:
      >>> class Net(nnx.Module):
      ...     def __init__(self):
      ...         self.mask = nnx.static(np.ones(3))
      >>> list(nnx.state(Net()))
      []
    """
    return _marked(value, HELD_STATIC, field)


def _marked(value: Any, mark: int, field: dict[str, Any]) -> Any:
    if value is not _MISSING:
        if field:
            raise TypeError(
                f"A value and the field options {sorted(field)} exclude each other: pass the value "
                "to assign it, or only options to declare a dataclass field."
            )
        return Marked(value, mark)
    metadata = {**field.pop("metadata", {}), _FIELD_KEY: mark}
    return dataclasses.field(metadata=metadata, **field)


class _MarkAnnotation:
    __slots__ = ("mark",)

    def __init__(self, mark: int) -> None:
        self.mark = mark


Data = Annotated[A, _MarkAnnotation(DATA)]
Static = Annotated[A, _MarkAnnotation(HELD_STATIC)]


def class_marks(cls: type) -> Mapping[str, int]:
    """Returns what the annotations and dataclass fields of a class and its bases say."""
    marks: dict[str, int] = {}
    for base in reversed(cls.__mro__[1:]):
        marks.update(vars(base).get("_class_marks") or _own_marks(base))
    return {**marks, **_own_marks(cls)}


def _own_marks(cls: type) -> dict[str, int]:
    marks = {name: _mark_of(note, cls) for name, note in _annotations(cls).items()}
    for name, value in vars(cls).items():
        # `dataclasses.dataclass` takes the fields away later, after the class was made.
        if isinstance(value, dataclasses.Field) and _FIELD_KEY in value.metadata:
            marks[name] = value.metadata[_FIELD_KEY]
    return {name: mark for name, mark in marks.items() if mark != AUTO}


if sys.version_info >= (3, 14):  # annotations are made when they are asked for
    import annotationlib

    def _annotations(cls: type) -> dict[str, Any]:
        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)

else:

    def _annotations(cls: type) -> dict[str, Any]:
        return vars(cls).get("__annotations__", {})


def _mark_of(annotation: Any, cls: type) -> int:
    if isinstance(annotation, str):  # `from __future__ import annotations`
        return _mark_of_text(annotation, cls)
    for extra in getattr(annotation, "__metadata__", ()):
        if isinstance(extra, _MarkAnnotation):
            return extra.mark
    # `Data[int] | None`, but not the arguments of any other type.
    if _is_union(annotation):
        marks = [_mark_of(part, cls) for part in typing.get_args(annotation)]
        return max(marks, default=AUTO)
    return AUTO


def _is_union(annotation: Any) -> bool:
    return typing.get_origin(annotation) in (typing.Union, types.UnionType)


def _mark_of_text(annotation: str, cls: type) -> int:
    name, bracket, _ = annotation.strip().strip("'\"").partition("[")
    names = name.strip().split(".")
    if not bracket or names[-1] not in ("Data", "Static"):
        return AUTO
    # The name says it, unless it is known to be something else in the module of the class.
    found: Any = sys.modules.get(cls.__module__)
    for part in names:
        found = getattr(found, part, None)
    if found is not None and found is not Data and found is not Static:
        return AUTO
    return DATA if names[-1] == "Data" else HELD_STATIC


@overload
def dataclass(cls: C, /, **options: Any) -> C: ...
@overload
def dataclass(**options: Any) -> Callable[[C], C]: ...
@dataclass_transform(field_specifiers=(dataclasses.field, data, static))
def dataclass(cls: Any = None, /, **options: Any) -> Any:
    """Makes a dataclass of an object class; fields may be `nnx.data(...)` or `nnx.static(...)`.

    Takes the options of `dataclasses.dataclass`. `eq` is off by default: objects compare by
    identity, as their fields hold arrays.

    Example:
      >>> @nnx.dataclass
      ... class Scale(nnx.Pytree):
      ...     by: nnx.Param
      ...     name: str = nnx.static(default="scale")
      >>> Scale(nnx.Param(2.0)).name
      'scale'
    """
    if cls is None:
        return lambda cls: dataclass(cls, **options)
    return dataclasses.dataclass(cls, **{"eq": False, **options})


def register_data_type(cls: C, /) -> C:
    """Lets values of exactly this type count as arrays: each is one leaf of the object it is in.

    Example:
      >>> @nnx.register_data_type
      ... class Quantized:
      ...     pass
      >>> nnx.is_data(Quantized())
      True
    """
    register_kind(cls, ARRAY)
    return cls


def is_data(value: Any) -> bool:
    """Tells whether an attribute with this value would be data by its type.

    Example:
      >>> nnx.is_data(jnp.ones(2)), nnx.is_data([1, 2]), nnx.is_data([jnp.ones(2)])
      (True, False, True)
    """
    value, mark = unmarked(value)
    return has_data(value) if mark == AUTO else mark == DATA

"""Data or static: what the user says of an attribute where its type does not tell.

By default an attribute is data if it is a Variable, an array, an object, or a container that
holds any of these; everything else is static. `nnx.data` and `nnx.static` around a value, or the
annotations `nnx.Data[...]` and `nnx.Static[...]` in a class body, say otherwise.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, TypeVar, dataclass_transform, overload

from nnxlite._core import graph
from nnxlite._core.graph import ARRAY, AUTO, DATA, HELD_STATIC, STATIC, kind_of

A = TypeVar("A")
C = TypeVar("C", bound=type)
_MISSING: Any = dataclasses.MISSING
_FIELD_KEY = "nnxlite.mark"


class Marked:
    """A value on its way to an attribute, with what the user said of it."""

    __slots__ = ("mark", "value")

    def __init__(self, value: Any, mark: int) -> None:
        self.value, self.mark = value, mark


def data(value: Any = _MISSING, /, **field: Any) -> Any:
    """Marks an attribute as data: numbers in it become leaves, whatever their type.

    Args:
      value: The value to assign. Left out, this is a field of an `nnx.dataclass`.
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
      value: The value to assign. Left out, this is a field of an `nnx.dataclass`.
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


def annotated_marks(cls: type) -> dict[str, int]:
    """Returns what the annotations of a class and its bases say."""
    marks: dict[str, int] = {}
    for base in reversed(cls.__mro__):
        for name, annotation in _annotations(base).items():
            mark = _mark_of(annotation)
            if mark != AUTO:
                marks[name] = mark
    return marks


def _annotations(cls: type) -> dict[str, Any]:
    if "__annotations__" in vars(cls):
        return vars(cls)["__annotations__"]
    # From Python 3.14 on annotations are made when they are asked for.
    if "__annotate_func__" in vars(cls) or "__annotate__" in vars(cls):
        import annotationlib  # type: ignore[import-not-found]

        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)
    return {}


def _mark_of(annotation: Any) -> int:
    if isinstance(annotation, str):  # `from __future__ import annotations`
        head = annotation.split("[", 1)[0].rsplit(".", 1)[-1].strip()
        if "[" in annotation:
            return {"Data": DATA, "Static": HELD_STATIC}.get(head, AUTO)
        return AUTO
    for extra in getattr(annotation, "__metadata__", ()):
        if isinstance(extra, _MarkAnnotation):
            return extra.mark
    return AUTO


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
    made = dataclasses.dataclass(cls, **{"eq": False, **options})
    marks = {
        field.name: field.metadata[_FIELD_KEY]
        for field in dataclasses.fields(made)
        if _FIELD_KEY in field.metadata
    }
    made._class_marks = {**made._class_marks, **marks}
    return made


def register_data_type(cls: C, /) -> C:
    """Lets values of exactly this type count as arrays: each is one leaf of the object it is in.

    Example:
      >>> @nnx.register_data_type
      ... class Quantized:
      ...     pass
      >>> nnx.is_data(Quantized())
      True
    """
    graph.register_kind(cls, ARRAY)
    return cls


def is_data(value: Any) -> bool:
    """Tells whether an attribute with this value would be data by its type.

    Example:
      >>> nnx.is_data(jnp.ones(2)), nnx.is_data([1, 2]), nnx.is_data([jnp.ones(2)])
      (True, False, True)
    """
    kind = value.mark if isinstance(value, Marked) else kind_of(value)
    if isinstance(value, Marked):
        return kind == DATA
    return kind != STATIC and has_data(value)


def has_data(value: Any) -> bool:
    """Tells whether a value is or contains a Variable, an array or an object."""
    kind = kind_of(value)
    if kind in (graph.VARIABLE, graph.STATE, graph.OBJECT, ARRAY):
        return True
    if kind == graph.LIST:
        return any(map(has_data, value))
    if kind == graph.DICT:
        return any(map(has_data, value.values()))
    if kind in (graph.TUPLE, graph.FOREIGN):
        return any(map(has_data, graph.value_children(value)[2]))
    return kind in (graph.METHOD, graph.PARTIAL) and graph.is_graph_method(value)

"""Objects, and data or static attributes, under the module path that they have in flax.nnx."""

from nnxlite._core.marks import (
    Data,
    Static,
    data,
    dataclass,
    has_data,
    is_data,
    register_data_type,
    static,
)
from nnxlite._core.module import Object, Pytree

__all__ = [
    "Data",
    "Object",
    "Pytree",
    "Static",
    "data",
    "dataclass",
    "has_data",
    "is_data",
    "register_data_type",
    "static",
]

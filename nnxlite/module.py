"""Modules and their modes, under the module path that they have in flax.nnx."""

from nnxlite._core.attributes import view, view_info, with_attributes
from nnxlite._core.capture import capture
from nnxlite._core.iterate import iter_children, iter_module_children, iter_modules
from nnxlite._core.module import Module
from nnxlite.nn.flags import first_from

__all__ = [
    "Module",
    "capture",
    "first_from",
    "iter_children",
    "iter_module_children",
    "iter_modules",
    "view",
    "view_info",
    "with_attributes",
]

"""Containers that are modules, under the module path that they have in flax.nnx."""

from nnxlite._core.containers import Dict, List, Sequential

__all__ = ["Dict", "List", "Sequential"]

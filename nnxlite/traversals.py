"""Nested mappings as flat ones, under the module path that this has in flax.nnx."""

from nnxlite._core.traversals import (
    empty_node,
    flatten_mapping,
    flatten_to_sequence,
    unflatten_mapping,
)

__all__ = ["empty_node", "flatten_mapping", "flatten_to_sequence", "unflatten_mapping"]

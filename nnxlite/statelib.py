"""States and their forms, under the module path that they have in flax.nnx."""

from nnxlite._core.state import State
from nnxlite._core.state_forms import (
    FlatState,
    filter_state,
    from_flat_state,
    map_state,
    merge_state,
    replace_by_pure_dict,
    restore_int_paths,
    split_state,
    to_flat_state,
    to_pure_dict,
)

__all__ = [
    "FlatState",
    "State",
    "filter_state",
    "from_flat_state",
    "map_state",
    "merge_state",
    "replace_by_pure_dict",
    "restore_int_paths",
    "split_state",
    "to_flat_state",
    "to_pure_dict",
]

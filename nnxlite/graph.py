"""What takes object graphs apart and looks through them, under flax.nnx's older module path."""

from nnxlite._core.call import call
from nnxlite._core.clone import as_pure, clone, pure
from nnxlite._core.flat import flatten, unflatten
from nnxlite._core.graphdef import GraphDef
from nnxlite._core.iterate import (
    find_duplicates,
    iter_children,
    iter_graph,
    iter_module_children,
    map,
    recursive_map,
    set_metadata,
)
from nnxlite._core.merge import merge, update
from nnxlite._core.modes import set_graph_mode, set_graph_updates
from nnxlite._core.pop import pop
from nnxlite._core.split import graphdef, split, state, variables
from nnxlite._core.state import GraphState, State

NodeDef = GraphDef  # what programs for older flax call the static half of a split object

__all__ = [
    "GraphDef",
    "GraphState",
    "NodeDef",
    "State",
    "as_pure",
    "call",
    "clone",
    "find_duplicates",
    "flatten",
    "graphdef",
    "iter_children",
    "iter_graph",
    "iter_module_children",
    "map",
    "merge",
    "pop",
    "pure",
    "recursive_map",
    "set_graph_mode",
    "set_graph_updates",
    "set_metadata",
    "split",
    "state",
    "unflatten",
    "update",
    "variables",
]

"""nnxlite: models are plain Python objects; JAX's transforms lift over them.

    import nnxlite as nnx

The names below are the whole public interface, grouped by room.
"""

from nnxlite import nn, sharding, training
from nnxlite._core import errors
from nnxlite._core import filters as filterlib
from nnxlite._core import rngs as rnglib
from nnxlite._core import state as statelib
from nnxlite._core import variable as variablelib
from nnxlite._core.attributes import set_attributes, view, with_attributes
from nnxlite._core.containers import Dict, List, Sequential
from nnxlite._core.context import (
    disable_named_call,
    enable_named_call,
    override_named_call,
)
from nnxlite._core.filters import (
    All,
    Any,
    Everything,
    Filter,
    Not,
    Nothing,
    OfType,
    PathContains,
    PathIn,
    WithTag,
)
from nnxlite._core.graph import GraphDef
from nnxlite._core.iterate import (
    find_duplicates,
    iter_children,
    iter_graph,
    iter_modules,
    map,
    recursive_map,
    set_metadata,
)
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
from nnxlite._core.metadata import VariableMetadata, with_metadata
from nnxlite._core.module import Module, Object, Pytree
from nnxlite._core.random_state import (
    fork_rngs,
    reseed,
    restore_rngs,
    split_rngs,
    with_rngs,
)
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._core.scope import named_call, nowrap
from nnxlite._core.split import (
    as_pure,
    call,
    clone,
    graphdef,
    merge,
    pop,
    pure,
    split,
    state,
    update,
    variables,
)
from nnxlite._core.state import (
    FlatState,
    GraphState,
    State,
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
from nnxlite._core.variable import (
    BatchStat,
    Cache,
    Intermediate,
    LoRAParam,
    OptArray,
    OptState,
    OptVariable,
    Param,
    Perturbation,
    RngCount,
    RngKey,
    RngState,
    Variable,
    VariableState,
)
from nnxlite._core.variable_names import (
    register_variable_name,
    variable_name_from_type,
    variable_type_from_name,
)
from nnxlite._transforms.axes import Carry, DiffState, StateSharding
from nnxlite._transforms.grad import grad, value_and_grad
from nnxlite._transforms.jit import jit
from nnxlite._transforms.shapes import eval_shape
from nnxlite.nn import initializers
from nnxlite.nn.activations import *  # noqa: F403
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Linear
from nnxlite.nn.normalization import BatchNorm
from nnxlite.nn.stochastic import Dropout
from nnxlite.sharding import *  # noqa: F403
from nnxlite.training import optimizer
from nnxlite.training.optimizer import ModelAndOptimizer, Optimizer

__version__ = "0.1.0"

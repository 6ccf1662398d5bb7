"""nnxlite: models are plain Python objects; JAX's transforms lift over them.

    import nnxlite as nnx

The names below are the whole public interface, grouped by room.
"""

from nnxlite import errors, nn, sharding, training
from nnxlite._core import filters as filterlib
from nnxlite._core import rngs as rnglib
from nnxlite._core import state_forms as statelib
from nnxlite._core import variable as variablelib
from nnxlite._core.attributes import set_attributes, view, with_attributes
from nnxlite._core.call import call
from nnxlite._core.capture import capture
from nnxlite._core.clone import as_pure, clone, pure
from nnxlite._core.containers import Dict, List, Sequential
from nnxlite._core.context import (
    disable_named_call,
    enable_named_call,
    override_named_call,
)
from nnxlite._core.display import display, save_html
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
from nnxlite._core.graphdef import GraphDef
from nnxlite._core.iterate import (
    find_duplicates,
    iter_children,
    iter_graph,
    iter_module_children,
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
from nnxlite._core.merge import merge, update
from nnxlite._core.metadata import VariableMetadata, with_metadata
from nnxlite._core.module import Module, Object, Pytree
from nnxlite._core.pop import pop
from nnxlite._core.random_state import (
    fork_rngs,
    reseed,
    restore_rngs,
    split_rngs,
    with_rngs,
)
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._core.scope import named_call, nowrap
from nnxlite._core.sowing import sow_here as sow
from nnxlite._core.sowing import use_stored_sow
from nnxlite._core.split import graphdef, split, state, variables
from nnxlite._core.state import GraphState, State
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
from nnxlite._transforms.axes import Carry, DiffState, StateAxes, StateSharding
from nnxlite._transforms.control import cond, fori_loop, switch, while_loop
from nnxlite._transforms.grad import grad, value_and_grad
from nnxlite._transforms.jit import jit
from nnxlite._transforms.observe import capture_gradients
from nnxlite._transforms.remat import remat
from nnxlite._transforms.scan import scan
from nnxlite._transforms.shapes import eval_shape
from nnxlite._transforms.vmap import vmap
from nnxlite.nn import initializers
from nnxlite.nn.activations import (
    celu,
    elu,
    gelu,
    glu,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    identity,
    leaky_relu,
    log_sigmoid,
    log_softmax,
    logsumexp,
    one_hot,
    relu,
    relu6,
    selu,
    sigmoid,
    silu,
    soft_sign,
    softmax,
    softplus,
    standardize,
    swish,
    tanh,
)
from nnxlite.nn.convolution import Conv
from nnxlite.nn.embedding import Embed
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Linear
from nnxlite.nn.normalization import BatchNorm, LayerNorm
from nnxlite.nn.pooling import avg_pool, max_pool, min_pool
from nnxlite.nn.stochastic import Dropout
from nnxlite.sharding import (
    PARTITION_NAME,
    abstract_with_sharding,
    as_abstract,
    get_named_sharding,
    get_partition_spec,
    logical_axis_rules,
    use_eager_sharding,
    using_eager_sharding,
    with_partitioning,
)
from nnxlite.training import metrics, optimizer
from nnxlite.training.metrics import Metric, MultiMetric
from nnxlite.training.optimizer import ModelAndOptimizer, Optimizer

__version__ = "0.1.0"

__all__ = [
    "PARTITION_NAME",
    "All",
    "Any",
    "BatchNorm",
    "BatchStat",
    "Cache",
    "Carry",
    "Conv",
    "Data",
    "Dict",
    "DiffState",
    "Dropout",
    "Embed",
    "Everything",
    "Filter",
    "FlatState",
    "GraphDef",
    "GraphState",
    "Initializer",
    "Intermediate",
    "LayerNorm",
    "Linear",
    "List",
    "LoRAParam",
    "Metric",
    "ModelAndOptimizer",
    "Module",
    "MultiMetric",
    "Not",
    "Nothing",
    "Object",
    "OfType",
    "OptArray",
    "OptState",
    "OptVariable",
    "Optimizer",
    "Param",
    "PathContains",
    "PathIn",
    "Perturbation",
    "Pytree",
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "Sequential",
    "State",
    "StateAxes",
    "StateSharding",
    "Static",
    "Variable",
    "VariableMetadata",
    "VariableState",
    "WithTag",
    "abstract_with_sharding",
    "as_abstract",
    "as_pure",
    "avg_pool",
    "call",
    "capture",
    "capture_gradients",
    "celu",
    "clone",
    "cond",
    "data",
    "dataclass",
    "disable_named_call",
    "display",
    "elu",
    "enable_named_call",
    "errors",
    "eval_shape",
    "filter_state",
    "filterlib",
    "find_duplicates",
    "fori_loop",
    "fork_rngs",
    "from_flat_state",
    "gelu",
    "get_named_sharding",
    "get_partition_spec",
    "glu",
    "grad",
    "graphdef",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "has_data",
    "identity",
    "initializers",
    "is_data",
    "iter_children",
    "iter_graph",
    "iter_module_children",
    "iter_modules",
    "jit",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logical_axis_rules",
    "logsumexp",
    "map",
    "map_state",
    "max_pool",
    "merge",
    "merge_state",
    "metrics",
    "min_pool",
    "named_call",
    "nn",
    "nowrap",
    "one_hot",
    "optimizer",
    "override_named_call",
    "pop",
    "pure",
    "recursive_map",
    "register_data_type",
    "register_variable_name",
    "relu",
    "relu6",
    "remat",
    "replace_by_pure_dict",
    "reseed",
    "restore_int_paths",
    "restore_rngs",
    "rnglib",
    "save_html",
    "scan",
    "selu",
    "set_attributes",
    "set_metadata",
    "sharding",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "sow",
    "split",
    "split_rngs",
    "split_state",
    "standardize",
    "state",
    "statelib",
    "static",
    "swish",
    "switch",
    "tanh",
    "to_flat_state",
    "to_pure_dict",
    "training",
    "update",
    "use_eager_sharding",
    "use_stored_sow",
    "using_eager_sharding",
    "value_and_grad",
    "variable_name_from_type",
    "variable_type_from_name",
    "variablelib",
    "variables",
    "view",
    "vmap",
    "while_loop",
    "with_attributes",
    "with_metadata",
    "with_partitioning",
    "with_rngs",
]

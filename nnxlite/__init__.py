"""nnxlite: models are plain Python objects; JAX's transforms lift over them.

    import nnxlite as nnx

The names below are the whole public interface, grouped by room.
"""

from nnxlite import (
    errors,
    filterlib,
    graph,
    graphlib,
    helpers,
    module,
    nn,
    object,
    pytreelib,
    rnglib,
    sharding,
    statelib,
    training,
    traversals,
    variablelib,
)
from nnxlite import sharding as spmd
from nnxlite._core.attributes import set_attributes, view, view_info, with_attributes
from nnxlite._core.call import call
from nnxlite._core.capture import capture
from nnxlite._core.clone import as_pure, clone, pure
from nnxlite._core.containers import Dict, List, Sequential
from nnxlite._core.context import disable_named_call, enable_named_call, override_named_call
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
from nnxlite._core.flat import flatten, unflatten
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
from nnxlite._core.modes import set_graph_mode, set_graph_updates
from nnxlite._core.module import Module, Object, Pytree
from nnxlite._core.pop import pop
from nnxlite._core.random_state import fork_rngs, reseed, restore_rngs, split_rngs, with_rngs
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
from nnxlite._core.trees import from_tree, prefix, to_tree
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
from nnxlite._transforms.axis_metadata import transform_metadata
from nnxlite._transforms.branches import cond, switch
from nnxlite._transforms.checks import checkify
from nnxlite._transforms.custom_jvp import custom_jvp
from nnxlite._transforms.custom_vjp import custom_vjp
from nnxlite._transforms.grad import grad, value_and_grad
from nnxlite._transforms.jit import jit
from nnxlite._transforms.jvp import jvp
from nnxlite._transforms.loops import fori_loop, while_loop
from nnxlite._transforms.observe import capture_gradients
from nnxlite._transforms.partial import cached_partial, jit_partial
from nnxlite._transforms.pmap import pmap
from nnxlite._transforms.remat import remat
from nnxlite._transforms.remat_scan import remat_scan
from nnxlite._transforms.scan import scan
from nnxlite._transforms.shapes import eval_shape, make_jaxpr
from nnxlite._transforms.shard import shard_map
from nnxlite._transforms.stacked import Stacked
from nnxlite._transforms.vjp import vjp
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
from nnxlite.nn.attention import MultiHeadAttention
from nnxlite.nn.cells import GRUCell, RNNCellBase, SimpleCell
from nnxlite.nn.convolution import Conv
from nnxlite.nn.dot_product import dot_product_attention, dot_product_attention_with_rope
from nnxlite.nn.embedding import Embed
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Einsum, Linear, LinearGeneral
from nnxlite.nn.lora import LoRA, LoRALinear
from nnxlite.nn.lstm import ConvLSTMCell, LSTMCell, OptimizedLSTMCell
from nnxlite.nn.masks import combine_masks, make_attention_mask, make_causal_mask
from nnxlite.nn.normalization import (
    BatchNorm,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
    SpectralNorm,
    WeightNorm,
)
from nnxlite.nn.pooling import avg_pool, max_pool, min_pool, pool
from nnxlite.nn.prelu import PReLU
from nnxlite.nn.recurrent import RNN, Bidirectional
from nnxlite.nn.rotary import RoPE
from nnxlite.nn.stochastic import Dropout
from nnxlite.nn.transposed_convolution import ConvTranspose
from nnxlite.sharding import (
    PARTITION_NAME,
    abstract_with_sharding,
    as_abstract,
    get_abstract_model,
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

__all__ = [
    "PARTITION_NAME",
    "RNN",
    "All",
    "Any",
    "BatchNorm",
    "BatchStat",
    "Bidirectional",
    "Cache",
    "Carry",
    "Conv",
    "ConvLSTMCell",
    "ConvTranspose",
    "Data",
    "Dict",
    "DiffState",
    "Dropout",
    "Einsum",
    "Embed",
    "Everything",
    "Filter",
    "FlatState",
    "GRUCell",
    "GraphDef",
    "GraphState",
    "GroupNorm",
    "Initializer",
    "InstanceNorm",
    "Intermediate",
    "LSTMCell",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "List",
    "LoRA",
    "LoRALinear",
    "LoRAParam",
    "Metric",
    "ModelAndOptimizer",
    "Module",
    "MultiHeadAttention",
    "MultiMetric",
    "Not",
    "Nothing",
    "Object",
    "OfType",
    "OptArray",
    "OptState",
    "OptVariable",
    "OptimizedLSTMCell",
    "Optimizer",
    "PReLU",
    "Param",
    "PathContains",
    "PathIn",
    "Perturbation",
    "Pytree",
    "RMSNorm",
    "RNNCellBase",
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "RoPE",
    "Sequential",
    "SimpleCell",
    "SpectralNorm",
    "Stacked",
    "State",
    "StateAxes",
    "StateSharding",
    "Static",
    "Variable",
    "VariableMetadata",
    "VariableState",
    "WeightNorm",
    "WithTag",
    "abstract_with_sharding",
    "as_abstract",
    "as_pure",
    "avg_pool",
    "cached_partial",
    "call",
    "capture",
    "capture_gradients",
    "celu",
    "checkify",
    "clone",
    "combine_masks",
    "cond",
    "custom_jvp",
    "custom_vjp",
    "data",
    "dataclass",
    "disable_named_call",
    "display",
    "dot_product_attention",
    "dot_product_attention_with_rope",
    "elu",
    "enable_named_call",
    "errors",
    "eval_shape",
    "filter_state",
    "filterlib",
    "find_duplicates",
    "flatten",
    "fori_loop",
    "fork_rngs",
    "from_flat_state",
    "from_tree",
    "gelu",
    "get_abstract_model",
    "get_named_sharding",
    "get_partition_spec",
    "glu",
    "grad",
    "graph",
    "graphdef",
    "graphlib",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "has_data",
    "helpers",
    "identity",
    "initializers",
    "is_data",
    "iter_children",
    "iter_graph",
    "iter_module_children",
    "iter_modules",
    "jit",
    "jit_partial",
    "jvp",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logical_axis_rules",
    "logsumexp",
    "make_attention_mask",
    "make_causal_mask",
    "make_jaxpr",
    "map",
    "map_state",
    "max_pool",
    "merge",
    "merge_state",
    "metrics",
    "min_pool",
    "module",
    "named_call",
    "nn",
    "nowrap",
    "object",
    "one_hot",
    "optimizer",
    "override_named_call",
    "pmap",
    "pool",
    "pop",
    "prefix",
    "pure",
    "pytreelib",
    "recursive_map",
    "register_data_type",
    "register_variable_name",
    "relu",
    "relu6",
    "remat",
    "remat_scan",
    "replace_by_pure_dict",
    "reseed",
    "restore_int_paths",
    "restore_rngs",
    "rnglib",
    "save_html",
    "scan",
    "selu",
    "set_attributes",
    "set_graph_mode",
    "set_graph_updates",
    "set_metadata",
    "shard_map",
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
    "spmd",
    "standardize",
    "state",
    "statelib",
    "static",
    "swish",
    "switch",
    "tanh",
    "to_flat_state",
    "to_pure_dict",
    "to_tree",
    "training",
    "transform_metadata",
    "traversals",
    "unflatten",
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
    "view_info",
    "vjp",
    "vmap",
    "while_loop",
    "with_attributes",
    "with_metadata",
    "with_partitioning",
    "with_rngs",
]

__version__ = "0.1.0"

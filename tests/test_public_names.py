"""The door: exactly the names below, each of them there, nothing else.

A name added is a promise to users, a name removed breaks a program: CHANGELOG.md tells of both.
"""

import importlib.metadata
import inspect
import types

import pytest

import nnxlite as nnx

NAMES = {
    "objects": """
        Data Dict List Module Object Pytree Sequential Stacked Static data dataclass has_data
        is_data register_data_type set_attributes static view view_info with_attributes
    """,
    "variables": """
        BatchStat Cache Intermediate LoRAParam OptArray OptState OptVariable Param Perturbation
        RngCount RngKey RngState Variable VariableMetadata VariableState register_variable_name
        variable_name_from_type variable_type_from_name with_metadata
    """,
    "graph and state": """
        FlatState GraphDef GraphState State as_pure call clone filter_state find_duplicates flatten
        from_flat_state from_tree graphdef iter_children iter_graph iter_module_children
        iter_modules map map_state merge merge_state pop prefix pure recursive_map
        replace_by_pure_dict restore_int_paths set_metadata split split_state state to_flat_state
        to_pure_dict to_tree unflatten update variables
    """,
    "modes": "set_graph_mode set_graph_updates",
    "filters": "All Any Everything Filter Not Nothing OfType PathContains PathIn WithTag",
    "randomness": "RngStream Rngs fork_rngs reseed restore_rngs split_rngs with_rngs",
    "scopes": "disable_named_call enable_named_call named_call nowrap override_named_call",
    "views": "display save_html",
    "sharding": """
        PARTITION_NAME abstract_with_sharding as_abstract get_abstract_model get_named_sharding
        get_partition_spec logical_axis_rules use_eager_sharding using_eager_sharding
        with_partitioning
    """,
    "capture": "capture capture_gradients sow use_stored_sow",
    "transforms": """
        Carry DiffState StateAxes StateSharding cached_partial checkify cond custom_jvp custom_vjp
        eval_shape fori_loop grad jit jit_partial jvp make_jaxpr pmap remat remat_scan scan
        shard_map switch transform_metadata value_and_grad vjp vmap while_loop
    """,
    "layers": """
        BatchNorm Bidirectional Conv ConvLSTMCell ConvTranspose Dropout Einsum Embed GRUCell
        GroupNorm Initializer InstanceNorm LSTMCell LayerNorm Linear LinearGeneral LoRA LoRALinear
        MultiHeadAttention OptimizedLSTMCell PReLU RMSNorm RNN RNNCellBase RoPE SimpleCell
        SpectralNorm WeightNorm avg_pool combine_masks dot_product_attention
        dot_product_attention_with_rope make_attention_mask make_causal_mask max_pool min_pool pool
    """,
    "activations": """
        celu elu gelu glu hard_sigmoid hard_silu hard_swish hard_tanh identity leaky_relu
        log_sigmoid log_softmax logsumexp one_hot relu relu6 selu sigmoid silu soft_sign softmax
        softplus standardize swish tanh
    """,
    "training": "Metric ModelAndOptimizer MultiMetric Optimizer",
    "modules": """
        errors filterlib graph graphlib helpers initializers metrics module nn object optimizer
        pytreelib rnglib sharding spmd statelib training traversals variablelib
    """,
}
EXPECTED = {name for names in NAMES.values() for name in names.split()}


def test_door_exports_the_listed_names() -> None:
    exported = set(nnx.__all__)
    assert exported - EXPECTED == set(), "exported, but not listed here"
    assert EXPECTED - exported == set(), "listed here, but not exported"
    assert len(nnx.__all__) == len(exported), "named twice in __all__"


def test_nothing_else_is_at_the_door() -> None:
    public = {name for name in vars(nnx) if not name.startswith("_")}
    assert public == set(nnx.__all__)


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_name_resolves(name: str) -> None:
    assert hasattr(nnx, name)


def is_ours(member: object) -> bool:
    is_code = callable(member) or isinstance(member, property)
    return is_code and str(getattr(member, "__module__", "nnxlite")).startswith("nnxlite")


def undocumented(name: str) -> list[str]:
    """The name itself and, for a class, its own public methods and properties."""
    value = getattr(nnx, name)
    if not is_ours(value):
        return []
    members = {
        f"{name}.{key}": getattr(value, key)
        for key, member in (vars(value) if inspect.isclass(value) else {}).items()
        if not key.startswith("_") and is_ours(member)
    }
    return [key for key, member in {name: value, **members}.items() if not inspect.getdoc(member)]


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_name_is_documented(name: str) -> None:
    assert undocumented(name) == []


@pytest.mark.parametrize("name", ["errors", "nn", "sharding", "training"])
def test_public_module_exports_what_it_names(name: str) -> None:
    package = getattr(nnx, name)
    assert isinstance(package, types.ModuleType)
    assert package.__name__ == f"nnxlite.{name}"
    assert all(hasattr(package, exported) for exported in package.__all__)
    assert not [exported for exported in package.__all__ if exported.startswith("_")]


def test_version_is_that_of_the_installed_package() -> None:
    assert nnx.__version__ == importlib.metadata.version("nnxlite")

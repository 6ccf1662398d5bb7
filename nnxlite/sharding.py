"""Partition metadata: naming the axes of Variables, translating the names, placing on a mesh."""

from nnxlite._core.placement import (
    AxisRules,
    Sharding,
    get_logical_axis_rules,
    logical_axis_rules,
    set_logical_axis_rules,
    use_eager_sharding,
    using_eager_sharding,
)
from nnxlite._core.sharding import (
    PARTITION_NAME,
    abstract_with_sharding,
    add_axis,
    as_abstract,
    get_named_sharding,
    get_partition_spec,
    get_var_pspec,
    remove_axis,
    with_partitioning,
)
from nnxlite._transforms.abstract_model import get_abstract_model

__all__ = [
    "PARTITION_NAME",
    "AxisRules",
    "Sharding",
    "abstract_with_sharding",
    "add_axis",
    "as_abstract",
    "get_abstract_model",
    "get_logical_axis_rules",
    "get_named_sharding",
    "get_partition_spec",
    "get_var_pspec",
    "logical_axis_rules",
    "remove_axis",
    "set_logical_axis_rules",
    "use_eager_sharding",
    "using_eager_sharding",
    "with_partitioning",
]

"""Variables and their kinds, under the module path that they have in flax.nnx."""

from nnxlite._core.metadata import VariableMetadata, with_metadata
from nnxlite._core.placement import use_eager_sharding, using_eager_sharding
from nnxlite._core.variable import (
    BatchStat,
    Cache,
    Intermediate,
    Param,
    Perturbation,
    Variable,
    VariableState,
)
from nnxlite._core.variable_names import (
    register_variable_name,
    variable_name_from_type,
    variable_type_from_name,
)

__all__ = [
    "BatchStat",
    "Cache",
    "Intermediate",
    "Param",
    "Perturbation",
    "Variable",
    "VariableMetadata",
    "VariableState",
    "register_variable_name",
    "use_eager_sharding",
    "using_eager_sharding",
    "variable_name_from_type",
    "variable_type_from_name",
    "with_metadata",
]

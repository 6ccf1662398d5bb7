"""get_abstract_model: what a model will look like on a mesh, before anything is computed."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from nnxlite._core.graphdef import GraphDef
from nnxlite._core.modes import graph_flag
from nnxlite._core.sharding import get_named_sharding
from nnxlite._core.split import split
from nnxlite._core.state import State
from nnxlite._transforms.shapes import eval_shape


@graph_flag
def get_abstract_model(init_fn: Callable[[], Any], mesh: Mesh) -> tuple[GraphDef[Any], State]:
    """Returns the `GraphDef` of a model, and its State with shapes and shardings for arrays.

    The State is what a checkpoint is restored into, leaf by leaf onto its devices; `nnx.merge`
    with the restored one gives the model.

    Args:
      init_fn: Makes the model; nothing of it is computed.
      mesh: Where the axes that the Variables name are.

    Example:
      >>> def make():
      ...     init = nnx.with_partitioning(nnx.initializers.zeros_init(), (None, "model"))
      ...     return nnx.Linear(2, 4, kernel_init=init, rngs=nnx.Rngs(0))
      >>> mesh = jax.make_mesh((1,), ("model",))
      >>> graphdef, state = nnx.get_abstract_model(make, mesh)
      >>> state["kernel"].get_value().sharding.spec == jax.P(None, "model")
      True
    """
    with jax.set_mesh(mesh):
        graphdef, state = split(eval_shape(init_fn))
        shardings = get_named_sharding(state, mesh)
        placed = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            state,
            shardings,
        )
    return graphdef, placed

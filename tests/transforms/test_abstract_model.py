"""get_abstract_model: shapes and shardings of a model before there is one."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding

import nnxlite as nnx

MESHES = [AxisType.Auto, AxisType.Explicit]


class Tied(nnx.Module):
    def __init__(self, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(), (None, "model"))
        self.embed = nnx.Linear(2, 4, kernel_init=init, rngs=rngs)
        self.tied = self.embed.kernel
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.table = jnp.ones(3)


def mesh_of(kind):
    return jax.make_mesh((1,), ("model",), axis_types=(kind,))


@pytest.mark.parametrize("kind", MESHES)
def test_every_leaf_has_the_shape_and_the_sharding_that_its_variable_names(kind):
    mesh = mesh_of(kind)
    graphdef, state = nnx.get_abstract_model(lambda: Tied(nnx.Rngs(0)), mesh)
    leaves = jax.tree.leaves(state)
    assert len(leaves) == 5  # the shared kernel once
    assert all(type(leaf) is jax.ShapeDtypeStruct for leaf in leaves)
    assert state["embed"]["kernel"].get_value().sharding == NamedSharding(
        mesh, jax.P(None, "model")
    )
    assert state["table"].sharding == NamedSharding(mesh, jax.P())
    assert graphdef is nnx.graphdef(Tied(nnx.Rngs(0)))


def test_arrays_of_these_shapes_make_the_model():
    graphdef, state = nnx.get_abstract_model(lambda: Tied(nnx.Rngs(0)), mesh_of(AxisType.Auto))
    concrete = nnx.state(Tied(nnx.Rngs(1)))
    restored = jax.tree.map(
        lambda leaf, array: jax.device_put(array, leaf.sharding), state, concrete
    )
    model = nnx.merge(graphdef, restored)
    assert model.tied is model.embed.kernel
    assert (model.embed.kernel == concrete["embed"]["kernel"]).all()


def test_nothing_is_computed():
    def make():
        assert isinstance(jnp.ones(2) + 1, jax.core.Tracer)
        return Tied(nnx.Rngs(0))

    nnx.get_abstract_model(make, mesh_of(AxisType.Auto), graph=True)

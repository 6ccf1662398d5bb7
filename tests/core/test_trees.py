"""Objects as trees for JAX: prefixes, to_tree and from_tree."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, param


class Scaled(nnx.Module):
    def __init__(self, scale):
        self.scale = nnx.Param(scale)
        self.shift = nnx.BatchStat(jnp.arange(3.0))
        self.again = self.shift

    def __call__(self, x):
        return self.scale * x + self.again


def test_prefix_by_filter_gives_axes_to_plain_vmap():
    model = Scaled(jnp.float32(2.0))
    axes = nnx.prefix(model, {nnx.BatchStat: 0, ...: None})
    out = jax.vmap(lambda model, x: model(x), in_axes=(axes, None))(model, jnp.float32(1.0))
    np.testing.assert_array_equal(out, 2.0 + np.arange(3.0))


def test_prefix_by_function_gets_path_and_leaf():
    model = Net(layers=[Net(w=param(1))], d={"x": jnp.ones(2)})
    seen = {}
    nnx.prefix(model, lambda path, leaf: seen.setdefault(path, leaf))
    assert list(seen) == [("d", "x"), ("layers", 0, "w")]
    assert seen["layers", 0, "w"] is model.layers[0].w


def test_prefix_of_a_state_has_its_structure():
    state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    axes = nnx.prefix(state, {nnx.PathContains("bias"): 1, ...: 0})
    assert dict(axes) == {"bias": 1, "kernel": 0}


def test_prefix_takes_the_first_filter_that_matches():
    axes = nnx.prefix({"a": param(1)}, {nnx.Variable: 1, nnx.Param: 2})
    assert axes == {"a": 1}


def test_prefix_without_a_matching_filter_is_an_error():
    with pytest.raises(StructureError, match=r"matches model\.again \(BatchStat\)"):
        nnx.prefix(Scaled(jnp.float32(2.0)), {nnx.Param: None})


def test_tree_comes_back_with_what_jax_made_of_it():
    model = Scaled(jnp.float32(2.0))
    leaves, treedef = jax.tree.flatten(nnx.to_tree((model, 1.0)))
    doubled, _ = nnx.from_tree(jax.tree.unflatten(treedef, [2 * leaf for leaf in leaves]))
    assert doubled.again is doubled.shift
    assert float(doubled.scale[...]) == 4.0
    assert float(model.scale[...]) == 2.0


def test_both_copy():
    model = Scaled(jnp.float32(2.0))
    tree = nnx.to_tree(model)
    again = nnx.from_tree(tree)
    assert_isomorphic(tree, model)
    assert_isomorphic(again, model)
    again.scale[...] = jnp.float32(3.0)
    assert float(tree.scale[...]) == float(model.scale[...]) == 2.0


@pytest.mark.parametrize("number", [0, 1])
def test_objects_that_share_are_an_error_with_both_places(number):
    shared = param(1)
    other = [Net(inner=Net(w=shared)), {"b": shared}][number]
    where = [r"Net\.inner\.w", "Param"][number]
    with pytest.raises(StructureError, match=rf"Net\.w and {where} are one Param"):
        nnx.to_tree((Net(w=shared), other))

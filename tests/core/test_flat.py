"""flatten and unflatten: an object as its GraphDef and a flat list."""

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, param


def net():
    shared = param(1)
    return Net(
        a=shared, layers=[Net(a=shared), jnp.ones(2)], v=nnx.Variable({"x": jnp.ones(3), "y": 1})
    )


def test_flat_state_is_that_of_split():
    model = net()
    graphdef, flat = nnx.flatten(model)
    assert graphdef is nnx.graphdef(model)
    assert flat.paths == nnx.state(model).flat_state().paths == (("a",), ("layers", 1), ("v",))


@pytest.mark.parametrize("with_paths", [True, False])
def test_unflatten_is_the_inverse(with_paths):
    model = net()
    assert_isomorphic(nnx.unflatten(*nnx.flatten(model, with_paths=with_paths)), model)


def test_without_paths_there_are_values():
    _, values = nnx.flatten(net(), with_paths=False)
    assert isinstance(values, list)
    assert not any(isinstance(value, nnx.Variable) for value in values)


def test_unflatten_takes_a_state_and_shares_nothing_with_it():
    model = net()
    graphdef, flat = nnx.flatten(model)
    again = nnx.unflatten(graphdef, nnx.from_flat_state(flat))
    again.a[...] = jnp.zeros_like(again.a[...])
    assert flat.leaves[0][...] == model.a[...] != again.a[...]


def test_wrong_number_of_values_is_an_error():
    graphdef, values = nnx.flatten(net(), with_paths=False)
    with pytest.raises(StructureError, match=r"needs 3 values, found 2\. Give all of them"):
        nnx.unflatten(graphdef, values[:2])


def test_missing_leaf_is_an_error_with_its_path():
    graphdef, flat = nnx.flatten(net())
    with pytest.raises(StructureError, match=r"1 leaves are missing: model\.v"):
        nnx.unflatten(graphdef, nnx.FlatState(flat[:2]))

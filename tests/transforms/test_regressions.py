"""What random programs found to be wrong, each as small as it gets."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic


class Net(nnx.Module):
    pass


def with_array(*shape: int) -> Net:
    net = Net()
    net.array = jnp.zeros(shape, jnp.float32)
    net.w = nnx.Param(jnp.ones(shape, jnp.float32))
    return net


def made(value: jax.Array) -> Net:
    new = Net()
    new.w = nnx.Param(value)
    return new


def test_scan_writes_an_array_attribute_beside_an_object_that_it_makes():
    def body(net, _):
        net.array = net.array + 1.0
        return net, made(net.array)

    net = with_array()
    carried, stacked = nnx.scan(body, length=3)(net, None)
    assert carried is net and float(net.array) == 3
    np.testing.assert_array_equal(stacked.w[...], [1, 2, 3])


def test_scan_writes_an_array_in_a_tuple_beside_an_object_that_it_makes():
    def body(net, _):
        array, variable = net.pair
        net.pair = (array + 1.0, variable)
        return net, made(array)

    net = with_array()
    net.pair = (jnp.float32(0), nnx.Param(jnp.float32(5)))
    nnx.scan(body, length=3)(net, None)
    assert float(net.pair[0]) == 3


@pytest.mark.parametrize("axis", [1, -1])
def test_vmap_keeps_the_axis_of_an_array_attribute_when_something_is_added(axis):
    def body(net):
        net.array = net.array + 1.0
        net.added = nnx.Param(jnp.sum(net.w[...]))

    net = with_array(3, 2)
    net.array = jnp.arange(6, dtype=jnp.float32).reshape(3, 2)
    nnx.vmap(body, in_axes=axis)(net)
    np.testing.assert_array_equal(net.array, np.arange(6).reshape(3, 2) + 1)
    np.testing.assert_array_equal(net.added[...], [3, 3])


def test_vmap_refuses_to_write_a_broadcast_array_attribute_when_something_is_added():
    def body(x, net):
        net.array = net.array + x
        net.added = nnx.Param(x)

    net, before = with_array(), with_array()
    with pytest.raises(ValueError, match=r"changed net\.array.* broadcast"):
        nnx.vmap(body, in_axes=(0, None))(jnp.ones(2, jnp.float32), net)
    assert_isomorphic(before, net)


@pytest.mark.parametrize("taken", [True, False])
def test_branches_that_add_alike_may_write_an_array_attribute_in_one_alone(taken):
    def write(net):
        net.array = net.array + 1.0
        net.added = nnx.Param(net.array)

    def only_add(net):
        net.added = nnx.Param(net.array)

    net = with_array()
    nnx.cond(jnp.bool_(taken), write, only_add, net)
    assert float(net.array) == float(net.added[...]) == taken


def test_a_pytree_value_is_mapped_from_the_end_whatever_its_metadata():
    net = Net()
    value = {"u": jnp.zeros((2,), jnp.float32), "v": jnp.zeros((3, 2), jnp.float32)}
    net.both = nnx.Param(value, tag="x")

    def body(net):
        net.both.value = jax.tree.map(lambda x: x + 1.0, net.both.value)
        return net.both.value["v"].shape

    shape = nnx.vmap(body, in_axes=-1, out_axes=None)(net)
    assert shape == (3,)
    assert_isomorphic({"u": jnp.ones((2,)), "v": jnp.ones((3, 2))}, net.both.value)


@pytest.mark.parametrize("leaves", [1, 20])
def test_eval_shape_asks_jax_as_often_for_many_leaves_as_for_one(leaves, monkeypatch):
    calls, ask = [], jax.eval_shape

    def counted(*args):
        calls.append(args)
        return ask(*args)

    net = Net()
    net.leaves = [nnx.Param(jnp.float32(n)) for n in range(leaves)]
    monkeypatch.setattr(jax, "eval_shape", counted)
    nnx.eval_shape(lambda net: net, net)
    assert len(calls) == 2  # the function, and what it leaves as it is

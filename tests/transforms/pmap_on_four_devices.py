"""pmap on four devices; `test_four_devices.py` runs this in a process that has them."""

import jax
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.shard_on_four_devices import Block, Net

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
f32 = np.float32
X = np.arange(64, dtype=np.float32).reshape(4, 4, 4) / 8


def test_data_parallel_step_is_that_of_the_whole_batch():
    net, plain = Net(), Net()

    def loss(net, x):
        return (net(x) ** 2).mean()

    @nnx.pmap(axis_name="i", in_axes=(None, 0, None), out_axes=None, donate_argnums=0)
    def step(net, x, rate):
        value, grads = nnx.value_and_grad(loss)(net, x)
        net.first.kernel[...] -= rate * jax.lax.pmean(grads["first"]["kernel"][...], "i")
        return jax.lax.pmean(value, "i")

    net.second.kernel.value = before = jax.device_put(net.second.kernel[...])
    value = step(net, X, f32(0.5))
    expected, grads = nnx.value_and_grad(loss)(plain, X.reshape(16, 4))
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    plain.first.kernel[...] -= f32(0.5) * grads["first"]["kernel"][...]
    np.testing.assert_allclose(net.first.kernel[...], plain.first.kernel[...], rtol=1e-5)
    assert before.is_deleted() and (net.second.kernel[...] == plain.second.kernel[...]).all()
    assert net.calls[...] == 1


def test_mapped_model_is_that_of_jax():
    nets = Net()
    nnx.update(nets, jax.tree.map(lambda x: np.stack([x, -x, x + x, x - x]), nnx.state(nets)))
    found = nnx.pmap(lambda net, x: net(x), out_axes=1)(nets, X)
    by_hand = jax.pmap(lambda a, b, x: nnx.relu(x @ a) @ b, out_axes=1)
    np.testing.assert_array_equal(
        found, by_hand(nets.first.kernel[...], nets.second.kernel[...], X)
    )
    np.testing.assert_array_equal(nets.calls[...], np.ones(4))


def test_axes_by_filter_and_static_arguments():
    net = Net()
    net.calls.value = np.arange(4, dtype=f32)
    axes = nnx.StateAxes({nnx.Param: None, ...: 0})

    @nnx.pmap(in_axes=(None, axes, 0), static_broadcasted_argnums=0)
    def f(double, net, x):
        return net(x) * f32(2) if double else net(x)

    np.testing.assert_allclose(f(True, net, X), 2 * Net()(X.reshape(16, 4)).reshape(4, 4, 4), 1e-5)
    np.testing.assert_array_equal(net.calls[...], [1, 2, 3, 4])
    assert net.first.kernel.shape == (4, 8)


def test_records_are_mapped():
    block = Block()
    f = nnx.pmap(lambda block, x: block(x), in_axes=(None, 0))
    _, found, zeros = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(block, X)
    np.testing.assert_array_equal(found["y"][...][0], 2 * X)
    grads = jax.grad(lambda p: nnx.capture(f, init=p)(block, X).sum())(zeros)
    np.testing.assert_array_equal(grads["p"][...], 4 * X)


def test_devices_are_chosen():
    out = nnx.pmap(lambda x: x + x, devices=jax.devices()[2:])(X[:2])
    assert out.sharding.device_set == set(jax.devices()[2:])
    with pytest.raises(ValueError, match="maps axes of size 4 over 2 device"):
        nnx.pmap(lambda x: x, devices=jax.devices()[2:])(X)


def test_new_names_and_new_attributes():
    def f(net, x):
        net.seen = nnx.Variable(x, out_sharding=(None, "model"))
        return nnx.Param(x, out_sharding=(None, "model"))

    net = Net()
    made = nnx.pmap(f, in_axes=(None, 0), out_axes=2, transform_metadata={nnx.PARTITION_NAME: "d"})(
        net, X
    )
    np.testing.assert_array_equal(made[...], np.moveaxis(X, 0, 2))
    np.testing.assert_array_equal(net.seen[...], X)
    assert made.out_sharding == (None, "model", "d") and net.seen.out_sharding[0] == "d"

"""shard_map on four devices; `test_four_devices.py` runs this in a process that has them."""

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx

pytestmark = pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices")
f32 = np.float32
X = np.arange(32, dtype=np.float32).reshape(8, 4) / 8


def mesh_of(**sizes):
    kinds = (AxisType.Auto,) * len(sizes)
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=kinds)


class Layer(nnx.Module):
    def __init__(self, rows, columns):
        numbers = np.arange(rows * columns, dtype=np.float32).reshape(rows, columns)
        self.kernel = nnx.Param(np.cos(numbers))  # made by NumPy, for compiling takes longer

    def __call__(self, x):
        return x @ self.kernel[...]


class Net(nnx.Module):
    """Two products, and a count."""

    def __init__(self):
        self.first, self.second = Layer(4, 8), Layer(8, 4)
        self.calls = nnx.Variable(np.float32(0))

    def __call__(self, x):
        self.calls[...] += f32(1)
        return self.second(nnx.relu(self.first(x)))


class Block(nnx.Module):
    """Sows `w * x`, perturbs it and squares it."""

    def __init__(self):
        self.w = nnx.Param(np.float32(2))

    def __call__(self, x):
        y = self.perturb("p", self.w[...] * x)
        self.sow(nnx.Intermediate, "y", y)
        return y * y


def spec_of(variable):
    return variable.get_value().sharding.spec


BY_PATH = {"first": {"kernel": P(None, "model")}, "second": {"kernel": P("model")}, "calls": P()}
SPECS = {
    "filters": nnx.StateSharding(
        {
            nnx.PathContains("first"): P(None, "model"),
            nnx.PathContains("second"): P("model"),
            ...: None,
        }
    ),
    "sharding of a state": nnx.StateSharding(nnx.State(BY_PATH)),
    "state": nnx.State(BY_PATH),
}


@pytest.mark.parametrize("name", SPECS)
def test_tensor_parallel_call_is_that_of_jax(name):
    mesh, net, plain = mesh_of(model=4), Net(), Net()

    def f(net, x):
        assert net.first.kernel.shape == (4, 2) and net.second.kernel.shape == (2, 4)
        return jax.lax.psum(net(x), "model")

    found = nnx.shard_map(f, mesh=mesh, in_specs=(SPECS[name], P()), out_specs=P())(net, X)

    def by_hand(a, b, x):
        return jax.lax.psum(nnx.relu(x @ a) @ b, "model")

    specs = (P(None, "model"), P("model"), P())
    mapped = jax.jit(jax.shard_map(by_hand, mesh=mesh, in_specs=specs, out_specs=P()))
    expected = mapped(net.first.kernel[...], net.second.kernel[...], X)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_allclose(found, plain(X), rtol=1e-5)
    assert net.calls[...] == 1 and net.first.kernel.shape == (4, 8)


def test_data_parallel_step_is_that_of_the_whole_batch():
    net, plain = Net(), Net()

    def loss(net, x):
        return (net(x) ** 2).mean()

    @nnx.shard_map(mesh=mesh_of(data=4), in_specs=(None, P("data")), out_specs=P())
    def step(net, x):
        value, grads = nnx.value_and_grad(loss)(net, x)
        # JAX sums gradients of what is replicated.
        net.first.kernel[...] -= grads["first"]["kernel"][...] / f32(4)
        return jax.lax.pmean(value, "data")

    value = step(net, X)
    expected, grads = nnx.value_and_grad(loss)(plain, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    plain.first.kernel[...] -= grads["first"]["kernel"][...]
    np.testing.assert_allclose(net.first.kernel[...], plain.first.kernel[...], rtol=1e-5)
    assert net.first.kernel[...].sharding.is_fully_replicated and net.calls[...] == 1


def test_what_is_written_leaves_by_the_spec_it_came_in_by():
    model = nnx.Module()
    model.part = nnx.Variable(np.zeros(8, np.float32))
    model.both = nnx.Variable({"a": np.zeros((4, 4), np.float32)})
    model.array = nnx.data(np.zeros(4, np.float32))
    model.state = nnx.state(Net(), nnx.Param)

    def f(model):
        n = jax.lax.axis_index("x").astype(f32)
        model.part[...] += n
        model.both.value = {"a": model.both.value["a"] + n}
        model.array = model.array + n
        model.state["first"]["kernel"][...] += n

    spec = nnx.StateSharding(
        {nnx.PathContains("both"): P(None, "x"), nnx.PathContains("kernel"): P("x"), ...: P("x")}
    )
    first = np.asarray(model.state["first"]["kernel"][...])
    nnx.shard_map(f, mesh=mesh_of(x=4), in_specs=(spec,), out_specs=None)(model)
    np.testing.assert_array_equal(model.part[...], np.repeat(np.arange(4), 2))
    np.testing.assert_array_equal(model.both.value["a"], np.tile(np.arange(4), (4, 1)))
    np.testing.assert_array_equal(model.array, np.arange(4))
    np.testing.assert_array_equal(
        model.state["first"]["kernel"][...], first + np.arange(4, dtype=np.float32)[:, None]
    )
    assert spec_of(model.part) == P("x") and spec_of(model.state["first"]["kernel"]) == P("x")


def test_new_objects_take_out_specs():
    def f(x):
        made = Net()
        made.first.kernel.value = x
        return made, x.sum()[None]

    specs = nnx.StateSharding({nnx.PathContains("first"): P(None, "x"), ...: P()})
    f = nnx.shard_map(f, mesh=mesh_of(x=4), in_specs=P("x"), out_specs=(specs, P("x")))
    made, sums = f(X)
    np.testing.assert_array_equal(made.first.kernel[...], np.hstack(np.split(X, 4)))
    np.testing.assert_array_equal(sums, [part.sum() for part in np.split(X, 4)])
    assert made.second.kernel.shape == (8, 4) and made.calls.shape == ()


def test_mapping_over_one_of_two_axes():
    net, plain = Net(), Net()
    f = nnx.shard_map(
        lambda net, x: net(x),
        mesh=mesh_of(x=2, y=2),
        in_specs=(None, P("x")),
        out_specs=P("x"),
        axis_names={"x"},
    )
    np.testing.assert_allclose(nnx.jit(f)(net, X), plain(X), rtol=1e-5)
    assert net.calls[...] == 1


def test_records_have_an_axis_of_shards_in_front():
    block, mesh = Block(), mesh_of(x=4)
    f = nnx.shard_map(lambda b, x: b(x), mesh=mesh, in_specs=(None, P("x")), out_specs=P("x"))
    out, found, zeros = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(block, X)
    y = 2 * X
    np.testing.assert_array_equal(out, y * y)
    np.testing.assert_array_equal(found["y"][...][0], y.reshape(4, 2, 4))
    np.testing.assert_array_equal(zeros["p"][...], np.zeros((4, 2, 4)))

    grads = jax.grad(lambda p: nnx.capture(f, init=p)(block, X).sum())(zeros)
    np.testing.assert_array_equal(grads["p"][...], 2 * y.reshape(4, 2, 4))


def test_gradient_through_it():
    net, mesh = Net(), mesh_of(x=4)
    f = nnx.shard_map(lambda n, x: n(x), mesh=mesh, in_specs=(None, P("x")), out_specs=P("x"))
    grads = nnx.jit(nnx.grad(lambda net: (f(net, X) ** 2).sum()))(net)
    expected = nnx.grad(lambda net: (net(X) ** 2).sum())(Net())
    for path, leaf in grads.flat_state():
        np.testing.assert_allclose(leaf[...], dict(expected.flat_state())[path][...], rtol=1e-4)
    assert net.calls[...] == 1


def test_explicit_axes_want_arrays_in_their_place():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    net = Net()
    f = nnx.shard_map(lambda n, x: n(x), mesh=mesh, in_specs=(None, P("x")), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"in_specs has P\('x',?\) for x, which is placed as P"):
        f(net, X)
    assert net.calls[...] == 0
    found = f(net, jax.device_put(X, NamedSharding(mesh, P("x"))))
    np.testing.assert_allclose(found, Net()(X), rtol=1e-5)

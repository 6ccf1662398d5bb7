"""Shardings of jit on four devices; `test_four_devices.py` runs this in a process that has them."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx

pytestmark = [
    pytest.mark.skipif(len(jax.devices()) < 4, reason="needs four devices"),
    pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"]),
]
X = np.arange(32, dtype=np.float32).reshape(8, 4)


class Layer(nnx.Module):
    def __init__(self) -> None:
        self.kernel = nnx.Param(jnp.ones((4, 8)))
        self.bias = nnx.Param(jnp.ones((1, 8)))
        self.stat = nnx.BatchStat(jnp.zeros((8,)))
        self.array = jnp.ones((8,))
        self.state = nnx.State({"a": nnx.Param(jnp.ones(8)), "b": nnx.BatchStat(jnp.ones(8))})

    def __call__(self, x):
        self.stat[...] = self.stat[...] + jnp.ones((8,))
        return x @ self.kernel[...] + self.bias[...]


class Shardings:
    def __init__(self, kind: AxisType) -> None:
        mesh = jax.make_mesh((4,), ("d",), axis_types=(kind,))
        self.split = NamedSharding(mesh, P("d"))
        self.whole = NamedSharding(mesh, P())
        self.columns = NamedSharding(mesh, P(None, "d"))
        self.by_filter = nnx.StateSharding(
            {nnx.PathContains("kernel"): self.columns, nnx.BatchStat: self.split, ...: self.whole}
        )


def split_over(array: Any) -> tuple[Any, ...]:
    """The axes that an array is split along, without trailing ones that are not."""
    spec = tuple(array.sharding.spec)
    while spec and spec[-1] is None:
        spec = spec[:-1]
    return spec


def assert_placed(model: Layer) -> None:
    assert split_over(model.kernel[...]) == (None, "d")
    assert split_over(model.stat[...]) == split_over(model.state["b"][...]) == ("d",)
    assert split_over(model.bias[...]) == split_over(model.state["a"][...]) == ()
    for leaf in jax.tree.leaves(model):
        assert len(leaf.sharding.device_set) == 4


def test_new_object_takes_out_shardings(kind: AxisType) -> None:
    model = nnx.jit(Layer, out_shardings=Shardings(kind).by_filter)()
    assert_placed(model)


def test_one_sharding_for_a_whole_result(kind: AxisType) -> None:
    s = Shardings(kind)
    out = nnx.jit(lambda x: {"a": x, "v": nnx.Param(x)}, out_shardings=s.split)(X)
    assert split_over(out["a"]) == split_over(out["v"][...]) == ("d",)


def test_argument_that_comes_back_is_moved(kind: AxisType) -> None:
    model, s = Layer(), Shardings(kind)
    assert nnx.jit(lambda m: m, out_shardings=s.by_filter)(model) is model
    assert_placed(model)


def test_argument_that_comes_back_changed_is_moved(kind: AxisType) -> None:
    def f(model):
        model.extra = nnx.BatchStat(model.array * 2.0)
        model.bias[...] = model.bias[...] * 2.0
        return model, model.kernel[...]

    model, s = Layer(), Shardings(kind)
    _, kernel = nnx.jit(f, out_shardings=(s.by_filter, s.split))(model)
    assert_placed(model)
    assert split_over(model.extra[...]) == ("d",) and split_over(kernel) == ("d",)
    assert model.bias[...].sum() == 16


def test_arguments_take_in_shardings(kind: AxisType) -> None:
    s = Shardings(kind)
    seen = []

    def f(model, x):
        jax.debug.inspect_array_sharding(model.kernel[...], callback=seen.append)
        return model(x)

    step = nnx.jit(f, in_shardings=(s.by_filter, s.whole))
    model = Layer()
    out = step(model, X)
    assert np.allclose(out, X @ np.ones((4, 8)) + 1)
    assert all(found.is_equivalent_to(s.columns, 2) for found in seen)


def test_what_changes_keeps_the_sharding_it_came_in_with(kind: AxisType) -> None:
    s = Shardings(kind)
    step = nnx.jit(lambda m, x: m(x), in_shardings=(s.by_filter, s.whole), out_shardings=s.whole)
    model = Layer()
    for n in (1, 2, 3):
        out = step(model, X)
        assert split_over(model.stat[...]) == ("d",) and np.asarray(model.stat[...])[0] == n
        assert split_over(out) == ()
    traces = []
    plain = jax.jit(lambda x: (traces.append(1), x + x)[1], in_shardings=s.split)
    plain(plain(jnp.ones(8)))
    assert step.cache_info().traces == len(traces)  # JAX traces again for an array on a mesh


def test_state_takes_a_state_of_shardings(kind: AxisType) -> None:
    s = Shardings(kind)
    state = nnx.state(Layer(), nnx.Param, nnx.BatchStat)[0]
    shardings = jax.tree.map(lambda x: s.columns if x.ndim == 2 else s.split, state)

    def double(state):
        state["kernel"][...] = state["kernel"][...] * 2.0
        return state

    nnx.jit(double, in_shardings=(shardings,), out_shardings=shardings)(state)
    assert split_over(state["kernel"][...]) == (None, "d")
    assert split_over(state["state"]["a"][...]) == ("d",)
    assert state["kernel"][...].sum() == 64


def test_object_of_shardings(kind: AxisType) -> None:
    s = Shardings(kind)
    model = Layer()
    shardings = jax.tree.map(lambda x: s.columns if x.ndim == 2 else s.split, model)
    nnx.jit(lambda m: m, out_shardings=shardings)(model)
    assert split_over(model.kernel[...]) == split_over(model.bias[...]) == (None, "d")
    assert split_over(model.array) == split_over(model.state["a"][...]) == ("d",)


def test_donation_with_shardings(kind: AxisType) -> None:
    s = Shardings(kind)
    make = nnx.jit(Layer, out_shardings=s.by_filter)
    step = nnx.jit(lambda m, x: m(x), in_shardings=(s.by_filter, s.whole), donate_argnums=0)
    model = make()
    before = jax.tree.leaves(model)
    step(model, X)
    step(model, X)
    assert all(x.is_deleted() for x in before)
    assert_placed(model)


def test_methods_and_keywords(kind: AxisType) -> None:
    s = Shardings(kind)
    model = nnx.jit(Layer, out_shardings=s.by_filter)()
    out = nnx.jit(model.__call__, in_shardings=(s.whole,), out_shardings=s.columns)(X)
    assert split_over(out) == (None, "d")
    named = nnx.jit(lambda m, *, x: m(x), in_shardings=(s.by_filter,), out_shardings=s.columns)
    assert split_over(named(model, x=jax.device_put(X, s.whole))) == (None, "d")
    static = nnx.jit(
        lambda k, m, x: m(x) * k,
        static_argnums=0,
        in_shardings=(s.by_filter, s.whole),
        out_shardings=s.columns,
    )
    assert split_over(static(2.0, model, X)) == (None, "d")


def test_partition_specs_under_a_mesh(kind: AxisType) -> None:
    s = Shardings(kind)
    with jax.set_mesh(s.split.mesh):
        by_filter = nnx.StateSharding({nnx.PathContains("kernel"): P(None, "d"), ...: P()})
        model = nnx.jit(Layer, out_shardings=by_filter)()
        out = nnx.jit(lambda x: x * 2.0, in_shardings=(P("d"),), out_shardings=P(None, "d"))(X)
    assert split_over(model.kernel[...]) == (None, "d") and split_over(model.bias[...]) == ()
    assert split_over(out) == (None, "d")


def test_gradient_step_keeps_shardings(kind: AxisType) -> None:
    s = Shardings(kind)
    model = nnx.jit(Layer, out_shardings=s.by_filter)()

    @nnx.jit(in_shardings=(s.by_filter, s.whole))
    def step(model, x):
        grads = nnx.grad(lambda m, x: (m(x) ** 2).mean())(model, x)
        model.kernel[...] -= 0.1 * grads["kernel"][...]

    expected = Layer()
    nnx.jit(step.__wrapped__)(expected, X)
    step(model, X)
    assert_placed(model)
    assert np.allclose(model.kernel[...], expected.kernel[...], rtol=1e-5)

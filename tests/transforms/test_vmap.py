"""nnx.vmap beside what it shares with scan (test_mapped.py)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import counted
from tests.transforms.test_mapped import Bank, Cell

f32 = jnp.float32
xs = jnp.arange(3, dtype=f32)


def test_equals_hand_split_jax_vmap():
    model = nnx.Linear(2, 4, rngs=nnx.Rngs(0))
    x = jnp.ones((3, 5, 2), f32)
    graphdef, state = nnx.split(model)
    expected = jax.vmap(lambda s, x: nnx.merge(graphdef, s)(x), (None, 0))(state, x)
    assert np.array_equal(nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(model, x), expected)


def test_axis_name_and_collectives():
    def f(m):
        m.n[...] = jax.lax.psum(m.w[...], "i")

    bank = Bank()
    nnx.vmap(f, axis_name="i")(bank)
    assert np.array_equal(bank.n[...], [6, 6, 6])


def test_axis_size_without_a_mapped_argument():
    assert nnx.vmap(lambda m: m.w[...], in_axes=None, axis_size=4)(Cell()).shape == (4,)
    assert nnx.vmap(lambda: nnx.Param(f32(1)), axis_size=4)().shape == (4,)


def test_axis_size_that_differs():
    with pytest.raises(ValueError, match=r"sizes: 4 \(the size given\) and 3 \(m\.n"):
        nnx.vmap(lambda m: m.w[...], axis_size=4)(Bank())


def test_spmd_axis_name_is_accepted():
    found = nnx.vmap(lambda m, x: m(x), spmd_axis_name="data")(Bank(), xs)
    assert np.array_equal(found, [0, 2, 6])


def test_new_attributes_take_axis_0_and_statics_change_once():
    def f(m, x):
        m.param, m.array, m.child = nnx.Param(x), m.w[...] + x, Cell()
        m.calls += 1

    bank = Bank()
    bank.calls = 0
    nnx.vmap(f)(bank, xs)
    assert np.array_equal(bank.param[...], xs) and np.array_equal(bank.array, [1, 3, 5])
    assert bank.child.w.shape == (3,) and bank.calls == 1


def test_attribute_added_to_a_broadcast_object_takes_axis_0():
    def f(m, x):
        m.new = nnx.Param(x)

    cell = Cell()
    nnx.vmap(f, in_axes=(None, 0))(cell, xs)
    assert np.array_equal(cell.new[...], xs) and cell.w.shape == ()


def test_attributes_and_metadata_change():
    def f(m):
        del m.n
        m.w.set_metadata("tag", 1)

    bank = Bank()
    nnx.vmap(f)(bank)
    assert not hasattr(bank, "n") and bank.w.tag == 1 and bank.w.shape == (3,)


def test_state_argument_gains_an_entry():
    def f(state):
        state["new"] = nnx.Param(state["w"][...] + f32(1))

    state = nnx.state(Bank())
    nnx.vmap(f)(state)
    assert np.array_equal(state["new"][...], [2, 3, 4]) and state["w"].shape == (3,)


def test_result_that_differs_cannot_be_broadcast():
    with pytest.raises(ValueError, match=r"the result\['a'\] does not fit out_axes None"):
        nnx.vmap(lambda x: {"a": x}, out_axes=None)(xs)
    with pytest.raises(ValueError, match=r"new Param result.* does not fit out_axes None"):
        nnx.vmap(lambda x: nnx.Param(x), out_axes=None)(xs)


def test_result_that_is_the_same_for_all():
    made, one = nnx.vmap(lambda x: (Cell(), f32(1)), out_axes=None)(xs)
    assert made.w.shape == () and one.shape == ()


def test_carry_is_for_scan():
    with pytest.raises(ValueError, match=r"in_axes has nnx\.Carry"):
        nnx.vmap(lambda c, x: c, in_axes=(nnx.Carry, 0))


def test_flags_stay_python_values():
    f = nnx.vmap(lambda x, up, mode: x if up and mode == "a" else -x, in_axes=(0, None, None))
    assert np.array_equal(f(xs, True, "a"), xs) and np.array_equal(f(xs, True, "b"), -xs)


def test_init_is_decorated():
    class Stack(nnx.Module):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=(nnx.StateAxes({...: 0}), 0))
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 4, rngs=rngs)

    assert Stack(nnx.Rngs(0)).linear.kernel.shape == (3, 2, 4)


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit, nnx.remat], ids=["eager", "jit", "remat"])
def test_ensemble_step_is_the_loop_of_steps(around):
    def step(m, x):
        loss, grads = nnx.value_and_grad(lambda m: nnx.jit(lambda m, x: m(x) ** 2)(m, x))(m)
        m.w[...] -= grads["w"][...] * f32(0.5)
        return loss

    bank, cells = Bank(), [Cell(w) for w in (1.0, 2.0, 3.0)]
    losses = around(nnx.vmap(step))(bank, xs)
    assert np.array_equal(losses, jnp.stack([step(m, x) for m, x in zip(cells, xs, strict=True)]))
    assert np.array_equal(bank.w[...], jnp.stack([m.w[...] for m in cells]))
    assert np.array_equal(bank.n[...], [1, 1, 1])


def test_nested_vmaps():
    variable = nnx.Param(jnp.ones((2, 3), f32))

    def f(v):
        v[...] += f32(1)
        return v[...] * f32(2)

    found = nnx.vmap(nnx.vmap(f, in_axes=0), in_axes=1, out_axes=1)(variable)
    assert np.array_equal(found, jnp.full((2, 3), 4)) and np.array_equal(
        variable[...], jnp.full((2, 3), 2)
    )


def test_batch_norm_of_a_broadcast_model_fails_each_time_and_harms_nothing():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(1, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    model, x = Net(nnx.Rngs(0)), jnp.ones((4, 6, 1), f32)
    for f in (
        nnx.vmap(model, in_axes=1),
        lambda x: nnx.vmap(Net.__call__, in_axes=(None, 1))(model, x),
    ):
        for _ in range(2):
            with pytest.raises(
                ValueError, match=r"changed self\.norm\.mean \(BatchStat\), .*broad"
            ):
                f(x)
    assert_isomorphic(model, Net(nnx.Rngs(0)))
    assert model(jnp.ones((4, 1), f32)).shape == (4, 5)


def test_plain_vmap_around_reads():
    bank = Bank()
    found = jax.vmap(lambda x: nnx.vmap(lambda m: m.w[...] * x)(bank))(xs)
    assert np.array_equal(found, jnp.outer(xs, bank.w[...]))


def test_body_runs_once_a_call():
    f, runs = counted(lambda m, x: m(x))
    nnx.vmap(f)(Bank(), xs)
    assert len(runs) == 1

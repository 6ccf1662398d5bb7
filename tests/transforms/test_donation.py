"""Donation: which buffers are gone after a call, and what errors say of them."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.errors import DonatedBufferError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import Cell, Tree

ONE = jnp.float32(1)
X = jnp.ones((2, 3), jnp.float32)


def test_donated_object_gets_new_arrays_and_its_old_ones_are_gone():
    def step(m, x):
        m.w[...] += x
        return m.n[...]

    m = Cell()
    w, n = m.w[...], m.n[...]
    out = nnx.jit(step, donate_argnums=0)(m, ONE)
    assert w.is_deleted() and n.is_deleted()
    assert float(m.w[...]) == 3 and int(m.n[...]) == 0 and int(out) == 0


def test_donation_by_name_and_of_keywords():
    def step(*, m, x):
        m.w[...] += x

    m = Cell()
    w = m.w[...]
    nnx.jit(step, donate_argnames="m")(m=m, x=ONE)
    assert w.is_deleted() and float(m.w[...]) == 3


def test_donation_of_array_attributes_and_of_values_in_containers():
    m = Tree()
    before = jax.tree.leaves(m)
    nnx.jit(lambda m: None, donate_argnums=0)(m)
    assert all(x.is_deleted() for x in before)
    assert_isomorphic(Tree(), m)


def test_donation_with_a_change_of_structure():
    def step(m):
        m.extra = nnx.Param(m.array + ONE)
        m.left.mode = "eval"
        m.items.append(m.right.w[...] * 2.0)

    eager, m = Tree(), Tree()
    before = jax.tree.leaves(m)
    step(eager)
    nnx.jit(step, donate_argnums=0)(m)
    assert all(x.is_deleted() for x in before)
    assert_isomorphic(eager, m)


def test_donated_state_and_optimizer():
    optax = pytest.importorskip("optax")
    model = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.5, momentum=0.5), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: m(x).sum())(model)
        optimizer.update(model, grads)

    before = jax.tree.leaves((model, optimizer))
    for _ in range(2):
        step(model, optimizer, X)
    assert all(x.is_deleted() for x in before)
    assert int(optimizer.step[...]) == 2
    state = nnx.state(model)
    leaves = jax.tree.leaves(state)
    nnx.jit(lambda s: s["bias"].set_value(s["bias"] * 2.0), donate_argnums=0)(state)
    assert all(x.is_deleted() for x in leaves) and state["bias"].shape == (4,)


test_donated_state_and_optimizer = pytest.mark.standard_promotion(test_donated_state_and_optimizer)


def test_donated_plain_argument_is_gone():
    x = jnp.ones(3)
    nnx.jit(lambda m, x: x * m.w[...], donate_argnums=1)(Cell(), x)
    assert x.is_deleted()


def test_variable_shared_by_a_donated_and_a_kept_argument_is_donated_once():
    a, b = Cell(), Cell()
    b.w = a.w
    nnx.jit(lambda a, b: b.n.set_value(b.n + jnp.int32(1)), donate_argnums=0)(a, b)
    assert a.w is b.w and float(b.w[...]) == 2 and int(b.n[...]) == 1


def test_one_buffer_in_two_donated_variables_names_both():
    m = Tree()
    m.right.w.value = m.items[0].w[...]
    w = m.right.w[...]
    with pytest.raises(DonatedBufferError, match=r"m\.right\.w and m\.items\[0\]\.w hold the same"):
        nnx.jit(lambda m: None, donate_argnums=0)(m)
    assert not w.is_deleted() and m.right.w[...] is w


def test_one_buffer_inside_of_one_donated_value_names_it():
    m = Cell()
    m.w.value = {"a": ONE, "b": ONE}
    with pytest.raises(DonatedBufferError, match=r"m\.w and m\.w hold the same buffer"):
        nnx.jit(lambda m: None, donate_argnums=0)(m)


@pytest.mark.parametrize("donated", [(0,), (0, 1)])
def test_donated_buffer_that_another_argument_holds_names_its_variable(donated):
    m = Cell()
    w = m.w[...]
    with pytest.raises(DonatedBufferError, match=r"m\.w is donated, and another argument holds"):
        nnx.jit(lambda m, x: x, donate_argnums=donated)(m, w)
    assert not w.is_deleted()


def boom(x):
    raise ValueError("boom at run time")


def failing(m, x):
    m.w[...] += x
    return jax.pure_callback(boom, jax.ShapeDtypeStruct((), jnp.float32), x)


@pytest.mark.filterwarnings("ignore")  # JAX logs the exception of the callback
def test_donated_call_that_fails_at_run_time_names_what_is_gone():
    m = Cell()
    with pytest.raises(DonatedBufferError, match=r"(?s)nnx\.jit\(failing\).*Gone are.*m\.w"):
        jax.block_until_ready(nnx.jit(failing, donate_argnums=0)(m, ONE))


def test_call_that_fails_at_run_time_changes_nothing_without_donation():
    m = Cell()
    with pytest.raises(Exception, match="boom"):
        jax.block_until_ready(nnx.jit(failing)(m, ONE))
    assert float(m.w[...]) == 2


def test_donated_call_that_fails_while_tracing_loses_nothing():
    def fails(m):
        m.w[...] += ONE
        raise ZeroDivisionError("traced")

    m = Cell()
    with pytest.raises(ZeroDivisionError, match="traced"):
        nnx.jit(fails, donate_argnums=0)(m)
    assert_isomorphic(Cell(), m)

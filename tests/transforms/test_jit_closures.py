"""jit of functions that close over objects: values that are read there and change."""

import copy
import gc
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.samples import Cell, Tree, counted

ONE = jnp.float32(1)


def test_value_changed_under_a_closure_traces_again_and_warns_once_with_the_path():
    holder = {"model": Tree()}
    run, traces = counted(lambda x: x * holder["model"].items[0].w[...])
    jitted = nnx.jit(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jitted(ONE) == jitted(ONE) == 5
    holder["model"].items[0].w[...] = jnp.float32(6)
    with pytest.warns(UserWarning, match=r"reads holder\.model\.items\[0\]\.w of an obj") as found:
        assert jitted(ONE) == 6
    assert found[0].filename == __file__
    holder["model"].items[0].w[...] = jnp.float32(7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert jitted(ONE) == 7
    assert len(traces) == 3


def test_value_that_is_not_read_may_change_without_a_trace():
    model = Tree()
    run, traces = counted(lambda x: x * model.items[0].w[...])
    jitted = nnx.jit(run)
    for n in range(3):
        model.right.w[...] = jnp.float32(n)
        jitted(ONE)
    assert len(traces) == 1


@pytest.mark.parametrize("value", [{"a": 1.0, "b": [2.0]}, np.float32(3)], ids=["tree", "numpy"])
@pytest.mark.filterwarnings("ignore:nnx.jit")
def test_closure_over_values_of_any_form_traces_again(value):
    variable = nnx.Variable(value)
    jitted = nnx.jit(lambda x: x + sum(jax.tree.leaves(variable.get_value())))
    assert jitted(ONE) == 4
    variable.value = jax.tree.map(lambda v: v + np.float32(1), value)
    assert jitted(ONE) == 1 + sum(jax.tree.leaves(variable.get_value()))


@pytest.mark.filterwarnings("ignore:nnx.jit")
@pytest.mark.parametrize(
    "read",
    [
        lambda m: nnx.state(m, nnx.Param)["w"][...],
        lambda m: nnx.clone(m).w[...],
        lambda m: nnx.merge(*nnx.split(m)).w[...],
        lambda m: nnx.jit(lambda m: m.w[...])(m),
        lambda m: nnx.grad(lambda m: m.w[...] ** 2)(m)["w"][...] / 2.0,
        lambda m: jax.jit(lambda x: x * m.w[...])(ONE),
        lambda m: jax.tree.leaves(m)[1],
        lambda m: jax.tree.leaves(m.w)[0],
        lambda m: jax.vmap(lambda m, x: m.w[...] * x, in_axes=(None, 0))(m, jnp.ones(1))[0],
    ],
    ids=["state", "clone", "merge", "nnx.jit", "nnx.grad", "jax.jit", "tree", "leaf", "jax.vmap"],
)
def test_closure_is_seen_however_it_is_read(read):
    m = Cell()
    jitted = nnx.jit(lambda x: read(m) * x)
    assert jitted(ONE) == 2
    m.w[...] = jnp.float32(5)
    assert jitted(ONE) == 5


@pytest.mark.filterwarnings("ignore:nnx.jit")
def test_closure_over_a_state_is_seen():
    graphdef, state = nnx.split(Cell())
    merged = nnx.jit(lambda x: nnx.merge(graphdef, state).w[...] * x)
    mapped = nnx.jit(lambda x: jax.tree.map(lambda w: w * x.astype(w.dtype), state)["w"][...])
    filtered = nnx.jit(lambda x: nnx.filter_state(state, nnx.Param)["w"][...] * x)
    copied = nnx.jit(lambda x: copy.copy(state)["w"][...] * x)
    assert merged(ONE) == mapped(ONE) == filtered(ONE) == copied(ONE) == 2
    state["w"][...] = jnp.float32(5)
    assert merged(ONE) == mapped(ONE) == filtered(ONE) == copied(ONE) == 5


@pytest.mark.filterwarnings("ignore:nnx.jit")
def test_closure_of_a_cached_inner_function_is_seen_outside():
    m = Cell()
    inner = nnx.jit(lambda x: x * m.w[...])
    inner(ONE)
    outer = nnx.jit(lambda x: inner(x) + ONE)
    assert outer(ONE) == 3
    m.w[...] = jnp.float32(5)
    assert outer(ONE) == 6


@pytest.mark.filterwarnings("ignore:nnx.jit")
def test_reads_after_an_inner_function_belong_to_the_outer_one():
    m, other = Cell(), Cell()
    inner = nnx.jit(lambda other: other.w[...])
    outer = nnx.jit(lambda x: inner(other) * x + m.w[...])
    assert outer(ONE) == 4
    m.w[...] = jnp.float32(5)
    assert outer(ONE) == 7


@pytest.mark.filterwarnings("ignore:nnx.jit")
def test_model_that_is_dropped_under_a_closure_traces_again():
    holder = [Cell(2.0)]
    jitted = nnx.jit(lambda x: holder[0].w[...] * x)
    assert jitted(ONE) == 2
    ref = weakref.ref(holder[0])
    holder[0] = Cell(3.0)
    gc.collect()
    assert ref() is None
    assert jitted(ONE) == 3


def test_arguments_are_no_foreign_reads():
    m = Cell()
    run, traces = counted(lambda m, x: m.w[...] * x)
    jitted = nnx.jit(run)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for n in range(3):
            m.w[...] = jnp.float32(n)
            assert jitted(m, ONE) == n
    assert len(traces) == 1


def test_plain_jit_keeps_the_value_it_was_traced_with():
    m = Cell()
    jitted = jax.jit(lambda x: m.w[...] * x)
    assert jitted(ONE) == 2
    m.w[...] = jnp.float32(5)
    assert jitted(ONE) == 2  # JAX's rule for constants; guide 03 says so

"""jit of functions of objects: what it compiles, when it traces again, and its options."""

import copy
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.errors import (
    TraceLevelError,
)
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import Cell, Tree, counted

ONE = jnp.float32(1)
X = jnp.ones((2, 3), jnp.float32)


def linear(seed=0):
    return nnx.Linear(3, 4, rngs=nnx.Rngs(seed))


def forward(model, x):
    return model(x)


# Against a hand-split `jax.jit`.


def test_forward_is_that_of_a_hand_split_jit():
    model = linear()
    graphdef, state = nnx.split(model)
    by_hand = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x))
    assert (nnx.jit(forward)(model, X) == by_hand(state, X)).all()


def test_training_step_is_that_of_a_hand_split_jit():
    def step(model, x):
        for param in (model.kernel, model.bias):
            param[...] = param[...] * jnp.float32(0.5) + x.sum()
        return model(x)

    def by_hand(graphdef, state, x):
        model = nnx.merge(graphdef, state)
        out = step(model, x)
        return out, nnx.state(model)

    lifted, jitted = linear(), nnx.jit(step)
    graphdef, state = nnx.split(linear())
    for _ in range(3):
        expected, state = jax.jit(by_hand)(graphdef, state, X)
        assert (jitted(lifted, X) == expected).all()
    assert_isomorphic(nnx.to_pure_dict(state), nnx.to_pure_dict(nnx.state(lifted)))


def test_compiled_program_is_that_of_plain_jax():
    def plain(leaves, x):
        return x @ leaves[1] + leaves[0].reshape(1, 4)

    def sizes(compiled):
        found = compiled.memory_analysis()
        return found.argument_size_in_bytes, found.output_size_in_bytes

    model = linear()
    expected = jax.jit(plain).lower([model.bias[...], model.kernel[...]], X).compile()
    found = nnx.jit(forward).lower(model, X).compile()
    assert found.cost_analysis()["flops"] == expected.cost_analysis()["flops"]
    assert sizes(found) == sizes(expected)


def test_program_has_the_name_of_the_function():
    assert "jit_forward" in nnx.jit(forward).lower(linear(), X).as_text()


# When it traces.


def test_equal_structures_share_a_trace():
    run, traces = counted(forward)
    jitted = nnx.jit(run)
    for seed in range(3):
        jitted(linear(seed), X)
    assert len(traces) == 1 and jitted.cache_info()[:2] == (1, 1)


def test_other_shapes_and_other_structures_are_other_traces():
    run, traces = counted(forward)
    jitted, model = nnx.jit(run), linear()
    jitted(model, X)
    jitted(model, jnp.ones((5, 3)))
    assert len(traces) == 2 and jitted.cache_info().structures == 1
    model.note = "new"
    jitted(model, X)
    assert len(traces) == 3 and jitted.cache_info().structures == 2


def test_static_attributes_are_told_apart_by_type():
    run, traces = counted(lambda m: jnp.float32(1) if m.k == 1 else ONE)
    jitted, m = nnx.jit(run), Cell()
    for k in (1, 1.0, True, (1,), (1.0,), 0.0, -0.0, float("nan"), float("nan"), 1):
        m.k = k
        jitted(m)
    assert len(traces) == 8


def test_static_changed_from_outside_takes_effect():
    jitted, m = nnx.jit(lambda m: m.w[...] * jnp.float32(m.k)), Cell(2.0)
    for k in (3, 5, 3):
        m.k = k
        assert jitted(m) == 2 * k


def test_value_set_from_outside_is_no_new_trace():
    run, traces = counted(lambda m: m.w[...] + m.array)
    jitted, m = nnx.jit(run), Cell()
    for n in (1.0, 2.0, 3.0):
        m.w[...] = jnp.float32(n)
        m.array = jnp.float32(n)
        assert jitted(m) == 2 * n
    assert len(traces) == 1


def test_python_number_in_a_variable_is_no_new_trace():
    run, traces = counted(lambda m: m.w[...] + ONE)
    jitted, m = nnx.jit(run), Cell()
    for w in (jnp.float32(1), 2.0, np.float32(3)):
        m.w.value = w
        jitted(m)
    assert len(traces) == 1


def test_alternating_shapes_of_which_one_changes_a_value():
    def f(m, x):
        if x.shape == (2,):
            m.n[...] += jnp.int32(1)
        return x.sum()

    m, jitted = Cell(), nnx.jit(f)
    for _ in range(3):
        jitted(m, jnp.ones(2))
        jitted(m, jnp.ones(3))
    assert int(m.n[...]) == 3 and jitted.cache_info()[:2] == (2, 1)


def test_two_functions_have_caches_of_their_own():
    m = Cell(3.0)
    double, square = nnx.jit(lambda m: m.w[...] * 2.0), nnx.jit(lambda m: m.w[...] ** 2)
    assert double(m) == 6 and square(m) == 9 and double(m) == 6


def test_clear_cache_traces_again():
    run, traces = counted(forward)
    jitted, model = nnx.jit(run), linear()
    jitted(model, X)
    jitted.clear_cache()
    assert jitted.cache_info()[1:] == (0, 0)
    jitted(model, X)
    assert len(traces) == 2 and jitted.cache_info().traces == 2


# Under plain transforms of JAX.


def test_under_vmap_with_an_object_per_example():
    graphdef, state = nnx.split(Cell())
    states = jax.tree.map(lambda x: jnp.stack([x, x + x]), state)

    @nnx.jit
    def step(m, x):
        return m(x)

    def mapped(state, x):
        m = nnx.merge(graphdef, state)
        return step(m, x), nnx.state(m)

    out, after = jax.vmap(mapped)(states, jnp.float32([1, 1]))
    assert out.tolist() == [2, 4] and after["n"][...].tolist() == [1, 1]


def test_under_scan_and_grad_of_plain_jax():
    m = Cell()
    step = nnx.jit(lambda m, x: m.w[...] * x)

    def loss(x):
        return jax.lax.scan(lambda c, _: (step(m, c), None), x, length=3)[0]

    assert loss(ONE) == 8 and jax.grad(loss)(ONE) == 8


def test_jitted_object_in_a_plain_pytree_transform():
    m = Cell()
    out = jax.jit(lambda m, x: nnx.jit(lambda m, x: m(x))(m, x))(m, ONE)
    assert out == 2 and int(m.n[...]) == 0  # plain JAX changes no argument


def test_write_at_another_level_names_argument_and_path():
    m = Cell()
    with pytest.raises(TraceLevelError, match=r"nnx\.jit\(<lambda>\) changed model\.n \(Variable"):
        jax.vmap(lambda x: nnx.jit(lambda model, x: model(x))(m, x))(jnp.ones(2))


# Around it: names, debugging, copies.


def test_switching_names_off_traces_again_and_both_stay_cached():
    run, traces = counted(lambda m, x: m(x))
    jitted, m = nnx.jit(run), Cell()
    for _ in range(2):
        jitted(m, ONE)
        with nnx.override_named_call(False):
            jitted(m, ONE)
    assert len(traces) == 2 and int(m.n[...]) == 4


def test_without_jit_the_function_runs_as_it_is():
    m, other, jitted = Cell(), Cell(), nnx.jit(lambda m, x: m(x) * other.w[...])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with jax.disable_jit():
            assert jitted(m, ONE) == jitted(m, ONE) == 4
        assert jitted(m, ONE) == 4
    assert int(m.n[...]) == 3


@pytest.mark.parametrize("make", [Cell, Tree])
def test_no_tracer_outlives_a_call(make):
    def f(m):
        m.extra = Cell()
        m.items = [m.extra]
        return m.extra

    m = make()
    with jax.checking_leaks():
        assert nnx.jit(f)(m) is m.extra
        nnx.jit(lambda m: m.extra(ONE))(m)


def test_deepcopy_of_a_jitted_function_is_itself():
    m = Cell()
    m.helper = helper = nnx.jit(lambda x: x + ONE)
    assert copy.deepcopy(m).helper is helper and copy.copy(helper) is helper
    assert nnx.clone(m).helper is helper and nnx.jit(lambda m: m.helper(m.w[...]))(m) == 3


def test_jitted_method_as_an_attribute_is_bound_to_the_clone_in_a_clone():
    m = Cell()
    m.run = nnx.jit(m.__call__)
    clone = nnx.clone(m)
    assert clone.run.__self__ is clone
    assert m.run.__self__ is m

"""jit of functions of objects: what it compiles, when it traces again, and its options."""

import copy
import functools
import gc
import inspect
import pickle
import warnings
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.errors import (
    DonatedBufferError,
    StaticValueError,
    StructureError,
    TraceLevelError,
)
from nnxlite._transforms.jit import MAX_KEPT
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


# What may be jitted.


def test_decorator_with_and_without_options():
    @nnx.jit
    def plain(m):
        """Reads the parameter."""
        return m.w[...]

    @nnx.jit(static_argnames="k")
    def with_options(m, k):
        return m.w[...] * jnp.float32(k)

    assert plain(Cell()) == 2 and with_options(Cell(), 3) == 6
    assert plain.__name__ == "plain" and plain.__doc__ == "Reads the parameter."
    assert list(inspect.signature(with_options).parameters) == ["m", "k"]
    assert repr(plain).startswith("<nnx.jit of ")


def test_something_that_is_no_function_is_an_error():
    with pytest.raises(TypeError, match=r"nnx\.jit expected a function, found int"):
        nnx.jit(3)


class Stepper(nnx.Module):
    def __init__(self, w=2.0):
        self.w = nnx.Param(jnp.float32(w))
        self.n = nnx.Variable(jnp.int32(0))

    @nnx.jit
    def step(self, x):
        """Counts."""
        self.n[...] += jnp.int32(1)
        return self.w[...] * x

    @nnx.jit(static_argnames="power")
    def power(self, x, power=1):
        return self.w[...] ** power * x

    @nnx.jit(static_argnums=2, donate_argnums=0)
    def donated(self, x, k):
        self.w[...] += x
        return jnp.float32(k)

    @staticmethod
    @nnx.jit
    def double(x):
        return x + x

    def __call__(self, x):
        self.n[...] += jnp.int32(1)
        return self.w[...] * x


class Child(Stepper):
    @nnx.jit
    def step(self, x):
        return super().step(x) + ONE


def test_method_threads_the_state_of_its_object():
    m = Stepper()
    assert m.step(ONE) == 2 and m.step(ONE) == 2 and int(m.n[...]) == 2
    assert Stepper.step(m, ONE) == 2 and int(m.n[...]) == 3
    assert m.step.__name__ == "step" and m.step.__doc__ == "Counts."
    assert m.step.__self__ is m


def test_method_is_one_trace_for_all_instances():
    before = Stepper.step.cache_info().traces
    for w in (1.0, 2.0, 3.0):
        assert Stepper(w).step(jnp.ones(5)).sum() == 5 * w
    assert Stepper.step.cache_info().traces == before + 1


def test_inherited_method_and_super():
    m = Child()
    assert m.step(ONE) == 3 and int(m.n[...]) == 1
    assert m.power(ONE, power=3) == 8


def test_method_with_options():
    m = Stepper()
    assert m.power(ONE, 2) == 4 and m.power(ONE, power=3) == 8
    assert m.donated(ONE, 7) == 7 and m.w[...] == 3


def test_static_method():
    assert Stepper.double(ONE) == 2 and Stepper().double(ONE) == 2


def test_method_of_a_jitted_object_has_the_stages():
    m = Stepper()
    assert m.step.lower(ONE).compile()(m, ONE) == 2
    assert m.step.eval_shape(ONE).shape == ()
    assert m.step.trace(ONE).jaxpr is not None
    assert m.step.cache_info() == Stepper.step.cache_info()


def test_callable_module_threads_its_state():
    m = Stepper()
    jitted = nnx.jit(m)
    assert jitted(ONE) == 2 and jitted(ONE) == 2
    assert int(m.n[...]) == 2


def test_bound_method_made_anew_at_each_step_traces_once():
    class Local(Cell):
        traces = 0

        def loss(self, x):
            Local.traces += 1
            return self(x)

    m = Local()
    for _ in range(4):
        nnx.jit(m.loss)(ONE)
    nnx.jit(Local().loss)(ONE)
    assert Local.traces == 1 and int(m.n[...]) == 4


def test_bound_methods_with_other_options_do_not_mix():
    m = Stepper()
    assert nnx.jit(m.__call__)(ONE) == 2
    kept = nnx.jit(m.__call__, keep_unused=True)
    donated = nnx.jit(m.__call__, donate_argnums=0)
    assert len({id(nnx.jit(m.__call__).__func__), id(kept.__func__), id(donated.__func__)}) == 3
    assert kept.__func__ is nnx.jit(m.__call__, keep_unused=True).__func__


def test_number_of_kept_bound_functions_is_bounded():
    def f(m, k):
        return m

    for k in range(MAX_KEPT + 5):
        nnx.jit(functools.partial(f, k=k, m=Cell()))
    assert len(f.__nnx_jits__) == MAX_KEPT
    assert not pickle.loads(pickle.dumps(f.__nnx_jits__))


def test_what_a_bound_function_closes_over_is_freed_with_it():
    refs = []
    for _ in range(3):
        other, m = Cell(), Cell()
        assert nnx.jit(functools.partial(lambda m, other=other: m.w[...] * other.w[...], m))() == 4
        refs += [weakref.ref(other), weakref.ref(m)]
        del other, m
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_partial_threads_its_objects_and_bakes_its_constants():
    def f(m, mode, x, *, times=1, scale):
        assert mode == "train"
        for _ in range(times):
            x = m(x)
        return x * scale

    m = Cell()
    jitted = nnx.jit(functools.partial(f, m, "train", times=3, scale=jnp.float32(10)))
    assert jitted(ONE) == 80 and int(m.n[...]) == 3


def test_partial_made_anew_with_equal_constants_traces_once():
    run, traces = counted(lambda m, k, x: m(x) * jnp.float32(k))
    m = Cell()
    for k in (3, 3, 3.0, 3):
        assert nnx.jit(functools.partial(run, m, k))(ONE) == 6
    assert len(traces) == 2


def test_partial_of_plain_values_is_as_for_jax():
    jitted = nnx.jit(functools.partial(lambda x, k: x * jnp.float32(k), k=3))
    assert jitted(ONE) == 3


def test_transformed_functions_nest_in_any_order():
    m = Stepper()
    assert nnx.grad(m.step)(ONE) == 2 and int(m.n[...]) == 1
    assert nnx.jit(m.step)(ONE) == 2 and int(m.n[...]) == 2
    assert nnx.jit(nnx.jit(m))(ONE) == 2 and int(m.n[...]) == 3
    assert nnx.jit(nnx.grad(m.step))(ONE) == 2 and int(m.n[...]) == 4


def test_function_of_arrays_only_is_plain_jit():
    run, traces = counted(lambda x, y=2.0, *, z: x * y + z)
    jitted = nnx.jit(run)
    assert jitted(X, z=X).sum() == 18 and jitted(X, z=X).sum() == 18
    assert len(traces) == 1


def test_constructor_may_be_jitted():
    model = nnx.jit(lambda rngs: nnx.Linear(3, 4, rngs=rngs))(nnx.Rngs(0))
    assert np.allclose(model.kernel[...], linear().kernel[...])
    assert model(X).shape == (2, 4)


def test_random_streams_advance():
    def draw(rngs):
        return jax.random.uniform(rngs.params(), ())

    lifted, eager = nnx.Rngs(0), nnx.Rngs(0)
    jitted = nnx.jit(draw)
    assert [float(jitted(lifted)) for _ in range(3)] == [float(draw(eager)) for _ in range(3)]


def test_recursion_through_jit():
    @nnx.jit(static_argnums=1)
    def power(m, n):
        m.n[...] += jnp.int32(1)
        return ONE if n == 0 else m.w[...] * power(m, n - 1)

    m = Cell(3.0)
    assert power(m, 3) == 27 and int(m.n[...]) == 4


# Static arguments.


def test_static_argument_by_position_and_by_name_is_one_key():
    run, traces = counted(lambda x, k=1, mode="a": x * jnp.float32(k))

    def f(x, k=1, mode="a"):
        return run(x, k, mode)

    for jitted in (nnx.jit(f, static_argnums=1), nnx.jit(f, static_argnames="k")):
        traces.clear()
        assert jitted(ONE, 3) == jitted(ONE, k=3) == jitted(x=ONE, k=3) == 3
        assert len(traces) == 1


def test_static_arguments_are_told_apart_by_type_at_any_depth():
    run, traces = counted(lambda x, k: x)
    jitted = nnx.jit(run, static_argnums=1)
    values = [1, 1.0, True, (1,), (1.0,), (True,), {"a": [1]}, {"a": [1.0]}, -0.0, 0.0, "1"]
    for value in [*values, *values]:
        jitted(ONE, value)
    assert len(traces) == len(values)


def test_static_arguments_may_be_lists_functions_and_optimizers():
    optax = pytest.importorskip("optax")
    run, traces = counted(lambda x, k: x)
    jitted = nnx.jit(run, static_argnums=1)
    for _ in range(2):
        jitted(ONE, [1, {"a": 2}])
        jitted(ONE, lambda x: x + 1)
        jitted(ONE, optax.adam(1e-3))
    assert len(traces) == 3


def test_static_list_that_changes_later_is_a_new_key():
    seen = []

    @nnx.jit(static_argnums=1)
    def f(x, sizes):
        seen.append(list(sizes))
        return x

    sizes = [1, 2]
    f(ONE, sizes)
    sizes.append(3)
    f(ONE, sizes)
    f(X, [1, 2])
    assert seen == [[1, 2], [1, 2, 3], [1, 2]]


def test_static_argument_before_an_object():
    @nnx.jit(static_argnums=(0, -1))
    def f(k, m, x, mode):
        m.n[...] += jnp.int32(k)
        return x * jnp.float32(len(mode))

    m = Cell()
    assert f(2, m, ONE, "abc") == 3 and int(m.n[...]) == 2


def test_object_as_static_argument_is_an_error():
    with pytest.raises(StaticValueError, match="static argument 0"):
        nnx.jit(lambda m: None, static_argnums=0)(Cell())


def test_static_that_is_no_parameter_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"static_argnames has 'typo', but the parameters .* m, x"):
        nnx.jit(forward_of_two, static_argnames="typo")
    with pytest.raises(ValueError, match=r"donate_argnums .* has 4, but the parameters"):
        nnx.jit(forward_of_two, donate_argnums=4)
    with pytest.raises(ValueError, match=r"x cannot be static and donated"):
        nnx.jit(forward_of_two, static_argnames="x", donate_argnums=1)


def forward_of_two(m, x):
    return m(x)


def test_argument_that_jax_cannot_take_names_it():
    with pytest.raises(
        TypeError, match=r"nnx\.jit\(forward_of_two\): x\['mode'\] is a str.*static"
    ):
        nnx.jit(forward_of_two)(Cell(), {"mode": "train", "y": ONE})
    m = Cell()
    m.w.value = {"a": ONE, "b": "text"}
    with pytest.raises(TypeError, match=r"nnx\.jit\(forward_of_two\): m\.w is a str"):
        nnx.jit(forward_of_two)(m, ONE)


# Donation.


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
    model = linear()
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


# Other options.


def test_options_are_those_of_jax():
    m, x = Cell(), jnp.ones(3)
    unused = nnx.jit(lambda m, x: m.w[...] * 2.0, keep_unused=True).lower(m, x).compile()
    dropped = nnx.jit(lambda m, x: m.w[...] * 2.0).lower(m, x).compile()
    size = lambda c: c.memory_analysis().argument_size_in_bytes  # noqa: E731
    assert size(unused) > size(dropped)
    inner = {inline: nnx.jit(lambda m, x: m.w[...] * x, inline=inline) for inline in (False, True)}
    text = {k: jax.jit(lambda x, f=f: f(m, x)).lower(x).as_text() for k, f in inner.items()}
    assert text[False].count("func.func") == 2 and text[True].count("func.func") == 1
    options = {"xla_embed_ir_in_executable": True}
    assert nnx.jit(lambda m: m.w[...], compiler_options=options)(m) == 2
    with pytest.raises(Exception, match="no_such_option"):
        nnx.jit(lambda m: m.w[...], compiler_options={"no_such_option": True})(m)


# Stages.


def test_stages_lower_trace_and_compile():
    m, jitted = Cell(), nnx.jit(lambda m, x: m(x))
    traced = jitted.trace(m, ONE)
    assert "mul" in str(traced.jaxpr)
    lowered = traced.lower()
    assert "stablehlo" in lowered.as_text()
    compiled = lowered.compile()
    assert int(m.n[...]) == 0
    assert compiled(m, ONE) == 2 and compiled(m, ONE) == 2 and int(m.n[...]) == 2
    assert jitted.cache_info().traces == 1


def test_lower_takes_shapes_in_place_of_arrays():
    abstract = nnx.eval_shape(linear)
    lowered = nnx.jit(forward).lower(abstract, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    compiled = lowered.compile()
    model = linear()
    assert np.allclose(compiled(model, X), model(X))


def test_compiled_stage_gives_back_arguments_and_structure():
    def f(m):
        m.extra = Cell()
        return m, m.extra

    m = Cell()
    compiled = nnx.jit(f).lower(m).compile()
    out, extra = compiled(m)
    assert out is m and extra is m.extra


def test_compiled_stage_refuses_another_structure():
    m = Cell()
    m.k = 2
    compiled = nnx.jit(lambda m, x: x * jnp.float32(m.k)).lower(m, ONE).compile()
    assert compiled(m, ONE) == 2
    m.k = 3
    with pytest.raises(StructureError, match="compiled for arguments of another structure"):
        compiled(m, ONE)
    static = nnx.jit(lambda x, k: x * jnp.float32(k), static_argnums=1).lower(ONE, 2).compile()
    assert static(ONE, 2) == 2
    with pytest.raises(StructureError, match="another structure"):
        static(ONE, 3)


def test_compiled_stage_checks_donation():
    m = Cell()
    compiled = nnx.jit(lambda m: None, donate_argnums=0).lower(m).compile()
    m.n.value = m.w.value = jnp.ones(())
    m.n.value = m.w.value
    with pytest.raises((DonatedBufferError, TypeError), match=r"same buffer|float32"):
        compiled(m)


def test_eval_shape_computes_and_changes_nothing():
    m, jitted = Cell(), nnx.jit(lambda m, x: (m(x), m))
    out, abstract = jitted.eval_shape(m, jax.ShapeDtypeStruct((5,), jnp.float32))
    assert out.shape == (5,) and int(m.n[...]) == 0
    assert abstract is not m and abstract.n.get_value().dtype == jnp.int32


# Models that the function closes over.


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


@nnx.jit
def at_module_level(m):
    return m.w[...] * 2.0


def test_jitted_functions_and_methods_pickle():
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    assert pickle.loads(pickle.dumps(Stepper.step)) is Stepper.step
    assert pickle.loads(pickle.dumps(Stepper().step))(ONE) == 2
    local = nnx.jit(lambda m, k: m.w[...] * jnp.float32(k), static_argnums=1)
    assert cloudpickle.loads(cloudpickle.dumps(local))(Cell(), 3) == 6


def test_jitted_method_as_an_attribute_is_bound_to_the_clone_in_a_clone():
    m = Cell()
    m.run = nnx.jit(m.__call__)
    clone = nnx.clone(m)
    assert clone.run.__self__ is clone
    assert m.run.__self__ is m

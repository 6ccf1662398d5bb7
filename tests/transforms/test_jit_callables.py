"""What may be jitted: functions, methods, partials, bound methods, objects; and how they pickle."""

import functools
import gc
import inspect
import pickle
import weakref

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._transforms.jit import MAX_KEPT
from tests.transforms.samples import Cell, counted

ONE = jnp.float32(1)
X = jnp.ones((2, 3), jnp.float32)


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


def test_jit_made_anew_of_a_function_shares_traces_but_no_name_in_a_class():
    def f(self, x):
        return self.w[...] * x

    class First(Cell):
        one = nnx.jit(f)
        two = nnx.jit(f)

    m = First()
    text = {name: getattr(m, name).lower(ONE).as_text(debug_info=True) for name in ("one", "two")}
    assert "First.one" in text["one"] and "First.two" not in text["one"]
    assert "First.two" in text["two"] and "First.one" not in text["two"]
    nnx.jit(f)(m, ONE)
    assert nnx.jit(f).cache_info().traces == 1
    assert First.one.cache_info().traces == First.two.cache_info().traces == 1


def test_function_that_wraps_a_jitted_one_has_traces_of_its_own():
    def f(x):
        return x

    nnx.jit(f)(ONE)
    wrapper = functools.wraps(f)(lambda x: 2 * x)
    assert nnx.jit(wrapper)(ONE) == 2
    assert nnx.jit(f)(ONE) == 1
    ref = weakref.ref(wrapper)
    del wrapper
    gc.collect()
    assert ref() is None


def test_jit_made_anew_with_other_options_has_traces_of_its_own():
    def f(m, k):
        return m.w[...] * jnp.float32(k)

    for options in ({"static_argnums": 1}, {"static_argnames": "k", "donate_argnums": 0}, {}):
        assert nnx.jit(f, **options)(Cell(), 3) == 6
        assert nnx.jit(f, **options).cache_info().traces == 1


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
    assert np.allclose(model.kernel[...], nnx.Linear(3, 4, rngs=nnx.Rngs(0)).kernel[...])
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


@nnx.jit
def at_module_level(m):
    return m.w[...] * 2.0


def test_jitted_functions_and_methods_pickle():
    assert pickle.loads(pickle.dumps(at_module_level)) is at_module_level
    assert pickle.loads(pickle.dumps(Stepper.step)) is Stepper.step
    assert pickle.loads(pickle.dumps(Stepper().step))(ONE) == 2
    local = nnx.jit(lambda m, k: m.w[...] * jnp.float32(k), static_argnums=1)
    assert cloudpickle.loads(cloudpickle.dumps(local))(Cell(), 3) == 6

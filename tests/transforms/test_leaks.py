"""Thousands of calls with fresh models leave nothing: no array, no object, no cache that grows."""

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core import statics
from nnxlite._core.intern import InternTable
from nnxlite._transforms import lift

X = jnp.float32(2)
XS = jnp.ones((2,), jnp.float32)
# Of each structure a function keeps some bindings of dead objects, which hold no array.
KEPT = lift.MAX_BINDINGS + 16


# Making an array takes longer than all the rest of a call.
W, N = jnp.float32(2), jnp.int32(0)


class Light(nnx.Module):
    """A parameter and a counter, quickly made."""

    def __init__(self) -> None:
        self.w, self.n = nnx.Param(W), nnx.Variable(N)

    def __call__(self, x: jax.Array) -> jax.Array:
        self.n[...] += jnp.int32(1)
        return self.w[...] * x


class Model(nnx.Module):
    """An object, an array, a list, and values that are sown."""

    def __init__(self) -> None:
        self.cell = Light()
        self.array = W
        self.items = [nnx.Param(W), "static", (W, 1)]

    def __call__(self, x: jax.Array) -> jax.Array:
        y = self.cell(x) * self.items[0] + self.array
        self.sow(nnx.Intermediate, "y", y)
        self.array = self.array + y
        return self.perturb("z", y)


def step(model: Any, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda model: model(x))(model)
    nnx.update(model, jax.tree.map(jnp.subtract, nnx.state(model, nnx.Param), grads))
    return loss


def count_up(_: Any, model: Model) -> Model:
    model.cell.n[...] += 1
    return model


def is_low(model: Model) -> jax.Array:
    return model.cell.n[...] < 2


def carry_on(model: Model, x: jax.Array) -> tuple[Model, jax.Array]:
    return model, model(x)


def forward(model: Model, x: jax.Array) -> jax.Array:
    return model(x)


train, call = nnx.jit(step), nnx.jit(forward)
differentiate, rematted = nnx.value_and_grad(forward), nnx.remat(forward)
scanned = nnx.scan(carry_on)
mapped = nnx.vmap(lambda model, x: model.cell.w[...] * x, in_axes=(None, 0))
piped = jax.jit(lambda model: model)


def through_split(model: Model) -> None:
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    nnx.update(nnx.merge(graphdef, params, rest), params)


def over_fresh_arrays(model: Model) -> None:
    y = X + 1.0
    nnx.cond(jnp.bool_(True), lambda model: model(y), lambda model: model.array + y, model)


def over_fresh_tracers(model: Model) -> None:
    @nnx.jit
    def branching(model: Model, y: jax.Array) -> jax.Array:
        return nnx.cond(y > 1, lambda model: model(y), lambda model: model.array + y, model)

    branching(model, X)


def restructured(model: Model) -> None:
    model.cell.added = nnx.Param(X)
    nnx.jit(lambda model: delattr(model.cell, "added"))(model)


# What is done with a fresh model, and how often.
USES: dict[str, tuple[Callable[[Any], Any], int]] = {
    "jit of a train step": (lambda model: train(model, X), 2_000),
    "split, update and merge": (through_split, 1_000),
    "jax.jit": (piped, 1_000),
    "clone": (nnx.clone, 300),
    "jit of a method": (lambda model: nnx.jit(model.__call__)(X), 300),
    "grad": (lambda model: differentiate(model, X), 100),
    "remat": (lambda model: rematted(model, X), 100),
    "vmap": (lambda model: mapped(model, XS), 100),
    "scan": (lambda model: scanned(model, XS), 100),
    "cond": (lambda model: nnx.cond(X > 1, forward, forward, model, X), 100),
    "while_loop": (lambda m: nnx.while_loop(is_low, functools.partial(count_up, 0), m), 100),
    "fori_loop": (lambda model: nnx.fori_loop(0, 2, count_up, model), 100),
    "eval_shape": (lambda model: nnx.eval_shape(forward, model, X), 100),
    "capture": (lambda model: nnx.capture(call, nnx.Intermediate)(model, X), 100),
    "capture_gradients": (lambda model: nnx.capture_gradients(forward)(model, X), 30),
    "branches that close over arrays": (over_fresh_arrays, 5),
    "branches that close over tracers": (over_fresh_tracers, 5),
    "another structure at each call": (restructured, 6),
}
uses = pytest.mark.parametrize(("use", "times"), USES.values(), ids=USES)


def census() -> Counter[str]:
    """Counts what lives: arrays, objects of the library by class, and what is interned."""
    gc.collect()
    living = gc.get_objects()
    found = Counter(
        type(x).__name__ for x in living if str(type(x).__module__).startswith("nnxlite")
    )
    found["array"] = len(jax.live_arrays())
    found["interned"] = sum(len(x) for x in living if type(x) is InternTable)
    return found


def assert_no_growth(before: Counter[str], times: int) -> None:
    after = census()
    assert after["array"] <= before["array"]
    grown = {name: count - before[name] for name, count in after.items()}
    assert all(more <= min(KEPT, times * 3 // 4) for more in grown.values()), grown


def test_ten_thousand_calls_with_fresh_models_leave_nothing():
    for _ in range(100):
        train(Light(), X)
    before = census()
    for _ in range(10_000):
        train(Light(), X)
    assert_no_growth(before, 10_000)
    assert train.cache_info().traces == 1


@uses
def test_calls_with_fresh_models_leave_nothing(use, times):
    for _ in range(min(times, 4)):
        use(Model())
    before = census()
    for _ in range(times):
        use(Model())
    assert_no_growth(before, times)


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@uses
def test_a_model_and_its_arrays_go_when_the_last_name_does(use, times, no_collector):
    use(Model())
    gc.collect()
    model = Model()
    model.array = X + 1.0
    model.cell.w[...] = X + 2.0
    use(model)
    parts = [model, model.cell, model.cell.w, model.array, model.cell.w.get_value()]
    refs = [weakref.ref(part) for part in parts]
    del model, parts
    assert [ref() for ref in refs] == [None] * len(refs)


def test_ten_thousand_statics_are_not_kept():
    cell = Light()
    for n in range(10_000):
        cell.k = n + 0.5
        nnx.graphdef(cell)
        if n == 5_000:
            gc.collect()
            before = len(statics._STATICS)
    gc.collect()
    assert len(statics._STATICS) <= max(before, statics._MOST_SCALARS) + 64


def test_closures_kept_as_attributes_die_with_their_model():
    def make(n):
        model, held = Light(), jnp.float32(n)
        model.activation = lambda x: x + held
        nnx.jit(lambda m, x: m.activation(m(x)))(model, X)
        return weakref.ref(held)

    refs = [make(n) for n in range(5)]
    gc.collect()
    assert [ref() for ref in refs] == [None] * 5


def test_an_array_that_a_jitted_function_closes_over_dies_with_the_function():
    def make():
        held = X + 1.0
        nnx.jit(lambda m: m(held))(Light())
        return weakref.ref(held)

    ref = make()
    gc.collect()
    assert ref() is None


def test_a_model_that_a_jitted_function_closes_over_dies_with_the_function():
    def make():
        model = Model()
        nnx.jit(lambda x: model.cell.w[...] * x)(X)
        nnx.scan(lambda c, x: (c, model.cell.w[...] * x))(X, XS)
        nnx.cond(X > 1, lambda x: model.array * x, lambda x: x, X)
        return weakref.ref(model.cell)

    ref = make()
    gc.collect()
    assert ref() is None


def test_failed_calls_leave_nothing():
    @nnx.jit
    def fails(model, x):
        model(x)
        raise ZeroDivisionError("in the middle")

    def once():
        with pytest.raises(ZeroDivisionError, match="in the middle"):
            fails(Model(), X)

    once()
    before = census()
    for _ in range(20):
        once()
    assert census()["array"] <= before["array"]

"""Threads that use transforms, captures and scopes side by side get what they get one by one."""

import re
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests import tape
from tests.isomorphism import assert_isomorphic
from tests.programs import Program, Step
from tests.slices import map_arrays, tiled
from tests.strategies import Array, Blueprint, NodeSpec, Ref, VariableSpec
from tests.strategies import Net as Drawn
from tests.transforms.samples import Cell, Tree, counted
from tests.transforms.table import TRANSFORMS

THREADS = 8
X = jnp.float32(2)


@pytest.fixture(autouse=True)
def often_switching() -> Iterator[None]:
    """Lets Python go from thread to thread far more often than it does."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def side_by_side(work: Callable[[int], Any], count: int = THREADS) -> list[Any]:
    """Runs `work(n)` in threads that start together; raises what one of them raised."""
    start = threading.Barrier(count)

    def run(n: int) -> Any:
        start.wait(30)
        return work(n)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(run, range(count)))


def train(step: Callable[..., Any], n: int) -> tuple[list[float], Tree]:
    """Makes a model of its own and calls a train step on it."""
    model = Tree()
    model.array = jnp.float32(n)
    return [float(step(model, X)) for _ in range(3)], model


@nnx.jit
def train_step(model: Tree, x: jax.Array) -> jax.Array:
    def loss(model: Tree) -> jax.Array:
        return (model.left(x) - model.array) ** 2 + model.items[0](x)

    value, grads = nnx.value_and_grad(loss)(model)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - g, params, grads))
    return value


def test_one_jitted_step_trains_eight_models_as_it_trains_one():
    expected = [train(train_step, n) for n in range(THREADS)]
    train_step.clear_cache()
    for (losses, model), (wanted, alone) in zip(
        side_by_side(lambda n: train(train_step, n)), expected, strict=True
    ):
        assert losses == wanted
        assert_isomorphic(alone, model)


# Two objects that share a Variable; a program that reads, writes and records.
BLUEPRINT = Blueprint(
    (
        NodeSpec(Drawn, (("a", Ref(1)), ("b", Ref(2)), ("c", Array(1)))),
        NodeSpec(Drawn, (("v", Ref(2)), ("w", Ref(3)))),
        VariableSpec(nnx.Param, Array(2, (2,)), ()),
        VariableSpec(nnx.BatchStat, Array(3), ()),
    ),
    (0, 1),
)
PROGRAM = Program(
    (Step("call"), Step("write", 0, 1, 1), Step("sow"), Step("write_array"), Step("read", 1, 0))
)
SHARED = ["jit", "grad", "remat", "vmap", "scan of carried", "while_loop", "switch", "capture"]


@pytest.mark.parametrize("name", SHARED)
def test_one_lifted_function_serves_fresh_models_of_many_threads(name):
    entry = TRANSFORMS[name]
    lifted, plain = entry.lift(PROGRAM), entry.plain(PROGRAM)

    def models(n):
        roots = map_arrays(BLUEPRINT.build(), lambda x: jnp.asarray(x) + float(n))
        return roots if entry.tiled is None else tiled(roots, entry.tiled)

    def work(n):
        for each in range(3):
            roots = models(n + each)
            yield lifted(*roots), roots

    found = side_by_side(lambda n: list(work(n)), 4)
    with tape.plain():
        for n, pairs in enumerate(found):
            for each, pair in enumerate(pairs):
                roots = models(n + each)
                assert_isomorphic((plain(*roots), roots), pair)


class Sowing(nnx.Module):
    def __init__(self, n: int) -> None:
        self.w = nnx.Param(jnp.float32(n))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "x", self.w[...])
        self.sow(nnx.Cache, "y", self.w[...] + x)
        return self.perturb("z", self.w[...] * x)


def test_captures_of_many_threads_get_their_own_kinds_and_values():
    call = nnx.jit(lambda model, x: model(x))
    kinds = [(nnx.Intermediate,), (nnx.Cache,), (nnx.Perturbation,), (nnx.Cache, nnx.Intermediate)]
    expected = {nnx.Intermediate: lambda n: n, nnx.Cache: lambda n: n + 2.0}

    def work(n):
        for _ in range(4):
            wanted = kinds[n % len(kinds)]
            _, *states = nnx.capture(call, *wanted)(Sowing(n), X)
            for kind, state in zip(wanted, states, strict=True):
                ((path, variable),) = state.flat_state()
                if kind is nnx.Perturbation:
                    assert path == ("z",) and float(variable.get_value()) == 0
                else:
                    assert [float(x) for x in variable.get_value()] == [expected[kind](n)]
            assert call(Sowing(n), X) == 2 * n

    side_by_side(work)


def test_a_capture_sees_nothing_of_threads_beside_it():
    inside, done = threading.Event(), threading.Event()

    class Slow(nnx.Module):
        def __call__(self, x):
            inside.set()
            assert done.wait(30)
            self.sow(nnx.Intermediate, "slow", x)
            return x

    def captures():
        return nnx.capture(Slow(), nnx.Intermediate)(X)[1]

    def sows():
        assert inside.wait(30)
        try:
            return Sowing(1).sow(nnx.Intermediate, "quick", X)
        finally:
            done.set()

    found, taken = side_by_side(lambda n: (captures, sows)[n](), 2)
    assert [path for path, _ in found.flat_state()] == [("slow",)]
    assert taken is False


class Inner(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.sin(x)


class Outer(nnx.Module):
    """Waits for others before it calls what is inside."""

    def __init__(self) -> None:
        self.inner = Inner()

    def __call__(self, x: jax.Array, meet: threading.Barrier) -> jax.Array:
        meet.wait(30)
        return self.inner(x)


def scopes_of(model: Outer, meet: threading.Barrier) -> set[str]:
    """Returns the names of the operations that a model stages."""
    text = jax.jit(lambda x: model(x, meet)).lower(X).as_text(debug_info=True)
    return set(re.findall(r'loc\("jit\(<lambda>\)/([^"]*)"', text))


def test_overridden_scopes_hold_in_their_thread_alone():
    meet = threading.Barrier(THREADS)

    def work(n):
        for _ in range(3):
            with nnx.override_named_call(enable=bool(n % 2)):
                yield scopes_of(Outer(), meet)

    found = side_by_side(lambda n: list(work(n)))
    assert found == [[{"Outer/inner/sin"} if n % 2 else {"sin"}] * 3 for n in range(THREADS)]
    assert scopes_of(Outer(), threading.Barrier(1)) == {"Outer/inner/sin"}


def test_one_jitted_function_is_traced_for_each_setting_of_scopes():
    run, traces = counted(lambda model, x: model(x))
    call = nnx.jit(run)

    def work(n):
        with nnx.override_named_call(enable=bool(n % 2)):
            return [float(call(Sowing(n), X)) for _ in range(20)]

    assert side_by_side(work) == [[2.0 * n] * 20 for n in range(THREADS)]
    assert len(traces) >= 2
    count = len(traces)
    side_by_side(work)
    assert len(traces) == count


def test_equal_models_of_many_threads_have_one_graphdef():
    def work(n):
        found = []
        for size in range(40):
            model = Tree()
            model.size = ("static", size)
            graphdef, state = nnx.split(model)
            assert_isomorphic(model.left, nnx.merge(graphdef, state).left)
            found.append(graphdef)
        return found

    columns = list(zip(*side_by_side(work), strict=True))
    assert all(graphdef is same[0] for same in columns for graphdef in same)
    assert len({id(same[0]) for same in columns}) == 40


def test_models_of_many_threads_cross_plain_jax_as_pytrees():
    double = jax.jit(lambda model: jax.tree.map(lambda x: x * 2, model))

    def work(n):
        for each in range(5):
            model = Cell(float(n + each))
            assert float(double(model).w[...]) == 2 * (n + each)
            assert float(jax.tree.leaves(model)[1]) == n + each

    side_by_side(work)


def test_methods_jitted_anew_in_many_threads_share_one_jit():
    def work(n):
        for _ in range(20):
            model = Cell(float(n))
            assert float(nnx.jit(model.__call__)(X)) == 2 * n
            assert int(model.n[...]) == 1

    side_by_side(work)
    kept = vars(Cell.__call__)["__nnx_jits__"]
    assert len({id(jitted) for jitted in kept.values()}) == len(kept) <= 2


def test_more_structures_than_a_function_keeps_come_from_many_threads():
    total = nnx.jit(lambda model: model.w[...] + float(model.k))

    def work(n):
        for k in range(30):
            model = Cell(float(n))
            model.k = k
            total._lift.bind((model,), {}, None, False)
        return [float(total(model)) for _ in range(3)]

    assert side_by_side(work) == [[n + 29.0] * 3 for n in range(THREADS)]
    assert total.cache_info().structures <= 128


def test_one_model_is_read_by_many_threads():
    model = Tree()
    call = nnx.jit(lambda model, x: model.left.w[...] * x)
    found = side_by_side(lambda n: [np.asarray(call(model, jnp.float32(n))) for _ in range(20)])
    assert found == [[2.0 * n] * 20 for n in range(THREADS)]

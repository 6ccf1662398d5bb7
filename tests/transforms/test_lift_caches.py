"""What a lift keeps: how much, for how long, and between threads."""

import gc
import threading
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._transforms import lift
from nnxlite._transforms.lift import Lift
from tests.transforms.samples import TRANSFORMS, Cell, Tree, counted

through = pytest.mark.parametrize("through", TRANSFORMS.values(), ids=TRANSFORMS)


def test_crossings_and_bindings_are_bounded():
    f = nnx.jit(lambda m, x: m.w[...] * x)
    models = []
    for n in range(lift.MAX_BINDINGS + 10):
        m = Cell()
        m.k = n
        models.append(m)
    x = jnp.float32(1)
    for m in models[:70]:
        f._lift.bind((m, x), {}, None, False)
    assert f.cache_info()[1:] == (70, lift.MAX_BINDINGS)
    for n in range(lift.MAX_CROSSINGS):
        models[0].k = -n
        f._lift.bind((models[0], x), {}, None, False)
    assert f.cache_info()[1:] == (lift.MAX_CROSSINGS, lift.MAX_BINDINGS)
    f.clear_cache()
    assert f.cache_info()[1:] == (0, 0)


def test_least_recently_used_binding_goes_first():
    bound = Lift(lambda m: None, "nnx.test")
    models = [Cell() for _ in range(lift.MAX_BINDINGS + 1)]
    first, _ = bound.bind((models[0],), {}, None, False)
    for m in models[1:]:
        bound.bind((m,), {}, None, False)
        assert bound.bind((models[0],), {}, None, False)[0] is first


def test_unchanged_objects_keep_their_binding():
    bound, m = Lift(lambda m: None, "nnx.test"), Tree()
    first, _ = bound.bind((m,), {}, None, False)
    m.left.w[...] += 1.0
    m.array = jnp.float32(5)
    m.mode = "tr" + "ain"
    assert bound.bind((m,), {}, None, False)[0] is first
    m.items.append(1)
    assert bound.bind((m,), {}, None, False)[0] is not first


@through
def test_objects_are_freed_as_soon_as_they_are_dropped(through):
    call = through(lambda m, x: m.left(x))
    refs = []
    for n in range(4):
        m = Tree()
        del m.parent, m.again  # the cycle of its own needs the collector
        call(m, jnp.float32(1))
        refs += [weakref.ref(m), weakref.ref(m.left), weakref.ref(m.left.w)]
        del m
        assert n == 0 or all(ref() is None for ref in refs)
    gc.collect()
    assert all(ref() is None for ref in refs)


def test_three_hundred_fresh_models_are_one_trace_and_leave_nothing():
    run, traces = counted(lambda m, x: m(x))
    call, x, counts = nnx.jit(run), jnp.float32(1), []
    for n in range(300):
        call(Cell(), x)
        if n in (99, 299):
            gc.collect()
            counts.append(len(jax.live_arrays()))
    assert len(traces) == 1
    assert counts[0] == counts[1]


def test_structural_change_at_each_call_leaves_nothing():
    call, m, counts = nnx.jit(lambda m: setattr(m, "w", nnx.Param(m.w[...]))), Cell(), []
    for n in range(90):
        call(m)
        if n in (19, 89):
            gc.collect()
            counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[1]
    assert call.cache_info().traces <= 2


# Threads.


def test_eight_threads_with_models_of_their_own_share_one_function():
    @nnx.jit
    def step(m, x):
        m.left(x)
        m.items[0](x)
        return m.array * x

    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(number):
        try:
            barrier.wait()
            for _ in range(3):
                m = Tree()
                m.array = jnp.float32(number)
                for call in range(3):
                    assert float(step(m, jnp.float32(2))) == 2 * number
                    assert int(m.left.n[...]) == int(m.items[0].n[...]) == call + 1
        except BaseException as error:  # noqa: BLE001  # handed to the test
            errors.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert step.cache_info().structures == 1


def test_other_threads_never_see_tracers():
    m, inside, seen = Cell(), threading.Event(), []
    done = threading.Event()

    def look():
        inside.wait(10)
        seen.append(m.w.get_value())
        seen.append(m.n.get_value())
        done.set()

    @nnx.jit
    def f(m):
        m.w[...] += jnp.float32(1)
        inside.set()
        assert done.wait(10)

    thread = threading.Thread(target=look)
    thread.start()
    f(m)
    thread.join()
    assert [float(x) for x in seen] == [2.0, 0.0]
    assert float(m.w[...]) == 3

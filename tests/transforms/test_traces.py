"""Traces: how they are counted, when one is not needed, what is kept of them, and the warning."""

import copy
import functools
import gc
import pickle
import threading
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._transforms import traces
from nnxlite._transforms.traces import MAX_RECEIVERS, MAX_TRACES, limit_of
from nnxlite.errors import RetraceWarning
from tests.transforms.samples import Cell, Tree, counted

X = jnp.ones((4, 2))


# Counting.


def test_report_of_a_function_that_was_not_traced_again():
    f = nnx.jit(lambda x: x)
    assert str(f.explain_retrace()) == "nnx.jit(<lambda>) was not traced yet."
    f(X)
    f(X)
    report = f.explain_retrace()
    assert str(report) == repr(report) == "nnx.jit(<lambda>) was traced once."
    assert (report.traces, report.nearest, report.reasons) == (1, None, ())


def test_report_prints_the_reasons_and_shortens_many():
    f, m = nnx.jit(lambda m: None), Cell()
    f.trace(m)
    for number in range(12):
        setattr(m, f"a{number:02}", number)
    f.trace(m)
    lines = str(f.explain_retrace()).split("\n  ")
    assert lines[0] == "nnx.jit(<lambda>) was traced 2 times. The last trace differs from trace 1:"
    assert lines[1] == "m.a00 was added (0)"
    assert lines[9:] == ["and 4 more"]


WRAPPERS = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "vmap": nnx.vmap(in_axes=(None, 0), out_axes=(None, 0)),
    "grad": nnx.value_and_grad(has_aux=True),
    "scan": nnx.scan(in_axes=(None, 0), out_axes=(0, 0)),
}


@pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)
@pytest.mark.parametrize("around", [lambda f: f, nnx.jit], ids=["alone", "in jit"])
def test_count_is_that_of_the_runs_of_the_function(wrap, around):
    run, runs = counted(lambda m, x: (m.w[...], x))
    f = wrap(run)
    call = around(lambda m, x: f(m, x))
    for _ in range(2):
        call(Cell(), X)
    assert f.explain_retrace().traces == len(runs) >= 1


def test_bound_functions_report_on_the_function_they_are_made_of():
    class Net(Cell):
        @nnx.jit
        def step(self, x):
            return self(x)

        def other(self, x):  # a function of this class: jits of one function share their traces
            return self(x)

    m = Net()
    m.step(X)
    for f in (Net.step, m.step):
        assert f.explain_retrace().traces == 1
    for wrap in (nnx.jit, nnx.remat, nnx.grad, nnx.vmap, nnx.vjp, nnx.jvp):
        assert wrap(m.other).explain_retrace().traces == 0


def test_transform_that_runs_the_function_each_time_says_so():
    f = nnx.grad(lambda m: m.w[...] ** 2)
    m = Cell()
    f(m)
    f(m)
    report = f.explain_retrace()
    assert (report.traces, report.nearest, report.reasons) == (2, 1, ())
    assert "runs the function at each call" in str(report)


def test_function_run_without_jit_is_not_traced():
    f = nnx.jit(lambda m, x: m(x))
    with jax.disable_jit():
        f(Cell(), X)
    assert f.explain_retrace().traces == f.cache_info().traces == 0


# What brought a trace about, if nothing in the arguments did.


def test_cleared_caches_are_given_as_the_reason():
    f = nnx.jit(lambda x: x)
    f(X)
    f.clear_cache()
    f(X)
    report = f.explain_retrace()
    assert (report.nearest, report.reasons) == (None, ("its cache was cleared",))
    f(jnp.ones(3))
    assert f.explain_retrace().reasons == ("x: float32[4,2] -> float32[3]",)


def test_value_changed_under_a_closure_is_given_as_the_reason():
    m = Tree()
    f = nnx.jit(lambda x: x * m.items[0].w[...])
    f(X)
    m.items[0].w[...] = jnp.float32(3)
    with pytest.warns(UserWarning, match=r"it reads m\.items\[0\]\.w of an object"):
        f(X)
    (reason,) = f.explain_retrace().reasons
    assert reason == "m.items[0].w, which it closes over, has another value"


def test_trace_without_a_difference_is_owned_up_to():
    f = nnx.jit(lambda x: x + 1)
    f(X)
    jax.clear_caches()
    f(X)
    report = f.explain_retrace()
    assert (report.traces, report.nearest, report.reasons) == (2, 1, ())
    assert "jax.clear_caches" in str(report)


def test_structures_that_are_gone_are_owned_up_to():
    f = nnx.jit(lambda x: x)
    f.trace(X)
    f.trace(jnp.ones(3))
    f._lift._crossings.clear()
    f._lift._bindings.clear()
    f._lift._last = None
    gc.collect()
    assert "gone by now" in str(f.explain_retrace())


# No needless trace.


class Net(nnx.Module):
    def __init__(self, seed=0, rate=0.5, reverse=False):
        names = ["layers", "act", "rate", "table", "mask"]
        for name in reversed(names) if reverse else names:
            setattr(self, name, getattr(self, f"make_{name}")(seed, rate))
        self.table["b"] = self.layers[0]

    def make_layers(self, seed, rate):
        return [nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for _ in range(2)]

    def make_act(self, seed, rate):
        return lambda x: x * rate

    def make_rate(self, seed, rate):
        return float(str(rate))

    def make_table(self, seed, rate):
        return {"a": (1, "x"), "k": [rate]}

    def make_mask(self, seed, rate):
        return np.zeros(2)

    def __call__(self, x):
        for layer in self.layers:
            x = self.act(layer(x))
        return x


ALIKE = {
    "new": lambda m: Net(seed=1),
    "other order of attributes": lambda m: Net(reverse=True),
    "clone": nnx.clone,
    "split and merge": lambda m: nnx.merge(*nnx.split(m)),
    "deepcopy": copy.deepcopy,
    "tree.map": lambda m: jax.tree.map(lambda x: x + 1, m),
    "values set": lambda m: nnx.update(m, jax.tree.map(jnp.zeros_like, nnx.state(m))) or m,
}


@pytest.mark.parametrize("make", ALIKE.values(), ids=ALIKE)
def test_models_alike_share_a_trace(make):
    run, runs = counted(lambda m, x: m(x))
    f, m = nnx.jit(run), Net()
    f.trace(m, X)
    f.trace(make(m), X)
    assert len(runs) == 1, f.explain_retrace()


def test_unpickled_model_shares_a_trace():
    run, runs = counted(lambda m: None)
    f, m = nnx.jit(run), Tree()
    m.act, m.sizes = limit_of, {"a": [1, 2.0]}
    f.trace(m)
    f.trace(pickle.loads(pickle.dumps(m)))
    assert len(runs) == 1


def test_optimizer_made_anew_shares_a_trace():
    optax = pytest.importorskip("optax")
    run, runs = counted(lambda m, optimizer: None)
    f = nnx.jit(run)
    for _ in range(2):
        m = Net()
        f.trace(m, nnx.Optimizer(m, optax.adam(optax.linear_schedule(1e-3, 0, 9)), wrt=nnx.Param))
    assert len(runs) == 1


def test_equal_static_values_share_a_trace():
    run, runs = counted(lambda m: None)
    f = nnx.jit(run)
    for _ in range(2):
        m = Cell()
        m.sizes, m.table, m.names = [1, (2.0,)], {"a": {"b": None}}, {"x", "y"}
        m.act = functools.partial(jnp.sum, axis=0)
        m.hooks = [lambda x, k=3: x * k]
        f.trace(m)
    assert len(runs) == 1


def test_jit_made_anew_goes_on_with_the_traces_there_are():
    run, runs = counted(lambda m, x: m(x))
    m = Cell()
    for _ in range(3):
        nnx.jit(run)(m, X)
        nnx.jit(run, keep_unused=True)(m, X)
    assert len(runs) == 2


def test_jit_made_anew_of_a_method_or_a_partial_goes_on_with_the_traces_there_are():
    class Counted(Cell):
        runs = 0

        def step(self, x, scale):
            Counted.runs += 1
            return self(x) * scale

    m = Counted()
    for _ in range(2):
        nnx.jit(m.step)(X, 2.0)
        nnx.jit(functools.partial(m.step, scale=3))(X)
    assert Counted.runs == 2


# What is kept.


def test_few_traces_are_kept_and_no_object_or_array():
    f = nnx.jit(lambda m, x: None)
    refs = []
    for size in range(MAX_TRACES + 3):
        m, x = Cell(), jnp.ones(size)
        m.rate = size
        f.trace(m, x)
        refs += [weakref.ref(m), weakref.ref(m.w), weakref.ref(x)]
        del m, x
    gc.collect()
    assert all(ref() is None for ref in refs)
    kept = f._lift.traces
    assert (kept.count, len(kept._recent)) == (MAX_TRACES + 3, MAX_TRACES)
    assert f.explain_retrace().nearest == MAX_TRACES + 2


def test_number_of_counted_objects_is_bounded():
    f = nnx.jit(lambda m: None)
    for number in range(MAX_RECEIVERS + 3):
        m = Cell()
        m.rate = number
        f.trace(m)
    assert len(f._lift.traces._of_receivers) == MAX_RECEIVERS


def test_forgotten_structures_are_freed():
    f = nnx.jit(lambda x: x)
    f.trace(X)
    ref = weakref.ref(next(iter(f._lift._crossings.values())))
    f.clear_cache()
    gc.collect()
    assert ref() is None


def test_threads_count_together():
    f = nnx.jit(lambda m, x: None)
    barrier = threading.Barrier(4)

    def work(number):
        m = Cell()
        barrier.wait()
        for size in range(5):
            f.trace(m, jnp.ones((number, size)))
            f.explain_retrace()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert f.explain_retrace().traces == 20


# The warning.


def trace_many(f, sizes, m=None):
    """Traces for arrays of these sizes and returns the warnings."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        for size in sizes:
            f.trace(jnp.ones(size)) if m is None else f.trace(m, jnp.ones(size))
    return [each for each in found if each.category is RetraceWarning]


def test_warning_comes_at_the_limit_and_at_each_doubling(monkeypatch):
    monkeypatch.setattr(traces, "LIMIT", 3)
    f = nnx.jit(lambda x: None)
    assert not trace_many(f, range(2))
    (warning,) = trace_many(f, range(2, 5))
    assert str(warning.message).startswith(
        "nnx.jit(<lambda>) was traced 3 times. The last trace differs from trace 2:\n"
        "  x: float32[1] -> float32[2]\n"
    )
    assert warning.filename == __file__
    assert len(trace_many(f, range(5, 11))) == 1
    assert len(trace_many(f, range(11, 12))) == 1
    assert not trace_many(f, range(12, 20))


def test_default_limit_is_sixteen():
    f = nnx.jit(lambda x: None)
    assert not trace_many(f, range(15))
    assert len(trace_many(f, [15])) == 1


def test_warning_is_about_one_object(monkeypatch):
    monkeypatch.setattr(traces, "LIMIT", 3)
    f, models = nnx.jit(lambda m, x: None), [Cell() for _ in range(6)]
    for number, m in enumerate(models):
        m.rate = number
        assert not trace_many(f, [1, 2], m)
    (warning,) = trace_many(f, [3], models[0])
    assert "3 of them for one Cell" in str(warning.message)


def test_objects_that_come_and_go_are_not_taken_for_one(monkeypatch):
    monkeypatch.setattr(traces, "LIMIT", 3)
    f = nnx.jit(lambda m, x: None)
    for number in range(8):  # each at the address of the one before
        m = Cell()
        m.rate = number
        assert not trace_many(f, [1], m)
        del m


def test_warning_that_is_an_error_changes_nothing(monkeypatch):
    monkeypatch.setattr(traces, "LIMIT", 2)
    f, m = nnx.jit(lambda m, x: m(x)), Cell()
    f(m, X)
    with pytest.raises(RetraceWarning, match=r"x: float32\[4,2\] -> float32\[3\]"):
        f(m, jnp.ones(3))
    assert int(m.n[...]) == 1
    assert f(m, jnp.ones(3)).shape == (3,)


def test_warning_may_be_ignored_or_switched_off(monkeypatch):
    monkeypatch.setattr(traces, "LIMIT", 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", RetraceWarning)
        f = nnx.jit(lambda x: None)
        f.trace(X), f.trace(jnp.ones(3))
    monkeypatch.setattr(traces, "LIMIT", None)
    assert not trace_many(nnx.jit(lambda x: None), range(20))


def test_transforms_that_trace_at_each_call_never_warn(monkeypatch):
    monkeypatch.setattr(traces, "LIMIT", 2)
    f, m = nnx.grad(lambda m: m.w[...] ** 2), Cell()
    for _ in range(5):
        f(m)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("", 16), (" 40 ", 40), ("0", None), ("off", None), ("No", None), ("false", None)],
)
def test_limit_is_read_from_the_environment(text, expected):
    assert limit_of({"NNXLITE_WARN_AFTER_TRACES": text}) == expected


def test_limit_that_is_no_number_is_an_error():
    with pytest.raises(ValueError, match=r"NNXLITE_WARN_AFTER_TRACES is 'many'.*or to 0"):
        limit_of({"NNXLITE_WARN_AFTER_TRACES": "many"})

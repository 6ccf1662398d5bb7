"""explain_retrace: in what the last trace differs from the one most like it, place by place."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.transforms.samples import Cell

X = jnp.ones((4, 2))


def double(x):
    return 2 * x


class Model(nnx.Module):
    def __init__(self):
        self.layers = [Cell(), Cell()]
        self.shared = nnx.BatchStat(jnp.zeros(2))
        self.rate, self.act, self.sizes = 1, double, (1, 2)
        self.array = jnp.zeros(3)
        self.pair = (1, Cell())
        self.both = nnx.Variable({"a": jnp.zeros(2), "b": (jnp.int32(1),)})


def reasons(first, second):
    """Says why a function that takes anything is traced for the second arguments."""
    f = nnx.jit(lambda model, x=0, *rest, **named: None)
    f.trace(*first)
    if callable(second):
        second(*first)
        second = first
    f.trace(*second)
    report = f.explain_retrace()
    assert (report.traces, report.nearest) == (2, 1)
    return report.reasons


def setting(name, value):
    return lambda m: setattr(m, name, value)


CHANGES = {
    "static": (setting("rate", 2), "model.rate: 1 -> 2"),
    "static type": (setting("rate", True), "model.rate: 1 -> True"),
    "static in a tuple": (setting("sizes", (1, 3)), "model.sizes[1]: 2 -> 3"),
    "function": (setting("act", jnp.sin), "model.act: double -> "),
    "equal text": (setting("act", lambda x: x), "model.act: double -> "),
    "attribute": (setting("extra", 0.5), "model.extra was added (0.5)"),
    "Variable": (setting("extra", nnx.Param(X)), "model.extra was added (Param float32[4,2])"),
    "object": (setting("extra", Cell()), "model.extra was added (Cell)"),
    "removed": (lambda m: delattr(m, "rate"), "model.rate was removed (1)"),
    "item": (lambda m: m.layers.append(Cell()), "model.layers[2] was added (Cell)"),
    "class": (setting("array", Cell()), "model.array: float32[3] -> Cell"),
    "kind": (
        setting("shared", nnx.Param(jnp.zeros(2))),
        "model.shared: BatchStat float32[2] -> Param float32[2]",
    ),
    "shape": (
        lambda m: m.layers[1].w.set_value(jnp.zeros(3)),
        "model.layers[1].w: float32[] -> float32[3]",
    ),
    "dtype": (
        lambda m: m.pair[1].w.set_value(jnp.int32(0)),
        "model.pair[1].w: float32[] -> int32[]",
    ),
    "bare array": (setting("array", jnp.zeros(4)), "model.array: float32[3] -> float32[4]"),
    "value that is a tree": (
        lambda m: m.both.set_value({"a": jnp.zeros(3), "b": (jnp.int32(1),)}),
        "model.both: {'a': float32[2], 'b': (int32[],)} -> {'a': float32[3], 'b': (int32[],)}",
    ),
    "metadata": (
        lambda m: m.shared.set_metadata(note="a"),
        "what is said of model.shared: nothing -> (note='a')",
    ),
    "sharing": (
        lambda m: setattr(m.layers[1], "w", m.layers[0].w),
        "model.layers[1].w: Param float32[] -> the same as model.layers[0].w",
    ),
    "method": (
        lambda m: setattr(m, "act", m.layers[0].__call__),
        "model.act: double -> Cell.__call__ of model.act.__self__",
    ),
}


@pytest.mark.parametrize(("change", "expected"), CHANGES.values(), ids=CHANGES)
def test_change_of_an_object_is_named_with_its_path(change, expected):
    assert reasons((Model(),), change)[0].startswith(expected)


def test_what_is_new_is_named_once_and_not_with_all_that_is_below_it():
    def grow(m):
        m.branch = nnx.List([Model(), Model()])
        m.layers[0].deep = Model()

    assert reasons((Model(),), grow) == (
        "model.branch was added (List)",
        "model.layers[0].deep was added (Model)",
    )


def test_mark_of_an_attribute_is_named():
    (about, value) = reasons((Model(),), setting("rate", nnx.data(1)))
    assert about == "what is said of model: nothing -> rate is data"
    assert value.startswith("model.rate: 1 -> int32[]")


def test_functions_of_one_name_are_told_apart():
    model = Model()
    model.act = lambda x: x
    text = reasons((model,), setting("act", lambda x: -x))[0]
    assert text.startswith("model.act: ") and "<lambda> -> " in text


def test_static_values_with_the_same_text_are_told_apart():
    model = Model()
    model.act = np.float32(1)
    first, second = (type("Same", (), {"__repr__": lambda _: "<same>"})() for _ in range(2))
    model.act = first
    assert reasons((model,), setting("act", second)) == ("model.act: <same> -> another one",)


ARGUMENTS = {
    "shape": ((X, X), (X, jnp.ones((8, 2))), "x: float32[4,2] -> float32[8,2]"),
    "dtype": ((X, X), (X, X.astype(int)), "x: float32[4,2] -> int32[4,2]"),
    "weak type": ((X, jnp.float32(1)), (X, 1.0), "x: float32[] -> float32[] (weak type)"),
    "key": ((X, jax.random.key(0)), (X, X), "x: key<fry>[] -> float32[4,2]"),
    "more": ((X, X), (X, X, X), "args[2] was added (float32[4,2])"),
    "fewer": ((X, X), (X,), "x was removed (float32[4,2])"),
    "None": ((X, X), (X, None), "x: float32[4,2] -> None"),
    "dict": ((X, {"a": X}), (X, {"a": X, "b": X}), "x['b'] was added (float32[4,2])"),
    "container": (
        (X, [X]),
        (X, (X,)),
        "the containers of the arguments: ((*, [*]), {}) -> ((*, (*,)), {})",
    ),
    "object for an array": ((X, X), (X, Cell()), "x: float32[4,2] -> Cell"),
    "State": (
        (nnx.state(Cell()), X),
        (nnx.state(Cell(), nnx.Param), X),
        "model['n'] was removed (Variable int32[])",
    ),
    "shapes in a State": (
        (nnx.state(Cell()), X),
        (nnx.State({"n": nnx.Variable(jnp.int32(0)), "w": nnx.Param(X)}), X),
        "model['w']: float32[] -> float32[4,2]",
    ),
    "bare Variable": (
        (nnx.Param(X), X),
        (nnx.BatchStat(X), X),
        "model: Param float32[4,2] -> BatchStat float32[4,2]",
    ),
}


@pytest.mark.parametrize(("first", "second", "expected"), ARGUMENTS.values(), ids=ARGUMENTS)
def test_change_of_the_arguments_is_named_with_the_parameter(first, second, expected):
    assert reasons(first, second) == (expected,)


def test_one_object_given_twice_is_named():
    m = Cell()
    assert reasons((m, Cell()), (m, m)) == ("x: Cell -> the same as model",)


def test_keyword_and_static_arguments_are_named():
    f = nnx.jit(lambda x, mode, *, scale=1: None, static_argnames="mode")
    f.trace(X, "train")
    f.trace(X, "eval")
    assert f.explain_retrace().reasons == ("static argument mode: 'train' -> 'eval'",)
    f.trace(X, mode="eval", scale=2.0)
    assert f.explain_retrace().reasons == ("scale was added (float32[] (weak type))",)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        (lambda: nnx.override_named_call(False), "named scopes: on -> off"),
        (
            lambda: jax.default_matmul_precision("float32"),
            "jax_default_matmul_precision: None -> float32",
        ),
        (lambda: jax.numpy_rank_promotion("warn"), "jax_numpy_rank_promotion: raise -> warn"),
    ],
    ids=["scopes", "precision", "promotion"],
)
def test_setting_in_force_is_named(context, expected):
    f = nnx.jit(lambda m, x: m(x))
    f.trace(Cell(), X)
    with context():
        f.trace(Cell(), X)
    assert f.explain_retrace().reasons == (expected,)


def test_capture_is_named():
    f, m = nnx.jit(lambda m, x: m(x)), Cell()
    f(m, X)
    nnx.capture(f, nnx.Intermediate, method_outputs=nnx.Perturbation)(m, X)
    assert f.explain_retrace().reasons == ("captures: none -> Intermediate and Perturbation",)


def test_call_inside_of_another_trace_is_named():
    f, m = nnx.jit(lambda m, x: m.w[...] * x), Cell()
    f.trace(m, X)
    jax.eval_shape(lambda x: f(m, x), X)
    assert f.explain_retrace().reasons == (
        "the call: outside of every trace -> inside another trace",
    )


def test_last_trace_is_compared_with_the_one_most_like_it():
    f, m = nnx.jit(lambda model, x: None), Model()
    f.trace(m, X)
    m.rate, m.sizes = 2, (5, 6)
    f.trace(m, X)
    m.rate, m.sizes, m.act = 1, (1, 2), None
    f.trace(m, X)
    report = f.explain_retrace()
    assert (report.nearest, report.reasons) == (1, ("model.act: double -> None",))


def test_of_equally_near_traces_the_latest_counts():
    f = nnx.jit(lambda x: None)
    for size in (1, 2, 3):
        f.trace(jnp.ones(size))
    report = f.explain_retrace()
    assert (report.nearest, report.reasons) == (2, ("x: float32[2] -> float32[3]",))


def test_very_deep_model_is_explained():
    model = leaf = Cell()
    for _ in range(400):
        leaf.child = Cell()
        leaf = leaf.child

    def change(model):
        leaf.rate = 0.5

    (text,) = reasons((model,), change)
    assert text.endswith(".child.rate was added (0.5)")

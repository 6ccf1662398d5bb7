"""while_loop and fori_loop over objects, against plain `jax.lax` and Python."""

import functools
import gc
import re
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError, TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import counted

ZERO, ONE = jnp.int32(0), jnp.int32(1)


class Counter(nnx.Module):
    def __init__(self, value: int = 0) -> None:
        self.n = nnx.Variable(jnp.int32(value))
        self.mode = "train"

    def step(self, x: jax.Array) -> jax.Array:
        self.n[...] += 1
        return x + 1

    def indexed(self, i: jax.Array, x: jax.Array) -> jax.Array:
        self.n[...] += i
        return x + 1

    def below(self, limit: int, x: jax.Array) -> jax.Array:
        return self.n < limit


def grow(counter: Counter) -> Counter:
    counter.n[...] += 1
    return counter


def grow_by(i: jax.Array, counter: Counter) -> Counter:
    counter.n[...] += i
    return counter


def is_small(counter: Counter) -> jax.Array:
    return counter.n < 5


# What a loop carries.


def test_while_loop_keeps_the_identity_of_two_objects() -> None:
    a, b = Counter(0), Counter(10)

    def body(both: tuple[Counter, Counter]) -> tuple[Counter, Counter]:
        a, b = both
        a.n[...] += 1
        b.n[...] += 2
        return a, b

    out = nnx.while_loop(lambda both: both[0].n < 5, body, (a, b))
    assert (int(a.n[...]), int(b.n[...])) == (5, 20)
    assert out[0] is a and out[1] is b


def test_loops_of_no_steps_change_nothing() -> None:
    counter = Counter(7)
    assert nnx.while_loop(is_small, grow, counter) is counter
    assert nnx.fori_loop(3, 3, grow_by, counter) is counter
    assert_isomorphic(Counter(7), counter)


BOUNDS = {
    "numbers": lambda lower, upper: (lower, upper),
    "arrays": lambda lower, upper: (jnp.int32(lower), jnp.int32(upper)),
    "mixed": lambda lower, upper: (lower, jnp.int16(upper)),
    "Variables": lambda lower, upper: (nnx.Variable(lower), nnx.Variable(upper)),
}


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
@pytest.mark.parametrize("outer", [lambda f: f, jax.jit], ids=["alone", "in jit"])
def test_fori_loop_runs_from_lower_to_upper(
    bounds: Callable[..., Any], outer: Callable[..., Any]
) -> None:
    body = lambda i, x: 10 * x + i.astype(jnp.int32)  # noqa: E731
    run = outer(lambda lower, upper: nnx.fori_loop(lower, upper, body, ZERO))
    assert int(run(*bounds(2, 5))) == 234


def test_values_may_be_numbers_arrays_states_and_variables() -> None:
    state = nnx.State({"w": nnx.Param(jnp.float32(1))})
    variable = nnx.Variable(jnp.float32(1))

    def body(value: dict[str, Any]) -> dict[str, Any]:
        value["variable"][...] *= 2
        return {
            "n": value["n"] + 1,
            "state": jax.tree.map(lambda x: 3 * x, value["state"]),
            "variable": value["variable"],
            "none": None,
        }

    start = {"n": 0, "state": state, "variable": variable, "none": None}
    out = nnx.while_loop(lambda value: value["n"] < 4, body, start)
    assert out["variable"] is variable and float(variable[...]) == 16
    assert float(out["state"]["w"][...]) == 81 and float(state["w"][...]) == 1
    assert int(out["n"]) == 4 and out["none"] is None


def test_two_variables_may_swap_their_values() -> None:
    a, b = nnx.Variable(ONE), nnx.Variable(jnp.int32(2))

    def swap(i: jax.Array, pair: Any) -> Any:
        a, b = pair
        a[...], b[...] = b.get_value(), a.get_value()
        return pair

    nnx.fori_loop(0, 3, swap, (a, b))
    assert (int(a[...]), int(b[...])) == (2, 1)


def test_shared_objects_stay_shared() -> None:
    shared = Counter()
    pair = nnx.List([shared, shared])

    def body(i: jax.Array, pair: Any) -> Any:
        pair[0].n[...] += 1
        pair[1].n[...] += 1
        return pair

    nnx.fori_loop(0, 3, body, pair)
    assert int(shared.n[...]) == 6 and pair[0] is pair[1]


def test_random_streams_advance_with_each_step() -> None:
    rngs, twin = nnx.Rngs(0), nnx.Rngs(0)
    total, _ = nnx.fori_loop(
        0, 3, lambda i, value: (value[0] + value[1].uniform(), value[1]), (jnp.float32(0), rngs)
    )
    np.testing.assert_allclose(total, sum(twin.uniform() for _ in range(3)), rtol=1e-6)
    assert float(rngs.uniform()) == float(twin.uniform())


# Which functions may be bodies and conditions.


def test_methods_change_their_objects() -> None:
    counter, other = Counter(), Counter()
    below = functools.partial(counter.below, 4)
    assert float(nnx.while_loop(below, counter.step, jnp.float32(0))) == 4
    nnx.fori_loop(0, 4, other.indexed, jnp.float32(0))
    assert (int(counter.n[...]), int(other.n[...])) == (4, 6)


def test_objects_and_arrays_may_come_in_a_partial() -> None:
    def body(scale: jax.Array, i: jax.Array, x: jax.Array, *, counter: Counter) -> jax.Array:
        counter.n[...] += 1
        return scale * x

    counter = Counter()
    run = functools.partial(body, jnp.float32(3), counter=counter)
    assert float(nnx.fori_loop(0, 2, run, jnp.float32(1))) == 9
    assert int(counter.n[...]) == 2


def test_the_condition_may_give_a_variable() -> None:
    def body(counter: Any) -> Any:
        grow(counter)
        counter.open[...] = counter.n < 3
        return counter

    counter: Any = Counter()
    counter.open = nnx.Variable(jnp.array(True))
    nnx.while_loop(lambda counter: counter.open, body, counter)
    assert int(counter.n[...]) == 3


# How often functions are traced.


def test_a_body_is_traced_once_by_eager_calls() -> None:
    body, traces = counted(grow)
    asked, questions = counted(is_small)
    for counter in (Counter(), Counter()):
        nnx.while_loop(asked, body, counter)
        nnx.while_loop(asked, body, counter)
    assert (len(traces), len(questions)) == (1, 1)


@pytest.mark.parametrize("bounds", BOUNDS.values(), ids=BOUNDS)
def test_a_body_is_traced_once_whatever_the_bounds_are(bounds: Callable[..., Any]) -> None:
    body, traces = counted(lambda i, x: x + 1)
    for _ in range(2):
        lower, upper = bounds(0, 3)
        nnx.fori_loop(lower, upper, body, ZERO)
    assert len(traces) == 1
    traces.clear()
    jax.jit(lambda lower, upper: nnx.fori_loop(lower, upper, body, ZERO))(0, 3)
    jax.jit(lambda upper: nnx.fori_loop(0, upper, body, ZERO))(jnp.int16(3))
    assert len(traces) == 2  # once in each


def test_lambdas_made_anew_meet_the_code_of_equal_ones() -> None:
    body, traces = counted(lambda x: x + 1)
    for limit in (3, 3, 5):
        found = nnx.while_loop(lambda x, limit=limit: x < limit, body, ZERO)
        assert int(found) == limit
    assert len(traces) == 2


SCALE = 1.0


def test_a_lambda_sees_globals_as_they_are() -> None:
    global SCALE
    found = []
    for scale in (2.0, 3.0):  # what a script does at its top
        SCALE = scale
        found.append(float(nnx.fori_loop(0, 2, lambda i, x: SCALE * x, jnp.float32(1))))  # noqa: B023
    assert found == [4, 9]


def test_a_function_sees_its_cells_as_they_are() -> None:
    found = []

    def body(i: jax.Array, x: jax.Array) -> jax.Array:
        return x + data[i]

    for n in (1, 2):
        data = n * jnp.arange(3)
        found += [int(nnx.fori_loop(0, 3, body, ZERO)) for _ in range(2)]
    assert found == [3, 3, 6, 6]


def test_what_a_body_closes_over_is_not_kept_alive() -> None:
    def run(counter: Counter, array: jax.Array) -> list[Any]:
        nnx.fori_loop(0, 2, lambda i, x: x + counter.n[...], ZERO)
        nnx.while_loop(lambda x: x < array.sum(), lambda x: x + 1, ZERO)
        return [weakref.ref(counter), weakref.ref(array)]

    refs = run(Counter(1), jnp.arange(3))
    gc.collect()
    assert [ref() for ref in refs] == [None, None]


# What a loop may not do.


def test_a_new_attribute_is_an_error_with_its_path() -> None:
    def body(i: jax.Array, counter: Counter) -> Counter:
        counter.extra = nnx.Variable(jnp.float32(0))
        return counter

    counter = Counter()
    message = r"nnx\.fori_loop\(body_fun=body\): counter\.extra \(Variable\) was added in the loop"
    with pytest.raises(StructureError, match=message):
        nnx.fori_loop(0, 3, body, counter)
    assert_isomorphic(Counter(), counter)


def test_a_static_change_is_an_error_with_both_values() -> None:
    def body(counter: Counter) -> Counter:
        counter.mode = "eval"
        return grow(counter)

    counter = Counter()
    with pytest.raises(StructureError, match=r"counter\.mode was changed from 'train' to 'eval'"):
        nnx.while_loop(is_small, body, counter)
    assert_isomorphic(Counter(), counter)


def test_a_variable_of_another_type_is_an_error_with_before_and_after() -> None:
    def body(i: jax.Array, pair: tuple[Counter, jax.Array]) -> Any:
        pair[0].n.set_value(pair[0].n.astype(jnp.float32))
        return pair

    counter = Counter()
    message = r"pair\[0\]\.n is int32\[\] before the step and float32\[\] after it"
    with pytest.raises(StructureError, match=message):
        nnx.fori_loop(0, 3, body, (counter, ONE))
    assert_isomorphic(Counter(), counter)


CHANGES = {
    "dtype": (
        lambda x: {"x": x["x"].astype(jnp.float16)},
        r"value\['x'\] is float32\[2\].*float16",
    ),
    "shape": (lambda x: {"x": x["x"][:1]}, r"value\['x'\] is float32\[2\] .* and float32\[1\]"),
    "structure": (lambda x: (x["x"],), r"it is \{'x': float32\[2\]\}, after it \(float32\[2\],\)"),
    "nothing": (lambda x: None, r"it is \{'x': float32\[2\]\}, after it None"),
    "an object": (lambda x: {"x": Counter()}, r"a new object in the loop"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_another_carry_is_an_error_with_before_and_after(change: Any, message: str) -> None:
    start = {"x": jnp.ones(2, jnp.float32)}
    with pytest.raises(StructureError, match=message):
        nnx.fori_loop(0, 3, lambda i, x: change(x), start)
    with pytest.raises(StructureError, match=message):
        nnx.while_loop(lambda x: x["x"][0] < 3, change, start)


def test_another_object_in_a_place_is_an_error_with_both() -> None:
    pair = Counter(1), Counter(2)
    with pytest.raises(
        StructureError, match=r"the value\[0\] is another object .*: pair\[1\] came"
    ):
        nnx.fori_loop(0, 2, lambda i, pair: pair[::-1], pair)
    with pytest.raises(StructureError, match=r"the value was an object and is an array now"):
        nnx.fori_loop(0, 2, lambda i, v: v[...], nnx.Variable(ONE))
    with pytest.raises(StructureError, match=r"returns a new object in the loop"):
        nnx.fori_loop(0, 2, lambda i, c: nnx.clone(c), Counter())


def test_another_state_is_an_error_with_both() -> None:
    state = nnx.state(nnx.Linear(1, 2, rngs=nnx.Rngs(0)))
    message = r"'bias': Param\(float32\[2\]\).* after it State\(\{'kernel': Param\(float32\[1,2"
    with pytest.raises(StructureError, match=message):
        nnx.fori_loop(0, 2, lambda i, s: nnx.State({"kernel": s["kernel"]}), state)


def test_a_condition_that_writes_is_an_error() -> None:
    def asks(counter: Counter) -> jax.Array:
        counter.n[...] += 1
        return counter.n < 5

    counter = Counter()
    with pytest.raises(StructureError, match=r"cond_fun=asks\): the condition changed an object"):
        nnx.while_loop(asks, grow, counter)
    assert_isomorphic(Counter(), counter)


def test_a_condition_that_is_no_boolean_is_an_error() -> None:
    with pytest.raises(TypeError, match=r"a boolean scalar, found \(bool\[\], int32\[\]\)"):
        nnx.while_loop(lambda c: (c.n < 5, c.n[...]), grow, Counter())
    with pytest.raises(TypeError, match=r"a boolean scalar, found Counter"):
        nnx.while_loop(lambda c: c, grow, Counter())
    with pytest.raises(TypeError, match="must return a boolean scalar"):
        nnx.while_loop(lambda c: c.n, grow, Counter())


def test_text_in_a_carry_is_an_error_with_its_place() -> None:
    with pytest.raises(
        TypeError, match=r"value\['name'\] is a str, neither an array nor an object"
    ):
        nnx.fori_loop(0, 2, lambda i, value: value, {"name": "text"})


def test_write_to_a_closed_over_object_names_its_path() -> None:
    counter = Counter()
    message = r"nnx\.fori_loop\(body_fun=<lambda>\) closes over counter\.n\."
    with pytest.raises(TraceLevelError, match=message):
        nnx.fori_loop(0, 2, lambda i, x: x + grow(counter).n[...], ZERO)
    assert_isomorphic(Counter(), counter)


# Loops in loops, and in other transforms.


def test_loops_nest_in_each_other_and_in_scan() -> None:
    def inner(limit: jax.Array, counter: Counter) -> Counter:
        return nnx.while_loop(lambda c: c.n % 4 != limit % 4, grow, grow(counter))

    def middle(counter: Counter, x: jax.Array) -> tuple[Counter, jax.Array]:
        return nnx.fori_loop(0, x, inner, counter), counter.n[...]

    counter, expected, found = Counter(1), Counter(1), []
    xs = jnp.array([3, 1, 2], jnp.int32)
    _, out = nnx.jit(nnx.scan(middle))(counter, xs)
    for x in (3, 1, 2):
        for limit in range(x):
            grow(expected)
            while int(expected.n[...]) % 4 != limit % 4:
                grow(expected)
        found.append(int(expected.n[...]))
    np.testing.assert_array_equal(out, found)
    assert_isomorphic(expected, counter)


def test_scan_and_fori_run_inside_while() -> None:
    def body(value: Any) -> Any:
        counter, xs = value
        _, xs = nnx.scan(lambda c, x: (grow(c), x + c.n[...]))(counter, xs)
        return nnx.fori_loop(0, 2, grow_by, counter), xs

    counter, xs = nnx.while_loop(lambda v: v[0].n < 9, body, (Counter(), jnp.zeros(2, jnp.int32)))
    np.testing.assert_array_equal(xs, [1 + 4 + 7, 2 + 5 + 8])
    assert int(counter.n[...]) == 9


def test_loops_run_under_vmap_with_one_model_and_with_many() -> None:
    def run(model: nnx.Linear, x: jax.Array, n: jax.Array) -> jax.Array:
        def body(value: Any) -> Any:
            i, x, model = value
            return i + 1, model(x), model

        return nnx.while_loop(lambda v: v[0] < n, body, (0, x, model))[1]

    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = 2 * jnp.eye(2)
    y = nnx.vmap(run, in_axes=(None, 0, 0))(model, jnp.ones((3, 2)), jnp.arange(3))
    np.testing.assert_array_equal(y[:, 0], [1, 2, 4])

    counters = nnx.vmap(Counter)(jnp.arange(3, dtype=jnp.int32))
    nnx.vmap(lambda n, c: nnx.fori_loop(0, n, grow_by, c) and None)(jnp.arange(3), counters)
    np.testing.assert_array_equal(counters.n[...], [0, 1 + 0, 2 + 1])


def test_a_write_to_a_broadcast_model_under_vmap_is_an_error() -> None:
    counter = Counter()
    with pytest.raises(ValueError, match=r"counter\.n \(Variable\), which is broadcast"):
        nnx.vmap(
            lambda counter, n: nnx.fori_loop(0, n, grow_by, counter).n[...], in_axes=(None, 0)
        )(counter, jnp.arange(3))
    assert_isomorphic(Counter(), counter)


def test_fori_loop_with_known_bounds_has_a_gradient() -> None:
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def looped(model: nnx.Linear, x: jax.Array) -> jax.Array:
        def body(i: jax.Array, value: Any) -> Any:
            model, x = value
            return model, jnp.tanh(model(x))

        return nnx.fori_loop(0, 3, body, (model, x))[1].sum()

    def unrolled(model: nnx.Linear, x: jax.Array) -> jax.Array:
        for _ in range(3):
            x = jnp.tanh(model(x))
        return x.sum()

    x = jnp.ones((1, 2))
    expected = nnx.grad(unrolled)(model, x)
    for transform in (lambda f: f, nnx.jit, nnx.remat):
        found = nnx.grad(transform(looped))(model, x)
        for name in ("kernel", "bias"):
            np.testing.assert_allclose(found[name][...], expected[name][...], rtol=1e-5)


def test_the_backward_pass_keeps_one_copy_of_the_parameters() -> None:
    model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))

    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        body = lambda i, value: (value[0], value[0](value[1]))  # noqa: E731
        return nnx.fori_loop(0, 50, body, (model, x))[1].sum()

    jaxpr = str(jax.make_jaxpr(lambda m, x: nnx.grad(loss)(m, x))(model, jnp.ones((1, 8))))
    assert "f32[50,1,8]" in jaxpr  # activations are stacked
    assert "f32[50,8,8]" not in jaxpr


def test_while_loop_has_a_forward_derivative() -> None:
    cell = nnx.Param(jnp.float32(3))

    def run(w: jax.Array) -> jax.Array:
        return nnx.while_loop(lambda x: x < 20, lambda x: x * w, jnp.float32(1))

    value, tangent = jax.jvp(run, (cell[...],), (jnp.float32(1),))
    assert (float(value), float(tangent)) == (27, 27)
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(run)(cell[...])


@pytest.mark.standard_promotion
def test_gradients_accumulate_in_a_loop_with_an_update_at_the_end() -> None:
    data = jax.random.normal(jax.random.key(0), (4, 2, 3))

    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).mean()

    @nnx.jit
    def accumulated(model: nnx.Linear, optimizer: nnx.Optimizer, data: jax.Array) -> None:
        def add(i: jax.Array, value: Any) -> Any:
            total, model = value
            grads = nnx.grad(loss)(model, data[i])
            return jax.tree.map(lambda a, b: a + b / len(data), total, grads), model

        zero = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))
        grads, _ = nnx.fori_loop(0, len(data), add, (zero, model))
        optimizer.update(model, grads)

    found, expected = (nnx.Linear(3, 1, rngs=nnx.Rngs(0)) for _ in range(2))
    accumulated(found, nnx.Optimizer(found, optax.sgd(0.1), wrt=nnx.Param), data)
    grads = nnx.grad(loss)(expected, data.reshape(8, 3))
    nnx.Optimizer(expected, optax.sgd(0.1), wrt=nnx.Param).update(expected, grads)
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), rtol=1e-5)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("loop", ["fori_loop", "while_loop", "scan"])
def test_whole_train_steps_run_in_a_loop(loop: str) -> None:
    xs = jax.random.normal(jax.random.key(0), (3, 4, 2))

    class Net(nnx.Module):
        def __init__(self) -> None:
            rngs = nnx.Rngs(0)
            self.linear = nnx.Linear(2, 2, rngs=rngs)
            self.norm = nnx.BatchNorm(2, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.dropout(self.norm(self.linear(x)))

    def step(both: Any, x: jax.Array) -> Any:
        net, optimizer = both
        loss, grads = nnx.value_and_grad(lambda net: ((net(x) - 1) ** 2).mean())(net)
        optimizer.update(net, grads)
        return both, loss

    def start() -> Any:
        net = Net()
        return net, nnx.Optimizer(net, optax.adam(0.1), wrt=nnx.Param)

    both, expected = start(), start()
    for x in xs:
        nnx.jit(step)(expected, x)
    if loop == "fori_loop":
        nnx.fori_loop(0, 3, lambda i, both: step(both, xs[i])[0], both)
    elif loop == "while_loop":
        nnx.while_loop(lambda v: v[0] < 3, lambda v: (v[0] + 1, step(v[1], xs[v[0]])[0]), (0, both))
    else:
        nnx.scan(step)(both, xs)
    for a, b in zip(jax.tree.leaves(both), jax.tree.leaves(expected), strict=True):
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_loops_inside_jit_write_to_the_caller() -> None:
    @nnx.jit
    def run(counter: Counter, n: jax.Array) -> None:
        nnx.fori_loop(0, n, grow_by, counter)
        nnx.while_loop(is_small, grow, counter)

    counter = Counter()
    run(counter, jnp.int32(3))
    assert int(counter.n[...]) == 5
    run(counter, jnp.int32(4))
    assert int(counter.n[...]) == 11


def test_loops_run_without_jit_as_python_does() -> None:
    counter = Counter()
    with jax.disable_jit():
        nnx.fori_loop(0, 4, counter.indexed, jnp.float32(0))
        nnx.cond(jnp.array(True), lambda c: grow(c) and None, lambda c: None, counter)
    assert int(counter.n[...]) == 7


def test_operations_of_a_body_carry_the_path_of_their_module() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.cell = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.while_loop(lambda v: v[1].sum() < 3, self.step, (self.cell, x))[1]

        def step(self, value: Any) -> Any:
            cell, x = value
            return cell, cell(x)

    net = Net()
    text = jax.jit(lambda x: net(x)).lower(jnp.ones((1, 2))).as_text(debug_info=True)
    # Some versions of JAX name inlined functions.
    assert re.search(r"Net/while/body/(jit\(step\)/)?step/cell/dot_general", text)


def test_unroll_is_handed_to_jax() -> None:
    def jaxpr(**options: Any) -> str:
        body = lambda i, x: x * 2  # noqa: E731
        run = lambda x: nnx.fori_loop(0, 4, body, x, **options)  # noqa: E731
        return str(jax.make_jaxpr(run)(jnp.float32(1)))

    assert "unroll=2" in jaxpr(unroll=2) and "unroll=1" in jaxpr()


def test_functions_may_be_given_by_name():
    assert int(nnx.fori_loop(lower=0, upper=3, body_fun=lambda i, x: x + i, init_val=0)) == 3
    assert int(nnx.while_loop(cond_fun=lambda x: x < 5, body_fun=lambda x: x + 1, init_val=0)) == 5

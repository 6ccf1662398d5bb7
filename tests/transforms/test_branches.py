"""cond and switch over objects, against plain `jax.lax` and Python."""

import functools
import gc
import re
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError, TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import counted

ONE, TWO = jnp.int32(1), jnp.int32(2)
TRUE, FALSE = jnp.array(True), jnp.array(False)


class Counter(nnx.Module):
    def __init__(self, value: int = 0) -> None:
        self.n = nnx.Variable(jnp.int32(value))
        self.mode = "train"

    def add(self, by: jax.Array) -> jax.Array:
        self.n[...] += by
        return self.n[...]

    def subtract(self, by: jax.Array) -> jax.Array:
        self.n[...] -= by
        return self.n[...]

    def __call__(self, by: jax.Array) -> jax.Array:
        return self.add(by)


def grow(counter: Counter) -> None:
    counter.n[...] += 1


def leave(counter: Counter) -> None:
    return None


# What a branch changes and returns.


@pytest.mark.parametrize(("taken", "expected"), [(True, 1), (False, 0)])
def test_cond_writes_what_the_taken_branch_changes(taken: bool, expected: int) -> None:
    counter = Counter()
    nnx.cond(jnp.array(taken), grow, leave, counter)
    assert int(counter.n[...]) == expected


def test_each_branch_may_change_a_variable_of_its_own() -> None:
    def step(pick: Any) -> Any:
        def change(pair: tuple[Counter, Counter]) -> None:
            grow(pick(pair))

        return change

    for index, expected in ((0, (1, 0)), (1, (0, 1)), (5, (0, 1))):
        pair = Counter(), Counter()
        first, second = step(lambda pair: pair[0]), step(lambda pair: pair[1])
        nnx.switch(jnp.int32(index), [first, second], pair)
        assert tuple(int(each.n[...]) for each in pair) == expected


def test_switch_agrees_with_lax() -> None:
    branches = [lambda x: x, lambda x: 2 * x, lambda x: x - 1]
    x = jnp.arange(3.0)
    for index in range(-1, 4):
        expected = jax.lax.switch(index, branches, x)
        np.testing.assert_array_equal(nnx.switch(index, branches, x), expected)


def test_switch_with_one_branch_calls_it() -> None:
    counter = Counter()
    assert int(nnx.switch(jnp.int32(3), [lambda c: c.add(ONE)], counter)) == 1
    assert int(counter.n[...]) == 1


def test_pred_and_index_may_be_variables() -> None:
    assert int(nnx.cond(nnx.Variable(TRUE), lambda: ONE, lambda: TWO)) == 1
    assert int(nnx.switch(nnx.Variable(jnp.int32(1)), [lambda: ONE, lambda: TWO])) == 2


def test_the_argument_object_comes_back_itself() -> None:
    counter = Counter()
    out = nnx.cond(TRUE, lambda c: {"same": c}, lambda c: {"same": c}, counter)
    assert out["same"] is counter


def test_new_objects_are_those_of_the_taken_branch() -> None:
    made = nnx.cond(FALSE, lambda: (Counter(1), ONE), lambda: (Counter(2), TWO))
    assert_isomorphic(Counter(2), made[0])
    made[0].add(ONE)  # it is the caller's own
    assert int(made[1]) == 2


def test_structure_and_statics_may_change_alike() -> None:
    def mark(value: float) -> Any:
        def change(counter: Any) -> None:
            counter.seen, counter.mode = nnx.Variable(jnp.float32(value)), "eval"

        return change

    counter: Any = Counter()
    nnx.cond(FALSE, mark(1), mark(2), counter)
    assert float(counter.seen[...]) == 2 and counter.mode == "eval"


def test_a_state_in_the_result_is_a_value() -> None:
    proposal, state = (nnx.State({"w": nnx.Param(jnp.float32(w))}) for w in (1, 2))
    closed = nnx.cond(TRUE, lambda: proposal, lambda: state)
    passed = nnx.cond(FALSE, lambda a, b: a, lambda a, b: b, proposal, state)
    jitted = jax.jit(lambda p, a, b: nnx.cond(p, lambda: a, lambda: b))(TRUE, proposal, state)
    assert [float(x["w"][...]) for x in (closed, passed, jitted)] == [1, 2, 1]
    closed["w"][...] = jnp.float32(7)
    assert float(proposal["w"][...]) == 1


def test_a_state_that_is_an_argument_may_be_written() -> None:
    def change(state: nnx.State) -> None:
        state["w"][...] *= 3

    state = nnx.State({"w": nnx.Param(jnp.float32(2))})
    nnx.cond(TRUE, change, lambda state: None, state)
    assert float(state["w"][...]) == 6


def test_branches_of_a_ring_buffer_as_programs_write_them() -> None:
    class Buffer(nnx.Module):
        def __init__(self) -> None:
            self.index, self.data = nnx.Variable(jnp.int32(0)), nnx.Variable(jnp.zeros(3))

        def put(self, x: jax.Array) -> None:
            def wrap(self: "Buffer") -> Any:
                return jnp.zeros_like(self.index.get_value()), self.data.get_value()

            index, data = nnx.cond(
                self.index.get_value() >= 2,
                wrap,
                lambda self: (self.index + 1, self.data.get_value()),
                self,
            )
            self.index[...], self.data[...] = index, data.at[index].set(x)

    buffer = Buffer()
    for x in range(5):
        nnx.jit(Buffer.put)(buffer, jnp.float32(x))
    np.testing.assert_array_equal(buffer.data[...], [2, 3, 4])


# Which functions may be branches.


def named(x: jax.Array, *, counter: Counter) -> jax.Array:
    return counter.add(x)


KINDS = {
    "method": lambda c: c.add,
    "callable module": lambda c: c,
    "partial of an object": lambda c: functools.partial(Counter.add, c),
    "partial by name": lambda c: functools.partial(named, counter=c),
    "jitted method": lambda c: functools.partial(nnx.jit(Counter.add), c),
    "partial with a constant": lambda c: functools.partial(named, counter=c),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_objects_that_come_with_a_branch_are_changed(make: Any) -> None:
    a, b = Counter(1), Counter(10)
    result = nnx.cond(FALSE, make(a), b.subtract, jnp.int32(3))
    assert (int(a.n[...]), int(b.n[...]), int(result)) == (1, 7, 7)
    result = nnx.cond(TRUE, make(a), b.subtract, jnp.int32(3))
    assert (int(a.n[...]), int(b.n[...]), int(result)) == (4, 7, 4)


def test_branches_may_be_methods_of_one_object() -> None:
    counter = Counter(1)
    nnx.cond(FALSE, counter.add, counter.subtract, jnp.int32(5))
    assert int(counter.n[...]) == -4


def test_branches_may_be_functions_of_jax_and_partials_with_constants() -> None:
    zero = jnp.float32(0)
    assert float(nnx.cond(FALSE, jnp.sin, jnp.cos, zero)) == 1
    power = functools.partial(jnp.power, jnp.float32(3))
    assert float(nnx.cond(TRUE, power, functools.partial(jnp.round, decimals=1), zero + 2)) == 9


def test_what_is_no_function_is_an_error_with_its_role() -> None:
    with pytest.raises(TypeError, match=r"nnx\.cond expected a function as false_fun, found a int"):
        nnx.cond(TRUE, lambda: 1, 3)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one branch"):
        nnx.switch(ONE, [])


# How often a branch is traced.


def test_each_branch_is_traced_once_by_eager_calls() -> None:
    (yes, traces), (no, other) = counted(lambda c: c.add(ONE)), counted(lambda c: c.subtract(ONE))
    for counter in (Counter(), Counter()):
        for flag in (True, False, True):
            nnx.cond(jnp.array(flag), yes, no, counter)
        assert int(counter.n[...]) == 1
    assert (len(traces), len(other)) == (1, 1)


def test_each_branch_is_traced_once_under_jit_grad_and_vmap() -> None:
    for transform in (nnx.jit, nnx.grad, nnx.vmap):
        yes, traces = counted(lambda x: x * x)
        no, other = counted(lambda x: -x)
        x = jnp.ones(2) if transform is nnx.vmap else jnp.float32(2)
        transform(lambda x, yes=yes, no=no: nnx.cond(x > 0, yes, no, x))(x)
        assert (len(traces), len(other)) == (1, 1)


TRACES: list[str] = []


def test_lambdas_made_anew_meet_the_code_of_equal_ones() -> None:
    TRACES.clear()

    def call(scale: int) -> float:
        yes = lambda x: TRACES.append("yes") or scale * x  # noqa: E731
        no = lambda x: TRACES.append("no") or x  # noqa: E731
        return float(nnx.cond(TRUE, yes, no, jnp.float32(3)))

    # What the branches append to could change: they are taken for equal only without it.
    assert [call(2), call(2)] == [6, 6]
    assert TRACES == ["yes", "no"] * 2

    def silent(scale: int, counted_no: Any) -> float:
        return float(nnx.cond(TRUE, lambda x: scale * x, counted_no, jnp.float32(3)))

    no, traces = counted(lambda x: x)
    assert [silent(2, no), silent(2, no), silent(5, no)] == [6, 6, 15]
    assert len(traces) == 2


SCALE = 1.0


def test_a_lambda_sees_globals_as_they_are() -> None:
    global SCALE
    found = []
    for scale in (2.0, 3.0):  # what a script does at its top
        SCALE = scale
        found.append(float(nnx.cond(TRUE, lambda x: SCALE * x, lambda x: x, jnp.float32(1))))  # noqa: B023
    assert found == [2, 3]


class Settings:
    scale = 1.0


def test_a_lambda_sees_what_changed_in_place() -> None:
    settings, numbers = Settings(), [1.0]
    found = []
    for n in (2.0, 3.0):
        settings.scale, numbers[0] = n, 10 * n
        yes, no = (lambda x: settings.scale * x), (lambda x: numbers[0] * x)
        found += [float(nnx.cond(flag, yes, no, jnp.float32(1))) for flag in (TRUE, FALSE)]
    assert found == [2, 20, 3, 30]


def test_a_closed_over_module_is_seen_as_it_is() -> None:
    dropout = nnx.Dropout(0.99, rngs=nnx.Rngs(0))
    x = jnp.ones(64)
    nnx.cond(TRUE, lambda x: dropout(x, rngs=nnx.Rngs(1)), lambda x: x, x)
    dropout.eval()
    np.testing.assert_array_equal(nnx.cond(TRUE, lambda x: dropout(x), lambda x: x, x), x)


def test_what_branches_close_over_is_not_kept_alive() -> None:
    dead = []
    for _ in range(2):
        counter, array = Counter(1), jnp.arange(3) + 1

        def branch(x: jax.Array, counter: Any = counter, array: Any = array) -> jax.Array:
            return x + counter.n[...] + array.sum()

        nnx.cond(TRUE, branch, lambda x, array=array: x + array[0], ONE)
        dead += [weakref.ref(counter), weakref.ref(array), weakref.ref(branch)]
        del counter, array, branch
    gc.collect()
    assert [ref() for ref in dead] == [None] * 6


def test_branches_of_a_trace_leave_nothing_behind() -> None:
    with jax.checking_leaks():

        @jax.jit
        def run(x: jax.Array) -> jax.Array:
            return nnx.cond(x.sum() > 0, lambda y: y * x, lambda y: y - x, 2 * x)

        np.testing.assert_array_equal(run(jnp.ones(2)), [2, 2])


# What has to agree.


def test_structure_that_one_branch_changes_is_an_error() -> None:
    def mark(counter: Any) -> None:
        counter.seen = nnx.Variable(jnp.float32(1))

    counter = Counter()
    message = r"counter\.seen \(Variable\) was added in true_fun \(mark\), and not in false_fun"
    with pytest.raises(StructureError, match=message):
        nnx.cond(TRUE, mark, leave, counter)
    assert not hasattr(counter, "seen")


def test_a_static_that_changes_differently_is_an_error_with_both_values() -> None:
    def turn(mode: str) -> Any:
        def change(counter: Counter) -> None:
            grow(counter)
            counter.mode = mode

        return change

    counter = Counter()
    with pytest.raises(StructureError, match=r"counter\.mode: 'eval' -> 'debug'"):
        nnx.switch(ONE, [turn("eval"), turn("debug")], counter)
    message = r"counter\.mode was changed .* in branches\[1\] \(change\), and not in branches\[0\]"
    with pytest.raises(StructureError, match=message):
        nnx.switch(ONE, [leave, turn("debug")], counter)
    assert_isomorphic(Counter(), counter)


def test_results_of_different_structure_are_an_error_with_both() -> None:
    message = r"true_fun \(<lambda>\) returns float32\[2\], false_fun .* \(float32\[2\], Counter\)"
    with pytest.raises(StructureError, match=message):
        nnx.cond(TRUE, lambda x, c: x, lambda x, c: (x, c), jnp.ones(2), Counter())


def test_results_of_different_types_are_an_error_with_the_place() -> None:
    message = r"the result\['x'\] is float32\[2\] after true_fun .* and int32\[2\] after false_fun"
    with pytest.raises(StructureError, match=message):
        nnx.cond(TRUE, lambda x: {"x": x}, lambda x: {"x": x.astype(jnp.int32)}, jnp.ones(2))


def test_new_objects_that_differ_are_an_error_with_the_path() -> None:
    def other() -> Counter:
        counter = Counter()
        counter.mode = "eval"
        return counter

    with pytest.raises(StructureError, match=r"the result\.mode: 'train' -> 'eval'"):
        nnx.cond(TRUE, Counter, other)
    with pytest.raises(StructureError, match=r"true_fun \(Counter\) returns Counter.*Pytree"):
        nnx.cond(TRUE, Counter, nnx.Pytree)


def test_another_argument_in_each_branch_is_an_error_with_both() -> None:
    a, b = Counter(), Counter()
    with pytest.raises(StructureError, match=r"the result is a in true_fun .* and b in false_fun"):
        nnx.cond(TRUE, lambda a, b: a, lambda a, b: b, a, b)
    with pytest.raises(StructureError, match=r"the result\[0\] was added \(Counter\)"):
        nnx.cond(TRUE, lambda a: (a,), lambda a: (Counter(),), a)


def test_a_variable_of_two_types_is_an_error_and_the_caller_is_untouched() -> None:
    def as_float(counter: Counter) -> None:
        counter.n.set_value(counter.n.astype(jnp.float32))

    counter = Counter()
    message = r"counter\.n is float32\[\] after true_fun \(as_float\) and int32\[\] after false_fun"
    with pytest.raises(StructureError, match=message):
        nnx.cond(TRUE, as_float, leave, counter)
    assert_isomorphic(Counter(), counter)


def test_text_among_the_operands_is_an_error_with_its_name() -> None:
    with pytest.raises(TypeError, match=r"nnx\.cond\(.*\): name is a str, neither an array nor"):
        nnx.cond(TRUE, lambda c, name: ONE, lambda c, name: TWO, Counter(), "text")


def test_write_to_a_closed_over_object_names_its_path() -> None:
    counter = Counter()
    message = r"nnx\.cond\(true_fun=<lambda>\) closes over counter\.n\..*another trace level"
    with pytest.raises(TraceLevelError, match=message):
        nnx.cond(TRUE, lambda: grow(counter), lambda: None)
    assert_isomorphic(Counter(), counter)


def test_giving_back_a_closed_over_object_is_an_error() -> None:
    counter = Counter()
    with pytest.raises(TraceLevelError, match=r"closes over counter\. The function returns"):
        nnx.cond(TRUE, lambda: counter, Counter)


def test_write_to_an_object_of_an_outer_trace_names_the_path() -> None:
    counter = Counter()
    with pytest.raises(TraceLevelError, match=r"counter\.n \(Variable\), which was created at"):
        jax.vmap(lambda flag: nnx.cond(flag, grow, leave, counter))(jnp.array([True, False]))
    assert_isomorphic(Counter(), counter)


# What a branch reads beside its arguments.


def test_read_of_a_closed_over_object_sees_its_present_value() -> None:
    counter = Counter(1)
    results = []
    for _ in range(2):
        results.append(int(nnx.cond(TRUE, lambda: counter.n + 0, lambda: jnp.int32(0))))
        counter.n[...] += 1
    assert results == [1, 2]


GLOBAL = Counter(1)


def read_global() -> jax.Array:
    return GLOBAL.n + 0


def read_mode() -> jax.Array:
    return jnp.int32(GLOBAL.mode == "eval")


def zero() -> jax.Array:
    return jnp.int32(0)


def test_cached_branch_sees_the_present_value_of_a_global_object() -> None:
    before = int(nnx.cond(TRUE, read_global, zero))
    GLOBAL.n[...] += 1
    with pytest.warns(UserWarning, match="traced again"):
        after = int(nnx.cond(TRUE, read_global, zero))
    assert after == before + 1


def test_cached_branch_sees_the_present_statics_of_a_global_object() -> None:
    found = []
    for GLOBAL.mode in ("train", "eval", "train"):
        found.append(int(nnx.cond(TRUE, read_mode, zero)))
    assert found == [0, 1, 0]


# Inside and outside of other transforms.


def test_gradients_flow_through_the_taken_branch_and_its_objects() -> None:
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))

    def run(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return nnx.cond(x.sum() > 0, lambda m, x: m(m(x)), lambda m, x: x, model, x).sum()

    x = jnp.ones((1, 2))
    expected = jax.grad(lambda k: ((x @ k) @ k).sum())(model.kernel[...])
    np.testing.assert_allclose(nnx.grad(run)(model, x)["kernel"][...], expected, rtol=1e-6)
    assert float(jnp.abs(nnx.grad(run)(model, -x)["kernel"][...]).max()) == 0


def test_branches_nest_and_run_under_vmap_of_models() -> None:
    def run(counter: Counter, x: jax.Array) -> jax.Array:
        def inner(counter: Counter, x: jax.Array) -> jax.Array:
            return nnx.switch(x, [Counter.subtract, Counter.add, Counter.add], counter, x)

        return nnx.cond(x > 0, inner, lambda c, x: c.add(10 + x), counter, x)

    counters = nnx.vmap(Counter)(jnp.zeros(3, jnp.int32))
    found = nnx.vmap(run)(counters, jnp.array([0, 1, 2], jnp.int32))
    np.testing.assert_array_equal(found, [10, 1, 2])
    np.testing.assert_array_equal(counters.n[...], [10, 1, 2])


def test_random_streams_advance_in_the_taken_branch_alone() -> None:
    rngs, twin = nnx.Rngs(0), nnx.Rngs(0)
    kept = nnx.cond(TRUE, lambda r: r.uniform(), lambda r: jnp.float32(0), rngs)
    assert float(kept) == float(twin.uniform())
    nnx.cond(FALSE, lambda r: r.uniform(), lambda r: jnp.float32(0), rngs)
    assert int(rngs.default.count[...]) == int(twin.default.count[...]) == 1


def test_operations_of_a_branch_carry_the_path_of_their_module() -> None:
    class Net(nnx.Module):
        def __init__(self) -> None:
            self.head = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

        def __call__(self, x: jax.Array) -> jax.Array:
            return nnx.cond(x.sum() > 0, self.head, lambda x: x, x)

    net = Net()
    text = jax.jit(lambda x: net(x)).lower(jnp.ones((1, 2))).as_text(debug_info=True)
    # Some versions of JAX name inlined functions.
    assert re.search(r"Net/head/cond/branch_1_fun/(jit\(__call__\)/)?dot_general", text)


def test_a_read_only_branch_returns_no_copy_of_the_model() -> None:
    model = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    kernel = model.kernel[...]
    jaxpr = jax.make_jaxpr(lambda x: nnx.cond(x.sum() > 0, model, lambda x: x, x))(jnp.ones((1, 4)))
    assert [str(v.aval) for v in jaxpr.jaxpr.eqns[-1].outvars] == ["float32[1,4]"]
    nnx.cond(TRUE, lambda m: m.bias.sum(), lambda m: m.kernel.sum(), model)
    assert model.kernel[...] is kernel


def test_functions_may_be_given_by_name():
    assert int(nnx.cond(pred=True, true_fun=lambda: 1, false_fun=lambda: 2)) == 1
    assert int(nnx.switch(index=1, branches=[lambda: 1, lambda: 2])) == 2


def test_an_eager_branch_sees_a_setting_that_changed():
    class Settings:
        scale = 2.0

    def run():
        return float(nnx.cond(True, lambda x: x * Settings.scale, lambda x: x, jnp.float32(3)))

    assert run() == 6
    Settings.scale = 3.0
    assert run() == 9

"""cond, switch, while_loop and fori_loop over objects, against plain `jax.lax` and Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError, TraceLevelError


class Counter(nnx.Module):
    def __init__(self, value: int = 0) -> None:
        self.n = nnx.Variable(jnp.int32(value))

    def add(self, by: jax.Array) -> jax.Array:
        self.n[...] += by
        return self.n[...]

    def subtract(self, by: jax.Array) -> jax.Array:
        self.n[...] -= by
        return self.n[...]


def grow(counter: Counter) -> None:
    counter.n[...] += 1


def leave(counter: Counter) -> None:
    return None


@pytest.mark.parametrize(("taken", "expected"), [(True, 1), (False, 0)])
def test_cond_writes_what_the_taken_branch_changes(taken: bool, expected: int) -> None:
    counter = Counter()
    nnx.cond(jnp.array(taken), grow, leave, counter)
    assert int(counter.n[...]) == expected


def test_cond_traces_each_branch_once_for_equal_calls() -> None:
    traces = []

    def yes(x: jax.Array) -> jax.Array:
        traces.append("yes")
        return x + 1

    def no(x: jax.Array) -> jax.Array:
        traces.append("no")
        return x - 1

    results = [float(nnx.cond(flag, yes, no, jnp.float32(5))) for flag in (True, False, True)]
    assert results == [6, 4, 6]
    assert sorted(traces) == ["no", "yes"]


def test_cond_takes_bound_methods_and_threads_their_objects() -> None:
    a, b = Counter(1), Counter(10)
    result = nnx.cond(jnp.array(False), a.add, b.subtract, jnp.int32(3))
    assert (int(a.n[...]), int(b.n[...]), int(result)) == (1, 7, 7)


def test_cond_returns_the_argument_object_itself() -> None:
    counter = Counter()
    assert nnx.cond(jnp.array(True), lambda c: c, lambda c: c, counter) is counter


def test_cond_makes_objects_that_both_branches_make() -> None:
    made = nnx.cond(jnp.array(False), lambda: Counter(1), lambda: Counter(2))
    assert isinstance(made, Counter) and int(made.n[...]) == 2


def test_cond_changes_structure_if_both_branches_agree() -> None:
    def mark(counter: Counter) -> None:
        counter.seen = nnx.Variable(jnp.float32(1))

    counter = Counter()
    nnx.cond(jnp.array(True), mark, mark, counter)
    assert float(counter.seen[...]) == 1


def test_cond_refuses_structure_that_one_branch_changes() -> None:
    def mark(counter: Counter) -> None:
        counter.seen = nnx.Variable(jnp.float32(1))

    counter = Counter()
    with pytest.raises(StructureError, match=r"counter\.seen .*was added, and not in the other"):
        nnx.cond(jnp.array(True), mark, leave, counter)
    assert not hasattr(counter, "seen")


def test_cond_refuses_results_of_different_structure() -> None:
    with pytest.raises(StructureError, match="branches have to return the same"):
        nnx.cond(jnp.array(True), lambda x: x, lambda x: (x, x), jnp.ones(2))


def test_cond_refuses_a_variable_of_two_dtypes() -> None:
    def as_float(counter: Counter) -> None:
        counter.n.set_value(counter.n.astype(jnp.float32))

    counter = Counter()
    with pytest.raises(StructureError, match=r"n is .*float32.*one shape and dtype"):
        nnx.cond(jnp.array(True), as_float, leave, counter)
    assert counter.n.dtype == jnp.int32


def test_switch_agrees_with_lax() -> None:
    branches = [lambda x: x, lambda x: 2 * x, lambda x: x - 1]
    for index in range(-1, 4):
        x = jnp.arange(3.0)
        expected = jax.lax.switch(index, branches, x)
        np.testing.assert_array_equal(nnx.switch(index, branches, x), expected)


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


def test_while_loop_that_never_runs_changes_nothing() -> None:
    counter = Counter(7)
    nnx.while_loop(lambda c: c.n < 5, lambda c: grow(c) or c, counter)
    assert int(counter.n[...]) == 7


def test_while_loop_traces_its_body_once_for_equal_objects() -> None:
    traces = []

    def body(counter: Counter) -> Counter:
        traces.append(1)
        counter.n[...] += 1
        return counter

    for _ in range(3):
        nnx.while_loop(lambda c: c.n < 3, body, Counter())
    assert len(traces) == 1


def test_while_loop_refuses_a_condition_that_writes() -> None:
    def asks(counter: Counter) -> jax.Array:
        counter.n[...] += 1
        return counter.n < 5

    with pytest.raises(StructureError, match="the condition changed an object"):
        nnx.while_loop(asks, lambda c: c, Counter())


def test_loop_refuses_a_new_attribute_with_its_path() -> None:
    def body(i: jax.Array, counter: Counter) -> Counter:
        counter.extra = nnx.Variable(jnp.float32(0))
        return counter

    counter = Counter()
    with pytest.raises(StructureError, match=r"counter\.extra .*was added in the loop"):
        nnx.fori_loop(0, 3, body, counter)
    assert not hasattr(counter, "extra")


def test_loop_refuses_a_carry_of_another_dtype_with_before_and_after() -> None:
    with pytest.raises(
        StructureError, match=r"float32\[2\] before the step and float16\[2\] after"
    ):
        nnx.fori_loop(0, 3, lambda i, x: x.astype(jnp.float16), jnp.ones(2, jnp.float32))


def test_loop_refuses_a_carry_of_another_structure() -> None:
    with pytest.raises(StructureError, match="keep its structure"):
        nnx.fori_loop(0, 3, lambda i, x: (x, x), jnp.ones(2))


def test_fori_loop_accumulates_gradients_in_a_state() -> None:
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    data = jax.random.normal(jax.random.key(0), (4, 2, 3))

    def loss(model: nnx.Linear, x: jax.Array) -> jax.Array:
        return (model(x) ** 2).mean()

    zero = jax.tree.map(jnp.zeros_like, nnx.state(model, nnx.Param))

    def body(i: jax.Array, carry: tuple) -> tuple:
        total, model = carry
        grads = nnx.grad(loss)(model, data[i])
        return jax.tree.map(lambda a, b: a + b / 4, total, grads), model

    total, same = nnx.fori_loop(0, 4, body, (zero, model))
    expected = nnx.grad(loss)(model, data.reshape(8, 3))
    assert same is model
    assert float(jnp.abs(zero["kernel"][...]).max()) == 0  # a State is a value in a loop
    for name in ("kernel", "bias"):
        np.testing.assert_allclose(total[name][...], expected[name][...], rtol=1e-5)


def test_loops_nest_and_run_under_vmap() -> None:
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))
    model.kernel[...] = 2 * jnp.eye(2)

    def run(model: nnx.Linear, x: jax.Array, n: jax.Array) -> jax.Array:
        def body(value: tuple) -> tuple:
            i, x, model = value
            return i + 1, model(x), model

        return nnx.while_loop(lambda v: v[0] < n, body, (0, x, model))[1]

    y = nnx.vmap(run, in_axes=(None, 0, 0))(model, jnp.ones((3, 2)), jnp.arange(3))
    np.testing.assert_array_equal(y[:, 0], [1, 2, 4])
    assert model.kernel.shape == (2, 2)


def test_gradients_flow_through_cond_and_fori_loop() -> None:
    model = nnx.Linear(2, 2, use_bias=False, rngs=nnx.Rngs(0))

    def run(model: nnx.Linear, x: jax.Array) -> jax.Array:
        def body(i: jax.Array, value: tuple) -> tuple:
            x, model = value
            return model(x), model

        def looped(model: nnx.Linear, x: jax.Array) -> jax.Array:
            return nnx.fori_loop(0, 2, body, (x, model))[0]

        return nnx.cond(x.sum() > 0, looped, lambda m, x: x, model, x).sum()

    x = jnp.ones((1, 2))
    grads = nnx.grad(run)(model, x)
    expected = jax.grad(lambda k: ((x @ k) @ k).sum())(model.kernel[...])
    np.testing.assert_allclose(grads["kernel"][...], expected, rtol=1e-6)


def test_loops_work_inside_jit_and_write_to_the_caller() -> None:
    @nnx.jit
    def run(counter: Counter) -> None:
        nnx.fori_loop(0, 4, lambda i, c: grow(c) or c, counter)

    counter = Counter()
    run(counter)
    assert int(counter.n[...]) == 4


def test_write_to_a_closed_over_object_in_a_branch_is_an_error() -> None:
    counter = Counter()
    with pytest.raises(TraceLevelError, match="another trace level"):
        nnx.cond(jnp.array(True), lambda: grow(counter), lambda: None)
    assert int(counter.n[...]) == 0


def test_read_of_a_closed_over_object_sees_its_present_value() -> None:
    counter = Counter(1)
    results = []
    for _ in range(2):
        results.append(int(nnx.cond(jnp.array(True), lambda: counter.n + 0, lambda: jnp.int32(0))))
        counter.n[...] += 1
    assert results == [1, 2]


def test_cached_branch_sees_the_present_value_of_a_global_object() -> None:
    before = int(nnx.cond(jnp.array(True), read_global, zero_of))
    GLOBAL.n[...] += 1
    with pytest.warns(UserWarning, match="traced again"):
        after = int(nnx.cond(jnp.array(True), read_global, zero_of))
    assert after == before + 1


GLOBAL = Counter(1)


def read_global() -> jax.Array:
    return GLOBAL.n + 0


def zero_of() -> jax.Array:
    return jnp.int32(0)


def test_branches_have_to_record_alike() -> None:
    class Net(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            def sowing(self: "Net", x: jax.Array) -> jax.Array:
                self.sow(nnx.Intermediate, "h", x)
                return x

            return nnx.cond(x.sum() > 0, sowing, lambda self, x: x, self, x)

    with pytest.raises(StructureError, match=r"record alike.*Intermediate 'h'"):
        nnx.capture(Net(), nnx.Intermediate)(jnp.ones(2))


def test_records_of_the_taken_branch_come_out() -> None:
    class Net(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            def doubled(self: "Net", x: jax.Array) -> jax.Array:
                self.sow(nnx.Intermediate, "h", 2 * x)
                return x

            def halved(self: "Net", x: jax.Array) -> jax.Array:
                self.sow(nnx.Intermediate, "h", x / 2)
                return x

            return nnx.cond(x.sum() > 0, doubled, halved, self, x)

    _, found = nnx.capture(Net(), nnx.Intermediate)(jnp.ones(2))
    np.testing.assert_array_equal(found["h"][...][0], [2, 2])


def test_growth_of_records_in_a_loop_is_an_error() -> None:
    class Net(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            def body(i: jax.Array, value: tuple) -> tuple:
                net, x = value
                net.sow(nnx.Intermediate, "h", x)
                return net, x + 1

            return nnx.fori_loop(0, 3, body, (self, x))[1]

    with pytest.raises(StructureError, match="number of steps is not known"):
        nnx.capture(Net(), nnx.Intermediate)(jnp.ones(2))

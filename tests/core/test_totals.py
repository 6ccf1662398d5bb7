"""What a loop keeps of sown values: constants to start from, and totals that keep their type."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.records import Bundle, Entry, Given, Key, Outcome, Record, Reduction
from nnxlite._core.totals import Constant, Totalled, check_growth, constant_of, is_scalar

KEY = Key(nnx.Intermediate, "h")


def add(a: Any, b: Any) -> Any:
    return a + b


def test_functions_with_the_same_code_join_alike() -> None:
    def made() -> Any:
        return lambda a, b: a + b

    assert Reduction(made()) == Reduction(made())
    assert hash(Reduction(made())) == hash(Reduction(made()))
    assert Reduction(made()) != Reduction(add)
    assert Reduction(jnp.maximum) == Reduction(jnp.maximum) != Reduction(jnp.minimum)


def test_constants_are_equal_by_value_and_type() -> None:
    assert Constant({"a": jnp.zeros(2)}) == Constant({"a": np.zeros(2, np.float32)})
    assert hash(Constant(0.0)) == hash(Constant(0.0))
    different = [0, 0.0, False, -0.0, jnp.zeros(()), jnp.zeros(1), (0.0,), jnp.int32(0)]
    for n, one in enumerate(different):
        assert all(Constant(one) != Constant(other) for other in different[n + 1 :])


def test_what_starts_a_total_is_constant_unless_it_is_traced() -> None:
    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        value, constant = constant_of(lambda: jnp.ones_like(x))
        assert constant == Constant(np.ones(2, np.float32))
        assert constant_of(lambda: 2 * x)[1] is None
        return value

    run(jnp.ones(2))


def test_scalars_are_told_apart() -> None:
    assert is_scalar(Constant({"n": 0, "x": 1.0})) and not is_scalar(Constant((0, jnp.ones(1))))
    assert not is_scalar(None)


@pytest.mark.parametrize(
    ("before", "after"), [((), (1,)), (jnp.zeros(2), jnp.zeros(3)), (jnp.zeros(2), jnp.zeros(()))]
)
def test_growth_is_an_error_with_both_types(before: Any, after: Any) -> None:
    check_growth("loop", lambda: "net", "h", 0.0, jnp.zeros((2, 3)))
    with pytest.raises(
        nnx.errors.StructureError, match=r"loop: net sows 'h' with a reduce_fn that"
    ):
        check_growth("loop", lambda: "net", "h", before, after)


def outputs(start: Any, reduce: Any = add, constant: Any = 0.0) -> Bundle:
    entry = Entry((), KEY, nnx.Intermediate, Reduction(reduce), Constant(constant), "whole")
    return Bundle(Outcome((entry,), (), (), ()), [(start, ())])


def test_a_total_is_handed_to_each_step_in_the_type_that_it_has_after_one() -> None:
    loop, given = Totalled(), Bundle(Given((), (), (), (), (), ""), [])
    after = outputs(jax.ShapeDtypeStruct((2,), jnp.bfloat16))
    ready = loop.for_steps(given, after)
    (total,) = loop.totals(ready)
    assert total.shape == (2,) and total.dtype == jnp.bfloat16 and float(total.sum()) == 0
    assert ready.about.totals[0].fresh
    assert loop.for_steps(ready, after) is ready
    assert loop.totals(loop.with_totals(ready, [7])) == [7]
    assert loop.totals_after(ready, outputs(8)) == [8]
    done = loop.after_loop(ready, [9], after, None)
    assert done.values == [(9, ())] and done.about.entries == after.about.entries


def test_records_know_how_they_are_joined() -> None:
    record = Record(nnx.Intermediate, add, 0.0, ())
    assert record.accumulates and record.joined_to([1.0]).steady
    grown = Record(nnx.Intermediate, lambda kept, x: (*kept, x), (), ()).joined_to([1.0])
    assert grown.start == (1.0,) and not grown.steady
    total = record._replace(total=True).with_more([1.0, 2.0])
    assert total.start == 3.0 and total.values == ()
    assert record.with_more([1.0, 2.0]).values == (1.0, 2.0)

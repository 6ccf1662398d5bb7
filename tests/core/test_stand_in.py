"""Values that stand in for others during a call."""

import threading

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.stand_in import standing_in


def test_a_value_stands_in_for_the_time_of_a_block() -> None:
    variable = nnx.Param(jnp.ones(2))
    before = variable.get_raw_value()
    with standing_in(lambda: [(variable, jnp.zeros(3))], "Layer"):
        assert variable[...].tolist() == [0, 0, 0]
    assert variable.get_raw_value() is before


def test_a_write_that_would_be_lost_is_an_error() -> None:
    variable = nnx.Param(jnp.ones(2))
    before = variable.get_raw_value()
    with (
        pytest.raises(
            nnx.errors.StructureError, match=r"Layer: the layer wrote its Param of shape"
        ),
        standing_in(lambda: [(variable, jnp.zeros(2))], "Layer"),
    ):
        variable[...] = jnp.ones(2)
    assert variable.get_raw_value() is before


def test_threads_take_turns() -> None:
    variable = nnx.Param(jnp.ones(2))
    entered, done = threading.Event(), []

    def other() -> None:
        entered.wait()
        with standing_in(lambda: [(variable, 2 * variable.get_raw_value())], "Layer"):
            done.append(variable[...].tolist())

    thread = threading.Thread(target=other)
    thread.start()
    with standing_in(lambda: [(variable, jnp.zeros(2))], "Layer"):
        entered.set()
        thread.join(0.05)
        assert not done
    thread.join()
    assert done == [[2, 2]] and variable[...].tolist() == [1, 1]


def test_it_ends_with_an_error_too() -> None:
    variable = nnx.Param(jnp.ones(2))
    with (
        pytest.raises(ZeroDivisionError, match="inside"),
        standing_in(lambda: [(variable, 0)], "Layer"),
    ):
        raise ZeroDivisionError("inside")
    assert variable[...].tolist() == [1, 1]


def test_a_closed_over_variable_takes_a_traced_value_and_stays_writable() -> None:
    variable = nnx.Param(jnp.ones(2))

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        with standing_in(lambda: [(variable, x)], "Layer"):
            return 2 * variable[...]

    assert double(jnp.full(2, 3.0)).tolist() == [6, 6]
    variable[...] += 1
    assert variable[...].tolist() == [2, 2]


def test_a_transform_that_closes_over_it_is_not_traced_again() -> None:
    traces = []
    variable = nnx.Param(jnp.ones(2))

    @nnx.jit
    def forward(x: jax.Array) -> jax.Array:
        traces.append(1)
        with standing_in(lambda: [(variable, 2 * variable.get_raw_value())], "Layer"):
            return x * variable[...]

    for _ in range(2):
        assert forward(jnp.ones(2)).tolist() == [2, 2]
    variable[...] = jnp.zeros(2)
    with pytest.warns(UserWarning, match="traced again"):
        assert forward(jnp.ones(2)).tolist() == [0, 0]
    assert len(traces) == 2

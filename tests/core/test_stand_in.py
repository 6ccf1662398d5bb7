"""Values that stand in for others during a call."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.stand_in import standing_in


def test_a_value_stands_in_for_the_time_of_a_block() -> None:
    variable = nnx.Param(jnp.ones(2))
    before = variable.get_raw_value()
    with standing_in([(variable, jnp.zeros(3))]):
        assert variable[...].tolist() == [0, 0, 0]
        variable[...] = jnp.ones(3)
    assert variable.get_raw_value() is before


def test_it_ends_with_an_error_too() -> None:
    variable = nnx.Param(jnp.ones(2))
    with pytest.raises(ZeroDivisionError, match="inside"), standing_in([(variable, 0)]):
        raise ZeroDivisionError("inside")
    assert variable[...].tolist() == [1, 1]


def test_a_closed_over_variable_takes_a_traced_value_and_stays_writable() -> None:
    variable = nnx.Param(jnp.ones(2))

    @jax.jit
    def double(x: jax.Array) -> jax.Array:
        with standing_in([(variable, x)]):
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
        with standing_in([(variable, 2 * variable.get_raw_value())]):
            return x * variable[...]

    for _ in range(2):
        assert forward(jnp.ones(2)).tolist() == [2, 2]
    variable[...] = jnp.zeros(2)
    with pytest.warns(UserWarning, match="traced again"):
        assert forward(jnp.ones(2)).tolist() == [0, 0]
    assert len(traces) == 2

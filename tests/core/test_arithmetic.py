"""A Variable calculates and compares as its value."""

import math
import operator
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite._core.variable import Param, Variable

BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, divmod, operator.matmul),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
]
INTEGER = [operator.lshift, operator.rshift, operator.and_, operator.or_, operator.xor]
A = jnp.array([[1.0, 2.0], [3.0, 4.0]])
B = jnp.array([[2.0, 2.0], [1.0, 3.0]])


def same(a: Any, b: Any) -> bool:
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


@pytest.mark.parametrize("function", BINARY)
def test_operators_act_on_the_values(function: Any) -> None:
    expected = function(A, B)
    for left, right in (
        (Param(A), B),
        (A, Param(B)),
        (Param(A), Param(B)),
        (np.array(A), Param(B)),
    ):
        result = function(left, right)
        assert not isinstance(result, Variable)
        assert same(result, expected)


@pytest.mark.parametrize("function", INTEGER)
def test_integer_operators_act_on_the_values(function: Any) -> None:
    a, b = A.astype(jnp.int32), B.astype(jnp.int32)
    assert same(function(Param(a), b), function(a, b))
    assert same(function(a, Param(b)), function(a, b))


@pytest.mark.parametrize("function", [f for f in BINARY if f is not operator.matmul])
def test_operators_take_python_numbers_on_either_side(function: Any) -> None:
    assert same(function(Param(A), 2), function(A, 2))
    assert same(function(2, Param(A)), function(2, A))


@pytest.mark.parametrize("function", [operator.neg, operator.pos, abs])
def test_unary_operators_act_on_the_value(function: Any) -> None:
    assert same(function(Param(A)), function(A))


def test_invert_acts_on_the_value() -> None:
    assert same(~Variable(jnp.array([True, False])), jnp.array([False, True]))


def test_a_scalar_converts_to_python() -> None:
    variable = Variable(jnp.float32(2.5))
    assert int(variable) == 2
    assert float(variable) == complex(variable) == 2.5
    assert bool(variable)
    assert round(variable) == math.floor(variable) == 2
    assert math.ceil(variable) == 3
    assert round(variable, 1) == 2.5
    assert [10, 11, 12][Variable(1)] == 11
    assert f"{variable:.2f}" == "2.50"
    assert f"{variable}" == repr(variable)


def test_a_variable_is_iterated_as_its_value() -> None:
    variable = Param(A)
    assert len(variable) == 2
    assert [row.tolist() for row in variable] == A.tolist()
    assert 3.0 in Param(A[1])
    assert Param(7.0) not in Param(A[1])


def test_a_callable_value_can_be_called() -> None:
    assert Variable(max)(1, 2) == 2


def test_a_variable_is_unhashable() -> None:
    with pytest.raises(TypeError, match="unhashable"):
        hash(Param(A))


IN_PLACE = {
    "+=": operator.iadd,
    "-=": operator.isub,
    "*=": operator.imul,
    "@=": operator.imatmul,
    "/=": operator.itruediv,
    "//=": operator.ifloordiv,
    "%=": operator.imod,
    "**=": operator.ipow,
    "<<=": operator.ilshift,
    ">>=": operator.irshift,
    "&=": operator.iand,
    "|=": operator.ior,
    "^=": operator.ixor,
}


@pytest.mark.parametrize("symbol", IN_PLACE)
def test_in_place_operators_say_what_to_write(symbol: str) -> None:
    variable = Param(A)
    with pytest.raises(TypeError, match=re.escape(f"Write `variable[...] {symbol} x`")):
        IN_PLACE[symbol](variable, 1)
    assert same(variable.value, A)


@pytest.mark.parametrize(
    "function",
    [
        lambda p: jnp.dot(B, p),
        lambda p: jnp.broadcast_to(p, (3, 2, 2)),
        lambda p: jnp.einsum("ij,jk->ik", B, p),
        jax.nn.softmax,
        jnp.linalg.norm,
        lambda p: jnp.concatenate([p, p]),
        lambda p: jnp.where(B > 1, p, 0),
        lambda p: jax.lax.stop_gradient(p) * 1,
        lambda p: B @ p,
        lambda p: -p.T,
        lambda p: np.asarray(p),
        lambda p: np.array(p, np.float64, copy=True),
        lambda p: jnp.asarray(p),
    ],
)
def test_functions_take_a_variable_as_its_value(function: Any) -> None:
    np.testing.assert_array_equal(function(Param(A)), function(A))
    if not isinstance(function(A), np.ndarray):
        np.testing.assert_allclose(jax.jit(function)(Param(A)), function(A), rtol=1e-6)
        gradient = jax.grad(lambda p: function(p).sum())(Param(A))
        np.testing.assert_allclose(gradient[...], jax.grad(lambda p: function(p).sum())(A))

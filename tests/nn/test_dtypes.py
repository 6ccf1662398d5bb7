"""The dtype a layer computes in."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nnxlite._core.variable import Param
from nnxlite.nn.dtypes import canonicalize_dtype, promote_dtype


def array(dtype: Any) -> jax.Array:
    return jnp.ones(2, dtype)


@pytest.mark.parametrize(
    ("dtypes", "expected"),
    [
        (("float32",), "float32"),
        (("bfloat16", "float32"), "float32"),
        (("float16", "bfloat16"), "float32"),
        (("int32",), "float32"),
        (("int32", "bfloat16"), "bfloat16"),
        (("bool", "uint8"), "float32"),
        (("complex64", "float32"), "complex64"),
    ],
)
def test_arrays_decide_by_the_standard_rules(dtypes: tuple[str, ...], expected: str) -> None:
    assert canonicalize_dtype(*map(array, dtypes), None) == jnp.dtype(expected)


def test_integers_may_stay_integers() -> None:
    args = (array("int8"), array("int32"))
    assert canonicalize_dtype(*args, inexact=False) == jnp.int32
    assert [x.dtype.name for x in promote_dtype(args, inexact=False)] == ["int32", "int32"]


def test_a_given_dtype_is_the_answer() -> None:
    x, none = promote_dtype((array("float32"), None), dtype=jnp.bfloat16)
    assert x.dtype == jnp.bfloat16
    assert none is None


def test_a_given_integer_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match="Cannot compute in int32"):
        promote_dtype((array("int32"),), dtype=jnp.int32)


def test_numbers_do_not_decide_and_results_are_strong() -> None:
    weak = jnp.asarray(2.0)
    x, kernel = promote_dtype((weak, array("bfloat16")))
    assert x.dtype == kernel.dtype == jnp.bfloat16
    (alone,) = promote_dtype((weak,))
    assert not alone.weak_type


def test_arrays_that_agree_are_returned_as_they_are() -> None:
    x = array("float32")
    assert promote_dtype((x, x))[0] is x


def test_variables_count_as_their_values() -> None:
    kernel, x = promote_dtype((Param(array("float32")), array("bfloat16")))
    assert isinstance(kernel, jax.Array)
    assert x.dtype == jnp.float32

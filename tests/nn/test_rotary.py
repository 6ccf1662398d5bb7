"""RoPE, against products of complex numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import nnxlite as nnx


def inputs(*shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(size=shape), jnp.float32)


def rotated(x: Any, positions: Any, theta: float) -> np.ndarray:
    """Pairs as complex numbers, turned by their angles (Su et al. 2021, section 3.2)."""
    half = x.shape[-1] // 2
    pairs = np.asarray(x[..., :half], np.complex128) + 1j * np.asarray(x[..., half:])
    turn = np.exp(1j * np.asarray(positions)[..., None] * theta ** (-np.arange(half) / half))
    pairs = pairs * turn
    return np.concatenate([pairs.real, pairs.imag], -1)


@pytest.mark.parametrize("sizes", [{}, {"embedding_size": 8, "max_seq_len": 7}], ids=str)
def test_pairs_are_turned_by_their_angles(sizes: dict[str, int]) -> None:
    x = inputs(2, 3, 5, 8)
    expected = rotated(x, np.arange(5), 50.0)
    np.testing.assert_allclose(nnx.RoPE(50.0, **sizes)(x), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(5,), (1, 5), (2, 1, 5)], ids=str)
def test_positions_may_be_given(shape: tuple[int, ...]) -> None:
    x = inputs(2, 3, 5, 8)
    positions = np.random.default_rng(1).integers(0, 30, shape)
    y = nnx.RoPE(50.0, embedding_size=8, max_seq_len=4)(x, jnp.asarray(positions))
    np.testing.assert_allclose(y, rotated(x, positions, 50.0), rtol=1e-4, atol=1e-5)


def test_products_depend_on_distances_only() -> None:
    rope, x = nnx.RoPE(), inputs(5, 8)
    first, later = (rope(x, jnp.arange(5) + start) for start in (0, 100))
    np.testing.assert_allclose(first @ first.T, later @ later.T, rtol=1e-3, atol=1e-4)


def test_the_dtype_is_kept() -> None:
    x = inputs(5, 8)
    y = nnx.RoPE()(x.astype(jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), nnx.RoPE()(x), rtol=2e-2, atol=2e-2)


def test_gradients_are_those_of_differences() -> None:
    check_grads(nnx.RoPE(), (inputs(3, 4),), order=1, modes=["rev"], rtol=1e-2)


@pytest.mark.parametrize("shape", [(5, 6), (8, 8)], ids=str)
def test_inputs_that_the_table_does_not_cover_are_refused(shape: tuple[int, ...]) -> None:
    rope = nnx.RoPE(embedding_size=8, max_seq_len=7)
    with pytest.raises(ValueError, match=r"max_seq_len=7\) expects .*\(\.\.\., length, 8\).*found"):
        rope(jnp.ones(shape))


def test_other_mistakes_are_errors() -> None:
    with pytest.raises(ValueError, match="expected an even size, found 7"):
        nnx.RoPE()(jnp.ones((5, 7)))
    with pytest.raises(ValueError, match=r"\(\.\.\., length, size\), found shape \(8,\)"):
        nnx.RoPE()(jnp.ones(8))
    with pytest.raises(ValueError, match="or neither, found 8 and None"):
        nnx.RoPE(embedding_size=8)
    for shape in [(4,), (), (3, 5), (1, 1, 5)]:
        with pytest.raises(ValueError, match=r"broadcast to \(2, 5\).*found shape"):
            nnx.RoPE()(jnp.ones((2, 5, 8)), jnp.ones(shape))

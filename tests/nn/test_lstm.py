"""ConvLSTMCell, against its paper; the other LSTMs are tested beside the other cells."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(kernel_size: Any = 3, **options: Any) -> nnx.ConvLSTMCell:
    return nnx.ConvLSTMCell(2, 3, kernel_size, **options, rngs=nnx.Rngs(0))


def convolved(x: jax.Array, conv: nnx.Conv) -> jax.Array:
    """A convolution of sequences with windows of three and zeros around."""
    padded = jnp.pad(x, ((0, 0), (1, 1), (0, 0)))
    windows = jnp.stack([padded[:, n : n + x.shape[1]] for n in range(3)], axis=2)
    bias = conv.bias[...] if conv.bias is not None else jnp.zeros(conv.out_features)
    return jnp.einsum("btkc,kcf->btf", windows, conv.kernel[...]) + bias[None, None]


@pytest.mark.parametrize("use_bias", [True, False])
def test_a_convolutional_lstm_is_the_formula(use_bias: bool) -> None:
    cell = make(use_bias=use_bias, bias_init=jax.nn.initializers.normal())
    x, c, h = drawn(4, 5, 2), drawn(4, 5, 3, seed=1), drawn(4, 5, 3, seed=2)
    (new_c, new_h), y = cell((c, h), x)
    i, g, f, o = jnp.split(convolved(x, cell.ih) + convolved(h, cell.hh), 4, -1)
    expected = jax.nn.sigmoid(f + 1.0) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    np.testing.assert_allclose(new_c, expected, rtol=1e-5, atol=1e-6)
    expected = jax.nn.sigmoid(o) * jnp.tanh(expected)
    np.testing.assert_allclose(new_h, expected, rtol=1e-5, atol=1e-6)
    assert y is new_h


@pytest.mark.parametrize(
    ("options", "size"),
    [({"strides": 2}, 4), ({"padding": "VALID"}, 5), ({"padding": [(2, 1)]}, 8)],
    ids=str,
)
def test_the_carry_has_the_size_of_the_convolved_input(options: Any, size: int) -> None:
    cell = make(**options)
    carry, y = cell(cell.initialize_carry((4, 7, 2)), drawn(4, 7, 2))
    assert [part.shape for part in carry] == [(4, size, 3)] * 2
    assert y.shape == (4, size, 3)


def test_it_runs_over_time_beside_space() -> None:
    cell, x = make(), drawn(4, 2, 5, 2)  # (batch, time, size, channels)
    y = nnx.RNN(cell)(x)
    carry = cell.initialize_carry((4, 5, 2))
    for step in range(2):
        carry, expected = cell(carry, x[:, step])
        np.testing.assert_allclose(y[:, step], expected, rtol=1e-5, atol=1e-6)


def test_a_carry_of_another_shape_is_refused() -> None:
    carry = (jnp.ones((4, 7, 3)), jnp.ones((4, 7, 3)))
    with pytest.raises(
        ValueError, match=r"carry c to have shape \(4, 6, 3\) for inputs of shape \(4, 6, 2\)"
    ):
        make()(carry, drawn(4, 6, 2))
    with pytest.raises(ValueError, match=r"ConvLSTMCell expects a carry \(c, h\) of two arrays"):
        make()(carry[0], drawn(4, 7, 2))

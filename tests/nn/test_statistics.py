"""The statistics that all normalizing layers share."""

import jax.numpy as jnp

from nnxlite.nn.statistics import compute_stats


def test_statistics_of_half_precision_do_not_overflow() -> None:
    x = jnp.full((8, 3), 300.0, jnp.float16)
    mean, var = compute_stats(x, 0, None)
    assert mean.tolist() == [300, 300, 300]
    assert var.tolist() == [0, 0, 0]


def test_the_variance_of_complex_numbers_is_real() -> None:
    x = jnp.asarray([1 + 1j, 1 - 1j], jnp.complex64)
    mean, var = compute_stats(x, 0, None)
    assert mean == 1
    assert var.dtype == jnp.float32
    assert var == 1

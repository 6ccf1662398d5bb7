"""Pooling, against a loop over windows in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

POOLS = {"max_pool": np.max, "min_pool": np.min, "avg_pool": np.mean}


def inputs(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.random.default_rng(0).integers(-9, 9, shape).astype(dtype)


def pooled(x: np.ndarray, reduce: Any, window: tuple[int, int], stride: int) -> np.ndarray:
    """(batch, height, width, channels) with `nan` for what does not count."""
    height, width = (
        (size - length) // stride + 1 for size, length in zip(x.shape[1:3], window, strict=True)
    )
    y = np.zeros((x.shape[0], height, width, x.shape[-1]))
    for i in range(height):
        for j in range(width):
            rows = slice(i * stride, i * stride + window[0])
            y[:, i, j] = reduce(x[:, rows, j * stride : j * stride + window[1]], axis=(1, 2))
    return y


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("stride", [None, 1, 2])
def test_each_window_becomes_one_number(name: str, stride: int | None) -> None:
    x = inputs(2, 5, 6, 3)
    y = getattr(nnx, name)(x, (2, 3), strides=stride and (stride, stride))
    np.testing.assert_allclose(y, pooled(x, POOLS[name], (2, 3), stride or 1), rtol=1e-6)


@pytest.mark.parametrize("padding", ["SAME", ((1, 1), (1, 1))])
@pytest.mark.parametrize("name", ["max_pool", "min_pool"])
def test_padding_is_never_an_extreme(name: str, padding: Any) -> None:
    x = inputs(2, 5, 5, 3)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=np.nan)
    y = getattr(nnx, name)(x, (3, 3), padding=padding)
    np.testing.assert_array_equal(y, pooled(padded, getattr(np, f"nan{name[:3]}"), (3, 3), 1))


@pytest.mark.parametrize("count_include_pad", [True, False])
@pytest.mark.parametrize("batch", [(), (2,), (2, 1)], ids=str)
def test_padding_of_a_mean_counts_if_told_so(
    count_include_pad: bool, batch: tuple[int, ...]
) -> None:
    x = inputs(*batch, 5, 5, 3)
    flat = x.reshape(-1, 5, 5, 3)
    value = 0 if count_include_pad else np.nan
    padded = np.pad(flat, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=value)
    y = nnx.avg_pool(x, (3, 3), padding=((1, 1), (1, 1)), count_include_pad=count_include_pad)
    expected = pooled(padded, np.nanmean, (3, 3), 1).reshape(x.shape)
    np.testing.assert_allclose(y, expected, rtol=1e-6)


@pytest.mark.parametrize("name", POOLS)
@pytest.mark.parametrize("dtype", ["int8", "uint8", "bfloat16", "float16"])
def test_pooling_keeps_the_dtype(name: str, dtype: str) -> None:
    x = jnp.asarray(inputs(2, 4, 4, 1)).astype(dtype)
    y = getattr(nnx, name)(x, (2, 2), strides=(2, 2), padding="SAME")
    mean_of_integers = name == "avg_pool" and "int" in dtype
    assert y.dtype == (jnp.float32 if mean_of_integers else jnp.dtype(dtype))
    expected = pooled(np.asarray(x, np.float32), POOLS[name], (2, 2), 2)
    np.testing.assert_allclose(np.asarray(y, np.float32), expected, rtol=1e-2)


def test_booleans_are_pooled() -> None:
    x = jnp.array([True, False, False, False])[:, None]
    assert nnx.max_pool(x, (2,), strides=(2,))[:, 0].tolist() == [True, False]
    assert nnx.min_pool(x, (2,), strides=(2,))[:, 0].tolist() == [False, False]


def test_the_gradient_goes_to_the_largest() -> None:
    x = jnp.array([1.0, 3.0, 2.0, 0.0])
    gradient = jax.grad(lambda x: nnx.max_pool(x[:, None], (2,), strides=(2,)).sum())(x)
    assert gradient.tolist() == [0, 1, 1, 0]


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((4, 4), {"strides": (1,)}, r"shape \(2, 8, 8, 3\) found a window \(4, 4\) and strides"),
        ((2, 2, 2, 2), {}, r"at most 3: the channels"),
        ((2, 2), {"padding": ((1, 1),)}, r"padding \(\(1, 1\),\) for the window \(2, 2\)"),
        ((2, 2), {"padding": ((1,), (1,))}, "a pair of numbers for each axis"),
    ],
)
@pytest.mark.parametrize("name", POOLS)
def test_windows_that_do_not_fit_are_refused(
    name: str, shape: Any, options: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(nnx, name)(jnp.ones((2, 8, 8, 3)), shape, **options)


def test_any_reduction_of_two_numbers_pools() -> None:
    x = inputs(2, 5, 6, 3)
    y = nnx.pool(x, 1.0, jax.lax.mul, (2, 3), (2, 2), "VALID")
    np.testing.assert_allclose(y, pooled(x, np.prod, (2, 3), 2), rtol=1e-6)

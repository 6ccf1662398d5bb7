"""Pooling: one number for each window of the input, separately for each channel.

Arrays have their channels last, as in `(batch, height, width, channels)`; any number of batch axes
may be in front, also none.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Padding: TypeAlias = str | Sequence[tuple[int, int]]

__all__ = ["avg_pool", "max_pool", "min_pool", "pool"]


def pool(
    inputs: jax.Array,
    init: Any,
    reduce_fn: Callable[[jax.Array, jax.Array], jax.Array],
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: Padding,
) -> jax.Array:
    """Returns each window of the input reduced to one number.

    Args:
      inputs: `(*batch, *spatial, channels)`.
      init: What the reduction starts from; padding counts as this too.
      reduce_fn: The reduction of two numbers to one. JAX knows derivatives for `jax.lax.add`,
        `max` and `min` that start from their neutral element.
      window_shape: The size of the window along each spatial axis.
      strides: The step from window to window along each of them; 1 by default.
      padding: `"SAME"`, `"VALID"`, or for each of them how much is added before and after.

    Raises:
      ValueError: The window, strides or padding do not fit the number of axes.

    Example:
      >>> from nnxlite.nn.pooling import pool
      >>> pool(jnp.arange(6.0).reshape(6, 1), 1.0, jax.lax.mul, (2,), (2,), "VALID")[:, 0]
      Array([ 0.,  6., 20.], dtype=float32)
    """
    window = tuple(window_shape)
    strides = (1,) * len(window) if strides is None else tuple(strides)
    batch = inputs.ndim - len(window) - 1
    if len(strides) != len(window) or batch < 0:
        raise ValueError(
            f"pooling of inputs of shape {inputs.shape} found a window {window} and strides "
            f"{strides}. Expected as many numbers in each, and at most {inputs.ndim - 1}: the "
            "channels, which come last, have none."
        )
    pads: Any = padding
    if not isinstance(padding, str):
        pads = tuple(tuple(pair) for pair in padding)
        if len(pads) != len(window) or any(len(pair) != 2 for pair in pads):
            raise ValueError(
                f"pooling found padding {padding!r} for the window {window}. Expected a name, or a "
                "pair of numbers for each axis of the window."
            )
        pads = (*((0, 0),) * batch, *pads, (0, 0))
    ones = (1,) * batch
    return lax.reduce_window(
        inputs, init, reduce_fn, (*ones, *window, 1), (*ones, *strides, 1), pads
    )


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Returns the largest element of each window.

    Args:
      inputs: `(*batch, *spatial, channels)`.
      window_shape: The size of the window along each spatial axis.
      strides: The step from window to window along each of them; 1 by default.
      padding: `"SAME"`, `"VALID"`, or for each of them how much is added before and after. What is
        added is never the largest.

    Example:
      >>> nnx.max_pool(jnp.arange(6.0).reshape(6, 1), (2,), strides=(2,))[:, 0]
      Array([1., 3., 5.], dtype=float32)
    """
    return pool(inputs, _extreme(inputs, -1), lax.max, window_shape, strides, padding)


def min_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Returns the smallest element of each window; all else is as for `max_pool`.

    Example:
      >>> nnx.min_pool(jnp.arange(6.0).reshape(6, 1), (2,), strides=(2,))[:, 0]
      Array([0., 2., 4.], dtype=float32)
    """
    return pool(inputs, _extreme(inputs, 1), lax.min, window_shape, strides, padding)


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Returns the mean of each window.

    Args:
      inputs: `(*batch, *spatial, channels)`; integers become float32.
      window_shape: The size of the window along each spatial axis.
      strides: The step from window to window along each of them; 1 by default.
      padding: `"SAME"`, `"VALID"`, or for each of them how much is added before and after.
      count_include_pad: Whether what is added counts, as zeros.

    Example:
      >>> nnx.avg_pool(jnp.arange(6.0).reshape(6, 1), (2,), strides=(2,))[:, 0]
      Array([0.5, 2.5, 4.5], dtype=float32)
    """
    if not jnp.issubdtype(inputs.dtype, jnp.inexact):
        inputs = inputs.astype(jnp.float32)
    total = pool(inputs, 0.0, lax.add, window_shape, strides, padding)
    if count_include_pad:
        return total / int(np.prod(window_shape))
    spatial = inputs.shape[inputs.ndim - len(window_shape) - 1 : -1]
    ones = jnp.ones((*spatial, 1), inputs.dtype)
    count = pool(ones, 0.0, lax.add, window_shape, strides, padding)
    return total / jnp.broadcast_to(count, total.shape)


def _extreme(inputs: jax.Array, sign: int) -> Any:
    """Returns the largest (or with sign -1 the smallest) number of a dtype."""
    if jnp.issubdtype(inputs.dtype, jnp.integer):
        info = jnp.iinfo(inputs.dtype)
        return np.array(info.max if sign > 0 else info.min, inputs.dtype)
    if inputs.dtype == jnp.bool_:
        return sign > 0
    return sign * np.inf

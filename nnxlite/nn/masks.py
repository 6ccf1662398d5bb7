"""Masks of attention: which positions may look at which.

A mask is nonzero, or True, where a query may attend to a key. It has the axes of the attention
weights, `(..., heads, q_length, kv_length)`; those along which it does not differ have size 1.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike


def make_attention_mask(
    query_input: jax.Array,
    key_input: jax.Array,
    pairwise_fn: Callable[..., jax.Array] = jnp.multiply,
    extra_batch_dims: int = 0,
    dtype: DTypeLike = jnp.float32,
) -> jax.Array:
    """Returns the mask that compares each query position with each key position.

    Args:
      query_input: `(..., q_length)`, for instance 1 where there is a token and 0 for padding.
      key_input: `(..., kv_length)`, the same for the keys.
      pairwise_fn: The comparison, elementwise; the default allows pairs where both are nonzero.
      extra_batch_dims: How many axes of size 1 to put in front.
      dtype: The dtype of the mask.

    Returns:
      `(1, ..., 1, q_length, kv_length)`: extra axes, batch axes, one axis for all heads.

    Raises:
      ValueError: An input has no axis, or they do not have the same batch axes.

    Example:
      >>> tokens = jnp.array([[5, 2, 0]])
      >>> mask = nnx.make_attention_mask(tokens > 0, tokens > 0, jnp.logical_and)
      >>> mask.shape, mask[0, 0].tolist()
      ((1, 1, 3, 3), [[1.0, 1.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    """
    query_input, key_input = jnp.asarray(query_input), jnp.asarray(key_input)
    rank = max(query_input.ndim, key_input.ndim)
    query_input, key_input = (
        jnp.reshape(x, (1,) * (rank - x.ndim) + x.shape) if x.ndim else x
        for x in (query_input, key_input)
    )
    if (
        not query_input.ndim
        or not key_input.ndim
        or _clash(query_input.shape[:-1], key_input.shape[:-1])
    ):
        raise ValueError(
            "make_attention_mask expects inputs of shapes (..., q_length) and (..., kv_length) "
            f"with the same batch axes, found {query_input.shape} and {key_input.shape}."
        )
    mask = pairwise_fn(query_input[..., :, None], key_input[..., None, :])
    mask = jnp.expand_dims(mask, -3)
    return jnp.expand_dims(mask, tuple(range(extra_batch_dims))).astype(dtype)


def make_causal_mask(
    x: jax.Array, extra_batch_dims: int = 0, dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Returns the mask under which each position sees itself and those before it.

    Args:
      x: `(..., length)`; only its shape counts.
      extra_batch_dims: How many axes of size 1 to put in front.
      dtype: The dtype of the mask.

    Returns:
      `(1, ..., 1, length, length)`, as from `make_attention_mask`.

    Raises:
      ValueError: `x` has no axis.

    Example:
      >>> nnx.make_causal_mask(jnp.zeros((1, 3)))[0, 0].tolist()
      [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
    """
    shape = jnp.shape(x)
    if not shape:
        raise ValueError("make_causal_mask expects an array (..., length), found shape ().")
    positions = jnp.broadcast_to(jnp.arange(shape[-1]), shape)
    return make_attention_mask(positions, positions, jnp.greater_equal, extra_batch_dims, dtype)


def combine_masks(*masks: jax.Array | None, dtype: DTypeLike = jnp.float32) -> jax.Array | None:
    """Returns the mask that allows what all of `masks` allow, or None if there are none.

    Args:
      *masks: Of one rank, and shapes that broadcast; None does not count.
      dtype: The dtype of the result.

    Raises:
      ValueError: The shapes do not fit.

    Example:
      >>> tokens = jnp.array([[5, 2, 0]])
      >>> padding = nnx.make_attention_mask(tokens > 0, tokens > 0, jnp.logical_and)
      >>> nnx.combine_masks(padding, None, nnx.make_causal_mask(tokens))[0, 0].tolist()
      [[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]
    """
    present = [jnp.asarray(mask) for mask in masks if mask is not None]
    if not present:
        return None
    combined, *others = present
    for other in others:
        if other.ndim != combined.ndim or _clash(other.shape, combined.shape):
            raise ValueError(
                "combine_masks expects masks of one rank and of sizes that are equal or 1, found "
                f"shapes {', '.join(str(mask.shape) for mask in present)}."
            )
        combined = combined.astype(jnp.bool) & other.astype(jnp.bool)
    return combined.astype(dtype)


def aligned(name: str, array: ArrayLike | Any, shape: tuple[int, ...], owner: str) -> jax.Array:
    """Returns a mask or bias with axes of size 1 in front, until it has the rank of `shape`.

    Args:
      name: What it is, for the message.
      array: A mask or bias.
      shape: That of the attention weights.
      owner: Who needs it, for the message.

    Raises:
      ValueError: It does not broadcast to `shape`.

    Example:
      >>> aligned("mask", jnp.ones((3, 3)), (2, 4, 3, 3), "attention").shape
      (1, 1, 3, 3)
    """
    array = jnp.asarray(array)
    missing = len(shape) - array.ndim
    if missing < 0 or any(
        size not in (1, full) for size, full in zip(array.shape, shape[missing:], strict=True)
    ):
        raise ValueError(
            f"{owner} expects a {name} that broadcasts to (..., heads, q_length, kv_length) = "
            f"{shape}, found shape {array.shape}. Sizes have to be equal or 1."
        )
    return jnp.reshape(array, (1,) * missing + array.shape)


def _clash(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tells whether two shapes of one rank do not broadcast."""
    return any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True))

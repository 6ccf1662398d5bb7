"""Dot-product attention as functions: `softmax(query @ key / sqrt(depth)) @ value`.

Heads have an axis of their own, `(..., length, heads, depth)`. There may be fewer key and value
heads than query heads: consecutive query heads then share one, which is grouped-query attention.
Where nobody needs the weights themselves, `jax.nn.dot_product_attention` does the work, which on
some backends never makes them.
"""

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.variable import Intermediate
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.masks import aligned
from nnxlite.nn.rotary import RoPE

NAME = "dot_product_attention"


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = promote_dtype,
    is_causal: bool = False,
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """Returns, per query, the mean of the values weighted by how well their keys fit.

    This is `softmax(query @ key / sqrt(depth) + bias) @ value` for each head, with the softmax over
    the keys that the mask allows; a query that may see none takes the mean of all. Logits and
    softmax are in float32 at least.

    Args:
      query: `(..., q_length, heads, depth)`.
      key: `(..., kv_length, kv_heads, depth)`; `heads` is a multiple of `kv_heads`.
      value: `(..., kv_length, kv_heads, v_depth)`.
      bias: Added to the logits; broadcasts to `(..., heads, q_length, kv_length)`.
      mask: Nonzero where a query may see a key; broadcasts to the same shape.
      broadcast_dropout: Whether batch entries and heads drop the same weights.
      dropout_rng: The key to draw dropped weights with.
      dropout_rate: The share of weights to drop, from 0 to less than 1.
      deterministic: Whether nothing is dropped.
      dtype: The dtype to compute in; by default what the arrays promote to.
      precision: See `jax.lax.Precision`.
      module: Sows the weights, after the softmax and before dropout, as `attention_weights`.
      promote_dtype: Brings `(query, key, value)` to one dtype.
      is_causal: Whether a query sees only keys at its own place and before.
      implementation: Which one of `jax.nn.dot_product_attention` to use. `"cudnn"` never makes the
        weights, so it goes with nothing that needs them: dropout, `module`, `precision`, or values
        of another shape than the keys.

    Returns:
      `(..., q_length, heads, v_depth)`.

    Raises:
      ValueError: Shapes do not fit, dropout lacks a key, or the implementation cannot do it.

    Example:
      >>> query = jnp.zeros((2, 5, 4, 8))  # four query heads
      >>> key = value = jnp.ones((2, 7, 2, 8))  # two key and value heads
      >>> nnx.dot_product_attention(query, key, value).shape
      (2, 5, 4, 8)

    Source: Vaswani et al. 2017, arXiv:1706.03762, equation 1; Ainslie et al. 2023,
    arXiv:2305.13245, for fewer key and value heads.
    """
    query, key, value = promote_dtype((query, key, value), dtype=dtype)
    shape = _weights_shape(query, key, value)
    dropout = _drops(dropout_rate, dropout_rng, deterministic)
    reasons = {
        "dropout": dropout,
        "sowing the weights": module is not None,
        "a precision": precision is not None,
        f"values {value.shape} of another shape than the keys {key.shape}": value.shape
        != key.shape,
    }
    if not any(reasons.values()):
        return _fused(query, key, value, bias, mask, shape, is_causal, implementation)
    if implementation not in (None, "xla"):
        reason = next(reason for reason, holds in reasons.items() if holds)
        raise ValueError(
            f"{NAME} with implementation={implementation!r} never makes the attention weights, "
            f"which {reason} needs. Leave out one of them."
        )
    weights = dot_product_attention_weights(
        query,
        key,
        bias,
        mask,
        broadcast_dropout,
        dropout_rng,
        dropout_rate,
        deterministic,
        query.dtype,
        precision,
        module,
        is_causal=is_causal,
    )
    return _weighted_sum(weights, value, precision)


def dot_product_attention_weights(
    query: jax.Array,
    key: jax.Array,
    bias: jax.Array | None = None,
    mask: jax.Array | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    module: Module | None = None,
    promote_dtype: PromoteDtype = promote_dtype,
    is_causal: bool = False,
) -> jax.Array:
    """Returns the weights with which `dot_product_attention` sums up values; arguments as there.

    Args:
      query: `(..., q_length, heads, depth)`.
      key: `(..., kv_length, kv_heads, depth)`.
      bias: Added to the logits.
      mask: Nonzero where a query may see a key.
      broadcast_dropout: Whether batch entries and heads drop the same weights.
      dropout_rng: The key to draw dropped weights with.
      dropout_rate: The share of weights to drop.
      deterministic: Whether nothing is dropped.
      dtype: The dtype of the result.
      precision: See `jax.lax.Precision`.
      module: Sows the weights before dropout.
      promote_dtype: Brings `(query, key)` to one dtype.
      is_causal: Whether a query sees only keys at its own place and before.

    Returns:
      `(..., heads, q_length, kv_length)`; without dropout, the last axis sums to 1.

    Raises:
      ValueError: Shapes do not fit, or dropout lacks a key.

    Example:
      >>> query = key = jnp.zeros((1, 4, 1, 8))
      >>> nnx.nn.attention.dot_product_attention_weights(query, key, is_causal=True)[
      ...     0, 0, 1
      ... ].tolist()
      [0.5, 0.5, 0.0, 0.0]
    """
    query, key = promote_dtype((query, key), dtype=dtype)
    shape = _weights_shape(query, key)
    drops = _drops(dropout_rate, dropout_rng, deterministic)
    logits = _logits(query, key, shape, precision)
    if bias is not None:
        logits = logits + aligned("bias", bias, shape, NAME).astype(logits.dtype)
    allowed = _allowed(mask, shape, is_causal)
    if allowed is not None:
        logits = jnp.where(allowed, logits, jnp.finfo(logits.dtype).min)  # -inf: nan if none is
    weights = jax.nn.softmax(logits, axis=-1).astype(query.dtype)
    if module is not None:
        module.sow(Intermediate, "attention_weights", weights)
    if not drops:
        return weights
    assert dropout_rng is not None
    drawn = (1,) * (len(shape) - 2) + shape[-2:] if broadcast_dropout else shape
    keep = 1.0 - dropout_rate
    kept = jax.random.bernoulli(dropout_rng, keep, drawn)
    return weights * (kept.astype(weights.dtype) / jnp.asarray(keep, weights.dtype))


def dot_product_attention_with_rope(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    rope: RoPE,
    input_positions: jax.Array | None = None,
    query_positions: jax.Array | None = None,
    **kwargs: Any,
) -> jax.Array:
    """Returns `dot_product_attention` of query and key rotated by their positions.

    Give it to `MultiHeadAttention` as `functools.partial(dot_product_attention_with_rope,
    rope=rope)`. While decoding, the layer tells the position of the query.

    Args:
      query: `(..., q_length, heads, depth)`, of even depth.
      key: `(..., kv_length, kv_heads, depth)`.
      value: `(..., kv_length, kv_heads, v_depth)`.
      rope: Rotates.
      input_positions: `(length,)` or `(..., length)`; by default 0 and on.
      query_positions: The same for queries, if they differ.
      **kwargs: Go to `dot_product_attention`.

    Returns:
      `(..., q_length, heads, v_depth)`.

    Raises:
      ValueError: Shapes do not fit.

    Example:
      >>> x = jnp.ones((2, 5, 4, 8))
      >>> nnx.dot_product_attention_with_rope(x, x, x, rope=nnx.RoPE()).shape
      (2, 5, 4, 8)

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    positions = input_positions if query_positions is None else query_positions
    query = _rotated(rope, query, positions)
    key = _rotated(rope, key, input_positions)
    return dot_product_attention(query, key, value, **kwargs)


def _rotated(rope: RoPE, x: jax.Array, positions: jax.Array | None) -> jax.Array:
    if x.ndim < 3:
        raise ValueError(
            "dot_product_attention_with_rope expects queries and keys of shape (..., length, "
            f"heads, depth), found {x.shape}."
        )
    if positions is not None and jnp.ndim(positions) > 1:
        positions = jnp.expand_dims(positions, -2)  # the same for all heads
    return jnp.swapaxes(rope(jnp.swapaxes(x, -3, -2), positions), -3, -2)


def _weights_shape(
    query: jax.Array, key: jax.Array, value: jax.Array | None = None
) -> tuple[int, ...]:
    """Returns `(..., heads, q_length, kv_length)`, after it has checked the shapes."""
    arrays = [query, key] if value is None else [query, key, value]
    found = ", ".join(
        f"{name} {array.shape}"
        for name, array in zip(("query", "key", "value"), arrays, strict=False)
    )
    if query.ndim < 3 or any(array.ndim != query.ndim for array in arrays):
        expected = "arrays (..., length, heads, depth) of one rank"
    elif any(array.shape[:-3] != query.shape[:-3] for array in arrays):
        expected = "the same batch axes"
    elif query.shape[-1] != key.shape[-1]:
        expected = "the same depth, the last axis, in query and key"
    elif value is not None and value.shape[-3] != key.shape[-3]:
        expected = "the same length, the third last axis, in key and value"
    elif any(not array.shape[-2] or query.shape[-2] % array.shape[-2] for array in arrays):
        expected = "a number of query heads that is a multiple of that of key and value heads"
    else:
        return (*query.shape[:-3], query.shape[-2], query.shape[-3], key.shape[-3])
    raise ValueError(f"{NAME} expects {expected}, found {found}.")


def _drops(rate: float, rng: ArrayLike | None, deterministic: bool) -> bool:
    if not 0.0 <= rate < 1.0:
        raise ValueError(f"{NAME} expects a dropout_rate from 0 to less than 1, found {rate}.")
    drops = rate > 0.0 and not deterministic
    if drops and rng is None:
        raise ValueError(
            f"{NAME} with dropout_rate={rate} has no key. Give it dropout_rng=key, or "
            "deterministic=True to drop nothing."
        )
    return drops


def _fused(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | None,
    mask: jax.Array | None,
    shape: tuple[int, ...],
    is_causal: bool,
    implementation: Literal["xla", "cudnn"] | None,
) -> jax.Array:
    """Lets JAX do it, which knows one batch axis."""
    out_shape = query.shape
    if bias is not None:
        bias = _one_batch_axis(aligned("bias", bias, shape, NAME), shape)
    if mask is not None:
        mask = _one_batch_axis(aligned("mask", mask, shape, NAME), shape).astype(jnp.bool)
    query, key, value = (_one_batch_axis(x, x.shape) for x in (query, key, value))
    with jax.numpy_dtype_promotion("standard"):  # JAX's own logits are wider than its inputs
        out = jax.nn.dot_product_attention(
            query, key, value, bias, mask, is_causal=is_causal, implementation=implementation
        )
    return jnp.reshape(out, out_shape)


def _one_batch_axis(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns `x` with one axis in place of all but the last three.

    Args:
      x: Broadcasts to `shape`; it is repeated only if its batch axes differ.
      shape: Batch axes and three more.
    """
    batch = x.shape[:-3]
    if len(batch) == 1:
        return x
    if math.prod(batch) != 1:
        batch = shape[:-3]
        x = jnp.broadcast_to(x, (*batch, *x.shape[-3:]))
    return jnp.reshape(x, (math.prod(batch), *x.shape[-3:]))


def _logits(
    query: jax.Array, key: jax.Array, shape: tuple[int, ...], precision: lax.PrecisionLike
) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):
        wide = jnp.promote_types(query.dtype, jnp.float32)
    heads, depth = query.shape[-2:]
    kv_heads = key.shape[-2]
    # (..., q_length, kv_heads, heads of a group, depth)
    query = jnp.reshape(query, (*query.shape[:-2], kv_heads, heads // kv_heads, depth))
    logits = jnp.einsum(
        "...qngd,...knd->...ngqk", query, key, precision=precision, preferred_element_type=wide
    )
    return jnp.reshape(logits, shape) / math.sqrt(depth)


def _allowed(mask: jax.Array | None, shape: tuple[int, ...], is_causal: bool) -> jax.Array | None:
    """Returns where a query may see a key, broadcasting to `shape`; None is everywhere."""
    allowed = None
    if mask is not None:
        allowed = aligned("mask", mask, shape, NAME).astype(jnp.bool)
    if is_causal:
        ones = (1,) * (len(shape) - 2)
        causal = jnp.tril(jnp.ones((*ones, *shape[-2:]), jnp.bool))
        allowed = causal if allowed is None else allowed & causal
    return allowed


def _weighted_sum(weights: jax.Array, value: jax.Array, precision: lax.PrecisionLike) -> jax.Array:
    *batch, heads, q_length, kv_length = weights.shape
    kv_heads, depth = value.shape[-2:]
    grouped = (*batch, kv_heads, heads // kv_heads, q_length, kv_length)
    out = jnp.einsum(
        "...ngqk,...knd->...qngd", jnp.reshape(weights, grouped), value, precision=precision
    )
    return jnp.reshape(out, (*batch, q_length, heads, depth))

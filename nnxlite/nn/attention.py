"""Multi-head attention as a layer: projections, heads, dropout, and a cache for decoding.

What the heads compute is a function, `attention_fn`; those of `nnxlite.nn.dot_product` are the
usual ones. *Decoding* feeds a sequence piece by piece: the layer keeps the keys and values of the
pieces before in Variables of the kind `Cache`, and each new query sees them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._core.variable import Cache
from nnxlite.nn.bound import owning, takes
from nnxlite.nn.dot_product import (
    dot_product_attention,
    dot_product_attention_weights,
    dot_product_attention_with_rope,
)
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.flags import first_from, missing_flag
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.layer_norm import LayerNorm
from nnxlite.nn.linear import LinearGeneral, default_bias_init, default_kernel_init
from nnxlite.nn.masks import aligned, combine_masks, make_attention_mask, make_causal_mask
from nnxlite.nn.rotary import RoPE

__all__ = [
    "MultiHeadAttention",
    "RoPE",
    "combine_masks",
    "dot_product_attention",
    "dot_product_attention_weights",
    "dot_product_attention_with_rope",
    "make_attention_mask",
    "make_causal_mask",
]

NAME = "MultiHeadAttention"


class MultiHeadAttention(Module):
    """Attention of several heads, each with projections of its own, and a projection of them all.

    With `f` for `attention_fn`, that is `out(f(query(q), key(k), value(v)))`.

    Args:
      num_heads: The number of heads.
      in_features: Size of the last axis of `inputs_q`.
      qkv_features: Size of all heads together, `num_heads` times that of one; by default
        `in_features`.
      out_features: Size of the last axis of the output; by default `in_features`.
      num_kv_heads: The number of key and value heads, a divisor of `num_heads`, which is the
        default: fewer are shared among query heads.
      in_kv_features: Size of the last axis of `inputs_k` and `inputs_v`; by default `in_features`.
      dtype: The dtype to compute in; by default what inputs and parameters promote to.
      param_dtype: The dtype of the parameters.
      broadcast_dropout: Whether batch entries and heads drop the same weights.
      dropout_rate: The share of attention weights to drop.
      deterministic: Whether nothing is dropped. The call's own argument goes first; `model.train()`
        and `model.eval()` set it.
      precision: See `jax.lax.Precision`.
      kernel_init: Initializes the kernels.
      out_kernel_init: Initializes that of `out`, if it is another.
      bias_init: Initializes the biases.
      out_bias_init: Initializes that of `out`, if it is another.
      use_bias: Whether the projections have a bias.
      attention_fn: Takes query, key and value `(..., length, heads, size)` and the options of
        `dot_product_attention` by keyword, and returns `(..., q_length, heads, size)`. A Module, or
        a `functools.partial` that holds Modules, keeps its Variables: they belong to the layer.
      decode: Whether to decode with the cache. The call's own argument goes first.
      normalize_qk: Whether queries and keys are normalized by a LayerNorm per head.
      qkv_promote_dtype: Brings `(x, kernel, bias)` of the first projections to one dtype.
      out_promote_dtype: The same for `out`.
      ln_promote_dtype: Brings `(x, scale, bias)` of the norms to one dtype.
      qkv_dot_general: Used in place of `jax.lax.dot_general` in the first projections.
      out_dot_general: The same for `out`.
      qkv_dot_general_cls: Makes such a function for each call; goes before the function.
      out_dot_general_cls: The same for `out`.
      rngs: The stream `params` initializes `query`, `key`, `value`, the norms and `out`, in this
        order; `dropout` is forked if there is dropout.
      keep_rngs: Whether to keep that fork; otherwise each call with dropout needs `rngs`.
      kernel_metadata: Metadata of the kernels, such as `out_sharding`.
      out_kernel_metadata: That of the kernel of `out`, if it is another.
      bias_metadata: Metadata of the biases.
      out_bias_metadata: That of the bias of `out`, if it is another.
      query_ln_scale_metadata: Metadata of the scale of `query_ln`.
      key_ln_scale_metadata: Metadata of the scale of `key_ln`.

    Attributes:
      query: `LinearGeneral`, kernel `(in_features, num_heads, head_dim)`.
      key: The same, `(in_kv_features, num_kv_heads, head_dim)`.
      value: The same.
      query_ln: `LayerNorm` with a scale `(head_dim,)`, or None.
      key_ln: The same.
      out: `LinearGeneral`, kernel `(num_heads, head_dim, out_features)`.
      rngs: The `RngStream` of dropout, or None.
      cached_key: `Cache` of shape `(..., max_length, num_kv_heads, head_dim)`, or None.
      cached_value: The same.
      cache_index: `Cache`, int32: how many positions the cache holds; or None.

    Raises:
      ValueError: `qkv_features` or `num_kv_heads` do not go with `num_heads`.

    Example:
      >>> layer = nnx.MultiHeadAttention(4, 16, num_kv_heads=2, decode=False, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((2, 10, 16))
      >>> layer(x, mask=nnx.make_causal_mask(x[..., 0])).shape
      (2, 10, 16)
      >>> layer(x[:, :3], x).shape  # three queries look at ten keys
      (2, 3, 16)

    Source: Vaswani et al. 2017, arXiv:1706.03762, section 3.2; Ainslie et al. 2023,
    arXiv:2305.13245, for fewer key and value heads; Dehghani et al. 2023, arXiv:2302.05442, for
    normalized queries and keys.
    """

    query: LinearGeneral
    key: LinearGeneral
    value: LinearGeneral
    query_ln: LayerNorm | None
    key_ln: LayerNorm | None
    out: LinearGeneral
    rngs: RngStream | None
    cached_key: Cache[jax.Array] | None
    cached_value: Cache[jax.Array] | None
    cache_index: Cache[jax.Array] | None

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = default_bias_init,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., jax.Array] = dot_product_attention,
        decode: bool | None = None,
        normalize_qk: bool = False,
        qkv_promote_dtype: PromoteDtype = promote_dtype,
        out_promote_dtype: PromoteDtype = promote_dtype,
        ln_promote_dtype: PromoteDtype = promote_dtype,
        qkv_dot_general: Callable[..., jax.Array] | None = None,
        out_dot_general: Callable[..., jax.Array] | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        out_kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        out_bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        query_ln_scale_metadata: Mapping[str, Any] = MappingProxyType({}),
        key_ln_scale_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.num_heads = num_heads
        self.in_features = in_features
        self.qkv_features = in_features if qkv_features is None else qkv_features
        self.out_features = in_features if out_features is None else out_features
        self.in_kv_features = in_features if in_kv_features is None else in_kv_features
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = _checked_head_dim(self.qkv_features, num_heads, self.num_kv_heads)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.broadcast_dropout = broadcast_dropout
        self.dropout_rate = dropout_rate
        self.deterministic = deterministic
        self.precision = precision
        self.use_bias = use_bias
        self.attention_fn = owning(attention_fn)
        self.decode = decode
        self.normalize_qk = normalize_qk
        project = functools.partial(
            LinearGeneral,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            precision=precision,
            rngs=rngs,
        )
        project_in = functools.partial(
            project,
            kernel_init=kernel_init,
            bias_init=bias_init,
            promote_dtype=qkv_promote_dtype,
            dot_general=qkv_dot_general,
            dot_general_cls=qkv_dot_general_cls,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.query = project_in(in_features, (num_heads, self.head_dim))
        self.key = project_in(self.in_kv_features, (self.num_kv_heads, self.head_dim))
        self.value = project_in(self.in_kv_features, (self.num_kv_heads, self.head_dim))
        self.query_ln = self.key_ln = None
        if normalize_qk:
            norm = functools.partial(
                LayerNorm,
                self.head_dim,
                use_bias=False,
                dtype=dtype,
                param_dtype=param_dtype,
                promote_dtype=ln_promote_dtype,
                rngs=rngs,
            )
            self.query_ln = norm(scale_metadata=query_ln_scale_metadata)
            self.key_ln = norm(scale_metadata=key_ln_scale_metadata)
        self.out = project(
            (num_heads, self.head_dim),
            self.out_features,
            axis=(-2, -1),
            kernel_init=out_kernel_init or kernel_init,
            bias_init=out_bias_init or bias_init,
            promote_dtype=out_promote_dtype,
            dot_general=out_dot_general,
            dot_general_cls=out_dot_general_cls,
            kernel_metadata=out_kernel_metadata or kernel_metadata,
            bias_metadata=out_bias_metadata or bias_metadata,
        )
        self.rngs = rngs["dropout"].fork() if keep_rngs and dropout_rate > 0 else None
        self.cached_key = self.cached_value = self.cache_index = None

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
    ) -> jax.Array:
        """Returns what the queries find.

        Args:
          inputs_q: `(..., q_length, in_features)`.
          inputs_k: `(..., kv_length, in_kv_features)`; by default `inputs_q`.
          inputs_v: The same; by default `inputs_k`.
          mask: Nonzero where a query may see a key; broadcasts to
            `(..., num_heads, q_length, kv_length)`. While decoding, `kv_length` is that of the
            cache.
          deterministic: Goes before the attribute of that name; needed only with dropout.
          rngs: Streams, or a stream, to draw dropout from, in place of the layer's own.
          sow_weights: Whether to sow the weights of each head as `attention_weights`, an
            `Intermediate` of shape `(..., num_heads, q_length, kv_length)`.
          decode: Goes before the attribute of that name. If so, keys and values go behind those in
            the cache; query `i` of this call sees them up to its own. Queries past the end of the
            cache give nan.
          is_causal: Whether a query sees only keys at its own place and before. Decoding does so
            anyway.
          out_sharding: The sharding of the result, under a mesh with explicit axes.
          qkv_sharding: That of queries, keys and values.
          input_positions: `(..., length)`, handed to `attention_fn`.

        Returns:
          `(..., q_length, out_features)`.

        Raises:
          TypeError: `rngs` is none of these.
          ValueError: Shapes do not fit, there is no cache, or a flag or the randomness is missing.
            The cache stays as it was.
        """
        decode = first_from(
            decode,
            self.decode,
            error_msg=f"{NAME} was told `decode` nowhere. Give it to the constructor, {NAME}(..., "
            "decode=False), or to the call, layer(x, decode=False), or to all layers of a model: "
            "nnx.view(model, decode=False).",
        )
        inputs_k, inputs_v = self._checked_inputs(inputs_q, inputs_k, inputs_v)
        draw = self._dropout_source(deterministic, rngs)
        query = self.query(inputs_q, out_sharding=qkv_sharding)
        key = self.key(inputs_k, out_sharding=qkv_sharding)
        value = self.value(inputs_v, out_sharding=qkv_sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        options: dict[str, Any] = {}
        if input_positions is not None:
            options["input_positions"] = input_positions
        if decode:
            options |= self._decoding_positions(query, input_positions)
            query, key, value, mask = self._through_cache(query, key, value, mask)
        elif mask is not None:
            mask = aligned("mask", mask, self._weights_shape(query, key.shape[-3]), NAME)
        x = self.attention_fn(
            query,
            key,
            value,
            mask=mask,
            dropout_rng=None if draw is None else draw(),
            dropout_rate=self.dropout_rate,
            broadcast_dropout=self.broadcast_dropout,
            deterministic=draw is None,
            dtype=self.dtype,
            precision=self.precision,
            module=self if sow_weights else None,
            is_causal=is_causal and not decode,  # one query would see the first key only
            **options,
        )
        return self.out(x, out_sharding=out_sharding)

    def init_cache(self, input_shape: Sequence[int], dtype: DTypeLike = jnp.float32) -> None:
        """Makes an empty cache, as decoding needs it.

        Args:
          input_shape: `(..., max_length, features)`: that of an input of all positions.
          dtype: The dtype in which keys and values are kept.

        Raises:
          ValueError: `input_shape` has fewer than two axes.

        Example:
          >>> layer = nnx.MultiHeadAttention(2, 8, decode=True, rngs=nnx.Rngs(0))
          >>> x = jnp.ones((3, 10, 8))
          >>> layer.init_cache(x.shape)
          >>> layer(x[:, :1]).shape, int(layer.cache_index[...])
          ((3, 1, 8), 1)
        """
        if len(input_shape) < 2:
            raise ValueError(
                f"{NAME}.init_cache expects the shape of an input, (..., max_length, features), "
                f"found {tuple(input_shape)}."
            )
        shape = (*input_shape[:-1], self.num_kv_heads, self.head_dim)
        self.cached_key = Cache(jnp.zeros(shape, dtype))
        self.cached_value = Cache(jnp.zeros(shape, dtype))
        self.cache_index = Cache(jnp.zeros((), jnp.int32))

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Sequence[int] | None = None,
        max_length: int | None = None,
    ) -> None:
        """Sets the flags of this layer, for `nnx.view`; None changes nothing.

        Args:
          deterministic: Whether nothing is dropped.
          decode: Whether to decode with the cache.
          batch_size: The batch axes of a cache, which is made anew.
          max_length: Its length.

        Raises:
          TypeError: Only one of `batch_size` and `max_length` is given.
        """
        if (batch_size is None) != (max_length is None):
            raise TypeError(
                f"{NAME}.set_view makes a cache of both batch_size and max_length, found "
                f"{batch_size} and {max_length}."
            )
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if batch_size is not None and max_length is not None:
            batch = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            dtype = jnp.float32 if self.dtype is None else self.dtype
            self.init_cache((*batch, max_length, self.in_kv_features), dtype)

    def _checked_inputs(
        self, q: jax.Array, k: jax.Array | None, v: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the inputs of keys and values."""
        if k is None and v is not None:
            raise ValueError(
                f"{NAME} was given inputs_v without inputs_k. Give both, or inputs_k alone, which "
                "serves as both."
            )
        k = q if k is None else k
        v = k if v is None else v
        sizes = (self.in_features, self.in_kv_features, self.in_kv_features)
        for name, x, size in zip("qkv", (q, k, v), sizes, strict=True):
            if x.ndim < 2 or x.shape[-1] != size:
                raise ValueError(
                    f"{NAME} expects inputs_{name} of shape (..., length, {size}), found {x.shape}."
                )
        if q.shape[:-2] != k.shape[:-2] or k.shape[:-1] != v.shape[:-1]:
            raise ValueError(
                f"{NAME} expects inputs of the same batch axes, and keys and values of the same "
                f"length, found inputs_q {q.shape}, inputs_k {k.shape} and inputs_v {v.shape}."
            )
        return k, v

    def _dropout_source(
        self, deterministic: bool | None, rngs: Rngs | RngStream | None
    ) -> Callable[[], jax.Array] | None:
        """Returns what to draw a key from, or None if nothing is dropped."""
        if self.dropout_rate == 0.0 or first_from(
            deterministic, self.deterministic, error_msg=missing_flag(NAME, "deterministic")
        ):
            return None
        source = self.rngs if rngs is None else rngs
        if source is None:
            raise ValueError(
                f"{NAME} with dropout_rate={self.dropout_rate} has no random stream. Make it with "
                "keep_rngs=True, or call it with layer(x, rngs=rngs); deterministic=True "
                "needs none."
            )
        if isinstance(source, Rngs):
            return source["dropout"]
        if isinstance(source, RngStream):
            return source
        raise TypeError(
            f"{NAME} expects rngs to be an nnx.Rngs or an nnx.RngStream, found {type(source)}."
        )

    def _weights_shape(self, query: jax.Array, kv_length: int) -> tuple[int, ...]:
        return (*query.shape[:-3], self.num_heads, query.shape[-3], kv_length)

    def _decoding_positions(
        self, query: jax.Array, input_positions: jax.Array | None
    ) -> dict[str, Any]:
        """Returns where the queries are in the sequence, if `attention_fn` asks for it."""
        if self.cache_index is None or not takes(self.attention_fn, "query_positions"):
            return {}
        if input_positions is not None:
            raise ValueError(
                f"{NAME} counts the positions itself while it decodes. Leave out input_positions."
            )
        return {"query_positions": self.cache_index[...] + jnp.arange(query.shape[-3])}

    def _through_cache(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Puts keys and values into the cache; returns what the queries look at, and their mask."""
        if self.cached_key is None or self.cached_value is None or self.cache_index is None:
            raise ValueError(
                f"{NAME} decodes with a cache and has none. Make one first, for inputs of shape "
                f"(..., max_length, features): layer.init_cache(shape)."
            )
        *batch, max_length, heads, size = self.cached_key.shape
        length = key.shape[-3]
        if key.shape != (*batch, length, heads, size) or length > max_length:
            raise ValueError(
                f"{NAME} has a cache of shape {self.cached_key.shape} and expects keys of shape "
                f"{(*batch, 'length', heads, size)} with a length up to {max_length}, found "
                f"{key.shape}. layer.init_cache(shape) makes another."
            )
        if query.shape[-3] != length:
            raise ValueError(
                f"{NAME} decodes self-attention: expected as many queries as keys, found "
                f"{query.shape[-3]} and {length}."
            )
        index = self.cache_index[...]
        places = index + jnp.arange(length, dtype=index.dtype)
        seen = jnp.arange(max_length, dtype=index.dtype)[None, :] <= places[:, None]
        shape = self._weights_shape(query, max_length)
        seen = aligned("mask", seen, shape, NAME)
        if mask is not None:
            seen = aligned("mask", mask, shape, NAME).astype(jnp.bool) & seen
        # The write past the end would move back, over the keys before: no silent garbage.
        query = jnp.where(index + length <= max_length, query, jnp.nan)
        for cache, new in ((self.cached_key, key), (self.cached_value, value)):
            kept = cache[...]
            cache[...] = lax.dynamic_update_slice_in_dim(kept, new.astype(kept.dtype), index, -3)
        self.cache_index[...] = index + length
        return query, self.cached_key[...], self.cached_value[...], seen


def _checked_head_dim(features: int, num_heads: int, num_kv_heads: int) -> int:
    if num_heads < 1 or features % num_heads:
        raise ValueError(
            f"{NAME} expects qkv_features to be a multiple of num_heads, found {features} and "
            f"{num_heads}."
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{NAME} expects num_heads to be a multiple of num_kv_heads, found {num_heads} and "
            f"{num_kv_heads}."
        )
    return features // num_heads

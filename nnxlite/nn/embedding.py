"""Embeddings: a learned vector for each of a number of things."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.variable import Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer

default_embed_init = initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)


class Embed(Module):
    """A table of vectors, looked up by number; also the other way round, with `attend`.

    Args:
      num_embeddings: How many vectors there are.
      features: Their size.
      dtype: The dtype of the result; by default that of the vectors.
      param_dtype: The dtype of the vectors.
      embedding_init: Initializes the vectors.
      promote_dtype: Brings vectors and queries to one dtype.
      rngs: The stream `params` initializes the vectors.
      embedding_metadata: Metadata of the vectors, such as `out_sharding`.

    Attributes:
      embedding: `Param` of shape `(num_embeddings, features)`.

    Example:
      >>> layer = nnx.Embed(10, 4, rngs=nnx.Rngs(0))
      >>> words = layer(jnp.array([[1, 2, 9]]))
      >>> words.shape, layer.attend(words).shape
      ((1, 3, 4), (1, 3, 10))
    """

    embedding: Param[jax.Array]

    def __init__(
        self,
        num_embeddings: int,
        features: int,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        embedding_init: Initializer = default_embed_init,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        embedding_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        embedding = embedding_init(rngs.params(), (num_embeddings, features), param_dtype)
        self.embedding = Param(embedding, **embedding_metadata)
        self.num_embeddings = num_embeddings
        self.features = features
        self.dtype = self.embedding.dtype if dtype is None else dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the vectors of the given numbers.

        Args:
          inputs: Integers of any shape, from 0 to `num_embeddings - 1`; negative ones count from
            the end. Others give vectors of nan, except that a single vector is that of every
            number.
          out_sharding: The sharding of the result, under a mesh with explicit axes.

        Returns:
          The shape of `inputs`, with an axis of size `features` behind.

        Raises:
          ValueError: `inputs` are not integers.
        """
        if not jnp.issubdtype(jnp.result_type(inputs), jnp.integer):
            raise ValueError(
                f"Embed expects integers, found an array of {jnp.result_type(inputs)} of shape "
                f"{jnp.shape(inputs)}."
            )
        (embedding,) = self.promote_dtype((self.embedding[...],), dtype=self.dtype, inexact=False)
        if self.num_embeddings == 1:
            return jnp.broadcast_to(
                embedding.reshape(self.features), (*jnp.shape(inputs), self.features)
            )
        if out_sharding is None:
            return _look_up(embedding, inputs)
        return jax.sharding.auto_axes(out_sharding=out_sharding)(_look_up)(embedding, inputs)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the inner product of each query with each vector.

        With it, a language model scores words by the vectors that it reads them with.

        Args:
          query: `(..., features)`.
          out_sharding: The sharding of the result, under a mesh with explicit axes.

        Returns:
          `(..., num_embeddings)`.

        Raises:
          ValueError: The last axis of `query` is not `features`.
        """
        if not jnp.ndim(query) or query.shape[-1] != self.features:
            raise ValueError(
                f"Embed({self.num_embeddings}, {self.features}) expects queries of shape "
                f"(..., {self.features}), found {jnp.shape(query)}."
            )
        query, embedding = self.promote_dtype((query, self.embedding[...]), dtype=self.dtype)
        return jnp.dot(query, embedding.T, out_sharding=out_sharding)


def _look_up(embedding: jax.Array, numbers: jax.Array) -> jax.Array:
    return jnp.take(embedding, numbers, axis=0)

"""Rotary position embedding: positions as rotations of pairs of features."""

import jax
import jax.numpy as jnp

from nnxlite._core.module import Module
from nnxlite._core.variable import Variable


class RoPE(Module):
    """Rotates pairs of features by angles that grow with the position.

    Feature `i` and feature `i + size / 2` are the pair `i` of `size / 2`; at position `p` it is
    rotated by the angle `p * theta ** (-2 i / size)`. So the product of a rotated query and a
    rotated key depends on the distance of their positions only.

    Args:
      theta: The base of the angles.
      embedding_size: Size of the last axis of the inputs. With `max_seq_len`, sines and cosines are
        computed once, here; without both, at each call.
      max_seq_len: The greatest length of the inputs.

    Attributes:
      cached_sin: `Variable` of shape `(max_seq_len, embedding_size // 2)`, or None.
      cached_cos: The same.

    Raises:
      ValueError: Only one of the sizes is given, or `embedding_size` is odd or not positive.

    Example:
      >>> import functools
      >>> rope = nnx.RoPE(embedding_size=8, max_seq_len=16)
      >>> layer = nnx.MultiHeadAttention(
      ...     num_heads=2,
      ...     in_features=16,
      ...     decode=False,
      ...     rngs=nnx.Rngs(0),
      ...     attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
      ... )
      >>> layer(jnp.ones((3, 10, 16))).shape
      (3, 10, 16)

    Source: Su et al. 2021, arXiv:2104.09864. There neighbours are the pairs; these halves are the
    same up to the order of features, which the layers before learn.
    """

    cached_sin: Variable[jax.Array] | None
    cached_cos: Variable[jax.Array] | None

    def __init__(
        self,
        theta: float = 10000.0,
        embedding_size: int | None = None,
        max_seq_len: int | None = None,
    ) -> None:
        if (embedding_size is None) != (max_seq_len is None):
            raise ValueError(
                "RoPE expects both embedding_size and max_seq_len, or neither, found "
                f"{embedding_size} and {max_seq_len}."
            )
        self.theta = theta
        self.cached_sin = self.cached_cos = None
        if embedding_size is not None and max_seq_len is not None:
            angles = self._angles(jnp.arange(max_seq_len), embedding_size)
            self.cached_sin = Variable(jnp.sin(angles))
            self.cached_cos = Variable(jnp.cos(angles))

    def __call__(self, x: jax.Array, input_positions: jax.Array | None = None) -> jax.Array:
        """Returns the rotated input.

        Args:
          x: `(..., length, size)`, of even size.
          input_positions: `(length,)` or `(..., length)`, numbers that need not be whole; by
            default 0 and on.

        Returns:
          The shape and dtype of `x`; the rotation is done in float32 at least.

        Raises:
          ValueError: `x` has an odd size, another size or a greater length than the layer was made
            for, or there is not a position for each place.
        """
        if x.ndim < 2:
            raise ValueError(f"RoPE expects inputs (..., length, size), found shape {x.shape}.")
        if input_positions is None and self.cached_sin is not None and self.cached_cos is not None:
            length = self._checked_length(x.shape, self.cached_sin.shape)
            sin, cos = self.cached_sin[...][:length], self.cached_cos[...][:length]
        else:
            angles = self._angles(_positions(input_positions, x.shape), x.shape[-1])
            sin, cos = jnp.sin(angles), jnp.cos(angles)
        with jax.numpy_dtype_promotion("standard"):
            wide = jnp.promote_types(x.dtype, jnp.float32)
        sin, cos = (_with_rank(table.astype(wide), x.ndim) for table in (sin, cos))
        first, second = jnp.split(x.astype(wide), 2, axis=-1)
        rotated = (first * cos - second * sin, second * cos + first * sin)
        return jnp.concatenate(rotated, axis=-1).astype(x.dtype)

    def _angles(self, positions: jax.Array, size: int) -> jax.Array:
        """Returns `(..., length, size // 2)`."""
        if size <= 0 or size % 2:
            raise ValueError(
                f"RoPE rotates pairs of features: expected an even size, found {size}."
            )
        frequencies = 1.0 / self.theta ** (jnp.arange(0.0, size, 2.0) / size)
        positions = positions.astype(frequencies.dtype)[..., None]
        return positions * _with_rank(frequencies, positions.ndim)

    def _checked_length(self, shape: tuple[int, ...], table: tuple[int, ...]) -> int:
        if shape[-1] != 2 * table[1] or shape[-2] > table[0]:
            raise ValueError(
                f"RoPE(embedding_size={2 * table[1]}, max_seq_len={table[0]}) expects inputs of "
                f"shape (..., length, {2 * table[1]}) and a length up to {table[0]}, found {shape}."
            )
        return shape[-2]


def _positions(given: jax.Array | None, shape: tuple[int, ...]) -> jax.Array:
    """Returns the positions of an input of that shape, `(length,)` or `(..., length)`."""
    if given is None:
        return jnp.arange(shape[-2])
    given = jnp.asarray(given)
    places = shape[:-1]
    missing = len(places) - given.ndim
    if (
        not given.ndim
        or missing < 0
        or given.shape[-1] != places[-1]
        or any(a not in (1, b) for a, b in zip(given.shape, places[missing:], strict=True))
    ):
        raise ValueError(
            f"RoPE expects input_positions that broadcast to {places}, with a position for each "
            f"of the {places[-1]} places, found shape {given.shape}."
        )
    return given


def _with_rank(array: jax.Array, rank: int) -> jax.Array:
    return jnp.reshape(array, (1,) * (rank - array.ndim) + array.shape)

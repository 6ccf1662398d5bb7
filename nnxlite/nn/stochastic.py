"""Layers that draw random numbers when they are called."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite.nn.flags import first_from, missing_flag


class Dropout(Module):
    """Sets random elements to zero and scales up the others, so that the mean is kept.

    Args:
      rate: The share of elements to drop, between 0 and 1.
      broadcast_dims: Axes along which all elements are dropped or kept together.
      deterministic: Whether to return the input as it is. The call's own argument goes first;
        `model.train()` and `model.eval()` set it.
      rng_collection: The name of the stream to use.
      rngs: Its stream of that name is forked: each layer draws its own numbers. If it is left out,
        each call needs one.

    Attributes:
      rngs: The `RngStream`, or None.

    Raises:
      TypeError: `rngs` is no stream.
      ValueError: `rate` is not between 0 and 1.

    Example:
      >>> layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
      >>> y = layer(jnp.ones((4, 8)))
      >>> sorted(set(y.ravel().tolist()))
      [0.0, 2.0]
      >>> bool((layer(jnp.ones(3), deterministic=True) == jnp.ones(3)).all())
      True

    Source: Srivastava et al. 2014, JMLR 15:1929-1958.
    """

    rngs: RngStream | None

    def __init__(
        self,
        rate: float,
        *,
        broadcast_dims: Sequence[int] = (),
        deterministic: bool | None = False,
        rng_collection: str = "dropout",
        rngs: Rngs | RngStream | None = None,
    ) -> None:
        if not 0.0 <= rate <= 1.0:
            raise ValueError(f"Dropout expects a rate between 0 and 1, found {rate}.")
        self.rate = rate
        self.broadcast_dims = broadcast_dims
        self.deterministic = deterministic
        self.rng_collection = rng_collection
        if isinstance(rngs, Rngs):
            self.rngs = rngs[rng_collection].fork()
        elif isinstance(rngs, RngStream):
            self.rngs = rngs.fork()
        elif rngs is None:
            self.rngs = None
        else:
            raise TypeError(
                f"Dropout expects rngs to be an nnx.Rngs or an nnx.RngStream, found {type(rngs)}."
            )

    def __call__(
        self,
        inputs: jax.Array,
        *,
        deterministic: bool | None = None,
        rngs: Rngs | RngStream | jax.Array | None = None,
    ) -> jax.Array:
        """Returns the input with some elements dropped.

        Args:
          inputs: Any array.
          deterministic: Goes before the attribute of that name.
          rngs: Streams, a stream or a key to draw from, in place of the layer's own.

        Raises:
          TypeError: `rngs` is none of these.
          ValueError: There is nothing to draw from, or no one said whether to drop.
        """
        if self.rate == 0.0 or first_from(
            deterministic,
            self.deterministic,
            error_msg=missing_flag("Dropout", "deterministic"),
        ):
            return inputs
        if self.rate == 1.0:
            return jnp.zeros_like(inputs)  # the scale would be infinite
        source = first_from(
            rngs,
            self.rngs,
            error_msg="Dropout has no random stream. Make it with nnx.Dropout(..., rngs=rngs), or "
            "call it with layer(x, rngs=rngs); deterministic=True needs none.",
        )
        keep = 1.0 - self.rate
        inputs = jnp.asarray(inputs)
        shape = list(inputs.shape)
        for axis in self.broadcast_dims:
            shape[axis] = 1
        mask = jax.random.bernoulli(self._next_key(source), keep, tuple(shape), **_sharded(inputs))
        scaled = inputs / keep
        return lax.select(jnp.broadcast_to(mask, inputs.shape), scaled, jnp.zeros_like(scaled))

    def set_view(self, deterministic: bool | None = None) -> None:
        """Sets the flag of this layer, for `nnx.view`.

        Args:
          deterministic: Whether to return the input as it is; None changes nothing.
        """
        if deterministic is not None:
            self.deterministic = deterministic

    def _next_key(self, source: Any) -> ArrayLike:
        if isinstance(source, Rngs):
            return source[self.rng_collection]()
        if isinstance(source, RngStream):
            return source()
        if isinstance(source, jax.Array):
            return source
        raise TypeError(
            "Dropout expects rngs to be an nnx.Rngs, an nnx.RngStream or a key, found "
            f"{type(source)}."
        )


def _sharded(inputs: jax.Array) -> dict[str, Any]:
    """Returns the option that draws the mask where the input lives, under explicit mesh axes."""
    sharding = jax.typeof(inputs).sharding
    return {"out_sharding": sharding} if sharding.mesh.are_all_axes_explicit else {}

"""PReLU: an activation with a parameter, which makes it a layer."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.variable import Param
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype


class PReLU(Module):
    """The parametric rectified linear unit: `x` where it is positive, elsewhere a multiple of it.

    Args:
      negative_slope_init: The factor for negative inputs, at first.
      dtype: The dtype to compute in; by default that of the input, whatever the parameter's.
      param_dtype: The dtype of the parameter.
      promote_dtype: Brings `(inputs, negative_slope)` to `dtype`, if that is given.
      negative_slope_metadata: Metadata of the parameter.

    Attributes:
      negative_slope: `Param` of shape `()`.

    Example:
      >>> layer = nnx.PReLU(0.5)
      >>> layer(jnp.array([-2.0, 3.0])).tolist()
      [-1.0, 3.0]

    Source: He et al. 2015, arXiv:1502.01852; one slope for all channels.
    """

    negative_slope: Param[jax.Array]

    def __init__(
        self,
        negative_slope_init: float = 0.01,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        promote_dtype: PromoteDtype = promote_dtype,
        negative_slope_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        slope = jnp.asarray(negative_slope_init, param_dtype)
        self.negative_slope = Param(slope, **negative_slope_metadata)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.promote_dtype = promote_dtype

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the activation, of the shape of `inputs`.

        Raises:
          TypeError: `inputs` are integers, and no `dtype` is given: the slope would round to zero.
        """
        slope = self.negative_slope[...]
        if self.dtype is not None:
            inputs, slope = self.promote_dtype((inputs, slope), dtype=self.dtype)
        elif not jnp.issubdtype(inputs.dtype, jnp.floating):
            raise TypeError(
                f"PReLU expects floating inputs, found {inputs.dtype}{list(inputs.shape)}. "
                "Convert them, or make it with nnx.PReLU(dtype=jnp.float32)."
            )
        slope = slope.astype(inputs.dtype)
        return jnp.where(inputs >= 0, inputs, slope * inputs)

"""Normalization of each example by its own statistics over the features.

`LayerNorm` subtracts the mean and divides by the standard deviation; `RMSNorm` divides by the root
of the mean square, and shifts nothing.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.variable import Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.statistics import (
    Axes,
    check_features,
    normalize_itself,
    scale_and_bias,
    value_or_none,
)


class LayerNorm(Module):
    """Normalizes each example by its own mean and variance over the features.

    Args:
      num_features: Size of the feature axis; the product of their sizes where there are several.
      epsilon: Added to the variance, in the squared units of the input.
      dtype: The dtype of the result; by default what input and parameters promote to.
      param_dtype: The dtype of scale and bias.
      use_bias: Whether a bias is added.
      use_scale: Whether the result is scaled; of no use if a linear layer follows at once.
      bias_init: Initializes the bias.
      scale_init: Initializes the scale.
      reduction_axes: The axes over which mean and variance are taken.
      feature_axes: The axes along which scale and bias differ.
      axis_name: A mapped axis (`nnx.vmap`, `nnx.shard_map`) to average the statistics over too.
      axis_index_groups: Groups of indices of that axis to average over, as in `jax.lax.psum`.
      use_fast_variance: Whether the variance is mean of squares minus square of mean: one pass, but
        less exact where the mean is large.
      promote_dtype: Brings `(x, scale, bias)` to one dtype.
      rngs: The stream `params` initializes scale and bias, in this order.
      bias_metadata: Metadata of the bias.
      scale_metadata: Metadata of the scale.

    Attributes:
      scale: `Param` of shape `(num_features,)`, or None.
      bias: The same.

    Example:
      >>> layer = nnx.LayerNorm(4, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[1.0, 1.0, 3.0, 3.0]])).tolist()
      [[-1.0, -1.0, 1.0, 1.0]]

    The formula is `(x - mean) / sqrt(var + epsilon) * scale + bias`.

    Source: Ba, Kiros and Hinton 2016, arXiv:1607.06450.
    """

    scale: Param[jax.Array] | None
    bias: Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.scale, self.bias = scale_and_bias(
            num_features,
            param_dtype,
            rngs,
            (scale_init, scale_metadata) if use_scale else None,
            (bias_init, bias_metadata) if use_bias else None,
        )
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: jax.Array, *, mask: ArrayLike | None = None) -> jax.Array:
        """Returns the normalized input.

        Args:
          x: Of size `num_features` along `feature_axes`.
          mask: Which elements the statistics count, broadcastable to `x`.

        Returns:
          The shape of `x`.

        Raises:
          ValueError: `x` has not that size, or lacks an axis.
        """
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        check_features(self, x.shape, self.feature_axes, self.reduction_axes)
        return normalize_itself(self, x, scale, bias, self.reduction_axes, self.feature_axes, mask)


class RMSNorm(Module):
    """Divides each example by the root of its mean square over the features.

    Args:
      num_features: Size of the feature axis; the product of their sizes where there are several.
      epsilon: Added to the mean square, in the squared units of the input.
      dtype: The dtype of the result; by default what input and scale promote to.
      param_dtype: The dtype of the scale.
      use_scale: Whether the result is scaled; of no use if a linear layer follows at once.
      scale_init: Initializes the scale.
      reduction_axes: The axes over which the mean square is taken.
      feature_axes: The axes along which the scale differs.
      axis_name: A mapped axis (`nnx.vmap`, `nnx.shard_map`) to average the mean square over too.
      axis_index_groups: Groups of indices of that axis to average over, as in `jax.lax.psum`.
      use_fast_variance: Makes no difference, as no mean is subtracted; here for likeness with
        `LayerNorm`.
      promote_dtype: Brings `(x, scale)` to one dtype.
      rngs: The stream `params` initializes the scale.
      scale_metadata: Metadata of the scale.

    Attributes:
      scale: `Param` of shape `(num_features,)`, or None.

    Example:
      >>> layer = nnx.RMSNorm(4, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[2.0, -2.0, 2.0, 2.0]])).tolist()
      [[1.0, -1.0, 1.0, 1.0]]

    The formula is `x / sqrt(mean(x ** 2) + epsilon) * scale`.

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """

    scale: Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes = -1,
        feature_axes: Axes = -1,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        recipe = (scale_init, scale_metadata) if use_scale else None
        self.scale, _ = scale_and_bias(num_features, param_dtype, rngs, recipe, None)
        self.num_features = num_features
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: jax.Array, mask: ArrayLike | None = None) -> jax.Array:
        """Returns the normalized input.

        Args:
          x: Of size `num_features` along `feature_axes`.
          mask: Which elements the mean square counts, broadcastable to `x`.

        Returns:
          The shape of `x`.

        Raises:
          ValueError: `x` has not that size, or lacks an axis.
        """
        x, scale = self.promote_dtype((x, value_or_none(self.scale)), dtype=self.dtype)
        check_features(self, x.shape, self.feature_axes, self.reduction_axes)
        return normalize_itself(
            self, x, scale, None, self.reduction_axes, self.feature_axes, mask, use_mean=False
        )

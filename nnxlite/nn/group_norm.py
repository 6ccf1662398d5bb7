"""Normalization of each example by the statistics of its channels, one by one or in groups.

The first axis is that of the batch and the last one that of the channels; the statistics are taken
over all between.
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
    canonicalize_axes,
    check_features,
    compute_stats,
    normalize,
    normalize_itself,
    scale_and_bias,
    value_or_none,
)


class GroupNorm(Module):
    """Normalizes each example by mean and variance over each group of channels.

    Args:
      num_features: The number of channels.
      num_groups: The number of groups of neighbouring channels.
      group_size: The channels of a group; then `num_groups` has to be None.
      epsilon: Added to the variance, in the squared units of the input.
      dtype: The dtype of the result; by default what input and parameters promote to.
      param_dtype: The dtype of scale and bias.
      use_bias: Whether a bias is added.
      use_scale: Whether the result is scaled; of no use if a linear layer follows at once.
      bias_init: Initializes the bias.
      scale_init: Initializes the scale.
      reduction_axes: The axes over which mean and variance are taken, the last one among them; by
        default all but the first.
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

    Raises:
      ValueError: The groups do not divide the channels, or not exactly one of `num_groups` and
        `group_size` is given.

    Example:
      >>> layer = nnx.GroupNorm(4, num_groups=2, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[1.0, 3.0, 10.0, 30.0]])).tolist()
      [[-1.0, 1.0, -1.0, 1.0]]

    The formula is `(x - mean) / sqrt(var + epsilon) * scale + bias`, where mean and variance are
    those of the group of the element.

    Source: Wu and He 2018, arXiv:1803.08494.
    """

    scale: Param[jax.Array] | None
    bias: Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        num_groups: int | None = 32,
        group_size: int | None = None,
        *,
        epsilon: float = 1e-6,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        reduction_axes: Axes | None = None,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.num_groups, self.group_size = _groups(num_features, num_groups, group_size)
        self.scale, self.bias = scale_and_bias(
            num_features,
            param_dtype,
            rngs,
            (scale_init, scale_metadata) if use_scale else None,
            (bias_init, bias_metadata) if use_bias else None,
        )
        self.num_features = num_features
        self.feature_axis = -1
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.reduction_axes = reduction_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: jax.Array, *, mask: ArrayLike | None = None) -> jax.Array:
        """Returns the normalized input.

        Args:
          x: `(batch, ..., num_features)`.
          mask: Which elements the statistics count, broadcastable to `x`.

        Returns:
          The shape of `x`.

        Raises:
          ValueError: `x` has other channels, lacks an axis, or the last one is not reduced.
        """
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        others = self._other_reduced_axes(x.shape)
        in_groups = (*x.shape[:-1], self.num_groups, self.group_size)
        if mask is not None:
            mask = jnp.broadcast_to(jnp.asarray(mask), x.shape).reshape(in_groups)
        mean, var = compute_stats(
            x.reshape(in_groups),
            (*others, x.ndim),
            dtype=self.dtype,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            use_fast_variance=self.use_fast_variance,
            mask=mask,
        )
        mean = jnp.repeat(mean, self.group_size, axis=-1)  # (..., groups) to (..., features)
        var = jnp.repeat(var, self.group_size, axis=-1)
        return normalize(
            x, mean, var, scale, bias, others, self.feature_axis, self.dtype, self.epsilon
        )

    def _other_reduced_axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the axes of the statistics without that of the channels."""
        rank = len(shape)
        axes = (*range(1, rank - 1), -1) if self.reduction_axes is None else self.reduction_axes
        check_features(self, shape, self.feature_axis, axes)
        reduced = canonicalize_axes(rank, axes)
        if rank - 1 not in reduced:
            raise ValueError(
                f"GroupNorm({self.num_features}) found reduction axes {self.reduction_axes} for an "
                f"input of shape {shape}. Expected the last axis, that of the channels, among them."
            )
        return tuple(sorted(axis for axis in reduced if axis != rank - 1))


class InstanceNorm(Module):
    """Normalizes each channel of each example by its own mean and variance.

    Args:
      num_features: The number of channels; the product of the sizes where they have several axes.
      epsilon: Added to the variance, in the squared units of the input.
      dtype: The dtype of the result; by default what input and parameters promote to.
      param_dtype: The dtype of scale and bias.
      use_bias: Whether a bias is added.
      use_scale: Whether the result is scaled; of no use if a linear layer follows at once.
      bias_init: Initializes the bias.
      scale_init: Initializes the scale.
      feature_axes: The axes of the channels; mean and variance are taken over all others but the
        first.
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
      >>> layer = nnx.InstanceNorm(2, epsilon=0.0, rngs=nnx.Rngs(0))
      >>> layer(jnp.array([[[1.0, 10.0], [3.0, 30.0]]])).tolist()
      [[[-1.0, -1.0], [1.0, 1.0]]]

    The formula is `(x - mean) / sqrt(var + epsilon) * scale + bias`, where mean and variance are
    those of the channel of the example.

    Source: Ulyanov, Vedaldi and Lempitsky 2016, arXiv:1607.08022.
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
        self.feature_axes = feature_axes
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(self, x: jax.Array, *, mask: ArrayLike | None = None) -> jax.Array:
        """Returns the normalized input.

        Args:
          x: `(batch, ...)`, of size `num_features` along `feature_axes`.
          mask: Which elements the statistics count, broadcastable to `x`.

        Returns:
          The shape of `x`.

        Raises:
          ValueError: `x` has not that size, lacks an axis, or the first one is that of channels.
        """
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        features = canonicalize_axes(x.ndim, self.feature_axes)
        reduced = tuple(axis for axis in range(1, x.ndim) if axis not in features)
        check_features(self, x.shape, self.feature_axes, reduced)
        if 0 in features:
            raise ValueError(
                f"InstanceNorm({self.num_features}) found feature axes {self.feature_axes} for an "
                f"input of shape {x.shape}. The first axis is that of the batch; expected others."
            )
        return normalize_itself(self, x, scale, bias, reduced, features, mask)


def _groups(num_features: int, num_groups: int | None, group_size: int | None) -> tuple[int, int]:
    """Returns the number of groups and their size."""
    if (num_groups is None) == (group_size is None):
        raise ValueError(
            f"GroupNorm({num_features}) found num_groups={num_groups} and group_size={group_size}. "
            "Expected one of them: with a group_size, give num_groups=None."
        )
    name, given = ("num_groups", num_groups) if group_size is None else ("group_size", group_size)
    if not isinstance(given, int) or given <= 0 or num_features % given:
        raise ValueError(
            f"GroupNorm({num_features}) found {name}={given}. Expected a positive number that "
            f"divides the {num_features} channels."
        )
    other = num_features // given
    return (given, other) if group_size is None else (other, given)

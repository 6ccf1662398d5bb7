"""Normalization: subtract a mean, divide by a standard deviation, scale and shift.

Statistics are computed in float32 at least, whatever the dtype of the input: 256 squared is already
infinite in float16.
"""

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.variable import BatchStat, Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, canonicalize_dtype, promote_dtype
from nnxlite.nn.flags import first_from, missing_flag
from nnxlite.nn.initializers import Initializer

Axes: TypeAlias = int | Iterable[int]


class BatchNorm(Module):
    """Normalizes each feature by the statistics of the batch, or by their running average.

    Args:
      num_features: Size of the feature axis.
      use_running_average: Whether to normalize by the running average, and leave it as it is. The
        call's own argument goes first; `model.train()` and `model.eval()` set it.
      axis: The feature axis of the input; statistics are taken over all others.
      momentum: How much of the running average is kept at each call.
      epsilon: Added to the variance, in the squared units of the input.
      dtype: The dtype of the result; by default what input and parameters promote to.
      param_dtype: The dtype of scale and bias.
      use_bias: Whether a bias is added.
      use_scale: Whether the result is scaled; of no use if a linear layer follows at once.
      bias_init: Initializes the bias.
      scale_init: Initializes the scale.
      axis_name: A mapped axis (`nnx.vmap`, `nnx.shard_map`) to average the statistics over too.
      axis_index_groups: Groups of indices of that axis to average over, as in `jax.lax.psum`.
      use_fast_variance: Whether the variance is mean of squares minus square of mean: one pass, but
        less exact where the mean is large.
      promote_dtype: Brings `(x, mean, var, scale, bias)` to one dtype.
      rngs: The stream `params` initializes scale and bias, in this order.
      bias_metadata: Metadata of the bias.
      scale_metadata: Metadata of the scale.

    Attributes:
      mean: `BatchStat` of shape `(num_features,)`, float32: the running mean.
      var: The same for the running variance, of the batch as it is (not the unbiased estimate).
      scale: `Param` of shape `(num_features,)`, or None.
      bias: The same.

    Example:
      >>> layer = nnx.BatchNorm(3, momentum=0.5, rngs=nnx.Rngs(0))
      >>> y = layer(jnp.full((8, 3), 2.0))
      >>> layer.mean[...].tolist(), layer.var[...].tolist()
      ([1.0, 1.0, 1.0], [0.5, 0.5, 0.5])

    Source: Ioffe and Szegedy 2015, arXiv:1502.03167.
    """

    mean: BatchStat[jax.Array]
    var: BatchStat[jax.Array]
    scale: Param[jax.Array] | None
    bias: Param[jax.Array] | None

    def __init__(
        self,
        num_features: int,
        *,
        use_running_average: bool | None = False,
        axis: int = -1,
        momentum: float = 0.99,
        epsilon: float = 1e-5,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        use_bias: bool = True,
        use_scale: bool = True,
        bias_init: Initializer = initializers.zeros,
        scale_init: Initializer = initializers.ones,
        axis_name: str | None = None,
        axis_index_groups: Any = None,
        use_fast_variance: bool = True,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
        scale_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        shape = (num_features,)
        self.mean = BatchStat(jnp.zeros(shape, jnp.float32))
        self.var = BatchStat(jnp.ones(shape, jnp.float32))
        self.scale = self.bias = None
        if use_scale:
            scale = scale_init(rngs.params(), shape, param_dtype)
            self.scale = Param(scale, **scale_metadata)
        if use_bias:
            self.bias = Param(bias_init(rngs.params(), shape, param_dtype), **bias_metadata)
        self.num_features = num_features
        self.use_running_average = use_running_average
        self.axis = axis
        self.momentum = momentum
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.use_bias = use_bias
        self.use_scale = use_scale
        self.axis_name = axis_name
        self.axis_index_groups = axis_index_groups
        self.use_fast_variance = use_fast_variance
        self.promote_dtype = promote_dtype

    def __call__(
        self,
        x: jax.Array,
        use_running_average: bool | None = None,
        *,
        mask: ArrayLike | None = None,
    ) -> jax.Array:
        """Returns the normalized input, and updates the running average unless told to use it.

        Args:
          x: Of size `num_features` along `axis`.
          use_running_average: Goes before the attribute of that name.
          mask: Which elements the statistics count, broadcastable to `x`.

        Returns:
          The shape of `x`.

        Raises:
          ValueError: `x` does not have `num_features`, or no one said which statistics to use.
        """
        use_average = first_from(
            use_running_average,
            self.use_running_average,
            error_msg=missing_flag("BatchNorm", "use_running_average"),
        )
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, mean, var, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype
        )
        self._check_features(x.shape)
        (feature_axis,) = _canonicalize_axes(x.ndim, self.axis)
        reduction_axes = tuple(i for i in range(x.ndim) if i != feature_axis)
        if not use_average:
            mean, var = _compute_stats(
                x,
                reduction_axes,
                dtype=self.dtype,
                axis_name=self.axis_name,
                axis_index_groups=self.axis_index_groups,
                use_fast_variance=self.use_fast_variance,
                mask=mask,
            )
            self._move_average(self.mean, mean)
            self._move_average(self.var, var)
        return _normalize(
            x, mean, var, scale, bias, reduction_axes, feature_axis, self.dtype, self.epsilon
        )

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets the flag of this layer, for `nnx.view`.

        Args:
          use_running_average: Whether to normalize by the running average; None changes nothing.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def _check_features(self, shape: tuple[int, ...]) -> None:
        if not -len(shape) <= self.axis < len(shape) or shape[self.axis] != self.num_features:
            raise ValueError(
                f"BatchNorm({self.num_features}) expects inputs of size {self.num_features} along "
                f"axis {self.axis}, found shape {shape}."
            )

    def _move_average(self, average: BatchStat[jax.Array], new: jax.Array) -> None:
        moved = self.momentum * average[...] + (1 - self.momentum) * new
        average[...] = lax.stop_gradient(moved)


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
        shape = (num_features,)
        self.scale = self.bias = None
        if use_scale:
            scale = scale_init(rngs.params(), shape, param_dtype)
            self.scale = Param(scale, **scale_metadata)
        if use_bias:
            self.bias = Param(bias_init(rngs.params(), shape, param_dtype), **bias_metadata)
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
        scale = None if self.scale is None else self.scale[...]
        bias = None if self.bias is None else self.bias[...]
        x, scale, bias = self.promote_dtype((x, scale, bias), dtype=self.dtype)
        self._check_features(x.shape)
        mean, var = _compute_stats(
            x,
            self.reduction_axes,
            dtype=self.dtype,
            axis_name=self.axis_name,
            axis_index_groups=self.axis_index_groups,
            use_fast_variance=self.use_fast_variance,
            mask=mask,
        )
        return _normalize(
            x,
            mean,
            var,
            scale,
            bias,
            self.reduction_axes,
            self.feature_axes,
            self.dtype,
            self.epsilon,
        )

    def _check_features(self, shape: tuple[int, ...]) -> None:
        features = _canonicalize_axes(len(shape), self.feature_axes)
        reduced = _canonicalize_axes(len(shape), self.reduction_axes)
        if any(not 0 <= axis < len(shape) for axis in (*features, *reduced)):
            raise ValueError(
                f"LayerNorm({self.num_features}) has reduction axes {self.reduction_axes} and "
                f"feature axes {self.feature_axes}, found an input of shape {shape} without them."
            )
        size = math.prod(shape[axis] for axis in features)
        if size != self.num_features:
            raise ValueError(
                f"LayerNorm({self.num_features}) expects inputs of size {self.num_features} along "
                f"axes {self.feature_axes}, found shape {shape}."
            )


def _canonicalize_axes(rank: int, axes: Axes) -> tuple[int, ...]:
    """Returns the axes as distinct numbers that count from the start."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple({axis + rank if axis < 0 else axis for axis in given})


def _compute_stats(
    x: jax.Array,
    axes: Axes,
    dtype: DTypeLike | None,
    axis_name: str | None = None,
    axis_index_groups: Any = None,
    use_mean: bool = True,
    use_fast_variance: bool = True,
    mask: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns mean and variance of `x` over `axes`.

    Args:
      x: Any array.
      axes: The axes to reduce.
      dtype: The least precise dtype to compute in; float32 is the floor, and the default is that
        of `x`.
      axis_name: A mapped axis to average over too.
      axis_index_groups: Groups of indices of it.
      use_mean: If False, the mean counts as zero and the variance is the mean square.
      use_fast_variance: See `BatchNorm`.
      mask: Which elements count, broadcastable to `x`.

    Returns:
      Both of the shape of `x` without `axes`; the variance is never negative.
    """
    with jax.numpy_dtype_promotion("standard"):
        dtype = jnp.promote_types(x.dtype if dtype is None else dtype, jnp.float32)
    x = jnp.asarray(x, dtype)
    axes = _canonicalize_axes(x.ndim, axes)
    if mask is not None:
        mask = jnp.broadcast_to(jnp.asarray(mask), x.shape)

    def means(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        local = tuple(array.mean(axes, where=mask) for array in arrays)
        if axis_name is None:
            return local
        # One collective for all of them.
        return tuple(lax.pmean(jnp.stack(local), axis_name, axis_index_groups=axis_index_groups))

    if not use_mean:
        (var,) = means(_squared(x))
        return jnp.zeros_like(var), var
    if not use_fast_variance:
        (mean,) = means(x)
        (var,) = means(_squared(x - jnp.expand_dims(mean, axes)))
        return mean, var
    mean, mean_of_squares = means(x, _squared(x))
    return mean, jnp.maximum(0.0, mean_of_squares - _squared(mean))  # rounding may go below zero


def _normalize(
    x: jax.Array,
    mean: jax.Array,
    var: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    reduction_axes: Axes,
    feature_axes: Axes,
    dtype: DTypeLike | None,
    epsilon: float,
) -> jax.Array:
    """Returns `(x - mean) / sqrt(var + epsilon) * scale + bias`.

    Args:
      x: Any array.
      mean: Of the shape of `x` without `reduction_axes`.
      var: The same.
      scale: Of the shape of the feature axes, or None.
      bias: The same.
      reduction_axes: The axes over which mean and variance were taken.
      feature_axes: The axes of scale and bias.
      dtype: The dtype of the result; by default what `x`, `scale` and `bias` promote to.
      epsilon: Added to the variance.
    """
    reduced = _canonicalize_axes(x.ndim, reduction_axes)
    features = _canonicalize_axes(x.ndim, feature_axes)
    stats_shape = [1 if axis in reduced else size for axis, size in enumerate(x.shape)]
    feature_shape = [size if axis in features else 1 for axis, size in enumerate(x.shape)]
    dtype = canonicalize_dtype(x, scale, bias, dtype=dtype)
    with jax.numpy_dtype_promotion("standard"):  # float32 statistics beside a half-precision input
        factor = lax.rsqrt(var.reshape(stats_shape) + epsilon)
        if scale is not None:
            factor = factor * scale.reshape(feature_shape)
        y = (x - mean.reshape(stats_shape)) * factor
        if bias is not None:
            y = y + bias.reshape(feature_shape)
    return jnp.asarray(y, dtype)


def _squared(x: jax.Array) -> jax.Array:
    """Returns the square of the absolute value, real also for complex numbers."""
    if jnp.iscomplexobj(x):
        return lax.square(lax.real(x)) + lax.square(lax.imag(x))
    return lax.square(x)

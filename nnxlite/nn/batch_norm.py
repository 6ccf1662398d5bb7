"""Batch normalization: each feature is normalized by its statistics over a batch.

In training the statistics are those of the batch, and a running average of them is kept; that is
what an evaluation uses.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.variable import BatchStat, Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.flags import first_from, missing_flag
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.statistics import (
    canonicalize_axes,
    compute_stats,
    normalize,
    scale_and_bias,
    value_or_none,
)


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

    The formula is `(x - mean) / sqrt(var + epsilon) * scale + bias`.

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
        self.mean = BatchStat(jnp.zeros((num_features,), jnp.float32))
        self.var = BatchStat(jnp.ones((num_features,), jnp.float32))
        self.scale, self.bias = scale_and_bias(
            num_features,
            param_dtype,
            rngs,
            (scale_init, scale_metadata) if use_scale else None,
            (bias_init, bias_metadata) if use_bias else None,
        )
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
        scale, bias = value_or_none(self.scale), value_or_none(self.bias)
        x, mean, var, scale, bias = self.promote_dtype(
            (x, self.mean[...], self.var[...], scale, bias), dtype=self.dtype
        )
        self._check_features(x.shape)
        (feature_axis,) = canonicalize_axes(x.ndim, self.axis)
        reduction_axes = tuple(i for i in range(x.ndim) if i != feature_axis)
        if not use_average:
            mean, var = compute_stats(
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
        return normalize(
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

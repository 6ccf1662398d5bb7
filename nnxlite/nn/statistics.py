"""What all normalizing layers share: the statistics, their use, and the learned scale and bias.

Statistics are computed in float32 at least, whatever the dtype of the input: 256 squared is already
infinite in float16.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from nnxlite._core.rngs import Rngs
from nnxlite._core.variable import Param
from nnxlite.nn.dtypes import canonicalize_dtype
from nnxlite.nn.initializers import Initializer

Axes: TypeAlias = int | Iterable[int]
Recipe: TypeAlias = tuple[Initializer, Mapping[str, Any]]  # of a parameter: initializer, metadata


class Normalizing(Protocol):
    """A layer that normalizes its input by statistics of that input alone."""

    num_features: int
    epsilon: float
    dtype: DTypeLike | None
    axis_name: str | None
    axis_index_groups: Any
    use_fast_variance: bool


def scale_and_bias(
    num_features: int,
    param_dtype: DTypeLike,
    rngs: Rngs,
    scale: Recipe | None,
    bias: Recipe | None,
) -> tuple[Param[jax.Array] | None, Param[jax.Array] | None]:
    """Makes the parameters that have a recipe; each draws a key of the stream `params`."""

    def made(recipe: Recipe | None) -> Param[jax.Array] | None:
        if recipe is None:
            return None
        init, metadata = recipe
        return Param(init(rngs.params(), (num_features,), param_dtype), **metadata)

    return made(scale), made(bias)


def value_or_none(param: Param[jax.Array] | None) -> jax.Array | None:
    """Returns the value of a parameter that a layer may lack."""
    return None if param is None else param[...]


def normalize_itself(
    layer: Normalizing,
    x: jax.Array,
    scale: jax.Array | None,
    bias: jax.Array | None,
    reduction_axes: Axes,
    feature_axes: Axes,
    mask: ArrayLike | None,
    use_mean: bool = True,
) -> jax.Array:
    """Returns `x` normalized by its own statistics, with the options of the layer."""
    mean, var = compute_stats(
        x,
        reduction_axes,
        dtype=layer.dtype,
        axis_name=layer.axis_name,
        axis_index_groups=layer.axis_index_groups,
        use_mean=use_mean,
        use_fast_variance=layer.use_fast_variance,
        mask=mask,
    )
    return normalize(
        x, mean, var, scale, bias, reduction_axes, feature_axes, layer.dtype, layer.epsilon
    )


def check_features(
    layer: Normalizing, shape: tuple[int, ...], feature_axes: Axes, reduction_axes: Axes
) -> None:
    """Checks an input against the axes and the number of features of a layer.

    Raises:
      ValueError: The input lacks one of the axes, or has another size along the feature axes.
    """
    name = f"{type(layer).__name__}({layer.num_features})"
    features = canonicalize_axes(len(shape), feature_axes)
    reduced = canonicalize_axes(len(shape), reduction_axes)
    if any(not 0 <= axis < len(shape) for axis in (*features, *reduced)):
        raise ValueError(
            f"{name} has reduction axes {reduction_axes} and feature axes {feature_axes}, found an "
            f"input of shape {shape} without them."
        )
    if math.prod(shape[axis] for axis in features) != layer.num_features:
        raise ValueError(
            f"{name} expects inputs of size {layer.num_features} along axes {feature_axes}, found "
            f"shape {shape}."
        )


def canonicalize_axes(rank: int, axes: Axes) -> tuple[int, ...]:
    """Returns the axes as distinct numbers that count from the start."""
    given = axes if isinstance(axes, Iterable) else (axes,)
    return tuple({axis + rank if axis < 0 else axis for axis in given})


def compute_stats(
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
    axes = canonicalize_axes(x.ndim, axes)
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


def normalize(
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
    reduced = canonicalize_axes(x.ndim, reduction_axes)
    features = canonicalize_axes(x.ndim, feature_axes)
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

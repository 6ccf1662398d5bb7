"""Weight normalization: the length of each weight vector as a parameter of its own."""

from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import All, Filter, OfType, PathContains, to_predicate
from nnxlite._core.iterate import iter_graph
from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.stand_in import standing_in
from nnxlite._core.variable import Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.statistics import Axes, canonicalize_axes


class WeightNorm(Module):
    """Calls a layer with each of its kernels `v` replaced by `scale * v / |v|`.

    The kernels themselves stay as they are, also after calls: they are trained, as in the paper,
    through the division.

    Args:
      layer_instance: The layer.
      feature_axes: The axes of a kernel along which the scale differs; the norm is taken over all
        others. None takes the norm of the whole kernel.
      use_scale: Whether there is a scale; without one the norms are 1.
      scale_init: Initializes the scales.
      epsilon: Added to the squared norm.
      dtype: The dtype of the normalized kernel; by default what kernel and scale promote to.
      param_dtype: The dtype of the scales.
      variable_filter: Which Params of the layer are normalized, by their paths in it.
      promote_dtype: Brings `(kernel, scale)` to one dtype.
      rngs: The stream `params` initializes the scales; `ones` and `zeros` draw no key.

    Attributes:
      layer_instance: The layer.
      scales: Nested dicts with the path of each kernel, which hold a `Param` of the sizes of the
        feature axes; None without scales.

    Example:
      >>> layer = nnx.WeightNorm(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((8, 3))).shape, layer.scales["kernel"].shape
      ((8, 4), (4,))

    The formula is `w = scale * v / sqrt(sum(v ** 2) + epsilon)`.

    Source: Salimans and Kingma 2016, arXiv:1602.07868; the epsilon is that of flax.nnx.
    """

    layer_instance: Callable[..., Any]
    scales: dict[Any, Any] | None

    def __init__(
        self,
        layer_instance: Callable[..., Any],
        *,
        feature_axes: Axes | None = -1,
        use_scale: bool = True,
        scale_init: Initializer = initializers.ones,
        epsilon: float = 1e-12,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        variable_filter: Filter = PathContains("kernel"),  # noqa: B008  # immutable
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
    ) -> None:
        self.layer_instance = layer_instance
        self.feature_axes = () if feature_axes is None else feature_axes
        self.use_scale = use_scale
        self.scale_init = scale_init
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.variable_filter = to_predicate(variable_filter)
        self.promote_dtype = promote_dtype
        self.scales = None
        if not use_scale:
            return
        # What follows then draws the same keys as in flax.nnx, which draws none here.
        needs_key = scale_init not in (initializers.ones, initializers.zeros)
        scales: dict[Any, Any] = {}
        for path, kernel in weights_of(layer_instance, self.variable_filter):
            shape = tuple(kernel.shape[axis] for axis in self._axes(path, kernel.shape))
            key = rngs.params() if needs_key else cast(jax.Array, None)
            put_at(scales, path, Param(scale_init(key, shape, param_dtype)))
        self.scales = scales

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> Any:
        """Returns what the layer makes of `x` with normalized kernels.

        Args:
          x: The input of the layer.
          *args: Further arguments of the layer.
          **kwargs: The same.

        Raises:
          StructureError: The layer has a kernel that it did not have when this was made.
          ValueError: A kernel lacks one of the feature axes.
        """
        with standing_in(self._all_normalized, "WeightNorm"):
            return self.layer_instance(x, *args, **kwargs)

    def _all_normalized(self) -> list[tuple[Param[Any], jax.Array]]:
        return [
            (kernel, self._normalized(path, kernel.get_raw_value()))
            for path, kernel in weights_of(self.layer_instance, self.variable_filter)
        ]

    def _normalized(self, path: Path, kernel: jax.Array) -> jax.Array:
        axes = self._axes(path, kernel.shape)
        scale = None
        if self.scales is not None:
            scale = get_at(self.scales, path, "WeightNorm")[...]
        kernel, scale = self.promote_dtype((kernel, scale), dtype=self.dtype)
        others = tuple(axis for axis in range(kernel.ndim) if axis not in axes)
        unit = l2_normalized(kernel, self.epsilon, others)
        if scale is None:
            return unit
        return unit * scale.reshape([n if i in axes else 1 for i, n in enumerate(kernel.shape)])

    def _axes(self, path: Path, shape: tuple[int, ...]) -> tuple[int, ...]:
        axes = canonicalize_axes(len(shape), self.feature_axes)
        if any(not 0 <= axis < len(shape) for axis in axes):
            raise ValueError(
                f"WeightNorm has feature axes {self.feature_axes}, found "
                f"{format_path(path, 'layer_instance')} of shape {shape} without them."
            )
        return axes


def weights_of(layer: Any, filter: Filter = ...) -> Iterator[tuple[Path, Param[Any]]]:
    """Yields path and Variable of each Param of a layer that matches, in the order of a State."""
    wanted = to_predicate(All(OfType(Param), filter))
    return ((path, value) for path, value in iter_graph(layer) if wanted(path, value))


def l2_normalized(x: jax.Array, epsilon: float, axis: tuple[int, ...] | None = None) -> jax.Array:
    """Returns `x / sqrt(sum(x ** 2) + epsilon)`, computed in float32 at least."""
    with jax.numpy_dtype_promotion("standard"):
        exact = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    squares = (exact * exact).sum(axis, keepdims=True)
    return (exact * lax.rsqrt(squares + epsilon)).astype(x.dtype)


def put_at(tree: dict[Any, Any], path: Path, value: Any) -> None:
    """Puts a value into nested dicts, and makes those that are not there."""
    *outer, last = path
    for key in outer:
        tree = tree.setdefault(key, {})
    tree[last] = value


def get_at(tree: dict[Any, Any], path: Path, wrapper: str) -> Any:
    """Returns what `put_at` put there.

    Raises:
      StructureError: Nothing was.
    """
    found: Any = tree
    for key in path:
        if not isinstance(found, dict) or key not in found:
            raise StructureError(
                f"{wrapper} knows no weight {format_path(path, 'layer_instance')}: the layer got "
                f"it after {wrapper} was made. Make the layer whole first."
            )
        found = found[key]
    return found

"""Spectral normalization: weight matrices that stretch no vector."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nnxlite._core.errors import Path, format_path
from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.stand_in import standing_in
from nnxlite._core.variable import BatchStat, Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import promote_dtype
from nnxlite.nn.weight_norm import get_at, l2_normalized, put_at, weights_of

u_init = initializers.normal()


class SpectralNorm(Module):
    """Calls a layer with each of its weight matrices divided by an estimate of its largest stretch.

    That is its largest singular value, which power iteration estimates the better, the more calls
    have updated it. The weights themselves stay as they are, also after calls.

    Args:
      layer_instance: The layer.
      n_steps: Steps of power iteration at each call; with 0 nothing is normalized.
      epsilon: Added to squared norms of the iteration's vectors.
      dtype: The dtype of the normalized weights; by default that of the weights.
      param_dtype: The dtype of the iteration's vectors.
      error_on_non_matrix: Whether a weight of more than two axes is an error. Otherwise all its
        axes but the last count as one. Vectors and numbers are never normalized.
      update_stats: Whether a call stores the new estimate. The call's own argument goes first;
        `model.train()` and `model.eval()` set it.
      rngs: The stream `params` initializes a vector for each weight.

    Attributes:
      layer_instance: The layer.
      use_running_average: The opposite of `update_stats`, under the name that `model.train()` and
        `model.eval()` know.
      batch_stats: Nested dicts with the path of each weight. They hold the `BatchStat` `u`, of
        shape `(1, features)`, an estimate of the singular vector, and `sigma`, the singular value.

    Raises:
      ValueError: A weight has more than two axes and `error_on_non_matrix` is set.

    Example:
      >>> linear = nnx.Linear(
      ...     2,
      ...     2,
      ...     kernel_init=jax.nn.initializers.constant(3.0),
      ...     use_bias=False,
      ...     rngs=nnx.Rngs(0),
      ... )
      >>> layer = nnx.SpectralNorm(linear, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((1, 2))).round(3).tolist()
      [[1.0, 1.0]]
      >>> round(float(layer.batch_stats["kernel"]["sigma"][...]), 3), linear.kernel[0, 0].item()
      (6.0, 3.0)

    The formula is `w / sigma` with `sigma = v w u`, where each step makes `v` of `u w` and `u` of
    `v w`, of length one. No gradient passes through `u` and `v`.

    Source: Miyato et al. 2018, arXiv:1802.05957.
    """

    layer_instance: Callable[..., Any]
    batch_stats: dict[Any, Any]

    def __init__(
        self,
        layer_instance: Callable[..., Any],
        *,
        n_steps: int = 1,
        epsilon: float = 1e-12,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        error_on_non_matrix: bool = False,
        update_stats: bool = True,
        rngs: Rngs,
    ) -> None:
        self.layer_instance = layer_instance
        self.n_steps = n_steps
        self.epsilon = epsilon
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.error_on_non_matrix = error_on_non_matrix
        self.use_running_average = not update_stats
        stats: dict[Any, Any] = {}
        for path, weight in self._matrices():
            key = rngs.params()
            u = u_init(key, (1, weight.shape[-1]), param_dtype)
            sigma = initializers.ones(key, (), param_dtype)
            put_at(stats, path, {"u": BatchStat(u), "sigma": BatchStat(sigma)})
        self.batch_stats = stats

    def __call__(self, x: jax.Array, update_stats: bool | None = None) -> Any:
        """Returns what the layer makes of `x` with normalized weights.

        Args:
          x: The input of the layer.
          update_stats: Whether to store the new estimates; goes before the layer's own setting.

        Raises:
          StructureError: The layer has a weight that it did not have when this was made.
          ValueError: A weight got more than two axes, and `error_on_non_matrix` is set.
        """
        if update_stats is None:
            update_stats = not self.use_running_average
        estimates: list[tuple[BatchStat[Any], jax.Array]] = []

        def normalized() -> list[tuple[Param[Any], jax.Array]]:
            found = []
            for path, weight in self._matrices():
                stats = get_at(self.batch_stats, path, "SpectralNorm")
                value, u, sigma = self._normalized(weight.get_raw_value(), stats["u"][...])
                found.append((weight, value))
                estimates.extend([(stats["u"], u), (stats["sigma"], sigma)])
            return found

        with standing_in(normalized, "SpectralNorm"):
            y = self.layer_instance(x)
        if update_stats:
            for stat, estimate in estimates:
                stat[...] = lax.stop_gradient(estimate)
        return y

    def set_view(self, use_running_average: bool | None = None) -> None:
        """Sets the flag of this layer, for `nnx.view`.

        Args:
          use_running_average: Whether the estimates are kept as they are; None changes nothing.
        """
        if use_running_average is not None:
            self.use_running_average = use_running_average

    def _matrices(self) -> list[tuple[Path, Param[Any]]]:
        if self.n_steps < 1:
            return []
        found = [(path, w) for path, w in weights_of(self.layer_instance) if w.ndim > 1]
        for path, weight in found:
            if weight.ndim > 2 and self.error_on_non_matrix:
                raise ValueError(
                    f"SpectralNorm found {format_path(path, 'layer_instance')} of shape "
                    f"{weight.shape}. Expected matrices, as error_on_non_matrix is set; without it "
                    "all axes but the last count as one."
                )
        return found

    def _normalized(
        self, weight: jax.Array, u: jax.Array
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the normalized weight, and the new estimates of vector and value."""
        w, u = promote_dtype((weight.reshape(-1, weight.shape[-1]), u))  # (inputs, features)
        v = u
        for _ in range(self.n_steps):
            v = l2_normalized(u @ w.T, self.epsilon)
            u = l2_normalized(v @ w, self.epsilon)
        u, v = lax.stop_gradient(u), lax.stop_gradient(v)
        sigma = (v @ w @ u.T)[0, 0]
        w = w / jnp.where(sigma != 0, sigma, jnp.ones_like(sigma))
        return w.reshape(weight.shape).astype(self.dtype or weight.dtype), u, sigma

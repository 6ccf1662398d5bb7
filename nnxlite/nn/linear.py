"""Layers that multiply by a learned matrix."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.trace import EAGER, current_level
from nnxlite._core.variable import Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


class Linear(Module):
    """An affine map of the last axis: `x @ kernel + bias`.

    Args:
      in_features: Size of the last axis of the input.
      out_features: Size of the last axis of the output.
      use_bias: Whether there is a bias.
      dtype: The dtype to compute in; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters.
      precision: See `jax.lax.Precision`.
      kernel_init: Initializes the kernel.
      bias_init: Initializes the bias.
      dot_general: Used in place of `jax.lax.dot_general`.
      promote_dtype: Brings `(x, kernel, bias)` to one dtype.
      preferred_element_type: The dtype in which products are summed up.
      rngs: The stream `params` initializes kernel and bias, in this order.
      kernel_metadata: Metadata of the kernel, such as `out_sharding`.
      bias_metadata: Metadata of the bias.

    Attributes:
      kernel: `Param` of shape `(in_features, out_features)`.
      bias: `Param` of shape `(out_features,)`, or None.

    Example:
      >>> layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((8, 3))).shape
      (8, 4)
    """

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        dot_general: Callable[..., jax.Array] = lax.dot_general,
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        kernel = kernel_init(rngs.params(), (in_features, out_features), param_dtype)
        self.kernel = Param(kernel, **kernel_metadata)
        self.bias = None
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = Param(bias, **bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.dot_general = dot_general
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the transformed input.

        Args:
          inputs: `(..., in_features)`.
          out_sharding: The sharding of the result, under a mesh with explicit axes.

        Returns:
          `(..., out_features)`.

        Raises:
          ValueError: The last axis of `inputs` is not `in_features`.
        """
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        if not x.ndim or x.shape[-1] != kernel.shape[0]:
            raise ValueError(
                f"Linear with a kernel of shape {kernel.shape} expects inputs of shape "
                f"(..., {kernel.shape[0]}), found {x.shape}."
            )
        options = {
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
            "out_sharding": out_sharding,
        }
        options = {name: option for name, option in options.items() if option is not None}
        if self.dot_general is lax.dot_general and current_level() is EAGER:
            return _eager_affine(x, kernel, bias, **options)
        return _affine(x, kernel, bias, self.dot_general, **options)


def _affine(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    dot_general: Callable[..., jax.Array] = lax.dot_general,
    **options: Any,
) -> jax.Array:
    y = dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())), **options)
    return y if bias is None else y + jnp.reshape(bias, (1,) * (y.ndim - 1) + (-1,))


# One dispatch in place of three: about 10 µs a call, not 60. A trace has no use for it (JAX would
# keep the inner jit), and a function of the user may read what is no argument.
_eager_affine = jax.jit(
    _affine, static_argnames=("precision", "preferred_element_type", "out_sharding")
)

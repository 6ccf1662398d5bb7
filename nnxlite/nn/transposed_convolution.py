"""Transposed convolution: spreads each input over a window, by a learned kernel.

Arrays have their channels last, as in `(batch, height, width, channels)`.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.trace import EAGER, current_level
from nnxlite._core.variable import Param
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.padding import (
    Padding,
    Pads,
    PerAxis,
    canonicalize_padding,
    check_mask,
    check_padding_name,
    frozen,
    per_axis,
)

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()

_NAMES = ("SAME", "VALID", "CIRCULAR", "CAUSAL")


class ConvTranspose(Module):
    """A transposed convolution over any number of spatial axes, plus a bias.

    It has strides where a convolution would skip: of an input of size `n`, `"SAME"` makes
    `n * stride`. Seen otherwise, the inputs are spread apart by the strides, with zeros between,
    and then convolved; the paddings below are those of that convolution. (In PyTorch, `padding` is
    `dilation * (size - 1)` minus this one.)

    Args:
      in_features: Channels of the input.
      out_features: Channels of the output.
      kernel_size: The size of the window along each spatial axis; their number is the rank of the
        convolution. An int makes it one-dimensional.
      strides: How far the windows of neighbouring inputs are apart, for all axes or for each.
      padding: `"SAME"`, `"VALID"` (all of each window is kept), `"CIRCULAR"` (what goes over an
        edge comes in at the other), `"CAUSAL"` (of rank 1: no output sees later inputs), an int for
        both sides of all axes, or an int or `(before, after)` for each axis.
      kernel_dilation: How far the elements of a window are apart.
      use_bias: Whether there is a bias.
      mask: Multiplied with the kernel; of its shape.
      dtype: The dtype to compute in; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters.
      precision: See `jax.lax.Precision`.
      kernel_init: Initializes the kernel.
      bias_init: Initializes the bias.
      transpose_kernel: Whether the kernel is that of the convolution which this one is the
        transpose (the gradient) of: mirrored, and with its channels the other way round. With
        `"SAME"` and `"CIRCULAR"` the result may be shifted by one place against that gradient.
      promote_dtype: Brings `(x, kernel, bias)` to one dtype.
      preferred_element_type: The dtype in which products are summed up.
      rngs: The stream `params` initializes kernel and bias, in this order.
      kernel_metadata: Metadata of the kernel, such as `out_sharding`.
      bias_metadata: Metadata of the bias.

    Attributes:
      kernel: `Param` of shape `(*kernel_size, in_features, out_features)`, with the last two the
        other way round if `transpose_kernel`.
      bias: `Param` of shape `(out_features,)`, or None.

    Raises:
      ValueError: The mask has another shape than the kernel, the padding is unknown, or an option
        does not fit the number of spatial axes.

    Example:
      >>> layer = nnx.ConvTranspose(8, 3, kernel_size=(3, 3), strides=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 14, 14, 8))).shape
      (5, 28, 28, 3)

    The formula is `y[stride * i + offset] += x[i] @ kernel[size - 1 - offset]` for each input `i`
    and each offset in the window; with `transpose_kernel`, `@ kernel[offset].T`.

    Source: Zeiler et al. 2010, "Deconvolutional networks", CVPR; as `jax.lax.conv_transpose`.
    """

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: PerAxis = None,
        *,
        padding: Padding = "SAME",
        kernel_dilation: PerAxis = None,
        use_bias: bool = True,
        mask: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        transpose_kernel: bool = False,
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        rank = len(kernel_size)
        per_axis(strides, rank, "strides", "ConvTranspose")
        per_axis(kernel_dilation, rank, "kernel_dilation", "ConvTranspose")
        check_padding_name(padding, _NAMES, "ConvTranspose")
        canonicalize_padding(padding, rank, "ConvTranspose")
        channels = (in_features, out_features)
        self.kernel_shape = (*kernel_size, *(channels[::-1] if transpose_kernel else channels))
        check_mask(mask, self.kernel_shape, "ConvTranspose")
        kernel = kernel_init(rngs.params(), self.kernel_shape, param_dtype)
        self.kernel = Param(kernel, **kernel_metadata)
        self.bias = None
        if use_bias:
            bias = bias_init(rngs.params(), (out_features,), param_dtype)
            self.bias = Param(bias, **bias_metadata)
        self.in_features = in_features
        self.out_features = out_features
        self.kernel_size = kernel_size
        self.strides = frozen(strides)
        self.padding = frozen(padding)
        self.kernel_dilation = frozen(kernel_dilation)
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.transpose_kernel = transpose_kernel
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the spread input.

        Args:
          inputs: `(*batch, *spatial, in_features)`, with any number of batch axes, also none.

        Returns:
          `(*batch, *new_spatial, out_features)`.

        Raises:
          ValueError: `inputs` has too few axes or other channels.
        """
        rank = len(self.kernel_size)
        if inputs.ndim <= rank or inputs.shape[-1] != self.in_features:
            axes = ", ".join(["...", *(f"size_{axis}" for axis in range(rank))])
            raise ValueError(
                f"ConvTranspose with a kernel of shape {self.kernel_shape} expects inputs of shape "
                f"({axes}, {self.in_features}), found {inputs.shape}."
            )
        kernel = self.kernel[...]
        if self.mask is not None:
            with jax.numpy_dtype_promotion("standard"):
                kernel = kernel * self.mask
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        spread = _eager_spread if current_level() is EAGER else _spread
        return spread(
            x,
            kernel,
            bias,
            strides=per_axis(self.strides, rank, "strides", "ConvTranspose"),
            padding=canonicalize_padding(self.padding, rank, "ConvTranspose"),
            dilation=per_axis(self.kernel_dilation, rank, "kernel_dilation", "ConvTranspose"),
            transpose_kernel=self.transpose_kernel,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )


def _spread(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    strides: tuple[int, ...],
    padding: str | Pads,
    dilation: tuple[int, ...],
    transpose_kernel: bool,
    precision: Any,
    preferred_element_type: Any,
) -> jax.Array:
    """Spreads with one batch axis made of all there are, and restores them."""
    rank = kernel.ndim - 2
    batch = x.shape[: x.ndim - rank - 1]
    if len(batch) != 1:
        x = x.reshape(-1, *x.shape[len(batch) :])  # (batch, *spatial, features)
    if padding == "CAUSAL":
        # As many zeros behind as between two inputs, so that the last input has its outputs too.
        pads: Any = ((dilation[0] * (kernel.shape[0] - 1), strides[0] - 1),)
    else:
        pads = "VALID" if padding == "CIRCULAR" else padding
    y = lax.conv_transpose(
        x,
        kernel,
        strides,
        pads,
        rhs_dilation=dilation,
        transpose_kernel=transpose_kernel,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    if padding == "CIRCULAR":
        for axis, stride in enumerate(strides, start=1):
            y = _wrapped(y, axis, x.shape[axis] * stride, extra_behind=transpose_kernel)
    if bias is not None:
        y = y + bias.reshape((1,) * (rank + 1) + (-1,))
    return y if len(batch) == 1 else y.reshape(*batch, *y.shape[1:])


def _wrapped(y: jax.Array, axis: int, period: int, extra_behind: bool) -> jax.Array:
    """Adds up all elements of an axis whose places differ by a multiple of the period.

    Args:
      y: What was spread over more than one period.
      axis: The axis.
      period: Its new size.
      extra_behind: Where the middle of the window of an even size is: as much comes in at either
        edge, and what is left of an odd number comes in behind, or in front.
    """
    size = y.shape[axis]
    missing = (period - size) % (2 * period)
    front = (missing + (0 if extra_behind else 1)) // 2 % period
    pads = [(0, 0)] * y.ndim
    periods = -(-(size + front) // period)
    pads[axis] = (front, periods * period - size - front)
    y = jnp.pad(y, pads)
    return y.reshape(*y.shape[:axis], periods, period, *y.shape[axis + 1 :]).sum(axis)


# One dispatch in place of several; a trace has no use for it (see `nnxlite.nn.linear`).
_eager_spread = jax.jit(
    _spread,
    static_argnames=(
        "strides",
        "padding",
        "dilation",
        "transpose_kernel",
        "precision",
        "preferred_element_type",
    ),
)

"""Convolutions: layers that multiply a learned kernel with every window of the input.

Arrays have their channels last, as in `(batch, height, width, channels)`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
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

_PAD_MODES = {"CIRCULAR": "wrap", "REFLECT": "reflect"}
_NAMES = ("SAME", "SAME_LOWER", "VALID", "CAUSAL", *_PAD_MODES)


class Conv(Module):
    """A convolution over any number of spatial axes, plus a bias.

    As everywhere in deep learning, the kernel is not mirrored.

    Args:
      in_features: Channels of the input.
      out_features: Channels of the output.
      kernel_size: The size of the window along each spatial axis; their number is the rank of the
        convolution. An int makes it one-dimensional.
      strides: The step from window to window, for all axes or for each.
      padding: `"SAME"`, `"SAME_LOWER"` (of an odd number of zeros, more are in front), `"VALID"`,
        `"CIRCULAR"` (the other edge continues the input), `"REFLECT"` (the input mirrored at its
        edge), `"CAUSAL"` (of rank 1: no output sees later inputs), an int for both sides of all
        axes, or an int or `(before, after)` for each axis.
      input_dilation: How far the inputs are spread apart, with zeros between; `padding` has to be
        in numbers then.
      kernel_dilation: How far the elements of a window are apart (an atrous convolution).
      feature_group_count: The number of groups of channels that are convolved separately.
      use_bias: Whether there is a bias.
      mask: Multiplied with the kernel; of its shape.
      dtype: The dtype to compute in; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters.
      precision: See `jax.lax.Precision`.
      kernel_init: Initializes the kernel.
      bias_init: Initializes the bias.
      conv_general_dilated: Used in place of `jax.lax.conv_general_dilated`.
      promote_dtype: Brings `(x, kernel, bias)` to one dtype.
      preferred_element_type: The dtype in which products are summed up.
      rngs: The stream `params` initializes kernel and bias, in this order.
      kernel_metadata: Metadata of the kernel, such as `out_sharding`.
      bias_metadata: Metadata of the bias.

    Attributes:
      kernel: `Param` of shape `(*kernel_size, in_features // feature_group_count, out_features)`.
      bias: `Param` of shape `(out_features,)`, or None.

    Raises:
      ValueError: The groups do not divide the channels, the mask has another shape than the kernel,
        the padding is unknown, or an option does not fit the number of spatial axes.

    Example:
      >>> layer = nnx.Conv(3, 8, kernel_size=(3, 3), strides=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((5, 28, 28, 3))).shape
      (5, 14, 14, 8)
    """

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        kernel_size: int | Sequence[int],
        strides: PerAxis = 1,
        *,
        padding: Padding = "SAME",
        input_dilation: PerAxis = 1,
        kernel_dilation: PerAxis = 1,
        feature_group_count: int = 1,
        use_bias: bool = True,
        mask: ArrayLike | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        conv_general_dilated: Callable[..., jax.Array] = lax.conv_general_dilated,
        promote_dtype: PromoteDtype = promote_dtype,
        preferred_element_type: DTypeLike | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if in_features % feature_group_count or out_features % feature_group_count:
            raise ValueError(
                f"Conv found {feature_group_count} groups for {in_features} input and "
                f"{out_features} output channels. Expected a number that divides both."
            )
        kernel_size = (kernel_size,) if isinstance(kernel_size, int) else tuple(kernel_size)
        rank = len(kernel_size)
        for name, given in {
            "strides": strides,
            "input_dilation": input_dilation,
            "kernel_dilation": kernel_dilation,
        }.items():
            per_axis(given, rank, name, "Conv")
        check_padding_name(padding, _NAMES, "Conv")
        canonicalize_padding(padding, rank, "Conv")
        self.kernel_shape = (*kernel_size, in_features // feature_group_count, out_features)
        check_mask(mask, self.kernel_shape, "Conv")
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
        self.input_dilation = frozen(input_dilation)
        self.kernel_dilation = frozen(kernel_dilation)
        self.feature_group_count = feature_group_count
        self.use_bias = use_bias
        self.mask = mask
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.conv_general_dilated = conv_general_dilated
        self.promote_dtype = promote_dtype
        self.preferred_element_type = preferred_element_type

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the convolved input.

        Args:
          inputs: `(*batch, *spatial, in_features)`, with any number of batch axes, also none.
          out_sharding: The sharding of the result, under a mesh with explicit axes.

        Returns:
          `(*batch, *new_spatial, out_features)`.

        Raises:
          ValueError: `inputs` has too few axes or other channels.
        """
        rank = len(self.kernel_size)
        if inputs.ndim <= rank or inputs.shape[-1] != self.in_features:
            axes = ", ".join(["...", *(f"size_{axis}" for axis in range(rank))])
            raise ValueError(
                f"Conv with a kernel of shape {self.kernel_shape} expects inputs of shape "
                f"({axes}, {self.in_features}), found {inputs.shape}."
            )
        kernel = self.kernel[...]
        if self.mask is not None:
            with jax.numpy_dtype_promotion("standard"):
                kernel = kernel * self.mask
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        padding, pad_mode = _before_and_during(
            canonicalize_padding(self.padding, rank, "Conv"),
            self.kernel_size,
            per_axis(self.kernel_dilation, rank, "kernel_dilation", "Conv"),
        )
        options = {
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
            "out_sharding": out_sharding,
        }
        options = {name: option for name, option in options.items() if option is not None}
        convolve = _convolve
        if self.conv_general_dilated is not lax.conv_general_dilated:
            convolve = functools.partial(_convolve, convolution=self.conv_general_dilated)
        elif current_level() is EAGER:
            convolve = _eager_convolve
        return convolve(
            x,
            kernel,
            bias,
            strides=per_axis(self.strides, rank, "strides", "Conv"),
            padding=padding,
            pad_mode=pad_mode,
            input_dilation=per_axis(self.input_dilation, rank, "input_dilation", "Conv"),
            kernel_dilation=per_axis(self.kernel_dilation, rank, "kernel_dilation", "Conv"),
            groups=self.feature_group_count,
            **options,
        )


def _convolve(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    *,
    strides: tuple[int, ...],
    padding: str | Pads,
    pad_mode: str | None,
    input_dilation: tuple[int, ...],
    kernel_dilation: tuple[int, ...],
    groups: int,
    convolution: Callable[..., jax.Array] = lax.conv_general_dilated,
    **options: Any,
) -> jax.Array:
    """Convolves with one batch axis made of all there are, and restores them."""
    rank = kernel.ndim - 2
    batch = x.shape[: x.ndim - rank - 1]
    if len(batch) != 1:
        x = x.reshape(-1, *x.shape[len(batch) :])  # (batch, *spatial, features)
    if pad_mode is not None:
        assert not isinstance(padding, str)
        x = jnp.pad(x, ((0, 0), *padding, (0, 0)), mode=pad_mode)
        padding = "VALID"
    channels_last = (0, rank + 1, *range(1, rank + 1))
    y = convolution(
        x,
        kernel,
        strides,
        padding,
        lhs_dilation=input_dilation,
        rhs_dilation=kernel_dilation,
        dimension_numbers=lax.ConvDimensionNumbers(
            channels_last, (rank + 1, rank, *range(rank)), channels_last
        ),
        feature_group_count=groups,
        **options,
    )
    if bias is not None:
        y = y + bias.reshape((1,) * (rank + 1) + (-1,))
    return y if len(batch) == 1 else y.reshape(*batch, *y.shape[1:])


# One dispatch in place of up to five; a trace has no use for it (see `nnxlite.nn.linear`).
_eager_convolve = jax.jit(
    _convolve,
    static_argnames=(
        "strides",
        "padding",
        "pad_mode",
        "input_dilation",
        "kernel_dilation",
        "groups",
        "precision",
        "preferred_element_type",
        "out_sharding",
    ),
)


def _before_and_during(
    padding: str | Pads, kernel_size: tuple[int, ...], kernel_dilation: tuple[int, ...]
) -> tuple[str | Pads, str | None]:
    """Returns the padding, and how to pad before the convolution if that cannot do it itself."""
    reach = [
        dilation * (size - 1) for size, dilation in zip(kernel_size, kernel_dilation, strict=True)
    ]
    if padding == "CAUSAL":
        return tuple((length, 0) for length in reach), None
    if isinstance(padding, str) and padding in _PAD_MODES:
        return tuple((length // 2, (length + 1) // 2) for length in reach), _PAD_MODES[padding]
    return padding, None

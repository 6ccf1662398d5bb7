"""Layers that multiply by a learned matrix, or by a learned array along chosen axes."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from nnxlite._core.metadata import VariableMetadata
from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.trace import EAGER, current_level
from nnxlite._core.variable import Param
from nnxlite.nn import initializers
from nnxlite.nn.convolution import Conv
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.embedding import Embed, default_embed_init
from nnxlite.nn.flags import first_from
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.padding import canonicalize_padding
from nnxlite.nn.subscripts import names_of, sizes_of, terms
from nnxlite.nn.transposed_convolution import ConvTranspose

# Convolutions and embeddings have files of their own; models of flax.nnx find them here too.
__all__ = [
    "Conv",
    "ConvTranspose",
    "Einsum",
    "Embed",
    "Linear",
    "LinearGeneral",
    "canonicalize_padding",
    "default_bias_init",
    "default_embed_init",
    "default_kernel_init",
]

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
        return _affine(
            x,
            kernel,
            bias,
            (((x.ndim - 1,), (0,)), ((), ())),
            (1,) * (x.ndim - 1) + (-1,),
            self.dot_general,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )


class LinearGeneral(Module):
    """An affine map of chosen axes, which become the last ones: a `tensordot` and a bias.

    Args:
      in_features: Sizes of the axes to map, in the order in which the input has them.
      out_features: Sizes of the axes of the output that take their place, at the end.
      axis: The axes to map, as many as `in_features`; their order does not matter.
      batch_axis: Leading axes of the input, `0` and on, by their sizes: each index along them has a
        kernel and a bias of its own.
      use_bias: Whether there is a bias.
      dtype: The dtype to compute in; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters.
      kernel_init: Initializes the kernel, as a matrix whose rows are all batch and input features
        and whose columns are all output features: so fan-in and fan-out are counted.
      bias_init: Initializes the bias, as a vector.
      precision: See `jax.lax.Precision`.
      promote_dtype: Brings `(x, kernel, bias)` to one dtype.
      dot_general: Used in place of `jax.lax.dot_general`.
      dot_general_cls: Called without arguments, it makes such a function for each call of the
        layer; goes before `dot_general`.
      preferred_element_type: The dtype in which products are summed up.
      rngs: The stream `params` initializes kernel and bias, in this order.
      kernel_metadata: Metadata of the kernel, such as `out_sharding`.
      bias_metadata: Metadata of the bias.

    Attributes:
      kernel: `Param` of shape `(*batch sizes, *in_features, *out_features)`.
      bias: `Param` of shape `(*batch sizes, *out_features)`, or None.

    Raises:
      ValueError: There are not as many axes as input features, or the batch axes do not lead.

    Example:
      >>> layer = nnx.LinearGeneral((2, 3), (4, 5), axis=(1, -1), rngs=nnx.Rngs(0))
      >>> layer.kernel.shape, layer(jnp.ones((8, 2, 7, 3))).shape
      ((2, 3, 4, 5), (8, 7, 4, 5))
    """

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int | Sequence[int],
        *,
        axis: int | Sequence[int] = -1,
        batch_axis: Mapping[int, int] = MappingProxyType({}),
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        precision: lax.PrecisionLike = None,
        promote_dtype: PromoteDtype = promote_dtype,
        dot_general: Callable[..., jax.Array] | None = None,
        dot_general_cls: Callable[[], Callable[..., jax.Array]] | None = None,
        preferred_element_type: DTypeLike | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.in_features = _as_tuple(in_features)
        self.out_features = _as_tuple(out_features)
        self.axis = _as_tuple(axis)
        if len(self.in_features) != len(self.axis):
            raise ValueError(
                "LinearGeneral expects a size for each axis, found in_features "
                f"{self.in_features} and axis {self.axis}."
            )
        if sorted(batch_axis) != list(range(len(batch_axis))):
            raise ValueError(
                "LinearGeneral expects the batch axes to be the leading ones, 0 and on, found "
                f"{dict(batch_axis)}."
            )
        self.batch_shape = tuple(batch_axis[n] for n in range(len(batch_axis)))
        rows = math.prod(self.batch_shape) * math.prod(self.in_features)
        columns = math.prod(self.out_features)
        kernel = kernel_init(rngs.params(), (rows, columns), param_dtype)
        kernel_shape = (*self.batch_shape, *self.in_features, *self.out_features)
        self.kernel = Param(_reshaped(kernel, kernel_shape), **kernel_metadata)
        self.bias = None
        if use_bias:
            bias_shape = (*self.batch_shape, *self.out_features)
            bias = bias_init(rngs.params(), (math.prod(bias_shape),), param_dtype)
            self.bias = Param(_reshaped(bias, bias_shape), **bias_metadata)
        self.use_bias = use_bias
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.dot_general = dot_general
        self.dot_general_cls = dot_general_cls
        self.preferred_element_type = preferred_element_type

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the transformed input.

        Args:
          inputs: Of sizes `in_features` along the axes `axis`.
          out_sharding: The sharding of the result, under a mesh with explicit axes.

        Returns:
          The axes that were not mapped, in their order, then those of `out_features`.

        Raises:
          ValueError: `inputs` lack an axis, or have other sizes along them.
        """
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        axes = self._checked_axes(x.shape)
        batch_axes = tuple(range(len(self.batch_shape)))
        kernel_axes = tuple(n + len(batch_axes) for n in range(len(axes)))
        kept = [size for n, size in enumerate(x.shape) if n not in axes]
        ones = (1,) * (len(kept) - len(batch_axes))
        dot_general = self.dot_general if self.dot_general_cls is None else self.dot_general_cls()
        return _affine(
            x,
            kernel,
            bias,
            ((axes, kernel_axes), (batch_axes, batch_axes)),
            (*self.batch_shape, *ones, *self.out_features),
            lax.dot_general if dot_general is None else dot_general,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )

    def _checked_axes(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the axes to map in ascending order, counted from the start."""
        rank = len(shape)
        axes = tuple(sorted(axis + rank if axis < 0 else axis for axis in self.axis))
        num_batch = len(self.batch_shape)
        lacking = any(not num_batch <= axis < rank for axis in axes) or len({*axes}) < len(axes)
        if (
            lacking
            or tuple(shape[axis] for axis in axes) != self.in_features
            or shape[:num_batch] != self.batch_shape
        ):
            batch = f" and {self.batch_shape} along the leading axes" if num_batch else ""
            raise ValueError(
                f"LinearGeneral with a kernel of shape {self.kernel.shape} expects inputs of sizes "
                f"{self.in_features} along the axes {self.axis}{batch}, found shape {shape}."
            )
        return axes


class Einsum(Module):
    """A product with a learned array along named axes, `einsum(einsum_str, x, kernel) + bias`.

    Args:
      einsum_str: Says which axes are multiplied and summed, as in `jnp.einsum`: two operands, the
        input and the kernel, and an arrow. None if each call brings its own.
      kernel_shape: The shape of the kernel.
      bias_shape: The shape of the bias: the axes of the output that the kernel has, in the order of
        the output. None if there is no bias.
      dtype: The dtype to compute in; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters.
      precision: See `jax.lax.Precision`.
      kernel_init: Initializes the kernel.
      bias_init: Initializes the bias.
      promote_dtype: Brings `(x, kernel, bias)` to one dtype.
      einsum_op: Used in place of `jnp.einsum`.
      preferred_element_type: The dtype in which products are summed up.
      rngs: The stream `params` initializes kernel and bias, in this order.
      kernel_metadata: Metadata of the kernel, such as `out_sharding`.
      bias_metadata: Metadata of the bias.

    Attributes:
      kernel: `Param` of shape `kernel_shape`.
      bias: `Param` of shape `bias_shape`, or None.

    Raises:
      ValueError: `einsum_str` has not two operands and an arrow.

    Example:
      >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), (8, 4), rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((16, 11, 2))).shape
      (16, 11, 8, 4)
    """

    kernel: Param[jax.Array]
    bias: Param[jax.Array] | None

    def __init__(
        self,
        einsum_str: str | None,
        kernel_shape: Sequence[int],
        bias_shape: Sequence[int] | None = None,
        *,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        precision: lax.PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtype = promote_dtype,
        einsum_op: Callable[..., jax.Array] = jnp.einsum,
        preferred_element_type: DTypeLike | None = None,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if einsum_str is not None:
            terms(einsum_str)  # checks it
        self.einsum_str = einsum_str
        self.kernel_shape = tuple(kernel_shape)
        self.bias_shape = None if bias_shape is None else tuple(bias_shape)
        kernel = kernel_init(rngs.params(), self.kernel_shape, param_dtype)
        self.kernel = Param(kernel, **kernel_metadata)
        self.bias = None
        if self.bias_shape is not None:
            bias = bias_init(rngs.params(), self.bias_shape, param_dtype)
            self.bias = Param(bias, **bias_metadata)
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision
        self.promote_dtype = promote_dtype
        self.einsum_op = einsum_op
        self.preferred_element_type = preferred_element_type

    def __call__(
        self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None
    ) -> jax.Array:
        """Returns the transformed input.

        Args:
          inputs: Of the axes that `einsum_str` names first.
          einsum_str: Goes before the attribute of that name.
          out_sharding: The sharding of the result, under a mesh with explicit axes.

        Returns:
          The axes that `einsum_str` names last.

        Raises:
          ValueError: `inputs` have not the axes that are named, or the kernel has other sizes along
            them, or no one said which axes to multiply.
        """
        einsum_str = first_from(
            einsum_str,
            self.einsum_str,
            error_msg="Einsum was told `einsum_str` nowhere. Give it to the constructor or to the "
            'call, such as layer(x, "ab,bc->ac").',
        )
        left, right, result = terms(einsum_str)
        kernel = self.kernel[...]
        bias = None if self.bias is None else self.bias[...]
        x, kernel, bias = self.promote_dtype((inputs, kernel, bias), dtype=self.dtype)
        sizes = sizes_of(right, kernel.shape)
        found = sizes_of(left, x.shape)
        if (
            sizes is None
            or found is None
            or any(
                size != found[name] != 1 != size for name, size in sizes.items() if name in found
            )
        ):
            raise ValueError(
                f"Einsum({einsum_str!r}) with a kernel of shape {kernel.shape} does not fit inputs "
                f"of shape {x.shape}. Expected inputs ({left}) and a kernel ({right}), of the same "
                "sizes where they share a letter."
            )
        options = _given(
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
            out_sharding=out_sharding,
        )
        y = self.einsum_op(f"{left},{right}->{result}", x, kernel, **options)
        if bias is None:
            return y
        shape = tuple(sizes.get(name, 1) for name in names_of(result, y.ndim))
        return y + jnp.reshape(bias, shape)


def _as_tuple(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return tuple(sizes) if isinstance(sizes, Sequence) else (sizes,)


def _reshaped(value: Any, shape: tuple[int, ...]) -> Any:
    """Returns what an initializer made in another shape; metadata that came along stays."""
    if isinstance(value, VariableMetadata):
        return dataclasses.replace(value, raw_value=jnp.reshape(value.raw_value, shape))
    return jnp.reshape(value, shape)


def _given(**options: Any) -> dict[str, Any]:
    """Drops what is None: a function of the user need not know options that nobody uses."""
    return {name: option for name, option in options.items() if option is not None}


def _affine(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    dimension_numbers: Any,
    bias_shape: tuple[int, ...],
    dot_general: Callable[..., jax.Array],
    **options: Any,
) -> jax.Array:
    """Returns product and sum; options that are None are left out."""
    options = _given(**options)
    if dot_general is lax.dot_general and current_level() is EAGER:
        return _eager_affine(x, kernel, bias, dimension_numbers, bias_shape, **options)
    return _product_and_sum(x, kernel, bias, dimension_numbers, bias_shape, dot_general, **options)


def _product_and_sum(
    x: jax.Array,
    kernel: jax.Array,
    bias: jax.Array | None,
    dimension_numbers: Any,
    bias_shape: tuple[int, ...],
    dot_general: Callable[..., jax.Array] = lax.dot_general,
    **options: Any,
) -> jax.Array:
    y = dot_general(x, kernel, dimension_numbers, **options)
    return y if bias is None else y + jnp.reshape(bias, bias_shape)


# One dispatch in place of three: about 10 µs a call, not 60. A trace has no use for it (JAX would
# keep the inner jit), and a function of the user may read what is no argument.
_eager_affine = jax.jit(
    _product_and_sum,
    static_argnums=(3, 4),
    static_argnames=("precision", "preferred_element_type", "out_sharding"),
)

"""Long short-term memories: recurrent cells with a memory behind gates."""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._transforms.shapes import eval_shape
from nnxlite.nn.activations import sigmoid, tanh
from nnxlite.nn.cells import (
    FeatureCell,
    RNNCellBase,
    default_bias_init,
    default_kernel_init,
    default_recurrent_kernel_init,
    draw_carry,
)
from nnxlite.nn.convolution import Conv, Padding, PerAxis
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Linear


class _LSTM(FeatureCell):
    """What the two forms of the LSTM share."""

    gate_fn: Callable[..., Any]
    activation_fn: Callable[..., Any]
    _carry_names: ClassVar[tuple[str, ...]] = ("c", "h")

    def _open(
        self, carry: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        c, h = _pair_of(carry, self)
        self.check(inputs, c, h)
        return c, h

    def _step(
        self, c: jax.Array, i: jax.Array, f: jax.Array, g: jax.Array, o: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Returns the result of the call from the sums in front of the gates."""
        i, f, o = self.gate_fn(i), self.gate_fn(f), self.gate_fn(o)
        g = self.activation_fn(g)
        with jax.numpy_dtype_promotion("standard"):  # gates may be narrower than the memory
            c = f * c + i * g
            h = o * self.activation_fn(c)
        return (c, h), h


class LSTMCell(_LSTM):
    """A long short-term memory: a memory `c` behind gates, and its output `h`.

        i = gate_fn(x @ ii + h @ hi + bi)          lets the update in
        f = gate_fn(x @ if_ + h @ hf + bf)         keeps the memory
        g = activation_fn(x @ ig + h @ hg + bg)    is the update
        o = gate_fn(x @ io + h @ ho + bo)          lets the memory out
        c' = f * c + i * g
        h' = o * activation_fn(c')

    Args:
      in_features: Size of the last axis of the input.
      hidden_features: Size of the last axis of memory and output.
      gate_fn: The function of gates.
      activation_fn: The function of update and output.
      kernel_init: Initializes the kernels of the input.
      recurrent_kernel_init: Initializes the kernels of the hidden state.
      bias_init: Initializes the biases.
      dtype: The dtype of the products; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters and of the first carry.
      carry_init: Initializes the carry; by default zeros.
      promote_dtype: As for `Linear`.
      keep_rngs: Whether to keep a fork of the stream `carry`, for `initialize_carry`.
      rngs: The stream `params` initializes the kernels of the input, then kernel and bias of each
        gate.
      kernel_metadata: Metadata of the kernels of the input.
      recurrent_kernel_metadata: Metadata of the kernels of the hidden state.
      bias_metadata: Metadata of the biases.

    Attributes:
      ii, if_, ig, io: `Linear` from input to each gate, without bias.
      hi, hf, hg, ho: `Linear` from hidden state to each gate.

    Example:
      >>> cell = nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry = cell.initialize_carry((8, 3))
      >>> (c, h), y = cell(carry, jnp.ones((8, 3)))
      >>> c.shape, y.shape
      ((8, 4), (8, 4))

    Source: Hochreiter and Schmidhuber 1997, Neural Computation 9:1735-1780; the forget gate is of
    Gers, Schmidhuber and Cummins 2000, Neural Computation 12:2451-2471.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = sigmoid,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = default_recurrent_kernel_init,
        bias_init: Initializer = default_bias_init,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtype = promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        recurrent_kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.promote_dtype = promote_dtype
        self.rngs = rngs.carry.fork() if keep_rngs else None
        dense = functools.partial(
            Linear, dtype=dtype, param_dtype=param_dtype, promote_dtype=promote_dtype, rngs=rngs
        )
        dense_i = functools.partial(
            dense,
            in_features,
            hidden_features,
            use_bias=False,
            kernel_init=kernel_init,
            kernel_metadata=kernel_metadata,
        )
        dense_h = functools.partial(
            dense,
            hidden_features,
            hidden_features,
            kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.ii, self.if_, self.ig, self.io = dense_i(), dense_i(), dense_i(), dense_i()
        self.hi, self.hf, self.hg, self.ho = dense_h(), dense_h(), dense_h(), dense_h()

    def __call__(
        self, carry: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Returns the next carry `(c, h)` and the output `h`.

        Args:
          carry: `(c, h)`, each `(..., hidden_features)`.
          inputs: `(..., in_features)`.

        Raises:
          ValueError: `inputs` or `carry` have other shapes.
        """
        c, h = self._open(carry, inputs)
        return self._step(
            c,
            i=self.ii(inputs) + self.hi(h),
            f=self.if_(inputs) + self.hf(h),
            g=self.ig(inputs) + self.hg(h),
            o=self.io(inputs) + self.ho(h),
        )


class OptimizedLSTMCell(_LSTM):
    """An `LSTMCell` that makes two products a step in place of eight.

    The kernels of the gates lie side by side, in the order i, f, g, o. They are drawn as one, so
    the same seed gives other values than in an `LSTMCell`.

    Args:
      in_features: As for `LSTMCell`, and so are all others, with "kernels" and "biases" of
        `dense_i` and `dense_h`, which are initialized in this order.
      hidden_features: Size of the last axis of memory and output.

    Attributes:
      dense_i: `Linear(in_features, 4 * hidden_features)` without bias.
      dense_h: `Linear(hidden_features, 4 * hidden_features)`.

    Example:
      >>> cell = nnx.OptimizedLSTMCell(3, 4, rngs=nnx.Rngs(0))
      >>> carry, y = cell(cell.initialize_carry((8, 3)), jnp.ones((8, 3)))
      >>> cell.dense_h.kernel.shape, y.shape
      ((4, 16), (8, 4))

    Source: as for `LSTMCell`.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        gate_fn: Callable[..., Any] = sigmoid,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = default_recurrent_kernel_init,
        bias_init: Initializer = default_bias_init,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        carry_init: Initializer | None = None,
        promote_dtype: PromoteDtype = promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        recurrent_kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.gate_fn = gate_fn
        self.activation_fn = activation_fn
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.promote_dtype = promote_dtype
        self.rngs = rngs.carry.fork() if keep_rngs else None
        dense = functools.partial(
            Linear,
            out_features=4 * hidden_features,
            dtype=dtype,
            param_dtype=param_dtype,
            promote_dtype=promote_dtype,
            rngs=rngs,
        )
        self.dense_i = dense(
            in_features, use_bias=False, kernel_init=kernel_init, kernel_metadata=kernel_metadata
        )
        self.dense_h = dense(
            hidden_features,
            kernel_init=recurrent_kernel_init,
            bias_init=bias_init,
            kernel_metadata=recurrent_kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(
        self, carry: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Returns the next carry `(c, h)` and the output `h`.

        Args:
          carry: `(c, h)`, each `(..., hidden_features)`.
          inputs: `(..., in_features)`.

        Raises:
          ValueError: `inputs` or `carry` have other shapes.
        """
        c, h = self._open(carry, inputs)
        gates = self.dense_i(inputs) + self.dense_h(h)  # (..., 4 * hidden_features)
        return self._step(c, *jnp.split(gates, 4, axis=-1))


class ConvLSTMCell(RNNCellBase):
    """An LSTM of images: convolutions take the place of the products of an `LSTMCell`.

        i, g, f, o = split(ih(x) + hh(h))
        c' = sigmoid(f + 1) * c + sigmoid(i) * tanh(g)
        h' = sigmoid(o) * tanh(c')

    The one added to the forget gate keeps the memory at the beginning of training. There are no
    connections from memory to gates ("peepholes"), unlike in the paper.

    Args:
      in_features: Channels of the input.
      hidden_features: Channels of memory and output.
      kernel_size: The size of the window along each spatial axis; as for `Conv`.
      strides: Of the convolution of the input. That of the hidden state keeps the size.
      padding: Of the convolution of the input, and of the hidden state if it keeps the size there.
        Otherwise (`"VALID"`, some numbers) the hidden state has `"SAME"`.
      use_bias: Whether the convolutions have a bias.
      dtype: The dtype of the convolutions; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters and of the first carry.
      carry_init: Initializes the carry; by default zeros.
      kernel_init: Initializes the kernel of the input.
      recurrent_kernel_init: Initializes the kernel of the hidden state.
      bias_init: Initializes the biases.
      promote_dtype: As for `Conv`.
      keep_rngs: Whether to keep a fork of the stream `carry`, for `initialize_carry`.
      rngs: The stream `params` initializes `ih`, then `hh`.
      kernel_metadata: Metadata of the kernel of the input.
      recurrent_kernel_metadata: Metadata of the kernel of the hidden state.
      bias_metadata: Metadata of the biases.

    Attributes:
      ih: `Conv(in_features, 4 * hidden_features, kernel_size)`, for i, g, f, o side by side.
      hh: `Conv(hidden_features, 4 * hidden_features, kernel_size)`.

    Example:
      >>> cell = nnx.ConvLSTMCell(3, 4, kernel_size=(3, 3), rngs=nnx.Rngs(0))
      >>> (c, h), y = cell(cell.initialize_carry((2, 8, 8, 3)), jnp.ones((2, 8, 8, 3)))
      >>> y.shape
      (2, 8, 8, 4)
      >>> nnx.RNN(cell)(jnp.ones((2, 5, 8, 8, 3))).shape  # (batch, time, height, width, channels)
      (2, 5, 8, 8, 4)

    Source: Shi et al. 2015, arXiv:1506.04214; the one in the forget gate is of Jozefowicz et al.
    2015, ICML 37:2342-2350.
    """

    rngs: RngStream | None

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        kernel_size: int | Sequence[int],
        *,
        strides: PerAxis = 1,
        padding: Padding = "SAME",
        use_bias: bool = True,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        carry_init: Initializer | None = None,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = default_kernel_init,
        bias_init: Initializer = default_bias_init,
        promote_dtype: PromoteDtype = promote_dtype,
        keep_rngs: bool = False,
        rngs: Rngs,
        kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        recurrent_kernel_metadata: Mapping[str, Any] = MappingProxyType({}),
        bias_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.in_features = in_features
        self.hidden_features = hidden_features
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.rngs = rngs.carry.fork() if keep_rngs else None
        convolution = functools.partial(
            Conv,
            out_features=4 * hidden_features,
            kernel_size=kernel_size,
            use_bias=use_bias,
            dtype=dtype,
            param_dtype=param_dtype,
            bias_init=bias_init,
            promote_dtype=promote_dtype,
            rngs=rngs,
            bias_metadata=bias_metadata,
        )
        self.ih = convolution(
            in_features,
            strides=strides,
            padding=padding,
            kernel_init=kernel_init,
            kernel_metadata=kernel_metadata,
        )
        self.hh = convolution(
            hidden_features,
            padding=padding if _keeps_size(padding, self.ih.kernel_size) else "SAME",
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
        )

    def __call__(
        self, carry: tuple[jax.Array, jax.Array], inputs: jax.Array
    ) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        """Returns the next carry `(c, h)` and the output `h`.

        Args:
          carry: `(c, h)`, each `(*batch, *new_spatial, hidden_features)`.
          inputs: `(*batch, *spatial, in_features)`.

        Raises:
          ValueError: `inputs` or `carry` have other shapes.
        """
        c, h = _pair_of(carry, self)
        gates = self.ih(inputs)
        expected = (*gates.shape[:-1], self.hidden_features)
        for name, part in (("c", c), ("h", h)):
            if jnp.shape(part) != expected:
                raise ValueError(
                    f"ConvLSTMCell expects the carry {name} to have shape {expected} for inputs of "
                    f"shape {inputs.shape}, found {jnp.shape(part)}. Make it with "
                    "cell.initialize_carry(inputs.shape)."
                )
        i, g, f, o = jnp.split(gates + self.hh(h), 4, axis=-1)
        with jax.numpy_dtype_promotion("standard"):  # gates may be narrower than the memory
            c = sigmoid(f + 1) * c + sigmoid(i) * tanh(g)
            h = sigmoid(o) * tanh(c)
        return (c, h), h

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> tuple[jax.Array, jax.Array]:
        """Returns the carry before the first step.

        Args:
          input_shape: `(*batch, *spatial, in_features)`, the shape of the input of one step.
          rngs: As for `LSTMCell.initialize_carry`.
          carry_init: As for `LSTMCell.initialize_carry`.

        Returns:
          Two arrays of shape `(*batch, *new_spatial, hidden_features)`.

        Raises:
          ValueError: `input_shape` has too few axes or other channels, or there is a `carry_init`
            and nothing to draw from.
        """
        inputs = jax.ShapeDtypeStruct(input_shape, self.param_dtype)
        gates = eval_shape(lambda convolution, x: convolution(x), self.ih, inputs)
        shape = (*gates.shape[:-1], self.hidden_features)
        c, h = draw_carry(self, 2, shape, rngs, carry_init)
        return c, h

    @property
    def num_feature_axes(self) -> int:
        """The number of spatial axes, and one for the channels."""
        return len(self.ih.kernel_size) + 1


def _pair_of(carry: Any, cell: Any) -> tuple[jax.Array, jax.Array]:
    """Returns the memory and the output that are an LSTM's carry."""
    if not isinstance(carry, tuple | list) or len(carry) != 2:
        raise ValueError(
            f"{type(cell).__name__} expects a carry (c, h) of two arrays, found "
            f"{jax.tree.map(jnp.shape, carry)}. Make it with cell.initialize_carry(inputs.shape)."
        )
    return carry[0], carry[1]


def _keeps_size(padding: Padding, kernel_size: tuple[int, ...]) -> bool:
    """Tells whether a convolution without strides has an output as large as its input."""
    if isinstance(padding, str):
        return padding != "VALID"
    pads = [padding] * len(kernel_size) if isinstance(padding, int) else padding
    sums = [2 * pad if isinstance(pad, int) else sum(pad) for pad in pads]
    return sums == [size - 1 for size in kernel_size]

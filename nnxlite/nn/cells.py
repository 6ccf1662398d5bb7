"""Recurrent cells: one step of a recurrent network, from carry and input to carry and output.

The *carry* is what a cell hands to its next step. `nnxlite.nn.recurrent.RNN` runs a cell along a
sequence. Input and hidden state are multiplied by matrices of their own and summed up, so only one
of the two has a bias. The LSTMs are in `nnxlite.nn.lstm`.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite.nn import initializers
from nnxlite.nn.activations import sigmoid, tanh
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Linear

Carry: TypeAlias = Any  # arrays in any pytree

default_kernel_init = initializers.lecun_normal()
default_bias_init = initializers.zeros_init()


def default_recurrent_kernel_init(
    key: jax.Array, shape: Sequence[Any], dtype: Any = None, out_sharding: Any = None
) -> jax.Array:
    """Returns an orthogonal matrix, made in the default precision: QR has no half precision."""
    options = {} if out_sharding is None else {"out_sharding": out_sharding}
    matrix = initializers.orthogonal()(key, shape, **options)
    return matrix if dtype is None else matrix.astype(dtype)


class RNNCellBase(Module):
    """The base of recurrent cells; a subclass has the three members below.

    Example:
      >>> class Sum(nnx.RNNCellBase):
      ...     @property
      ...     def num_feature_axes(self):
      ...         return 1
      ...
      ...     def __call__(self, carry, inputs):
      ...         return carry + inputs, carry + inputs
      ...
      ...     def initialize_carry(self, input_shape, rngs=None, carry_init=None):
      ...         return jnp.zeros(input_shape)
      >>> nnx.RNN(Sum())(jnp.ones((1, 3, 1))).ravel().tolist()
      [1.0, 2.0, 3.0]
    """

    def __call__(self, carry: Carry, inputs: jax.Array) -> tuple[Carry, Any]:
        """Returns the next carry and the output of one step."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__(carry, inputs).")

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Carry:
        """Returns the carry before the first step, for inputs of that shape (of one step)."""
        raise NotImplementedError(f"{type(self).__name__} has no initialize_carry(input_shape).")

    @property
    def num_feature_axes(self) -> int:
        """How many axes of an input, the last ones, are no batch axes."""
        raise NotImplementedError(f"{type(self).__name__} has no num_feature_axes.")


class FeatureCell(RNNCellBase):
    """A cell whose input and carry are `(..., features)`."""

    in_features: int
    hidden_features: int
    rngs: RngStream | None
    _carry_names: ClassVar[tuple[str, ...]] = ("h",)

    def initialize_carry(
        self,
        input_shape: tuple[int, ...],
        rngs: Rngs | RngStream | None = None,
        carry_init: Initializer | None = None,
    ) -> Any:
        """Returns the carry before the first step.

        Args:
          input_shape: `(..., in_features)`, the shape of the input of one step.
          rngs: Streams, of which `carry` is used, or a stream: one key per array. By default the
            cell's own stream. Zeros do without one.
          carry_init: Goes before the one of the constructor; by default zeros.

        Returns:
          Arrays of shape `(..., hidden_features)` and dtype `param_dtype`, as the call takes them.

        Raises:
          ValueError: There is a `carry_init`, and nothing to draw from.
        """
        shape = (*input_shape[:-1], self.hidden_features)
        carry = draw_carry(self, len(self._carry_names), shape, rngs, carry_init)
        return carry[0] if len(self._carry_names) == 1 else carry

    @property
    def num_feature_axes(self) -> int:
        """1: an input is `(..., in_features)`."""
        return 1

    def check(self, inputs: jax.Array, *carry: jax.Array) -> None:
        """Raises `ValueError` if the arguments of a call have other shapes than expected."""
        name, shape = type(self).__name__, jnp.shape(inputs)
        if shape[-1:] != (self.in_features,):
            raise ValueError(
                f"{name} expects inputs of shape (..., {self.in_features}), found {shape}."
            )
        for part, array in zip(self._carry_names, carry, strict=True):
            found = jnp.shape(array)
            if found[-1:] != (self.hidden_features,) or not _fit(found[:-1], shape[:-1]):
                raise ValueError(
                    f"{name} expects the carry {part} to have shape "
                    f"{(*shape[:-1], self.hidden_features)} for inputs of shape {shape}, found "
                    f"{found}. Make it with cell.initialize_carry(inputs.shape)."
                )


class GRUCell(FeatureCell):
    """A gated recurrent unit: a hidden state that a gate mixes with its update.

        r = gate_fn(x @ ir + br + h @ hr)                   resets what the update sees
        z = gate_fn(x @ iz + bz + h @ hz)                   keeps the state
        n = activation_fn(x @ in + bn + r * (h @ hn))       is the update
        h' = (1 - z) * n + z * h

    Here `r` is multiplied after the matrix, which is how cuDNN has it; the paper multiplies before.

    Args:
      in_features: Size of the last axis of the input.
      hidden_features: Size of the last axis of state and output.
      gate_fn: The function of gates.
      activation_fn: The function of the update.
      kernel_init: Initializes the kernel of the input.
      recurrent_kernel_init: Initializes the kernel of the hidden state.
      bias_init: Initializes the bias.
      dtype: The dtype of the products; by default what input and parameters promote to.
      param_dtype: The dtype of the parameters and of the first carry.
      carry_init: Initializes the carry; by default zeros.
      promote_dtype: As for `Linear`.
      keep_rngs: Whether to keep a fork of the stream `carry`, for `initialize_carry`.
      rngs: The stream `params` initializes `dense_i`, then `dense_h`.
      kernel_metadata: Metadata of the kernel of the input.
      recurrent_kernel_metadata: Metadata of the kernel of the hidden state.
      bias_metadata: Metadata of the bias.

    Attributes:
      dense_i: `Linear(in_features, 3 * hidden_features)`, for r, z, n side by side.
      dense_h: `Linear(hidden_features, 3 * hidden_features)` without bias.

    Example:
      >>> cell = nnx.GRUCell(3, 4, rngs=nnx.Rngs(0))
      >>> h, y = cell(cell.initialize_carry((8, 3)), jnp.ones((8, 3)))
      >>> cell.dense_i.kernel.shape, y.shape
      ((3, 12), (8, 4))

    Source: Cho et al. 2014, arXiv:1406.1078.
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
            out_features=3 * hidden_features,
            dtype=dtype,
            param_dtype=param_dtype,
            promote_dtype=promote_dtype,
            rngs=rngs,
        )
        self.dense_i = dense(
            in_features,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )
        self.dense_h = dense(
            hidden_features,
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
        )

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the next state, as carry and as output.

        Args:
          carry: `(..., hidden_features)`.
          inputs: `(..., in_features)`.

        Raises:
          ValueError: `inputs` or `carry` have other shapes.
        """
        self.check(inputs, carry)
        x_r, x_z, x_n = jnp.split(self.dense_i(inputs), 3, axis=-1)
        h_r, h_z, h_n = jnp.split(self.dense_h(carry), 3, axis=-1)
        r, z = self.gate_fn(x_r + h_r), self.gate_fn(x_z + h_z)
        n = self.activation_fn(x_n + r * h_n)
        with jax.numpy_dtype_promotion("standard"):  # gates may be narrower than the state
            h = (1.0 - z) * n + z * carry
        return h, h


class SimpleCell(FeatureCell):
    """The plain recurrent cell: `h' = activation_fn(x @ kernel_i + bias + h @ kernel_h)`.

    Args:
      in_features: Size of the last axis of the input.
      hidden_features: Size of the last axis of state and output.
      dtype: The dtype to compute in; None is what input and parameters promote to.
      param_dtype: The dtype of the parameters and of the first carry.
      carry_init: Initializes the carry; by default zeros.
      residual: Whether to add `h` before `activation_fn`.
      activation_fn: The function of the sum.
      kernel_init: Initializes the kernel of the input.
      recurrent_kernel_init: Initializes the kernel of the hidden state.
      bias_init: Initializes the bias.
      promote_dtype: As for `Linear`.
      keep_rngs: Whether to keep a fork of the stream `carry`, for `initialize_carry`.
      rngs: The stream `params` initializes `dense_h`, then `dense_i`.
      kernel_metadata: Metadata of the kernel of the input.
      recurrent_kernel_metadata: Metadata of the kernel of the hidden state.
      bias_metadata: Metadata of the bias.

    Attributes:
      dense_h: `Linear(hidden_features, hidden_features)` without bias.
      dense_i: `Linear(in_features, hidden_features)`.

    Example:
      >>> cell = nnx.SimpleCell(3, 4, rngs=nnx.Rngs(0))
      >>> h, y = cell(cell.initialize_carry((8, 3)), jnp.ones((8, 3)))
      >>> y.shape
      (8, 4)

    Source: Elman 1990, Cognitive Science 14:179-211.
    """

    def __init__(
        self,
        in_features: int,
        hidden_features: int,
        *,
        dtype: DTypeLike | None = jnp.float32,
        param_dtype: DTypeLike = jnp.float32,
        carry_init: Initializer | None = None,
        residual: bool = False,
        activation_fn: Callable[..., Any] = tanh,
        kernel_init: Initializer = default_kernel_init,
        recurrent_kernel_init: Initializer = default_recurrent_kernel_init,
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
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.carry_init = carry_init
        self.residual = residual
        self.activation_fn = activation_fn
        self.promote_dtype = promote_dtype
        self.rngs = rngs.carry.fork() if keep_rngs else None
        dense = functools.partial(
            Linear,
            out_features=hidden_features,
            dtype=dtype,
            param_dtype=param_dtype,
            promote_dtype=promote_dtype,
            rngs=rngs,
        )
        self.dense_h = dense(
            hidden_features,
            use_bias=False,
            kernel_init=recurrent_kernel_init,
            kernel_metadata=recurrent_kernel_metadata,
        )
        self.dense_i = dense(
            in_features,
            kernel_init=kernel_init,
            bias_init=bias_init,
            kernel_metadata=kernel_metadata,
            bias_metadata=bias_metadata,
        )

    def __call__(self, carry: jax.Array, inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the next state, as carry and as output.

        Args:
          carry: `(..., hidden_features)`.
          inputs: `(..., in_features)`.

        Raises:
          ValueError: `inputs` or `carry` have other shapes.
        """
        self.check(inputs, carry)
        h = self.dense_i(inputs) + self.dense_h(carry)
        if self.residual:
            with jax.numpy_dtype_promotion("standard"):
                h = h + carry
        h = self.activation_fn(h)
        return h, h


def draw_carry(
    cell: Any,
    count: int,
    shape: tuple[int, ...],
    rngs: Rngs | RngStream | None,
    carry_init: Initializer | None,
) -> tuple[jax.Array, ...]:
    """Returns that many arrays for a first carry; see `LSTMCell.initialize_carry`."""
    initialize = cell.carry_init if carry_init is None else carry_init
    stream = cell.rngs if rngs is None else rngs.carry if isinstance(rngs, Rngs) else rngs
    if not isinstance(stream, RngStream | None):
        raise TypeError(
            f"{type(cell).__name__} expects rngs to be an nnx.Rngs or an nnx.RngStream, found "
            f"{type(stream)}."
        )
    if stream is None:
        if initialize is not None:
            raise ValueError(
                f"{type(cell).__name__} has a carry_init and no random stream for it. Call "
                "cell.initialize_carry(input_shape, rngs), or make the cell with keep_rngs=True."
            )
        return tuple(jnp.zeros(shape, cell.param_dtype) for _ in range(count))
    initialize = initialize or default_bias_init
    return tuple(initialize(stream(), shape, cell.param_dtype) for _ in range(count))


def _fit(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    """Tells whether shapes broadcast."""
    pairs = zip(reversed(a), reversed(b), strict=False)
    return all(m == n or 1 in (m, n) for m, n in pairs)

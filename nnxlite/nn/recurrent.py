"""Recurrent networks: cells run along the time axis of sequences.

Sequences of a batch may have different lengths: they are padded at their end, and `seq_lengths`
says where each ends. What comes before is not touched by the padding, but outputs beyond the end
are computed all the same, and are to be ignored.
"""

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from nnxlite._core.filters import Filter, Nothing, Predicate, to_predicate
from nnxlite._core.iterate import iter_graph
from nnxlite._core.module import Module
from nnxlite._core.random_state import SplitBackups, split_rngs
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._transforms import axes
from nnxlite._transforms.axes import StateAxes
from nnxlite._transforms.scan import scan
from nnxlite.nn.cells import Carry, RNNCellBase


class RNNBase(Protocol):
    """What `Bidirectional` runs in each direction: an `RNN`, or an object called like one."""

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Carry | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs | RngStream | None = None,
    ) -> Any:
        """Returns the outputs, or carry and outputs."""
        ...


class RNN(Module):
    """Runs a cell along the time axis, with `nnx.scan`.

    Args:
      cell: The cell: an `RNNCellBase`.
      time_major: Whether the time axis is the first, as in `(time, *batch, ...)`. Otherwise it
        comes after the batch axes: `(*batch, time, ...)`.
      return_carry: Whether to return the last carry too.
      reverse: Whether to run from the end of each sequence to its beginning.
      keep_order: Whether reversed outputs stand where their inputs do. Otherwise they are in the
        order in which they were made.
      unroll: How many steps are compiled as one iteration; as for `jax.lax.scan`.
      state_axes: Axes of the cell's Variables by filter, as in `StateAxes`; by default all are
        carried from step to step.
      broadcast_rngs: Which random streams of the cell start anew in each step, so that all steps
        of a call draw the same numbers, as in variational dropout. By default none: each step
        draws its own.
      rngs: The stream that draws first carries: True for one of its own, False for none, a stream,
        or streams whose `carry` is forked. A cell whose carry starts with zeros needs none.

    Raises:
      ValueError: `rngs` is none of these.

    Example:
      >>> rnn = nnx.RNN(nnx.LSTMCell(3, 4, rngs=nnx.Rngs(0)))
      >>> rnn(jnp.ones((8, 5, 3))).shape  # (batch, time, features)
      (8, 5, 4)
      >>> lengths = jnp.array([5, 2, 1, 3, 4, 5, 5, 0])
      >>> (c, h), y = rnn(jnp.ones((8, 5, 3)), seq_lengths=lengths, return_carry=True)
      >>> bool((h[1] == y[1, 1]).all())  # the carry after the last of two steps
      True
    """

    rngs: RngStream | None

    def __init__(
        self,
        cell: RNNCellBase,
        *,
        time_major: bool = False,
        return_carry: bool = False,
        reverse: bool = False,
        keep_order: bool = False,
        unroll: int = 1,
        state_axes: Mapping[Any, Any] | StateAxes | None = None,
        broadcast_rngs: Filter = None,
        rngs: Rngs | RngStream | bool = True,
    ) -> None:
        if state_axes is None:
            state_axes = {...: axes.Carry}
        self.cell = cell
        self.time_major = time_major
        self.return_carry = return_carry
        self.reverse = reverse
        self.keep_order = keep_order
        self.unroll = unroll
        self.rngs = _carry_stream(rngs, "RNN")
        self.state_axes = state_axes if isinstance(state_axes, StateAxes) else StateAxes(state_axes)
        self.broadcast_rngs = broadcast_rngs

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: Carry | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
        rngs: Rngs | RngStream | None = None,
    ) -> Any:
        """Returns the outputs of all steps, or `(carry, outputs)`.

        Args:
          inputs: `(*batch, time, *features)`, or `(time, *batch, *features)` if `time_major`.
            There are as many feature axes as the cell says.
          initial_carry: The carry before the first step; by default the cell makes it.
          seq_lengths: `(*batch)` ints, the number of steps of each sequence. The carry returned is
            that after its last step, and `reverse` starts there.
          return_carry: As for the constructor, whose options these are if left out.
          time_major: As for the constructor.
          reverse: As for the constructor.
          keep_order: As for the constructor.
          rngs: A stream, or streams of which `carry` is forked, in place of the network's own.

        Returns:
          Outputs with the time axis of the inputs, and the carry before them if asked for. The
          carry of a sequence of no steps is the initial one.

        Raises:
          ValueError: `inputs` has too few axes, or `seq_lengths` another shape than the batch.
          StructureError: A step gives a carry of another dtype than it got. The first carry has the
            `param_dtype` of the cell; inputs of a wider dtype may need an `initial_carry`.
        """
        return_carry = self.return_carry if return_carry is None else return_carry
        time_major = self.time_major if time_major is None else time_major
        reverse = self.reverse if reverse is None else reverse
        keep_order = self.keep_order if keep_order is None else keep_order
        batch = self._batch_shape(inputs, time_major)
        if seq_lengths is not None and jnp.shape(seq_lengths) != batch:
            raise ValueError(
                f"RNN expects seq_lengths of shape {batch} for inputs of shape {inputs.shape} "
                f"(time_major={time_major}), found {jnp.shape(seq_lengths)}."
            )
        flip = functools.partial(
            flip_sequences,
            seq_lengths=seq_lengths,
            num_batch_dims=len(batch),
            time_major=time_major,
        )
        stream = self.rngs if rngs is None else rngs
        if isinstance(stream, Rngs):
            stream = stream.carry.fork()
        time_axis = 0 if time_major else len(batch)
        if initial_carry is None:
            shape = inputs.shape[:time_axis] + inputs.shape[time_axis + 1 :]
            initial_carry = self.cell.initialize_carry(shape, stream)
        lengths = seq_lengths if return_carry else None
        carry, outputs = self._run(
            initial_carry, flip(inputs) if reverse else inputs, time_axis, lengths
        )
        if reverse and keep_order:
            outputs = jax.tree.map(flip, outputs)
        return (carry, outputs) if return_carry else outputs

    def _batch_shape(self, inputs: jax.Array, time_major: bool) -> tuple[int, ...]:
        features = self.cell.num_feature_axes
        if inputs.ndim <= features:
            raise ValueError(
                f"RNN of {type(self.cell).__name__} expects inputs with a time axis and "
                f"{features} feature axes, found shape {inputs.shape}."
            )
        batch = inputs.shape[: inputs.ndim - features]
        return batch[1:] if time_major else batch[:-1]

    def _run(
        self, carry: Carry, inputs: jax.Array, time_axis: int, lengths: jax.Array | None
    ) -> tuple[Carry, Any]:
        broadcast = to_predicate(self.broadcast_rngs)
        run = _loop(self.state_axes, broadcast, time_axis, self.unroll, lengths is None)
        with split_rngs(self.cell, splits=1, only=broadcast, squeeze=True):
            if lengths is None:
                return run(self.cell, carry, inputs)
            steps = jnp.arange(inputs.shape[time_axis])
            (_, last), outputs = run(self.cell, (carry, carry), inputs, steps, lengths)
            return last, outputs


def _concatenate(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.concatenate([a, b], axis=-1)


class Bidirectional(Module):
    """Runs one network forwards and one backwards, and merges their outputs step by step.

    Args:
      forward_rnn: An `RNN`, or an object called like one.
      backward_rnn: Another.
      merge_fn: Merges forward and backward outputs; by default along the last axis.
      time_major: As for `RNN`; it goes before that of the two.
      return_carry: Whether to return the last carries too.
      rngs: As for `RNN`; both networks draw from it in turn.

    Raises:
      ValueError: `rngs` is none of these.

    Example:
      >>> there, back = (nnx.RNN(nnx.GRUCell(3, 4, rngs=nnx.Rngs(seed))) for seed in (0, 1))
      >>> layer = nnx.Bidirectional(there, back)
      >>> layer(jnp.ones((2, 5, 3))).shape
      (2, 5, 8)

    Source: Schuster and Paliwal 1997, IEEE Transactions on Signal Processing 45:2673-2681.
    """

    rngs: RngStream | None

    def __init__(
        self,
        forward_rnn: RNNBase,
        backward_rnn: RNNBase,
        *,
        merge_fn: Callable[[jax.Array, jax.Array], jax.Array] = _concatenate,
        time_major: bool = False,
        return_carry: bool = False,
        rngs: Rngs | RngStream | bool = True,
    ) -> None:
        if forward_rnn is backward_rnn:
            warnings.warn(
                "Bidirectional has one network for both directions, which share its parameters.",
                stacklevel=2,
            )
        self.forward_rnn = forward_rnn
        self.backward_rnn = backward_rnn
        self.merge_fn = merge_fn
        self.time_major = time_major
        self.return_carry = return_carry
        self.rngs = _carry_stream(rngs, "Bidirectional")

    def __call__(
        self,
        inputs: jax.Array,
        *,
        initial_carry: tuple[Carry, Carry] | None = None,
        rngs: Rngs | RngStream | None = None,
        seq_lengths: jax.Array | None = None,
        return_carry: bool | None = None,
        time_major: bool | None = None,
        reverse: bool | None = None,
        keep_order: bool | None = None,
    ) -> Any:
        """Returns the merged outputs, or `((forward_carry, backward_carry), outputs)`.

        Args:
          inputs: As for `RNN`.
          initial_carry: The carries that the two start with.
          rngs: A stream, or streams of which `carry` is used, in place of the layer's own.
          seq_lengths: As for `RNN`.
          return_carry: As for the constructor, whose options these are if left out.
          time_major: As for the constructor.
          reverse: Has no effect, as both directions are run; taken so that the call is like that
            of `RNN`.
          keep_order: Has no effect: outputs stand where their inputs do.
        """
        stream = self.rngs if rngs is None else rngs
        options = {
            "rngs": stream.carry if isinstance(stream, Rngs) else stream,
            "seq_lengths": seq_lengths,
            "return_carry": True,
            "time_major": self.time_major if time_major is None else time_major,
        }
        first, second = (None, None) if initial_carry is None else initial_carry
        forward_carry, forward = self.forward_rnn(
            inputs, initial_carry=first, reverse=False, **options
        )
        backward_carry, backward = self.backward_rnn(
            inputs, initial_carry=second, reverse=True, keep_order=True, **options
        )
        outputs = jax.tree.map(self.merge_fn, forward, backward)
        return_carry = self.return_carry if return_carry is None else return_carry
        return ((forward_carry, backward_carry), outputs) if return_carry else outputs


def flip_sequences(
    inputs: jax.Array, seq_lengths: jax.Array | None, num_batch_dims: int, time_major: bool
) -> jax.Array:
    """Returns sequences in reverse, with their padding still at the end.

    Args:
      inputs: `(*batch, time, ...)`, or `(time, *batch, ...)` if `time_major`.
      seq_lengths: `(*batch)`, the number of steps of each sequence; by default all.
      num_batch_dims: The number of batch axes.
      time_major: Whether the time axis is the first.

    Example:
      >>> padded = jnp.array([[1, 0, 0], [2, 3, 0], [4, 5, 6]])
      >>> flip_sequences(padded, jnp.array([1, 2, 3]), 1, False).tolist()
      [[1, 0, 0], [3, 2, 0], [6, 5, 4]]
    """
    axis = 0 if time_major else num_batch_dims
    if seq_lengths is None:
        return jnp.flip(inputs, axis)
    size = inputs.shape[axis]
    ones = [1] * (num_batch_dims + 1)
    ones[axis] = size
    last = jnp.expand_dims(jnp.asarray(seq_lengths) - 1, axis)
    # Behind the end the indices are negative; modulo the size they run backwards over the padding.
    index = (last - jnp.arange(size, dtype=last.dtype).reshape(ones)) % max(size, 1)
    index = index.reshape(*index.shape, *[1] * (inputs.ndim - index.ndim))
    return jnp.take_along_axis(inputs, index, axis)


@functools.lru_cache(maxsize=256)
def _loop(
    state_axes: StateAxes, broadcast_rngs: Predicate, time_axis: int, unroll: int, is_plain: bool
) -> Callable[..., Any]:
    """Returns the scan over a cell; calls that share it find what was compiled for it."""

    def step(cell: RNNCellBase, carry: Carry, x: jax.Array) -> tuple[Carry, Any]:
        with _streams_kept(cell, broadcast_rngs):
            return cell(carry, x)

    def masked_step(
        cell: RNNCellBase, carries: Any, x: jax.Array, number: jax.Array, lengths: jax.Array
    ) -> tuple[Any, Any]:
        carry, last = carries
        carry, y = step(cell, carry, x)
        last = jax.tree.map(functools.partial(_select, number < lengths), carry, last)
        return (carry, last), y

    in_axes = (state_axes, axes.Carry, time_axis)
    return scan(
        step if is_plain else masked_step,
        in_axes=in_axes if is_plain else (*in_axes, 0, None),
        out_axes=(axes.Carry, time_axis),
        unroll=unroll,
    )


def _select(is_running: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Returns the new carry of the sequences that are running, and the old one of the others."""
    batch = is_running.shape
    if new.shape[: len(batch)] != batch:
        raise ValueError(
            f"RNN cannot tell the last carry of each sequence: seq_lengths has shape {batch}, so "
            f"the carry has to begin with these axes, and has shape {new.shape}."
        )
    return jnp.where(is_running.reshape(*batch, *[1] * (new.ndim - len(batch))), new, old)


def _streams_kept(cell: RNNCellBase, predicate: Predicate) -> SplitBackups:
    """Returns a context that puts the streams that match back to what they are now."""
    if predicate == Nothing():
        return SplitBackups(())
    return SplitBackups(
        (stream, stream.key.get_value(), stream.count.get_value())
        for path, stream in iter_graph(cell)
        if isinstance(stream, RngStream) and predicate((*path, "count"), stream.count)
    )


def _carry_stream(rngs: Rngs | RngStream | bool, layer: str) -> RngStream | None:
    """Returns the stream that a network keeps for its first carries."""
    if isinstance(rngs, bool):
        return RngStream(0, tag="carry") if rngs else None
    if isinstance(rngs, Rngs):
        return rngs.carry.fork()
    if isinstance(rngs, RngStream):
        return rngs
    raise ValueError(
        f"{layer} expects rngs to be an nnx.Rngs, an nnx.RngStream or a bool, found {type(rngs)}."
    )

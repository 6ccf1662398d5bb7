"""RNN and Bidirectional, against Python loops over the steps."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError
from nnxlite.nn.recurrent import flip_sequences

close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6)
LENGTHS = jnp.array([4, 1, 0, 3])
TRACES: list[int] = []


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def gru(seed: int = 0) -> nnx.GRUCell:
    return nnx.GRUCell(3, 2, rngs=nnx.Rngs(seed))


def loop(cell: Any, xs: Any, carry: Any = None) -> tuple[Any, list[Any]]:
    """Runs a cell over a list of inputs."""
    ys = []
    for x in xs:
        carry = cell.initialize_carry(x.shape) if carry is None else carry
        carry, y = cell(carry, x)
        ys.append(y)
    return carry, ys


class Counter(nnx.RNNCellBase):
    """Adds its input, counts its steps, and notes when it is traced."""

    num_feature_axes = 1

    def __init__(self) -> None:
        self.steps = nnx.BatchStat(jnp.int32(0))

    def __call__(self, carry: Any, inputs: Any) -> Any:
        TRACES.append(1)
        self.steps[...] += jnp.int32(1)
        self.sow(nnx.Intermediate, "x", inputs)
        return carry + inputs, carry + inputs

    def initialize_carry(self, input_shape: Any, rngs: Any = None, carry_init: Any = None) -> Any:
        return jnp.zeros(input_shape)


@pytest.mark.parametrize("kind", [nnx.LSTMCell, nnx.GRUCell])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)], ids=str)
def test_it_is_a_loop_over_time(kind: Callable[..., Any], batch: tuple[int, ...]) -> None:
    cell, x = kind(3, 2, rngs=nnx.Rngs(0)), drawn(4, *batch, 3)
    carry, ys = loop(cell, x)
    y = nnx.RNN(cell)(jnp.moveaxis(x, 0, len(batch)))
    close(y, jnp.stack(ys, axis=len(batch)))
    found = nnx.RNN(cell, time_major=True, return_carry=True, unroll=2)(x)
    jax.tree.map(close, found, (carry, jnp.stack(ys)))


def test_a_call_goes_on_from_a_carry() -> None:
    rnn, x = nnx.RNN(gru(), return_carry=True), drawn(2, 5, 3)
    carry, first = rnn(x[:, :2])
    carry, second = rnn(x[:, 2:], initial_carry=carry)
    jax.tree.map(close, (carry, jnp.concatenate([first, second], 1)), rnn(x))


@pytest.mark.parametrize("reverse", [False, True])
def test_padded_sequences_are_run_as_if_each_were_alone(reverse: bool) -> None:
    cell, x = gru(), drawn(4, 4, 3)
    rnn = nnx.RNN(cell, reverse=reverse, keep_order=True)
    carry, ys = rnn(x, seq_lengths=LENGTHS, return_carry=True)
    for n, length in enumerate([4, 1, 3]):
        n = 3 if n == 2 else n
        steps = list(x[n, :length])
        last, outputs = loop(cell, steps[::-1] if reverse else steps)
        close(carry[n], last)
        close(ys[n, :length], jnp.stack(outputs[::-1] if reverse else outputs))


def test_the_carry_of_a_sequence_without_steps_is_the_first() -> None:
    start = drawn(4, 2)
    rnn = nnx.RNN(gru(), return_carry=True)
    carry, _ = rnn(drawn(4, 4, 3), seq_lengths=LENGTHS, initial_carry=start)
    np.testing.assert_array_equal(carry[2], start[2])


@pytest.mark.parametrize("reverse", [False, True])
def test_padding_changes_nothing(reverse: bool) -> None:
    rnn, x = nnx.RNN(gru(), reverse=reverse), drawn(4, 4, 3)
    is_real = (jnp.arange(4)[None] < LENGTHS[:, None])[..., None]

    def loss(rnn: nnx.RNN, x: jax.Array) -> Any:
        carry, ys = rnn(x, seq_lengths=LENGTHS, return_carry=True)
        real = jnp.where(is_real, ys, 0)
        return (carry**2).sum() + real.sum(), (carry, real)

    found = [
        nnx.value_and_grad(loss, has_aux=True)(rnn, jnp.where(is_real, x, pad)) for pad in (0, 9)
    ]
    jax.tree.map(np.testing.assert_array_equal, *found)


@pytest.mark.parametrize("time_major", [False, True])
def test_sequences_are_flipped_up_to_their_end(time_major: bool) -> None:
    x = np.arange(24).reshape(4, 6)
    lengths = np.array([6, 1, 0, 4])
    flipped = flip_sequences(jnp.asarray(x.T if time_major else x), lengths, 1, time_major)
    flipped = flipped.T if time_major else flipped
    for row, length, found in zip(x, lengths, flipped, strict=True):
        np.testing.assert_array_equal(found, [*row[:length][::-1], *row[length:][::-1]])


def test_reversed_outputs_may_keep_the_order() -> None:
    rnn, x = nnx.RNN(gru(), reverse=True), drawn(2, 4, 3)
    _, ys = loop(rnn.cell, x.swapaxes(0, 1)[::-1])
    close(rnn(x), jnp.stack(ys, 1))
    close(rnn(x, keep_order=True), jnp.stack(ys[::-1], 1))


def test_both_directions_are_run_and_merged() -> None:
    there, back, x = gru(0), gru(1), drawn(2, 4, 3)
    carries = (drawn(2, 2, seed=1), drawn(2, 2, seed=2))
    layer = nnx.Bidirectional(nnx.RNN(there), nnx.RNN(back), return_carry=True)
    steps = list(x.swapaxes(0, 1))
    first, forward = loop(there, steps, carries[0])
    second, backward = loop(back, steps[::-1], carries[1])
    merged = jnp.concatenate([jnp.stack(forward, 1), jnp.stack(backward[::-1], 1)], -1)
    found = layer(x, initial_carry=carries)
    jax.tree.map(close, found, ((first, second), merged))
    layer.merge_fn = jnp.subtract
    y = layer(x.swapaxes(0, 1), initial_carry=carries, time_major=True, return_carry=False)
    close(y, jnp.stack(forward) - jnp.stack(backward[::-1]))


def test_directions_that_share_parameters_are_pointed_out() -> None:
    rnn = nnx.RNN(gru())
    with pytest.warns(UserWarning, match="one network for both directions"):
        nnx.Bidirectional(rnn, rnn)


def test_variables_of_the_cell_are_carried_from_step_to_step() -> None:
    rnn = nnx.RNN(Counter())
    for _ in range(2):
        np.testing.assert_array_equal(rnn(jnp.ones((1, 3, 1))).ravel(), [1, 2, 3])
    assert int(rnn.cell.steps[...]) == 6


def test_a_second_call_is_not_traced_again() -> None:
    rnn, x = nnx.RNN(Counter()), jnp.ones((1, 3, 1))
    rnn(x)
    count = len(TRACES)
    rnn(x)
    assert len(TRACES) == count


def test_each_step_may_have_parameters_of_its_own() -> None:
    class Scaled(Counter):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.scale = nnx.Param(jnp.arange(float(size)))

        def __call__(self, carry: Any, inputs: Any) -> Any:
            return super().__call__(carry, inputs * self.scale[...])

    rnn = nnx.RNN(Scaled(3), state_axes={nnx.Param: 0, ...: nnx.Carry})
    np.testing.assert_array_equal(rnn(jnp.ones((1, 3, 1))).ravel(), [0, 1, 3])


@pytest.mark.parametrize("broadcast", [None, "dropout", ["dropout", "noise"]], ids=str)
def test_dropout_may_be_the_same_in_each_step_of_a_call(broadcast: Any) -> None:
    class Dropped(Counter):
        def __init__(self) -> None:
            super().__init__()
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(dropout=0))

        def __call__(self, carry: Any, inputs: Any) -> Any:
            return carry, self.dropout(inputs)

    rnn = nnx.RNN(Dropped(), broadcast_rngs=broadcast)
    first, second = (rnn(jnp.ones((1, 3, 32)))[0] for _ in range(2))
    assert not jnp.array_equal(first, second)
    assert all(jnp.array_equal(first[0], step) for step in first) == (broadcast is not None)


def test_first_carries_are_drawn_from_the_stream() -> None:
    normal = jax.nn.initializers.normal()
    cell = nnx.GRUCell(3, 2, carry_init=normal, rngs=nnx.Rngs(0))
    x, stream = jnp.zeros((1, 0, 3)), nnx.RngStream(5, tag="carry")
    own = nnx.RNN(cell, return_carry=True, rngs=stream)
    expected = normal(jax.random.fold_in(jax.random.key(5), 0), (1, 2), jnp.float32)
    np.testing.assert_array_equal(own(x)[0], expected)
    assert not jnp.array_equal(own(x)[0], expected)
    without = nnx.RNN(cell, return_carry=True, rngs=False)
    np.testing.assert_array_equal(without(x, rngs=nnx.RngStream(5, tag="carry"))[0], expected)
    with pytest.raises(ValueError, match="GRUCell has a carry_init and no random stream"):
        without(x)


def context(name: str) -> Callable[[nnx.RNN, jax.Array], jax.Array]:
    def run(rnn: nnx.RNN, x: jax.Array) -> jax.Array:
        return rnn(x, seq_lengths=LENGTHS, reverse=True, keep_order=True)

    return {
        "jit": nnx.jit(run),
        "remat": nnx.jit(nnx.remat(run)),
        "scan": lambda rnn, x: nnx.scan(
            lambda rnn, x: (rnn, run(rnn, x)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0)
        )(rnn, x[None])[1][0],
        "merged": lambda rnn, x: run(nnx.merge(*nnx.split(rnn)), x),
        "capture": lambda rnn, x: nnx.capture(rnn, nnx.Intermediate)(
            x, seq_lengths=LENGTHS, reverse=True, keep_order=True
        )[0],
    }[name]


@pytest.mark.parametrize("name", ["jit", "remat", "scan", "merged", "capture"])
def test_it_works_inside_of_transforms(name: str) -> None:
    rnn, x = nnx.RNN(gru()), drawn(4, 4, 3)
    expected = rnn(x, seq_lengths=LENGTHS, reverse=True, keep_order=True)
    close(context(name)(rnn, x), expected)
    assert int(rnn.rngs.count[...]) == (1 if name == "merged" else 2)


def test_a_network_without_a_stream_may_be_shared_by_a_vmap() -> None:
    rnn, x = nnx.RNN(gru(), rngs=False), drawn(4, 4, 3)
    close(nnx.vmap(lambda rnn, x: rnn(x), in_axes=(None, 0))(rnn, x), rnn(x))


def test_gradients_are_those_of_the_loop() -> None:
    rnn, x = nnx.RNN(gru()), drawn(2, 4, 3)
    found = nnx.grad(lambda rnn: (rnn(x) ** 2).sum())(rnn)
    expected = nnx.grad(lambda rnn: sum((y**2).sum() for y in loop(rnn.cell, x.swapaxes(0, 1))[1]))(
        rnn
    )
    jax.tree.map(close, found, expected)


def test_what_a_cell_sows_is_found_by_step() -> None:
    rnn, x = nnx.RNN(Counter()), drawn(1, 3, 2)
    _, found = nnx.capture(rnn, nnx.Intermediate)(x)
    np.testing.assert_array_equal(found["cell"]["x"][...][0], x.swapaxes(0, 1))


def test_wrong_inputs_are_refused() -> None:
    rnn = nnx.RNN(gru())
    with pytest.raises(ValueError, match=r"RNN of GRUCell expects inputs .* found shape \(3,\)"):
        rnn(jnp.ones(3))
    with pytest.raises(ValueError, match=r"seq_lengths of shape \(4,\) .* found \(5,\)"):
        rnn(jnp.ones((4, 5, 3)), seq_lengths=jnp.ones(5, jnp.int32))
    with pytest.raises(ValueError, match=r"GRUCell expects inputs of shape \(\.\.\., 3\)"):
        rnn(jnp.ones((4, 5, 2)))
    for layer in (nnx.RNN, functools.partial(nnx.Bidirectional, rnn)):
        with pytest.raises(ValueError, match=r"expects rngs to be .* found .*int"):
            layer(nnx.RNN(gru()), rngs=0)


def test_a_carry_has_to_keep_its_dtype_and_to_begin_with_the_batch() -> None:
    with pytest.raises(StructureError, match=r"carry is float32\[4,2\] before the step and"):
        nnx.RNN(nnx.SimpleCell(3, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))(jnp.ones((4, 5, 3)))

    class Timed(Counter):
        def __call__(self, carry: Any, inputs: Any) -> Any:
            return carry + jnp.float32(1), inputs

    clock = nnx.RNN(Timed(), return_carry=True)
    with pytest.raises(ValueError, match=r"seq_lengths has shape \(4,\), so .* has shape \(\)"):
        clock(jnp.ones((4, 5, 1)), initial_carry=jnp.float32(0), seq_lengths=LENGTHS)

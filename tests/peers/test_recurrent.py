"""Recurrent layers have the parameters, outputs and states of flax for the same seeds.

On purpose other than in flax.nnx 0.12: every cell can be made with parameters of half precision, a
cell whose carry starts with zeros needs no stream, sequences of different lengths may have any
number of batch axes, and the carry of a sequence without steps is the initial one, not the one
after the padding.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import nnxlite as nnx
from tests.peers.test_nn import LIBRARIES, assert_same, inputs

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

CELLS = ["LSTMCell", "OptimizedLSTMCell", "GRUCell", "SimpleCell"]
HALF = {"dtype": jnp.bfloat16}
OPTIONS: list[dict[str, Any]] = [
    {},
    HALF,
    {"activation_fn": jax.nn.relu, "bias_init": jax.nn.initializers.normal()},
    {
        "recurrent_kernel_init": jax.nn.initializers.normal(),
        "kernel_init": jax.nn.initializers.ones,
    },
]


def assert_close(ours: Any, theirs: Any) -> None:
    ours, theirs = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        tolerance = 1e-6 if a.dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(
            np.asarray(a, np.float32), np.asarray(b, np.float32), tolerance, tolerance
        )


def pair(name: str, **options: Any) -> list[Any]:
    return [getattr(lib, name)(3, 4, **options, rngs=lib.Rngs(0)) for lib in LIBRARIES]


@pytest.mark.parametrize("name", CELLS)
@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "bfloat16", "relu", "kernels"])
def test_a_cell_is_that_of_flax(name: str, options: dict[str, Any]) -> None:
    ours, theirs = pair(name, **options)
    assert_same(ours, theirs)
    found = []
    for lib, cell in zip(LIBRARIES, (ours, theirs), strict=True):
        rngs = lib.Rngs(3)
        carry = cell.initialize_carry((5, 3), rngs, lib.initializers.normal())
        found.append((carry, cell(carry, inputs(5, 3)), rngs.carry()))
    assert jnp.array_equal(jax.random.key_data(found[0][2]), jax.random.key_data(found[1][2]))
    assert_close(found[0][:2], found[1][:2])


@pytest.mark.parametrize("options", [{"residual": True}, {"dtype": None}, HALF], ids=str)
def test_a_simple_cell_has_the_options_of_flax(options: dict[str, Any]) -> None:
    x, h = inputs(5, 3, dtype=jnp.bfloat16), inputs(5, 4)
    assert_close(*(cell(h, x) for cell in pair("SimpleCell", **options)))


@pytest.mark.filterwarnings("ignore:keep_rngs", "ignore:carry_init")
@pytest.mark.parametrize("name", CELLS)
def test_a_cell_keeps_its_stream_and_initializer_as_in_flax(name: str) -> None:
    options = {"keep_rngs": True, "carry_init": jax.nn.initializers.normal()}
    ours, theirs = pair(name, **options)
    for _ in range(2):
        assert_close(ours.initialize_carry((5, 3)), theirs.initialize_carry((5, 3)))
    assert_same(ours, theirs)


@pytest.mark.parametrize("name", [*CELLS, "RNN", "Bidirectional"])
def test_constructor_and_call_take_what_those_of_flax_take(name: str) -> None:
    functions = ["__init__", "__call__"] + ["initialize_carry"] * (name in CELLS)
    for function in functions:
        ours, theirs = (
            inspect.signature(inspect.unwrap(getattr(getattr(lib, name), function))).parameters
            for lib in LIBRARIES
        )
        assert set(ours) == set(theirs)
        for parameter in ours:
            assert ours[parameter].kind == theirs[parameter].kind
            default = theirs[parameter].default
            if isinstance(default, int | float | str | None):
                assert ours[parameter].default == default, parameter


REVERSE: dict[str, Any] = {"reverse": True, "unroll": 2}
MAJOR: dict[str, Any] = {"reverse": True, "keep_order": True, "time_major": True}


@pytest.mark.parametrize("lengths", [None, (7, 1, 4)], ids=["whole", "padded"])
@pytest.mark.parametrize(
    ("name", "options"),
    [*((name, {}) for name in CELLS), ("LSTMCell", REVERSE), ("GRUCell", MAJOR)],
    ids=[*CELLS, "reverse", "time major"],
)
def test_a_network_is_that_of_flax(name: str, lengths: Any, options: dict[str, Any]) -> None:
    x = inputs(7, 3, 3)
    if not options.get("time_major"):
        x = x.swapaxes(0, 1)
    lengths = None if lengths is None else jnp.array(lengths)
    networks = [
        lib.RNN(cell, **options, return_carry=True, rngs=lib.Rngs(1))
        for lib, cell in zip(LIBRARIES, pair(name), strict=True)
    ]
    assert_same(*networks)
    assert_close(*(network(x, seq_lengths=lengths) for network in networks))
    assert_same(*networks)


@pytest.mark.parametrize("lengths", [None, jnp.array([7, 1, 4])], ids=["whole", "padded"])
def test_both_directions_are_those_of_flax(lengths: Any) -> None:
    layers = []
    for lib in LIBRARIES:
        cells = (lib.GRUCell(3, 4, rngs=lib.Rngs(0)), lib.LSTMCell(3, 4, rngs=lib.Rngs(1)))
        layers.append(lib.Bidirectional(*map(lib.RNN, cells), return_carry=True))
    assert_same(*layers)
    x = inputs(3, 7, 3)
    assert_close(*(layer(x, seq_lengths=lengths) for layer in layers))
    assert_close(
        *(layer(x, rngs=lib.Rngs(9)) for lib, layer in zip(LIBRARIES, layers, strict=True))
    )
    assert_same(*layers)


def test_gradients_are_those_of_flax() -> None:
    x = inputs(3, 7, 3)
    ours, theirs = (
        lib.grad(lambda network: (network(x) ** 2).mean())(lib.RNN(cell))
        for lib, cell in zip(LIBRARIES, pair("LSTMCell"), strict=True)
    )
    assert_same(ours, theirs, rtol=1e-5)


class Dropped:
    """One cell for both libraries: the input with dropout, added to the carry."""

    num_feature_axes = 1

    def __init__(self, lib: Any) -> None:
        self.dropout = lib.Dropout(0.5, rngs=lib.Rngs(dropout=2))

    def __call__(self, carry: Any, x: Any) -> Any:
        carry = carry + self.dropout(x)
        return carry, carry

    def initialize_carry(self, shape: Any, rngs: Any = None, carry_init: Any = None) -> Any:
        return jnp.zeros(shape)


@pytest.mark.parametrize("broadcast", [None, "dropout", ...], ids=str)
def test_random_streams_are_used_as_in_flax(broadcast: Any) -> None:
    networks = []
    for lib in LIBRARIES:
        cell = type("Cell", (Dropped, lib.RNNCellBase), {})(lib)
        networks.append(lib.RNN(cell, broadcast_rngs=broadcast))
    for _ in range(2):
        assert_close(*(network(jnp.ones((2, 6, 3))) for network in networks))
        assert_same(*networks)


@pytest.mark.parametrize("time_major", [False, True])
@pytest.mark.parametrize("batch", [(4,), (2, 3)], ids=str)
def test_sequences_are_flipped_as_in_flax(time_major: bool, batch: tuple[int, ...]) -> None:
    shape = (5, *batch) if time_major else (*batch, 5)
    lengths = jnp.arange(np.prod(batch)).reshape(batch) % 6
    ours, theirs = (
        lib.nn.recurrent.flip_sequences(inputs(*shape, 2), lengths, len(batch), time_major)
        for lib in LIBRARIES
    )
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR", ((2, 0), (1, 0))], ids=str)
def test_a_convolutional_cell_is_that_of_linen(padding: Any) -> None:
    ours = nnx.ConvLSTMCell(3, 4, (3, 2), padding=padding, rngs=nnx.Rngs(0))
    theirs = linen.ConvLSTMCell(4, (3, 2), padding=padding)
    params = nnx.to_pure_dict(nnx.state(ours))
    x, carry = inputs(2, 6, 5, 3), (inputs(2, 6, 5, 4), -inputs(2, 6, 5, 4))
    shapes = jax.eval_shape(theirs.init, jax.random.key(0), carry, x)["params"]
    assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes)
    assert_close(ours(carry, x), theirs.apply({"params": params}, carry, x))
    assert ours.initialize_carry(x.shape)[0].shape == (
        theirs.initialize_carry(jax.random.key(0), x.shape)[0].shape
    )


@pytest.mark.parametrize("slope", [0.01, 0.3])
@pytest.mark.parametrize("options", [{}, HALF], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prelu_is_that_of_flax(slope: float, options: dict[str, Any], dtype: str) -> None:
    ours, theirs = (lib.PReLU(slope, **options) for lib in LIBRARIES)
    assert_same(ours, theirs)
    x = inputs(3, 4).astype(dtype) - 1
    assert_close(ours(x), theirs(x))

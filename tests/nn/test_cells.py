"""Recurrent cells, against the formulas of their papers."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import nnxlite as nnx

normal = jax.nn.initializers.normal(0.5)
Arrays = dict[str, np.ndarray]


def drawn(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def sigmoid(x: Any) -> Any:
    return 1 / (1 + np.exp(-x))


def parameters(cell: nnx.Module) -> Arrays:
    """Values by path, in double precision."""
    flat = nnx.to_flat_state(nnx.state(cell, nnx.Param))
    return {".".join(map(str, path)): np.asarray(v[...], np.float64) for path, v in flat}


def lstm(p: Arrays, x: Any, c: Any, h: Any) -> Any:
    """Hochreiter and Schmidhuber 1997, with the forget gate of Gers et al. 2000."""
    i, f, g, o = (
        x @ p[f"{into}.kernel"] + h @ p[f"{over}.kernel"] + p[f"{over}.bias"]
        for into, over in (("ii", "hi"), ("if_", "hf"), ("ig", "hg"), ("io", "ho"))
    )
    c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
    return c, sigmoid(o) * np.tanh(c)


def gru(p: Arrays, x: Any, h: Any) -> Any:
    """Cho et al. 2014, with the reset gate after the matrix."""
    x_r, x_z, x_n = np.split(x @ p["dense_i.kernel"] + p["dense_i.bias"], 3, -1)
    h_r, h_z, h_n = np.split(h @ p["dense_h.kernel"], 3, -1)
    z = sigmoid(x_z + h_z)
    return (1 - z) * np.tanh(x_n + sigmoid(x_r + h_r) * h_n) + z * h


def make(kind: Callable[..., Any], **options: Any) -> Any:
    return kind(3, 4, bias_init=normal, **options, rngs=nnx.Rngs(0))


CELLS = [nnx.LSTMCell, nnx.OptimizedLSTMCell, nnx.GRUCell, nnx.SimpleCell]


def test_an_lstm_is_the_formula() -> None:
    cell, x, c, h = make(nnx.LSTMCell), drawn(5, 3), drawn(5, 4, seed=1), drawn(5, 4, seed=2)
    (new_c, new_h), y = cell((c, h), x)
    assert y is new_h
    expected = lstm(parameters(cell), *(np.asarray(a, np.float64) for a in (x, c, h)))
    np.testing.assert_allclose(new_c, expected[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(new_h, expected[1], rtol=1e-5, atol=1e-6)


def test_an_optimized_lstm_is_the_formula_with_kernels_side_by_side() -> None:
    cell, x, c, h = (
        make(nnx.OptimizedLSTMCell),
        drawn(5, 3),
        drawn(5, 4, seed=1),
        drawn(5, 4, seed=2),
    )
    p = parameters(cell)
    names = [("ii", "hi"), ("if_", "hf"), ("ig", "hg"), ("io", "ho")]
    apart: Arrays = {}
    for n, (into, over) in enumerate(names):
        gate = slice(4 * n, 4 * n + 4)
        apart[f"{into}.kernel"] = p["dense_i.kernel"][:, gate]
        apart[f"{over}.kernel"] = p["dense_h.kernel"][:, gate]
        apart[f"{over}.bias"] = p["dense_h.bias"][gate]
    carry, _ = cell((c, h), x)
    expected = lstm(apart, *(np.asarray(a, np.float64) for a in (x, c, h)))
    np.testing.assert_allclose(carry, expected, rtol=1e-5, atol=1e-6)


def test_a_gru_is_the_formula() -> None:
    cell, x, h = make(nnx.GRUCell), drawn(5, 3), drawn(5, 4, seed=1)
    new_h, y = cell(h, x)
    assert y is new_h
    expected = gru(parameters(cell), np.asarray(x, np.float64), np.asarray(h, np.float64))
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("residual", [False, True])
def test_a_simple_cell_is_the_formula(residual: bool) -> None:
    cell, x, h = make(nnx.SimpleCell, residual=residual), drawn(5, 3), drawn(5, 4, seed=1)
    p = parameters(cell)
    total = np.asarray(x) @ p["dense_i.kernel"] + p["dense_i.bias"]
    total += np.asarray(h) @ p["dense_h.kernel"] + (np.asarray(h) if residual else 0)
    np.testing.assert_allclose(cell(h, x)[1], np.tanh(total), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [nnx.OptimizedLSTMCell, nnx.GRUCell])
def test_gradients_are_those_of_differences(kind: Callable[..., Any]) -> None:
    cell, x = make(kind), drawn(2, 3)
    carry = cell.initialize_carry(x.shape, nnx.Rngs(1), normal)
    graphdef, params = nnx.split(cell)

    def step(params: Any, carry: Any, x: jax.Array) -> Any:
        return nnx.merge(graphdef, params)(carry, x)

    check_grads(jax.jit(step), (params, carry, x), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("kind", CELLS)
def test_a_carry_is_made_of_zeros_without_a_stream(kind: Callable[..., Any]) -> None:
    carry = make(kind, param_dtype=jnp.bfloat16).initialize_carry((2, 5, 3))
    for part in jax.tree.leaves(carry):
        assert (part.shape, part.dtype.name) == ((2, 5, 4), "bfloat16")
        assert not part.any()


def test_each_part_of_a_carry_takes_a_key_of_the_stream_carry() -> None:
    rngs, key = nnx.Rngs(carry=7), jax.random.key(7)
    c, h = make(nnx.LSTMCell).initialize_carry((5, 3), rngs, normal)
    np.testing.assert_array_equal(c, normal(jax.random.fold_in(key, 0), (5, 4), jnp.float32))
    np.testing.assert_array_equal(h, normal(jax.random.fold_in(key, 1), (5, 4), jnp.float32))
    assert int(rngs["carry"].count[...]) == 2


def test_a_cell_may_keep_a_stream_for_its_carry() -> None:
    cell = make(nnx.GRUCell, carry_init=normal, keep_rngs=True)
    first, second = (cell.initialize_carry((5, 3)) for _ in range(2))
    assert first.shape == (5, 4) and not jnp.array_equal(first, second)


def test_a_carry_that_is_drawn_needs_a_stream() -> None:
    with pytest.raises(ValueError, match=r"GRUCell has a carry_init and no random stream"):
        make(nnx.GRUCell).initialize_carry((5, 3), carry_init=normal)
    with pytest.raises(TypeError, match=r"GRUCell expects rngs to be an nnx\.Rngs .* found .*int"):
        make(nnx.GRUCell).initialize_carry((5, 3), 0)


@pytest.mark.parametrize("kind", CELLS)
def test_inputs_and_carries_of_other_shapes_are_refused(kind: Callable[..., Any]) -> None:
    cell, name = make(kind), kind.__name__
    carry = cell.initialize_carry((5, 3))
    with pytest.raises(ValueError, match=rf"{name} expects inputs of shape \(\.\.\., 3\), found"):
        cell(carry, jnp.ones((5, 4)))
    with pytest.raises(ValueError, match=rf"{name} expects the carry . to have shape \(2, 4\)"):
        cell(carry, jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"to have shape \(5, 4\) .* found \(5, 2\)"):
        cell(jax.tree.map(lambda part: part[:, :2], carry), jnp.ones((5, 3)))


def test_a_carry_that_is_no_pair_is_refused() -> None:
    with pytest.raises(ValueError, match=r"LSTMCell expects a carry \(c, h\) .* found \(5, 4\)"):
        make(nnx.LSTMCell)(jnp.ones((5, 4)), jnp.ones((5, 3)))


@pytest.mark.parametrize("kind", CELLS)
def test_kernels_of_half_precision_are_orthogonal(kind: Callable[..., Any]) -> None:
    cell = make(kind, param_dtype=jnp.bfloat16)
    kernel = (cell.hi if kind is nnx.LSTMCell else cell.dense_h).kernel[...]
    assert kernel.dtype == jnp.bfloat16
    product = np.asarray(kernel, np.float32) @ np.asarray(kernel, np.float32).T
    np.testing.assert_allclose(product, np.eye(4), atol=0.05)


def test_gates_may_be_narrower_than_the_memory() -> None:
    cell = make(nnx.LSTMCell, dtype=jnp.bfloat16)
    carry, _ = cell(cell.initialize_carry((5, 3)), drawn(5, 3))
    assert [part.dtype.name for part in carry] == ["float32", "float32"]


def test_metadata_goes_to_the_parameters() -> None:
    cell = make(
        nnx.GRUCell,
        kernel_metadata={"note": "kernel"},
        recurrent_kernel_metadata={"note": "recurrent"},
        bias_metadata={"note": "bias"},
    )
    notes = [cell.dense_i.kernel.note, cell.dense_h.kernel.note, cell.dense_i.bias.note]
    assert notes == ["kernel", "recurrent", "bias"]


def test_the_base_says_what_a_cell_lacks() -> None:
    cell = nnx.RNNCellBase()
    with pytest.raises(NotImplementedError, match="RNNCellBase has no __call__"):
        cell(None, jnp.ones(3))
    with pytest.raises(NotImplementedError, match="RNNCellBase has no initialize_carry"):
        cell.initialize_carry((3,))
    with pytest.raises(NotImplementedError, match="RNNCellBase has no num_feature_axes"):
        _ = cell.num_feature_axes

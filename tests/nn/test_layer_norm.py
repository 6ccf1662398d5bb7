"""LayerNorm and RMSNorm, against the formulas in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import nnxlite as nnx


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, 2.0, shape).astype(np.float32)


def root_mean_square(x: np.ndarray, axes: Any = -1, where: Any = True) -> np.ndarray:
    squares = np.square(x.astype(np.float64))
    return np.sqrt(squares.mean(axes, keepdims=True, where=where) + 1e-6)


@pytest.mark.parametrize("use_fast_variance", [True, False])
@pytest.mark.parametrize("shape", [(3,), (8, 3), (2, 5, 3)], ids=str)
def test_each_example_has_mean_zero_and_variance_one(
    shape: tuple[int, ...], use_fast_variance: bool
) -> None:
    layer = nnx.LayerNorm(3, use_fast_variance=use_fast_variance, rngs=nnx.Rngs(0))
    x = inputs(*shape)
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    np.testing.assert_allclose(layer(x), (x - mean) / np.sqrt(var + 1e-6), atol=1e-4)


def test_layer_norm_may_have_several_axes() -> None:
    x = inputs(2, 4, 3)
    layer = nnx.LayerNorm(12, reduction_axes=(1, 2), feature_axes=(1, 2), rngs=nnx.Rngs(0))
    layer.scale[...] = jnp.arange(12.0)
    mean, var = x.mean((1, 2), keepdims=True), x.var((1, 2), keepdims=True)
    expected = (x - mean) / np.sqrt(var + 1e-6) * np.arange(12).reshape(4, 3)
    np.testing.assert_allclose(layer(x), expected, atol=1e-4)


def test_layer_norm_scales_and_shifts_each_feature() -> None:
    layer = nnx.LayerNorm(3, rngs=nnx.Rngs(0))
    x = inputs(8, 3)
    plain = np.asarray(layer(x))
    layer.scale[...], layer.bias[...] = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.0, 1.0, 2.0])
    np.testing.assert_allclose(layer(x), plain * [1, 2, 3] + [0, 1, 2], atol=1e-4)


def test_layer_norm_of_a_mask_counts_what_it_keeps() -> None:
    x = inputs(8, 5)
    y = nnx.LayerNorm(5, rngs=nnx.Rngs(0))(x, mask=np.arange(5) < 3)
    mean, var = x[:, :3].mean(-1, keepdims=True), x[:, :3].var(-1, keepdims=True)
    np.testing.assert_allclose(y, (x - mean) / np.sqrt(var + 1e-6), atol=1e-4)


def test_layer_norm_draws_scale_and_bias_in_order() -> None:
    normal = jax.nn.initializers.normal()
    layer = nnx.LayerNorm(3, scale_init=normal, bias_init=normal, rngs=nnx.Rngs(params=7))
    keys = [jax.random.fold_in(jax.random.key(7), n) for n in range(2)]
    np.testing.assert_array_equal(layer.scale[...], normal(keys[0], (3,), jnp.float32))
    np.testing.assert_array_equal(layer.bias[...], normal(keys[1], (3,), jnp.float32))
    bare = nnx.LayerNorm(3, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    assert bare.scale is bare.bias is None


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, "bfloat16", "float32"),
        ({"param_dtype": jnp.bfloat16}, "bfloat16", "bfloat16"),
        ({"dtype": jnp.bfloat16}, "float32", "bfloat16"),
        ({}, "int32", "float32"),
    ],
)
def test_the_dtype_of_layer_norm(options: dict[str, Any], dtype: str, expected: str) -> None:
    layer = nnx.LayerNorm(3, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 3), dtype)).dtype == jnp.dtype(expected)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 4), {}, r"LayerNorm\(3\) expects inputs of size 3 along axes -1, found .*\(8, 4\)"),
        ((), {}, r"axes -1, found an input of shape \(\) without them"),
        ((8, 3), {"reduction_axes": (1, 2)}, r"reduction axes \(1, 2\) .* shape \(8, 3\) without"),
    ],
)
def test_layer_norm_refuses_other_inputs(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        nnx.LayerNorm(3, **options, rngs=nnx.Rngs(0))(jnp.ones(shape))


@pytest.mark.parametrize("use_fast_variance", [True, False])
@pytest.mark.parametrize("shape", [(3,), (8, 3), (2, 5, 3)], ids=str)
def test_each_example_is_divided_by_its_root_mean_square(
    shape: tuple[int, ...], use_fast_variance: bool
) -> None:
    layer = nnx.RMSNorm(3, use_fast_variance=use_fast_variance, rngs=nnx.Rngs(0))
    layer.scale[...] = jnp.array([1.0, 2.0, 3.0])
    x = inputs(*shape)
    np.testing.assert_allclose(layer(x), x / root_mean_square(x) * [1, 2, 3], rtol=1e-5)


def test_rms_norm_may_have_several_axes() -> None:
    x = inputs(2, 4, 3)
    layer = nnx.RMSNorm(4, reduction_axes=(1, 2), feature_axes=1, rngs=nnx.Rngs(0))
    layer.scale[...] = jnp.arange(4.0)
    expected = x / root_mean_square(x, (1, 2)) * np.arange(4)[:, None]
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)


def test_rms_norm_of_a_mask_counts_what_it_keeps() -> None:
    x, mask = inputs(8, 5), np.arange(5) < 3
    expected = x / root_mean_square(x, where=mask)
    np.testing.assert_allclose(nnx.RMSNorm(5, rngs=nnx.Rngs(0))(x, mask), expected, rtol=1e-5)


def test_rms_norm_has_a_scale_from_the_stream_params_or_none() -> None:
    normal = jax.nn.initializers.normal()
    layer = nnx.RMSNorm(3, scale_init=normal, rngs=nnx.Rngs(params=7))
    key = jax.random.fold_in(jax.random.key(7), 0)
    np.testing.assert_array_equal(layer.scale[...], normal(key, (3,), jnp.float32))
    bare = nnx.RMSNorm(3, use_scale=False, rngs=nnx.Rngs(0))
    assert not nnx.to_flat_state(nnx.state(bare))
    x = inputs(8, 3)
    np.testing.assert_allclose(bare(x), x / root_mean_square(x), rtol=1e-5)


def test_rms_norm_does_not_overflow_in_half_precision() -> None:
    layer = nnx.RMSNorm(2, dtype=jnp.float16, rngs=nnx.Rngs(0))
    y = layer(jnp.full((1, 2), 300.0, jnp.float16))
    assert y.dtype == jnp.float16
    assert y.tolist() == [[1, 1]]


@pytest.mark.parametrize("name", ["LayerNorm", "RMSNorm"])
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    layer = getattr(nnx, name)(3, rngs=nnx.Rngs(0))
    check_grads(layer, (jnp.asarray(inputs(2, 3)),), order=1, modes=["rev"], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((8, 4), {}, r"RMSNorm\(3\) expects inputs of size 3 along axes -1, found .*\(8, 4\)"),
        ((), {}, r"axes -1, found an input of shape \(\) without them"),
        ((8, 3), {"reduction_axes": (1, 2)}, r"reduction axes \(1, 2\) .* shape \(8, 3\) without"),
    ],
)
def test_rms_norm_refuses_other_inputs(
    shape: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        nnx.RMSNorm(3, **options, rngs=nnx.Rngs(0))(jnp.ones(shape))

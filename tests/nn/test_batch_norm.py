"""BatchNorm, against the formula in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, 2.0, shape).astype(np.float32)


def normalized(x: np.ndarray, axis: int = -1, epsilon: float = 1e-5) -> np.ndarray:
    x = x.astype(np.float64)
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    mean, var = x.mean(others, keepdims=True), x.var(others, keepdims=True)
    return (x - mean) / np.sqrt(var + epsilon)


@pytest.mark.parametrize("use_fast_variance", [True, False])
@pytest.mark.parametrize(("shape", "axis"), [((8, 3), -1), ((4, 5, 3), 2), ((4, 3, 5), 1)])
def test_features_have_mean_zero_and_variance_one(
    shape: tuple[int, ...], axis: int, use_fast_variance: bool
) -> None:
    layer = nnx.BatchNorm(3, axis=axis, use_fast_variance=use_fast_variance, rngs=nnx.Rngs(0))
    x = inputs(*shape)
    np.testing.assert_allclose(layer(x), normalized(x, axis), atol=1e-4)


def test_scale_and_bias_are_applied_last() -> None:
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = jnp.array([1.0, 2.0, 3.0]), jnp.array([0.0, 1.0, 2.0])
    x = inputs(8, 3)
    np.testing.assert_allclose(layer(x), normalized(x) * [1, 2, 3] + [0, 1, 2], atol=1e-4)


def test_the_running_average_moves_by_momentum() -> None:
    layer = nnx.BatchNorm(3, momentum=0.9, rngs=nnx.Rngs(0))
    first, second = inputs(8, 3), inputs(8, 3, seed=1)
    layer(first), layer(second)
    mean = 0.9 * (0.1 * first.mean(0)) + 0.1 * second.mean(0)
    var = 0.9 * (0.9 + 0.1 * first.var(0)) + 0.1 * second.var(0)
    np.testing.assert_allclose(layer.mean[...], mean, rtol=1e-4)
    np.testing.assert_allclose(layer.var[...], var, rtol=1e-4)


@pytest.mark.parametrize("way", ["call", "constructor", "eval"])
def test_the_running_average_is_used_and_kept(way: str) -> None:
    layer = nnx.BatchNorm(3, use_running_average=way == "constructor", rngs=nnx.Rngs(0))
    layer.mean[...], layer.var[...] = jnp.array([1.0, 2.0, 3.0]), jnp.array([4.0, 4.0, 4.0])
    if way == "eval":
        layer.eval()
    x = inputs(8, 3)
    y = layer(x, use_running_average=True) if way == "call" else layer(x)
    np.testing.assert_allclose(y, (x - [1, 2, 3]) / 2, atol=1e-4)
    assert layer.mean[...].tolist() == [1, 2, 3]


def test_the_call_goes_before_the_attribute() -> None:
    layer = nnx.BatchNorm(3, use_running_average=True, rngs=nnx.Rngs(0))
    layer(inputs(8, 3), use_running_average=False)
    assert layer.mean[...].tolist() != [0, 0, 0]


def test_a_flag_given_nowhere_is_an_error() -> None:
    layer = nnx.BatchNorm(3, use_running_average=None, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"BatchNorm was told `use_running_average` nowhere"):
        layer(inputs(8, 3))


def test_a_mask_chooses_what_counts() -> None:
    x = inputs(8, 3)
    mask = np.arange(8)[:, None] < 5
    layer = nnx.BatchNorm(3, momentum=0.0, rngs=nnx.Rngs(0))
    y = layer(x, mask=mask)
    np.testing.assert_allclose(layer.mean[...], x[:5].mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.var[...], x[:5].var(0), rtol=1e-4)
    np.testing.assert_allclose(y[:5], normalized(x[:5]), atol=1e-4)


def test_statistics_cross_a_mapped_axis() -> None:
    layer = nnx.BatchNorm(3, momentum=0.0, axis_name="devices", rngs=nnx.Rngs(0))
    x = inputs(2, 8, 3)
    graphdef, params = nnx.split(layer)

    def forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        copy = nnx.merge(graphdef, params)
        return copy(x), copy.mean[...]

    y, mean = jax.vmap(forward, axis_name="devices")(x)
    np.testing.assert_allclose(y.reshape(16, 3), normalized(x.reshape(16, 3)), atol=1e-4)
    np.testing.assert_allclose(mean[0], x.reshape(16, 3).mean(0), rtol=1e-5)


def test_parameters_come_from_the_stream_params_in_order() -> None:
    normal = jax.nn.initializers.normal()
    layer = nnx.BatchNorm(3, scale_init=normal, bias_init=normal, rngs=nnx.Rngs(params=7))
    keys = [jax.random.fold_in(jax.random.key(7), n) for n in range(2)]
    np.testing.assert_array_equal(layer.scale[...], normal(keys[0], (3,), jnp.float32))
    np.testing.assert_array_equal(layer.bias[...], normal(keys[1], (3,), jnp.float32))


def test_scale_and_bias_may_be_left_out() -> None:
    layer = nnx.BatchNorm(3, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    assert layer.scale is layer.bias is None
    x = inputs(8, 3)
    np.testing.assert_allclose(layer(x), normalized(x), atol=1e-4)


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, "bfloat16", "float32"),
        ({"param_dtype": jnp.bfloat16}, "bfloat16", "float32"),
        ({"dtype": jnp.bfloat16}, "float32", "bfloat16"),
        ({}, "int32", "float32"),
    ],
)
def test_the_dtype_of_the_output(options: dict[str, Any], dtype: str, expected: str) -> None:
    layer = nnx.BatchNorm(3, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 3), dtype)).dtype == jnp.dtype(expected)
    assert layer.mean.dtype == layer.var.dtype == jnp.float32


@pytest.mark.parametrize("shape", [(8, 4), (), (3, 8)], ids=str)
def test_inputs_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"BatchNorm\(3\) expects .* size 3 along axis -1, found"):
        layer(jnp.ones(shape))
    assert layer.mean[...].tolist() == [0, 0, 0]


def test_the_running_average_moves_inside_jit_and_grad() -> None:
    eager, jitted, differentiated = (nnx.BatchNorm(3, rngs=nnx.Rngs(0)) for _ in range(3))
    x = jnp.asarray(inputs(8, 3))
    eager(x)
    nnx.jit(lambda layer, x: layer(x))(jitted, x)
    nnx.grad(lambda layer: layer(x).sum())(differentiated)
    np.testing.assert_allclose(jitted.var[...], eager.var[...], rtol=1e-6)
    np.testing.assert_allclose(differentiated.var[...], eager.var[...], rtol=1e-6)


def test_the_running_average_passes_on_no_gradient() -> None:
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    def running_mean(x: jax.Array) -> jax.Array:
        copy = nnx.merge(graphdef, params)
        copy(x)
        return copy.mean[...].sum()

    assert not jax.grad(running_mean)(jnp.asarray(inputs(8, 3))).any()


def test_statistics_cross_groups_of_a_mapped_axis() -> None:
    groups = [[0, 1], [2, 3]]
    layer = nnx.BatchNorm(3, axis_name="devices", axis_index_groups=groups, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(layer)

    def forward(x: jax.Array) -> jax.Array:
        return nnx.merge(graphdef, params)(x)

    jaxpr = jax.make_jaxpr(forward, axis_env=[("devices", 4)])(jnp.ones((8, 3)))
    assert "axis_index_groups=((0, 1), (2, 3))" in str(jaxpr)


def test_the_gradient_is_that_of_the_formula() -> None:
    layer = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    weights = inputs(8, 3, seed=1)
    graphdef, params = nnx.split(layer)

    def loss(x: jax.Array) -> jax.Array:
        return (nnx.merge(graphdef, params)(x) * weights).sum()

    def by_hand(x: jax.Array) -> jax.Array:
        mean, var = x.mean(0, keepdims=True), x.var(0, keepdims=True)
        return ((x - mean) / jnp.sqrt(var + 1e-5) * weights).sum()

    x = jnp.asarray(inputs(8, 3))
    np.testing.assert_allclose(jax.grad(loss)(x), jax.grad(by_hand)(x), atol=1e-4)

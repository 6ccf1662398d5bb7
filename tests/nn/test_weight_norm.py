"""WeightNorm, against the formula of the paper and its gradient."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))


def linear(**options: Any) -> nnx.Linear:
    return nnx.Linear(3, 4, **options, rngs=nnx.Rngs(0))


def by_hand(v: jax.Array, g: jax.Array, x: jax.Array = X) -> jax.Array:
    return x @ (g * v / jnp.sqrt((v**2).sum(0, keepdims=True)).repeat(v.shape[0], 0))


def test_each_column_of_the_kernel_has_the_length_of_its_scale() -> None:
    layer = nnx.WeightNorm(linear(use_bias=False), rngs=nnx.Rngs(0))
    layer.scales["kernel"][...] = g = jnp.arange(1.0, 5)
    expected = by_hand(layer.layer_instance.kernel[...], jnp.broadcast_to(g, (3, 4)))
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5)
    np.testing.assert_allclose(nnx.jit(layer)(X), expected, rtol=1e-5)


def test_the_kernel_stays_as_it_is() -> None:
    layer = nnx.WeightNorm(linear(), rngs=nnx.Rngs(0))
    kernel = layer.layer_instance.kernel.get_raw_value()
    layer(X)
    assert layer.layer_instance.kernel.get_raw_value() is kernel
    with pytest.raises(ValueError, match="Linear with a kernel"):
        layer(jnp.ones((5, 2)))
    assert layer.layer_instance.kernel.get_raw_value() is kernel


def test_kernel_and_scale_have_the_gradients_of_the_formula() -> None:
    layer = nnx.WeightNorm(linear(use_bias=False), rngs=nnx.Rngs(0))
    grads = nnx.grad(lambda layer: (layer(X) ** 2).sum())(layer)

    def loss(v: jax.Array, g: jax.Array) -> jax.Array:
        return (by_hand(v, jnp.broadcast_to(g, v.shape)) ** 2).sum()

    dv, dg = jax.grad(loss, (0, 1))(layer.layer_instance.kernel[...], jnp.ones(4))
    np.testing.assert_allclose(grads["layer_instance"]["kernel"][...], dv, atol=1e-4)
    np.testing.assert_allclose(grads["scales"]["kernel"][...], dg, rtol=1e-4)


@pytest.mark.parametrize(
    ("axes", "shape", "reduced"), [(None, (), (0, 1)), (0, (3,), 1), ((0, 1), (3, 4), ())]
)
def test_the_scale_differs_along_the_feature_axes(axes: Any, shape: Any, reduced: Any) -> None:
    layer = nnx.WeightNorm(linear(use_bias=False), feature_axes=axes, rngs=nnx.Rngs(0))
    assert layer.scales["kernel"].shape == shape
    v = np.asarray(layer.layer_instance.kernel[...])
    np.testing.assert_allclose(
        layer(X), X @ (v / np.sqrt((v**2).sum(reduced, keepdims=True))), rtol=1e-5, atol=1e-6
    )


def test_scales_may_be_left_out() -> None:
    layer = nnx.WeightNorm(linear(use_bias=False), use_scale=False, rngs=nnx.Rngs(0))
    assert layer.scales is None
    expected = by_hand(layer.layer_instance.kernel[...], jnp.ones((3, 4)))
    np.testing.assert_allclose(layer(X), expected, rtol=1e-5)


def test_a_filter_chooses_the_weights_of_a_nested_layer() -> None:
    model = nnx.Sequential(linear(), nnx.Linear(4, 2, rngs=nnx.Rngs(1)))
    layer = nnx.WeightNorm(model, variable_filter=nnx.PathContains(1), rngs=nnx.Rngs(0))
    assert layer.scales["layers"][1]["kernel"].shape == (2,)
    assert set(layer.scales["layers"]) == {1}
    assert layer(X).shape == (5, 2)


@pytest.mark.parametrize("draws", [False, True])
def test_random_scales_come_from_the_stream_params(draws: bool) -> None:
    init = jax.nn.initializers.normal() if draws else jax.nn.initializers.ones
    rngs = nnx.Rngs(params=7)
    layer = nnx.WeightNorm(linear(), scale_init=init, rngs=rngs)
    expected = init(jax.random.fold_in(jax.random.key(7), 0), (4,), jnp.float32)
    np.testing.assert_array_equal(layer.scales["kernel"][...], expected)
    assert int(rngs.params.count[...]) == int(draws)


def test_a_closed_over_layer_is_traced_once() -> None:
    traces = []
    layer = nnx.WeightNorm(linear(), rngs=nnx.Rngs(0))

    @nnx.jit
    def forward(x: jax.Array) -> jax.Array:
        traces.append(1)
        return layer(x)

    for _ in range(2):
        np.testing.assert_allclose(forward(X), layer(X), rtol=1e-5)
    assert len(traces) == 1


def test_the_dtype_of_the_kernel() -> None:
    layer = nnx.WeightNorm(linear(param_dtype=jnp.bfloat16, use_bias=False), rngs=nnx.Rngs(0))
    assert layer(X.astype(jnp.bfloat16)).dtype == jnp.float32
    layer = nnx.WeightNorm(linear(use_bias=False), dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    assert layer(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16


def test_arguments_go_on_to_the_layer() -> None:
    layer = nnx.WeightNorm(nnx.Dropout(0.5), rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(X, deterministic=True), X)


def test_a_new_weight_and_missing_axes_are_refused() -> None:
    layer = nnx.WeightNorm(nnx.Sequential(linear()), rngs=nnx.Rngs(0))
    layer.layer_instance.layers.append(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(StructureError, match=r"knows no weight layer_instance.layers\[1\].kernel"):
        layer(X)
    with pytest.raises(ValueError, match=r"axes 2, found layer_instance.kernel of shape \(3, 4\)"):
        nnx.WeightNorm(linear(), feature_axes=2, rngs=nnx.Rngs(0))

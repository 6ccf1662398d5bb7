"""SpectralNorm, against the singular values of NumPy and the power iteration of the paper."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError

X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32))


def made(layer: Any = None, **options: Any) -> nnx.SpectralNorm:
    layer = nnx.Linear(3, 4, use_bias=False, rngs=nnx.Rngs(0)) if layer is None else layer
    return nnx.SpectralNorm(layer, **options, rngs=nnx.Rngs(1))


def stepped(w: jax.Array, u: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of power iteration: new estimates of the singular vector and value."""
    v = w @ u / jnp.linalg.norm(w @ u)
    u = v @ w / jnp.linalg.norm(v @ w)
    return u, v @ w @ u


def test_the_largest_singular_value_becomes_one() -> None:
    layer = made(n_steps=50)
    w = np.asarray(layer.layer_instance.kernel[...])
    largest = np.linalg.svd(w)[1][0]
    np.testing.assert_allclose(layer(X), X @ (w / largest), rtol=1e-4)
    np.testing.assert_allclose(layer.batch_stats["kernel"]["sigma"][...], largest, rtol=1e-4)


def test_each_call_makes_a_step() -> None:
    layer = made()
    w, u = layer.layer_instance.kernel[...], layer.batch_stats["kernel"]["u"][0]
    for _ in range(3):
        u, sigma = stepped(w, u)
        np.testing.assert_allclose(layer(X), X @ (w / sigma), rtol=1e-4)
        np.testing.assert_allclose(layer.batch_stats["kernel"]["u"][0], u, rtol=1e-4)
        np.testing.assert_allclose(layer.batch_stats["kernel"]["sigma"][...], sigma, rtol=1e-4)


def test_the_weight_stays_as_it_is() -> None:
    layer = made()
    kernel = layer.layer_instance.kernel.get_raw_value()
    layer(X)
    nnx.jit(lambda layer: layer(X))(layer)
    assert layer.layer_instance.kernel.get_raw_value() is kernel


@pytest.mark.parametrize("way", ["call", "constructor", "eval", "view"])
def test_the_estimates_may_stay_as_they_are(way: str) -> None:
    layer = made(update_stats=way != "constructor")
    if way == "eval":
        layer.eval()
    if way == "view":
        layer = nnx.view(layer, use_running_average=True)
    u = layer.batch_stats["kernel"]["u"].get_raw_value()
    layer(X, update_stats=False) if way == "call" else layer(X)
    assert layer.batch_stats["kernel"]["u"].get_raw_value() is u
    layer.train()
    layer(X)
    assert layer.batch_stats["kernel"]["u"].get_raw_value() is not u


def test_a_failed_call_changes_nothing() -> None:
    layer = made()
    before = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(layer))]
    with pytest.raises(ValueError, match="Linear with a kernel of shape"):
        layer(jnp.ones((5, 2)))
    after = [v.get_raw_value() for _, v in nnx.to_flat_state(nnx.state(layer))]
    assert all(a is b for a, b in zip(after, before, strict=True))


def test_the_gradient_goes_through_the_value_and_not_the_vectors() -> None:
    layer = made()
    w, u = layer.layer_instance.kernel[...], layer.batch_stats["kernel"]["u"][0]

    def loss(kernel: jax.Array) -> jax.Array:
        v = kernel @ u / jnp.linalg.norm(kernel @ u)
        new_u = v @ kernel / jnp.linalg.norm(v @ kernel)
        v, new_u = jax.lax.stop_gradient((v, new_u))
        return (X @ (kernel / (v @ kernel @ new_u)) ** 2).sum()

    grads = nnx.grad(lambda layer: (X @ squared_kernel(layer)).sum())(layer)
    expected = jax.grad(loss)(w)
    np.testing.assert_allclose(grads["layer_instance"]["kernel"][...], expected, atol=1e-4)


def squared_kernel(layer: nnx.SpectralNorm) -> jax.Array:
    """The square of the kernel that the layer computes with."""
    return layer(jnp.eye(3)) ** 2


def test_axes_before_the_last_count_as_one() -> None:
    layer = made(nnx.Conv(3, 4, (3, 2), use_bias=False, rngs=nnx.Rngs(0)), n_steps=50)
    assert layer.batch_stats["kernel"]["u"].shape == (1, 4)
    layer(jnp.ones((2, 5, 5, 3)))
    flat = np.asarray(layer.layer_instance.kernel[...]).reshape(-1, 4)
    largest = np.linalg.svd(flat)[1][0]
    np.testing.assert_allclose(layer.batch_stats["kernel"]["sigma"][...], largest, rtol=1e-3)


def test_only_matrices_are_normalized() -> None:
    layer = made(nnx.LayerNorm(3, rngs=nnx.Rngs(0)))
    assert layer.batch_stats == {}
    np.testing.assert_array_equal(layer(X), layer.layer_instance(X))
    layer = made(n_steps=0)
    assert layer.batch_stats == {}
    np.testing.assert_array_equal(layer(X), layer.layer_instance(X))


def test_a_weight_of_zeros_gives_zeros() -> None:
    linear = nnx.Linear(3, 4, kernel_init=nnx.initializers.zeros, rngs=nnx.Rngs(0))
    assert not made(linear)(X).any()


def test_the_weight_keeps_its_dtype_unless_told_otherwise() -> None:
    linear = nnx.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    layer = made(linear)
    assert layer(X.astype(jnp.bfloat16)).dtype == jnp.bfloat16
    assert layer.batch_stats["kernel"]["u"].dtype == jnp.float32
    assert made(linear, dtype=jnp.float32)(X.astype(jnp.bfloat16)).dtype == jnp.float32


def test_the_vectors_come_from_the_stream_params() -> None:
    layer = nnx.SpectralNorm(nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rngs=nnx.Rngs(params=7))
    key = jax.random.fold_in(jax.random.key(7), 0)
    expected = jax.nn.initializers.normal()(key, (1, 4), jnp.float32)
    np.testing.assert_array_equal(layer.batch_stats["kernel"]["u"][...], expected)


def test_what_does_not_fit_is_refused() -> None:
    conv = nnx.Conv(3, 4, 2, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"layer_instance.kernel of shape \(2, 3, 4\). Expected"):
        made(conv, error_on_non_matrix=True)
    layer = made(nnx.Sequential(nnx.Linear(3, 4, rngs=nnx.Rngs(0))))
    layer.layer_instance.layers.append(nnx.Linear(4, 2, rngs=nnx.Rngs(0)))
    with pytest.raises(StructureError, match=r"SpectralNorm knows no .*\.layers\[1\]\.kernel"):
        layer(X)

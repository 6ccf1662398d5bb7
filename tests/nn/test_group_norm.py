"""GroupNorm and InstanceNorm, against the formulas in NumPy."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import nnxlite as nnx


def inputs(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(1.0, 2.0, shape).astype(np.float32)


def standardized(x: np.ndarray, axes: tuple[int, ...], where: Any = True) -> np.ndarray:
    x = x.astype(np.float64)
    mean = x.mean(axes, keepdims=True, where=where)
    var = x.var(axes, keepdims=True, where=where)
    return (x - mean) / np.sqrt(var + 1e-6)


def in_groups(x: np.ndarray, groups: int, mask: np.ndarray | None = None) -> np.ndarray:
    """Each example of (batch, ..., features) by the statistics of each group of features."""
    parts = [np.split(part, groups, axis=-1) for part in (x, np.full_like(x, 1, bool))]
    if mask is not None:
        parts[1] = np.split(np.broadcast_to(mask, x.shape), groups, axis=-1)
    axes = tuple(range(1, x.ndim))
    made = [standardized(part, axes, where) for part, where in zip(*parts, strict=True)]
    return np.concatenate(made, axis=-1)


@pytest.mark.parametrize("shape", [(4, 6), (2, 5, 6), (2, 4, 3, 6)], ids=str)
@pytest.mark.parametrize("options", [{"num_groups": 3}, {"num_groups": None, "group_size": 2}])
def test_each_group_of_channels_is_normalized(
    shape: tuple[int, ...], options: dict[str, Any]
) -> None:
    x = inputs(*shape)
    layer = nnx.GroupNorm(6, **options, rngs=nnx.Rngs(0))
    assert (layer.num_groups, layer.group_size) == (3, 2)
    np.testing.assert_allclose(layer(x), in_groups(x, 3), atol=1e-4)


def test_there_are_32_groups_by_default() -> None:
    x = inputs(2, 3, 64)
    np.testing.assert_allclose(nnx.GroupNorm(64, rngs=nnx.Rngs(0))(x), in_groups(x, 32), atol=1e-4)


def test_each_channel_has_a_scale_and_a_bias() -> None:
    layer = nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = jnp.arange(4.0), jnp.arange(4.0, 8)
    x = inputs(2, 5, 4)
    expected = in_groups(x, 2) * np.arange(4) + np.arange(4, 8)
    np.testing.assert_allclose(layer(x), expected, atol=1e-4)


def test_an_axis_may_keep_statistics_of_its_own() -> None:
    x = inputs(2, 3, 5, 4)
    y = nnx.GroupNorm(4, 2, reduction_axes=(-1, 2), rngs=nnx.Rngs(0))(x)
    expected = np.stack([in_groups(x[:, i], 2) for i in range(3)], axis=1)
    np.testing.assert_allclose(y, expected, atol=1e-4)


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm"])
def test_statistics_count_what_a_mask_keeps(name: str) -> None:
    x, mask = inputs(2, 5, 4), np.arange(5)[:, None] < 3
    layer = nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0))
    expected = in_groups(x, 2, mask)
    if name == "InstanceNorm":
        layer, expected = nnx.InstanceNorm(4, rngs=nnx.Rngs(0)), standardized(x, (1,), mask)
    np.testing.assert_allclose(layer(x, mask=mask), expected, atol=1e-4)


def test_one_vector_is_an_example() -> None:
    x = inputs(4, 6)
    layer = nnx.GroupNorm(6, 3, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(jax.vmap(layer)(x), in_groups(x, 3), atol=1e-4)


@pytest.mark.parametrize("shape", [(2, 5, 3), (2, 4, 5, 3)], ids=str)
def test_each_channel_of_each_example_is_normalized(shape: tuple[int, ...]) -> None:
    x = inputs(*shape)
    layer = nnx.InstanceNorm(3, rngs=nnx.Rngs(0))
    layer.scale[...], layer.bias[...] = jnp.arange(3.0), jnp.ones(3)
    expected = standardized(x, tuple(range(1, x.ndim - 1))) * np.arange(3) + 1
    np.testing.assert_allclose(layer(x), expected, atol=1e-4)


def test_channels_may_have_several_axes() -> None:
    x = inputs(2, 3, 5, 2)
    layer = nnx.InstanceNorm(6, feature_axes=(1, -1), rngs=nnx.Rngs(0))
    layer.scale[...] = jnp.arange(6.0)
    expected = standardized(x, (2,)) * np.arange(6).reshape(3, 1, 2)
    np.testing.assert_allclose(layer(x), expected, atol=1e-4)


@pytest.mark.parametrize("make", [lambda **o: nnx.GroupNorm(4, 2, **o), nnx.InstanceNorm])
def test_parameters_come_from_the_stream_params_in_order(make: Any) -> None:
    normal = jax.nn.initializers.normal()
    sizes = {} if make is not nnx.InstanceNorm else {"num_features": 4}
    layer = make(**sizes, scale_init=normal, bias_init=normal, rngs=nnx.Rngs(params=7))
    keys = [jax.random.fold_in(jax.random.key(7), n) for n in range(2)]
    np.testing.assert_array_equal(layer.scale[...], normal(keys[0], (4,), jnp.float32))
    np.testing.assert_array_equal(layer.bias[...], normal(keys[1], (4,), jnp.float32))
    bare = make(**sizes, use_scale=False, use_bias=False, rngs=nnx.Rngs(0))
    assert bare.scale is bare.bias is None


@pytest.mark.parametrize("name", ["GroupNorm", "InstanceNorm"])
def test_statistics_cross_a_mapped_axis(name: str) -> None:
    x = inputs(2, 2, 5, 4)  # (devices, batch, length, features)
    args = (4, 2) if name == "GroupNorm" else (4,)
    layer = getattr(nnx, name)(*args, axis_name="devices", rngs=nnx.Rngs(0))
    joined = np.concatenate(x, axis=1)
    expected = in_groups(joined, 2) if name == "GroupNorm" else standardized(joined, (1,))
    y = np.concatenate(jax.vmap(layer, axis_name="devices")(x), axis=1)
    np.testing.assert_allclose(y, expected, atol=1e-4)


def test_gradients_are_those_of_finite_differences() -> None:
    for layer in (nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0)), nnx.InstanceNorm(4, rngs=nnx.Rngs(0))):
        x = jnp.asarray(inputs(1, 4, 4))
        check_grads(layer, (x,), order=1, modes=["rev"], atol=0.02, rtol=0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, r"GroupNorm\(6\) found num_groups=32. Expected .* divides the 6 channels"),
        ({"num_groups": 4}, "found num_groups=4"),
        ({"num_groups": 0}, "found num_groups=0"),
        ({"num_groups": 2.0}, "found num_groups=2.0"),
        ({"num_groups": None, "group_size": 4}, "found group_size=4"),
        ({"num_groups": None}, "num_groups=None and group_size=None. Expected one of them"),
        ({"group_size": 2}, "num_groups=32 and group_size=2. .* give num_groups=None"),
    ],
)
def test_groups_that_do_not_divide_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nnx.GroupNorm(6, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "shape", "message"),
    [
        (
            lambda: nnx.GroupNorm(4, 2, rngs=nnx.Rngs(0)),
            (2, 3),
            r"GroupNorm\(4\) .* size 4 along .* \(2, 3\)",
        ),
        (
            lambda: nnx.GroupNorm(4, 2, reduction_axes=3, rngs=nnx.Rngs(0)),
            (2, 4),
            r"GroupNorm\(4\) has reduction axes 3 .* shape \(2, 4\) without them",
        ),
        (
            lambda: nnx.GroupNorm(4, 2, reduction_axes=1, rngs=nnx.Rngs(0)),
            (2, 3, 4),
            r"reduction axes 1 .* \(2, 3, 4\). Expected the last axis",
        ),
        (
            lambda: nnx.InstanceNorm(4, rngs=nnx.Rngs(0)),
            (2, 3),
            r"InstanceNorm\(4\) .* size 4 along .* \(2, 3\)",
        ),
        (
            lambda: nnx.InstanceNorm(4, feature_axes=0, rngs=nnx.Rngs(0)),
            (4, 3),
            r"InstanceNorm\(4\) found feature axes 0 .* \(4, 3\). The first axis",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(make: Any, shape: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()(jnp.ones(shape))

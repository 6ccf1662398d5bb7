"""ConvTranspose, against the sum over windows in NumPy, and as the transpose of a convolution."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def spread(x: np.ndarray, kernel: np.ndarray, stride: int = 1, dilation: int = 1) -> np.ndarray:
    """(batch, *spatial, in) and (*window, in, out): each input is added to its whole window."""
    window, spatial = kernel.shape[:-2], x.shape[1:-1]
    sizes = [
        (n - 1) * stride + (k - 1) * dilation + 1 for n, k in zip(spatial, window, strict=True)
    ]
    y = np.zeros((x.shape[0], *sizes, kernel.shape[-1]))
    for place in itertools.product(*map(range, window)):
        parts = tuple(
            slice(p * dilation, p * dilation + (n - 1) * stride + 1, stride)
            for p, n in zip(place, spatial, strict=True)
        )
        mirrored = tuple(k - 1 - p for p, k in zip(place, window, strict=True))
        y[(slice(None), *parts)] += x @ kernel[mirrored]
    return y


@pytest.mark.parametrize("rank", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"strides": 2}, {"kernel_dilation": 2}], ids=str)
def test_each_input_is_added_to_a_window(rank: int, options: dict[str, Any]) -> None:
    layer = nnx.ConvTranspose(
        3, 4, (3,) * rank, padding="VALID", use_bias=False, **options, rngs=nnx.Rngs(0)
    )
    x = inputs(2, *(4,) * rank, 3)
    kernel = np.asarray(layer.kernel[...])
    expected = spread(x, kernel, options.get("strides", 1), options.get("kernel_dilation", 1))
    np.testing.assert_allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_the_same_padding_multiplies_the_size_by_the_stride(stride: int, size: int) -> None:
    layer = nnx.ConvTranspose(3, 4, size, stride, rngs=nnx.Rngs(0))
    x = inputs(2, 5, 3)
    y = layer(x)
    assert y.shape == (2, 5 * stride, 4)
    whole = np.pad(spread(x, np.asarray(layer.kernel[...]), stride), ((0, 0), (0, 9), (0, 0)))
    # The middle of each window: half of what overlaps its neighbour is cut off in front.
    cut = size - 1 - ((size + stride - 1) // 2 if stride <= size - 1 else size - 1)
    np.testing.assert_allclose(y, whole[:, cut : cut + 5 * stride], atol=1e-5)


@pytest.mark.parametrize(
    ("padding", "pads"), [(0, (0, 0)), (1, (1, 1)), ([(0, 3)], (0, 3)), ([2], (2, 2))], ids=str
)
def test_padding_in_numbers_is_of_the_spread_inputs(padding: Any, pads: tuple[int, int]) -> None:
    layer = nnx.ConvTranspose(3, 4, 3, 2, padding=padding, rngs=nnx.Rngs(0))
    x = inputs(2, 5, 3)
    dilated = np.zeros((2, 9, 3), np.float32)
    dilated[:, ::2] = x
    conv = nnx.Conv(3, 4, 3, padding=[pads], rngs=nnx.Rngs(0))
    conv.kernel[...] = layer.kernel[...]
    np.testing.assert_allclose(layer(x), conv(dilated), atol=1e-5)


@pytest.mark.parametrize("stride", [1, 2, 3])
@pytest.mark.parametrize("dilation", [1, 2])
def test_causal_padding_sees_nothing_later(stride: int, dilation: int) -> None:
    layer = nnx.ConvTranspose(
        1, 1, 3, stride, kernel_dilation=dilation, padding="CAUSAL", rngs=nnx.Rngs(0)
    )
    jacobian = jax.jacobian(lambda x: layer(x[:, None])[:, 0])(jnp.ones(6))
    assert jacobian.shape == (6 * stride, 6)
    times = np.arange(6 * stride)[:, None] >= stride * np.arange(6)
    np.testing.assert_array_equal(np.where(times, 0, jacobian), 0)
    x = inputs(2, 6, 1)
    whole = np.pad(
        spread(x, np.asarray(layer.kernel[...]), stride, dilation), [(0, 0), (0, 9), (0, 0)]
    )
    np.testing.assert_allclose(layer(x), whole[:, : 6 * stride], atol=1e-5)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2])
def test_circular_padding_commutes_with_shifts(size: int, stride: int) -> None:
    layer = nnx.ConvTranspose(3, 4, size, stride, padding="CIRCULAR", rngs=nnx.Rngs(0))
    x = inputs(2, 5, 3)
    y = layer(x)
    assert y.shape == (2, 5 * stride, 4)
    np.testing.assert_allclose(layer(np.roll(x, 1, 1)), np.roll(y, stride, 1), atol=1e-5)
    whole = spread(x, np.asarray(layer.kernel[...]), stride)
    np.testing.assert_allclose(y.sum(1), whole.sum(1), atol=1e-5)


@pytest.mark.parametrize(
    ("padding", "size", "stride"),
    [
        (padding, size, stride)
        for padding, size, stride in itertools.product(
            ["VALID", "SAME", "CIRCULAR"], [3, 4], [1, 2]
        )
        if (padding, size, stride) not in {("SAME", 3, 2), ("CIRCULAR", 4, 1)}
    ],
)
def test_with_its_kernel_it_is_the_transpose_of_a_convolution(
    padding: str, size: int, stride: int
) -> None:
    conv = nnx.Conv(3, 4, size, stride, padding=padding, use_bias=False, rngs=nnx.Rngs(0))
    layer = nnx.ConvTranspose(
        4, 3, size, stride, padding=padding, use_bias=False, transpose_kernel=True, rngs=nnx.Rngs(0)
    )
    assert layer.kernel.shape == conv.kernel.shape
    layer.kernel[...] = conv.kernel[...]
    x = jnp.zeros((2, 6 if padding != "VALID" else 4 + size, 3))
    y, vjp = jax.vjp(conv, x)
    cotangent = jnp.asarray(inputs(*y.shape))
    expected = vjp(cotangent)[0]
    found = layer(cotangent)
    if padding == "VALID":  # what no window of the convolution reached is not there
        expected = expected[:, : found.shape[1]]
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_bias_and_mask() -> None:
    mask = np.tril(np.ones((3, 3, 4), bool))
    layer = nnx.ConvTranspose(3, 4, 3, padding="VALID", mask=mask, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.arange(4.0)
    x = inputs(2, 5, 3)
    expected = spread(x, np.asarray(layer.kernel[...]) * mask) + np.arange(4)
    np.testing.assert_allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("batch", [(), (2, 3), (0,)], ids=str)
def test_any_number_of_batch_axes(batch: tuple[int, ...]) -> None:
    layer = nnx.ConvTranspose(3, 4, (2, 2), padding="CIRCULAR", rngs=nnx.Rngs(0))
    x = inputs(*batch, 5, 4, 3)
    flat = layer(x.reshape(-1, 5, 4, 3)).reshape(*batch, 5, 4, 4)
    np.testing.assert_allclose(layer(x), flat, atol=1e-5)


def test_parameters_come_from_the_stream_params_in_order() -> None:
    normal = jax.nn.initializers.normal()
    layer = nnx.ConvTranspose(4, 6, (3, 2), bias_init=normal, rngs=nnx.Rngs(params=7))
    keys = [jax.random.fold_in(jax.random.key(7), n) for n in range(2)]
    kernel = jax.nn.initializers.lecun_normal()(keys[0], (3, 2, 4, 6), jnp.float32)
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    np.testing.assert_array_equal(layer.bias[...], normal(keys[1], (6,), jnp.float32))
    assert nnx.ConvTranspose(3, 4, 3, use_bias=False, rngs=nnx.Rngs(0)).bias is None


@pytest.mark.parametrize("shape", [(2, 5, 5, 4), (5, 3), (3,)], ids=str)
def test_inputs_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    layer = nnx.ConvTranspose(3, 4, (2, 2), rngs=nnx.Rngs(0))
    expected = r"ConvTranspose with a kernel of shape \(2, 2, 3, 4\) expects .* 3\), found \("
    with pytest.raises(ValueError, match=expected):
        layer(jnp.ones(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask": np.ones((3, 3))}, r"mask of shape \(3, 3\).* the kernel: \(3, 3, 3, 4\)"),
        ({"strides": (1,)}, r"ConvTranspose found strides \(1,\) for 2 spatial axes"),
        ({"kernel_dilation": (1,)}, r"kernel_dilation \(1,\) for 2 spatial axes"),
        ({"padding": "CAUSAL"}, "CAUSAL padding for 2 spatial axes"),
        ({"padding": "REFLECT"}, "unknown padding 'REFLECT'. Expected one of SAME, VALID"),
        ({"padding": [1]}, r"padding \[1\] for 2 spatial axes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nnx.ConvTranspose(3, 4, (3, 3), **options, rngs=nnx.Rngs(0))


def test_the_layer_is_computed_under_jit_alike() -> None:
    layer = nnx.ConvTranspose(3, 4, 3, 2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    x = inputs(2, 5, 3)
    assert layer(x).dtype == jnp.bfloat16
    np.testing.assert_array_equal(nnx.jit(layer)(x), layer(x))

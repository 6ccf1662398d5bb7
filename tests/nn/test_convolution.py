"""Conv, against a sum over windows in NumPy."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def inputs(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def convolved(
    x: np.ndarray,
    kernel: np.ndarray,
    pads: tuple[tuple[int, int], ...] | None = None,
    mode: str = "constant",
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
) -> np.ndarray:
    """(batch, *spatial, in) and (*window, in / groups, out) to (batch, *spatial, out)."""
    rank = kernel.ndim - 2
    x = np.pad(x, ((0, 0), *(pads or ((0, 0),) * rank), (0, 0)), mode=mode)
    window = kernel.shape[:rank]
    sizes = [
        (size - (length - 1) * dilation - 1) // stride + 1
        for size, length in zip(x.shape[1:-1], window, strict=True)
    ]
    y = np.zeros((x.shape[0], *sizes, kernel.shape[-1]))
    per_group = kernel.shape[-1] // groups
    for place in itertools.product(*map(range, window)):
        parts = tuple(
            slice(offset * dilation, offset * dilation + (size - 1) * stride + 1, stride)
            for offset, size in zip(place, sizes, strict=True)
        )
        seen = x[(slice(None), *parts)]
        for group, channels in enumerate(np.split(seen, groups, axis=-1)):
            outputs = slice(group * per_group, (group + 1) * per_group)
            y[..., outputs] += channels @ kernel[place][:, outputs]
    return y


def check(layer: nnx.Conv, x: np.ndarray, **options: Any) -> None:
    expected = convolved(x, np.asarray(layer.kernel[...]), **options)
    np.testing.assert_allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_each_output_is_a_sum_over_a_window(rank: int) -> None:
    layer = nnx.Conv(3, 4, (3,) * rank, padding="VALID", rngs=nnx.Rngs(0))
    check(layer, inputs(2, *(5,) * rank, 3))


@pytest.mark.parametrize(
    ("padding", "pads"),
    [
        ("SAME", ((1, 2),)),
        ("same_lower", ((2, 1),)),
        (0, ((0, 0),)),
        (2, ((2, 2),)),
        ([1], ((1, 1),)),
        ([(0, 3)], ((0, 3),)),
        ("CAUSAL", ((3, 0),)),
    ],
    ids=str,
)
def test_padding_adds_zeros(padding: Any, pads: Any) -> None:
    check(nnx.Conv(3, 4, 4, padding=padding, rngs=nnx.Rngs(0)), inputs(2, 7, 3), pads=pads)


@pytest.mark.parametrize(("padding", "mode"), [("CIRCULAR", "wrap"), ("REFLECT", "reflect")])
@pytest.mark.parametrize("dilation", [1, 2])
def test_padding_continues_the_input(padding: str, mode: str, dilation: int) -> None:
    layer = nnx.Conv(3, 4, (3, 4), padding=padding, kernel_dilation=dilation, rngs=nnx.Rngs(0))
    pads = ((dilation, dilation), (3 * dilation // 2, (3 * dilation + 1) // 2))
    check(layer, inputs(2, 8, 9, 3), pads=pads, mode=mode, dilation=dilation)


def test_causal_padding_sees_nothing_later() -> None:
    layer = nnx.Conv(1, 1, 3, kernel_dilation=2, padding="CAUSAL", rngs=nnx.Rngs(0))
    jacobian = jax.jacobian(lambda x: layer(x[:, None])[:, 0])(jnp.ones(8))
    assert jacobian.shape == (8, 8)
    np.testing.assert_array_equal(jacobian, np.tril(jacobian))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"strides": 2}, {"stride": 2}),
        ({"strides": (2, 2)}, {"stride": 2}),
        ({"kernel_dilation": [2, 2]}, {"dilation": 2}),
        ({"feature_group_count": 2}, {"groups": 2}),
        ({"strides": None, "input_dilation": None, "kernel_dilation": None}, {}),
    ],
    ids=str,
)
def test_strides_dilation_and_groups(options: Any, expected: Any) -> None:
    layer = nnx.Conv(4, 6, (3, 2), padding="VALID", **options, rngs=nnx.Rngs(0))
    check(layer, inputs(2, 7, 8, 4), **expected)


def test_input_dilation_spreads_the_input() -> None:
    layer = nnx.Conv(3, 4, 3, padding=0, input_dilation=2, rngs=nnx.Rngs(0))
    x = inputs(2, 5, 3)
    spread = np.zeros((2, 9, 3), np.float32)
    spread[:, ::2] = x
    np.testing.assert_allclose(
        layer(x), convolved(spread, np.asarray(layer.kernel[...])), atol=1e-5
    )


def test_the_bias_is_added() -> None:
    layer = nnx.Conv(3, 4, (3, 3), rngs=nnx.Rngs(0))
    x = jnp.asarray(inputs(2, 5, 5, 3))
    before = layer(x)
    layer.bias[...] = jnp.arange(4.0)
    np.testing.assert_allclose(layer(x) - before, np.broadcast_to(np.arange(4), (2, 5, 5, 4)), 1e-5)
    assert nnx.Conv(3, 4, 3, use_bias=False, rngs=nnx.Rngs(0)).bias is None


def test_a_mask_leaves_out_parts_of_the_kernel() -> None:
    mask = np.tril(np.ones((3, 3, 4), bool))
    layer = nnx.Conv(3, 4, 3, padding="VALID", mask=mask, rngs=nnx.Rngs(0))
    x = inputs(2, 7, 3)
    np.testing.assert_allclose(
        layer(x), convolved(x, np.asarray(layer.kernel[...]) * mask), atol=1e-5
    )


@pytest.mark.parametrize("batch", [(), (2,), (2, 3), (0, 2)], ids=str)
def test_any_number_of_batch_axes(batch: tuple[int, ...]) -> None:
    layer = nnx.Conv(3, 4, (2, 2), padding="VALID", rngs=nnx.Rngs(0))
    x = inputs(*batch, 5, 5, 3)
    assert layer(x).shape == (*batch, 4, 4, 4)
    flat = convolved(x.reshape(-1, 5, 5, 3), np.asarray(layer.kernel[...]))
    np.testing.assert_allclose(layer(x), flat.reshape(*batch, 4, 4, 4), atol=1e-5)


def test_parameters_come_from_the_stream_params_in_order() -> None:
    normal = jax.nn.initializers.normal()
    layer = nnx.Conv(4, 6, (3, 2), feature_group_count=2, bias_init=normal, rngs=nnx.Rngs(params=7))
    keys = [jax.random.fold_in(jax.random.key(7), n) for n in range(2)]
    kernel = jax.nn.initializers.lecun_normal()(keys[0], (3, 2, 2, 6), jnp.float32)
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    np.testing.assert_array_equal(layer.bias[...], normal(keys[1], (6,), jnp.float32))


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, "bfloat16", "float32"),
        ({"param_dtype": jnp.bfloat16}, "bfloat16", "bfloat16"),
        ({"dtype": jnp.bfloat16}, "float32", "bfloat16"),
        ({}, "int32", "float32"),
        ({"mask": np.ones((3, 3, 4), np.int32)}, "float32", "float32"),
    ],
)
def test_the_dtype_of_the_output(options: dict[str, Any], dtype: str, expected: str) -> None:
    layer = nnx.Conv(3, 4, 3, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 5, 3), dtype)).dtype == jnp.dtype(expected)


def test_a_convolution_of_the_user_is_used() -> None:
    calls = []

    def convolution(*args: Any, **options: Any) -> jax.Array:
        calls.append(options["precision"])
        return jax.lax.conv_general_dilated(*args, **options)

    layer = nnx.Conv(
        3, 4, 3, conv_general_dilated=convolution, precision="highest", rngs=nnx.Rngs(0)
    )
    assert layer(inputs(2, 5, 3)).shape == (2, 5, 4)
    assert calls == ["highest"]


@pytest.mark.parametrize("shape", [(2, 5, 5, 4), (5, 3), (3,), (2, 3, 5, 5)], ids=str)
def test_inputs_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    layer = nnx.Conv(3, 4, (2, 2), rngs=nnx.Rngs(0))
    expected = r"kernel of shape \(2, 2, 3, 4\) expects .* \(\.\.\., size_0, size_1, 3\), found \("
    with pytest.raises(ValueError, match=expected):
        layer(jnp.ones(shape))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"feature_group_count": 2}, "2 groups for 3 input and 4 output channels"),
        ({"feature_group_count": 3}, "3 groups for 3 input and 4 output channels"),
        ({"mask": np.ones((3, 3))}, r"mask of shape \(3, 3\).* the kernel: \(3, 3, 3, 4\)"),
        ({"strides": (1,)}, r"strides \(1,\) for 2 spatial axes"),
        ({"kernel_dilation": (1, 1, 1)}, r"kernel_dilation \(1, 1, 1\) for 2 spatial axes"),
        ({"padding": "WRAP"}, "Conv found an unknown padding 'WRAP'. Expected one of SAME, SAME_L"),
        ({"padding": "CAUSAL"}, "CAUSAL padding for 2 spatial axes"),
        ({"padding": [1]}, r"padding \[1\] for 2 spatial axes"),
        ({"padding": [1, (1, 2, 3)]}, r"padding .* for 2 spatial axes"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nnx.Conv(3, 4, (3, 3), **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("padding", ["SAME", "CIRCULAR"])
def test_jit_and_gradient_are_those_of_the_formula(padding: str) -> None:
    layer = nnx.Conv(3, 4, (3, 3), padding=padding, rngs=nnx.Rngs(0))
    x = jnp.asarray(inputs(2, 5, 5, 3))
    np.testing.assert_allclose(nnx.jit(layer)(x), layer(x), atol=1e-5)
    gradient = nnx.grad(lambda layer: layer(x).sum())(layer)
    np.testing.assert_allclose(gradient["bias"][...], jnp.full(4, 50.0), rtol=1e-5)

    def by_hand(kernel: jax.Array) -> jax.Array:
        mode = "wrap" if padding == "CIRCULAR" else "constant"
        padded = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode=mode)
        return sum(
            jnp.einsum("bhwi,io->bhwo", padded[:, i : i + 5, j : j + 5], kernel[i, j])
            for i in range(3)
            for j in range(3)
        ).sum()

    expected = jax.grad(by_hand)(layer.kernel[...])
    np.testing.assert_allclose(gradient["kernel"][...], expected, rtol=1e-4, atol=1e-4)


def test_a_layer_made_anew_does_not_retrace() -> None:
    traces = []

    @nnx.jit
    def forward(layer: nnx.Conv, x: jax.Array) -> jax.Array:
        traces.append(1)
        return layer(x)

    for seed in range(3):
        forward(nnx.Conv(3, 4, [3, 3], padding=[1, 1], rngs=nnx.Rngs(seed)), jnp.ones((2, 5, 5, 3)))
    assert len(traces) == 1

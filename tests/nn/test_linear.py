"""Linear, LinearGeneral and Einsum, against `x @ kernel + bias` and its like."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def inputs(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype) / 7


@pytest.mark.parametrize("shape", [(3,), (5, 3), (2, 5, 3), (0, 3)], ids=str)
@pytest.mark.parametrize("use_bias", [True, False])
def test_linear_is_a_product_and_a_sum(shape: tuple[int, ...], use_bias: bool) -> None:
    layer = nnx.Linear(3, 4, use_bias=use_bias, rngs=nnx.Rngs(0))
    x = inputs(*shape)
    expected = x @ np.asarray(layer.kernel[...])
    if use_bias:
        layer.bias[...] = jnp.arange(4.0)
        expected = expected + np.arange(4, dtype=np.float32)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)


def test_parameters_come_from_the_stream_params_in_order() -> None:
    normal = jax.nn.initializers.normal()
    layer = nnx.Linear(3, 4, bias_init=normal, rngs=nnx.Rngs(params=7))
    key = jax.random.key(7)
    kernel = jax.nn.initializers.lecun_normal()(jax.random.fold_in(key, 0), (3, 4), jnp.float32)
    np.testing.assert_array_equal(layer.kernel[...], kernel)
    np.testing.assert_array_equal(
        layer.bias[...], normal(jax.random.fold_in(key, 1), (4,), jnp.float32)
    )


def test_without_a_bias_one_key_is_drawn() -> None:
    rngs = nnx.Rngs(0)
    layer = nnx.Linear(3, 4, use_bias=False, rngs=rngs)
    assert layer.bias is None
    assert int(rngs.default.count[...]) == 1


@pytest.mark.parametrize(
    ("options", "dtype", "expected"),
    [
        ({}, "bfloat16", "float32"),
        ({"param_dtype": jnp.bfloat16}, "bfloat16", "bfloat16"),
        ({"dtype": jnp.bfloat16}, "float32", "bfloat16"),
        ({}, "int32", "float32"),
        ({"dtype": jnp.bfloat16, "preferred_element_type": jnp.float32}, "float32", "float32"),
    ],
)
def test_the_dtype_of_the_output(options: dict[str, Any], dtype: str, expected: str) -> None:
    if options.get("preferred_element_type") is not None:
        options = {**options, "use_bias": False}
    layer = nnx.Linear(3, 4, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.ones((2, 3), dtype)).dtype == jnp.dtype(expected)


def test_metadata_goes_to_the_parameters() -> None:
    layer = nnx.Linear(
        3,
        4,
        kernel_init=nnx.with_partitioning(nnx.initializers.ones, (None, "model")),
        kernel_metadata={"note": "kernel"},
        bias_metadata={"out_sharding": ("model",)},
        rngs=nnx.Rngs(0),
    )
    assert layer.kernel.out_sharding == (None, "model")
    assert layer.kernel.note == "kernel"
    assert layer.bias.out_sharding == ("model",)


def test_a_dot_general_of_the_user_is_used() -> None:
    calls = []

    def dot_general(*args: Any, **options: Any) -> jax.Array:
        calls.append(options)
        return jax.lax.dot_general(*args, **options)

    nnx.Linear(3, 4, dot_general=dot_general, precision="highest", rngs=nnx.Rngs(0))(inputs(2, 3))
    assert calls == [{"precision": "highest"}]


@pytest.mark.parametrize("shape", [(5, 4), (3, 2), ()], ids=str)
def test_inputs_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"kernel of shape \(3, 4\) expects .* \(\.\.\., 3\), found"
    ):
        layer(jnp.ones(shape))


def test_gradients_are_those_of_the_formula() -> None:
    layer = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    x = jnp.asarray(inputs(5, 3))

    def loss(layer: nnx.Linear) -> jax.Array:
        return (layer(x) ** 2).sum()

    grads = nnx.grad(loss)(layer)
    kernel, bias = jax.grad(lambda k, b: ((x @ k + b[None]) ** 2).sum(), (0, 1))(
        layer.kernel[...], layer.bias[...]
    )
    np.testing.assert_allclose(grads["kernel"][...], kernel, rtol=1e-5)
    np.testing.assert_allclose(grads["bias"][...], bias, rtol=1e-5)


def test_a_layer_made_anew_does_not_retrace() -> None:
    traces = []

    @nnx.jit
    def forward(layer: nnx.Linear, x: jax.Array) -> jax.Array:
        traces.append(1)
        return layer(x)

    for seed in range(3):
        forward(nnx.Linear(3, 4, rngs=nnx.Rngs(seed)), jnp.ones((2, 3)))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("out", "axis", "formula"),
    [
        (6, (1, -1), "axbc,acd->xbd"),
        ((4, 5), (-1, 1), "axbc,acde->xbde"),
    ],
)
def test_linear_general_is_an_einsum_and_a_sum(out: Any, axis: Any, formula: str) -> None:
    layer = nnx.LinearGeneral((2, 3), out, axis=axis, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.asarray(inputs(*layer.bias.shape))
    x = inputs(7, 2, 5, 3)
    product = np.einsum(formula, x.swapaxes(0, 1), layer.kernel[...])
    expected = product + np.asarray(layer.bias[...])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_each_index_of_a_batch_axis_has_a_kernel_and_a_bias() -> None:
    layer = nnx.LinearGeneral(3, 4, batch_axis={1: 5, 0: 2}, rngs=nnx.Rngs(0))
    layer.bias[...] = jnp.asarray(inputs(2, 5, 4))
    x = inputs(2, 5, 7, 3)
    product = np.einsum("abxc,abcd->abxd", x, layer.kernel[...])
    np.testing.assert_allclose(layer(x), product + inputs(2, 5, 4)[:, :, None], rtol=1e-5)


def test_a_general_kernel_is_initialized_as_a_matrix() -> None:
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model", None))
    layer = nnx.LinearGeneral((2, 3), 4, axis=(0, 1), kernel_init=init, rngs=nnx.Rngs(params=7))
    key = jax.random.fold_in(jax.random.key(7), 0)
    matrix = jax.nn.initializers.lecun_normal()(key, (6, 4), jnp.float32)
    np.testing.assert_array_equal(layer.kernel[...], matrix.reshape(2, 3, 4))
    assert layer.kernel.out_sharding == (None, "model", None)


def test_a_class_of_products_goes_before_a_product() -> None:
    calls = []

    def made() -> Any:
        calls.append(1)
        return jax.lax.dot_general

    layer = nnx.LinearGeneral(3, 4, dot_general=None, dot_general_cls=made, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(layer(inputs(2, 3)), inputs(2, 3) @ layer.kernel[...], rtol=1e-5)
    assert calls == [1]


@pytest.mark.parametrize(
    ("axis", "shape"),
    [((1, 2), (5, 3, 2)), ((1, 2), (5, 2)), ((1, 1), (5, 2, 3)), ((0, 1), (5, 2, 3))],
    ids=str,
)
def test_a_general_layer_refuses_other_sizes(axis: Any, shape: tuple[int, ...]) -> None:
    layer = nnx.LinearGeneral((2, 3), 4, axis=axis, rngs=nnx.Rngs(0))
    with pytest.raises(
        ValueError, match=r"shape \(2, 3, 4\) expects inputs of sizes \(2, 3\) al.*fo"
    ):
        layer(jnp.ones(shape))


def test_axes_of_a_general_layer_that_make_no_sense_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a size for each axis, found .*\(2, 3\) and axis \(-1,\)"
    ):
        nnx.LinearGeneral((2, 3), 4, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"leading ones, 0 and on, found \{1: 5\}"):
        nnx.LinearGeneral(2, 4, batch_axis={1: 5}, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("formula", "kernel", "bias", "shape", "spread"),
    [
        ("nta, hab -> nthb", (4, 2, 3), (4, 3), (5, 7, 2), (1, 1, 4, 3)),
        ("...a,ab->...b", (2, 3), (3,), (5, 7, 2), (1, 1, 3)),
        ("ta...,a...b->b...t", (2, 3, 4), (4, 3), (5, 2, 6, 3), (4, 1, 3, 1)),
    ],
)
def test_einsum_is_an_einsum_and_a_sum(
    formula: str, kernel: Any, bias: Any, shape: tuple[int, ...], spread: tuple[int, ...]
) -> None:
    normal = jax.nn.initializers.normal()
    layer = nnx.Einsum(formula, kernel, bias, bias_init=normal, rngs=nnx.Rngs(0))
    x = inputs(*shape)
    product = np.einsum(formula, x, np.asarray(layer.kernel[...]))
    expected = product + np.asarray(layer.bias[...]).reshape(spread)
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5, atol=1e-6)


def test_an_einsum_may_come_with_the_call() -> None:
    layer = nnx.Einsum(None, (3, 4), rngs=nnx.Rngs(0))
    np.testing.assert_allclose(
        layer(inputs(3, 5), "ab,ac->bc"), inputs(3, 5).T @ layer.kernel[...], rtol=1e-5
    )
    with pytest.raises(ValueError, match="Einsum was told `einsum_str` nowhere"):
        layer(inputs(3, 5))


@pytest.mark.parametrize("formula", ["ab,bc", "ab->a", "a,b,c->abc"])
def test_an_einsum_of_other_operands_is_refused(formula: str) -> None:
    with pytest.raises(ValueError, match=f"two operands, .* found '{formula}'"):
        nnx.Einsum(formula, (3, 4), rngs=nnx.Rngs(0))


@pytest.mark.parametrize("shape", [(5, 2), (3,), (2, 5, 3)], ids=str)
def test_an_einsum_refuses_other_sizes(shape: tuple[int, ...]) -> None:
    layer = nnx.Einsum("ab,bc->ac", (3, 4), (4,), rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"kernel of shape \(3, 4\) does not fit inputs of shape"):
        layer(jnp.ones(shape))

"""Embed, against indexing."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


@pytest.mark.parametrize("shape", [(), (3,), (2, 4)], ids=str)
@pytest.mark.parametrize("dtype", [np.int32, np.uint8])
def test_vectors_are_looked_up(shape: tuple[int, ...], dtype: Any) -> None:
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    numbers = np.random.default_rng(0).integers(0, 5, shape).astype(dtype)
    found = layer(jnp.asarray(numbers))
    np.testing.assert_array_equal(found, np.asarray(layer.embedding[...])[numbers])


def test_numbers_out_of_range_give_nan() -> None:
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    found = layer(jnp.array([-1, 5]))
    np.testing.assert_array_equal(found[0], layer.embedding[4])
    assert jnp.isnan(found[1]).all()


def test_a_single_vector_is_that_of_every_number() -> None:
    layer = nnx.Embed(1, 3, rngs=nnx.Rngs(0))
    found = layer(jnp.zeros((2, 4), jnp.int32))
    np.testing.assert_array_equal(found, np.broadcast_to(layer.embedding[0], (2, 4, 3)))


def test_attend_is_the_inner_product_with_each_vector() -> None:
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    query = np.random.default_rng(0).normal(size=(2, 4, 3)).astype(np.float32)
    expected = query @ np.asarray(layer.embedding[...]).T
    np.testing.assert_allclose(layer.attend(jnp.asarray(query)), expected, atol=1e-6)


def test_parameters_come_from_the_stream_params() -> None:
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(params=7))
    init = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", out_axis=0)
    key = jax.random.fold_in(jax.random.key(7), 0)
    np.testing.assert_array_equal(layer.embedding[...], init(key, (5, 3), jnp.float32))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "float32"),
        ({"param_dtype": jnp.bfloat16}, "bfloat16"),
        ({"dtype": jnp.bfloat16}, "bfloat16"),
    ],
)
@pytest.mark.parametrize("number", [1, 5])
def test_the_dtype_of_the_output(number: int, options: dict[str, Any], expected: str) -> None:
    layer = nnx.Embed(number, 3, **options, rngs=nnx.Rngs(0))
    assert layer(jnp.zeros(2, jnp.int32)).dtype == jnp.dtype(expected)
    assert layer.attend(jnp.ones(3)).dtype == jnp.dtype(expected)


def test_integer_tables_stay_integers() -> None:
    table = nnx.Embed(
        5,
        3,
        param_dtype=jnp.int32,
        embedding_init=lambda key, shape, dtype: jnp.arange(15, dtype=dtype).reshape(shape),
        rngs=nnx.Rngs(0),
    )
    assert table(jnp.array([1])).tolist() == [[3, 4, 5]]


def test_what_is_no_integer_is_refused() -> None:
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"integers, found an array of float32 of shape \(2,\)"):
        layer(jnp.ones(2))


@pytest.mark.parametrize("shape", [(), (4,), (3, 5)], ids=str)
def test_queries_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Embed\(5, 3\) expects queries .* \(\.\.\., 3\), found"):
        layer.attend(jnp.ones(shape))


def test_only_vectors_looked_up_have_a_gradient() -> None:
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    gradient = nnx.grad(lambda layer: layer(jnp.array([1, 1, 4])).sum())(layer)
    assert gradient["embedding"][:, 0].tolist() == [0, 2, 0, 0, 1]


def test_the_sharding_of_the_result_may_be_named() -> None:
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    layer = nnx.Embed(5, 3, rngs=nnx.Rngs(0))
    spec = jax.sharding.PartitionSpec("data")
    with jax.set_mesh(mesh):
        found = layer(jnp.array([1, 2]), out_sharding=spec)
        scores = layer.attend(found, out_sharding=spec)
    np.testing.assert_array_equal(found, layer.embedding[1:3])
    assert found.sharding.spec == scores.sharding.spec == jax.sharding.PartitionSpec("data", None)

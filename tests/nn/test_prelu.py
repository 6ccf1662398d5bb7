"""PReLU, against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

x = jnp.array([-2.0, -0.5, 0.0, 3.0])


def test_it_multiplies_what_is_negative() -> None:
    np.testing.assert_array_equal(nnx.PReLU(0.25)(x), [-0.5, -0.125, 0.0, 3.0])
    assert nnx.PReLU().negative_slope.get_value() == jnp.float32(0.01)


def test_the_slope_is_learned() -> None:
    grads = nnx.grad(lambda layer: layer(x).sum())(nnx.PReLU(0.25, param_dtype=jnp.float32))
    assert float(grads["negative_slope"][...]) == -2.5


def test_the_dtype_is_that_of_the_input_or_the_one_given() -> None:
    half = x.astype(jnp.bfloat16)
    assert nnx.PReLU()(half).dtype == jnp.bfloat16
    assert nnx.PReLU(dtype=jnp.float32)(half).dtype == jnp.float32
    assert nnx.PReLU(dtype=jnp.float32)(jnp.array([-1, 2])).dtype == jnp.float32


def test_integers_are_refused_without_a_dtype() -> None:
    with pytest.raises(TypeError, match=r"PReLU expects floating inputs, found int32\[2\]"):
        nnx.PReLU()(jnp.array([-1, 2], jnp.int32))


def test_metadata_goes_to_the_parameter() -> None:
    layer = nnx.PReLU(negative_slope_metadata={"note": "slope"})
    assert layer.negative_slope.note == "slope"
    assert jax.tree.leaves(nnx.state(layer, nnx.Param))[0].shape == ()

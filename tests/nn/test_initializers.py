"""Initializers are those of JAX."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx


@pytest.mark.parametrize("name", [n for n in nnx.initializers.__all__ if not n.endswith("_init")])
def test_an_initializer_is_the_one_of_jax(name: str) -> None:
    assert getattr(nnx.initializers, name) is getattr(jax.nn.initializers, name)


def test_zeros_init_and_ones_init_make_initializers() -> None:
    key = jax.random.key(0)
    assert nnx.initializers.zeros_init()(key, (2,), jnp.float32).tolist() == [0, 0]
    assert nnx.initializers.ones_init()(key, (2,), jnp.float32).tolist() == [1, 1]

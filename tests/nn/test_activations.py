"""Activations are those of JAX, also of Variables."""

import inspect
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.nn import activations

X = np.linspace(-2, 2, 8, dtype=np.float32).reshape(2, 4)


@pytest.mark.parametrize("name", [n for n in activations.__all__ if n != "one_hot"])
def test_an_activation_takes_a_variable_as_its_value(name: str) -> None:
    function = getattr(nnx, name)
    oracle = getattr(jax.nn, name)(jnp.asarray(X))
    for transform in (lambda f: f, jax.jit):
        np.testing.assert_array_equal(transform(function)(nnx.Param(X)), transform(function)(X))
    np.testing.assert_array_equal(function(X), oracle)


@pytest.mark.parametrize("name", ["relu", "relu6", "sigmoid", "silu", "gelu", "softmax"])
def test_an_activation_of_a_variable_has_a_gradient(name: str) -> None:
    function = getattr(nnx, name)

    def loss(x: Any) -> jax.Array:
        return (function(x) ** 2).sum()

    grads = jax.grad(loss)(nnx.Param(jnp.asarray(X)))
    np.testing.assert_array_equal(grads[...], jax.grad(loss)(jnp.asarray(X)))


def test_one_hot_takes_its_arguments_by_name() -> None:
    labels = nnx.Variable(jnp.array([0, 2]))
    np.testing.assert_array_equal(nnx.one_hot(labels, num_classes=3), np.eye(3)[[0, 2]])


def test_activations_keep_name_and_signature_and_pickle() -> None:
    assert pickle.loads(pickle.dumps(nnx.gelu)) is nnx.gelu
    assert nnx.gelu.__name__ == "gelu"
    assert inspect.signature(nnx.gelu) == inspect.signature(jax.nn.gelu)

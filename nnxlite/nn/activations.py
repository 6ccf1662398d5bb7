"""Activation functions: those of `jax.nn`, which here take Variables too.

Most functions of JAX accept a Variable as the array it holds, but not those that are defined with
a derivative of their own, such as `jax.nn.relu`.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp

from nnxlite._core.arithmetic import value_of

__all__ = [
    "celu",
    "elu",
    "gelu",
    "glu",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "identity",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "logsumexp",
    "one_hot",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_sign",
    "softmax",
    "softplus",
    "standardize",
    "swish",
    "tanh",
]

P = ParamSpec("P")
R = TypeVar("R")


def _of_values(function: Callable[P, R]) -> Callable[P, R]:
    """Returns `function` with each Variable among its arguments replaced by its value."""

    def activation(*args: P.args, **kwargs: P.kwargs) -> R:
        values = {name: value_of(arg) for name, arg in kwargs.items()}
        return function(*map(value_of, args), **values)  # type: ignore[arg-type]  # same arguments

    name = function.__name__
    functools.update_wrapper(activation, function, ("__name__",), ())
    activation.__qualname__ = name
    activation.__doc__ = f"Applies `jax.nn.{name}`, to the values of Variables."
    return activation


celu = _of_values(jax.nn.celu)
elu = _of_values(jax.nn.elu)
gelu = _of_values(jax.nn.gelu)
glu = _of_values(jax.nn.glu)
hard_sigmoid = _of_values(jax.nn.hard_sigmoid)
hard_silu = _of_values(jax.nn.hard_silu)
hard_tanh = _of_values(jax.nn.hard_tanh)
identity = _of_values(jax.nn.identity)
leaky_relu = _of_values(jax.nn.leaky_relu)
log_sigmoid = _of_values(jax.nn.log_sigmoid)
log_softmax = _of_values(jax.nn.log_softmax)
logsumexp = _of_values(jax.nn.logsumexp)
one_hot = _of_values(jax.nn.one_hot)
relu = _of_values(jax.nn.relu)
relu6 = _of_values(jax.nn.relu6)
selu = _of_values(jax.nn.selu)
sigmoid = _of_values(jax.nn.sigmoid)
silu = _of_values(jax.nn.silu)
soft_sign = _of_values(jax.nn.soft_sign)
softmax = _of_values(jax.nn.softmax)
softplus = _of_values(jax.nn.softplus)
standardize = _of_values(jax.nn.standardize)
tanh = _of_values(jnp.tanh)

hard_swish = hard_silu
swish = silu

"""Small models, and ways to call a function of objects through each transform."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import nnxlite as nnx

Function = Callable[..., Any]


class Cell(nnx.Module):
    """One parameter, one counter."""

    def __init__(self, w: float = 2.0) -> None:
        self.w = nnx.Param(jnp.float32(w))
        self.n = nnx.Variable(jnp.int32(0))

    def __call__(self, x: jax.Array) -> jax.Array:
        self.n[...] += jnp.int32(1)
        return self.w[...] * x


class Tree(nnx.Module):
    """Children of every form, some of them shared, and a cycle."""

    def __init__(self) -> None:
        self.left, self.right = Cell(2.0), Cell(3.0)
        self.again = self.left
        self.parent = self
        self.items = [Cell(5.0), jnp.float32(7), "text"]
        self.table = {"a": Cell(11.0), "b": nnx.BatchStat(jnp.float32(13))}
        self.pair = (jnp.float32(17), nnx.Param(jnp.float32(19)), "tag")
        self.array = jnp.float32(23)
        self.both = nnx.Variable({"x": jnp.float32(29), "y": (jnp.float32(31), jnp.float32(37))})
        self.mode = "train"


def through_jit(f: Function) -> Function:
    return nnx.jit(f)


def through_grad(f: Function) -> Function:
    @functools.wraps(f)
    def loss(*args: Any, **kwargs: Any) -> Any:
        return jnp.float32(0), f(*args, **kwargs)

    run = nnx.value_and_grad(loss, has_aux=True, allow_int=True)
    return functools.wraps(f)(lambda *args, **kwargs: run(*args, **kwargs)[0][1])


TRANSFORMS: dict[str, Callable[[Function], Function]] = {
    "jit": through_jit,
    "grad": through_grad,
    "jit of grad": lambda f: through_jit(through_grad(f)),
    "grad of jit": lambda f: through_grad(through_jit(f)),
    "jit of jit": lambda f: through_jit(through_jit(f)),
}


def counted(f: Function) -> tuple[Function, list[int]]:
    """Returns `f`, and a list that grows by one each time its Python code runs."""
    runs: list[int] = []

    def run(*args: Any, **kwargs: Any) -> Any:
        runs.append(len(runs))
        return f(*args, **kwargs)

    return run, runs

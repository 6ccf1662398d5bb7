"""What memory compiled programs need: bytes by XLA's own account; nothing is run or timed.

A row compiles one program as it is written by hand over plain arrays, and the same program over
objects. Temporary bytes are what the program holds while it runs, beside arguments and results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.bench import models

LIBRARIES = ("raw", "nnxlite")
LAYERS = 64
LENGTHS = (8, 8)
LONG = 64  # tokens: activations, not parameters, shall fill the memory
DEEP_BLOCKS = 24

TEMP = "temp_size_in_bytes"
OUTPUT = "output_size_in_bytes"


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
      name: As in the table and in `gates.py`.
      program: From an adapter to a jitted function and its arguments.
      part: Which bytes are compared, an attribute of `memory_analysis()`.
    """

    name: str
    program: Callable[[Any], tuple[Any, tuple]]
    part: str

    def measure(self, libraries: dict[str, Any]) -> dict[str, int]:
        """Bytes by library."""
        found = {}
        for name in LIBRARIES:
            if name in libraries:
                function, args = self.program(libraries[name])
                analysis = function.lower(*args).compile().memory_analysis()
                found[name] = getattr(analysis, self.part)
        return found


ROWS: list[Row] = []


def row(name: str, part: str) -> Callable:
    """Puts the decorated maker into `ROWS`."""

    def add(program: Callable) -> Callable:
        ROWS.append(Row(name, program, part))
        return program

    return add


@row("output bytes, forward", OUTPUT)
def forward(library):
    x, _ = models.batch()
    return library.jit(library.forward), (library.model(DEEP_BLOCKS), x)


@row("output bytes, Adam step", OUTPUT)
@row("temp bytes, Adam step", TEMP)
def adam_step(library):
    run, x = library.training(DEEP_BLOCKS), long_input()
    return run.step, (*run.carry, x, x)


@row("temp bytes, gradient through scan", TEMP)
def scan(library):
    if library.name == "raw":
        return gradient_by_hand(library, (LAYERS,), remat=False)
    nnx = library.nnx
    return gradient(library, nnx.scan(call, in_axes=(0, nnx.Carry), out_axes=nnx.Carry))


@row("temp bytes, gradient through scan of remat", TEMP)
def scan_of_remat(library):
    if library.name == "raw":
        return gradient_by_hand(library, (LAYERS,), remat=True)
    nnx = library.nnx
    body = nnx.remat(call, prevent_cse=False)
    return gradient(library, nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry))


@row("temp bytes, gradient through remat_scan", TEMP)
def remat_scan(library):
    if library.name == "raw":
        return gradient_by_hand(library, LENGTHS, remat=True)
    return gradient(library, library.nnx.remat_scan(call, lengths=LENGTHS))


@row("temp bytes, gradient through Stacked", TEMP)
def stacked(library):
    if library.name == "raw":
        return gradient_by_hand(library, (LAYERS,), remat=False)
    return gradient_of(library, stack_of(library), call)


@row("temp bytes, gradient through Stacked, remat", TEMP)
def stacked_with_remat(library):
    if library.name == "raw":
        return gradient_by_hand(library, (LAYERS,), remat=True)
    return gradient_of(library, stack_of(library, remat=True), call)


def call(layer: Any, x: jax.Array) -> jax.Array:
    return layer(x)


def long_input() -> jax.Array:
    return jnp.ones((LONG, models.WIDTH), jnp.float32)


def stacked_arrays() -> list[jax.Array]:
    """The arrays of `LAYERS` layers, each a model of one block."""
    return [jnp.stack([array] * LAYERS) for array in models.initial_arrays(1)]


def stack_of(library: Any, **options: Any) -> Any:
    return library.nnx.Stacked(lambda: library.model(1), LAYERS, **options)


def gradient(library: Any, tower: Callable) -> tuple[Any, tuple]:
    return gradient_of(library, library.Model(1, iter(stacked_arrays())), tower)


def gradient_of(library: Any, layers: Any, tower: Callable) -> tuple[Any, tuple]:
    def loss(layers, x):
        return tower(layers, x).sum()

    return library.jit(library.nnx.value_and_grad(loss)), (layers, long_input())


def gradient_by_hand(library: Any, lengths: tuple[int, ...], *, remat: bool) -> tuple[Any, tuple]:
    """The gradient through nested loops of these lengths over plain arrays."""

    def tower(arrays, x, lengths):
        def step(x, arrays):
            inner = lengths[1:]
            return (tower(arrays, x, inner) if inner else library.forward(arrays, x)), None

        step = jax.checkpoint(step, prevent_cse=False) if remat else step
        return jax.lax.scan(step, x, arrays)[0]

    def loss(arrays, x):
        by_loop = [array.reshape(*lengths, *array.shape[1:]) for array in arrays]
        return tower(by_loop, x, lengths).sum()

    return library.jit(jax.value_and_grad(loss)), (stacked_arrays(), long_input())

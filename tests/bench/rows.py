"""What is measured: each row makes the same call for each library.

A row is a function of a library's adapter (`models.py`) and a number of leaves; it returns the
`Contender` to time. The number is that of the arrays which cross the call: the model's for most
rows, those of model and optimizer together for the training rows.

Outputs are waited for, one leaf of them, so a call's time is dispatch and execution together.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tests.bench import models
from tests.bench.timing import BURST, Contender

ALL = ("raw", "nnxlite", "flax", "equinox")
NNX = ("raw", "nnxlite", "flax")
OBJECTS = ("nnxlite", "flax")
DICT_LEAVES = 700
DEEP_BLOCKS = 24
ARRAYS_PER_PARAM = 3  # its value and two moments

LARGEST_WITH_PEERS = 1000
"""Sizes above this are about scaling against raw JAX: costly rows leave the other libraries out."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table per size.

    Attributes:
      name: As in the table and in `gates.py`.
      make: From an adapter and a number of leaves to what is timed.
      libraries: Columns of the row; the first that is installed is its control.
      leaves: From the wanted size to the number of arrays that really cross the call; `None` for
        rows that have one size.
      burst: Calls a turn.
      costly: Takes long at big sizes, to compile or in flax, so only the first two libraries run.
      largest: Bigger sizes are left out.
    """

    name: str
    make: Callable[[Any, int], Contender]
    libraries: tuple[str, ...]
    leaves: Callable[[int], int] | None
    burst: int
    costly: bool
    largest: float

    def libraries_at(self, size: int) -> tuple[str, ...]:
        return self.libraries[:2] if self.costly and size > LARGEST_WITH_PEERS else self.libraries


ROWS: list[Row] = []


def model_leaves(size: int) -> int:
    return models.LEAVES_PER_BLOCK * blocks_of(size) + models.LEAVES_OF_HEAD


def training_leaves(size: int) -> int:
    return ARRAYS_PER_PARAM * model_leaves(size // ARRAYS_PER_PARAM) + 1


def blocks_of(size: int) -> int:
    return max(1, (size - models.LEAVES_OF_HEAD) // models.LEAVES_PER_BLOCK)


def row(
    name: str,
    libraries: tuple[str, ...] = ALL,
    *,
    leaves: Callable[[int], int] | None = model_leaves,
    burst: int = BURST,
    costly: bool = False,
    largest: float = float("inf"),
) -> Callable:
    """Puts the decorated maker into `ROWS`."""

    def add(make: Callable) -> Callable:
        ROWS.append(Row(name, make, libraries, leaves, burst, costly, largest))
        return make

    return add


def wait(tree: Any) -> None:
    """Waits for the computation that makes `tree`."""
    jax.tree.leaves(tree)[0].block_until_ready()


def calling(function: Callable, *args: Any) -> Contender:
    return Contender(lambda _: function(*args))


def awaiting(function: Callable, *args: Any) -> Contender:
    return Contender(lambda _: wait(function(*args)))


# `nnx.jit` and what it is measured against


@row("no-op")
def no_op(library, size):
    return calling(library.jit(lambda model: None), library.model(blocks_of(size)))


@row("one output", costly=True)
def one_output(library, size):
    x, _ = models.batch()
    jitted = library.jit(lambda model, x: x + 1)
    model = library.model(blocks_of(size))
    return Contender(lambda _: jitted(model, x).block_until_ready())


@row("no-op, blocks in a plain list", ("raw", "nnxlite"))
def no_op_plain_list(library, size):
    model = library.model(blocks_of(size))
    if library.name != "raw":
        model.blocks = list(model.blocks)
    return calling(library.jit(lambda model: None), model)


@row("no-op, 700-leaf dict beside", costly=True)
def no_op_beside_a_dict(library, size):
    beside = {f"leaf{i}": array for i, array in enumerate(models.scalars(DICT_LEAVES))}
    jitted = library.jit(lambda model, beside: None)
    return calling(jitted, library.model(blocks_of(size)), beside)


@row("no-op, fresh model each call", costly=True)
def no_op_fresh_model(library, size):
    blocks = blocks_of(size)
    jitted = library.jit(lambda model: None)
    return Contender(jitted, functools.partial(fresh_models, library, blocks))


def fresh_models(library: Any, blocks: int, count: int) -> list[Any]:
    arrays = models.initial_arrays(blocks)
    return [library.model(blocks, arrays) for _ in range(count)]


@row("forward", costly=True)
def forward(library, size):
    x, _ = models.batch()
    return awaiting(library.jit(library.forward), library.model(blocks_of(size)), x)


@functools.cache
def training(library: Any, size: int, donate: bool, optax: bool) -> models.Training:
    """Shared by the rows that take the same step, so that it compiles once."""
    return library.training(blocks_of(size // ARRAYS_PER_PARAM), donate=donate, optax=optax)


def stepping(library: Any, size: int, *, donate: bool = False, optax: bool = False) -> Contender:
    x, y = models.batch()
    run = training(library, size, donate, optax)
    return Contender(lambda _: run.advance(x, y).block_until_ready())


def by_hand(library: Any) -> bool:
    """raw and nnxlite run one hand-written Adam; the others have theirs from optax."""
    return library.name in ("raw", "nnxlite")


@row("Adam step", leaves=training_leaves, costly=True)
def adam_step(library, size):
    return stepping(library, size, optax=not by_hand(library))


@row("Adam step, donated", leaves=training_leaves, costly=True)
def adam_step_donated(library, size):
    return stepping(library, size, donate=True, optax=not by_hand(library))


@row("Adam step, optax", leaves=training_leaves, largest=LARGEST_WITH_PEERS)
def adam_step_optax(library, size):
    return stepping(library, size, optax=True)


# Functions of States


@row("split", OBJECTS)
def split(library, size):
    return calling(library.nnx.split, library.model(blocks_of(size)))


@row("split and its leaves", OBJECTS)
def split_and_leaves(library, size):
    nnx, model = library.nnx, library.model(blocks_of(size))
    return Contender(lambda _: jax.tree.leaves(nnx.split(model)[1]))


@row("split, fresh model each call", OBJECTS)
def split_fresh_model(library, size):
    blocks = blocks_of(size)
    known, _ = library.nnx.split(library.model(blocks))

    def split_one(model: Any) -> None:
        graphdef, _ = library.nnx.split(model)
        assert graphdef == known  # and so `known` lives: what is cached on it stays

    return Contender(split_one, functools.partial(fresh_models, library, blocks))


@row("state(Param)", OBJECTS)
def state(library, size):
    nnx = library.nnx
    return calling(nnx.state, library.model(blocks_of(size)), nnx.Param)


@row("update", OBJECTS)
def update(library, size):
    nnx, blocks = library.nnx, blocks_of(size)
    return calling(nnx.update, library.model(blocks), nnx.state(library.model(blocks)))


@row("merge", OBJECTS)
def merge(library, size):
    nnx = library.nnx
    return calling(nnx.merge, *nnx.split(library.model(blocks_of(size))))


@row("clone", OBJECTS)
def clone(library, size):
    return awaiting(library.nnx.clone, library.model(blocks_of(size)))


@row("clone(share=True)", OBJECTS)
def clone_sharing(library, size):
    # flax has one clone; it is the yardstick of both rows.
    options = {} if library.name == "flax" else {"share": True}
    clone = functools.partial(library.nnx.clone, **options)
    return calling(clone, library.model(blocks_of(size)))


# Modules and States as arguments of plain JAX


def doubled(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf * 2, tree)


def as_state(library: Any, size: int) -> Any:
    """The State of a model; raw JAX and equinox have the arrays in their own container."""
    model = library.model(blocks_of(size))
    return library.nnx.state(model) if hasattr(library, "nnx") else model


@row("jax.jit(Module)")
def jit_module(library, size):
    return calling(jax.jit(lambda tree: None), library.model(blocks_of(size)))


@row("jax.jit(Module) -> Module", costly=True)
def jit_module_to_module(library, size):
    return awaiting(jax.jit(doubled), library.model(blocks_of(size)))


@row("jax.jit(State)", NNX)
def jit_state(library, size):
    return calling(jax.jit(lambda tree: None), as_state(library, size))


@row("jax.jit(State), three metadata", NNX)
def jit_state_with_metadata(library, size):
    state = as_state(library, size)
    if hasattr(library, "nnx"):
        is_variable = functools.partial(is_instance, library.nnx.Variable)
        for variable in jax.tree.leaves(state, is_leaf=is_variable):
            variable.set_metadata(role="weight", axis=1, decayed=True)
    return calling(jax.jit(lambda tree: None), state)


def is_instance(kind: type, value: Any) -> bool:
    return isinstance(value, kind)


@row("jax.jit(State) -> State", NNX, costly=True)
def jit_state_to_state(library, size):
    return awaiting(jax.jit(doubled), as_state(library, size))


@row("jax.jit(GraphDef, State)", NNX)
def jit_graphdef_state(library, size):
    jitted = jax.jit(lambda *args: None)
    model = library.model(blocks_of(size))
    args = library.nnx.split(model) if hasattr(library, "nnx") else (model,)
    return calling(jitted, *args)


@row("jax.jit(GraphDef, State) -> State", NNX, costly=True)
def jit_graphdef_state_to_state(library, size):
    jitted = jax.jit(lambda *args: doubled(args[-1]))
    model = library.model(blocks_of(size))
    args = library.nnx.split(model) if hasattr(library, "nnx") else (model,)
    return awaiting(jitted, *args)


@row("jitted adam over States", NNX, largest=LARGEST_WITH_PEERS)
def adam_over_states(library, size):
    trees = [as_state(library, size) for _ in range(4)]
    return awaiting(jax.jit(adam_of_trees), *trees)


def adam_of_trees(params, grads, mu, nu):
    mu = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, mu, grads)
    nu = jax.tree.map(lambda n, g: 0.999 * n + 0.001 * g * g, nu, grads)
    params = jax.tree.map(lambda p, m, n: p - 1e-3 * m / (jnp.sqrt(n) + 1e-8), params, mu, nu)
    return params, mu, nu


@row("jax.tree.map(State)", NNX)
def map_state(library, size):
    return calling(jax.tree.map, lambda leaf: leaf, as_state(library, size))


@row("jax.tree.map(Module)")
def map_module(library, size):
    return calling(jax.tree.map, lambda leaf: leaf, library.model(blocks_of(size)))


@row("jax.tree.leaves(Module)")
def leaves_module(library, size):
    return calling(jax.tree.leaves, library.model(blocks_of(size)))


@row("trace jax.jit(State)", NNX, burst=1)
def trace_state(library, size):
    state = as_state(library, size)
    return Contender(lambda _: jax.jit(lambda tree: tree).trace(state))


@row("trace jax.jit(Module)", burst=1)
def trace_module(library, size):
    model = library.model(blocks_of(size))
    return Contender(lambda _: jax.jit(lambda tree: tree).trace(model))


# The other transforms, called eagerly on an object that does not change


STEPS = 8


def product(library: Any) -> Callable:
    """One small operation on a model, `(model, x) -> x`: the rows are about what a call adds."""
    if library.name == "raw":
        return lambda model, x: x @ model[-2]
    return lambda model, x: x @ model.head.kernel[...]


def transforming(library: Any, size: int, raw: Callable, lifted: Callable) -> Contender:
    """Calls what `raw` or `lifted` makes of the operation, once: both are kept between calls."""
    x, _ = models.batch()
    make = raw if library.name == "raw" else functools.partial(lifted, library.nnx)
    return awaiting(make(product(library)), library.model(blocks_of(size)), x)


@row("eager vmap", ("raw", "nnxlite"), largest=LARGEST_WITH_PEERS)
def eager_vmap(library, size):
    return transforming(
        library,
        size,
        lambda f: jax.vmap(f, in_axes=(None, 0)),
        lambda nnx, f: nnx.vmap(f, in_axes=(None, 0)),
    )


@row("eager scan", ("raw", "nnxlite"), largest=LARGEST_WITH_PEERS)
def eager_scan(library, size):
    def raw(f):
        def body(carry, _):
            model, x = carry
            return (model, f(model, x)), None

        return lambda model, x: jax.lax.scan(body, (model, x), None, length=STEPS)[0][1]

    return transforming(
        library,
        size,
        raw,
        lambda nnx, f: nnx.scan(f, in_axes=(None, nnx.Carry), out_axes=nnx.Carry, length=STEPS),
    )


@row("eager remat", ("raw", "nnxlite"), largest=LARGEST_WITH_PEERS)
def eager_remat(library, size):
    return transforming(library, size, jax.checkpoint, lambda nnx, f: nnx.remat(f))


@row("eager cond", ("raw", "nnxlite"), largest=LARGEST_WITH_PEERS)
def eager_cond(library, size):
    yes = jnp.array(True)

    def choosing(cond: Callable, f: Callable) -> Callable:
        other = lambda model, x: x  # noqa: E731  # the same at each call
        return lambda model, x: cond(yes, f, other, model, x)

    return transforming(
        library,
        size,
        functools.partial(choosing, jax.lax.cond),
        lambda nnx, f: choosing(nnx.cond, f),
    )


@row("eager while_loop", ("raw", "nnxlite"), largest=LARGEST_WITH_PEERS)
def eager_while_loop(library, size):
    def looping(while_loop: Callable, f: Callable) -> Callable:
        def goes_on(value):
            return value[0] < STEPS

        def step(value):
            count, model, x = value
            return count + 1, model, f(model, x)

        start = jnp.int32(0)
        return lambda model, x: while_loop(goes_on, step, (start, model, x))[2]

    return transforming(
        library,
        size,
        functools.partial(looping, jax.lax.while_loop),
        lambda nnx, f: looping(nnx.while_loop, f),
    )


@row("eager fori_loop", ("raw", "nnxlite"), largest=LARGEST_WITH_PEERS)
def eager_fori_loop(library, size):
    def looping(fori_loop: Callable, f: Callable) -> Callable:
        def step(_, value):
            model, x = value
            return model, f(model, x)

        return lambda model, x: fori_loop(0, STEPS, step, (model, x))[1]

    return transforming(
        library,
        size,
        functools.partial(looping, jax.lax.fori_loop),
        lambda nnx, f: looping(nnx.fori_loop, f),
    )


# Rows of one size


@row("eager forward, 24 blocks", leaves=None, burst=1)
def eager_forward(library, size):
    x, _ = models.batch()
    model = library.model(DEEP_BLOCKS)
    called = library.module(model) if library.name == "raw" else model
    return Contender(lambda _: called(x).block_until_ready())


@row("lower forward, 24 blocks", leaves=None, burst=1)
def lower_forward(library, size):
    x, _ = models.batch()
    model = library.model(DEEP_BLOCKS)
    # A new function each time: nothing traced before may be found again.
    return Contender(
        lambda _: library.jit(lambda model, x: library.forward(model, x)).lower(model, x)
    )


@row("lower Adam step, 24 blocks", leaves=None, burst=1)
def lower_step(library, size):
    run = library.training(DEEP_BLOCKS, optax=not by_hand(library))
    args = (*run.carry, *models.batch())
    return Contender(lambda _: library.jit(lambda *args: run.function(*args)).lower(*args))


@row("import", leaves=None, burst=1)
def importing(library, size):
    return Contender(functools.partial(time_import, library.module_name), times_itself=True)


def time_import(module: str, _: Any = None) -> tuple[float, float]:
    """Wall and CPU seconds of one import in a new process, of modules compiled to bytecode."""
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    program = (
        "import time; wall, cpu = time.perf_counter(), time.process_time();"
        f"import {module};"
        "print(time.perf_counter() - wall, time.process_time() - cpu)"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, check=True, env=environment)
    wall, cpu = done.stdout.split()
    return float(wall), float(cpu)

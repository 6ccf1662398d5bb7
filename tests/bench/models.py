"""One small transformer, written once and given to each library.

`define` writes the model against four things a library supplies: its base class, how it holds a
parameter, how it reads one, and how it holds a list of submodules. So raw JAX, nnxlite, flax.nnx
and equinox run the same operations on the same numbers; what differs is who carries the arrays
across `jit`.

A block has 10 arrays in 8 submodules; a model of `b` blocks has `10 b + 2` arrays. They are tiny:
the benchmark is about what a library adds to a call, not about arithmetic.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 8
HIDDEN = 16
TOKENS = 4
LEAVES_PER_BLOCK = 10
LEAVES_OF_HEAD = 2


def define(base: type, hold: Callable, read: Callable, sequence: Callable) -> type:
    """The model class for one library.

    Args:
      base: The library's module class.
      hold: Wraps an array as a parameter.
      read: Takes the array out of a parameter.
      sequence: Makes a list of submodules from an iterable.
    """

    class Linear(base):
        kernel: Any
        bias: Any

        def __init__(self, arrays: Iterator):
            self.kernel = hold(next(arrays))
            self.bias = hold(next(arrays))

        def __call__(self, x):
            return x @ read(self.kernel) + read(self.bias)

    class Projection(base):
        kernel: Any

        def __init__(self, arrays: Iterator):
            self.kernel = hold(next(arrays))

        def __call__(self, x):
            return x @ read(self.kernel)

    class Norm(base):
        scale: Any
        bias: Any

        def __init__(self, arrays: Iterator):
            self.scale = hold(next(arrays))
            self.bias = hold(next(arrays))

        def __call__(self, x):
            centred = x - jnp.mean(x, axis=-1, keepdims=True)
            variance = jnp.mean(centred * centred, axis=-1, keepdims=True)
            return centred * jax.lax.rsqrt(variance + 1e-6) * read(self.scale) + read(self.bias)

    class Attention(base):
        qkv: Any
        out: Any

        def __init__(self, arrays: Iterator):
            self.qkv = Projection(arrays)
            self.out = Projection(arrays)

        def __call__(self, x):
            query, key, value = jnp.split(self.qkv(x), 3, axis=-1)  # each (tokens, width)
            weights = jax.nn.softmax(query @ key.T / WIDTH**0.5)
            return self.out(weights @ value)

    class Mlp(base):
        up: Any
        down: Any

        def __init__(self, arrays: Iterator):
            self.up = Linear(arrays)
            self.down = Linear(arrays)

        def __call__(self, x):
            return self.down(jnp.tanh(self.up(x)))

    class Block(base):
        norm1: Any
        attn: Any
        norm2: Any
        mlp: Any

        def __init__(self, arrays: Iterator):
            self.norm1 = Norm(arrays)
            self.attn = Attention(arrays)
            self.norm2 = Norm(arrays)
            self.mlp = Mlp(arrays)

        def __call__(self, x):
            # No residual sums: XLA's CPU backend fuses the whole chain of them into every reader,
            # so the training step of 23 blocks would compile for 36 s instead of 7.
            return self.mlp(self.norm2(self.attn(self.norm1(x))))

    class Model(base):
        blocks: Any
        head: Any

        def __init__(self, blocks: int, arrays: Iterator):
            self.blocks = sequence(Block(arrays) for _ in range(blocks))
            self.head = Linear(arrays)

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    return Model


def shapes(blocks: int) -> list[tuple[int, ...]]:
    """Shapes of the model's arrays, in the order in which `Model` takes them."""
    norm = [(WIDTH,), (WIDTH,)]
    attention = [(WIDTH, 3 * WIDTH), (WIDTH, WIDTH)]
    mlp = [(WIDTH, HIDDEN), (HIDDEN,), (HIDDEN, WIDTH), (WIDTH,)]
    head = [(WIDTH, WIDTH), (WIDTH,)]
    return (norm + attention + norm + mlp) * blocks + head


@functools.cache
def initial_arrays(blocks: int) -> tuple[jax.Array, ...]:
    """The same starting numbers for every library."""
    random = np.random.default_rng(0)
    return tuple(
        jnp.asarray(0.1 * random.standard_normal(shape), jnp.float32) for shape in shapes(blocks)
    )


def own_arrays(blocks: int) -> list[jax.Array]:
    """Copies of `initial_arrays`, for a caller that donates them."""
    return [jnp.copy(array) for array in initial_arrays(blocks)]


def scalars(count: int) -> list[jax.Array]:
    return [jnp.full((), i, jnp.float32) for i in range(count)]


def batch() -> tuple[jax.Array, jax.Array]:
    """An input and a target, each `(TOKENS, WIDTH)`."""
    random = np.random.default_rng(1)
    shape = (TOKENS, WIDTH)
    x, y = (jnp.asarray(random.standard_normal(shape), jnp.float32) for _ in range(2))
    return x, y


def mean_square(model: Callable, x: jax.Array, y: jax.Array) -> jax.Array:
    error = model(x) - y
    return jnp.mean(error * error)


def adam(params, grads, mu, nu, count, rate=1e-3, b1=0.9, b2=0.999, eps=1e-8):
    """One Adam update over lists of arrays, as a user would write it without a library."""
    count = count + 1
    time = count.astype(jnp.float32)
    debias1, debias2 = 1 - b1**time, 1 - b2**time
    mu = [b1 * m + (1 - b1) * g for m, g in zip(mu, grads, strict=True)]
    nu = [b2 * n + (1 - b2) * g * g for n, g in zip(nu, grads, strict=True)]
    params = [
        p - rate * (m / debias1) / (jnp.sqrt(n / debias2) + eps)
        for p, m, n in zip(params, mu, nu, strict=True)
    ]
    return params, mu, nu, count


@dataclasses.dataclass
class Training:
    """A training step and what it carries.

    Attributes:
      function: `function(*carry, x, y)` as the user wrote it. It returns the loss if the library
        changes objects in place, else `(loss, carry)`.
      step: The same under the library's `jit`.
      carry: Arguments of the next step.
      in_place: Whether the step changes `carry` itself.
    """

    function: Callable
    step: Callable
    carry: tuple
    in_place: bool

    def advance(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Takes one step and returns its loss."""
        if self.in_place:
            return self.step(*self.carry, x, y)
        loss, self.carry = self.step(*self.carry, x, y)
        return loss


class Raw:
    """Hand-written JAX: a flat list of arrays, rebuilt into the model inside the trace."""

    name = "raw"
    module_name = distribution = "jax"

    def __init__(self):
        self.Model = define(object, lambda x: x, lambda x: x, list)

    def model(self, blocks: int, arrays=None) -> list[jax.Array]:
        return list(arrays or own_arrays(blocks))

    def module(self, model: list[jax.Array]) -> Any:
        blocks = (len(model) - LEAVES_OF_HEAD) // LEAVES_PER_BLOCK
        return self.Model(blocks, iter(model))

    def forward(self, model: list[jax.Array], x: jax.Array) -> jax.Array:
        return self.module(model)(x)

    def jit(self, function: Callable, **options) -> Any:
        return jax.jit(function, **options)

    def training(self, blocks: int, donate: bool = False, optax: bool = False) -> Training:
        params = self.model(blocks)
        if optax:
            return self._training_with_optax(params, donate)

        def step(params, mu, nu, count, x, y):
            loss, grads = jax.value_and_grad(lambda p: mean_square(self.module(p), x, y))(params)
            return loss, adam(params, grads, mu, nu, count)

        zeros = [[jnp.zeros_like(p) for p in params] for _ in range(2)]
        carry = (params, *zeros, jnp.zeros((), jnp.int32))
        jitted = jax.jit(step, donate_argnums=(0, 1, 2, 3) if donate else ())
        return Training(step, jitted, carry, in_place=False)

    def _training_with_optax(self, params: list[jax.Array], donate: bool) -> Training:
        import optax

        tx = optax.adam(1e-3)

        def step(params, opt_state, x, y):
            loss, grads = jax.value_and_grad(lambda p: mean_square(self.module(p), x, y))(params)
            updates, opt_state = tx.update(grads, opt_state, params)
            return loss, (optax.apply_updates(params, updates), opt_state)

        carry = (params, tx.init(params))
        jitted = jax.jit(step, donate_argnums=(0, 1) if donate else ())
        return Training(step, jitted, carry, in_place=False)


class Nnx:
    """nnxlite or flax.nnx: they share an API, so one adapter serves both."""

    def __init__(self, name: str, module_name: str):
        self.name = name
        self.distribution = name
        self.module_name = module_name
        self.nnx = nnx = importlib.import_module(module_name)
        self.Model = define(nnx.Module, nnx.Param, lambda v: v[...], nnx.List)
        self.Adam = _define_adam(nnx)

    def model(self, blocks: int, arrays=None):
        return self.Model(blocks, iter(arrays or own_arrays(blocks)))

    def forward(self, model, x: jax.Array) -> jax.Array:
        return model(x)

    def jit(self, function: Callable, **options) -> Any:
        return self.nnx.jit(function, **options)

    def training(self, blocks: int, donate: bool = False, optax: bool = False) -> Training:
        nnx, model = self.nnx, self.model(blocks)

        def step(model, optimizer, x, y):
            loss, grads = nnx.value_and_grad(mean_square)(model, x, y)
            optimizer.update(model, grads)
            return loss

        if optax:
            import optax as library

            optimizer = nnx.Optimizer(model, library.adam(1e-3), wrt=nnx.Param)
        else:
            optimizer = self.Adam(model)
        options = {"donate_argnums": (0, 1)} if donate else {}
        return Training(step, nnx.jit(step, **options), (model, optimizer), in_place=True)


def _define_adam(nnx: Any) -> type:
    class Adam(nnx.Module):
        """`adam` as an object: two moments per parameter and a count."""

        def __init__(self, model):
            params = jax.tree.leaves(nnx.state(model, nnx.Param))
            self.count = nnx.Variable(jnp.zeros((), jnp.int32))
            self.mu = nnx.List([nnx.Variable(jnp.zeros_like(p)) for p in params])
            self.nu = nnx.List([nnx.Variable(jnp.zeros_like(p)) for p in params])

        def update(self, model, grads):
            params, treedef = jax.tree.flatten(nnx.state(model, nnx.Param))
            mu, nu = ([v[...] for v in moments] for moments in (self.mu, self.nu))
            grads = jax.tree.leaves(grads)
            params, mu, nu, count = adam(params, grads, mu, nu, self.count[...])
            nnx.update(model, jax.tree.unflatten(treedef, params))
            moments = itertools.chain(self.mu, self.nu)
            for variable, value in zip(moments, mu + nu, strict=True):
                variable[...] = value
            self.count[...] = count

    return Adam


class Equinox:
    """equinox: modules are immutable pytrees; a step returns new ones."""

    name = module_name = distribution = "equinox"

    def __init__(self):
        import equinox

        self.eqx = equinox
        self.Model = define(equinox.Module, lambda x: x, lambda x: x, list)

    def model(self, blocks: int, arrays=None):
        return self.Model(blocks, iter(arrays or own_arrays(blocks)))

    def forward(self, model, x: jax.Array) -> jax.Array:
        return model(x)

    def jit(self, function: Callable, **options) -> Any:
        return self.eqx.filter_jit(function, **options)

    def training(self, blocks: int, donate: bool = False, optax: bool = True) -> Training:
        import optax as library

        eqx, model, tx = self.eqx, self.model(blocks), library.adam(1e-3)

        def step(model, opt_state, x, y):
            loss, grads = eqx.filter_value_and_grad(mean_square)(model, x, y)
            updates, opt_state = tx.update(grads, opt_state, model)
            return loss, (eqx.apply_updates(model, updates), opt_state)

        carry = (model, tx.init(eqx.filter(model, eqx.is_array)))
        if not donate:
            return Training(step, eqx.filter_jit(step), carry, in_place=False)
        # The data must come first: `donate` names no other way to keep it.
        donated = eqx.filter_jit(
            lambda data, *carry: step(*carry, *data), donate="all-except-first"
        )
        return Training(step, lambda *args: donated(args[2:], *args[:2]), carry, in_place=False)


LIBRARIES: dict[str, Callable[[], Any]] = {
    "raw": Raw,
    "nnxlite": lambda: Nnx("nnxlite", "nnxlite"),
    "flax": lambda: Nnx("flax", "flax.nnx"),
    "equinox": Equinox,
}
"""Makers of the adapters, by column name."""


def check_agreement(libraries: dict[str, Any], blocks: int = 2, steps: int = 3) -> None:
    """Raises unless all libraries compute the same outputs and the same training losses."""
    x, y = batch()
    numbers = {}
    for name, library in libraries.items():
        output = library.jit(library.forward)(library.model(blocks), x)
        run = library.training(blocks)
        numbers[name] = [*output.ravel(), *(run.advance(x, y) for _ in range(steps))]
    first, *others = numbers
    for name in others:
        if not np.allclose(numbers[name], numbers[first], rtol=1e-5):
            raise AssertionError(
                f"{name} computes {numbers[name]}, {first} computes {numbers[first]}: "
                "their times cannot be compared."
            )

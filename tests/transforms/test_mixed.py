"""Plain JAX around and inside of the library's transforms; the oracle is plain JAX on arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite.errors import TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import Function, counted

W = jnp.array([[1.0, -2.0], [0.5, 3.0]], jnp.float32)
X = jnp.array([[1.0, 2.0], [-1.0, 0.5], [3.0, 0.0]], jnp.float32)


def formula(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w) * x


class Gate(nnx.Module):
    """Computes `formula`, by a child."""

    def __init__(self) -> None:
        self.child = [nnx.Param(W)]

    def __call__(self, x: jax.Array) -> jax.Array:
        return formula(self.child[0][...], x)

    @nnx.jit
    def jitted(self, x: jax.Array) -> jax.Array:
        return self(x)


class Counting(Gate):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Gate()
        self.inner.calls = nnx.Variable(jnp.int32(0))  # type: ignore[attr-defined]

    def __call__(self, x: jax.Array) -> jax.Array:
        self.inner.calls[...] += 1  # type: ignore[attr-defined]
        return super().__call__(x)


# Each runs a function of one row on X by a transform of JAX.

ROW, TWICE = X[0], jnp.int32(2)
PLAIN: dict[str, Callable[[Function], Any]] = {
    "jit": lambda f: jax.jit(f)(ROW),
    "vmap": lambda f: jax.vmap(f)(X),
    "grad": lambda f: jax.grad(lambda x: f(x).sum())(ROW),
    "jvp": lambda f: jax.jvp(f, (ROW,), (ROW,)),
    "vjp": lambda f: jax.vjp(f, ROW)[1](ROW)[0],
    "jacfwd": lambda f: jax.jacfwd(f)(ROW),
    "jacrev": lambda f: jax.jacrev(f)(ROW),
    "hessian": lambda f: jax.hessian(lambda x: f(x).sum())(ROW),
    "checkpoint": lambda f: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(ROW),
    "lax.map": lambda f: jax.lax.map(f, X),
    "lax.scan": lambda f: jax.lax.scan(lambda c, x: (f(c) + x, f(x)), ROW, X),
    "lax.cond": lambda f: jax.lax.cond(ROW[0] > 0, f, lambda x: x, ROW),
    "lax.switch": lambda f: jax.lax.switch(TWICE, [jnp.cos, jnp.sin, f], ROW),
    "lax.while_loop": lambda f: jax.lax.while_loop(
        lambda v: v[0] < TWICE, lambda v: (v[0] + 1, f(v[1])), (jnp.int32(0), ROW)
    ),
    "lax.fori_loop": lambda f: jax.lax.fori_loop(0, 2, lambda _, x: f(x), ROW),
    "eval_shape": lambda f: jax.tree.map(lambda s: jnp.zeros(s.shape), jax.eval_shape(f, ROW)),
}

# Each calls a model on a row by a transform of the library.
LIFTED: dict[str, Callable[[Gate], Function]] = {
    "call": lambda m: m,
    "nnx.jit": lambda m: nnx.jit(m),
    "jitted method": lambda m: m.jitted,
    "nnx.remat": lambda m: nnx.remat(m),
    "nnx.cond": lambda m: lambda x: nnx.cond(x.sum() > -99, m, lambda x: x, x),
    "nnx.fori_loop": lambda m: (
        lambda x: nnx.fori_loop(0, 1, lambda _, v: (v[0], v[0](v[1])), (m, x))[1]
    ),
    "nnx.scan": lambda m: (
        lambda x: nnx.scan(lambda m, x: m(x), in_axes=(None, 0), out_axes=0)(m, x[None])[0]
    ),
    "nnx.vmap": lambda m: lambda x: nnx.vmap(lambda m, x: m(x), in_axes=(None, 0))(m, x[None])[0],
    "nnx.grad": lambda m: lambda x: nnx.grad(_half_of_square_of_shift)(jnp.zeros(2), m, x),
    "merged": lambda m: lambda x: nnx.merge(*nnx.split(m))(x),
}


def _half_of_square_of_shift(shift: jax.Array, model: Gate, x: jax.Array) -> jax.Array:
    """A loss whose gradient with respect to a shift of zero is `model(x)`."""
    return ((shift + model(x)) ** 2).sum() / 2


PAIRS = [
    *((name, "nnx.jit") for name in PLAIN if name not in ("jacrev", "hessian")),
    ("jacrev", "merged"),
    *((name, "call") for name in ("vmap", "grad", "lax.scan", "jacfwd", "lax.cond")),
    *(("vmap", inner) for inner in LIFTED if inner not in ("call", "nnx.jit")),
    *(("grad", inner) for inner in ("nnx.remat", "nnx.cond", "nnx.fori_loop", "nnx.scan")),
    *(("lax.scan", inner) for inner in ("nnx.vmap", "nnx.grad", "nnx.cond", "jitted method")),
    *(("lax.while_loop", inner) for inner in ("nnx.fori_loop", "nnx.scan")),
]


def compare(found: Any, expected: Any) -> None:
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("outer", "inner"), PAIRS)
def test_a_closed_over_model_is_read_under_plain_jax(outer: str, inner: str) -> None:
    model = Gate()
    found = PLAIN[outer](LIFTED[inner](model))
    compare(found, PLAIN[outer](functools.partial(formula, W)))
    assert_isomorphic(Gate(), model)


@pytest.mark.parametrize("inner", PLAIN)
def test_plain_jax_runs_inside_of_jit(inner: str) -> None:
    found = nnx.jit(lambda model: PLAIN[inner](model))(Gate())
    compare(found, PLAIN[inner](functools.partial(formula, W)))


@pytest.mark.parametrize("inner", ["vmap", "checkpoint", "jacrev", "lax.scan", "lax.cond"])
def test_plain_jax_runs_inside_of_grad(inner: str) -> None:
    def loss(call: Function) -> jax.Array:
        return sum((jnp.sum(leaf) for leaf in jax.tree.leaves(PLAIN[inner](call))), jnp.float32(0))

    grads = jax.jit(lambda model: nnx.grad(loss)(model))(Gate())
    wanted = jax.jit(jax.grad(lambda w: loss(functools.partial(formula, w))))(W)
    compare(grads["child"][0][...], wanted)


AROUND: dict[str, Callable[[Function], Function]] = {
    "nnx.scan": lambda f: (
        lambda m: nnx.scan(lambda m, _: (m, f(m)), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))(
            m, jnp.arange(2)
        )[1]
    ),
    "nnx.vmap": lambda f: (
        lambda m: nnx.vmap(lambda m, _: f(m), in_axes=(None, 0), out_axes=0)(m, jnp.arange(2))
    ),
    "nnx.remat": nnx.remat,
    "nnx.cond": lambda f: lambda m: nnx.cond(jnp.array(True), f, lambda m: 0 * f(m), m),
}


@pytest.mark.parametrize("outer", AROUND)
@pytest.mark.parametrize("inner", ["vmap", "lax.scan", "jacfwd"])
def test_plain_jax_runs_inside_of_mapped_and_looped_functions(outer: str, inner: str) -> None:
    run = AROUND[outer](lambda model: jax.tree.leaves(PLAIN[inner](model))[-1])
    expected = jax.tree.leaves(PLAIN[inner](functools.partial(formula, W)))[-1]
    found = run(Gate())
    compare(found, np.broadcast_to(expected, found.shape))


# Models as arguments of plain JAX: they are values there.


def test_a_model_is_an_argument_of_plain_transforms() -> None:
    model = Gate()
    call = lambda model, x: model(x)  # noqa: E731
    plain = lambda w, x: formula(w, x)  # noqa: E731
    for transform in (jax.jit, jax.checkpoint, lambda f: jax.vmap(f, in_axes=(None, 0))):
        compare(transform(call)(model, X), transform(plain)(W, X))
    grads = jax.grad(lambda model: model(X).sum())(model)
    assert isinstance(grads, Gate)
    compare(grads.child[0][...], jax.grad(lambda w: formula(w, X).sum())(W))
    compare(jax.tree.leaves(jax.jacrev(call)(model, ROW)), jax.jacrev(plain)(W, ROW))
    many = jax.vmap(lambda scale: jax.tree.map(lambda w: w * scale, model))(jnp.arange(3.0))
    compare(jax.vmap(call)(many, X), jax.vmap(lambda s, x: formula(s * W, x))(jnp.arange(3.0), X))


def test_a_model_is_the_carry_of_lax_loops() -> None:
    model = Counting()

    def step(model: Any, x: jax.Array) -> Any:
        y = model(x)
        return model, y

    carried, ys = jax.lax.scan(step, model, X)
    compare(ys, formula(W, X))
    assert int(carried.inner.calls[...]) == 3 and int(model.inner.calls[...]) == 0
    looped = jax.lax.fori_loop(0, 4, lambda i, model: step(model, ROW)[0], carried)
    assert int(looped.inner.calls[...]) == 7
    asked = jax.lax.while_loop(
        lambda model: model.inner.calls < 9, lambda model: step(model, ROW)[0], looped
    )
    assert int(asked.inner.calls[...]) == 9
    branched = jax.lax.cond(asked.inner.calls > 5, lambda m: step(m, ROW)[0], lambda m: m, asked)
    assert int(branched.inner.calls[...]) == 10


def test_a_model_that_plain_jax_made_is_changed_by_lifted_functions() -> None:
    @jax.jit
    def run(model: Any, x: jax.Array) -> Any:
        y = nnx.jit(lambda model, x: model(x))(model, x)
        nnx.fori_loop(0, 2, lambda i, model: (model(x), model)[1], model)
        nnx.cond(x.sum() > 0, lambda model: model(x), lambda model: x, model)
        return model, y

    out, y = run(Counting(), ROW)
    assert int(out.inner.calls[...]) == 4
    compare(y, formula(W, ROW))


def test_one_jitted_method_serves_plain_vmap_without_tracing_again() -> None:
    run, traces = counted(lambda model, x: model(x))

    class Encoder(Gate):
        encode = nnx.jit(run)

    model = Encoder()
    for _ in range(3):
        compare(jax.vmap(model.encode)(X), formula(W, X))
    assert len(traces) == 1
    compare(jax.jit(jax.vmap(model.encode))(X), formula(W, X))


# Writes.

WRITES = ("vmap", "grad", "jvp", "jacfwd", "hessian", "checkpoint", "lax.map", "lax.scan", "jit")
LIFTED_WRITES = {
    "nnx.jit": lambda m: lambda x: nnx.jit(lambda m, x: m(x))(m, x),
    "nnx.remat": lambda m: lambda x: nnx.remat(lambda m, x: m(x))(m, x),
    "nnx.cond": lambda m: lambda x: nnx.cond(x.sum() > 0, lambda m, x: m(x), lambda m, x: x, m, x),
    "nnx.fori_loop": lambda m: (
        lambda x: nnx.fori_loop(0, 1, lambda _, v: (v[0], v[0](v[1])), (m, x))[1]
    ),
    "nnx.while_loop": lambda m: (
        lambda x: nnx.while_loop(
            lambda v: v[2] < 1, lambda v: (v[0], v[0](v[1]), v[2] + 1), (m, x, 0)
        )[1]
    ),
}


@pytest.mark.parametrize("outer", WRITES)
def test_a_write_to_a_model_of_another_level_is_an_error(outer: str) -> None:
    model = Counting()
    with pytest.raises(TraceLevelError, match=r"Cannot set the value of Variable.*another trace"):
        PLAIN[outer](lambda x: model(x))
    assert_isomorphic(Counting(), model)


@pytest.mark.parametrize("inner", LIFTED_WRITES)
@pytest.mark.parametrize("outer", ["vmap", "grad", "lax.scan"])
def test_a_lifted_write_to_a_model_of_another_level_names_its_path(outer: str, inner: str) -> None:
    model = Counting()
    with pytest.raises(TraceLevelError, match=r"\.inner\.calls \(Variable\), which was created at"):
        PLAIN[outer](LIFTED_WRITES[inner](model))
    assert_isomorphic(Counting(), model)


@pytest.mark.parametrize("outer", ["nnx.jit", "nnx.grad", "nnx.cond", "nnx.fori_loop"])
def test_a_write_to_a_closed_over_model_names_its_path(outer: str) -> None:
    model = Counting()
    runs: dict[str, Callable[[], Any]] = {
        "nnx.jit": lambda: nnx.jit(lambda x: model(x))(ROW),
        "nnx.grad": lambda: nnx.grad(lambda x: model(x).sum())(ROW),
        "nnx.cond": lambda: nnx.cond(ROW[0] > 0, lambda x: model(x), lambda x: x, ROW),
        "nnx.fori_loop": lambda: nnx.fori_loop(0, 2, lambda i, x: model(x), ROW),
    }
    with pytest.raises(TraceLevelError, match=rf"{outer}\(.*closes over model\.inner\.calls\."):
        runs[outer]()
    assert_isomorphic(Counting(), model)


# Functional training: merge inside of plain gradients.


class Net(nnx.Module):
    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(2, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.dropout(self.norm(self.linear(x)))


def loss_of(net: Net, x: jax.Array) -> jax.Array:
    return (net(x) ** 2).mean()


def test_merge_inside_grad_with_batch_norm_and_dropout() -> None:
    graphdef, params, rest = nnx.split(Net(), nnx.Param, ...)

    def loss(params: Any, rest: Any) -> Any:
        net = nnx.merge(graphdef, params, rest)
        return loss_of(net, X), nnx.state(net, nnx.Not(nnx.Param))

    grads, rest = jax.jit(jax.grad(loss, has_aux=True))(params, rest)

    net = Net()
    compare(grads, nnx.jit(nnx.grad(loss_of))(net, X))
    compare(rest["norm"], nnx.state(net.norm, nnx.BatchStat))
    assert int(rest["dropout"]["rngs"]["count"][...]) == int(net.dropout.rngs.count[...])


def test_per_example_gradients_by_vmap_of_grad_of_merge() -> None:
    model = Gate()
    graphdef, params = nnx.split(model)
    grads = jax.vmap(jax.grad(lambda p, x: nnx.merge(graphdef, p)(x).sum()), in_axes=(None, 0))(
        params, X
    )
    plain = jax.vmap(jax.grad(lambda w, x: formula(w, x).sum()), in_axes=(None, 0))(W, X)
    compare(grads["child"][0][...], plain)


def test_derivatives_by_a_state_agree_with_those_by_its_arrays() -> None:
    graphdef, params = nnx.split(Gate())
    run = lambda p: nnx.merge(graphdef, p)(ROW)  # noqa: E731
    plain = lambda w: formula(w, ROW)  # noqa: E731
    for derivative in (jax.jacfwd, jax.jacrev):
        compare(derivative(run)(params), derivative(plain)(W))
    compare(jax.hessian(lambda p: run(p).sum())(params), jax.hessian(lambda w: plain(w).sum())(W))


@pytest.mark.standard_promotion
def test_a_training_loop_of_plain_scan_is_that_of_lifted_steps() -> None:
    xs = jnp.stack([X, 2 * X, -X])
    tx = optax.sgd(0.1)
    graphdef, params, rest = nnx.split(Net(), nnx.Param, ...)

    def step(carry: Any, x: jax.Array) -> Any:
        params, opt_state, rest = carry

        def loss(params: Any) -> Any:
            net = nnx.merge(graphdef, params, rest)
            return loss_of(net, x), nnx.state(net, nnx.Not(nnx.Param))

        (value, rest), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, rest), value

    (params, _, rest), losses = jax.lax.scan(step, (params, tx.init(params), rest), xs)

    net = Net()
    optimizer = nnx.Optimizer(net, tx, wrt=nnx.Param)

    @nnx.scan
    def lifted(both: Any, x: jax.Array) -> Any:
        value, grads = nnx.value_and_grad(loss_of)(both[0], x)
        both[1].update(both[0], grads)
        return both, value

    _, expected = lifted((net, optimizer), xs)
    compare(losses, expected)
    compare(params, nnx.state(net, nnx.Param))
    compare(rest["norm"], nnx.state(net.norm, nnx.BatchStat))

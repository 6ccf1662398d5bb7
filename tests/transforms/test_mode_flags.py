"""Flags of flax that choose a mode: transforms take them, or refuse False with the way out."""

import functools
import inspect

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.objects import Net

X = jnp.arange(3.0)


def counter():
    return Net(n=nnx.Variable(jnp.float32(0)))


def count(net, x):
    net.n[...] += 1
    return x * 2


def carried(net):
    net.n[...] += 1
    return net


# What to do with a counter: takes the flags, and counts once.
PROGRAMS = {
    "jit": lambda net, **flags: nnx.jit(count, **flags)(net, X),
    "remat": lambda net, **flags: nnx.remat(**flags)(count)(net, X),
    "cond": lambda net, **flags: nnx.cond(True, count, count, net, X, **flags),
    "switch": lambda net, **flags: nnx.switch(1, [count, count], net, X, **flags),
    "fori_loop": lambda net, **flags: nnx.fori_loop(
        0, 1, lambda _, net: carried(net), net, **flags
    ),
    "while_loop": lambda net, **flags: nnx.while_loop(
        lambda net: net.n[...] < 1, carried, net, **flags
    ),
    "scan": lambda net, **flags: nnx.scan(lambda net, x: (carried(net), x), **flags)(net, X[:1]),
    "checkify": lambda net, **flags: nnx.checkify(count, **flags)(net, X),
    "value_and_grad": lambda net, **flags: nnx.value_and_grad(
        lambda net, x: count(net, x).sum(), argnums=1, **flags
    )(net, X),
    "grad": lambda net, **flags: nnx.grad(**flags)(lambda x: x.sum())(X) is None or count(net, X),
    "vjp": lambda net, **flags: nnx.vjp(count, net, X, **flags),
    "jvp": lambda net, **flags: nnx.jvp(
        functools.partial(count, net), (X,), (jnp.ones_like(X),), **flags
    ),
    "vmap": lambda net, **flags: nnx.vmap(lambda x: x, **flags)(X) is None or count(net, X),
    "eval_shape": lambda net, **flags: nnx.eval_shape(count, net, X, **flags) and count(net, X),
    "make_jaxpr": lambda net, **flags: nnx.make_jaxpr(count, **flags)(net, X) and count(net, X),
}
REFUSING = ["jit", "grad", "value_and_grad"]


@pytest.mark.parametrize("name", PROGRAMS)
def test_true_is_taken_and_changes_nothing(name):
    net = counter()
    PROGRAMS[name](net, graph=True, graph_updates=True)
    assert float(net.n[...]) == 1.0


@pytest.mark.parametrize("name", sorted({*PROGRAMS} - {*REFUSING}))
def test_false_is_taken_where_results_are_the_same(name):
    net = counter()
    PROGRAMS[name](net, graph=False, graph_updates=False)
    assert float(net.n[...]) == 1.0


@pytest.mark.parametrize("flag", ["graph", "graph_updates"])
@pytest.mark.parametrize("name", REFUSING)
def test_false_is_refused_where_it_would_matter(name, flag):
    with pytest.raises(TypeError, match=rf"nnx\.{name} has one mode and no {flag}=False"):
        PROGRAMS[name](counter(), **{flag: False})


@pytest.mark.parametrize("name", PROGRAMS)
def test_signatures_stay_clean(name):
    assert not {"graph", "graph_updates"} & set(inspect.signature(getattr(nnx, name)).parameters)


def test_decorators_take_the_flags():
    class Step(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.float32(0))

        @nnx.jit(graph=True, graph_updates=True)
        def step(self, x):
            return count(self, x)

    net = Step()
    assert net.step(X).shape == (3,)
    assert float(net.n[...]) == 1.0

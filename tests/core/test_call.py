"""Calling an object that is split."""

import jax
import jax.numpy as jnp

import nnxlite as nnx
from tests.objects import Net, param


class Counter(Net):
    def __call__(self, by):
        self.n[...] += by
        return self.n[...]

    def twice(self, by, *, scale=1):
        return self(by) * scale, self(by) * scale


def parts():
    n = nnx.Variable(jnp.int32(0))
    return nnx.split(Net(layers=[Counter(n=n)], heads={"a": Counter(n=n)}, w=param(1)))


def test_call_reaches_attributes_and_items():
    out, (graphdef, state) = nnx.call(parts()).layers[0](jnp.int32(2))
    assert int(out) == 2
    assert graphdef is parts()[0]
    out, (_, state) = nnx.call((graphdef, state)).heads["a"].twice(jnp.int32(1), scale=10)
    assert [int(x) for x in out] == [30, 40]
    assert int(state["heads"]["a"]["n"][...]) == 4


def test_given_state_stays_as_it_is():
    graphdef, state = parts()
    graphdef.apply(state).layers[0](jnp.int32(1))
    assert int(state["heads"]["a"]["n"][...]) == 0


def test_call_is_a_pure_function_for_jax():
    graphdef, params, rest = nnx.split(nnx.merge(*parts()), nnx.Param, ...)

    @jax.jit
    def step(params, rest):
        out, (_, state) = graphdef.apply(params, rest).layers[0](jnp.int32(3))
        return out, state

    out, state = step(params, rest)
    assert int(out) == int(state["heads"]["a"]["n"][...]) == 3

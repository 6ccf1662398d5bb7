"""nnx.custom_jvp: tangents in and out. What it shares with custom_vjp: test_rules."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError
from tests.isomorphism import assert_isomorphic

f32 = jnp.float32
one, two, three = f32(1), f32(2), f32(3)


class Pair(nnx.Module):
    """Two parameters, a statistic and a counter."""

    def __init__(self, a=2.0, b=3.0):
        self.a, self.b = nnx.Param(f32(a)), nnx.Param(f32(b))
        self.seen = nnx.BatchStat(f32(0))
        self.n = nnx.Variable(jnp.int32(0))


def product(m, x):
    m.n[...] += jnp.int32(1)
    m.seen[...] = x
    return m.a[...] * x


def with_rule(tangent, fn=product, **options):
    """`fn` with the tangent that `tangent(primals, tangents)` gives."""
    f = nnx.custom_jvp(fn, **options)
    f.defjvp(lambda primals, tangents: (fn(*primals), tangent(primals, tangents)))
    return f


def ten_times(primals, tangents):
    (m, x), (dm, dx) = primals, tangents
    return 10 * (dm["a"][...] * x + m.a[...] * dx)


# Against a hand-split jax.custom_jvp.


class Net(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(n)) for n in range(2)]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def by_hand(net, x):
    graphdef, params = nnx.split(net)
    apply = lambda params, x: nnx.merge(graphdef, params)(x)  # noqa: E731
    f = jax.custom_jvp(apply)

    @f.defjvp
    def rule(primals, tangents):
        y, dy = jax.jvp(apply, primals, tangents)
        return y, 10 * dy

    loss = lambda params, x: (f(params, x) ** 2).sum()  # noqa: E731
    ones = jax.tree.map(jnp.ones_like, (params, x))
    return jax.grad(loss, argnums=(0, 1))(params, x), jax.jvp(loss, (params, x), ones)


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit, nnx.remat], ids=["plain", "jit", "remat"])
def test_both_modes_are_those_of_a_hand_split_function(around):
    @nnx.custom_jvp
    def f(net, x):
        return net(x)

    @f.defjvp
    def rule(primals, tangents):
        (net, x), (dnet, dx) = primals, tangents
        graphdef, params = nnx.split(net)
        apply = lambda params, x: nnx.merge(graphdef, params)(x)  # noqa: E731
        y, dy = jax.jvp(apply, (params, x), (dnet, dx))
        return y, 10 * dy

    net, x = Net(), jnp.array([[0.5, -1.0]], f32)
    loss = around(lambda net, x: (f(net, x) ** 2).sum())
    found = nnx.grad(loss, argnums=(0, 1))(net, x)
    (expected, expected_jvp) = by_hand(net, x)
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert np.allclose(a, b, rtol=1e-5)
    graphdef, params = nnx.split(net)
    ones = jax.tree.map(jnp.ones_like, (params, x))
    forward = jax.jvp(lambda p, x: loss(nnx.merge(graphdef, p), x), (params, x), ones)
    assert np.allclose(forward, expected_jvp, rtol=1e-5)


def test_second_derivative_goes_through_the_rule():
    f = nnx.custom_jvp(lambda x: x**3)
    f.defjvp(lambda p, t: (f(*p), 2 * 3 * p[0] ** 2 * t[0]))
    for second in (nnx.grad(nnx.grad(f)), jax.jacfwd(jax.grad(f)), jax.jacfwd(jax.jacfwd(f))):
        assert float(second(two)) == 24


def test_forward_mode_over_objects():
    m = Pair()
    along = nnx.State({"a": nnx.Param(one)})
    value, change = nnx.jvp(with_rule(ten_times), (m, three), (along, one))
    assert (float(value), float(change)) == (6, 10 * (3 + 2))
    assert (int(m.n[...]), float(m.seen[...])) == (1, 3)


# Tangents that the rule gets.


def test_tangents_are_states_of_float_leaves():
    seen = []

    def tangent(primals, tangents):
        dm, _ = tangents
        seen.append((type(dm), list(dm), type(dm["a"]), dm["seen"].shape))
        return ten_times(primals, tangents)

    m = Pair()
    m.rngs = nnx.Rngs(0)
    assert float(nnx.grad(with_rule(tangent))(m, three)["a"][...]) == 30
    assert seen == [(nnx.State, ["a", "b", "seen"], nnx.Param, ())]


def test_shared_variable_moves_in_both_arguments():
    f = nnx.custom_jvp(lambda m, k: m.a[...] * k.a[...])
    f.defjvp(
        lambda p, t: (
            f(*p),
            t[0]["a"][...] * p[1].a[...] + 10 * t[1]["a"][...] * p[0].a[...],
        )
    )
    m, k = Pair(2.0), Pair(5.0)
    k.a = m.a
    for around in (lambda f: f, nnx.jit):
        assert float(nnx.grad(around(lambda m, k: f(m, k)))(m, k)["a"][...]) == 22
        assert float(nnx.grad(around(lambda m: f(m, m)))(m)["a"][...]) == 22


def test_trees_states_and_variables_as_arguments():
    @nnx.custom_jvp
    def f(tree, state, variable):
        return tree["m"].a[...] * tree["x"][0] * state["a"][...] * variable[...]

    @f.defjvp
    def rule(primals, tangents):
        dtree, dstate, dvariable = tangents
        parts = dtree["m"]["a"][...], dtree["x"][0], dstate["a"][...], dvariable[...]
        return f(*primals), sum(10.0**n * part for n, part in enumerate(parts))

    args = {"m": Pair(), "x": [one]}, nnx.state(Pair(), nnx.Param), nnx.Param(three)
    dtree, dstate, dvariable = nnx.grad(f, argnums=(0, 1, 2))(*args)
    found = dtree["m"]["a"][...], dtree["x"][0], dstate["a"][...], dvariable[...]
    assert [float(x) for x in found] == [1, 10, 100, 1000]


# Tangents that it gives.


def test_none_is_zero():
    grads = nnx.grad(with_rule(lambda p, t: None), argnums=(0, 1))(Pair(), three)
    assert float(grads[0]["a"][...]) == float(grads[1]) == 0
    f = with_rule(lambda p, t: (10 * t[1], None), lambda m, x: (x, {"y": m.a[...] * x}))
    assert float(nnx.grad(lambda m, x: f(m, x)[0] + f(m, x)[1]["y"], argnums=1)(Pair(), one)) == 10


def test_tangent_of_changed_values_is_zero():
    f = with_rule(ten_times)

    def loss(m, x):
        return f(m, x) + 1000 * m.seen[...]

    assert float(nnx.grad(loss, argnums=1)(Pair(), three)) == 20


def test_integers_in_the_result_have_none():
    f = with_rule(lambda p, t: (10 * t[1], jnp.int32(5)), lambda m, x: (x, jnp.int32(1)))
    assert float(nnx.grad(lambda m, x: f(m, x)[0], argnums=1)(Pair(), one)) == 10


def test_objects_in_the_result_have_states_as_tangents():
    class Output(nnx.Pytree):
        def __init__(self, x):
            self.x, self.n = nnx.Variable(x), jnp.int32(3)

    def fn(m, x):
        m.seen[...] = x
        return {"made": Output(2 * x), "m": m, "y": x}

    def tangent(primals, tangents):
        dx = tangents[1]
        return {"made": {"x": 10 * dx}, "m": nnx.State({"seen": 100 * dx}), "y": None}

    def loss(m, x):
        result = with_rule(tangent, fn)(m, x)
        return result["made"].x[...] + 2 * result["m"].seen[...] + result["y"]

    for around in (lambda f: f, nnx.jit):
        m = Pair()
        assert float(nnx.grad(around(loss), argnums=1)(m, one)) == 10 + 200
        assert float(m.seen[...]) == 1


def test_rules_per_argument_are_added():
    f = nnx.custom_jvp(product)
    f.defjvps(
        lambda dm, y, m, x: 10 * dm["a"][...] * x,
        lambda dx, y, m, x: 100 * y / x * dx,
    )
    for around in (lambda f: f, nnx.jit):
        m = Pair()
        dm, dx = nnx.grad(around(f), argnums=(0, 1))(m, three)
        assert (float(dm["a"][...]), float(dx), int(m.n[...])) == (30, 200, 1)
    f.defjvps(None, None)
    assert float(nnx.grad(f, argnums=1)(Pair(), three)) == 0


def test_rules_per_argument_of_a_tree():
    f = nnx.custom_jvp(lambda x, y: (x * y, {"x": x}))
    f.defjvps(lambda dx, out, x, y: (dx * y, {"x": 5 * dx}), lambda dy, out, x, y: (dy, None))
    loss = lambda x, y: f(x, y)[0] + f(x, y)[1]["x"]  # noqa: E731
    assert [float(d) for d in jax.grad(loss, (0, 1))(two, three)] == [8, 1]


# Bad input.

WRONG = {
    "a shape": (
        lambda p, t: jnp.ones(2, f32),
        ValueError,
        r"is float32\[2\], expected float32\[\]",
    ),
    "a dtype": (lambda p, t: t[1].astype(jnp.float16), ValueError, r"is float16\[\], expected fl"),
    "a tree": (lambda p, t: (t[1], t[1]), StructureError, r"structure PyTreeDef\(\(\*, \*\)\)"),
    "a State": (
        lambda p, t: t[0],
        StructureError,
        r"structure .*State.*, expected PyTreeDef\(\*\)",
    ),
    "no array": (lambda p, t: "text", TypeError, r"is a str, expected float32\[\]"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_tangents_that_cannot_be(wrong):
    tangent, error, match = WRONG[wrong]
    m = Pair()
    with pytest.raises(error, match=rf"custom_jvp\(product\): the tangent of the result .*{match}"):
        nnx.grad(with_rule(tangent))(m, three)
    assert_isomorphic(m, Pair())


def test_tangents_of_objects_that_cannot_be():
    def fn(m, x):
        m.seen[...] = x
        return m

    for given, match in (
        ({"c": one}, r"the result\.c, which does not exist; there is the result\.a"),
        ({"a": one}, r"the result\.a, which is not differentiated"),
        ({"seen": jnp.ones(2, f32)}, r"for the result\.seen is float32\[2\], expected float32\[\]"),
    ):
        f = with_rule(lambda p, t, given=given: given, fn)
        with pytest.raises(ValueError, match=match):
            nnx.grad(lambda m, x, f=f: f(m, x).a[...])(Pair(), three)


def test_rule_has_to_return_a_pair():
    f = nnx.custom_jvp(product)
    f.defjvp(lambda primals, tangents: product(*primals))
    with pytest.raises(TypeError, match="the rule has to return a pair, the result and its tan"):
        nnx.grad(f)(Pair(), three)


def test_rules_per_argument_that_cannot_be():
    with pytest.raises(TypeError, match="defjvps cannot be used with nondiff_argnums"):
        nnx.custom_jvp(product, nondiff_argnums=0).defjvps(None)
    f = nnx.custom_jvp(product)
    f.defjvps(None)
    with pytest.raises(ValueError, match="got 1 rules for 2 arguments"):
        nnx.grad(f)(Pair(), three)

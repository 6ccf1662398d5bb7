"""nnx.custom_vjp: residuals, cotangents in and out. What it shares with custom_jvp: test_rules."""

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


def product(m):
    return m.a[...] * m.b[...]


def with_bwd(bwd, fn=product, **options):
    """`fn` of one module, with the module as residual."""
    f = nnx.custom_vjp(fn, **options)
    f.defvjp(lambda m: (fn(m), m), bwd)
    return f


def gradients(f, *args):
    grads = nnx.grad(f)(*args)
    return float(grads["a"][...]), float(grads["b"][...])


# Against a hand-split jax.custom_vjp.


class Net(nnx.Module):
    def __init__(self):
        self.layers = [nnx.Linear(2, 2, rngs=nnx.Rngs(n)) for n in range(2)]

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return x


def clipped_pull(apply, params, x, g):
    _, pull = jax.vjp(apply, params, x)
    dparams, dx = pull(g)
    return jax.tree.map(lambda d: jnp.clip(d, -0.1, 0.1), dparams), dx


def by_hand(net, x):
    graphdef, params = nnx.split(net)
    apply = lambda params, x: nnx.merge(graphdef, params)(x)  # noqa: E731
    f = jax.custom_vjp(apply)
    f.defvjp(
        lambda params, x: (apply(params, x), (params, x)),
        lambda residuals, g: clipped_pull(apply, *residuals, g),
    )
    return jax.grad(lambda params, x: (f(params, x) ** 2).sum(), argnums=(0, 1))(params, x)


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit, nnx.remat], ids=["grad", "jit", "remat"])
def test_gradients_are_those_of_a_hand_split_function(around):
    @nnx.custom_vjp
    def f(net, x):
        return net(x)

    def bwd(residuals, g):
        net, x = residuals
        graphdef, params = nnx.split(net)
        return clipped_pull(lambda params, x: nnx.merge(graphdef, params)(x), params, x, g)

    f.defvjp(lambda net, x: (f(net, x), (net, x)), bwd)
    net, x = Net(), jnp.array([[0.5, -1.0]], f32)
    loss = around(lambda net, x: (f(net, x) ** 2).sum())
    dnet, dx = nnx.grad(loss, argnums=(0, 1))(net, x)
    expected, expected_dx = by_hand(net, x)
    assert jax.tree.structure(dnet) == jax.tree.structure(expected)
    for found, wanted in zip(jax.tree.leaves(dnet), jax.tree.leaves(expected), strict=True):
        assert np.allclose(found, wanted, rtol=1e-5)
    assert np.allclose(dx, expected_dx, rtol=1e-5)


def test_second_derivative_goes_through_fwd_and_bwd():
    f = nnx.custom_vjp(lambda x: x**3)
    f.defvjp(lambda x: (f(x), x), lambda x, g: (2 * g * 3 * x**2,))
    assert float(nnx.grad(nnx.grad(f))(two)) == float(jax.grad(jax.grad(f))(two)) == 24


# What bwd may give.


def written(m, g):
    m.a[...], m.b[...] = g * m.b[...], 5 * g
    return (m,)


FORMS = {
    "State": lambda m, g: (nnx.State({"a": nnx.Param(g * m.b[...]), "b": nnx.Param(5 * g)}),),
    "dict": lambda m, g: ({"a": g * m.b[...], "b": 5 * g},),
    "object": written,
    "clone": lambda m, g: written(nnx.clone(m), g),
    "mapped state": lambda m, g: (
        jax.tree.map(lambda d: d * g, nnx.State({"a": m.b, "b": nnx.Param(5 * one)})),
    ),
    "list": lambda m, g: [{"a": g * m.b[...], "b": 5 * g}],
}


@pytest.mark.parametrize("form", FORMS)
def test_cotangent_of_an_object(form):
    assert gradients(with_bwd(FORMS[form]), Pair()) == (3, 5)


def test_leaves_that_are_left_out_are_zero():
    assert gradients(with_bwd(lambda m, g: ({"b": 7 * g},)), Pair()) == (0, 7)
    assert gradients(with_bwd(lambda m, g: ({"a": None, "b": 7 * g},)), Pair()) == (0, 7)
    assert gradients(with_bwd(lambda m, g: (nnx.State(),)), Pair()) == (0, 0)
    assert gradients(with_bwd(lambda m, g: (None,)), Pair()) == (0, 0)


def test_integers_and_keys_among_cotangents_do_not_count():
    whole = lambda m, g: (nnx.state(written(m, g)[0]),)  # noqa: E731
    m = Pair()
    m.rngs = nnx.Rngs(0)
    assert gradients(with_bwd(whole), m) == (3, 5)


def test_python_numbers_are_cotangents_of_scalars():
    assert gradients(with_bwd(lambda m, g: ({"a": 4.0, "b": 1},)), Pair()) == (4, 1)


def test_filtered_object_may_be_given_whole():
    only_a = nnx.DiffState(0, nnx.PathContains("a"))
    assert gradients(with_bwd(written, nondiff_argnums=only_a), Pair()) == (3, 0)


def test_arguments_in_trees():
    @nnx.custom_vjp
    def f(tree, xs):
        return product(tree["m"]) * tree["x"] * xs[0]

    def bwd(residuals, g):
        return {"m": {"a": 10 * g}, "x": 20 * g, "none": None}, [30 * g, None]

    f.defvjp(lambda tree, xs: (f(tree, xs), ()), bwd)
    tree = {"m": Pair(), "x": one, "none": None}
    dtree, dxs = nnx.grad(f, argnums=(0, 1))(tree, [one, one])
    assert (float(dtree["m"]["a"][...]), float(dtree["m"]["b"][...])) == (10, 0)
    assert float(dtree["x"]) == 20 and [float(d) for d in dxs] == [30, 0]
    f.defvjp(lambda tree, xs: (f(tree, xs), ()), lambda residuals, g: (None, None))
    assert float(nnx.grad(f, argnums=0)(tree, [one, one])["x"]) == 0


def test_states_and_variables_as_arguments():
    @nnx.custom_vjp
    def f(state, variable):
        return state["a"][...] * variable[...]

    def bwd(residuals, g):
        state, variable = residuals
        return {"a": 10 * g * variable[...]}, 10 * g * state["a"][...]

    f.defvjp(lambda state, variable: (f(state, variable), (state, variable)), bwd)
    for around in (lambda f: f, nnx.jit):
        variable = nnx.Param(three)
        dstate, dvariable = nnx.grad(around(f), argnums=(0, 1))(
            nnx.state(Pair(), nnx.Param), variable
        )
        assert float(dstate["a"][...]) == 30 and float(dvariable[...]) == 20
    f.defvjp(f_fwd(f), lambda residuals, g: (None, nnx.Param(7 * g)))
    assert float(nnx.grad(f, argnums=1)(nnx.state(Pair()), nnx.Param(three))[...]) == 7


def f_fwd(f):
    return lambda *args: (f(*args), None)


def test_values_that_are_trees():
    class Tree(nnx.Pytree):
        def __init__(self):
            self.v = nnx.Param({"x": two, "n": jnp.int32(1), "y": (three, one)})

    f = nnx.custom_vjp(lambda t: t.v[...]["x"] * t.v[...]["y"][0])
    f.defvjp(f_fwd(f), lambda r, g: ({"v": nnx.Param({"x": 5 * g, "n": None, "y": (g, None)})},))
    whole = nnx.DiffState(0, nnx.Param)
    value = nnx.grad(f, argnums=whole, allow_int=True)(Tree())["v"].get_value()
    assert float(value["x"]) == 5 and [float(y) for y in value["y"]] == [1, 0]
    f.defvjp(f_fwd(f), lambda r, g: ({"v": {"x": 7 * g, "n": None, "y": (g, None)}},))
    assert float(nnx.grad(f, argnums=whole, allow_int=True)(Tree())["v"].get_value()["x"]) == 7


def test_shared_variable_gets_the_sum():
    f = nnx.custom_vjp(lambda m, k: m.a[...] * k.a[...])
    f.defvjp(
        lambda m, k: (f(m, k), (m, k)),
        lambda r, g: ({"a": g * r[1].a[...]}, {"a": 10 * g * r[0].a[...]}),
    )
    m, k = Pair(2.0), Pair(5.0)
    k.a = m.a
    assert float(nnx.grad(lambda m, k: f(m, k))(m, k)["a"][...]) == 22
    assert float(nnx.grad(lambda m: f(m, m))(m)["a"][...]) == 22
    assert float(nnx.grad(nnx.jit(lambda m: f(m, m)))(m)["a"][...]) == 22


def test_state_as_an_attribute():
    class Holder(nnx.Pytree):
        def __init__(self):
            self.held = nnx.State({"x": nnx.Param(two), "y": nnx.Param(three)})

    def fn(h):
        h.held["y"][...] = one
        return h.held["x"][...] * 3

    f = nnx.custom_vjp(fn)
    seen = []

    def bwd(h, g, updates_g):
        seen.append(list(updates_g[0]["held"]))
        return ({"held": {"x": 7 * g}},)

    f.defvjp(lambda h: (fn(h), h), bwd)
    holder = Holder()
    grads = nnx.grad(f)(holder)
    assert float(grads["held"]["x"][...]) == 7 and float(grads["held"]["y"][...]) == 0
    assert float(holder.held["y"][...]) == 1 and seen == [["x", "y"]]


# Residuals.


def test_residuals_hold_objects_states_and_arrays():
    def bwd(residuals, g):
        (m, again), state, made = residuals["objects"], residuals["state"], residuals["made"]
        assert again is m and m.a is residuals["variable"]
        return ({"a": g * (m.b[...] + state["b"][...] + made.a[...] + residuals["x"])},)

    def fwd(m):
        residuals = {"objects": (m, m), "state": nnx.state(m), "made": Pair(50.0), "x": one}
        return product(m), residuals | {"variable": m.a, "none": None}

    f = nnx.custom_vjp(product)
    f.defvjp(fwd, bwd)
    assert gradients(f, Pair()) == gradients(nnx.jit(f), Pair()) == (57, 0)


def test_objects_in_residuals_are_as_fwd_left_them():
    def fn(m):
        m.seen[...] += m.a[...]
        return m.b[...]

    f = with_bwd(lambda m, g: ({"a": m.seen[...]},), fn)
    m = Pair()
    assert gradients(f, m) == (2, 0) and gradients(f, m) == (4, 0)


def test_what_bwd_changes_and_sows_goes_nowhere():
    def bwd(m, g):
        m.seen[...] = g
        m.sow(nnx.Intermediate, "h", g)
        return written(m, g)

    m = Pair()
    run = lambda m: nnx.grad(lambda m: 2 * with_bwd(bwd)(m))(m)["a"][...]  # noqa: E731
    for around in (lambda f: f, nnx.jit):
        grad, found = nnx.capture(around(run), nnx.Intermediate)(m)
        assert float(grad) == 6 and list(found) == []
    assert_isomorphic(m, Pair())


def test_constant_object_is_first_argument_of_bwd():
    def fn(m, x):
        m.seen[...] = x
        return m.a[...] * x

    f = nnx.custom_vjp(fn, nondiff_argnums=0)
    f.defvjp(lambda m, x: (fn(m, x), m), lambda m, same, g: (check(m is same, m.a[...] + g),))
    m = Pair()
    assert float(nnx.grad(f, argnums=1)(m, three)) == 3 and float(m.seen[...]) == 3


def check(holds, value):
    assert holds
    return value


# What bwd gets.


def test_cotangents_of_changed_values():
    def fn(m, k, x):
        m.seen[...], m.n[...] = 2 * x, m.n[...] + jnp.int32(1)
        k.new = nnx.Cache(3 * x)
        return x

    f, seen = nnx.custom_vjp(fn), []

    def bwd(residuals, g, *, updates_g):
        seen.append(updates_g)
        dm, dk, _ = updates_g
        return None, None, g + 10 * dm["seen"][...] + 100 * dk["new"][...]

    f.defvjp(lambda m, k, x: (fn(m, k, x), ()), bwd)

    def loss(m, k, x):
        return f(m, k, x) + 2 * m.seen[...] + 3 * k.new[...]

    for around in (lambda f: f, nnx.jit):
        assert float(nnx.grad(around(loss), argnums=2)(Pair(), Pair(), one)) == 1 + 20 + 300
        dm, dk, dx = seen.pop()
        assert list(dm) == ["seen"] and list(dk) == ["new"] and dx is None
        assert type(dm["seen"]) is nnx.BatchStat and type(dk["new"]) is nnx.Cache


def test_shared_change_has_one_cotangent():
    def fn(m, k):
        k.seen[...] = k.a[...]
        return k.a[...]

    f = nnx.custom_vjp(fn)

    def bwd(residuals, g, updates_g):
        assert list(updates_g[1]) == []
        return {"a": updates_g[0]["seen"][...]}, None

    f.defvjp(lambda m, k: (fn(m, k), ()), bwd)
    m, k = Pair(), Pair()
    k.seen = m.seen
    assert float(nnx.grad(lambda m, k: f(m, k) + 5 * m.seen[...])(m, k)["a"][...]) == 5


def test_cotangents_of_a_variable_that_is_an_argument():
    def fn(v, w):
        v[...] = 2 * w[...]
        return w[...]

    f = nnx.custom_vjp(fn)

    def bwd(residuals, g, updates_g):
        assert updates_g[1] is None
        return None, updates_g[0][...]

    f.defvjp(lambda v, w: (fn(v, w), ()), bwd)
    v, w = nnx.Variable(one), nnx.Param(three)
    assert float(nnx.grad(lambda v, w: f(v, w) + 5 * v[...], argnums=1)(v, w)[...]) == 5
    assert float(v[...]) == 6


def test_cotangents_of_a_variable_beside_a_changed_structure():
    def fn(m, v):
        m.tag, v[...] = "new", 2 * m.a[...]
        return m.a[...]

    f = nnx.custom_vjp(fn)
    f.defvjp(f_fwd(fn), lambda r, g, updates_g: ({"a": updates_g[1][...]}, None))
    m, v = Pair(), nnx.Variable(one)
    grads = nnx.grad(lambda m, v: f(m, v) + 5 * v[...])(m, v)
    assert (float(grads["a"][...]), float(v[...]), m.tag) == (5, 4, "new")


def test_objects_in_the_result_have_states_as_cotangents():
    class Output(nnx.Pytree):
        def __init__(self, x):
            self.x, self.n = nnx.Variable(x), jnp.int32(3)

    def fn(m, x):
        m.seen[...] = x
        return {"made": Output(2 * x), "m": m, "y": x}

    f, seen = nnx.custom_vjp(fn), []

    def bwd(residuals, g):
        seen.append((list(g["made"]), list(g["m"])))
        return None, 10 * g["made"]["x"][...] + 100 * g["m"]["seen"][...] + g["y"]

    f.defvjp(lambda m, x: (fn(m, x), ()), bwd)

    def loss(m, x):
        result = f(m, x)
        return result["made"].x[...] + 2 * result["m"].seen[...] + 3 * result["y"]

    for around in (lambda f: f, nnx.jit):
        assert float(nnx.grad(around(loss), argnums=1)(Pair(), one)) == 10 + 200 + 3
        assert seen.pop() == (["x"], ["seen"])


# Bad input.

WRONG = {
    "no tuple": (lambda m, g: g, TypeError, "one cotangent for each of m. It returned no tuple"),
    "too many": (lambda m, g: (None, None), TypeError, r"for each of m. It returned 2 of them"),
    "a path": (
        lambda m, g: ({"c": g},),
        StructureError,
        r"the cotangent has m\.c, which does not exist; there is m\.a, m\.b",
    ),
    "a shape": (
        lambda m, g: ({"a": jnp.ones(2, f32)},),
        ValueError,
        r"the cotangent for m\.a is float32\[2\], expected float32\[\]",
    ),
    "a dtype": (
        lambda m, g: ({"a": g.astype(jnp.float16)},),
        ValueError,
        r"the cotangent for m\.a is float16\[\], expected float32\[\]",
    ),
    "no array": (lambda m, g: ({"a": "text"},), TypeError, r"for m\.a is a str, expected float32"),
    "an array": (lambda m, g: (g,), TypeError, "for m is a .*Expected a State of its leaves"),
    "a tree": (
        lambda m, g: ({"a": nnx.Param((g, g))},),
        StructureError,
        r"for m\.a has the structure PyTreeDef\(\(\*, \*\)\)",
    ),
    "an object": (
        lambda m, g: (nnx.Linear(1, 1, rngs=nnx.Rngs(0)),),
        StructureError,
        r"for m is a Linear of another structure: only one of the two has m\.a",
    ),
    "a list": (lambda m, g: ([None],), TypeError, "for m is a list"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_cotangents_that_cannot_be(wrong):
    bwd, error, match = WRONG[wrong]
    m = Pair()
    with pytest.raises(error, match=rf"nnx\.custom_vjp\(product\): .*{match}"):
        nnx.grad(with_bwd(bwd))(m)
    assert_isomorphic(m, Pair())


def test_cotangents_of_trees_that_cannot_be():
    f = nnx.custom_vjp(lambda tree: tree["x"] * tree["y"][0])
    for given in ({"x": one}, {"x": one, "y": one}, one, {"x": (one,), "y": [None]}):
        f.defvjp(f_fwd(f), lambda r, g, given=given: (given,))
        with pytest.raises(ValueError, match=r"the cotangent (of tree|of tree\['x'\]) has the str"):
            nnx.grad(f)({"x": one, "y": [one]})
    f.defvjp(f_fwd(f), lambda r, g: ({"x": jnp.ones(3, f32), "y": None},))
    with pytest.raises(ValueError, match=r"the cotangent of tree\['x'\] is float32\[3\]"):
        nnx.grad(f)({"x": one, "y": [one]})


def test_excluded_leaf_has_no_cotangent():
    f = with_bwd(lambda m, g: ({"b": g},), nondiff_argnums=nnx.DiffState(0, nnx.PathContains("a")))
    with pytest.raises(StructureError, match=r"m\.b, which is not differentiated: leave it out"):
        nnx.grad(f)(Pair())


@pytest.mark.parametrize("returned", [one, (one,), None], ids=str)
def test_fwd_has_to_return_a_pair(returned):
    f = nnx.custom_vjp(product)
    f.defvjp(lambda m: returned, lambda r, g: (None,))
    with pytest.raises(TypeError, match="fwd has to return a pair, the result and residuals"):
        nnx.grad(f)(Pair())


def test_residuals_have_to_be_arrays_or_objects():
    f = nnx.custom_vjp(product)
    f.defvjp(lambda m: (product(m), {"mode": "text"}), lambda r, g: (None,))
    with pytest.raises(TypeError, match=r"residuals with a str in them.*nondiff_argnums"):
        nnx.grad(f)(Pair())


def test_flags_of_flax():
    f = nnx.custom_vjp(graph=True, graph_updates=False)(product)
    f.defvjp(lambda m: (product(m), m), written)
    assert gradients(f, Pair()) == (3, 5)
    with pytest.raises(TypeError, match=r"no graph_updates=True.*updates_g"):
        nnx.custom_vjp(graph_updates=True)(product)


def test_forward_mode_is_refused_by_jax():
    f = with_bwd(written)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda a: f(Pair(a)), (two,), (one,))


def test_options_that_rules_cannot_follow_are_refused():
    f = nnx.custom_vjp(lambda x: x)
    f.defvjp(lambda x: (x, None), lambda _, g: (g,), symbolic_zeros=False, optimize_remat=False)
    with pytest.raises(NotImplementedError, match="defvjp has optimize_remat=True"):
        f.defvjp(lambda x: (x, None), lambda _, g: (g,), optimize_remat=True)

"""jvp of functions of objects, against `jax.jvp` of hand-split ones."""

import functools
import gc
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.strategies import blueprints, examples
from tests.transforms.samples import Cell, Tree
from tests.transforms.test_grad import Net, X, assert_same_gradients, loss
from tests.transforms.test_grad_laws import losses

ONE, TWO = jnp.float32(1), jnp.float32(2)
FLOAT0 = np.zeros((), jax.dtypes.float0)


def forward(net, x):
    return net(x)


class Small(nnx.Module):
    """Two layers, and a count of the calls."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = [nnx.Linear(3, 2, rngs=rngs), nnx.Linear(2, 1, rngs=rngs)]
        self.n = nnx.Variable(jnp.int32(0))

    def __call__(self, x):
        self.n[...] += jnp.int32(1)
        return self.layers[1](jnp.tanh(self.layers[0](x)))


def like(state, start=1.0):
    """A tangent with another number for each leaf."""
    leaves, tree = jax.tree.flatten(state)
    return tree.unflatten([jnp.full_like(x, start + n / 8) for n, x in enumerate(leaves)])


def split_by_hand(fn, model, args, tangent, tangents):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    f = lambda p, *args: fn(nnx.merge(graphdef, p, rest), *args)  # noqa: E731
    return jax.jvp(f, (params, *args), (tangent, *tangents))


# Values and effects.


def test_derivatives_are_those_of_a_hand_split_jvp():
    model, tangent = Small(), like(nnx.state(Small(), nnx.Param))
    expected = split_by_hand(forward, Small(), (X,), tangent, (2.0 * X,))
    found = nnx.jvp(forward, (model, X), (tangent, 2.0 * X))
    assert np.allclose(found[0], expected[0]) and np.allclose(found[1], expected[1], rtol=1e-5)
    assert int(model.n[...]) == 1


def test_aux_comes_third():
    cell = Cell(3.0)
    f = lambda c, x: (c(x), (c, "text", None))  # noqa: E731
    output, change, aux = nnx.jvp(f, (cell, TWO), (None, ONE), has_aux=True)
    assert (output, change, aux) == (6, 3, (cell, "text", None)) and int(cell.n[...]) == 1


# Tangents of objects.


def test_leaves_without_a_tangent_have_zero():
    tree = Tree()
    f = lambda t: t.left.w[...] * t.table["b"][...] * t.array + t.right.w[...]  # noqa: E731
    for tangent, change in (
        (nnx.State({"again": {"w": ONE}}), 13 * 23),  # the path of `left` that comes first
        (nnx.State({"table": {"b": nnx.BatchStat(ONE)}, "right": {"w": TWO}}), 2 * 23 + 2),
        (nnx.State({"array": ONE}), 26),
        ({"array": ONE, "right": {"w": None}}, 26),  # a nested dict does, too
        (nnx.State({}), 0),
        (None, 0),
    ):
        assert nnx.jvp(f, (tree,), (tangent,)) == (601, change)


def test_object_of_the_same_structure_is_a_tangent_whose_integers_do_not_count():
    cell = Cell(3.0)
    f = lambda c: {"w": c(TWO), "n": c.n[...] * jnp.int32(2)}  # noqa: E731
    ones = jax.tree.map(jnp.ones_like, cell)
    output, change = nnx.jvp(f, (cell,), (ones,))
    assert output == {"w": 6, "n": 2} and change["w"] == 2
    assert change["n"].dtype == jax.dtypes.float0 and int(ones.n[...]) == 1
    state = jax.tree.map(jnp.ones_like, nnx.state(cell))
    assert nnx.jvp(f, (cell,), (state,))[1]["w"] == 2


def test_zeros_like_a_model_with_random_state_and_statistics():
    net = Net()
    zeros = jax.tree.map(jnp.zeros_like, net)
    f = lambda net: net.norm.var[...][0] * net.scale  # noqa: E731
    assert nnx.jvp(f, (net,), (zeros,)) == (2, 0)
    zeros.norm.var[...] = jnp.ones(3)
    assert nnx.jvp(f, (net,), (zeros,)) == (2, 2)


def test_values_that_are_pytrees():
    tree = Tree()
    f = lambda t: t.both.value["x"] * t.both.value["y"][0] * t.both.value["y"][1]  # noqa: E731
    tree.both.value = {"x": TWO, "y": (jnp.float32(3), jnp.float32(5))}
    tangent = nnx.State({"both": nnx.Variable({"x": ONE, "y": (None, TWO)})})
    assert nnx.jvp(f, (tree,), (tangent,)) == (30, 15 + 12)


def test_variables_states_and_containers():
    state, variable = nnx.State({"w": nnx.BatchStat(TWO)}), nnx.Variable(jnp.float32(3))
    batch = {"model": Cell(5.0), "x": (jnp.float32(7), "text")}
    f = lambda s, v, b: s["w"][...] * v[...] * b["model"].w[...] * b["x"][0]  # noqa: E731
    tangents = state, ONE, {"model": nnx.State({"w": ONE}), "x": (ONE, None)}
    expected = 210 + 70 + 42 + 30
    assert nnx.jvp(f, (state, variable, batch), tangents) == (210, expected)
    assert nnx.jvp(f, (state, variable, batch), (None, variable, None)) == (210, 210)


def test_state_of_the_output_has_a_tangent_alike():
    cell = Cell(3.0)
    f = lambda c, x: {"state": nnx.state(c), "x": x}  # noqa: E731
    output, change = nnx.jvp(f, (cell, TWO), (nnx.State({"w": ONE}), None))
    assert jax.tree.structure(output) == jax.tree.structure(change)
    assert output["state"]["w"][...] == 3 and change["state"]["w"][...] == 1
    assert change["state"]["n"].get_value().dtype == jax.dtypes.float0 and change["x"] == 0


def test_shared_variable_has_one_tangent():
    a, b = Cell(3.0), Cell(5.0)
    b.tied = a.w
    f = lambda a, b: a.w[...] * b.tied[...] * b.w[...]  # noqa: E731
    tangent = nnx.State({"w": ONE})
    assert nnx.jvp(f, (a, b), (tangent, None)) == (45, 30)
    assert nnx.jvp(f, (a, b), (None, nnx.State({"tied": ONE}))) == (45, 30)
    assert nnx.jvp(f, (a, b), (tangent, nnx.State({"tied": ONE, "w": ONE}))) == (45, 39)
    again = lambda a, b: a.w[...] * b.w[...]  # noqa: E731
    assert nnx.jvp(again, (a, a), (tangent, tangent)) == (9, 6)
    with pytest.raises(ValueError, match=r"b\.tied is a\.w too, which has another tangent"):
        nnx.jvp(f, (a, b), (tangent, nnx.State({"tied": TWO})))


# Tangents of other arguments.


def test_plain_arguments_are_as_for_jax():
    f = lambda x, n: (x["a"] * x["b"], n, 3.0)  # noqa: E731
    primals = {"a": TWO, "b": np.float32(3)}, jnp.int32(5)
    tangents = {"a": ONE, "b": TWO}, FLOAT0
    assert_isomorphic(nnx.jvp(f, primals, tangents), jax.jvp(f, primals, tangents))
    assert_isomorphic(nnx.jvp(f, list(primals), [tangents[0], None]), jax.jvp(f, primals, tangents))
    assert_isomorphic(nnx.jvp(jnp.sin, (0.1,), (0.2,)), jax.jvp(jnp.sin, (0.1,), (0.2,)))


def test_none_is_zero_for_any_argument():
    f = lambda x, mode: x["a"] * x["b"] if mode == "train" else x  # noqa: E731
    primals = {"a": TWO, "b": jnp.float32(3)}, "train"
    assert nnx.jvp(f, primals, ({"a": None, "b": ONE}, None)) == (6, 2)
    assert nnx.jvp(f, primals, (None, None)) == (6, 0)


# Wrong tangents.


def nested_cell():
    tree = Tree()
    tree.items[0].w.value = jnp.ones((2, 3), jnp.float32)
    return tree


@pytest.mark.parametrize(
    ("error", "tangent", "message"),
    [
        (ValueError, nnx.State({"items": {0: {"v": ONE}}}), r"of t has t\.items\[0\]\.v, which is"),
        (
            ValueError,
            nnx.State({"items": {0: {"w": ONE}}}),
            r"items\[0\]\.w is float32\[\]\. Expec",
        ),
        (
            ValueError,
            nnx.State({"items": {0: {"w": jnp.ones((2, 3), jnp.bfloat16)}}}),
            r"tangent of t\.items\[0\]\.w is bfloat16\[2, 3\]\. Expected float32\[2, 3\]",
        ),
        (
            TypeError,
            nnx.State({"items": {0: {"n": ONE}}}),
            r"items\[0\]\.n is int32\[\] and has no",
        ),
        (TypeError, nnx.State({"array": "text"}), r"tangent of t\.array is str\. Expected float32"),
        (ValueError, nnx.State({"both": ONE}), r"t\.both has structure .*\*\)\. Expected.*'x': \*"),
        (
            ValueError,
            nnx.State({"both": nnx.Variable({"x": ONE, "y": (ONE, jnp.ones(2))})}),
            r"tangent of t\.both\['y'\]\[1\] is float32\[2\]\. Expected float32\[\]",
        ),
        (ValueError, Cell(), r"of t is an object without t\.\w+"),
        (TypeError, ONE, r"tangent of t \(Tree\) is Array\w*\. Expected a State with paths of it"),
    ],
)
def test_wrong_tangent_of_an_object_is_an_error_with_its_path(error, tangent, message):
    tree = nested_cell()
    with pytest.raises(error, match=rf"nnx\.jvp\(<lambda>\): .*{message}"):
        nnx.jvp(lambda t: t.left(ONE), (tree,), (tangent,))
    assert_isomorphic(nested_cell(), tree)


@pytest.mark.parametrize(
    ("error", "primal", "tangent", "message"),
    [
        (
            ValueError,
            jnp.ones(2),
            jnp.ones(3),
            r"tangent of x is float32\[3\]\. Expected float32\[2",
        ),
        (
            ValueError,
            {"a": ONE},
            {"a": jnp.int32(1)},
            r"of x\['a'\] is int32\[\]\. Expected float32",
        ),
        (TypeError, [jnp.int32(1)], [jnp.int32(1)], r"x\[0\] is int32\[\] and has no tangent, but"),
        (
            TypeError,
            "text",
            ONE,
            r"x is str and has no tangent, but float32\[\] is given.*Give None",
        ),
        (TypeError, ONE, "text", r"tangent of x is str\. Expected float32\[\]"),
        (ValueError, {"a": ONE}, [ONE], r"of x has structure .*\[\*\].*Expected.*'a': \*"),
        (ValueError, (Cell(), ONE), (None,), r"of x has structure .*Expected .*\(\*, \*\)"),
    ],
)
def test_wrong_tangent_of_an_argument_is_an_error_with_its_path(error, primal, tangent, message):
    with pytest.raises(error, match=rf"nnx\.jvp\(<lambda>\): .*{message}"):
        nnx.jvp(lambda x: ONE, (primal,), (tangent,))


@pytest.mark.parametrize(
    ("error", "primals", "tangents", "message"),
    [
        (TypeError, ONE, (ONE,), r"primals is Array\w*\. Expected a tuple"),
        (TypeError, (ONE,), ONE, r"tangents is Array\w*\. Expected a tuple"),
        (TypeError, (ONE,), None, r"tangents is NoneType\. Expected a tuple"),
        (ValueError, (ONE, ONE), (ONE,), r"there are 2 primals and 1 tangents\. .*None stands"),
    ],
)
def test_primals_and_tangents_are_tuples_of_one_length(error, primals, tangents, message):
    with pytest.raises(error, match=rf"nnx\.jvp\(<lambda>\): {message}"):
        nnx.jvp(lambda *args: ONE, primals, tangents)


# Ways to call it.


def test_decorators_and_functions():
    @nnx.jvp(has_aux=True)
    def fn(c, x, *, scale="one"):
        """Doubles."""
        return c(x) * jnp.float32(2 if scale == "two" else 1), c

    cell = Cell(3.0)
    assert fn.__doc__ == "Doubles." and repr(fn) == "<nnx.jvp(fn)>"
    assert list(inspect.signature(fn).parameters) == ["primals", "tangents", "kwargs"]
    assert fn((cell, ONE), (None, ONE), scale="two") == (6, 6, cell)
    assert nnx.jvp(Cell.__call__)((cell, ONE), (None, ONE)) == (3, 3)
    assert nnx.jvp(Cell.__call__, tangents=(None, ONE), primals=(cell, ONE)) == (3, 3)


def test_method_partial_and_callable_module():
    class Own(Cell):
        @nnx.jvp
        def push(self, x):
            return self(x)

        def energy(self, x):
            return self(x)

    m = Own(3.0)
    assert m.push((TWO,), (ONE,)) == (6, 3) and int(m.n[...]) == 1
    assert Own.push((m, TWO), (nnx.State({"w": ONE}), None)) == (6, 2)
    for n, fn in enumerate((m.energy, m, functools.partial(Own.energy, m)), start=3):
        assert nnx.jvp(fn, (TWO,), (ONE,)) == (6, 3) and int(m.n[...]) == n
    bound = functools.partial(lambda c, x, *, mode: c(x) if mode == "on" else x, m, mode="on")
    assert nnx.jvp(bound)((TWO,), (ONE,)) == (6, 3) and int(m.n[...]) == 6
    assert nnx.jit(nnx.jvp(bound))((TWO,), (ONE,)) == (6, 3) and int(m.n[...]) == 7


# With other transforms.


def test_hessian_vector_products_are_those_of_jax():
    model, tangent = Small(), like(nnx.state(Small(), nnx.Param))
    graphdef, params, rest = nnx.split(Small(), nnx.Param, ...)
    slope = jax.grad(lambda p: loss(nnx.merge(graphdef, p, rest), X))
    expected = jax.jit(lambda p, t: jax.jvp(slope, (p,), (t,)))(params, tangent)
    found = nnx.jit(nnx.jvp(nnx.grad(loss)))((model, X), (tangent, None))
    for got, wanted in zip(found, expected, strict=True):
        assert_same_gradients(got, wanted)
    assert int(model.n[...]) == 1


def test_hessian_vector_products_by_every_order_of_modes():
    cell, tangent = Cell(3.0), nnx.State({"w": nnx.Param(TWO)})
    energy = lambda c, x: c(x) ** 3  # noqa: E731  # (w x)^3, so 6 w x^3 t
    along = lambda c, x: nnx.jvp(energy, (c, x), (tangent, None))[1]  # noqa: E731
    pulled = lambda c, x: nnx.vjp(energy, c, x)[1](ONE)[0]  # noqa: E731
    assert nnx.jvp(nnx.grad(energy), (cell, TWO), (tangent, None))[1]["w"][...] == 288
    assert nnx.jvp(pulled, (cell, TWO), (tangent, None))[1]["w"][...] == 288
    assert nnx.grad(along)(cell, TWO)["w"][...] == 288
    assert nnx.vjp(along, cell, TWO)[1](ONE)[0]["w"][...] == 288
    assert nnx.jvp(along, (cell, TWO), (tangent, None))[1] == 576
    assert int(cell.n[...]) == 5


def test_jacobian_by_tangents_is_that_of_jax():
    linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    column = lambda t: nnx.jvp(forward, (linear, X), (None, t))[1]  # noqa: E731
    found = jax.vmap(column)(jnp.eye(6, dtype=jnp.float32).reshape(6, 2, 3))
    assert np.allclose(found.T, jax.jacfwd(linear)(X).reshape(1, 2, 6))


def test_inside_and_around_other_transforms():
    cell, xs = Cell(3.0), jnp.arange(1.0, 4.0)

    def pushed(c, x):
        return nnx.jvp(lambda c, x: c(x) ** 2, (c, x), (nnx.State({"w": ONE}), None))[1]

    carry = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    assert nnx.scan(pushed, in_axes=(carry, 0), out_axes=0)(cell, xs).tolist() == [6, 24, 54]
    assert int(cell.n[...]) == 3
    for around in (nnx.jit, nnx.remat, lambda f: nnx.jit(nnx.jit(f))):
        assert around(pushed)(cell, ONE) == 6
        assert nnx.jvp(around(lambda c, x: c(x) ** 2), (cell, ONE), (None, ONE))[1] == 18
    assert int(cell.n[...]) == 9
    assert nnx.grad(pushed)(cell, ONE)["w"][...] == 2
    axes = nnx.StateAxes({nnx.Param: None, ...: 0})
    cell.n = nnx.Variable(jnp.zeros(3, jnp.int32))
    assert nnx.vmap(pushed, in_axes=(axes, 0))(cell, xs).tolist() == [6, 24, 54]
    assert cell.n[...].tolist() == [1, 1, 1]


def test_under_plain_transforms_of_jax():
    cell = Cell(3.0)
    pushed = lambda x: nnx.jvp(lambda x: cell.w[...] * x**2, (x,), (ONE,))[1]  # noqa: E731
    assert jax.jit(pushed)(TWO) == 12 and jax.grad(pushed)(TWO) == 6
    assert jax.vmap(pushed)(jnp.arange(3.0)).tolist() == [0, 6, 12]
    assert jax.lax.map(pushed, jnp.arange(3.0)).tolist() == [0, 6, 12]


class Noted(Cell):
    def __call__(self, x):
        y = self.perturb("y", self.w[...] * x)
        self.sow(nnx.Intermediate, "y", y)
        return y * y


def test_capture_works_through_jvp():
    f = lambda c, x: nnx.jvp(lambda c, x: c(x), (c, x), (None, ONE))  # noqa: E731
    cell = Noted(3.0)
    found, sown, zeros = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(cell, TWO)
    assert found == (36, 36) and sown["y"][...] == (6,) and zeros["y"][...] == 0
    assert nnx.capture(f, init=nnx.State({"y": nnx.Perturbation(ONE)}))(cell, TWO) == (49, 42)
    grads = jax.grad(lambda p: nnx.capture(f, init=p)(cell, TWO)[1])(zeros)
    assert grads["y"][...] == 6


def test_nothing_of_a_call_stays():
    counts = []
    for n in range(4):
        nnx.jvp(lambda c, x: c(x), (Cell(), ONE), (nnx.State({"w": TWO}), None))
        gc.collect()
        if n in (1, 3):
            counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[1]


@examples(0.3)
@given(blueprints(), losses)
def test_derivative_along_ones_is_the_sum_of_the_gradients(blueprint, loss):
    eager, lifted = blueprint.root, blueprint.root
    expected = loss(eager)
    tangent = jax.tree.map(jnp.ones_like, nnx.state(lifted, nnx.Param))
    output, change, aux = nnx.jvp(loss, (lifted,), (tangent,), has_aux=True)
    assert_isomorphic((eager, expected), (lifted, (output, aux)))
    grads, _ = nnx.grad(loss, has_aux=True)(blueprint.root)
    assert change == sum((jnp.sum(x) for x in jax.tree.leaves(grads)), jnp.float32(0))

"""vjp of functions of objects, against `jax.vjp` of hand-split ones."""

import functools
import gc
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.strategies import blueprints, examples
from tests.transforms.samples import Cell, Tree, counted
from tests.transforms.test_grad import Net, X, assert_same_gradients
from tests.transforms.test_grad_laws import assert_equal_gradients, by_hand, losses

ONE, TWO = jnp.float32(1), jnp.float32(2)


def forward(net, x):
    return net(x)


def split_by_hand(fn, model, *args):
    graphdef, params, rest = nnx.split(model, nnx.Param, ...)
    return jax.vjp(lambda p, *args: fn(nnx.merge(graphdef, p, rest), *args), params, *args)


# Values and effects.


def test_cotangents_are_those_of_a_hand_split_vjp():
    net = Net()
    expected, by_hand = split_by_hand(forward, Net(), X)
    output, vjp_fn = nnx.vjp(forward, net, X)
    assert np.allclose(output, expected)
    for cotangent in (jnp.ones_like(output), 3.0 * output):
        params, x = vjp_fn(cotangent)
        expected_params, expected_x = by_hand(cotangent)
        assert_same_gradients(params, expected_params)
        assert np.allclose(x, expected_x)
    assert jax.tree.structure(params) == jax.tree.structure(nnx.state(net, nnx.Param))
    assert int(net.drop.rngs.count[...]) == 1 and net.norm.mean[...].any()


def test_changes_happen_once_at_the_call_of_vjp():
    cell = Cell()
    output, vjp_fn = nnx.vjp(forward, cell, ONE)
    vjp_fn(output), vjp_fn(output)
    assert int(cell.n[...]) == 1


def test_vjp_fn_knows_nothing_of_later_changes():
    cell = Cell(3.0)
    _, vjp_fn = nnx.vjp(lambda c: c.w[...] ** 2, cell)
    cell.w[...] = ONE
    del cell.n
    assert vjp_fn(ONE)[0]["w"][...] == 6


def test_aux_comes_third():
    cell = Cell(3.0)
    output, vjp_fn, aux = nnx.vjp(lambda c, x: (c(x), (c, "text")), cell, TWO, has_aux=True)
    assert output == 6 and aux == (cell, "text") and int(cell.n[...]) == 1
    params, x = vjp_fn(ONE)
    assert params["w"][...] == 2 and x == 3


# What is differentiated.


def plain(x, y, n):
    return {"out": x * y["a"] * y["b"][0], "n": n + n}


def test_plain_arguments_are_as_for_jax():
    args = TWO, {"a": jnp.float32(3), "b": [jnp.float32(5)]}, jnp.int32(7)
    cotangent = {"out": ONE, "n": np.zeros((), jax.dtypes.float0)}
    found, vjp_fn = nnx.vjp(plain, *args)
    expected, jax_vjp_fn = jax.vjp(plain, *args)
    assert_isomorphic(found, expected)
    assert_isomorphic(vjp_fn(cotangent), jax_vjp_fn(cotangent))
    assert vjp_fn(cotangent)[2].dtype == jax.dtypes.float0


def test_numbers_of_python_are_as_for_jax():
    found, expected = nnx.vjp(lambda x: 2.0 * x, 3.0), jax.vjp(lambda x: 2.0 * x, 3.0)
    assert_isomorphic((found[0], found[1](1.0)), (expected[0], expected[1](1.0)))


@pytest.mark.parametrize("argnums", [0, 1, -1, (1,), (1, 0), ()])
def test_argnums_choose_arguments(argnums):
    a, b = Cell(3.0), Cell(5.0)
    numbers = (argnums,) if isinstance(argnums, int) else argnums
    _, vjp_fn = nnx.vjp(lambda a, b: a.w[...] * b.w[...], a, b, argnums=argnums)
    found = vjp_fn(ONE)
    assert isinstance(found, tuple)
    assert [float(state["w"][...]) for state in found] == [(5.0, 3.0)[n] for n in numbers]


def test_diff_state_chooses_leaves():
    tree = Tree()
    arrays = nnx.DiffState(0, lambda path, leaf: isinstance(leaf, jax.Array))
    f = lambda t: t.array**2 + t.items[1] * t.pair[0] + t.left.w[...]  # noqa: E731
    (grads,) = nnx.vjp(f, tree, argnums=arrays)[1](ONE)
    assert grads["array"] == 46 and grads["items"][1] == 17 and grads["pair"][0] == 7
    assert "left" not in grads


def test_containers_states_and_variables_come_back_alike():
    state = nnx.State({"w": nnx.BatchStat(TWO)})
    variable = nnx.Variable(jnp.float32(3), note="a")
    batch = {"model": Cell(5.0), "x": (jnp.float32(7),)}
    f = lambda s, v, b: s["w"][...] * v[...] * b["model"].w[...] * b["x"][0]  # noqa: E731
    state_bar, variable_bar, batch_bar = nnx.vjp(f, state, variable, batch)[1](ONE)
    assert jax.tree.structure(state_bar) == jax.tree.structure(state)
    assert state_bar["w"][...] == 105
    assert type(variable_bar) is nnx.Variable and variable_bar.note == "a"
    assert variable_bar[...] == 70
    assert batch_bar["model"]["w"][...] == 42 and batch_bar["x"][0] == 30


def test_integer_leaf_is_an_error_with_its_path():
    net = {"deep": [Tree()]}
    net["deep"][0].items[0].w.value = jnp.int32(1)
    expected = r"net\['deep'\]\[0\]\.items\[0\]\.w \(Param\): its dtype is int32.*filter\)\.$"
    with pytest.raises(TypeError, match=expected):
        nnx.vjp(lambda net: net["deep"][0].array, net)
    state = nnx.State({"w": nnx.Param(ONE), "n": nnx.Variable(jnp.int32(1))})
    with pytest.raises(TypeError, match=r"cannot differentiate s\.n \(Variable\)"):
        nnx.vjp(lambda s: s["w"][...], state)
    only = nnx.DiffState(0, nnx.Param)
    assert list(nnx.vjp(lambda s: s["w"][...], state, argnums=only)[1](ONE)[0]) == ["w"]


def test_shared_variable_is_in_the_first_cotangent():
    a, b = Cell(3.0), Cell(5.0)
    b.tied, a.again = a.w, a.w
    f = lambda a, b: a.w[...] * a.again[...] * b.tied[...] * b.w[...]  # noqa: E731
    first, second = nnx.vjp(f, a, b)[1](ONE)
    assert list(first) == ["again"] and first["again"][...] == 135
    assert list(second) == ["w"] and second["w"][...] == 27


# Ways to call it.


def test_decorators_and_functions():
    @nnx.vjp(has_aux=True, argnums=1)
    def fn(c, x, *, scale="one"):
        """Doubles."""
        return c(x) * jnp.float32(2 if scale == "two" else 1), c

    cell = Cell(3.0)
    assert fn.__doc__ == "Doubles." and list(inspect.signature(fn).parameters) == [
        "c",
        "x",
        "scale",
    ]
    assert repr(fn) == "<nnx.vjp(fn)>"
    output, vjp_fn, aux = fn(cell, ONE, scale="two")
    assert output == 6 and vjp_fn(ONE) == (6,) and aux is cell
    assert fn(x=ONE, c=cell)[1](ONE) == (3,)  # by name is by position, where positions are given
    assert repr(vjp_fn) == "<vjp_fn of nnx.vjp(fn)>"
    params, x = nnx.vjp(Cell.__call__)(cell, ONE)[1](ONE)
    assert params["w"][...] == 1 and x == 3


def test_keyword_arguments_are_constants():
    f = nnx.vjp(lambda c, x, flag: c(x) if flag else x)
    (params,) = f(Cell(3.0), x=TWO, flag=True)[1](ONE)
    assert params["w"][...] == 2


def test_method_partial_and_callable_module():
    class Own(Cell):
        @nnx.vjp
        def pull(self, x):
            return self(x)

        def energy(self, x):
            return self(x)

    m = Own(3.0)
    params, x = m.pull(TWO)[1](ONE)
    assert params["w"][...] == 2 and x == 3 and int(m.n[...]) == 1
    for n, fn in enumerate((m.energy, m, functools.partial(Own.energy, m)), start=2):
        assert nnx.vjp(fn, argnums=0)(TWO)[1](ONE) == (3,) and int(m.n[...]) == n
    m.n[...] = jnp.int32(0)
    bound = functools.partial(lambda c, x, *, mode: c(x) if mode == "on" else x, m, mode="on")
    assert nnx.vjp(bound, TWO)[1](ONE) == (3,) and int(m.n[...]) == 1


def test_vjp_without_arguments_is_a_function():
    output, vjp_fn = nnx.vjp(lambda: ONE)()
    assert output == 1 and vjp_fn(ONE) == ()


# Cotangents.


def two_outputs(cell):
    return {"state": nnx.state(cell, nnx.Param), "pair": (cell.w[...] * jnp.ones(2), cell.n[...])}


FLOAT0 = np.zeros((), jax.dtypes.float0)


def test_states_among_cotangents_count_by_path():
    _, vjp_fn = nnx.vjp(two_outputs, Cell())
    pair = jnp.array([1.0, 2.0]), FLOAT0
    for state in (nnx.State({"w": nnx.Param(TWO)}), nnx.State({"w": nnx.Variable(TWO, note="a")})):
        assert vjp_fn({"state": state, "pair": pair})[0]["w"][...] == 5
    assert vjp_fn({"state": nnx.State({"w": TWO}), "pair": pair})[0]["w"][...] == 5


@pytest.mark.parametrize(
    ("state", "pair", "message"),
    [
        ({"w": ONE}, (jnp.ones(3), FLOAT0), r"output\['pair'\]\[0\] is float32\[3\]. Expected flo"),
        ({"w": ONE}, (np.ones(2, "f2"), FLOAT0), r"is float16\[2\]\. Expected float32\[2\], as"),
        ({"w": jnp.ones(2)}, (jnp.ones(2), FLOAT0), r"output\['state'\]\['w'\]\S* is float32\[2\]"),
        ({"w": ONE}, ("text", FLOAT0), r"output\['pair'\]\[0\] is str\. Expected float32\[2\]"),
        ({}, (jnp.ones(2), FLOAT0), r"has nothing for output\['state'\]\['w'\]\. Expected"),
        ({"w": ONE, "v": ONE}, (jnp.ones(2), FLOAT0), r"has a leaf for output\['state'\]\['v'\]"),
        ({"v": ONE}, (jnp.ones(2), FLOAT0), r"has structure .*'v': \*.*Expected.*'w': \*"),
        ({"w": ONE}, [jnp.ones(2), FLOAT0], r"has structure .*\[\*, \*\].*Expected.*\(\*, \*\)"),
    ],
)
def test_wrong_cotangent_is_an_error_with_its_path(state, pair, message):
    _, vjp_fn = nnx.vjp(two_outputs, Cell())
    with pytest.raises(ValueError, match=rf"nnx\.vjp\(two_outputs\): the cotangent .*{message}"):
        vjp_fn({"state": nnx.State(state), "pair": pair})


# Later, elsewhere.


def test_vjp_fn_in_later_traces():
    linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    output, vjp_fn = nnx.vjp(forward, linear, X)
    expected = vjp_fn(output)[0]
    assert_same_gradients(jax.jit(vjp_fn)(output)[0], expected)
    assert_same_gradients(nnx.jit(lambda m, ct: vjp_fn(ct)[0])(linear, output), expected)
    jacobian = jax.vmap(vjp_fn)(jnp.eye(2, dtype=jnp.float32)[:, :, None])[1]
    assert np.allclose(jacobian, jax.jacrev(linear)(X)[:, 0])


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit])
def test_vjp_fn_passes_through_jit_as_an_argument(jit):
    pull, runs = counted(lambda vjp_fn, ct: vjp_fn(ct))
    cell = Cell(3.0)
    _, vjp_fn = nnx.vjp(lambda c, x: c(x) ** 2, cell, TWO)
    jitted = jit(pull)
    for cotangent in (ONE, TWO):
        params, x = jitted(vjp_fn, cotangent)
        assert params["w"][...] == 24 * cotangent and x == 36 * cotangent
    assert len(runs) == 1
    params["w"][...] = ONE  # made at the level of the caller


def test_vjp_fn_comes_out_of_jit_as_a_result():
    make = nnx.jit(lambda c, x: nnx.vjp(lambda c, x: c(x) ** 2, c, x)[1])
    cell = Cell(3.0)
    for n in (1, 2):
        params, x = make(cell, TWO)(ONE)
        assert params["w"][...] == 24 and x == 36 and int(cell.n[...]) == n


def test_inside_and_around_other_transforms():
    eager, cell = Cell(3.0), Cell(3.0)
    xs = jnp.arange(1.0, 4.0)
    slopes = jnp.array([18.0, 72.0, 162.0])  # of (3 x)^2 in w, times 3

    def pulled(c, x):
        output, vjp_fn = nnx.vjp(lambda c, x: c(x) ** 2, c, x)
        return vjp_fn(jnp.full_like(output, 3))[0]["w"][...]

    axes = nnx.StateAxes({nnx.Param: None, ...: 0})
    cell.n = nnx.Variable(jnp.zeros(3, jnp.int32))
    assert nnx.vmap(pulled, in_axes=(axes, 0))(cell, xs).tolist() == slopes.tolist()
    assert cell.n[...].tolist() == [1, 1, 1]
    carry = nnx.StateAxes({nnx.Param: None, ...: nnx.Carry})
    assert nnx.scan(pulled, in_axes=(carry, 0), out_axes=0)(eager, xs).tolist() == slopes.tolist()
    assert int(eager.n[...]) == 3
    for around in (nnx.jit, nnx.remat):
        assert around(pulled)(eager, ONE) == 18
        inside = nnx.vjp(around(lambda c, x: c(x) ** 2), eager, ONE)
        assert inside[1](ONE)[0]["w"][...] == 6
    assert int(eager.n[...]) == 7


def test_second_derivatives_are_those_of_jax():
    def pulled(c, x):
        return nnx.vjp(lambda c, x: c(x) ** 3, c, x)[1](ONE)[1]  # 3 w^3 x^2

    def by_jax(w, x):
        return jax.vjp(lambda w, x: (w * x) ** 3, w, x)[1](ONE)[1]

    w, x = jnp.float32(3), TWO
    params, x_bar = nnx.vjp(pulled, Cell(3.0), x)[1](ONE)
    expected = jax.vjp(by_jax, w, x)[1](ONE)
    assert (params["w"][...], x_bar) == expected == (324, 324)
    assert nnx.grad(pulled)(Cell(3.0), x)["w"][...] == 324
    twice = nnx.vjp(nnx.grad(lambda c, x: c(x) ** 3), Cell(3.0), x)
    assert twice[0]["w"][...] == 216  # 3 w^2 x^3
    assert twice[1](nnx.State({"w": nnx.Param(ONE)}))[0]["w"][...] == 144


def test_under_plain_transforms_of_jax():
    cell = Cell(3.0)

    def pulled(x):
        return nnx.vjp(lambda c, x: c.w[...] ** 2 * x, cell, x)[1](ONE)[0]["w"][...]

    assert jax.jit(pulled)(ONE) == 6 and jax.grad(pulled)(ONE) == 6
    assert jax.vmap(pulled)(jnp.arange(3.0)).tolist() == [0, 6, 12]
    assert jax.lax.map(pulled, jnp.arange(3.0)).tolist() == [0, 6, 12]
    closes_over = lambda x: nnx.vjp(lambda x: cell.w[...] * x**2, x)[1](ONE)[0]  # noqa: E731
    assert jax.vmap(closes_over)(jnp.arange(3.0)).tolist() == [0, 6, 12]


class Noted(Cell):
    def __call__(self, x):
        y = self.perturb("y", self.w[...] * x)
        self.sow(nnx.Intermediate, "y", y)
        return y * y


def test_capture_works_through_vjp():
    def f(c, x):
        output, vjp_fn = nnx.vjp(lambda c, x: c(x), c, x)
        return output, vjp_fn(ONE)[1]

    cell = Noted(3.0)
    (output, x_bar), sown, zeros = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(cell, TWO)
    assert (output, x_bar) == (36, 36) and sown["y"][...] == (6,) and zeros["y"][...] == 0
    run = nnx.capture(f, init=nnx.State({"y": nnx.Perturbation(ONE)}))
    assert run(cell, TWO) == (49, 42)
    of_output = jax.grad(lambda p: nnx.capture(f, init=p)(cell, TWO)[0])(zeros)
    of_x_bar = jax.grad(lambda p: nnx.capture(f, init=p)(cell, TWO)[1])(zeros)
    assert of_output["y"][...] == 12 and of_x_bar["y"][...] == 6


def names(f, x):
    text = jax.jit(f).lower(x).as_text(debug_info=True)
    return set(re.findall(r'loc\("jit\(<lambda>\)/([^"]*)/dot_general"', text))


def test_operations_of_both_passes_carry_the_names_of_modules():
    net = nnx.view(Net(), deterministic=True, use_running_average=True)
    expected = names(lambda x: jax.vjp(net, x)[1](jnp.ones((2, 1))), X)
    assert "transpose(jvp(Net))/layers[0]" in expected
    found = names(lambda x: nnx.vjp(forward, net, x)[1](jnp.ones((2, 1)))[1], X)
    assert found == names(lambda x: nnx.vjp(net, x)[1](jnp.ones((2, 1))), X) == expected


class Outer(nnx.Module):
    def __init__(self):
        self.inner = [nnx.Linear(3, 3, rngs=nnx.Rngs(0))]

    def __call__(self, x):
        y, vjp_fn = nnx.vjp(lambda m, x: m(x) ** 2, self.inner[0], x)
        return vjp_fn(y)[1]


def test_operations_of_a_part_carry_its_path():
    outer = Outer()
    assert names(lambda x: outer(x), X) == {"Outer/jvp(inner[0])", "Outer/transpose(jvp(inner[0]))"}


def test_nothing_of_a_call_stays():
    counts = []
    for n in range(4):
        output, vjp_fn = nnx.vjp(forward, Cell(), ONE)
        vjp_fn(output)
        del vjp_fn
        gc.collect()
        if n in (1, 3):
            counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[1]


@examples(0.3)
@given(blueprints(), losses)
def test_vjp_has_the_effects_of_the_call_and_the_gradients_of_jax(blueprint, loss):
    eager, lifted = blueprint.root, blueprint.root
    expected = loss(eager)
    output, vjp_fn, aux = nnx.vjp(loss, lifted, has_aux=True)
    assert_isomorphic((eager, expected), (lifted, (output, aux)))
    gradients = by_hand(loss, (blueprint.root,), nnx.Param)
    assert_equal_gradients({path[1:]: g for path, g in gradients.items()}, vjp_fn(ONE)[0])

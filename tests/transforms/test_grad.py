"""grad and value_and_grad of functions of objects, against `jax.grad` of hand-split ones."""

import functools
import gc
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.errors import TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.strategies import Box
from tests.transforms.samples import Cell, Tree

ONE = jnp.float32(1)
X = jnp.ones((2, 3), jnp.float32)


class Net(nnx.Module):
    """Parameters at two depths, statistics, dropout, and an array of its own."""

    def __init__(self, seed=0):
        rngs = nnx.Rngs(seed)
        self.layers = [nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)]
        self.norm = nnx.BatchNorm(3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.scale = jnp.float32(2)

    def __call__(self, x):
        return self.layers[1](self.drop(self.norm(self.layers[0](x)))) * self.scale


def loss(net, x):
    return (net(x) ** 2).mean()


def flat(state):
    return {path: np.asarray(leaf.get_value()) for path, leaf in state.flat_state()}


def assert_same_gradients(found, expected):
    found, expected = flat(found), flat(expected)
    assert found.keys() == expected.keys()
    for path in found:
        assert np.allclose(found[path], expected[path], rtol=1e-5), path


def by_hand(fn, model, *args, wrt=nnx.Param):
    graphdef, wanted, rest = nnx.split(model, wrt, ...)
    return jax.value_and_grad(lambda w: fn(nnx.merge(graphdef, w, rest), *args))(wanted)


# Values and effects.


def test_gradients_are_those_of_a_hand_split_grad():
    value, expected = by_hand(loss, Net(), X)
    assert_same_gradients(nnx.grad(loss)(Net(), X), expected)
    found_value, found = nnx.value_and_grad(loss)(Net(), X)
    assert_same_gradients(found, expected)
    assert np.allclose(found_value, value)


def test_state_changes_in_the_loss_reach_the_caller():
    eager, net = Net(), Net()
    loss(eager, X)
    nnx.grad(loss)(net, X)
    assert int(net.drop.rngs.count[...]) == int(eager.drop.rngs.count[...]) == 1
    for found, expected in ((net.norm.mean, eager.norm.mean), (net.norm.var, eager.norm.var)):
        assert np.allclose(found[...], expected[...]) and found[...].any()


def test_gradient_changes_no_parameter():
    net = Net()
    before = jax.tree.leaves(nnx.state(net, nnx.Param))
    nnx.grad(loss)(net, X)
    after = jax.tree.leaves(nnx.state(net, nnx.Param))
    assert all(a is b for a, b in zip(before, after, strict=True))


def test_gradient_is_a_state_with_the_tree_of_the_parameters():
    net = Net()
    grads, params = nnx.grad(loss)(net, X), nnx.state(net, nnx.Param)
    assert isinstance(grads, nnx.State)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert type(grads["layers"][0]["kernel"]) is nnx.Param
    new = jax.tree.map(lambda p, g: p - g, params, grads)
    nnx.update(net, new)
    assert net.layers[0].kernel[...] is new["layers"][0]["kernel"][...]


def test_gradient_keeps_the_metadata_of_the_parameters():
    cell = Cell()
    cell.w.set_metadata("note", "a")
    assert nnx.grad(lambda c: c.w[...] ** 2)(cell)["w"].note == "a"


def test_gradient_runs_no_hooks():
    seen = []
    cell = Cell()
    hook = lambda variable, value: (seen.append(1), value)[1]  # noqa: E731
    cell.w = nnx.Param(jnp.float32(2), on_set_value=hook, on_create_value=hook)
    seen.clear()
    assert nnx.grad(lambda c: c.w[...] ** 2)(cell)["w"][...] == 4
    assert seen == []


def test_hooks_of_reading_and_writing_run_inside():
    cell = Cell()
    cell.w = nnx.Param(jnp.float32(2), on_get_value=lambda variable, value: value * 3.0)
    cell.n = nnx.Variable(jnp.float32(0), on_set_value=lambda variable, value: value + 1.0)

    def fn(c):
        c.n[...] = ONE
        return c.w[...] ** 2

    assert nnx.grad(fn)(cell)["w"].get_raw_value() == 36  # d (3w)^2 / dw = 18 w
    assert cell.n.get_raw_value() == 2


# has_aux.


def test_aux_comes_back_beside_the_gradient():
    cell = Cell(3.0)

    def fn(c):
        return c.w[...] ** 2, {"cell": c, "w": c.w, "double": 2.0 * c.w[...]}

    grads, aux = nnx.grad(fn, has_aux=True)(cell)
    assert grads["w"][...] == 6 and aux["cell"] is cell and aux["w"] is cell.w
    assert aux["double"] == 6
    (value, aux), grads = nnx.value_and_grad(fn, has_aux=True)(cell)
    assert value == 9 and aux["cell"] is cell and grads["w"][...] == 6


def test_loss_and_aux_may_be_a_list():
    fn = lambda x: [x * x, x]  # noqa: E731
    found = nnx.value_and_grad(fn, has_aux=True)(ONE)
    assert_isomorphic(found, jax.value_and_grad(fn, has_aux=True)(ONE))
    assert_isomorphic(nnx.grad(fn, has_aux=True)(ONE), jax.grad(fn, has_aux=True)(ONE))


def test_aux_may_hold_what_is_no_array():
    grads, aux = nnx.grad(lambda c: (c.w[...], ("text", None, 3)), has_aux=True)(Cell())
    assert aux == ("text", None, 3) and grads["w"][...] == 1


@pytest.mark.parametrize("result", [lambda c: c.w[...], lambda c: (c.w[...], 1, 2)])
def test_aux_that_is_missing_is_an_error(result):
    with pytest.raises(TypeError, match=r"nnx\.grad\(<lambda>\) with has_aux=True expected.*aux"):
        nnx.grad(lambda c: result(c), has_aux=True)(Cell())


@pytest.mark.parametrize(
    "result", [lambda c: (c.w[...], 1), lambda c: c, lambda c: None, lambda c: c.w]
)
def test_loss_that_is_no_scalar_is_an_error(result):
    cell = Cell()
    with pytest.raises(TypeError, match=r"nnx\.grad\(<lambda>\) expected a scalar loss"):
        nnx.grad(lambda c: result(c))(cell)
    assert_isomorphic(Cell(), cell)


def test_loss_that_is_a_vector_is_an_error_and_changes_nothing():
    cell = Cell()
    with pytest.raises(TypeError, match="scalar"):
        nnx.grad(lambda c: c(jnp.ones(2)))(cell)
    assert_isomorphic(Cell(), cell)


# What is differentiated.


def test_plain_arguments_are_as_for_jax():
    def fn(x, y, z=2.0):
        return x * y["a"] ** 2 * y["b"] * z

    args = jnp.float32(3), {"a": jnp.float32(5), "b": jnp.float32(7)}
    for argnums in (0, 1, (0, 1), (1, 0), -1, (-2,)):
        found = nnx.grad(lambda x, y: fn(x, y), argnums=argnums)(*args)
        expected = jax.grad(lambda x, y: fn(x, y), argnums=argnums)(*args)
        assert_isomorphic(found, expected)


def test_several_arguments_objects_and_arrays():
    def fn(a, x, b):
        return a.w[...] * b.w[...] ** 2 * x

    a, b, x = Cell(2.0), Cell(3.0), jnp.float32(5)
    da, dx, db = nnx.grad(fn, argnums=(0, 1, 2))(a, x, b)
    assert da["w"][...] == 45 and dx == 18 and db["w"][...] == 60
    assert nnx.grad(fn, argnums=-1)(a, x, b)["w"][...] == 60
    assert isinstance(nnx.grad(fn, argnums=(2,))(a, x, b), tuple)


def test_arguments_by_name_count_by_position():
    def fn(a, x):
        return a.w[...] * x

    assert nnx.grad(fn)(x=ONE, a=Cell())["w"][...] == 1
    assert nnx.grad(fn, argnums=1)(Cell(), x=ONE) == 2


def test_objects_inside_of_containers():
    def fn(batch):
        model, (other,) = batch["model"], batch["rest"]
        return model.w[...] * other.w[...] * batch["x"]

    batch = {"model": Cell(2.0), "rest": (Cell(3.0),), "x": jnp.float32(5)}
    grads = nnx.grad(fn)(batch)
    assert grads["model"]["w"][...] == 15 and grads["rest"][0]["w"][...] == 10
    assert grads["x"] == 6


def test_objects_inside_of_a_registered_pytree():
    grads = nnx.grad(lambda box: box.first.w[...] * box.second)(Box(Cell(2.0), jnp.float32(3)))
    assert grads.first["w"][...] == 3 and grads.second == 2


def test_variables_and_states_are_differentiated_themselves():
    v, state = nnx.Param(jnp.float32(2)), nnx.state(Cell(3.0), nnx.Param)
    found = nnx.grad(lambda v, s: v[...] ** 2 * s["w"][...], argnums=(0, 1))(v, state)
    assert type(found[0]) is nnx.Param and found[0][...] == 12
    assert jax.tree.structure(found[1]) == jax.tree.structure(state)
    assert found[1]["w"][...] == 4


def test_state_of_all_kinds_is_differentiated_whole():
    state = nnx.State({"a": nnx.Param(ONE), "b": {"c": nnx.BatchStat(jnp.float32(2))}})
    grads = nnx.grad(lambda s: s["a"][...] * s["b"]["c"][...])(state)
    assert grads["a"][...] == 2 and grads["b"]["c"][...] == 1
    assert type(grads["b"]["c"]) is nnx.BatchStat


def test_values_that_are_pytrees():
    cell = Cell()
    cell.w.value = {"a": jnp.float32(2), "b": [jnp.float32(3)]}
    grads = nnx.grad(lambda c: c.w.value["a"] * c.w.value["b"][0])(cell)
    assert grads["w"].get_value() == {"a": 3, "b": [2]}


def test_only_parameters_of_an_object_unless_told():
    net = Net()
    kinds = {type(leaf) for _, leaf in nnx.grad(loss)(net, X).flat_state()}
    assert kinds == {nnx.Param}
    class_of_its_own = nnx.grad(lambda c: c.w[...] ** 2)(WithLora())
    assert set(class_of_its_own) == {"lora", "w"}


class WithLora(nnx.Module):
    def __init__(self):
        self.w, self.lora = nnx.Param(ONE), nnx.LoRAParam(ONE)
        self.stat = nnx.BatchStat(ONE)


def test_diff_state_chooses_leaves():
    net = Net()
    for wrt in (
        nnx.PathContains("norm"),
        nnx.All(nnx.Param, nnx.PathContains("bias")),
        (nnx.BatchStat, nnx.PathContains("kernel")),
        lambda path, leaf: path[-1] == "scale",
    ):
        found = nnx.grad(still(loss), argnums=nnx.DiffState(0, wrt))(net, X)
        assert len(found.flat_state()) > 0
        assert jax.tree.structure(found) == jax.tree.structure(nnx.state(net, wrt))
        graphdef, wanted, rest = nnx.split(net, wrt, ...)
        merged = lambda w, g=graphdef, r=rest: still(loss)(nnx.merge(g, w, r), X)  # noqa: E731
        expected = jax.grad(merged)(wanted)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
            assert np.allclose(a, b, rtol=1e-5)


def still(fn):
    """`fn` of a copy that neither drops out nor updates statistics."""

    def run(net, x):
        net = nnx.view(net, deterministic=True, use_running_average=True)
        return fn(net, x)

    return run


def test_diff_state_gives_arrays_that_are_attributes():
    arrays = nnx.DiffState(0, lambda path, leaf: isinstance(leaf, jax.Array))
    fn = lambda t: t.array**2 + t.items[1] * t.pair[0]  # noqa: E731
    grads = nnx.grad(fn, argnums=arrays)(Tree())
    assert grads["array"] == 46 and grads["items"][1] == 17 and grads["pair"][0] == 7


def test_several_diff_states():
    a, b = Cell(2.0), Cell(3.0)
    b.stat = nnx.BatchStat(jnp.float32(5))
    argnums = (nnx.DiffState(1, nnx.BatchStat), nnx.DiffState(0, nnx.Param))
    db, da = nnx.grad(lambda a, b: a.w[...] * b.w[...] * b.stat[...], argnums=argnums)(a, b)
    assert list(db) == ["stat"] and db["stat"][...] == 6
    assert list(da) == ["w"] and da["w"][...] == 15


def test_several_diff_states_of_one_argument():
    cell = Cell(2.0)
    cell.stat = nnx.BatchStat(jnp.float32(5))
    argnums = (nnx.DiffState(0, nnx.Param), nnx.DiffState(-1, (nnx.BatchStat, nnx.Param)))
    params, stats = nnx.grad(lambda c: c.w[...] * c.stat[...], argnums=argnums)(cell)
    assert list(params) == ["w"] and list(stats) == ["stat"]  # what was taken is not taken again
    assert params["w"][...] == 5 and stats["stat"][...] == 2


def test_diff_state_of_a_state_and_of_a_variable():
    state = nnx.State({"a": nnx.Param(ONE), "n": nnx.Variable(jnp.int32(3))})
    only = nnx.DiffState(0, nnx.Param)
    grads = nnx.grad(lambda s: s["a"][...] ** 2, argnums=only)(state)
    assert list(grads) == ["a"] and grads["a"][...] == 2
    assert nnx.grad(lambda v: v[...] ** 2, argnums=only)(nnx.Param(ONE))[...] == 2


def test_filter_that_takes_nothing_gives_an_empty_state():
    grads = nnx.grad(lambda c: c.w[...], argnums=nnx.DiffState(0, nnx.Cache))(Cell())
    assert isinstance(grads, nnx.State) and len(grads) == 0


@pytest.mark.parametrize("argnums", [3, -3, (0, 5), nnx.DiffState(2, ...)])
def test_argnums_out_of_range_is_an_error(argnums):
    with pytest.raises(ValueError, match=r"nnx\.grad\(<lambda>\): argnums has -?\d, but the call"):
        nnx.grad(lambda x, y: x * y, argnums=argnums)(ONE, ONE)


@pytest.mark.parametrize(
    "argnums", [(0, 0), (0, -2), (0, nnx.DiffState(0, ...)), (nnx.DiffState(0, ...), 0)]
)
def test_argument_named_twice_is_an_error(argnums):
    with pytest.raises(ValueError, match=r"argnums names argument 0 twice"):
        nnx.grad(lambda x, y: x * y, argnums=argnums)(ONE, ONE)


# Sharing.


def test_variable_shared_inside_of_an_object_has_one_gradient():
    net = Cell(3.0)
    net.tied = net.w
    grads = nnx.grad(lambda c: c.w[...] * c.tied[...])(net)
    assert list(grads) == ["tied"] and grads["tied"][...] == 6
    assert jax.tree.structure(grads) == jax.tree.structure(nnx.state(net, nnx.Param))


def test_variable_shared_by_two_arguments_is_in_the_first_gradient():
    a, b = Cell(3.0), Cell(5.0)
    b.tied = a.w
    da, db = nnx.grad(lambda a, b: a.w[...] * b.tied[...] * b.w[...], argnums=(0, 1))(a, b)
    assert da["w"][...] == 30 and list(db) == ["w"] and db["w"][...] == 9


def test_object_given_twice_is_in_the_first_gradient():
    a = Cell(3.0)
    first, second = nnx.grad(lambda a, b: a.w[...] * b.w[...], argnums=(0, 1))(a, a)
    assert first["w"][...] == 6 and len(second) == 0
    state = nnx.state(a, nnx.Param)
    first, second = nnx.grad(lambda s, t: s["w"][...] * t["w"][...], argnums=(0, 1))(state, state)
    assert first["w"][...] == 6 and len(second) == 0


def test_shared_with_an_argument_that_is_not_differentiated():
    a, b = Cell(3.0), Cell(5.0)
    b.w = a.w
    assert nnx.grad(lambda b, a: a.w[...] * b.w[...], argnums=1)(b, a)["w"][...] == 6


# Dtypes.


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad])
def test_integer_leaf_is_an_error_with_its_path(transform):
    net = {"deep": [Tree()]}
    net["deep"][0].items[0].w.value = jnp.int32(1)
    expected = r"cannot differentiate net\['deep'\]\[0\]\.items\[0\]\.w \(Param\).*int32.*DiffState"
    with pytest.raises(TypeError, match=expected):
        transform(lambda net: net["deep"][0].array)(net)


def test_integer_part_of_a_value_is_an_error_with_its_path():
    cell = Cell()
    cell.w.value = {"a": ONE, "b": jnp.int32(1)}
    with pytest.raises(TypeError, match=r"cannot differentiate c\.w \(Param\): its dtype is int32"):
        nnx.grad(lambda c: c.w.value["a"])(cell)


def test_plain_integer_argument_is_the_error_of_jax():
    with pytest.raises(TypeError, match="int32"):
        nnx.grad(lambda n: n * 1.0)(jnp.int32(1))


def test_allow_int_gives_what_jax_gives():
    cell = Cell()
    everything = nnx.DiffState(0, ...)
    grads = nnx.grad(lambda c: c.w[...] * 3.0, argnums=everything, allow_int=True)(cell)
    assert grads["w"][...] == 3 and grads["n"].get_value().dtype == jax.dtypes.float0


def test_holomorphic():
    cell = Cell()
    cell.w.value = jnp.complex64(1 + 2j)
    fn = lambda c: c.w[...] ** 2  # noqa: E731
    assert nnx.grad(fn, holomorphic=True)(cell)["w"][...] == 2 + 4j
    with pytest.raises(TypeError, match="complex"):
        nnx.grad(fn)(cell)


def test_gradients_have_the_dtype_of_the_parameters():
    cell = Cell()
    cell.w.value = jnp.bfloat16(2)
    grads = nnx.grad(lambda c: (c.w[...] ** 2).astype(jnp.float32))(cell)
    assert grads["w"].dtype == jnp.bfloat16


# What may be differentiated, and where.


def test_decorator_method_partial_and_callable_module():
    class Own(Cell):
        @nnx.grad
        def slope(self, x):
            return self(x)

        def energy(self, x):
            return self(x)

    m = Own(3.0)
    assert m.slope(ONE)["w"][...] == 1 and int(m.n[...]) == 1
    assert nnx.grad(m.energy)(ONE) == 3 and int(m.n[...]) == 2
    assert nnx.grad(m)(ONE) == 3 and int(m.n[...]) == 3
    assert nnx.grad(functools.partial(Own.energy, m))(ONE) == 3 and int(m.n[...]) == 4
    bound = functools.partial(lambda c, x, *, mode: c(x) if mode == "on" else x, m, mode="on")
    assert nnx.grad(bound)(ONE) == 3 and int(m.n[...]) == 5

    @nnx.value_and_grad(has_aux=True)
    def fn(c):
        """Doubles."""
        return 2.0 * c.w[...], c

    assert fn.__doc__ == "Doubles." and list(inspect.signature(fn).parameters) == ["c"]
    assert repr(fn) == "<nnx.value_and_grad(fn)>"
    assert fn(m)[0] == (6, m)


def test_inside_and_outside_of_jit_is_the_same():
    net = Net()
    expected = nnx.grad(loss)(Net(), X)
    assert_same_gradients(nnx.jit(nnx.grad(loss))(Net(), X), expected)
    assert_same_gradients(nnx.grad(nnx.jit(loss))(Net(), X), expected)
    assert_same_gradients(nnx.jit(lambda m: nnx.grad(nnx.jit(loss))(m, X))(net), expected)
    assert int(net.drop.rngs.count[...]) == 1


def test_gradient_of_a_gradient():
    def slope(c):
        return nnx.grad(lambda c: c.w[...] ** 3)(c)["w"][...]

    assert nnx.grad(slope)(Cell(2.0))["w"][...] == 12
    assert nnx.grad(lambda c: nnx.jit(slope)(c))(Cell(2.0))["w"][...] == 12
    assert nnx.jit(nnx.grad(nnx.jit(slope)))(Cell(2.0))["w"][...] == 12


def test_effects_of_an_inner_gradient_arrive_through_all_levels():
    def outer(c, x):
        grads = nnx.grad(lambda c, x: c(x) ** 2)(c, x)
        return c(x) + grads["w"][...]

    eager, lifted = Cell(), Cell()
    outer(eager, ONE)
    nnx.grad(outer)(lifted, ONE)
    assert_isomorphic(eager, lifted)
    nnx.jit(nnx.grad(nnx.jit(outer)))(lifted, ONE)
    outer(eager, ONE)
    assert_isomorphic(eager, lifted)


def test_under_plain_transforms_of_jax():
    cell = Cell(3.0)
    slope = lambda x: nnx.grad(lambda c, x: c.w[...] ** 2 * x)(cell, x)["w"][...]  # noqa: E731
    assert jax.jit(slope)(ONE) == 6
    assert jax.grad(slope)(ONE) == 6
    assert jax.vmap(slope)(jnp.arange(3.0)).tolist() == [0, 6, 12]
    assert jax.lax.map(slope, jnp.arange(3.0)).tolist() == [0, 6, 12]


def test_write_at_another_level_is_an_error_with_the_path():
    cell = Cell()
    with pytest.raises(TraceLevelError, match=r"nnx\.grad\(<lambda>\) changed c\.n \(Variable\)"):
        jax.vmap(lambda x: nnx.grad(lambda c, x: c(x))(cell, x)["w"][...])(jnp.ones(2))
    assert int(cell.n[...]) == 0


def test_plain_grad_of_a_merged_model_may_write():
    net = Net()
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)
    grads = jax.grad(lambda p: loss(nnx.merge(graphdef, p, rest), X))(params)
    assert_same_gradients(grads, nnx.grad(loss)(Net(), X))
    assert int(net.drop.rngs.count[...]) == 0


def test_custom_derivatives_and_stop_gradient():
    @jax.custom_vjp
    def twice(x):
        return x

    twice.defvjp(lambda x: (x, None), lambda _, g: (2.0 * g,))
    assert nnx.grad(lambda c: twice(c.w[...]))(Cell())["w"][...] == 2
    assert nnx.grad(lambda c: jax.lax.stop_gradient(c.w[...]))(Cell())["w"][...] == 0


def test_parameter_written_in_the_loss_is_differentiated_at_its_first_value():
    def fn(c):
        c.w[...] = c.w[...] * 2.0
        return c.w[...] ** 2

    cell = Cell(3.0)
    value, grads = nnx.value_and_grad(fn)(cell)
    assert value == 36 and grads["w"][...] == 24 and cell.w[...] == 6


def test_structure_may_change_in_the_loss():
    def fn(c):
        c.extra = nnx.Param(c.w[...] * 2.0)
        c.mode = "seen"
        return c.extra[...] ** 2

    cell = Cell(3.0)
    grads = nnx.grad(fn)(cell)
    assert list(grads) == ["w"] and grads["w"][...] == 24
    assert cell.extra[...] == 6 and cell.mode == "seen"


def test_nothing_of_a_call_stays():
    counts = []
    for n in range(8):
        nnx.grad(loss)(Net(), X)
        gc.collect()
        if n in (2, 7):
            counts.append(len(jax.live_arrays()))
    assert counts[0] == counts[1]

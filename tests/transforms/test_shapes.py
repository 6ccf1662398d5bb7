"""eval_shape and make_jaxpr: what a function would do, without doing it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite._core.errors import TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import Cell, Tree

X = jax.ShapeDtypeStruct((5, 3), jnp.float32)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def linear(seed=0):
    return nnx.Linear(3, 4, rngs=nnx.Rngs(seed))


def test_plain_functions_are_as_for_jax():
    fn = lambda x, y: {"sum": x + y, "pair": (x.T, y.shape)}  # noqa: E731
    found, expected = nnx.eval_shape(fn, X, X), jax.eval_shape(fn, X, X)
    assert shapes(found["sum"]) == shapes(expected["sum"])
    assert found["pair"][0].shape == (3, 5)


def test_module_that_is_made_is_abstract_and_has_the_structure_of_a_concrete_one():
    abstract, concrete = nnx.eval_shape(linear), linear()
    assert type(abstract.kernel.get_value()) is jax.ShapeDtypeStruct
    assert nnx.graphdef(abstract) is nnx.graphdef(concrete)
    assert jax.tree.structure(abstract) == jax.tree.structure(concrete)
    assert shapes(jax.tree.leaves(abstract)) == shapes(jax.tree.leaves(concrete))


def test_class_partial_and_lambda_make_the_same():
    by_class = nnx.eval_shape(Cell)
    by_partial = nnx.eval_shape(functools.partial(nnx.Linear, 3, 4, rngs=nnx.Rngs(0)))
    assert by_class.w.get_value() == jax.ShapeDtypeStruct((), jnp.float32)
    assert nnx.graphdef(by_partial) is nnx.graphdef(linear())


def test_every_form_of_attribute_is_abstract():
    abstract, concrete = nnx.eval_shape(Tree), Tree()
    assert nnx.graphdef(abstract) is nnx.graphdef(concrete)
    assert abstract.again is abstract.left and abstract.parent is abstract
    assert abstract.items[1] == jax.ShapeDtypeStruct((), jnp.float32)
    assert abstract.both.get_value()["y"][1] == jax.ShapeDtypeStruct((), jnp.float32)
    assert nnx.state(abstract).flat_state().paths == nnx.state(concrete).flat_state().paths


def test_abstract_module_is_filled_by_update_and_by_merge():
    abstract, concrete = nnx.eval_shape(linear), linear()
    nnx.update(abstract, nnx.state(concrete))
    assert (abstract(jnp.ones((1, 3))) == concrete(jnp.ones((1, 3)))).all()
    graphdef, _ = nnx.split(nnx.eval_shape(linear))
    assert nnx.merge(graphdef, nnx.state(concrete)).kernel[...] is concrete.kernel[...]


def test_call_changes_no_argument():
    m, before = Tree(), None
    before = jax.tree.leaves(m)

    def f(m, x):
        m.left(x)
        m.extra = nnx.Param(x)
        m.items.append(m.array * x)
        m.mode = "seen"
        return m.left.w[...] * x

    assert nnx.eval_shape(f, m, X).shape == (5, 3)
    assert_isomorphic(Tree(), m)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(m), strict=True))


def test_failed_call_changes_no_argument():
    def f(m):
        m.items.append(m.array)
        raise ZeroDivisionError("inside")

    m = Tree()
    with pytest.raises(ZeroDivisionError, match="inside"):
        nnx.eval_shape(f, m)
    assert_isomorphic(Tree(), m)


def test_objects_in_the_result_are_fresh_and_changed():
    def f(m, x):
        m.w.value = x
        return {"m": m, "w": m.w, "out": x}

    m = Cell()
    out = nnx.eval_shape(f, m, X)
    assert out["m"] is not m and out["m"].w is out["w"]
    assert out["w"].shape == (5, 3) and out["out"].shape == (5, 3)
    assert out["m"].n.get_value() == jax.ShapeDtypeStruct((), jnp.int32)


def test_objects_in_the_result_have_their_new_structure():
    def f(m):
        m.extra = [Cell(), m.array]
        m.mode = "seen"
        return m, m.extra[0]

    m = Tree()
    out, extra = nnx.eval_shape(f, m)
    f(m)
    assert nnx.graphdef(out) is nnx.graphdef(m) and out.extra[0] is extra
    assert out.mode == "seen" and out.again is out.left


def test_states_and_variables_are_arguments_and_results():
    state, v = nnx.state(Cell()), nnx.Param(jnp.ones(2))

    def f(state, v):
        v.value = jnp.ones(3)
        return state, v, nnx.state(Cell())

    out, new, other = nnx.eval_shape(f, state, v)
    assert out["w"].get_value() == jax.ShapeDtypeStruct((), jnp.float32)
    assert type(new) is nnx.Param and new.shape == (3,) and v.shape == (2,)
    assert jax.tree.structure(other) == jax.tree.structure(state)


def test_abstract_arguments_inside_of_objects():
    out = nnx.eval_shape(lambda m, x: m(x), nnx.eval_shape(linear), X)
    assert out == jax.ShapeDtypeStruct((5, 4), jnp.float32)


def test_modules_and_methods_and_keywords():
    m = Cell()
    assert nnx.eval_shape(m, X).shape == (5, 3)
    assert nnx.eval_shape(m.__call__, x=X).shape == (5, 3)
    assert nnx.eval_shape(nnx.jit(lambda m, x: m(x)), m, X).shape == (5, 3)
    assert nnx.eval_shape(nnx.grad(lambda m: m.w[...] ** 2), m)["w"].shape == ()
    assert int(m.n[...]) == 0


def test_random_streams_of_the_caller_stay():
    rngs = nnx.Rngs(0)
    nnx.eval_shape(lambda rngs: nnx.Linear(3, 4, rngs=rngs), rngs)
    assert int(rngs.default.count[...]) == 0


def test_inside_of_jit_and_of_itself():
    out = nnx.jit(lambda x: jnp.zeros(nnx.eval_shape(linear).kernel.shape) + x)(jnp.float32(1))
    assert out.shape == (3, 4)
    assert nnx.eval_shape(lambda: nnx.eval_shape(Cell) and jnp.ones(2)).shape == (2,)


def test_write_to_an_object_closed_over_is_an_error():
    m = Cell()

    def f():
        m.n[...] += jnp.int32(1)

    with pytest.raises(TraceLevelError, match=r"nnx\.eval_shape\(f\) closes over m\.n\. Cannot"):
        nnx.eval_shape(f)
    assert int(m.n[...]) == 0


# What is no array is given as it is.


def test_sizes_flags_and_texts_are_python_values():
    assert nnx.eval_shape(nnx.Linear, 3, 4, rngs=nnx.Rngs(0)).kernel.shape == (3, 4)
    f = lambda x, n, *, up, how: jnp.tile(x, n) if up and how == "tile" else x  # noqa: E731
    assert nnx.eval_shape(f, X, 2, up=True, how="tile").shape == (5, 6)
    assert nnx.eval_shape(lambda n: (n, n > 1), 2)[0].dtype == jnp.int32


# Layers with state.


class Net(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.dropout = nnx.BatchNorm(3, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)
        self.table = nnx.data([np.ones(2, np.float32)])

    def __call__(self, x):
        return self.dropout(self.norm(x)) + self.table[0].sum()


def test_batch_norm_and_dropout():
    net = Net(nnx.Rngs(0))
    before = jax.tree.leaves(net)
    assert nnx.eval_shape(net, X) == jax.ShapeDtypeStruct((5, 3), jnp.float32)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(net), strict=True))
    abstract = nnx.eval_shape(Net, nnx.Rngs(0))
    assert nnx.graphdef(abstract) is nnx.graphdef(net)
    assert abstract.table[0].shape == (2,)
    assert nnx.eval_shape(lambda net, x: net(x), abstract, X).shape == (5, 3)


# Shardings.


def placed(*names, **metadata):
    return nnx.Param(jnp.ones((2, 4)), out_sharding=names, **metadata)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_shapes_in_variables_have_a_sharding_under_a_mesh(kind):
    def make():
        both = nnx.Variable({"a": jnp.ones(2)})
        return {"v": placed(None, "d"), "w": nnx.Param(jnp.ones(2)), "both": both}

    mesh = jax.make_mesh((1,), ("d",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        abstract = nnx.eval_shape(make)
        again = nnx.eval_shape(lambda v, w: (v, w), abstract["v"], make()["v"])
        jitted = nnx.jit(make).eval_shape()
    expected = NamedSharding(mesh.abstract_mesh, P(None, "d"))
    for v in (abstract["v"], jitted["v"], *again):
        assert v.get_value() == jax.ShapeDtypeStruct((2, 4), jnp.float32, sharding=expected)
    assert abstract["w"].get_value().sharding.is_fully_replicated
    assert type(abstract["both"].value["a"]) is jax.ShapeDtypeStruct


def test_mesh_of_a_variable_and_no_mesh_at_all():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    v = nnx.eval_shape(lambda: placed("d", None, mesh=mesh))
    assert v.get_value().sharding == NamedSharding(mesh, P("d", None))
    v = nnx.eval_shape(lambda: placed("logical", None))
    assert v.get_value().sharding is None and v.out_sharding == ("logical", None)
    with jax.set_mesh(mesh), nnx.use_eager_sharding(False):
        v = nnx.eval_shape(lambda: placed("logical", None))
    assert v.get_value().sharding is None


def test_shapes_in_a_state_have_a_sharding():
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh):
        state = nnx.eval_shape(lambda: nnx.state({"v": placed("d", None)}))
    assert state["v"].get_value().sharding.spec == P("d", None)


# make_jaxpr.


def test_jaxpr_is_that_of_the_function_split_by_hand():
    def f(m, x):
        m.w[...] = m.w[...] * x
        return m.w[...] + x, m

    def by_hand(n, w, x):
        w = w * x
        return w + x, w

    made = nnx.make_jaxpr(f)(Cell(), jnp.float32(3))
    assert str(made) == str(jax.make_jaxpr(by_hand)(0, jnp.float32(2), jnp.float32(3)))


def test_jaxpr_takes_arrays_of_objects_each_once_and_then_arguments():
    tree, v = Tree(), nnx.Param(jnp.ones((7, 7)))
    made = nnx.make_jaxpr(lambda a, m, b, *, v: None)(1.0, tree, np.ones(5), v=v)
    shapes = [kind.shape for kind in made.in_avals]
    expected = [x.shape for x in jax.tree.leaves(tree)]
    assert shapes == [*expected, (7, 7), (), (5,)] and made.out_avals == []


def test_jaxpr_runs():
    def f(m, x):
        m.n[...] += jnp.int32(1)
        return {"y": m.w[...] * x}

    made = nnx.make_jaxpr(f)(Cell(), jnp.float32(3))
    y, n = jax.core.eval_jaxpr(made.jaxpr, made.consts, jnp.int32(4), jnp.float32(2), 3.0)
    assert (y, n) == (6, 5)


def test_jaxpr_changes_nothing_and_takes_abstract_arguments():
    tree = Tree()
    before = jax.tree.leaves(tree)

    def f(m, x):
        m.left(x)
        m.new = nnx.Param(x)
        return m

    made, out = nnx.make_jaxpr(f, return_shape=True)(tree, X)
    assert_isomorphic(tree, Tree())
    assert all(a is b for a, b in zip(before, jax.tree.leaves(tree), strict=True))
    assert out is not tree and out.new.get_value() == X
    assert [kind.shape for kind in made.out_avals] == [(), (5, 3)]  # the count, and what is new
    abstract = nnx.make_jaxpr(lambda m, x: m(x))(nnx.eval_shape(linear), X)
    assert str(abstract) == str(nnx.make_jaxpr(lambda m, x: m(x))(linear(), X))


def test_jaxpr_with_static_arguments_of_methods_and_partials():
    class Power(Cell):
        @nnx.make_jaxpr(static_argnums=2)
        def power(self, x, n):
            return self.w[...] * x**n

        def twice(self, x, n):
            return self.w[...] * x * n

    model, x = Power(), jnp.float32(3)
    assert "integer_pow" in str(model.power(x, 3)) and "mul" in str(model.power(x, n=3))
    made = nnx.make_jaxpr(model.twice, static_argnums=1)(x, 3.0)
    assert [kind.shape for kind in made.in_avals] == [(), (), ()]
    assert str(nnx.make_jaxpr(functools.partial(model.twice, n=3.0))(x)) == str(made)
    assert len(nnx.make_jaxpr(model)(x).in_avals) == 3


def test_jaxpr_has_the_names_of_modules():
    class Pair(nnx.Module):
        def __init__(self):
            self.inner = Cell()

        def __call__(self, x):
            return self.inner(x)

    text = nnx.make_jaxpr(Pair())(jnp.float32(3)).jaxpr.pretty_print(name_stack=True)
    assert "Pair/inner" in text


def test_jaxpr_is_made_anew_when_an_object_closed_over_has_changed():
    model = Cell()
    make = nnx.make_jaxpr(lambda x: model.w[...] * x)
    before = make(jnp.float32(3))
    model.w.value = jnp.float32(5)
    assert [float(c) for c in (*before.consts, *make(jnp.float32(3)).consts)] == [2, 5]
    with pytest.raises(TraceLevelError, match=r"nnx\.make_jaxpr\(<lambda>\) closes over model\.n"):
        nnx.make_jaxpr(lambda x: model(x))(jnp.float32(3))


def test_jaxpr_of_a_function_that_fails_harms_nothing():
    def f(m):
        m.items.append(m.array)
        raise ZeroDivisionError("inside")

    tree = Tree()
    with pytest.raises(ZeroDivisionError, match="inside"):
        nnx.make_jaxpr(f)(tree)
    assert_isomorphic(tree, Tree())

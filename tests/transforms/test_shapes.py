"""eval_shape: results without computing them."""

import functools

import jax
import jax.numpy as jnp
import pytest

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

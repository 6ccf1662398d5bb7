"""Objects that a function reaches by other roads than its arguments, and those of outer traces."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.errors import TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.changes import (
    add_to_a_dict,
    add_variable,
    append_to_a_list,
    change_a_static,
    change_metadata,
    do_much,
    set_array_attribute,
    set_array_in_a_list,
    set_value,
    swap_children,
)
from tests.transforms.samples import TRANSFORMS, Cell, Tree

through = pytest.mark.parametrize("through", TRANSFORMS.values(), ids=TRANSFORMS)


@through
def test_object_closed_over_may_be_read_and_called(through):
    other = Cell(5.0)
    assert through(lambda m: m.w[...] * other.w[...])(Cell()) == 10
    linear = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    found = through(lambda m: linear(jnp.ones((1, 2))))(Cell())
    assert np.allclose(found, linear(jnp.ones((1, 2))))


@through
def test_whole_object_closed_over_may_be_split_cloned_and_transformed(through):
    other = Tree()

    def f(m):
        graphdef, state = nnx.split(other)
        grads = nnx.grad(lambda t: t.left.w[...] * m.w[...])(other)
        values = nnx.merge(graphdef, state).left.w[...] + nnx.clone(other).right.w[...]
        return values + grads["left"]["w"][...]

    # `grads` has the shared child at its first place, `again`.
    def g(m):
        grads = nnx.grad(lambda t: t.left.w[...] * m.w[...])(other)
        return sum(jax.tree.leaves(grads))

    assert through(g)(Cell()) == 2


@through
def test_write_to_an_object_closed_over_names_its_path(through):
    other = Tree()

    def f(m):
        other.items[0].w[...] = m.w[...]

    with pytest.raises(TraceLevelError, match=r"closes over other\.items\[0\]\.w\. Cannot set"):
        through(f)(Cell())
    assert_isomorphic(Tree(), other)


@through
def test_attribute_set_on_an_object_closed_over_names_its_path(through):
    holder = {"deep": Tree()}

    def f(m):
        holder["deep"].left.mode = "eval"

    with pytest.raises(TraceLevelError, match=r"closes over holder\.deep\.again\. Cannot set"):
        through(f)(Cell())


GLOBAL = Cell()


def test_write_to_a_global_names_it():
    def f(m, *, default=1):
        def inner():
            GLOBAL.n[...] += m.n[...]

        inner()

    with pytest.raises(TraceLevelError, match=r"nnx\.jit\(f\) closes over GLOBAL\.n\. Cannot set"):
        nnx.jit(f)(Cell())
    assert int(GLOBAL.n[...]) == 0


def test_write_to_a_default_names_it():
    def f(m, default=Cell()):  # noqa: B008
        default.n[...] += m.n[...]

    with pytest.raises(TraceLevelError, match=r"closes over default\.n\. Cannot set"):
        nnx.jit(f)(Cell())


def test_level_error_is_named_once_and_pickles():
    other = Cell()

    def inner(m):
        other.n[...] += m.n[...]

    with pytest.raises(TraceLevelError, match=r"closes over other\.n") as info:
        nnx.jit(lambda m: nnx.grad(lambda m: inner(m))(m))(Cell())
    assert str(info.value).count("other.n") == 1
    assert str(pickle.loads(pickle.dumps(info.value))) == str(info.value)


@through
def test_giving_back_an_object_closed_over_is_an_error(through):
    other = Cell()
    with pytest.raises(TraceLevelError, match=r"closes over other\. The function returns.*clone"):
        through(lambda m: {"out": other})(Cell())


@through
def test_storing_an_object_closed_over_is_an_error(through):
    other, m = Cell(), Cell()

    def store(m):
        m.child = other

    def store_variable(m):
        m.w = other.w

    with pytest.raises(TraceLevelError, match=r"closes over other\. .* a Cell that it closes over"):
        through(store)(m)
    with pytest.raises(TraceLevelError, match=r"closes over other\.w\. .* a Param that it closes"):
        through(store_variable)(m)
    assert_isomorphic(Cell(), m)


@through
def test_copy_of_an_object_closed_over_may_be_given_back(through):
    other = Cell(7.0)
    out = through(lambda m: nnx.clone(other))(Cell())
    assert out is not other and float(out.w[...]) == 7
    out.w[...] += 1.0


def in_while(f):
    return lambda x: nnx.while_loop(lambda c: c[1] < 1, lambda c: (f(c[0]), c[1] + 1), (x, 0))[0]


KEPT = {
    "jit": nnx.jit,
    "remat": nnx.remat,
    "grad": lambda f: nnx.grad(lambda x: f(x) * x / jnp.float32(2)),
    "vmap": lambda f: lambda x: nnx.vmap(f)(x[None])[0],
    "scan": lambda f: lambda x: nnx.scan(lambda c, _: (f(c), None), length=1)(x, None)[0],
    "cond": lambda f: lambda x: nnx.cond(x > 0, f, lambda x: x, x),
    "while": in_while,
    "fori": lambda f: lambda x: nnx.fori_loop(0, 1, lambda n, x: f(x), x),
}


@pytest.mark.filterwarnings("ignore:.* is traced again")
@pytest.mark.parametrize("transform", KEPT.values(), ids=KEPT)
@pytest.mark.parametrize("outer", [lambda f: f, nnx.jit], ids=["alone", "in jit"])
def test_kept_traces_see_values_changed_under_a_closure(transform, outer):
    other, one = Cell(2.0), jnp.float32(1)
    inner = transform(lambda x: x * other.w[...])
    inner(one)
    call = outer(lambda x: inner(x))
    assert call(one) == 2
    other.w[...] = jnp.float32(5)
    assert call(one) == 5 and call(one) == 5


def reads_global(x):
    return x * GLOBAL.w[...]


def same(x):
    return x * jnp.float32(1)


def reaches_end(carry):
    return carry[1] < jnp.int32(GLOBAL.w[...])


def step(carry):
    return carry[0] * GLOBAL.w[...], carry[1] + 1


@pytest.mark.filterwarnings("ignore:.* is traced again")
@pytest.mark.parametrize("branches", [(reads_global, same), (same, reads_global)])
def test_branches_kept_under_other_branches_see_changed_values(branches):
    for w in (2.0, 5.0, 7.0):
        GLOBAL.w[...] = jnp.float32(w)
        found = [float(nnx.switch(n, branches, jnp.float32(1))) for n in range(2)]
        assert sorted(found) == [1, w]


@pytest.mark.filterwarnings("ignore:.* is traced again")
def test_conditions_kept_under_a_loop_see_changed_values():
    for w in (2.0, 3.0):
        GLOBAL.w[...] = jnp.float32(w)
        value, count = nnx.while_loop(reaches_end, step, (jnp.float32(1), jnp.int32(0)))
        assert value == w**w and int(count) == w


# Trace levels: objects of an outer trace.


def test_object_of_an_outer_level_may_be_read_in_an_inner_call():
    m = Cell(3.0)
    f = nnx.jit(lambda m, x: m.w[...] * x)
    assert jax.grad(lambda x: f(m, x))(jnp.float32(2)) == 3
    assert (jax.vmap(lambda x: f(m, x))(jnp.arange(3.0)) == 3 * jnp.arange(3.0)).all()
    assert jax.jit(lambda x: f(m, x))(jnp.float32(2)) == 6


OUTER = {"vmap": jax.vmap, "grad": lambda f: jax.grad(lambda x: f(x).sum())}


@pytest.mark.parametrize("outer", OUTER.values(), ids=OUTER)
@pytest.mark.parametrize("inner", [TRANSFORMS["jit"], TRANSFORMS["grad"]], ids=["jit", "grad"])
@pytest.mark.parametrize(
    ("change", "path"),
    [
        (set_value, r"m\.again\.w \(Param\)"),
        (set_array_attribute, r"m\.array \(array\)"),
        (set_array_in_a_list, r"m\.items\[1\] \(array\)"),
        (append_to_a_list, r"m\.items \(list\)"),
        (add_to_a_dict, r"m\.table \(dict\)"),
        (change_a_static, r"m \(Tree\)"),
        (swap_children, r"m \(Tree\)"),
        (add_variable, r"m\.again \(Cell\)"),
        (change_metadata, r"m\.again\.w \(Param\)"),
    ],
)
def test_change_of_an_object_of_an_outer_level_names_its_path(change, path, inner, outer):
    m = Tree()

    def f(x):
        def body(m, x):
            change(m)
            return x

        return inner(body)(m, x)

    with pytest.raises(TraceLevelError, match=path):
        outer(f)(jnp.ones(2))
    assert_isomorphic(Tree(), m)


@through
def test_object_of_the_running_level_may_be_changed(through):
    graphdef, state = nnx.split(Tree())

    def f(state):
        m = nnx.merge(graphdef, state)
        through(do_much)(m)
        return nnx.state(m)

    expected = Tree()
    do_much(expected)
    assert_isomorphic(nnx.to_pure_dict(nnx.state(expected)), nnx.to_pure_dict(jax.jit(f)(state)))


def test_object_that_jax_unflattened_may_be_changed():
    @jax.jit
    def f(m, x):
        nnx.jit(lambda m, x: m(x))(m, x)
        nnx.value_and_grad(lambda m, x: m(x))(m, x)
        return m

    m = Cell()
    assert int(f(m, jnp.float32(1)).n[...]) == 2 and int(m.n[...]) == 0

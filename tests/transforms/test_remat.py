"""nnx.remat: what is computed again, what happens once, what is static."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import counted
from tests.transforms.test_mapped import Bank, Cell

f32 = jnp.float32
one = jnp.float32(1)


@pytest.mark.parametrize("around", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_effects_happen_once_under_grad(around):
    def loss(m, x):
        m.seen = nnx.Cache(x)
        return nnx.remat(lambda m, x: jnp.sin(m(x)))(m, x)

    cell = Cell()
    value, grads = around(nnx.value_and_grad(loss))(cell, one)
    assert float(cell.n[...]) == 1 and float(cell.seen[...]) == 1
    assert np.allclose(value, np.sin(2.0)) and np.allclose(grads["w"][...], np.cos(2.0))


def sines(policy=None, **options):
    """How many sines the gradient of a rematted function computes."""
    f = nnx.remat(lambda m, x: jnp.sin(jnp.sin(m.w[...] * x)), policy=policy, **options)
    jaxpr = jax.make_jaxpr(lambda x: nnx.grad(lambda m: f(m, x))(Cell())["w"][...])(one)
    return str(jaxpr).count(" sin ")


def test_policy_says_what_is_stored():
    assert sines() > sines(jax.checkpoint_policies.everything_saveable)


def test_prevent_cse_reaches_jax():
    def primitives(prevent_cse):
        f = nnx.remat(lambda m, x: jnp.sin(m.w[...] * x), prevent_cse=prevent_cse)
        return str(jax.make_jaxpr(lambda x: f(Cell(), x))(one))

    assert "prevent_cse=True" in primitives(True) and "prevent_cse=False" in primitives(False)


class Net(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(f32(3))

    def __call__(self, x, train=False):
        return self.w[...] * x if train else x


@pytest.mark.parametrize("static", [{"static_argnums": 2}, {"static_argnums": (-1,)},
                                    {"static_argnames": "train"}], ids=str)  # fmt: skip
@pytest.mark.parametrize(
    "fn", [Net.__call__, lambda m, x, train: m(x, train)], ids=["method", "fn"]
)
def test_static_arguments_by_position_and_name(fn, static):
    f, model = nnx.remat(fn, **static), Net()
    assert float(f(model, one, True)) == 3 and float(f(model, one, False)) == 1
    assert float(f(model, one, train=True)) == 3


def test_static_positions_of_bound_methods_and_partials_skip_what_is_bound():
    model = Net()
    assert float(nnx.remat(model, static_argnums=1)(one, True)) == 3
    assert float(nnx.remat(model.__call__, static_argnums=-1)(one, True)) == 3
    f = functools.partial(lambda m, x, train: m(x, train), model)
    assert float(nnx.remat(f, static_argnums=1)(one, True)) == 3


def test_flags_by_keyword_are_static():
    def f(x, *, m, mode, opt):
        return m.w[...] * x if mode == "a" and opt is None else x

    assert float(nnx.remat(f)(one, m=Cell(), mode="a", opt=None)) == 2
    assert float(nnx.remat(lambda m, x, train: m(x, train))(Net(), one, train=True)) == 3


def test_equal_static_values_share_a_trace():
    f, runs = counted(lambda m, x, sizes: m(x))
    rematted = nnx.remat(f, static_argnums=2)
    for _ in range(2):
        rematted(Cell(), one, [1, 2])
    rematted(Cell(), one, [1.0, 2])
    assert len(runs) == 2


def test_static_arguments_that_cannot_be():
    with pytest.raises(ValueError, match=r"has 'nope', but the parameters of the function are m"):
        nnx.remat(lambda m, x: x, static_argnames="nope")
    with pytest.raises(ValueError, match=r"has 7, but the parameters"):
        nnx.remat(lambda m, x: x, static_argnums=7)
    with pytest.raises(ValueError, match="argument number -3 is out of range"):
        nnx.remat(lambda m, x: x, static_argnums=-3)
    with pytest.raises(nnx.errors.StaticValueError, match="static argument 2 is a Cell"):
        nnx.remat(lambda m, x, k: x, static_argnums=2)(Cell(), one, Cell())


def test_methods_are_decorated():
    class Model(nnx.Module):
        def __init__(self):
            self.cell = Cell()

        @nnx.remat(static_argnums=2)
        def __call__(self, x, power):
            return self.cell(x) ** power

    model = Model()
    assert float(model(one, 3)) == 8 and float(model.cell.n[...]) == 1


def test_structure_changes_and_results_are_the_callers():
    def f(m, x):
        m.new, m.tag = Cell(), "done"
        return m, m.new, m.w

    cell = Cell()
    found = nnx.remat(f)(cell, one)
    assert found[0] is cell and found[1] is cell.new and found[2] is cell.w and cell.tag == "done"


def test_failing_body_changes_nothing():
    def f(m, x):
        m(x)
        m.tag = "done"
        raise ZeroDivisionError("after the write")

    cell = Cell()
    with pytest.raises(ZeroDivisionError, match="after the write"):
        nnx.remat(f)(cell, one)
    assert_isomorphic(cell, Cell())


def test_dropout_draws_the_same_mask_again():
    dropout, x = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), jnp.ones(64, f32)
    mask = nnx.clone(dropout)(x)
    _, grads = nnx.value_and_grad(lambda x, d: nnx.remat(lambda d, x: d(x))(d, x).sum())(x, dropout)
    assert np.array_equal(grads, mask) and int(dropout.rngs.count[...]) == 1


def test_eager_calls_of_equal_structure_share_a_trace():
    f, runs = counted(lambda m, x: m(x))
    rematted, cell = nnx.remat(f), Cell()
    for model in (cell, cell, Cell(), cell):
        rematted(model, one)
    assert len(runs) == 1


def test_closed_over_objects_are_read_anew():
    rematted, found = nnx.remat(lambda x: model.w[...] * x), []
    for model in (Cell(1.0), Cell(2.0), Cell(3.0)):  # noqa: B007 (the closure reads it)
        found.append(float(rematted(one)))
    assert found == [1, 2, 3]


@pytest.mark.filterwarnings("ignore:.*is traced again")
def test_changed_value_of_a_closed_over_object_is_seen():
    cell = Cell(1.0)
    rematted = nnx.remat(lambda x: cell.w[...] * x)
    first = float(rematted(one))
    cell.w[...] = f32(5)
    assert (first, float(rematted(one)), float(jax.grad(rematted)(one))) == (1, 5, 5)


def test_closed_over_objects_of_a_running_trace_are_read_anew():
    @nnx.jit
    def f(models):
        run = nnx.remat(lambda x: model.w[...] * x)
        found = []
        for model in models:
            found.append(run(one))
            model.w[...] += one
            found.append(run(one))
        return found

    assert [float(x) for x in f([Cell(1.0), Cell(5.0)])] == [1, 2, 5, 6]


def test_each_layer_has_its_own_name():
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            return self.linear(x)

    class Stack(nnx.Module):
        def __init__(self, rngs):
            self.first, self.second = Layer(rngs), Layer(rngs)

        def __call__(self, x):
            run = nnx.remat(lambda layer, x: layer(x))
            return run(self.second, run(self.first, x))

    model, x = Stack(nnx.Rngs(0)), jnp.ones((1, 2), f32)
    text = jax.jit(lambda x: model(x)).lower(x).as_text(debug_info=True)
    names = set(re.findall(r'"jit\(<lambda>\)/([^"]*)/dot_general"', text))
    assert names == {"Stack/first/checkpoint/linear", "Stack/second/checkpoint/linear"}


def test_inside_and_around_a_scan():
    def step(x, m):
        return m(x)

    def run(f):
        bank = Bank()
        grads = nnx.grad(lambda m: f(one, m))(bank)
        return grads["w"][...], bank.n[...]

    scan = functools.partial(nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
    expected = run(scan(step))
    assert np.array_equal(expected[0], [6, 3, 2]) and np.array_equal(expected[1], [1, 1, 1])
    for f in (scan(nnx.remat(step)), nnx.remat(scan(step)), nnx.jit(nnx.remat(scan(step)))):
        assert all(np.array_equal(a, b) for a, b in zip(run(f), expected, strict=True))


def test_write_under_a_plain_transform_is_an_error():
    cell = Cell()
    with pytest.raises(nnx.errors.TraceLevelError, match=r"nnx\.remat.* changed m\.n"):
        jax.grad(lambda x: nnx.remat(lambda m, x: m(x))(cell, x))(one)
    assert_isomorphic(cell, Cell())

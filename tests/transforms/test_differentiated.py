"""What is differentiated: choosing leaves, and putting derivatives together."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._transforms.differentiated import Choice, choose
from nnxlite._transforms.lift import Lift
from tests.transforms.samples import Cell

ONE = jnp.float32(1)


def chosen(*args):
    binding, leaves = Lift(lambda *args: None, "nnx.test").bind(args, {}, None, False)
    return choose(binding, leaves, range(len(args)), "")


def test_forms_of_like_arguments_are_equal():
    first, second = chosen(Cell(1.0), {"a": ONE}), chosen(Cell(2.0), {"a": jnp.ones(3)})
    assert first == second and hash(first) == hash(second)
    assert first.forms != chosen(nnx.List([Cell()]), {"a": ONE}).forms


def test_values_are_put_in_their_places_and_nowhere_else():
    choice = Choice(((0, None), (1, 2), (1, 0), 1))
    values, others = ["a", ["b", "c", "d"]], ["e", "f"]
    assert choice.of(values, others) == ["a", "d", "b", "f"]
    assert choice.put("1234", values, others) == (["1", ["3", "c", "2"]], ["e", "4"])
    assert (values, others) == (["a", ["b", "c", "d"]], ["e", "f"])


@pytest.mark.parametrize("transform", [nnx.grad, nnx.value_and_grad, nnx.vjp])
def test_argument_that_is_no_array_is_an_error_with_its_path(transform):
    expected = r"cannot differentiate options\['mode'\]: it is no array but str.*argnums"
    with pytest.raises(TypeError, match=expected):
        transform(lambda options: ONE)({"mode": "train", "x": ONE})


def test_state_has_a_derivative_at_each_of_its_paths():
    state = nnx.State({str(n): nnx.Param(jnp.float32(n)) for n in range(5)})
    total = lambda s: sum(jax.tree.leaves(s), jnp.float32(0)) ** 2  # noqa: E731
    grads = nnx.grad(total)(state)
    assert [float(leaf) for leaf in jax.tree.leaves(grads)] == [20.0] * 5

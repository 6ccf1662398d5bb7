"""Laws of `nnx.grad`: gradients of a hand-split `jax.grad`, and the effects of the plain call."""

import dataclasses

import hypothesis.strategies as st
import jax
import pytest
from hypothesis import given

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic, reachable
from tests.programs import Program, programs
from tests.strategies import Count, blueprints, examples, sum_of

pytestmark = pytest.mark.filterwarnings("error")
kinds = st.sampled_from([nnx.Param, nnx.BatchStat, Count, (nnx.Param, Count)])


@dataclasses.dataclass(frozen=True)
class Loss:
    """A program, with a loss that depends on each Variable that is there in the end."""

    program: Program

    def __call__(self, *models):
        total, given = self.program(*models)
        for node in reachable(models):
            if isinstance(node, nnx.Variable):
                total = total + sum_of(node) * (sum_of(node) + 1.0)
        return total, given


losses = st.builds(Loss, programs())


def by_hand(loss, models, kind):
    """Gradients of the first result of `loss` for one kind of Variable, by plain JAX."""
    graphdef, wanted, rest = nnx.split(models, kind, ...)
    grads = jax.grad(lambda wanted: loss(*nnx.merge(graphdef, wanted, rest))[0])(wanted)
    return {path: leaf.get_value() for path, leaf in grads.flat_state()}


def assert_equal_gradients(expected, found):
    assert_isomorphic(expected, {path: leaf.get_value() for path, leaf in found.flat_state()})


@examples(1)
@given(blueprints(), losses)
def test_value_and_grad_has_the_effects_of_the_call(blueprint, loss):
    eager, lifted = blueprint.root, blueprint.root
    expected = loss(eager)
    found, _ = nnx.value_and_grad(loss, has_aux=True)(lifted)
    assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(), losses)
def test_gradients_are_those_of_hand_split_jax(blueprint, loss):
    expected = by_hand(loss, (blueprint.root,), nnx.Param)
    found, _ = nnx.grad(loss, has_aux=True)(blueprint.root)
    assert_equal_gradients({path[1:]: g for path, g in expected.items()}, found)


@examples(1)
@given(blueprints(), losses, kinds)
def test_gradients_of_any_kind(blueprint, loss, kind):
    expected = by_hand(loss, (blueprint.root,), kind)
    wrt = nnx.DiffState(0, kind)
    found, _ = nnx.grad(loss, argnums=wrt, has_aux=True)(blueprint.root)
    assert_equal_gradients({path[1:]: g for path, g in expected.items()}, found)


@examples(1)
@given(blueprints(roots=2), losses)
def test_effects_reach_objects_that_are_not_differentiated(blueprint, loss):
    eager, lifted = blueprint.build(), blueprint.build()
    expected = loss(*eager)
    found, _ = nnx.value_and_grad(loss, has_aux=True)(*lifted)
    assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(), losses)
def test_grad_inside_jit_is_grad(blueprint, loss):
    eager, lifted = blueprint.root, blueprint.root
    transform = nnx.value_and_grad(loss, has_aux=True)
    expected, by_grad = transform(eager)
    found, by_both = nnx.jit(transform)(lifted)
    assert_isomorphic((eager, expected), (lifted, found))
    assert_isomorphic(by_grad.flat_state(), by_both.flat_state())


@examples(1)
@given(blueprints(), losses)
def test_failed_grad_changes_nothing(blueprint, loss):
    def fails(model):
        loss(model)
        raise ZeroDivisionError("after all changes")

    model = blueprint.root
    with pytest.raises(ZeroDivisionError, match="after all changes"):
        nnx.grad(fails)(model)
    assert_isomorphic(blueprint.root, model)

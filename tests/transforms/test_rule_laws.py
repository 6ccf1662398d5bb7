"""Laws of nnx.custom_vjp and nnx.custom_jvp: with the true derivative as its rule, a function has
the effects and the gradients that it has without one."""

import jax
import pytest
from hypothesis import given

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.strategies import blueprints, examples
from tests.transforms.test_grad_laws import losses

pytestmark = pytest.mark.filterwarnings("error")


def by_vjp(loss):
    f = nnx.custom_vjp(loss)

    def fwd(*models):
        before = nnx.clone(models)
        return loss(*models), before

    def bwd(before, g):
        graphdef, params, rest = nnx.split(before, nnx.Param, ...)
        grads = jax.grad(lambda params: g[0] * loss(*nnx.merge(graphdef, params, rest))[0])(params)
        return tuple(grads.get(n, None) for n in range(len(before)))

    f.defvjp(fwd, bwd)
    return f


def by_jvp(loss):
    f = nnx.custom_jvp(loss)

    @f.defjvp
    def rule(primals, tangents):
        graphdef, params, rest = nnx.split(nnx.clone(primals), nnx.Param, ...)
        along = nnx.State(dict(enumerate(tangents)))
        along = nnx.map_state(lambda path, _: value_at(along, path), params)
        run = lambda params: loss(*nnx.merge(graphdef, params, rest))[0]  # noqa: E731
        _, change = jax.jvp(run, (params,), (along,))
        result = loss(*primals)
        return result, (change, None)

    return f


def value_at(state, path):
    for key in path:
        state = state[key]
    return state


def gradients(loss, *models):
    (value, given), grads = nnx.value_and_grad(loss, has_aux=True)(*models)
    return value, given, {path: leaf.get_value() for path, leaf in grads.flat_state()}


both = pytest.mark.parametrize("ruled", [by_vjp, by_jvp], ids=["vjp", "jvp"])
inside = pytest.mark.parametrize("inside", [lambda f: f, nnx.jit], ids=["direct", "jit"])


@both
@inside
@examples(0.4)
@given(blueprints(), losses)
def test_effects_and_gradients_are_those_without_a_rule(ruled, inside, blueprint, loss):
    plain, lifted = blueprint.root, blueprint.root
    expected = gradients(loss, plain)
    found = gradients(inside(ruled(loss)), lifted)
    assert_isomorphic((plain, *expected), (lifted, *found))


@both
@examples(0.4)
@given(blueprints(roots=2), losses)
def test_several_objects_that_share(ruled, blueprint, loss):
    plain, lifted = blueprint.build(), blueprint.build()
    expected = gradients(loss, *plain)
    found = gradients(ruled(loss), *lifted)
    assert_isomorphic((plain, *expected), (lifted, *found))


@both
@examples(0.4)
@given(blueprints(), losses)
def test_plain_call_is_the_function(ruled, blueprint, loss):
    plain, lifted = blueprint.root, blueprint.root
    assert_isomorphic((plain, loss(plain)), (lifted, ruled(loss)(lifted)))

"""Laws of vmap, scan and remat: each is the Python loop, or the error that says why not.

A drawn graph is tiled, so that each Variable and array has an axis of two equal slices. A program
run on the slices, one after the other, then says what a transform of it has to do.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from hypothesis import assume, given

import nnxlite as nnx
from tests.isomorphism import (
    assert_isomorphic,
    difference,
    has_identity,
    is_array,
    items_of,
    reachable,
)
from tests.programs import programs
from tests.strategies import blueprints, examples, put

pytestmark = pytest.mark.filterwarnings("error")

SIZE = 2
carried = nnx.StateAxes({...: nnx.Carry})


def tiled(model):
    """Gives each Variable and each array among attributes a leading axis of equal slices."""
    return changed(model, lambda x: jnp.stack([jnp.asarray(x)] * SIZE))


def slice_of(model, n):
    return changed(nnx.clone(model), lambda x: x[n])


def changed(model, f):
    for node in reachable(model):
        if isinstance(node, nnx.Variable):
            node.set_value(jax.tree.map(f, node.get_value()))
        else:
            for key, child in items_of(node) or ():
                if is_array(child):
                    put(node, key, f(child))
    return model


def has_loose_arrays(model):
    """Tells whether a tuple or other value holds an array, which `changed` does not reach."""

    def holds_arrays(value):
        if is_array(value) or has_identity(value):
            return is_array(value)
        return any(holds_arrays(child) for _, child in items_of(value) or ())

    return any(
        not is_array(child) and holds_arrays(child)
        for node in reachable(model)
        for _, child in items_of(node) or ()
    )


def mutates(blueprint, program):
    model = blueprint.root
    return difference(blueprint.root, (model, program(model))[0]) is not None


@examples(1)
@given(blueprints(), programs(["read", "value"]))
def test_vmap_is_the_loop_over_slices(blueprint, program):
    model = blueprint.root
    assume(not has_loose_arrays(model))
    tiled(model)
    loop = [slice_of(model, n) for n in range(SIZE)]
    expected = [program(each)[0] for each in loop]
    found = nnx.vmap(lambda m: program(m)[0])(model)
    assert_isomorphic(jnp.stack(expected), found)
    for n, each in enumerate(loop):
        assert_isomorphic(each, slice_of(model, n))


@examples(1)
@given(blueprints(), programs(["read", "value"]))
def test_scan_over_slices_is_the_loop(blueprint, program):
    model = blueprint.root
    assume(not has_loose_arrays(model))
    tiled(model)
    loop = [slice_of(model, n) for n in range(SIZE)]
    expected = [program(each)[0] for each in loop]
    found = nnx.scan(lambda m: program(m)[0], in_axes=0, out_axes=0)(model)
    assert_isomorphic(jnp.stack(expected), found)
    for n, each in enumerate(loop):
        assert_isomorphic(each, slice_of(model, n))


@examples(1)
@given(blueprints(roots=2), programs(["read", "value"]))
def test_scan_with_a_carry_is_the_loop(blueprint, program):
    def body(carry, _):
        return carry, program(*carry)[0]

    eager, lifted = blueprint.build(), blueprint.build()
    expected = [program(*eager)[0] for _ in range(3)]
    carry, found = nnx.scan(body, length=3)(lifted, None)
    assert all(a is b for a, b in zip(carry, lifted, strict=True))
    assert_isomorphic((eager, jnp.stack(expected)), (lifted, found))


@examples(1)
@given(blueprints(), programs(["read", "value"]))
def test_carry_inside_of_state_axes_is_the_loop(blueprint, program):
    eager, lifted = blueprint.root, blueprint.root
    expected = [program(eager)[0] for _ in range(3)]
    run = nnx.scan(lambda m: program(m)[0], in_axes=(carried,), out_axes=0, length=3)
    assert_isomorphic((jnp.stack(expected), eager), (run(lifted), lifted))


@examples(2)
@given(blueprints(roots=2), programs())
def test_remat_of_a_program_is_the_program(blueprint, program):
    eager, lifted = blueprint.build(), blueprint.build()
    remat = nnx.remat(program)
    for _ in range(2):
        expected = program(*eager)
        found = remat(*lifted)
        assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(), programs())
def test_remat_under_grad_is_the_program(blueprint, program):
    def loss(model):
        return jnp.float32(0), nnx.remat(program)(model)

    eager, lifted = blueprint.root, blueprint.root
    expected = program(eager)
    (_, found), _ = nnx.value_and_grad(loss, has_aux=True, allow_int=True)(lifted)
    assert_isomorphic((eager, expected), (lifted, found))


@pytest.mark.parametrize("transform", [nnx.vmap, nnx.scan], ids=["vmap", "scan"])
@examples(1)
@given(blueprints(), programs(["read", "value"]))
def test_broadcast_model_is_read_or_the_error_names_the_path(transform, blueprint, program):
    model = blueprint.root
    run = transform(lambda m, x: program(m)[0] + x, in_axes=(None, 0), out_axes=0)
    x = jnp.zeros(SIZE, jnp.float32)
    failure = None
    try:
        found = run(model, x)
    except ValueError as error:  # a write of an equal value is a write too
        failure = str(error)
    if failure is None:
        assert not mutates(blueprint, program)
        assert_isomorphic(found, jnp.stack([program(blueprint.root)[0]] * SIZE))
    else:
        assert re.search(r"changed m[.\[].* broadcast", failure), failure
    assert_isomorphic(blueprint.root, model)


@examples(1)
@given(blueprints(), programs(["attribute", "structure", "static", "metadata"]))
def test_scan_forbids_changes_of_structure_with_the_path(blueprint, program):
    def body(model, _):
        program(model)
        return model, None

    model, after = blueprint.root, blueprint.root
    program(after)
    if difference(blueprint.root, after, values=False) is None:
        assume(False)
    with pytest.raises(nnx.errors.StructureError, match=r"model[.\[ (].* in the loop"):
        nnx.scan(body, length=2)(model, None)
    assert_isomorphic(blueprint.root, model)

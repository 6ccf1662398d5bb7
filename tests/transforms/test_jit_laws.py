"""Laws of `nnx.jit`: a jitted program does what the program does, to the same objects."""

import warnings

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic, difference, reachable
from tests.programs import programs
from tests.strategies import blueprints, examples

pytestmark = pytest.mark.filterwarnings("error")


def counted(program):
    """The program, and a list that grows with each trace of it."""
    traces = []

    def run(*args):
        traces.append(1)
        return program(*args)

    return run, traces


@examples(2)
@given(blueprints(), programs())
def test_jit_of_a_program_is_the_program(blueprint, program):
    eager, lifted = blueprint.build(), blueprint.build()
    expected = program(*eager)
    found = nnx.jit(program)(*lifted)
    assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(roots=3), programs())
def test_jit_keeps_sharing_across_arguments(blueprint, program):
    eager, lifted = blueprint.build(), blueprint.build()
    expected = program(*eager)
    found = nnx.jit(program)(*lifted)
    assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(roots=2), programs())
def test_jit_takes_objects_inside_of_pytrees_and_by_name(blueprint, program):
    def run(batch, *, other):
        return program(batch["x"], batch["model"], other)

    x = jnp.ones((2,), jnp.float32)
    (left, right), (model, other) = blueprint.build(), blueprint.build()
    expected = run({"x": x, "model": left}, other=right)
    found = nnx.jit(run)({"x": x, "model": model}, other=other)
    assert_isomorphic((left, right, expected), (model, other, found))


@examples(1)
@given(blueprints(roots=2), programs())
def test_jit_called_again_on_the_changed_objects(blueprint, program):
    eager, lifted = blueprint.build(), blueprint.build()
    jitted = nnx.jit(program)
    for _ in range(3):
        expected = program(*eager)
        found = jitted(*lifted)
        assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(roots=2), programs(), st.integers(0, 9))
def test_jit_of_an_equal_graph_runs_the_same_trace(blueprint, program, order):
    run, traces = counted(program)
    jitted = nnx.jit(run)
    jitted(*blueprint.build())
    eager, lifted = blueprint.build(), blueprint.build(order)
    expected = program(*eager)
    found = jitted(*lifted)
    assert len(traces) == 1
    assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(roots=2), programs(), programs())
def test_changes_between_calls_are_seen(blueprint, program, between):
    eager, lifted = blueprint.build(), blueprint.build()
    jitted = nnx.jit(program)
    jitted(*lifted)
    program(*eager)
    between(*eager)
    between(*lifted)
    expected = program(*eager)
    found = jitted(*lifted)
    assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(roots=2), programs())
def test_nested_jit_is_the_program(blueprint, program):
    def twice(*args):
        first = nnx.jit(program)(*args)
        return first, program(*args)

    eager, lifted = blueprint.build(), blueprint.build()
    expected = (program(*eager), program(*eager))
    found = nnx.jit(twice)(*lifted)
    assert_isomorphic((eager, expected), (lifted, found))


@examples(1)
@given(blueprints(), programs(["read"]))
def test_reading_program_writes_nothing_back(blueprint, program):
    model = blueprint.root
    arrays = jax.tree.leaves(model)
    nnx.jit(program)(model)
    assert all(a is b for a, b in zip(arrays, jax.tree.leaves(model), strict=True))


@examples(1)
@given(blueprints(roots=2), programs())
def test_failed_call_changes_nothing(blueprint, program):
    def fails(*args):
        program(*args)
        raise ZeroDivisionError("after all changes")

    lifted = blueprint.build()
    nodes = reachable(lifted)
    with pytest.raises(ZeroDivisionError, match="after all changes"):
        nnx.jit(fails)(*lifted)
    assert_isomorphic(blueprint.build(), lifted)
    assert all(a is b for a, b in zip(nodes, reachable(lifted), strict=True))


@examples(1)
@given(blueprints(), programs(["read", "value", "output"]))
def test_jit_with_donation_is_the_program(blueprint, program):
    eager, lifted = (nnx.clone(blueprint.root) for _ in range(2))
    expected = program(eager)
    found = nnx.jit(program, donate_argnums=0)(lifted)
    assert_isomorphic((eager, expected), (lifted, found))


# What changes inside a plain list or dict cannot be noticed at the time.
noticed = programs(["read", "value", "attribute", "metadata"], without=["write_array"])


@examples(1)
@given(blueprints(), programs(["read"]), programs(["value"], without=["write_array"]))
def test_jit_sees_changes_of_variables_that_it_closes_over(blueprint, program, between):
    model = blueprint.root
    jitted = nnx.jit(lambda: program(model)[0])
    assert_isomorphic(program(model)[0], jitted())
    between(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the model should be an argument
        assert_isomorphic(program(model)[0], jitted())


@examples(1)
@given(blueprints(), noticed, st.sampled_from([nnx.jit, jax.jit, jax.checkpoint]))
def test_closed_over_model_is_read_only(blueprint, program, transform):
    model = blueprint.root
    writes = difference(blueprint.root, (copy := blueprint.root, program(copy))[0]) is not None
    closed = transform(lambda: program(model)[0])
    if writes:
        with pytest.raises(nnx.errors.TraceLevelError, match="another trace level"):
            closed()
    assert_isomorphic(blueprint.root, model)


@examples(1)
@given(blueprints(), programs())
def test_plain_jit_of_a_program_that_returns_its_object(blueprint, program):
    eager = blueprint.root
    expected, _ = program(eager)
    found, model = jax.jit(lambda model: (program(model)[0], model))(blueprint.root)
    assert_isomorphic((eager, expected), (model, found))


@examples(1)
@given(blueprints(roots=2), programs())
def test_plain_jit_over_split_objects(blueprint, program):
    @jax.jit
    def step(graphdef, state):
        models = nnx.merge(graphdef, state)
        result, _ = program(*models)
        return result, nnx.split(models)

    eager = blueprint.build()
    expected, _ = program(*eager)
    found, split = step(*nnx.split(blueprint.build()))
    assert_isomorphic((eager, expected), (nnx.merge(*split), found))

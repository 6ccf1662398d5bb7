"""Laws of the object graph over random graphs: split and merge, clone, pytrees, pickling, State."""

import copy
import pickle

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic, difference, has_identity, items_of, reachable
from tests.programs import programs
from tests.strategies import Count, blueprints, examples

filter_lists = st.lists(
    st.sampled_from([nnx.Param, nnx.BatchStat, Count, nnx.PathContains("a1"), nnx.Not(nnx.Param)]),
    max_size=3,
)


def variables_of(*roots):
    return [node for node in reachable(roots) if isinstance(node, nnx.Variable)]


def assert_separate(left, right):
    """No object, Variable or container is part of both graphs."""
    assert not {id(node) for node in reachable(left)} & {id(node) for node in reachable(right)}


def assert_equal_states(left, right):
    assert_isomorphic(left.flat_state(), right.flat_state())


@examples(2)
@given(blueprints(marks=True))
def test_blueprint_builds_equal_graphs(blueprint):
    assert_isomorphic(blueprint.build(), blueprint.build(order=1))


@examples(2)
@given(blueprints(marks=True), filter_lists)
def test_merge_undoes_split(blueprint, filters):
    model = blueprint.root
    merged = nnx.merge(*nnx.split(model, *filters, ...))
    assert_isomorphic(model, merged)
    assert_separate(model, merged)


@examples(1)
@given(blueprints(roots=3))
def test_split_of_a_tuple_keeps_sharing_across_its_roots(blueprint):
    roots = blueprint.build()
    assert_isomorphic(roots, nnx.merge(*nnx.split(roots)))


@examples(1)
@given(blueprints(), programs())
def test_merge_undoes_split_after_any_change(blueprint, program):
    model = blueprint.root
    nnx.split(model)
    program(model)
    assert_isomorphic(model, nnx.merge(*nnx.split(model)))


@examples(1)
@given(blueprints(marks=True))
def test_split_changes_nothing(blueprint):
    model = blueprint.root
    nnx.split(model)
    assert_isomorphic(model, blueprint.root)


@examples(1)
@given(blueprints(marks=True), st.booleans())
def test_clone_is_equal_and_separate(blueprint, share):
    model = blueprint.root
    cloned = nnx.clone(model, share=share)
    assert_isomorphic(model, cloned)
    assert_separate(model, cloned)


@examples(1)
@given(blueprints(marks=True))
def test_deepcopy_is_equal_and_separate(blueprint):
    model = blueprint.root
    copied = copy.deepcopy(model)
    assert_isomorphic(model, copied)
    assert_separate(model, copied)


@examples(1)
@given(blueprints(closures=False, marks=True))
def test_pickle_is_equal(blueprint):
    model = blueprint.root
    assert_isomorphic(model, pickle.loads(pickle.dumps(model)))


@examples(1)
@given(blueprints(closures=False, marks=True))
def test_pickled_graphdef_is_the_same_graphdef(blueprint):
    graphdef, state = nnx.split(blueprint.root)
    again, loaded = pickle.loads(pickle.dumps((graphdef, state)))
    assert again is graphdef
    assert_equal_states(state, loaded)


@examples(2)
@given(blueprints(marks=True), st.integers(0, 99))
def test_order_of_assignment_never_changes_the_graphdef(blueprint, order):
    (model,), (other,) = blueprint.build(), blueprint.build(order)
    assert nnx.graphdef(model) is nnx.graphdef(other)
    assert hash(nnx.graphdef(model)) == hash(nnx.graphdef(other))
    assert nnx.state(model).flat_state().paths == nnx.state(other).flat_state().paths


@examples(2)
@given(blueprints(max_nodes=3), programs(max_steps=2))
def test_graphdefs_are_equal_if_and_only_if_the_structures_are(blueprint, program):
    model, other = blueprint.root, blueprint.root
    program(other)
    equal = nnx.graphdef(model) == nnx.graphdef(other)
    assert equal == (structural_difference(model, other) is None)


def structural_difference(left, right):
    """The difference that is none of shapes, dtypes or values: those are not in a GraphDef."""
    for variable in variables_of(left, right):
        variable.set_raw_value(jnp.zeros(()))
    return difference(left, right, values=False)


@examples(1)
@given(blueprints(marks=True))
def test_tree_map_of_the_identity_is_equal(blueprint):
    model = blueprint.root
    mapped = jax.tree.map(lambda x: x, model)
    assert_isomorphic(model, mapped)
    assert_separate(model, mapped)


@examples(1)
@given(blueprints(marks=True))
def test_tree_flatten_sees_each_leaf_of_the_state_once(blueprint):
    model = blueprint.root
    of_state = jax.tree.leaves(nnx.state(model))
    of_model = jax.tree.leaves(model)
    assert len(of_model) == len(of_state)
    by_path = jax.tree_util.tree_leaves_with_path(model)
    assert len({path for path, _ in by_path}) == len(by_path)


@examples(1)
@given(blueprints(marks=True))
def test_treedef_of_equal_graphs_is_equal(blueprint):
    left, right = blueprint.root, blueprint.build(order=3)[0]
    assert jax.tree.structure(left) == jax.tree.structure(right)


@examples(1)
@given(blueprints())  # without marks: a number marked as data comes out as an array
def test_plain_jit_of_the_identity_is_equal(blueprint):
    model = blueprint.root
    assert_isomorphic(model, jax.jit(lambda m: m)(model))


@examples(1)
@given(blueprints(marks=True))
def test_state_is_a_snapshot(blueprint):
    model = blueprint.root
    state = nnx.state(model)
    for _, leaf in state.flat_state():
        if isinstance(leaf, nnx.Variable):
            leaf.value = jax.tree.map(lambda x: x + 1.0, leaf.get_value())
    assert_isomorphic(model, blueprint.root)


@examples(1)
@given(blueprints(), programs(["value"]))
def test_update_carries_values_from_one_object_to_its_like(blueprint, program):
    model, other = blueprint.root, blueprint.root
    program(other)
    nodes = reachable(model)
    nnx.update(model, nnx.state(other))
    assert_isomorphic(model, other)
    assert all(before is after for before, after in zip(nodes, reachable(model), strict=True))


@examples(1)
@given(blueprints(marks=True), filter_lists)
def test_states_of_a_split_merge_to_the_whole(blueprint, filters):
    model = blueprint.root
    whole = nnx.state(model)
    parts = whole.split(*filters, ...) if filters else (whole,)
    assert_equal_states(whole, nnx.merge_state(*parts))
    assert_equal_states(whole, nnx.merge_state(*reversed(parts)))
    assert sum(len(part.flat_state()) for part in parts) == len(whole.flat_state())


@examples(1)
@given(blueprints(marks=True))
def test_state_algebra(blueprint):
    whole = nnx.state(blueprint.root)
    params, rest = nnx.split_state(whole, nnx.Param, ...)
    assert_equal_states(whole - params, rest)
    assert_equal_states(params | rest, whole)
    assert_equal_states((whole - rest) | rest, whole)
    assert_equal_states(whole | whole, whole)
    assert len((whole - whole).flat_state()) == 0


@examples(1)
@given(blueprints(marks=True))
def test_state_forms_are_inverse(blueprint):
    state = nnx.state(blueprint.root)
    assert_equal_states(state, nnx.from_flat_state(nnx.to_flat_state(state)))
    assert_equal_states(state, nnx.map_state(lambda path, leaf: leaf, state))
    assert_equal_states(state, nnx.State(state))
    assert_equal_states(state, jax.tree.map(lambda x: x, state))
    assert_equal_states(state, pickle.loads(pickle.dumps(state)))


@examples(1)
@given(blueprints(marks=True))
def test_pure_dict_carries_all_values(blueprint):
    state = nnx.state(blueprint.root)
    blank = jax.tree.map(jnp.zeros_like, state)
    blank.replace_by_pure_dict(state.to_pure_dict())
    assert_equal_states(state, blank)


@examples(1)
@given(blueprints(marks=True))
def test_pop_takes_a_kind_out_of_every_place_or_changes_nothing(blueprint):
    model = blueprint.root
    expected = nnx.state(model, nnx.BatchStat)
    if part_of_values(model) & {id(v) for v in of_kind(model, nnx.BatchStat)}:
        with pytest.raises(nnx.errors.StructureError, match="part of a tuple"):
            nnx.pop(model, nnx.BatchStat)
        assert_isomorphic(blueprint.root, model)
        return
    popped = nnx.pop(model, nnx.BatchStat)
    assert_equal_states(expected, popped)
    assert not of_kind(model, nnx.BatchStat)


def of_kind(root, kind):
    return [variable for variable in variables_of(root) if type(variable) is kind]


def part_of_values(root):
    """The ids of what hangs below a tuple, a registered pytree or a partial."""
    found = set()

    def visit(value):
        for _, child in items_of(value) or ():
            found.add(id(child))
            if not has_identity(child):
                visit(child)

    for holder in reachable(root):
        for _, child in items_of(holder) or ():
            if not has_identity(child):
                visit(child)
    return found


@examples(1)
@given(blueprints(marks=True))
def test_repr_never_fails_and_is_the_same_for_equal_graphs(blueprint):
    assert repr(blueprint.root) == repr(blueprint.root)

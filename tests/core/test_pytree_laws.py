"""Laws of objects as pytrees, and of what is kept about them, over random graphs and programs."""

import copy

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
from hypothesis import given

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import is_variable
from tests.programs import programs
from tests.strategies import blueprints, examples

# What JAX programs put in the place of leaves: axes, nothing, placeholders, pairs, labels, trees.
marks = st.sampled_from(
    [
        lambda x: 0,
        lambda x: None,
        lambda x: object(),
        lambda x: (1, 2),
        lambda x: jnp.zeros(3),
        lambda x: "label",
        lambda x: {"a": 1},
    ]
)


@examples(2)
@given(blueprints(), marks, st.booleans())
def test_a_tree_of_marks_has_the_shape_of_the_object_and_flattens_to_itself(
    blueprint, mark, at_variables
):
    model, is_leaf = blueprint.root, is_variable if at_variables else None
    marked = jax.tree.map(mark, model, is_leaf=is_leaf)
    jax.tree.map(lambda a, b: None, model, marked, is_leaf=is_leaf)
    leaves, treedef = jax.tree.flatten(marked)
    assert jax.tree.structure(jax.tree.unflatten(treedef, leaves)) == treedef
    assert jax.tree_util.tree_flatten_with_path(marked)[1] == treedef
    assert jax.tree.structure(copy.deepcopy(marked)) == treedef


@examples(2)
@given(blueprints(), st.booleans())
def test_leaves_in_their_places_give_the_object_back(blueprint, at_variables):
    model, is_leaf = blueprint.root, is_variable if at_variables else None
    leaves, treedef = jax.tree.flatten(model, is_leaf=is_leaf)
    assert_isomorphic(jax.tree.unflatten(treedef, leaves), blueprint.root)


@examples(2)
@given(blueprints(), st.lists(programs(max_steps=4), min_size=1, max_size=3))
def test_what_is_kept_about_an_object_is_never_stale(blueprint, changes):
    model = blueprint.root
    for change in changes:
        nnx.state(model, nnx.Param)
        jax.tree.leaves(model)
        change(model)
        fresh = nnx.clone([model], share=True)[0]  # a list has no plan: it is walked anew
        assert nnx.graphdef(model) is nnx.graphdef(fresh)
        assert nnx.state(model, nnx.Param)._meta is nnx.state(fresh, nnx.Param)._meta
        kept, anew = jax.tree.leaves(model), jax.tree.leaves(fresh)
        assert [id(x) for x in kept] == [id(x) for x in anew]


@examples(1)
@given(blueprints(), programs(["value"]))
def test_plain_jit_has_the_effects_of_the_call_on_its_result(blueprint, program):
    def f(model):
        program(model)
        return model

    assert_isomorphic(jax.jit(f)(blueprint.root), f(blueprint.root))

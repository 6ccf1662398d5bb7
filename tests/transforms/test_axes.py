"""Roles of leaves: by prefix, by filter and by path."""

import pickle

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import nnxlite as nnx
from nnxlite._core.errors import StructureError
from nnxlite._transforms.axes import StateAxes, entry_roles, leaf_roles, spread
from nnxlite._transforms.lift import Lift
from tests.transforms.samples import Cell, Tree

BY_FILTER = [nnx.StateSharding, StateAxes]


@pytest.mark.parametrize("cls", BY_FILTER)
def test_roles_by_filter_are_made_of_a_mapping_or_of_pairs(cls):
    of_mapping = cls({nnx.Param: 0, ...: None})
    assert of_mapping == cls([(nnx.Param, 0), (..., None)])
    assert hash(of_mapping) == hash(cls([(nnx.Param, 0), (..., None)]))
    assert of_mapping.filters == (nnx.Param, ...) and of_mapping.roles == (0, None)


@pytest.mark.parametrize("cls", BY_FILTER)
def test_roles_by_filter_differ_by_filter_role_order_and_class(cls):
    roles = cls({nnx.Param: 0, ...: None})
    assert roles != cls({nnx.Param: 1, ...: None})
    assert roles != cls({nnx.BatchStat: 0, ...: None})
    assert cls({"a": 0, "b": 1}) != cls({"b": 1, "a": 0})
    assert StateAxes({...: 0}) != nnx.StateSharding({...: 0})
    assert roles != ((nnx.Param, 0), (..., None))


def test_roles_have_the_names_of_flax():
    assert StateAxes({nnx.Param: 0, ...: None}).axes == (0, None)
    assert nnx.StateSharding({...: PartitionSpec("x")}).shardings == (PartitionSpec("x"),)


def test_roles_show_what_they_are_made_of():
    text = "StateAxes({<class 'nnxlite._core.variable.Param'>: 0, Ellipsis: None})"
    assert repr(StateAxes({nnx.Param: 0, ...: None})) == text


@pytest.mark.parametrize("cls", BY_FILTER)
def test_roles_pickle(cls):
    roles = cls({nnx.Param: 0, "name": 1, ...: None})
    assert pickle.loads(pickle.dumps(roles)) == roles


def test_list_of_filters_is_one_filter():
    roles = StateAxes([([nnx.Param, nnx.BatchStat], 0), (..., None)])
    cell = Cell()
    assert roles.role((), cell.w) == 0 and roles.role((), cell.n) is None


def test_first_filter_that_matches_counts():
    roles = StateAxes({nnx.PathContains("left"): 0, nnx.Param: 1, ...: None})
    cell = Cell()
    assert roles.role(("left", "w"), cell.w) == 0
    assert roles.role(("right", "w"), cell.w) == 1
    assert roles.role(("right", "n"), cell.n) is None


def test_leaf_without_a_filter_is_an_error_with_its_path():
    with pytest.raises(StructureError, match=r"StateAxes has no filter for model\.a\[0\] \(Var"):
        StateAxes({nnx.Param: 0}).role(("a", 0), Cell().n)


def test_rest_after_everything_is_an_error():
    with pytest.raises(ValueError, match=r"\.\.\."):
        StateAxes({...: 0, nnx.Param: 1})


def test_diff_state_compares_by_value():
    assert nnx.DiffState(0, nnx.Param) == nnx.DiffState(0, nnx.Param)
    assert hash(nnx.DiffState(0, nnx.Param)) == hash(nnx.DiffState(0, nnx.Param))
    assert nnx.DiffState(0, nnx.Param) != nnx.DiffState(1, nnx.Param)
    assert nnx.DiffState(0, nnx.BatchStat).predicate((), nnx.BatchStat(1.0))


def test_spread_gives_each_leaf_the_role_of_its_prefix():
    tree = ({"a": 1, "b": (2, 3)}, [4], 5)
    assert spread(7, tree, "in_axes") == [7] * 5
    assert spread((0, 1, 2), tree, "in_axes") == [0, 0, 0, 1, 2]
    assert spread(({"a": 0, "b": 1}, [2], None), tree, "in_axes") == [0, 1, 1, 2, None]


def test_object_is_one_leaf_whatever_its_role():
    cell, by_filter = Cell(), StateAxes({...: 0})
    tree = (cell, {"x": cell.w, "state": nnx.state(cell)})
    assert spread(by_filter, tree, "in_axes") == [by_filter] * 3
    assert spread((by_filter, None), tree, "in_axes") == [by_filter, None, None]
    roles = jax.tree.map(lambda x: 0, nnx.state(cell))
    assert spread((None, {"x": 1, "state": roles}), tree, "in_axes") == [None, roles, 1]


def test_prefix_that_does_not_fit_is_an_error_that_says_what_it_was_for():
    with pytest.raises(StructureError, match=r"^in_shardings is not a prefix"):
        spread((0, 1), (1, 2, 3), "in_shardings")
    with pytest.raises(StructureError, match=r"^out_axes is not a prefix"):
        spread({"a": 0}, {"b": 1}, "out_axes")


def roles_of(root, role):
    binding, _ = Lift(lambda m: None, "nnx.test").bind((root,), {}, None, False)
    graphdef, paths = binding.crossing.graphdef, binding.crossing.root_entries(0)
    return {path: r for _, path, r in entry_roles(graphdef, paths, binding.leaf_at, role)}


def test_one_role_holds_for_all_leaves():
    roles = roles_of(Tree(), 3)
    assert set(roles.values()) == {3}
    assert ("items", 1) in roles and ("pair", 1) in roles and ("again", "w") in roles
    assert ("left", "w") not in roles  # shared: it has the path of first meeting


def test_roles_by_filter_see_variables_and_arrays():
    is_array = lambda path, x: isinstance(x, jax.Array)  # noqa: E731
    roles = roles_of(Tree(), StateAxes({nnx.Param: 0, is_array: 1, ...: 2}))
    assert roles["again", "w"] == 0 and roles["array",] == 1 and roles["again", "n"] == 2


def test_state_gives_roles_by_path():
    cell = Cell()
    role = nnx.State({"w": nnx.Param(PartitionSpec("x"))})
    assert roles_of(cell, role) == {("n",): None, ("w",): PartitionSpec("x")}


@pytest.mark.parametrize("cls", [nnx.StateAxes, nnx.StateSharding])
def test_roles_by_filter_are_made_of_a_state_of_roles(cls):
    whole, split = PartitionSpec(), PartitionSpec("x")
    roles = cls(nnx.State({"a": {"b": whole, "c": nnx.Param(split)}, "d": whole}))
    found = [roles.role(path, None) for path in (("a", "b"), ("a", "c"), ("d",))]
    assert found == [whole, split, whole]
    assert len(roles.filters) == 2  # one for all paths of a role
    with pytest.raises(StructureError, match=r"has no filter for model\.e"):
        roles.role(("e",), None)


def test_state_of_roles_may_end_above_the_leaves():
    tree = Tree()
    roles = roles_of(tree, nnx.State({"again": 5, "items": {0: {"n": 6}}}))
    assert roles["again", "w"] == roles["again", "n"] == 5
    assert roles["items", 0, "n"] == 6 and roles["items", 0, "w"] is None


def test_object_of_roles_gives_them_by_path():
    axes = jax.tree.map(lambda x: x.ndim, Cell())
    assert roles_of(Cell(), axes) == {("n",): 0, ("w",): 0}


def test_state_is_given_roles_leaf_by_leaf():
    state = nnx.state(Tree(), nnx.Param)
    roles = roles_of(state, StateAxes({nnx.PathContains("again"): 0, ...: 1}))
    assert roles["again", "w"] == 0 and roles["pair", 1] == 1
    assert roles_of(state, jax.tree.map(lambda x: 4, state)) == dict.fromkeys(roles, 4)


def test_state_that_is_an_attribute_is_given_roles_leaf_by_leaf():
    cell = Cell()
    cell.state = nnx.state(Cell())
    roles = roles_of(cell, StateAxes({nnx.PathContains("state"): 0, ...: 1}))
    assert roles == {("n",): 1, ("state", "n"): 0, ("state", "w"): 0, ("w",): 1}


def test_variable_has_a_role_of_its_own():
    assert roles_of(nnx.Param(jnp.ones(2)), StateAxes({nnx.Param: 0, ...: 1})) == {(): 0}
    assert leaf_roles(7, [(0, ())], lambda n: None) == {0: 7}

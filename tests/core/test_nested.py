"""Nested dicts of leaves: made, walked, owned, changed in place."""

import pytest

import nnxlite as nnx
from nnxlite._core.nested import become, check_keys, leaves_of, leaves_of_own, nest, owned
from nnxlite._core.trace import EAGER
from tests.objects import param

LEAVES = [(("a", 0), 1), (("a", 2), 2), (("b",), 3)]


def test_nesting_and_walking_are_inverse():
    tree = nest(*zip(*LEAVES, strict=True))
    assert tree == {"a": {0: 1, 2: 2}, "b": 3}
    assert list(leaves_of_own(tree)) == list(leaves_of(tree)) == LEAVES


def test_mapping_at_a_known_path_is_a_leaf():
    assert list(leaves_of({"a": {"b": {"c": 1}}}, {("a", "b")})) == [(("a", "b"), {"c": 1})]


def test_owned_dicts_are_sorted_copies():
    v = param(1)
    source = {"b": {2: v, 1: 5}, "a": nnx.State({"z": v})}
    tree = owned(source, (), EAGER)
    assert [path for path, _ in leaves_of_own(tree)] == [("a", "z"), ("b", 1), ("b", 2)]
    assert tree["b"][2] is not v
    assert tree["a"]["z"].get_raw_value() is v.get_raw_value()
    assert type(tree["a"]) is dict


def test_loop_is_an_error_with_its_path():
    loop = {"b": {}}
    loop["b"]["c"] = loop
    with pytest.raises(nnx.errors.StructureError, match=r"^state\.a\.b\.c is one of"):
        owned({"a": loop}, (), EAGER)
    with pytest.raises(nnx.errors.StructureError, match=r"^state\.b\.c is one of"):
        list(leaves_of(loop))


def test_mapping_met_twice_side_by_side_is_no_loop():
    shared = {"x": 1}
    assert owned({"a": shared, "b": shared}, (), EAGER) == {"a": {"x": 1}, "b": {"x": 1}}


@pytest.mark.parametrize("keys", [["a", 1], [1.5], [None], [True, False]])
def test_irregular_keys_are_an_error(keys):
    with pytest.raises(nnx.errors.StructureError, match=r"^state\.p has keys of types"):
        check_keys(keys, ("p",))


def test_dicts_that_stay_are_changed_in_place():
    tree = {"a": {"x": 1}, "b": 2}
    inner = tree["a"]
    become(tree, {"a": {"x": 3, "y": 4}, "c": 5})
    assert tree == {"a": {"x": 3, "y": 4}, "c": 5}
    assert tree["a"] is inner

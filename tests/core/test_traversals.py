"""Nested mappings as flat dicts, and back."""

import pickle
from types import MappingProxyType

import pytest

import nnxlite as nnx
from nnxlite.traversals import (
    empty_node,
    flatten_mapping,
    flatten_to_sequence,
    unflatten_mapping,
)

NESTED = {"b": {"d": 1, "c": {"a": 2}}, "a": 3, "e": {}, 7: {0: {}}}


def test_paths_come_in_the_order_of_the_mappings():
    assert list(flatten_mapping(NESTED).items()) == [
        (("b", "d"), 1),
        (("b", "c", "a"), 2),
        (("a",), 3),
    ]


def test_sequence_has_the_same_pairs():
    assert flatten_to_sequence(NESTED) == list(flatten_mapping(NESTED).items())


def test_empty_mappings_are_kept_where_asked_for():
    flat = flatten_mapping(NESTED, keep_empty_nodes=True)
    assert flat["e",] is flat[7, 0] is empty_node
    assert unflatten_mapping(flat) == NESTED
    assert flatten_mapping({}, keep_empty_nodes=True) == {}


def test_separator_joins_keys():
    flat = flatten_mapping({"a": {"b": 1}, "c": 2}, sep="/")
    assert flat == {"a/b": 1, "c": 2}
    assert unflatten_mapping(flat, sep="/") == {"a": {"b": 1}, "c": 2}


def test_is_leaf_stops_at_a_mapping():
    def is_leaf(path, value):
        return path == ("b", "c")

    assert flatten_mapping(NESTED, is_leaf=is_leaf)["b", "c"] == {"a": 2}
    assert (("b", "c"), {"a": 2}) in flatten_to_sequence(NESTED, is_leaf=is_leaf)


def test_pairs_unflatten_too():
    assert unflatten_mapping([(("a", "b"), 1), (("a", "c"), 2)]) == {"a": {"b": 1, "c": 2}}


def test_any_mapping_is_flattened_and_a_state_among_them():
    assert flatten_mapping(MappingProxyType({"a": MappingProxyType({"b": 1})})) == {("a", "b"): 1}
    state = nnx.state(nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
    flat = flatten_mapping(state)
    assert list(flat) == [("layers", 0, "bias"), ("layers", 0, "kernel")]
    assert flat["layers", 0, "bias"] is state["layers"][0]["bias"]


@pytest.mark.parametrize("paths", [[("a",), ("a", "b")], [("a", "b"), ("a",)]])
def test_leaf_that_is_a_parent_is_an_error(paths):
    with pytest.raises(ValueError, match=r"\('a',\) is a leaf and the parent of"):
        unflatten_mapping(dict.fromkeys(paths, 1))


def test_what_is_no_mapping_is_an_error():
    with pytest.raises(TypeError, match="Expected a mapping, found list"):
        flatten_mapping([1])  # type: ignore[arg-type]


def test_there_is_one_empty_node():
    assert pickle.loads(pickle.dumps(empty_node)) is empty_node
    assert repr(empty_node) == "empty_node"

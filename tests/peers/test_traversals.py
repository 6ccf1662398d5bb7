"""Nested mappings are flattened and unflattened as by flax.nnx."""

from typing import Any

import pytest
from flax.nnx import traversals as peer

from nnxlite import traversals as ours

MAPPINGS: list[dict[Any, Any]] = [
    {},
    {"a": 1},
    {"b": {"d": 1, "c": {"a": 2}}, "a": 3},
    {"e": {}, "f": {"g": {}, "h": [1, {"i": 2}]}},
    {0: {1: None}, 2: ()},
]
OPTIONS: list[dict[str, Any]] = [
    {},
    {"is_leaf": lambda path, value: "c" in value},
    {"is_leaf": lambda path, value: len(path) == 1},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_flattening_is_that_of_flax(mapping: Any, options: Any) -> None:
    theirs = peer.flatten_mapping(mapping, **options)
    assert list(ours.flatten_mapping(mapping, **options).items()) == list(theirs.items())
    assert ours.flatten_to_sequence(mapping, **options) == peer.flatten_to_sequence(
        mapping, **options
    )


@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_empty_mappings_are_kept_as_by_flax(mapping: Any) -> None:
    flat = ours.flatten_mapping(mapping, keep_empty_nodes=True)
    theirs = peer.flatten_mapping(mapping, keep_empty_nodes=True)
    assert [(path, value is ours.empty_node) for path, value in flat.items()] == [
        (path, value is peer.empty_node) for path, value in theirs.items()
    ]
    assert ours.unflatten_mapping(flat) == peer.unflatten_mapping(theirs)


def test_separator_is_that_of_flax() -> None:
    mapping = {"a": {"b": 1, "c": {"d": 2}}}
    flat = ours.flatten_mapping(mapping, sep=".")
    assert flat == peer.flatten_mapping(mapping, sep=".")
    assert ours.unflatten_mapping(flat, sep=".") == peer.unflatten_mapping(flat, sep=".")

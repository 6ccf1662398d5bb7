"""Axis names, the rules that translate them, and placement on a mesh."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._core.placement import (
    get_logical_axis_rules,
    logical_axis_rules,
    partition_spec,
    place,
    set_logical_axis_rules,
    use_eager_sharding,
    using_eager_sharding,
)
from nnxlite._core.variable import Param

X = np.ones((2, 4), np.float32)


def mesh(kind: AxisType = AxisType.Auto) -> jax.sharding.Mesh:
    return jax.make_mesh((1, 1), ("data", "model"), axis_types=(kind, kind))


@pytest.mark.parametrize(
    ("names", "spec"),
    [
        (("embed", None), PartitionSpec("model", None)),
        (("batch", "mlp"), PartitionSpec(("data", "model"), None)),
        ((("heads", "embed"), "other"), PartitionSpec(("data", "model"), "other")),
        ((("mlp",),), PartitionSpec(None)),
        (PartitionSpec("embed"), PartitionSpec("model")),
        ((), PartitionSpec()),
    ],
    ids=repr,
)
def test_rules_translate_names(names: Any, spec: PartitionSpec) -> None:
    rules = [("embed", "model"), ("batch", ("data", "model")), ("mlp", None), ("heads", "data")]
    with logical_axis_rules(rules):
        assert partition_spec(names) == spec
    assert partition_spec(names, rules) == spec


def test_rules_end_with_their_block() -> None:
    with logical_axis_rules([("a", "b")]):
        with logical_axis_rules([("a", "c")]):
            assert partition_spec(("a",)) == PartitionSpec("c")
        assert partition_spec(("a",)) == PartitionSpec("b")
    assert get_logical_axis_rules() == ()


def test_rules_belong_to_their_thread() -> None:
    found = []

    def set_and_read() -> None:
        set_logical_axis_rules([("a", "b")])
        found.append(get_logical_axis_rules())

    thread = threading.Thread(target=set_and_read)
    thread.start()
    thread.join()
    assert found == [(("a", "b"),)]
    assert get_logical_axis_rules() == ()


def test_contradicting_rules_are_refused() -> None:
    with (
        logical_axis_rules([("a", "x")]),
        pytest.raises(ValueError, match=r"'a' -> 'x', those of the Variable 'y'"),
    ):
        partition_spec(("a",), [("a", "y")])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_value_is_placed_under_a_mesh(kind: AxisType) -> None:
    with jax.set_mesh(mesh(kind)):
        placed = place(X, {"out_sharding": ("data", None)})
    assert isinstance(placed.sharding, NamedSharding)
    assert placed.sharding.spec == PartitionSpec("data", None)
    np.testing.assert_array_equal(placed, X)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_value_is_placed_inside_jit(kind: AxisType) -> None:
    with jax.set_mesh(mesh(kind)):
        text = jax.jit(lambda x: place(x, {"out_sharding": ("data", None)})).lower(X).as_text()
    assert '[{"data"}, {}]' in text


@pytest.mark.parametrize(
    "metadata",
    [
        {"out_sharding": ("data", None), "mesh": mesh()},
        {"out_sharding": NamedSharding(mesh(), PartitionSpec("data", None))},
    ],
    ids=["mesh", "NamedSharding"],
)
def test_a_mesh_may_come_with_the_value(metadata: dict[str, Any]) -> None:
    assert place(X, metadata).sharding == NamedSharding(mesh(), PartitionSpec("data", None))


@pytest.mark.parametrize(
    "metadata",
    [
        {},
        {"out_sharding": None, "mesh": mesh()},
        {"out_sharding": (), "mesh": mesh()},
        {"out_sharding": ("data",)},
        {"out_sharding": ("data",), "mesh": mesh(), "eager_sharding": False},
    ],
    ids=["no names", "None", "empty", "no mesh", "switched off"],
)
def test_without_names_mesh_or_wish_nothing_is_placed(metadata: dict[str, Any]) -> None:
    assert place(X, metadata) is X


def test_what_is_no_array_is_not_placed() -> None:
    shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    assert place(shape, {"out_sharding": ("data",), "mesh": mesh()}) is shape


def test_inside_shard_map_a_part_is_left_alone() -> None:
    def body(x: jax.Array) -> jax.Array:
        return place(x, {"out_sharding": ("data", None)})

    spec = PartitionSpec("data")
    placed = jax.shard_map(body, mesh=mesh(), in_specs=spec, out_specs=spec)(X)
    np.testing.assert_array_equal(placed, X)


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (("embed", None), r"'embed' in .* is no axis of the mesh, which has \('data', 'model'\)"),
        (("data", None, None), r"names 3 axes, but the array has shape \(2, 4\)"),
    ],
)
def test_names_that_do_not_fit_are_refused(names: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        place(X, {"out_sharding": names, "mesh": mesh()})


def test_axes_of_two_kinds_are_refused() -> None:
    mixed = jax.make_mesh((1, 1), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
    with pytest.raises(ValueError, match="mixes mesh axes of the kinds Auto and Explicit"):
        place(X, {"out_sharding": ("a", "b"), "mesh": mixed})


def test_asked_for_placement_without_a_mesh_is_an_error() -> None:
    with use_eager_sharding(True), pytest.raises(ValueError, match=r"there is no mesh.*set_mesh"):
        place(X, {"out_sharding": ("data",)})
    with pytest.raises(ValueError, match="there is no mesh"):
        Param(X, out_sharding=("data",), eager_sharding=True)


def test_the_switch_holds_for_its_block_or_from_then_on() -> None:
    assert using_eager_sharding()
    with use_eager_sharding(False):
        assert not using_eager_sharding()
        assert place(X, {"out_sharding": ("data",), "mesh": mesh()}) is X
    assert using_eager_sharding()
    switch = use_eager_sharding(False)
    assert not using_eager_sharding()
    switch.__exit__()


def test_a_new_variable_is_placed() -> None:
    with jax.set_mesh(mesh()):
        param = Param(X, out_sharding=(None, "model"))
    assert param.sharding.spec == PartitionSpec(None, "model")

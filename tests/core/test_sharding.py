"""Partition metadata on Variables, objects and States."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from nnxlite._core.module import Module
from nnxlite._core.placement import logical_axis_rules
from nnxlite._core.sharding import (
    PARTITION_NAME,
    add_axis,
    as_abstract,
    get_named_sharding,
    get_partition_spec,
    remove_axis,
    with_partitioning,
)
from nnxlite._core.split import state
from nnxlite._core.variable import Param, Variable


class Layer(Module):
    """Parameters with and without names, and a bare array."""

    def __init__(self) -> None:
        self.kernel = Param(jnp.ones((2, 4)), out_sharding=("data", "model"))
        self.bias = Param(jnp.ones(4))
        self.table = jnp.ones(3)


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh((1, 1), ("data", "model"))


def test_get_partition_spec_replaces_values() -> None:
    specs = get_partition_spec(state(Layer()))
    assert specs["kernel"].get_value() == PartitionSpec("data", "model")
    assert specs["bias"].get_value() == PartitionSpec()
    assert specs["table"] == PartitionSpec()
    assert isinstance(specs["kernel"], Param)


def test_get_partition_spec_keeps_the_form_of_the_tree() -> None:
    specs = get_partition_spec({"layer": Layer(), "x": jnp.ones(2), "none": None})
    assert isinstance(specs["layer"], Layer)
    assert specs["layer"].kernel.get_value() == PartitionSpec("data", "model")
    assert specs["x"] == PartitionSpec()
    assert specs["none"] is None


def test_get_partition_spec_reads_rules() -> None:
    kernel = Param(jnp.ones((2, 4)), out_sharding=("embed", "mlp"), sharding_rules=(("mlp", None),))
    with logical_axis_rules([("embed", "model")]):
        assert get_partition_spec(kernel).get_value() == PartitionSpec("model", None)


def test_get_named_sharding_can_place_a_state() -> None:
    layer_state = state(Layer())
    shardings = get_named_sharding(layer_state, mesh())
    assert shardings["kernel"].get_value() == NamedSharding(mesh(), PartitionSpec("data", "model"))
    placed = jax.device_put(layer_state, shardings)
    assert placed["kernel"].sharding.spec == PartitionSpec("data", "model")


def test_get_named_sharding_fits_jit() -> None:
    layer = Layer()
    shardings = get_named_sharding(layer, mesh())
    out = jax.jit(lambda layer: layer, in_shardings=(shardings,), out_shardings=shardings)(layer)
    assert out.kernel.sharding.spec == PartitionSpec("data", "model")


def test_with_partitioning_names_the_axes_of_what_it_makes() -> None:
    init = with_partitioning(jax.nn.initializers.ones, ("data", None), note="kernel")
    param = Param(init(jax.random.key(0), (2, 4), jnp.float32))
    assert param.out_sharding == ("data", None)
    assert param.note == "kernel"
    assert not param.has_metadata("mesh")


def test_with_partitioning_places_on_its_mesh() -> None:
    init = with_partitioning(jax.nn.initializers.ones, (None, "model"), mesh())
    param = Param(init(jax.random.key(0), (2, 4), jnp.float32))
    assert param.sharding == NamedSharding(mesh(), PartitionSpec(None, "model"))


NAMED = PartitionSpec("data", None)


@pytest.mark.parametrize(
    ("names", "index", "expected"),
    [
        (("data", None), 0, ("layers", "data", None)),
        (("data", None), 1, ("data", "layers", None)),
        (("data", None), 2, ("data", None, "layers")),
        (("data", None), -1, ("data", None, "layers")),
        (("data", None), -3, ("layers", "data", None)),
        (("data",), 2, ("data", None, "layers")),
        (("data",), -1, ("data", None, "layers")),
        (NAMED, 0, PartitionSpec("layers", "data", None)),
    ],
    ids=repr,
)
def test_add_axis_adds_a_name_and_remove_axis_takes_it_away(
    names: Any, index: int, expected: Any
) -> None:
    param = Param(jnp.ones((2, 4)), out_sharding=names)
    told = {PARTITION_NAME: "layers"}
    add_axis({"param": param}, index, told)
    assert param.out_sharding == expected
    assert type(param.out_sharding) is type(names)
    remove_axis([param], index, told)
    assert tuple(param.out_sharding)[: len(names)] == tuple(names)


def test_an_axis_without_a_name_is_none() -> None:
    param = add_axis(Param(jnp.ones((2, 4)), out_sharding=("data", None)), 0, {})
    assert param.out_sharding == (None, "data", None)


def test_without_a_name_any_entry_is_removed() -> None:
    param = Param(jnp.ones((2, 4)), out_sharding=("layers", "data", None))
    assert remove_axis(param, 0, {}).out_sharding == ("data", None)


def test_an_entry_past_the_names_is_none_already() -> None:
    param = Param(jnp.ones((2, 4)), out_sharding=("data",))
    assert remove_axis(param, 2, {PARTITION_NAME: None}).out_sharding == ("data",)


def test_variables_without_names_stay_without() -> None:
    param = add_axis(Param(jnp.ones(2)), 0, {PARTITION_NAME: "layers"})
    assert not param.has_metadata("out_sharding")


def test_removing_another_name_is_refused() -> None:
    param = Param(jnp.ones((2, 4)), out_sharding=("layers", "data", None))
    with pytest.raises(
        ValueError, match=r"Expected the name 'stages' for axis 0 of a Param.*'layers'"
    ):
        remove_axis(param, 0, {PARTITION_NAME: "stages"})
    assert param.out_sharding == ("layers", "data", None)


def test_other_entries_go_to_their_own_metadata() -> None:
    param = Param(jnp.ones((2, 4)), names=("in", "out"), note="x")
    add_axis(param, 1, {PARTITION_NAME: None, "names": "stack", "note": "y"})
    assert param.names == ("in", "stack", "out")
    assert param.note == "x"


def test_the_hooks_of_a_variable_are_told() -> None:
    calls = []

    class Watched(Variable[Any]):
        def on_add_axis(self, index: int, name: str | None) -> None:
            calls.append(("add", index, name))

        def on_remove_axis(self, index: int, name: str | None) -> None:
            calls.append(("remove", index, name))

    variable = Watched(jnp.ones((2, 4)))
    add_axis(variable, -1, {PARTITION_NAME: "layers"})
    remove_axis(variable, -1, {PARTITION_NAME: "layers"})
    assert calls == [("add", 2, "layers"), ("remove", 2, "layers")]


def test_an_axis_cannot_be_counted_from_the_end_of_no_array() -> None:
    variable = Variable({"a": jnp.ones(2)}, out_sharding=("data",))
    with pytest.raises(ValueError, match="Axis -1 of a Variable cannot be counted from the end"):
        add_axis(variable, -1, {})


def test_as_abstract_adds_shardings_to_shapes() -> None:
    shapes = jax.eval_shape(lambda: state(Layer()))
    with jax.set_mesh(mesh()):
        abstract = as_abstract(shapes)
    assert abstract["kernel"].sharding.spec == PartitionSpec("data", "model")
    assert abstract["bias"].sharding is None
    assert abstract["table"].shape == (3,)

"""Variables: value access, hooks, metadata, and what JAX sees of them."""

import copy
import gc
import pickle
import weakref
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite._core.variable import (
    BatchStat,
    Cache,
    Intermediate,
    LoRAParam,
    OptArray,
    OptState,
    OptVariable,
    Param,
    Perturbation,
    RngCount,
    RngKey,
    RngState,
    Variable,
    VariableState,
)


class Custom(Variable[Any]):
    """A kind made by a user, at the top of a module so that it can be pickled."""


# The value.


@pytest.mark.parametrize("number", [True, 2, 0.5, 1j], ids=repr)
@pytest.mark.parametrize(
    "put",
    [
        lambda x: Variable(x),
        lambda x: _set(Variable(jnp.ones(3)), "value", x),
        lambda x: _set(Variable(jnp.ones(3)), "raw_value", x),
        lambda x: Variable(jnp.ones(3)).replace(x),
        lambda x: Variable.from_metadata(x, {}),
        lambda x: Variable(Variable((x,))[0]),
    ],
    ids=["constructor", "value", "raw_value", "replace", "from_metadata", "in a tuple"],
)
def test_a_python_number_becomes_an_array_without_a_weak_type(put: Any, number: Any) -> None:
    value = put(number).get_raw_value()
    assert isinstance(value, jax.Array)
    assert value.dtype == jnp.result_type(type(number))
    assert not value.weak_type
    assert value == jnp.asarray(number, value.dtype)


def _set(variable: Any, name: str, value: Any) -> Any:
    setattr(variable, name, value)
    return variable


def test_weak_types_become_strong_in_every_setter() -> None:
    weak = jnp.asarray(1.0)
    assert weak.weak_type
    variable = Variable(weak)
    assert not variable[...].weak_type
    for index in ({}, {"index": ...}):
        variable.set_value(weak, **index)
        assert not variable[...].weak_type
    variable.value = {"a": weak}
    assert not variable["a"].weak_type


def test_a_counter_step_traces_once() -> None:
    traces = []

    @jax.jit
    def step(count: Variable[jax.Array], scale: Variable[jax.Array]) -> Any:
        traces.append(1)
        count[...] += 1
        scale[...] = scale[...] * jnp.float32(2)
        return count, scale

    count, scale = Variable(jnp.asarray(0)), Variable(jnp.asarray(1.0))
    for _ in range(3):
        count, scale = step(count, scale)
    assert len(traces) == 1
    assert int(count[...]) == 3
    assert float(scale[...]) == 8


@pytest.mark.parametrize(
    "value",
    [np.float32(1), "text", None, jax.ShapeDtypeStruct((2,), jnp.int32), object()],
    ids=["numpy scalar", "text", "none", "shape", "object"],
)
def test_other_values_are_kept_as_they_are(value: Any) -> None:
    variable = Variable(value)
    assert variable.get_value() is variable[...] is variable.value is value
    variable.value = value
    assert variable.get_raw_value() is value


def test_typed_and_legacy_keys_are_kept() -> None:
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        variable = RngKey(key)
        assert variable[...] is key
        variable[...] = key
        assert variable.value is key


def test_an_index_reads_and_writes_a_part() -> None:
    variable = Param(jnp.zeros((2, 3)))
    variable[0] = 1
    variable[1, 2] = jnp.float32(5)
    assert variable[0].tolist() == [1, 1, 1]
    assert variable.get_value(index=(1, 2)) == 5
    assert variable[...].tolist() == [[1, 1, 1], [0, 0, 5]]


def test_setting_all_of_an_array_keeps_shape_and_dtype() -> None:
    variable = Param(jnp.zeros((2,), jnp.bfloat16))
    variable[...] = 1
    variable[...] = variable[...] + 1
    assert variable.shape == (2,)
    assert variable.dtype == jnp.bfloat16
    assert variable[...].tolist() == [2, 2]
    variable[...] = jnp.zeros((1,), jnp.bfloat16)
    assert variable.dtype == jnp.bfloat16
    assert variable[...].tolist() == [0, 0]


@pytest.mark.parametrize("shape", [(3,), (1, 2), (2, 2)])
def test_an_array_that_does_not_fit_is_refused(shape: Any) -> None:
    variable = Param(jnp.ones(2))
    with pytest.raises(ValueError, match=r"shape \(2,\) to .* of shape .* Set `variable.value`"):
        variable[...] = jnp.zeros(shape)
    assert variable[...].tolist() == [1, 1]


def test_setting_an_equal_type_stores_the_array_itself() -> None:
    variable, value = Param(jnp.zeros(2)), jnp.ones(2)
    variable[...] = value
    assert variable.get_raw_value() is value


def test_setting_without_an_index_may_change_everything() -> None:
    variable = Param(jnp.zeros(2))
    variable.value = jnp.ones((3, 3), jnp.int32)
    assert variable.shape == (3, 3)
    assert variable.dtype == jnp.int32


def test_a_variable_as_the_new_value_gives_its_value() -> None:
    variable, other = Param(jnp.zeros(2)), Param(jnp.ones(2))
    variable[...] = other
    assert variable.get_raw_value() is other.get_raw_value()
    variable.value = Variable(3)
    assert int(variable[...]) == 3


def test_a_numpy_value_is_copied_before_a_part_is_written() -> None:
    value = np.zeros(3)
    variable = Variable(value)
    variable[1] = 2.0
    assert value.tolist() == [0, 0, 0]
    assert variable[...].tolist() == [0, 2, 0]
    assert jax.jit(lambda x: _set_part(Variable(value), x)[...])(4.0).tolist() == [0, 4, 0]


@pytest.mark.parametrize(
    "read",
    [
        lambda v: v.get_value(),
        lambda v: v.value,
        lambda v: v[...],
        lambda v: v[:2],
        np.asarray,
    ],
    ids=["get_value", "value", "...", "slice", "asarray"],
)
@pytest.mark.parametrize("value", [np.zeros(3), np.zeros(6)[::2]], ids=["array", "view"])
def test_a_numpy_value_that_is_handed_out_is_the_readers_own(read: Any, value: Any) -> None:
    variable = Variable(value)
    assert variable.get_raw_value() is value
    read(variable)[0] = 7.0
    assert value.tolist() == [0, 0, 0]


def test_numpy_arrays_in_a_container_are_copied_too() -> None:
    variable = Variable({"a": [np.zeros(2)]})
    variable["a"][0][0] = variable.value["a"][0][1] = 7.0
    assert variable["a"][0].tolist() == [0, 0]


def test_attributes_of_a_numpy_value_are_looked_up_without_a_copy() -> None:
    value = np.zeros((2, 3))
    variable = Variable(value)
    assert (variable.shape, variable.dtype, variable.sum()) == ((2, 3), np.float64, 0)
    assert np.shares_memory(variable.T, value)
    with pytest.raises(ValueError, match="read-only"):
        variable.fill(1.0)


def _set_part(variable: Any, x: Any) -> Any:
    variable[1] = x
    return variable


def test_a_container_is_changed_through_its_variable_only() -> None:
    value = {"a": jnp.zeros(2), "n": [1]}
    variable = Variable(value)
    value["a"] = None
    variable.value["n"].append(2)
    assert variable["a"].tolist() == [0, 0]
    assert len(variable["n"]) == 1
    variable["a"] = 7
    assert int(variable["a"]) == 7


def test_a_variable_takes_value_and_metadata_of_another() -> None:
    first = Param(jnp.ones(2), note="a", size=1)
    second = BatchStat(first, note="b")
    assert second.get_raw_value() is first.get_raw_value()
    assert second.get_metadata() == {"note": "b", "size": 1}


def test_a_kind_may_override_get_and_set() -> None:
    class Doubled(Variable[Any]):
        def get_value(self, **index: Any) -> Any:
            return super().get_value(**index) * 2

        def set_value(self, value: Any, **index: Any) -> None:
            super().set_value(value / 2, **index)

    variable = Doubled(jnp.ones(2))
    assert variable[...].tolist() == variable.value.tolist() == (variable + 0).tolist() == [2, 2]
    variable[...] = jnp.full(2, 6.0)
    assert variable.get_raw_value().tolist() == [3, 3]


# Attributes.


def test_attributes_are_metadata_first_and_then_those_of_the_value() -> None:
    variable = Param(jnp.ones((2, 3)), note="x", ndim="mine")
    assert variable.note == "x"
    assert variable.ndim == "mine"
    assert variable.T.shape == (3, 2)
    assert variable.size == 6
    assert variable.at[0].set(5.0)[0, 0] == 5
    assert variable.sum() == 6


def test_an_unknown_attribute_names_kind_metadata_and_value() -> None:
    with pytest.raises(AttributeError, match=r"Param has no attribute 'foo'.*\(a, b\).*ArrayImpl"):
        _ = Param(jnp.ones(2), a=1, b=2).foo
    with pytest.raises(AttributeError, match=r"no attribute '__wrapped__'"):
        _ = Param(jnp.ones(2)).__wrapped__


@pytest.mark.parametrize("cls", [Variable, Param, Custom])
def test_an_attribute_cannot_be_set_by_mistake(cls: Any) -> None:
    variable = cls(jnp.ones(2))
    with pytest.raises(AttributeError, match="valeu"):
        variable.valeu = 1
    assert not hasattr(variable, "__dict__")


def test_a_generic_kind_can_be_called() -> None:
    assert type(Param[jax.Array](jnp.ones(2))) is Param


def test_a_half_built_variable_raises_attribute_errors_only() -> None:
    with pytest.raises(AttributeError, match="_meta"):
        _ = object.__new__(Param).anything


# Copies.


def test_replace_makes_a_new_variable_of_the_same_kind() -> None:
    variable = Param(jnp.ones(2), a=1)
    other = variable.replace(value=jnp.zeros(3), b=2)
    assert type(other) is Param
    assert other.shape == (3,)
    assert other.get_metadata() == {"a": 1, "b": 2}
    assert variable.get_metadata() == {"a": 1}
    same = variable.copy()
    assert same is not variable
    assert same.get_raw_value() is variable.get_raw_value()
    assert same._meta is variable._meta


def test_copy_from_takes_value_and_metadata_of_the_same_kind() -> None:
    variable, other = Param(jnp.ones(2), a=1), Param(jnp.zeros(3), b=2)
    variable.copy_from(other)
    assert variable.shape == (3,)
    assert variable.get_metadata() == {"b": 2}
    with pytest.raises(TypeError, match="a Param cannot copy from a BatchStat"):
        variable.copy_from(BatchStat(jnp.ones(2)))
    variable.update_from_state(BatchStat(jnp.ones(2)))
    assert type(variable) is Param
    assert variable.shape == (2,)
    assert variable.get_metadata() == {}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("value", [np.arange(3), {"a": jnp.ones(2)}, None], ids=str)
def test_copies_are_equal_and_separate(duplicate: Any, value: Any) -> None:
    variable = Custom(value, note=("a", 1))
    other = duplicate(variable)
    assert type(other) is Custom
    assert other is not variable
    assert other._meta is variable._meta
    assert other._version == 0
    assert jax.tree.structure(other) == jax.tree.structure(variable)
    other.value = 5
    assert int(other[...]) == 5
    assert jax.tree.structure(variable.value) == jax.tree.structure(value)


def test_deepcopy_keeps_sharing() -> None:
    variable = Param(jnp.ones(2))
    first, second = copy.deepcopy([variable, variable])
    assert first is second is not variable
    assert first.get_raw_value() is not variable.get_raw_value()


@pytest.mark.parametrize("library", [pickle, cloudpickle])
@pytest.mark.parametrize("make", [lambda: jnp.arange(3), lambda: (1, {"a": np.ones(2)}), str])
def test_pickling_keeps_kind_value_and_metadata(library: Any, make: Any) -> None:
    variable = Custom(make(), out_sharding=("a", None), note={"k": [1]})
    other = library.loads(library.dumps(variable))
    assert type(other) is Custom
    assert other._meta is variable._meta
    assert jax.tree.structure(other) == jax.tree.structure(variable)
    assert jax.tree.all(jax.tree.map(np.array_equal, other.value, variable.value))
    other.value = 3  # it is writable here


def test_a_key_can_be_pickled_and_copied() -> None:
    variable = RngKey(jax.random.key(3), tag="default")
    for other in (pickle.loads(pickle.dumps(variable)), copy.deepcopy(variable)):
        assert other.tag == "default"
        assert (jax.random.key_data(other[...]) == jax.random.key_data(variable[...])).all()


def test_a_kind_made_in_a_function_survives_cloudpickle() -> None:
    class Local(Param[Any]):
        def on_get_value(self, value: Any) -> Any:
            return value + 1

    other = cloudpickle.loads(cloudpickle.dumps(Local(jnp.ones(2), a=1)))
    assert other[...].tolist() == [2, 2]
    assert other.a == 1
    assert jax.tree.map(lambda x: x * 2, other).raw_value.tolist() == [2, 2]


def test_a_variable_is_freed_without_the_garbage_collector() -> None:
    gc.disable()
    try:
        variable = Param(jnp.ones(2), note="x")
        alive = weakref.ref(variable)
        jax.jit(lambda v: v + 1)(variable)
        del variable
        assert alive() is None
    finally:
        gc.enable()


# Kinds.


def test_kinds_derive_from_each_other() -> None:
    for kind in (Param, BatchStat, Cache, Intermediate, RngState, OptState):
        assert kind.__base__ is Variable
    assert issubclass(Perturbation, Intermediate)
    assert issubclass(LoRAParam, Param)
    assert issubclass(RngKey, RngState)
    assert issubclass(RngCount, RngState)
    assert issubclass(OptArray, OptState)
    assert issubclass(OptVariable, OptState)
    assert VariableState is Variable
    assert Param(jnp.ones(2)).type is Param


def test_a_repr_names_kind_shape_and_metadata() -> None:
    assert repr(Param(jnp.ones((2, 3)), note="x")).startswith("Param(float32[2,3], note='x')")
    assert "Param" in repr(jax.tree.map(lambda _: object(), Param(jnp.ones(2))))

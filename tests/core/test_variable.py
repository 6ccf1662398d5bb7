"""Variables: value access, hooks, metadata, and what JAX sees of them."""

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.tree_util import GetAttrKey

from nnxlite._core import trace, versions
from nnxlite._core.errors import StaticValueError, TraceLevelError
from nnxlite._core.metadata import EMPTY, VariableMetadata, with_metadata
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


def is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


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
    assert int(count[...]) == 3 and float(scale[...]) == 8


@pytest.mark.parametrize(
    "value",
    [np.ones(2), np.float32(1), "text", None, jax.ShapeDtypeStruct((2,), jnp.int32), object()],
    ids=["numpy", "numpy scalar", "text", "none", "shape", "object"],
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
    assert variable.shape == (2,) and variable.dtype == jnp.bfloat16
    assert variable[...].tolist() == [2, 2]
    variable[...] = jnp.zeros((1,), jnp.bfloat16)
    assert variable.dtype == jnp.bfloat16 and variable[...].tolist() == [0, 0]


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
    assert variable.shape == (3, 3) and variable.dtype == jnp.int32


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


def _set_part(variable: Any, x: Any) -> Any:
    variable[1] = x
    return variable


def test_a_container_is_changed_through_its_variable_only() -> None:
    value = {"a": jnp.zeros(2), "n": [1]}
    variable = Variable(value)
    value["a"] = None
    variable.value["n"].append(2)
    assert variable["a"].tolist() == [0, 0] and len(variable["n"]) == 1
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
    assert variable.note == "x" and variable.ndim == "mine"
    assert variable.T.shape == (3, 2) and variable.size == 6
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


# Metadata.


def test_set_metadata_takes_three_forms() -> None:
    variable = Param(jnp.ones(2))
    variable.set_metadata("tag", "x")
    variable.set_metadata(other=3)
    assert variable.get_metadata() == {"tag": "x", "other": 3}
    variable.set_metadata({"only": 1})
    assert variable.get_metadata() == {"only": 1}


@pytest.mark.parametrize("args", [(), ("a",), ("a", 1, 2), ({}, {})])
def test_set_metadata_in_another_form_is_an_error(args: Any) -> None:
    variable = Param(jnp.ones(2), a=1)
    with pytest.raises(TypeError, match="takes a name and a value, keywords, or one mapping"):
        variable.set_metadata(*args)
    assert variable.get_metadata() == {"a": 1}


def test_metadata_can_be_asked_for_and_removed() -> None:
    variable = Param(jnp.ones(2), a=1)
    assert variable.has_metadata("a") and not variable.has_metadata("b")
    assert variable.get_metadata("a") == 1 and variable.get_metadata("b", None) is None
    variable.del_metadata("a")
    assert variable.get_metadata() == {} and variable._meta is EMPTY
    with pytest.raises(KeyError, match="Param has no metadata 'a'; it has none"):
        variable.del_metadata("a")
    with pytest.raises(KeyError, match="Param has no metadata 'a'"):
        variable.get_metadata("a")


@pytest.mark.parametrize("name", ["sharding", "sharding_names", "out_sharding"])
def test_sharding_has_one_field_under_three_names(name: str) -> None:
    variable = Param(jnp.ones(2), **{name: ("data",)})
    assert variable.get_metadata() == {"out_sharding": ("data",)}
    assert variable.get_metadata(name) == ("data",) and variable.has_metadata(name)
    variable.set_metadata(name, (None,))
    variable.set_metadata(**{name: ("model",)})
    assert variable.out_sharding == ("model",)
    variable.del_metadata(name)
    assert variable._meta is EMPTY


def test_two_names_of_one_field_are_an_error() -> None:
    with pytest.raises(TypeError, match="'sharding' and 'out_sharding' are the same field"):
        Param(jnp.ones(2), sharding=("a",), out_sharding=("b",))


@pytest.mark.parametrize("flag", ["hijax", "ref"])
def test_flags_of_flax_are_accepted_at_their_usual_value_only(flag: str) -> None:
    assert Param(jnp.ones(2), **{flag: False})._meta is EMPTY
    with pytest.raises(ValueError, match=f"{flag}=True.* is not supported"):
        Param(jnp.ones(2), **{flag: True})


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (jnp.ones(2), r" is an array \(float32\[2\]\)"),
        ((np.ones(2),), r"\[0\] is an array \(float64\[2\]\)"),
        (bytearray(), " is of type builtins.bytearray"),
    ],
)
def test_an_array_in_metadata_is_an_error_that_names_the_field(value: Any, found: str) -> None:
    variable = Param(jnp.ones(2), a=1)
    for attempt in (
        lambda: Param(jnp.ones(2), scale=value),
        lambda: variable.set_metadata(scale=value),
        lambda: variable.replace(scale=value),
    ):
        with pytest.raises(StaticValueError, match=f"metadata 'scale' of Param{found}"):
            attempt()
    assert variable.get_metadata() == {"a": 1}


def test_a_tracer_in_metadata_is_an_error() -> None:
    with pytest.raises(StaticValueError, match="metadata 'scale' of Param is a traced array"):
        jax.jit(lambda x: Param(x, scale=x)[...])(1.0)


def test_a_metadata_change_is_a_structure_change_and_an_equal_one_is_not() -> None:
    variable = Param(jnp.ones(2), a=1)
    variable.set_metadata(a=2)
    assert variable._version == 0  # no plan has met it
    variable._version, epoch = 1, versions.EPOCH.now
    variable.set_metadata(a=2)
    variable.value = jnp.zeros(3)
    assert variable._version == 1 and versions.EPOCH.now == epoch
    variable.set_metadata(a=2.0)
    assert variable._version == 2 and versions.EPOCH.now > epoch


def test_an_initializer_brings_metadata() -> None:
    init = with_metadata(jax.nn.initializers.ones, note="init", sharding=("a",))
    made = init(jax.random.key(0), (2,), jnp.float32)
    variable = Param(made, note="given", other=1)
    assert isinstance(made, VariableMetadata)
    assert variable.get_metadata() == {"note": "init", "out_sharding": ("a",), "other": 1}
    assert variable[...].tolist() == [1, 1]


# Hooks.


def _log(name: str) -> Any:
    def hook(variable: Any, value: Any) -> Any:
        assert isinstance(variable, Variable)
        return value + (name,)

    return hook


def test_hooks_run_in_order_on_create_get_and_set() -> None:
    variable = Variable(
        (),
        on_create_value=_log("created"),
        on_get_value=[_log("got 1"), _log("got 2")],
        on_set_value=(_log("set"),),
    )
    assert variable.get_raw_value() == ("created",)
    assert variable.value == variable[...] == ("created", "got 1", "got 2")
    variable.value = ("new",)
    assert variable.get_raw_value() == ("new", "set")
    variable[...] = ("newer",)
    assert variable.get_raw_value() == ("newer", "set")
    variable.raw_value = ("raw",)
    assert variable.raw_value == ("raw",)


def test_methods_of_a_kind_are_hooks_unless_the_metadata_has_some() -> None:
    class Hooked(Variable[Any]):
        def on_get_value(self, value: Any) -> Any:
            return value * 2

        def on_set_value(self, value: Any) -> Any:
            return value + 1

    class Heir(Hooked):
        pass

    variable = Heir(jnp.ones(()))
    assert variable[...] == 2
    variable.value = jnp.ones(())
    assert variable[...] == 4
    assert Heir(jnp.ones(()), on_get_value=lambda v, x: x * 3)[...] == 3
    assert variable.get_metadata() == {}


def test_axis_hooks_run_with_index_and_name() -> None:
    seen = []

    def note(variable: Any, index: int, name: str | None) -> None:
        seen.append((variable.shape, index, name))

    variable = Param(jnp.ones(2), on_add_axis=note, on_remove_axis=(note, note))
    variable.add_axis(0, "layers")
    variable.remove_axis(1, None)
    assert seen == [((2,), 0, "layers"), ((2,), 1, None), ((2,), 1, None)]


def test_a_hook_that_raises_leaves_the_value() -> None:
    def refuse(variable: Any, value: Any) -> Any:
        raise ValueError("no")

    variable = Param(jnp.ones(2), on_set_value=refuse)
    with pytest.raises(ValueError, match="no"):
        variable[...] = jnp.zeros(2)
    assert variable[...].tolist() == [1, 1]


def test_no_hook_runs_in_replace_copy_or_jax() -> None:
    def refuse(variable: Any, value: Any) -> Any:
        raise ValueError("no")

    variable = Param._make(jnp.ones(2), Param(jnp.ones(2), on_get_value=refuse)._meta, None)
    assert variable.replace(jnp.zeros(2)).raw_value.tolist() == [0, 0]
    assert jax.tree.map(lambda x: x + 1, copy.copy(variable)).raw_value.tolist() == [2, 2]


# Copies.


def test_replace_makes_a_new_variable_of_the_same_kind() -> None:
    variable = Param(jnp.ones(2), a=1)
    other = variable.replace(value=jnp.zeros(3), b=2)
    assert type(other) is Param and other.shape == (3,)
    assert other.get_metadata() == {"a": 1, "b": 2} and variable.get_metadata() == {"a": 1}
    same = variable.copy()
    assert same is not variable and same.get_raw_value() is variable.get_raw_value()
    assert same._meta is variable._meta


def test_copy_from_takes_value_and_metadata_of_the_same_kind() -> None:
    variable, other = Param(jnp.ones(2), a=1), Param(jnp.zeros(3), b=2)
    variable.copy_from(other)
    assert variable.shape == (3,) and variable.get_metadata() == {"b": 2}
    with pytest.raises(TypeError, match="a Param cannot copy from a BatchStat"):
        variable.copy_from(BatchStat(jnp.ones(2)))
    variable.update_from_state(BatchStat(jnp.ones(2)))
    assert type(variable) is Param and variable.shape == (2,) and variable.get_metadata() == {}


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
@pytest.mark.parametrize("value", [np.arange(3), {"a": jnp.ones(2)}, None], ids=str)
def test_copies_are_equal_and_separate(duplicate: Any, value: Any) -> None:
    variable = Custom(value, note=("a", 1))
    other = duplicate(variable)
    assert type(other) is Custom and other is not variable
    assert other._meta is variable._meta and other._version == 0
    assert jax.tree.structure(other) == jax.tree.structure(variable)
    other.value = 5
    assert int(other[...]) == 5 and jax.tree.structure(variable.value) == jax.tree.structure(value)


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
    assert type(other) is Custom and other._meta is variable._meta
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
    assert other[...].tolist() == [2, 2] and other.a == 1
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


# As a pytree.


def test_a_variable_is_a_node_with_one_child_named_value() -> None:
    variable = Param(jnp.ones(2), a=1)
    paths, treedef = jax.tree_util.tree_flatten_with_path(variable)
    assert paths[0][0] == (GetAttrKey("value"),) and paths[0][1] is variable.get_raw_value()
    assert treedef == jax.tree.structure(variable)
    assert jax.tree_util.keystr(paths[0][0]) == ".value"


def test_metadata_and_kind_are_part_of_the_tree_structure() -> None:
    def structure(make: Any, **metadata: Any) -> Any:
        return jax.tree.structure(make(jnp.ones(2), **metadata))

    assert structure(Param, a=1, b=2) == structure(Param, b=2, a=1)
    assert structure(Param, a=1) != structure(Param, a=1.0)
    assert structure(Param, a=1) != structure(Param, a=True)
    assert structure(Param) != structure(BatchStat)
    assert hash(structure(Param, a=1)) == hash(structure(Param, a=1))


@pytest.mark.parametrize(
    "leaf",
    [None, object(), True, 0, "label", jax.ShapeDtypeStruct((2,), jnp.float32), (1, 2)],
    ids=["none", "object", "bool", "axis", "label", "shape", "tuple"],
)
@pytest.mark.parametrize("cls", [Variable, Param, Custom])
def test_anything_may_stand_in_place_of_a_leaf(cls: Any, leaf: Any) -> None:
    def refuse(variable: Any, value: Any) -> Any:
        raise AssertionError("no hook runs")

    variable = cls(jnp.ones(2), a=1, on_set_value=refuse)
    other = jax.tree.map(lambda _: leaf, variable)
    assert type(other) is cls and other._value is leaf and other._meta is variable._meta
    assert other._level is None and other._version == 0


def test_variables_can_be_leaves() -> None:
    tree = {"a": Param(jnp.ones(2)), "b": [Cache(jnp.ones(3)), 1]}
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)
    assert [type(leaf) for leaf in leaves] == [Param, Cache, int]
    shapes = jax.tree.map(lambda v: v.shape if is_variable(v) else v, tree, is_leaf=is_variable)
    assert shapes == {"a": (2,), "b": [(3,), 1]}


@pytest.mark.parametrize("cls", [Variable, Param, Custom])
def test_plain_transforms_take_and_return_variables(cls: Any) -> None:
    variable = cls(jnp.arange(3.0), a=1)
    doubled = jax.jit(lambda v: v.replace(v * 2))(variable)
    assert type(doubled) is cls and doubled.a == 1
    assert doubled[...].tolist() == [0, 2, 4]
    gradient = jax.grad(lambda v: (v**2).sum())(variable)
    assert type(gradient) is cls and gradient[...].tolist() == [0, 2, 4]
    mapped = jax.vmap(lambda v: v + 1)(variable)
    assert mapped.tolist() == [1, 2, 3]
    carried, _ = jax.lax.scan(lambda v, _: (v.replace(v + 1), None), variable, None, length=2)
    assert carried[...].tolist() == [2, 3, 4]


def test_axes_can_be_given_at_the_variable() -> None:
    variable = Param(jnp.ones((2, 3)))
    axes = jax.tree.map(lambda _: 1, variable)
    assert jax.vmap(lambda v: v.sum(), in_axes=(axes,))(variable).tolist() == [2, 2, 2]


def test_variables_with_equal_metadata_share_one_trace() -> None:
    traces = []
    f = jax.jit(lambda v: traces.append(1))
    for note in ([1, 2], [1, 2], [1, 2.0]):
        f(Param(jnp.ones(2), note=note))
    assert len(traces) == 2


def test_opaque_flattening_gives_one_leaf_and_takes_it_back() -> None:
    variable = Param(jnp.ones(2), a=1)
    with trace.opaque_nodes():
        leaves, treedef = jax.tree.flatten([variable, 1])
        paths = jax.tree_util.tree_leaves_with_path(variable)
    assert isinstance(leaves[0], trace.Opaque) and leaves[0].node is variable
    assert paths[0][1].node is variable
    assert jax.tree.unflatten(treedef, leaves)[0] is variable
    assert jax.tree.unflatten(treedef, ["other", 1]) == ["other", 1]
    assert jax.tree.leaves(variable)[0] is variable.get_raw_value()


def test_opaque_flattening_is_seen_by_its_own_thread_only() -> None:
    variable, found = Param(jnp.ones(2)), []
    with trace.opaque_nodes():
        thread = threading.Thread(target=lambda: found.extend(jax.tree.leaves(variable)))
        thread.start()
        thread.join()
    assert found == [variable.get_raw_value()] or found[0] is variable.get_raw_value()


# Trace levels.


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda v: v.set_value(0), "set the value of Param"),
        (lambda v: v.__setitem__(0, 5), "set the value of Param"),
        (lambda v: v.set_raw_value(0), "set the value of Param"),
        (lambda v: setattr(v, "value", 0), "set the value of Param"),
        (lambda v: v.set_metadata(a=2), "set the metadata of Param"),
        (lambda v: v.del_metadata("a"), "set the metadata of Param"),
        (lambda v: v.copy_from(Param(0)), "set the metadata of Param"),
    ],
)
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_a_write_from_another_level_is_refused(transform: Any, write: Any, message: str) -> None:
    variable = Param(jnp.ones(2), a=1)

    def function(x: jax.Array) -> jax.Array:
        write(variable)
        return x.sum()

    with pytest.raises(TraceLevelError, match=f"Cannot {message}"):
        transform(function)(jnp.ones(2))
    assert variable[...].tolist() == [1, 1] and variable.a == 1


def test_a_variable_can_be_read_anywhere() -> None:
    variable = Param(jnp.ones(2), a=1)
    f = jax.jit(jax.vmap(lambda x: x * variable.a + variable[0] + variable.shape[0]))
    assert f(jnp.arange(2.0)).tolist() == [3, 4]


def test_a_variable_made_inside_a_trace_can_be_written_there() -> None:
    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        variable = Param(x)
        variable[0] = 5
        variable.set_metadata(a=1)
        return variable[...]

    assert f(jnp.ones(2)).tolist() == [5, 1]


def test_a_variable_that_jax_built_can_be_written_where_it_was_built() -> None:
    @jax.jit
    def f(variable: Param[jax.Array]) -> Any:
        variable[...] += 1
        return variable

    variable = f(Param(jnp.ones(2)))
    variable[...] += 1
    assert variable[...].tolist() == [3, 3]


def test_a_read_of_an_eager_variable_is_recorded_while_a_trace_asks_for_it() -> None:
    variable, records = Param(jnp.ones(2)), {}
    trace.FOREIGN_READS.recorders.append(records)
    try:
        for read in (lambda: variable[0], lambda: variable.value, lambda: variable.T):
            records.clear()
            read()
            assert records[id(variable)][0]() is variable
    finally:
        trace.FOREIGN_READS.recorders.pop()


# Kinds.


def test_kinds_derive_from_each_other() -> None:
    for kind in (Param, BatchStat, Cache, Intermediate, RngState, OptState):
        assert kind.__base__ is Variable
    assert issubclass(Perturbation, Intermediate) and issubclass(LoRAParam, Param)
    assert issubclass(RngKey, RngState) and issubclass(RngCount, RngState)
    assert issubclass(OptArray, OptState) and issubclass(OptVariable, OptState)
    assert VariableState is Variable
    assert Param(jnp.ones(2)).type is Param


def test_a_repr_names_kind_shape_and_metadata() -> None:
    assert repr(Param(jnp.ones((2, 3)), note="x")).startswith("Param(float32[2,3], note='x')")
    assert "Param" in repr(jax.tree.map(lambda _: object(), Param(jnp.ones(2))))

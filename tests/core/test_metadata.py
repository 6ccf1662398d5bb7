"""Metadata of Variables: interned, static, and the place of hooks."""

import copy
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxlite._core import versions
from nnxlite._core.errors import StaticValueError
from nnxlite._core.keys import typed_key
from nnxlite._core.metadata import EMPTY, Meta, VariableMetadata, with_metadata
from nnxlite._core.variable import Param, Variable

names = st.sampled_from("abc")
values = st.sampled_from([None, 0, 0.0, False, 1, True, "x", ("x", None), [1], [1.0], {"k": [1]}])
fields = st.dictionaries(names, values)


@given(fields, fields)
def test_metas_are_identical_exactly_for_typed_equal_fields(a: Any, b: Any) -> None:
    assert (Meta.of(a) is Meta.of(b)) == (typed_key(a) == typed_key(b))


@given(fields)
def test_pickling_and_copying_a_meta_gives_itself(a: Any) -> None:
    meta = Meta.of(a)
    assert pickle.loads(pickle.dumps(meta)) is meta
    assert copy.copy(meta) is copy.deepcopy(meta) is meta


@given(fields)
def test_a_meta_gives_the_fields_back_sorted(a: Any) -> None:
    mapping = Meta.of(a).mapping
    assert mapping == a
    assert list(mapping) == sorted(a)


def test_no_fields_are_the_empty_meta() -> None:
    assert Meta.of({}) is EMPTY
    assert Param(jnp.ones(2))._meta is EMPTY


def test_the_mapping_cannot_be_changed() -> None:
    meta = Meta.of({"a": 1, "sizes": [1]})
    with pytest.raises(TypeError, match="does not support item assignment"):
        meta.mapping["a"] = 2  # type: ignore[index]
    meta.mapping["sizes"].append(2)
    assert meta.mapping["sizes"] == [1]


def test_a_list_given_as_metadata_is_copied() -> None:
    sizes = [1]
    variable = Param(jnp.ones(2), sizes=sizes)
    sizes.append(2)
    variable.sizes.append(3)
    variable.get_metadata("sizes").append(4)
    assert variable.sizes == [1]


def test_a_meta_is_written_with_its_fields() -> None:
    assert repr(Meta.of({"b": "x", "a": (1, None)})) == "Meta(a=(1, None), b='x')"


def test_a_field_name_is_a_string() -> None:
    with pytest.raises(TypeError, match="field name 1; names are strings"):
        Param(jnp.ones(2)).set_metadata({1: 2})


def test_threads_get_the_same_meta() -> None:
    with ThreadPoolExecutor(8) as pool:
        metas = list(
            pool.map(lambda n: [Meta.of({"n": (n % 7, [n])}) for n in range(50)], range(8))
        )
    assert len({id(meta) for row in metas for meta in row}) == 50


# Of a Variable.


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
    assert variable.has_metadata("a")
    assert not variable.has_metadata("b")
    assert variable.get_metadata("a") == 1
    assert variable.get_metadata("b", None) is None
    variable.del_metadata("a")
    assert variable.get_metadata() == {}
    assert variable._meta is EMPTY
    with pytest.raises(KeyError, match="Param has no metadata 'a'; it has none"):
        variable.del_metadata("a")
    with pytest.raises(KeyError, match="Param has no metadata 'a'"):
        variable.get_metadata("a")


@pytest.mark.parametrize("name", ["sharding", "sharding_names", "out_sharding"])
def test_sharding_has_one_field_under_three_names(name: str) -> None:
    variable = Param(jnp.ones(2), **{name: ("data",)})
    assert variable.get_metadata() == {"out_sharding": ("data",)}
    assert variable.get_metadata(name) == ("data",)
    assert variable.has_metadata(name)
    variable.set_metadata(name, (None,))
    variable.set_metadata(**{name: ("model",)})
    assert variable.out_sharding == variable.sharding_names == ("model",)
    variable.del_metadata(name)
    assert variable._meta is EMPTY
    assert variable.sharding_names is None


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
    assert variable._version == 1
    assert versions.EPOCH.now == epoch
    variable.set_metadata(a=2.0)
    assert variable._version == 2
    assert versions.EPOCH.now > epoch


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

"""The functions on States: flat and dict forms, filters, merging, mapping."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.objects import Net, param


def state():
    return nnx.State({"a": {0: param(2), 10: param(2), 2: nnx.BatchStat(jnp.ones(1))}, "b": 1})


PATHS = (("a", 0), ("a", 2), ("a", 10), ("b",))


def test_flat_state_is_sorted_with_ints_in_numeric_order():
    flat = nnx.to_flat_state(state())
    assert flat.paths == PATHS
    assert [path for path, _ in flat] == list(PATHS)
    assert flat[3] == (("b",), 1)
    assert flat.leaves[3] == 1


def test_flat_state_holds_the_variables_of_the_state():
    s = state()
    assert s.flat_state().leaves[0] is s["a"][0]


def test_flat_state_is_a_pytree():
    flat = jax.jit(lambda f: f)(nnx.to_flat_state(nnx.State({"a": {"b": param(2)}})))
    assert isinstance(flat, nnx.FlatState)
    assert flat.paths == (("a", "b"),)
    assert isinstance(flat.leaves[0], nnx.Param)


@pytest.mark.parametrize("make", [nnx.from_flat_state, nnx.State.from_flat_path])
def test_from_flat_undoes_to_flat(make):
    for flat in (state().flat_state(), dict(state().flat_state()), reversed(state().flat_state())):
        assert make(flat)._meta is state()._meta


def test_from_flat_copies_variables():
    v = param(2)
    assert nnx.from_flat_state({("a",): v})["a"] is not v


@pytest.mark.parametrize(
    "flat", [{("a",): 1, ("a", "b"): 2}, {("a", "b"): 2, ("a",): 1}, [(("a", "b"), 1), (("a",), 2)]]
)
def test_path_that_is_leaf_and_parent_is_an_error(flat):
    with pytest.raises(nnx.errors.StructureError, match=r"state\.a cannot be both a leaf and"):
        nnx.from_flat_state(flat)


@pytest.mark.parametrize("path", [(), "a", 3])
def test_what_is_no_path_is_an_error(path):
    with pytest.raises(nnx.errors.StructureError, match="is no path of a State"):
        nnx.from_flat_state({path: 1})


def test_filter_leaves_the_rest_out_and_split_takes_all():
    params, stats = nnx.filter_state(state(), nnx.Param, nnx.BatchStat)
    assert (params.flat_state().paths, stats.flat_state().paths) == (
        (("a", 0), ("a", 10)),
        (("a", 2),),
    )
    first, rest = nnx.split_state(state(), nnx.PathContains(0), ...)
    assert first.flat_state().paths == (("a", 0),)
    assert rest.flat_state().paths == PATHS[1:]
    assert state().filter(nnx.Param).flat_state().paths == (("a", 0), ("a", 10))
    assert [len(s.flat_state()) for s in state().split(nnx.Param, ...)] == [2, 2]


def test_unmatched_leaves_are_an_error_that_lists_them():
    listed = r"leave 2 of 4 .*model\.a\[2\] \(BatchStat\), model\.b \(int"
    with pytest.raises(nnx.errors.StructureError, match=listed):
        nnx.split_state(state(), nnx.Param)


def test_filters_give_states_of_their_own():
    s = state()
    part = nnx.filter_state(s, nnx.Param)
    part["a"][0][...] = jnp.zeros(2)
    assert s["a"][0][...].tolist() == [1.0, 1.0]


def test_merge_takes_the_later_leaf_and_undoes_split():
    parts = nnx.split_state(state(), nnx.Param, ...)
    assert nnx.merge_state(*parts)._meta is state()._meta
    merged = nnx.State.merge({"x": 1, "y": {"z": 2}}, nnx.State({"y": {"z": 3}}))
    assert nnx.to_pure_dict(merged) == {"x": 1, "y": {"z": 3}}


@pytest.mark.parametrize("pair", [({"a": 1}, {"a": {"b": 2}}), ({"a": {"b": 2}}, {"a": 1})])
def test_merge_of_clashing_states_is_an_error(pair):
    with pytest.raises(nnx.errors.StructureError, match=r"state\.a cannot be both a leaf and"):
        nnx.merge_state(*pair)


def test_map_gives_path_and_leaf():
    seen = []
    mapped = nnx.map_state(lambda path, leaf: seen.append(path) or len(path), state())
    assert tuple(seen) == PATHS
    assert nnx.to_pure_dict(mapped) == {"a": {0: 2, 2: 2, 10: 2}, "b": 1}
    assert nnx.to_pure_dict(state().map(lambda path, leaf: 0))["b"] == 0


def test_map_of_the_identity_owns_its_variables():
    s = state()
    assert nnx.map_state(lambda path, leaf: leaf, s)["a"][0] is not s["a"][0]


def test_functions_take_nested_mappings_too():
    nested = {"a": {"w": param(1), "s": nnx.BatchStat(jnp.ones(1))}}
    assert list(nnx.filter_state(nested, nnx.Param)["a"]) == ["w"]
    assert nnx.to_flat_state(nested).paths == (("a", "s"), ("a", "w"))
    assert list(nnx.map_state(lambda path, x: 1, nested)["a"]) == ["s", "w"]
    assert nnx.to_pure_dict(nested)["a"]["w"].tolist() == [1.0]


def test_pure_dict_holds_values_in_plain_dicts():
    pure = nnx.to_pure_dict(nnx.State({"a": {0: param(2)}, "x": np.ones(1)}))
    assert type(pure["a"]) is dict
    assert pure["a"][0].tolist() == [1.0, 1.0]
    assert isinstance(pure["a"][0], jax.Array)
    assert nnx.to_pure_dict(state(), lambda leaf: type(leaf).__name__) == {
        "a": {0: "Param", 2: "BatchStat", 10: "Param"},
        "b": "int",
    }


def test_replace_sets_values_in_place():
    s = state()
    before = s["a"][0]
    s.replace_by_pure_dict({"a": {0: jnp.zeros(2)}, "b": 5})
    assert s["a"][0] is before
    assert s["a"][0][...].tolist() == [0.0, 0.0]
    assert s["a"][10][...].tolist() == [1.0, 1.0]
    assert s["b"] == 5


def test_replace_takes_digit_strings_for_ints():
    s = state()
    nnx.replace_by_pure_dict(s, {"a": {"0": jnp.zeros(2), "10": jnp.zeros(2)}})
    assert s["a"][10][...].tolist() == [0.0, 0.0]


def test_replace_takes_dicts_as_values_of_one_variable():
    s = nnx.State({"w": nnx.Param({"u": jnp.ones(1), "0": jnp.ones(1)})})
    s.replace_by_pure_dict({"w": {"u": jnp.zeros(1), "0": jnp.zeros(1)}})
    assert s["w"].get_value()["0"].tolist() == [0.0]


def test_replace_uses_the_given_function():
    s = state()
    s.replace_by_pure_dict({"a": {0: 3.0}}, lambda leaf, value: leaf + value)
    assert s["a"][0][...].tolist() == [4.0, 4.0]
    assert isinstance(s["a"][0], nnx.Param)
    new = nnx.BatchStat(jnp.zeros(1))
    s.replace_by_pure_dict({"a": {0: 3.0}, "b": 2}, lambda leaf, value: new)
    assert type(s["a"][0]) is type(s["b"]) is nnx.BatchStat
    assert s["b"] is not new


@pytest.mark.parametrize("unknown", [{"c": 1}, {"a": {1: 1}}, {"a": {"x": {"y": 1}}}, {"a": 1}])
def test_replace_of_an_unknown_path_is_an_error_and_changes_nothing(unknown):
    s = state()
    with pytest.raises(nnx.errors.StructureError, match=r"is not in the State, which has state\.a"):
        s.replace_by_pure_dict({"b": 7, **unknown})
    assert s["b"] == 1


def test_replace_at_another_level_is_an_error_and_changes_nothing():
    s = nnx.state(Net(x=jnp.ones(2), w=param(2)))

    def f(x):
        s.replace_by_pure_dict({"x": x, "w": x})
        return x

    with pytest.raises(nnx.errors.TraceLevelError, match="replace values of a State"):
        jax.jit(f)(jnp.zeros(2))
    assert s["x"].tolist() == [1.0, 1.0]


def test_restored_paths_have_ints_for_digit_strings():
    restored = nnx.restore_int_paths({"layers": {"0": {"w": 1}, "10": 2, "x1": 3}, "٣": 4})
    assert restored == {"layers": {0: {"w": 1}, 10: 2, "x1": 3}, "٣": 4}


def test_restored_paths_that_clash_are_an_error():
    with pytest.raises(nnx.errors.StructureError, match="are the same int"):
        nnx.restore_int_paths({"0": 1, 0: 2})


def test_replace_works_on_a_view():
    s = state()
    nnx.replace_by_pure_dict(s["a"], {0: jnp.zeros(2)})
    assert s["a"][0][...].tolist() == [0.0, 0.0]


def test_statelib_has_the_functions():
    assert nnx.statelib.State is nnx.State
    assert nnx.statelib.filter_state is nnx.filter_state

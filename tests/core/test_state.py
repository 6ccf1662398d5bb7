"""State: a mapping that owns its Variables, its views, and its form as a pytree."""

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, is_variable, key_paths, param


def net():
    return Net(layers=[Net(kernel=param(2), bias=param(2))], head=param(2), x=jnp.ones(2))


def from_jax():
    return jax.tree.map(lambda x: x, nnx.state(net()))


def from_dicts():
    layers = {0: {"kernel": param(2), "bias": param(2)}}
    return nnx.State({"layers": layers, "x": jnp.ones(2), "head": param(2)})


MADE = pytest.mark.parametrize(
    "make",
    [lambda: nnx.state(net()), from_jax, from_dicts, lambda: nnx.State({"in": from_dicts()})["in"]],
    ids=["lazy", "from jax", "from dicts", "view"],
)


@MADE
def test_access_by_key_by_attribute_and_by_path_agrees(make):
    state = make()
    assert state["layers"][0]["kernel"] is state.layers[0].kernel
    assert state["head"] is state.head is dict(state.flat_state())[("head",)]
    assert isinstance(state.layers, nnx.State)
    assert state.x.tolist() == [1.0, 1.0]


@MADE
def test_it_is_a_mapping_in_sorted_order(make):
    state = make()
    assert isinstance(state, Mapping)
    assert list(state) == list(state.keys()) == ["head", "layers", "x"]
    assert list(state.layers[0]) == ["bias", "kernel"]
    assert len(state) == 3
    assert "head" in state
    assert "tail" not in state
    assert state.get("tail") is None


@MADE
def test_writes_to_a_variable_change_this_state_only(make):
    state = make()
    other, mapped = nnx.State(state), jax.tree.map(lambda x: x, state)
    state.head[...] = jnp.zeros(2)
    state.layers[0].kernel.value = jnp.zeros(3)
    for each in (other, mapped):
        assert each.head[...].tolist() == [1.0, 1.0]
        assert each.layers[0].kernel.shape == (2,)


def test_state_and_model_share_no_variable():
    model = net()
    state = nnx.state(model)
    state.head[...] = jnp.zeros(2)
    state.head.set_metadata("tag", "x")
    model.layers[0].kernel[...] = jnp.zeros(2)
    assert model.head[...].tolist() == [1.0, 1.0]
    assert not model.head.has_metadata("tag")
    assert state.layers[0].kernel[...].tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "derive",
    [
        lambda state, m: nnx.state(m),
        lambda state, m: state.filter(...),
        lambda state, m: nnx.State(state),
        lambda state, m: state | {"more": np.zeros(1)},
        lambda state, m: copy.copy(state),
        lambda state, m: nnx.map_state(lambda path, leaf: leaf, state),
    ],
    ids=["state", "filter", "State", "or", "copy", "map_state"],
)
def test_numpy_arrays_changed_in_place_change_this_state_only(derive):
    model = Net(w=nnx.Param(np.zeros(2)), bare=np.zeros(2), held=nnx.state(Net(x=np.zeros(2))))
    state = nnx.split(model)[1]
    other = derive(state, model)
    state["w"][...] += 1
    state["bare"] += 1
    state["bare"][...] += 1
    state["held"]["x"] += 1
    model.bare += 4
    assert (state["w"][0], state["bare"][0], state["held"]["x"][0]) == (1, 2, 1)
    assert (other["w"][0], other["bare"][0], other["held"]["x"][0]) == (0, 0, 0)
    assert (model.w[0], model.bare[0], model.held["x"][0]) == (0, 4, 0)


def test_numpy_arrays_of_a_state_are_copied_on_the_way_to_an_object():
    model = Net(bare=np.zeros(2), held=nnx.state(Net(x=np.zeros(2))))
    graphdef, state = nnx.split(model)
    merged = nnx.merge(graphdef, state)
    nnx.update(model, state)
    state["bare"] += 1
    state["held"]["x"] += 1
    for each in (merged, model):
        assert (each.bare[0], each.held["x"][0]) == (0, 0)
        each.bare += 3
    assert state["bare"][0] == 1


def test_constructor_and_setter_take_copies_of_variables():
    v = param(2, tag="x")
    state = nnx.State({"a": v, "b": {"c": v}})
    state["d"] = v
    state["e"] = {"f": v}
    leaves = [leaf for _, leaf in state.flat_state()]
    assert len({id(x) for x in (v, *leaves)}) == 5
    assert all(type(leaf) is nnx.Param and leaf.tag == "x" for leaf in leaves)
    assert all(leaf.get_raw_value() is v.get_raw_value() for leaf in leaves)


def test_nested_states_and_other_mappings_become_levels():
    state = nnx.State({"a": nnx.State({"b": param(1)}), "c": nnx.Dict(d=param(1))})
    assert state.flat_state().paths == (("a", "b"), ("c", "d"))
    assert nnx.State([("z", 1), ("a", 2)]).flat_state() == ((("a",), 2), (("z",), 1))


@MADE
def test_writes_through_views_keep_the_root_consistent(make):
    state = make()
    jax.tree.leaves(state)
    state.flat_state()
    view = state["layers"][0]
    view["scale"] = param(2)
    del view["bias"]
    view["kernel"] = nnx.BatchStat(jnp.zeros(2))
    assert state.flat_state().paths == (
        ("head",),
        ("layers", 0, "kernel"),
        ("layers", 0, "scale"),
        ("x",),
    )
    assert type(state.layers[0].kernel) is nnx.BatchStat
    assert len(jax.tree.leaves(state)) == 4
    assert view["scale"] is state.layers[0].scale


def test_setting_attributes_sets_items():
    state = nnx.State({})
    state.a = {"b": 1}
    state.a.c = 2
    del state.a.b
    assert nnx.to_pure_dict(state) == {"a": {"c": 2}}
    assert "a" in dir(state)


def test_mutable_mapping_methods_work():
    state = nnx.State({"a": 1, "b": 2})
    state.update(c=3)
    assert state.pop("a") == 1
    assert state.setdefault("d", 4) == 4
    assert list(state.items()) == [("b", 2), ("c", 3), ("d", 4)]
    state.clear()
    assert len(state) == 0
    assert not state


@pytest.mark.parametrize("read", [lambda s: s["nope"], lambda s: s.__delitem__("nope")])
def test_missing_key_is_an_error_that_lists_the_keys(read):
    state = nnx.State({"a": {"b": 1, "c": 2}})
    with pytest.raises(KeyError, match=r"state\.a has no key 'nope'; it has 'b', 'c'"):
        read(state["a"])


def test_missing_attribute_is_an_attribute_error():
    with pytest.raises(AttributeError, match="state has no key 'nope'; it has 'a'"):
        nnx.State({"a": 1}).nope
    with pytest.raises(AttributeError, match="state has no key 'nope'"):
        del nnx.State({"a": 1}).nope
    assert not hasattr(nnx.State({}), "__array__")


@pytest.mark.parametrize(
    ("make", "where"),
    [
        (lambda: nnx.State({1: 1, "a": 2}), "state has keys of types int, str"),
        (lambda: nnx.State({"a": {(1,): 2}}), r"state\.a has keys of types tuple"),
        (lambda: nnx.State({"a": {True: 2}}), r"state\.a has keys of types bool"),
        (lambda: nnx.State({"a": {"b": 1}})["a"].__setitem__(0, 1), r"state\.a has .* int, str"),
        (lambda: nnx.State({}).__setitem__("a", {"b": {None: 1}}), r"state\.a\.b has .* NoneType"),
    ],
)
def test_mixed_and_odd_keys_are_errors_with_their_path(make, where):
    with pytest.raises(nnx.errors.StructureError, match=where):
        make()


def test_failed_write_changes_nothing():
    state = nnx.State({"a": {"b": 1}})
    for key, value in ((0, 1), ("c", {1: 1, "x": 2})):
        with pytest.raises(nnx.errors.StructureError, match=r"state\.a"):
            state["a"][key] = value
    assert nnx.to_pure_dict(state) == {"a": {"b": 1}}


def test_mapping_that_holds_itself_is_an_error_with_its_path():
    loop = {"b": {}}
    loop["b"]["c"] = loop
    with pytest.raises(nnx.errors.StructureError, match=r"state\.a\.b\.c is one of the mappings"):
        nnx.State({"a": loop})


def test_operators_merge_and_take_away():
    a, b = nnx.State({"x": 1, "y": {"z": 2}}), nnx.State({"y": {"z": 3, "w": 4}})
    assert nnx.to_pure_dict(a | b) == {"x": 1, "y": {"z": 3, "w": 4}}
    assert nnx.to_pure_dict(b | a) == {"x": 1, "y": {"z": 2, "w": 4}}
    assert nnx.to_pure_dict({"x": 5} | a) == {"x": 1, "y": {"z": 2}}
    assert nnx.to_pure_dict(a - b) == {"x": 1}
    assert nnx.to_pure_dict(a - {"x": 0}) == {"y": {"z": 2}}
    for operator in (lambda: a | 1, lambda: a - 1):
        with pytest.raises(TypeError, match="unsupported operand"):
            operator()


def test_equality_and_hash_are_by_identity():
    a, b = nnx.State({"x": 1}), nnx.State({"x": 1})
    assert a != b
    assert len({a, b, a}) == 2


@MADE
@pytest.mark.parametrize(
    "copied", [lambda s: pickle.loads(pickle.dumps(s)), copy.copy, copy.deepcopy, nnx.State]
)
def test_copies_are_equal_and_own_their_variables(make, copied):
    state = make()
    made = copied(state)
    assert_isomorphic(made.flat_state(), state.flat_state())
    assert jax.tree.structure(made) == jax.tree.structure(state)
    made.head[...] = jnp.zeros(2)
    made["new"] = 1
    assert state.head[...].tolist() == [1.0, 1.0]
    assert "new" not in state


def test_level_without_leaves_is_kept_by_copies():
    state = nnx.State({"a": {}, "b": 1})
    for made in (copy.copy(state), pickle.loads(pickle.dumps(state)), jax.tree.map(int, state)):
        assert jax.tree.structure(made) == jax.tree.structure(state)
        assert list(made) == ["a", "b"]


def test_uninitialized_state_raises_attribute_errors_only():
    with pytest.raises(AttributeError, match="no attribute '_tree'"):
        object.__new__(nnx.State)._tree


@MADE
def test_all_forms_have_equal_treedefs(make):
    assert jax.tree.structure(make()) == jax.tree.structure(nnx.state(net()))
    assert make()._meta is nnx.state(net())._meta


@MADE
def test_key_paths_are_those_of_flax(make):
    assert key_paths(make()) == [
        "['head'].value",
        "['layers'][0]['bias'].value",
        "['layers'][0]['kernel'].value",
        "['x']",
    ]
    path = jax.tree_util.tree_leaves_with_path(make())[1][0]
    assert [type(entry).__name__ for entry in path] == ["DictKey"] * 3 + ["GetAttrKey"]


@MADE
def test_it_crosses_plain_jax(make):
    state = make()
    doubled = jax.jit(lambda s: jax.tree.map(lambda x: x * 2, s))(state)
    assert doubled.layers[0].kernel[...].tolist() == [2.0, 2.0]
    stacked = jax.vmap(lambda s: s)(state)
    scanned = jax.lax.scan(lambda c, s: (c, s), 0, state)[1]
    grads = jax.grad(lambda s: (s.head * 3.0).sum() + s.x.sum())(state)
    assert_isomorphic(stacked.flat_state(), state.flat_state())
    assert_isomorphic(scanned.flat_state(), state.flat_state())
    assert grads.head[...].tolist() == [3.0, 3.0]
    assert grads.x.tolist() == [1.0, 1.0]


def test_donated_state_comes_back():
    state = nnx.state(net())
    out = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)(state)
    assert out.head[...].tolist() == [2.0, 2.0]


def test_is_leaf_sees_variables_and_states():
    state = nnx.state(net())
    assert [type(x) for x in jax.tree.leaves(state, is_leaf=is_variable)][:3] == [nnx.Param] * 3
    assert jax.tree.leaves([state], is_leaf=lambda x: isinstance(x, nnx.State)) == [state]


@pytest.mark.parametrize(
    "mark", [lambda x: None, lambda x: object(), lambda x: 0, lambda x: (1, 2)]
)
@pytest.mark.parametrize("is_leaf", [None, is_variable], ids=["arrays", "Variables"])
def test_anything_may_stand_at_a_leaf(is_leaf, mark):
    state = nnx.state(net())
    marked = jax.tree.map(mark, state, is_leaf=is_leaf)
    jax.tree.map(lambda a, b: None, state, marked, is_leaf=is_leaf)
    leaves, treedef = jax.tree.flatten(marked)
    assert jax.tree.structure(jax.tree.unflatten(treedef, leaves)) == treedef


def test_vmap_takes_states_of_axes_at_every_level():
    state = nnx.State({"a": {"w": nnx.Param(jnp.ones((2, 3)))}, "b": param(3)})

    def f(s):
        return s.a.w + s.b

    for axes in (
        nnx.State({"a": 0, "b": None}),
        nnx.State({"a": {"w": 0}, "b": None}),
        jax.tree.map(lambda v: 0 if v.ndim == 2 else None, state, is_leaf=is_variable),
    ):
        assert jax.vmap(f, in_axes=(axes,))(state).shape == (2, 3)


@pytest.mark.standard_promotion
def test_optax_steps_over_states():
    params = nnx.state(net(), nnx.Param)
    tx = optax.multi_transform(
        {"a": optax.adam(0.1), "b": optax.set_to_zero()}, nnx.State({"head": "a", "layers": "b"})
    )
    opt_state = tx.init(params)
    grads = jax.grad(lambda p: (p.head**2).sum() + (p.layers[0].bias ** 2).sum())(params)
    updates, _ = jax.jit(tx.update)(grads, opt_state, params)
    stepped = optax.apply_updates(params, updates)
    assert float(stepped.head[0]) < 1.0
    assert stepped.layers[0].bias[...].tolist() == [1.0, 1.0]


def test_one_trace_for_equal_states_however_made():
    traces = []
    f = jax.jit(lambda s: traces.append(1))
    for state in (nnx.state(net()), from_jax(), from_dicts()):
        f(state)
    assert len(traces) == 1


def test_lazy_state_makes_its_variables_once_for_all_threads():
    for _ in range(20):
        state, start, seen = nnx.state(net()), threading.Barrier(8), []

        def work(state=state, start=start, seen=seen):
            start.wait()
            seen.append((state["head"], len(state._value), state._meta))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert {id(v) for v, _, _ in seen} == {id(state["head"])}
        assert {(n, id(meta)) for _, n, meta in seen} == {(4, id(state._meta))}


def test_dropped_state_dies_at_once():
    model = net()
    state = nnx.state(model)
    jax.tree.leaves(state)
    nnx.merge(nnx.graphdef(model), state)
    died = weakref.ref(state), weakref.ref(state.head)
    gc.collect()
    gc.disable()
    try:
        del state
        assert [ref() for ref in died] == [None, None]
    finally:
        gc.enable()


def test_restructured_state_keeps_what_stays():
    state = from_dicts()
    view, head, kernel = state["layers"], state.head, state.layers[0].kernel
    other = nnx.State({"layers": {0: {"kernel": jnp.zeros(2)}, 1: {"new": 1}}, "head": param(3)})
    state._restructure(other._value, other._meta)
    assert state.head is head
    assert head.shape == (3,)
    assert state.layers[0].kernel.tolist() == [0.0, 0.0]
    assert view[1]["new"] == 1
    assert kernel[...].tolist() == [1.0, 1.0]


def test_values_may_be_set_in_every_form():
    for make in (lambda: nnx.state(net()), from_jax, from_dicts):
        state = make()
        state._value = [jnp.zeros(2)] * 4
        assert [x.tolist() for x in jax.tree.leaves(state)] == [[0.0, 0.0]] * 4
        assert state.x.tolist() == [0.0, 0.0]


def test_raw_mapping_holds_the_variables_in_dicts_of_its_own():
    state = from_dicts()
    raw = state.raw_mapping
    raw["layers"][0]["other"] = 1
    assert raw["head"] is state.head
    assert type(raw["layers"][0]) is dict
    assert "other" not in state.layers[0]

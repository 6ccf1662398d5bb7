"""merge and update: States to fresh objects, and to objects that exist."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Box, Net, Pair, param


def net():
    w = param(2)
    stat = nnx.BatchStat(jnp.ones(1))
    return Net(w=w, layers=[Net(w=w, stat=stat), {"a": param(1)}], x=jnp.ones(2), k=1)


def test_merge_undoes_split_whatever_the_filters_and_their_order():
    graphdef, params, rest = nnx.split(net(), nnx.Param, ...)
    assert_isomorphic(nnx.merge(graphdef, rest, params), net())
    assert_isomorphic(nnx.merge(graphdef, params | rest, copy=True), net())


def test_merge_shares_no_variable_with_its_states():
    graphdef, state = nnx.split(net())
    a, b = nnx.merge(graphdef, state), nnx.merge(graphdef, state)
    a.w[...] = jnp.zeros(2)
    assert b.w[...].tolist() == state["layers"][0]["w"][...].tolist() == [1.0, 1.0]


def test_merge_takes_nested_dicts_and_numbers():
    model = Net(w=param(2), s=nnx.Variable(jnp.float32(1)), x=jnp.ones(1))
    merged = nnx.merge(nnx.graphdef(model), {"w": jnp.zeros(2), "s": 2.0, "x": np.zeros(1)})
    assert isinstance(merged.s.get_raw_value(), jax.Array)
    assert not merged.s.get_raw_value().weak_type
    assert merged.w[...].tolist() == [0.0, 0.0]
    assert isinstance(merged.x, np.ndarray)


def test_values_that_are_dicts_are_merged_and_updated_from_pure_dicts():
    model = Net(w=nnx.Param({"u": jnp.ones(1), "v": {"z": jnp.ones(1)}}))
    pure = {"w": {"u": jnp.zeros(1), "v": {"z": jnp.zeros(1)}}}
    merged = nnx.merge(nnx.graphdef(model), pure)
    nnx.update(model, pure)
    for each in (model, merged):
        assert each.w.get_value()["v"]["z"].tolist() == [0.0]


def test_merge_takes_kind_and_metadata_of_the_state():
    graphdef, state = nnx.split(Net(w=param(2), s=nnx.State({"v": param(1)})))
    state["w"] = nnx.BatchStat(jnp.zeros(2), tag="new")
    state["s"]["v"].set_metadata("tag", "inner")
    merged = nnx.merge(graphdef, state)
    assert (type(merged.w), merged.w.tag) == (nnx.BatchStat, "new")
    assert merged.s.v.tag == "inner"


@pytest.mark.parametrize("placeholder", [None, object(), jax.ShapeDtypeStruct((2,), jnp.float32)])
def test_merge_takes_placeholders(placeholder):
    graphdef, state = nnx.split(Net(w=param(2)))
    state = jax.tree.map(lambda _: placeholder, state)
    assert nnx.merge(graphdef, state).w.get_raw_value() is placeholder


def test_merge_with_missing_and_surplus_leaves_is_an_error_that_lists_them():
    graphdef, state = nnx.split(net())
    with pytest.raises(
        nnx.errors.StructureError, match=r"1 leaves are missing: model\.x; 1 .* model\.y\.z"
    ):
        nnx.merge(graphdef, nnx.State({"layers": state["layers"], "y": {"z": 1}}))


def test_merge_with_one_leaf_twice_is_an_error_that_names_it():
    graphdef, state = nnx.split(net())
    with pytest.raises(nnx.errors.StructureError, match=r"model\.x is in two of the States"):
        nnx.merge(graphdef, state, {"x": 1})


def test_digit_strings_are_an_error_with_the_way_out():
    graphdef, state = nnx.split(Net(layers=[param(1)]))
    strings = {"layers": {"0": jnp.ones(1)}}
    with pytest.raises(nnx.errors.StructureError, match=r"nnx\.restore_int_paths"):
        nnx.merge(graphdef, strings)
    with pytest.raises(nnx.errors.StructureError, match=r"nnx\.restore_int_paths"):
        nnx.update(nnx.merge(graphdef, state), strings)


@pytest.mark.parametrize("wrong", [net(), 3, [1]])
def test_what_is_no_state_is_an_error(wrong):
    with pytest.raises(TypeError, match="Expected a State or nested dicts, found"):
        nnx.merge(nnx.graphdef(net()), wrong)
    with pytest.raises(TypeError, match="Expected a State or nested dicts, found"):
        nnx.update(net(), wrong)


def test_what_is_no_graphdef_is_an_error():
    with pytest.raises(TypeError, match="Expected a GraphDef, found State"):
        nnx.merge(nnx.state(net()), nnx.state(net()))


def test_cyclic_dict_is_an_error_with_its_path():
    loop = {}
    loop["w"] = loop
    with pytest.raises(nnx.errors.StructureError, match=r"state\.w is one of the mappings"):
        nnx.merge(nnx.graphdef(Net(v=param(1))), loop)


def test_merge_inside_a_trace_is_writable_there():
    graphdef, state = nnx.split(net())

    def loss(x):
        model = nnx.merge(graphdef, state)
        model.w[...] = x
        model.x = x
        model.layers.append(param(1))
        return (model.layers[0].w + model.x).sum()

    assert jax.grad(loss)(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert state["layers"][0]["w"][...].tolist() == [1.0, 1.0]


def test_update_changes_values_in_place():
    model = net()
    w, layers, state = model.w, model.layers, nnx.state(net())
    nnx.update(model, jax.tree.map(lambda x: x * 0, state))
    assert model.w is w is model.layers[0].w
    assert model.layers is layers
    assert [x.tolist() for x in (model.w[...], model.x)] == [[0.0, 0.0], [0.0, 0.0]]
    assert_isomorphic(nnx.merge(nnx.graphdef(net()), state), net())


def test_update_leaves_out_what_the_state_does_not_have():
    model = net()
    nnx.update(model, {"layers": {1: {"a": jnp.zeros(1)}}})
    assert model.layers[1]["a"][...].tolist() == [0.0]
    assert model.w[...].tolist() == [1.0, 1.0]


def test_later_states_win():
    model = Net(w=param(1))
    nnx.update(model, {"w": jnp.zeros(1)}, {"w": jnp.full(1, 2.0)})
    assert model.w[...].tolist() == [2.0]


def test_update_carries_metadata_but_not_the_kind():
    model = Net(w=param(1), s=nnx.State({"v": param(1), "x": jnp.ones(1)}))
    before = nnx.graphdef(model)
    state = nnx.state(model)
    state["w"] = nnx.BatchStat(jnp.zeros(1), tag="new")
    state["s"]["v"].set_metadata("tag", "inner")
    nnx.update(model, state)
    assert (type(model.w), model.w.tag, model.s.v.tag) == (nnx.Param, "new", "inner")
    assert nnx.graphdef(model) is not before


def test_update_of_arrays_in_tuples_and_registered_pytrees():
    model = Net(t=(jnp.ones(1), Pair(param(1), Box(jnp.ones(1)))))
    box = model.t[1].right
    nnx.update(model, jax.tree.map(lambda x: x * 0, nnx.state(model)))
    assert model.t[0].tolist() == model.t[1].left[...].tolist() == [0.0]
    assert model.t[1].right.inner.tolist() == [0.0]
    assert box.inner.tolist() == [1.0]


def test_update_of_a_state_as_attribute():
    model = Net(s=nnx.State({"a": param(1), "x": jnp.ones(1)}))
    a = model.s.a
    nnx.update(model, {"s": {"a": jnp.zeros(1), "x": jnp.zeros(1)}})
    assert model.s.a is a
    assert a[...].tolist() == model.s.x.tolist() == [0.0]


@pytest.mark.standard_promotion
def test_optimizer_state_of_optax_may_be_an_attribute():
    params = nnx.state(net(), nnx.Param)
    model = Net(opt=optax.adam(0.1).init(params))
    merged = nnx.merge(*nnx.split(model))
    assert type(merged.opt) is type(model.opt)
    assert jax.tree.structure(merged) == jax.tree.structure(model)
    nnx.update(model, jax.tree.map(lambda x: x + 1, nnx.state(model)))
    assert int(model.opt[0].count) == 1
    assert isinstance(model.opt[0].mu, nnx.State)


def test_surplus_paths_are_an_error_and_nothing_is_changed():
    model = net()
    with pytest.raises(nnx.errors.StructureError, match=r"model\.y.* Nothing was updated"):
        nnx.update(model, {"x": jnp.zeros(2)}, {"y": 1})
    assert model.x.tolist() == [1.0, 1.0]


def test_update_at_another_level_is_an_error_and_changes_nothing():
    model = net()

    def f(x):
        nnx.update(model, {"x": x, "layers": {0: {"w": x}}})
        return x.sum()

    with pytest.raises(nnx.errors.TraceLevelError, match=r"Cannot update model\."):
        jax.grad(f)(jnp.zeros(2))
    assert model.x.tolist() == model.w[...].tolist() == [1.0, 1.0]


def test_update_numbers_become_arrays():
    model = Net(s=nnx.Variable(jnp.float32(1)))
    nnx.update(model, {"s": 2})
    assert model.s.get_raw_value().dtype == jnp.int32


def test_large_state_as_attribute_updates_in_linear_time():
    many = {f"v{n}": param(1) for n in range(300)}
    model = Net(s=nnx.State(many))
    zeros = jax.tree.map(lambda x: x * 0, nnx.state(model))
    calls = []
    original = nnx.State._flat
    nnx.State._flat = lambda self: calls.append(1) or original(self)
    try:
        nnx.update(model, zeros)
        nnx.state(model, nnx.Param, ...)
    finally:
        nnx.State._flat = original
    assert len(calls) < 20


def test_eval_shaped_model_splits_and_merges():
    abstract = nnx.eval_shape(net)
    graphdef = nnx.split(abstract)[0]
    assert graphdef is nnx.graphdef(net())
    made = nnx.merge(graphdef, nnx.state(net()))
    assert_isomorphic(made, net())
    nnx.update(abstract, nnx.state(net()))
    assert_isomorphic(abstract, net())

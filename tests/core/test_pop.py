"""pop: exactly what matches is taken out, or nothing is."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Box, Net, param


def stat():
    return nnx.BatchStat(jnp.ones(1))


def test_matching_variables_are_taken_out_and_returned():
    net = Net(w=param(2), s=stat(), inner=Net(s=stat(), w=param(1)))
    popped = nnx.pop(net, nnx.BatchStat)
    assert popped.flat_state().paths == (("inner", "s"), ("s",))
    assert sorted(vars(net)) == ["inner", "w"]
    assert sorted(vars(net.inner)) == ["w"]


def test_one_state_per_filter():
    net = Net(w=param(2), s=stat(), c=nnx.Cache(jnp.ones(1)))
    params, stats = nnx.pop(net, nnx.Param, nnx.BatchStat)
    assert (list(params), list(stats), list(vars(net))) == (["w"], ["s"], ["c"])


def test_popped_state_owns_its_variables():
    net, s = Net(s=stat()), stat()
    net.s = s
    popped = nnx.pop(net, nnx.BatchStat)
    assert popped["s"] is not s


def test_shared_variable_is_taken_out_of_every_place():
    s = stat()
    net = Net(a=s, layers=[1, s, param(1)], heads={"s": s, "k": 2}, items=nnx.List([s, 3]))
    popped = nnx.pop(net, nnx.BatchStat)
    assert popped.flat_state().paths == (("a",),)
    assert not hasattr(net, "a")
    assert (net.layers[0], len(net.layers), net.heads, list(net.items)) == (1, 2, {"k": 2}, [3])


def test_lists_close_the_gaps():
    net = Net(plain=[stat(), 1, stat(), 2], items=nnx.List([stat(), 1, stat(), nnx.data(2.0)]))
    nnx.pop(net, nnx.BatchStat)
    assert net.plain == [1, 2]
    assert list(net.items) == [1, 2.0]
    assert nnx.state(net).flat_state().paths == (("items", 1),)


def test_popping_one_leaf_of_a_state_takes_that_leaf_only():
    state = nnx.State({"a": {"s": stat(), "w": param(1)}, "b": {"s": stat()}, "x": jnp.ones(1)})
    net = Net(state=state)
    w = state["a"]["w"]
    popped = nnx.pop(net, nnx.BatchStat)
    assert popped.flat_state().paths == (("state", "a", "s"), ("state", "b", "s"))
    assert net.state is state
    assert state.flat_state().paths == (("a", "w"), ("x",))
    assert state["a"]["w"] is w


def test_two_attributes_with_one_array_are_two_leaves():
    x = jnp.ones(2)
    net = Net(a=x, b=x)
    nnx.pop(net, nnx.PathContains("a"))
    assert list(vars(net)) == ["b"]


def test_static_value_equal_to_a_popped_number_stays():
    net = Net(static=0.5, rate=nnx.data(0.5))
    assert nnx.to_pure_dict(nnx.pop(net, ...)) == {"rate": 0.5}
    assert list(vars(net)) == ["static"]


def test_mark_goes_with_the_attribute():
    net = Net(rate=nnx.data(0.5))
    nnx.pop(net, ...)
    net.rate = 0.5
    assert list(nnx.state(net)) == []


def test_nothing_that_matches_gives_an_empty_state():
    net = Net(w=param(1))
    assert len(nnx.pop(net, nnx.BatchStat)) == 0
    assert list(vars(net)) == ["w"]


@pytest.mark.parametrize(
    "make", [lambda s: (1, s), lambda s: Box(s), lambda s: [({"deep": (s,)},)]]
)
def test_part_of_a_value_is_an_error_with_its_path_and_nothing_changes(make):
    def net():
        s = stat()
        return Net(first=s, value=make(s), other=stat())

    model = net()
    with pytest.raises(nnx.errors.StructureError, match=r"model\.first: it is part of a tuple"):
        nnx.pop(model, nnx.BatchStat)
    assert_isomorphic(model, net())


def test_cycles_and_methods_are_looked_through():
    inner = Net(s=stat())
    net = Net(method=inner.double, s=stat())
    net.me = net
    assert nnx.pop(net, nnx.BatchStat).flat_state().paths == (("method", "s"), ("s",))
    assert not hasattr(inner, "s")


def test_pop_of_containers_and_states():
    tree = {"a": stat(), "b": [stat(), 1]}
    assert len(nnx.pop(tree, nnx.BatchStat).flat_state()) == 2
    assert tree == {"b": [1]}
    state = nnx.State({"a": stat(), "b": 1})
    nnx.pop(state, nnx.BatchStat)
    assert list(state) == ["b"]


@pytest.mark.parametrize(
    "make",
    [
        lambda: Net(s=stat()),
        lambda: Net(layers=[stat()]),
        lambda: Net(state=nnx.State({"s": stat()})),
        lambda: Net(x=jnp.ones(1)),
    ],
)
def test_pop_at_another_level_is_an_error_and_changes_nothing(make):
    net = make()
    before = nnx.graphdef(net)

    def f(x):
        nnx.pop(net, ...)
        return x

    with pytest.raises(nnx.errors.TraceLevelError, match=r"pop model\.(s|layers|state|x)"):
        jax.jit(f)(1.0)
    assert nnx.graphdef(net) is before


def test_popped_object_works_on():
    net = Net(w=param(1), layers=[stat(), Net(s=stat())])
    nnx.split(net)
    jax.tree.leaves(net)
    nnx.pop(net, nnx.BatchStat)
    assert len(jax.tree.leaves(net)) == 1
    assert nnx.state(net).flat_state().paths == (("w",),)
    out = nnx.jit(lambda n: n.w + 1)(net)
    assert out.tolist() == [2.0]

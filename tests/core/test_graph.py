"""The walk: what becomes of each attribute, errors with their paths."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.graph import flatten
from tests.objects import Box, Color, Net, Pair, param


@jax.tree_util.register_pytree_with_keys_class
class Twins:
    """A registered pytree that gives all its children the same key."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("part"), part) for part in self.parts], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def paths(value):
    return list(nnx.graphdef(value).paths)


def test_children_are_visited_by_sorted_key_and_lists_in_numeric_order():
    net = Net(b=param(1), a=[param(1) for _ in range(11)])
    assert paths(net) == [*(("a", n) for n in range(11)), ("b",)]


def test_dict_keys_may_be_all_ints():
    assert paths({10: param(1), 9: param(1)}) == [(9,), (10,)]


def test_state_of_nested_values_has_their_keys():
    net = Net(x=(param(1), {"k": Pair(jnp.ones(1), Box(param(1)))}))
    assert paths(net) == [("x", 0), ("x", 1, "k", "left"), ("x", 1, "k", "right", "inner")]


def test_variables_and_containers_keep_identity_across_attributes():
    w, shared = param(1), [param(1)]
    flat = flatten((Net(a=w, b=(w, shared), c=shared),))
    assert [id(leaf) for leaf in flat.leaves] == [id(w), id(shared[0])]
    assert sum(node is shared for node in flat.nodes) == 1


def test_arrays_have_no_identity():
    x = jnp.ones(2)
    assert paths(Net(a=x, b=x)) == [("a",), ("b",)]


def test_cycles_end():
    net = Net(w=param(1), items=[])
    net.me, net.method = net, net.double
    net.items.append(net.items)
    assert paths(net) == [("w",)]


def test_deep_chains_are_walked():
    net = Net()
    for _ in range(200):
        net = Net(below=net)
    net.below.below.w = param(1)
    assert paths(net) == [("below", "below", "w")]


@pytest.mark.parametrize(
    "make",
    [
        lambda: [1, "a", None],
        lambda: {"a": 1, 2: (3, {4})},
        lambda: {Color.RED: [1, 2], Color.BLUE: {}},
        lambda: {1, 2},
        lambda: functools.partial(max, 1),
        lambda: jnp.float32,
        lambda: jax.nn.relu,
        lambda: "text".upper,
    ],
)
def test_static_values_of_any_kind_are_part_of_the_graphdef(make):
    assert paths(Net(x=make())) == []
    assert nnx.graphdef(Net(x=make())) is nnx.graphdef(Net(x=make()))


def test_unkeyable_static_is_an_error_with_its_path():
    class Unhashable:
        __hash__ = None

    with pytest.raises(nnx.errors.StaticValueError, match=r"^model\.layers\[1\]\.config"):
        nnx.split(Net(layers=[0, Net(config=Unhashable())]))


def test_function_that_hides_an_object_is_an_error_with_its_path():
    layer = Net(w=param(1))
    with pytest.raises(nnx.errors.StaticValueError, match=r"^model\.inner\.act"):
        nnx.split(Net(inner=Net(act=lambda x: layer.w * x)))


def test_dict_with_data_and_mixed_keys_is_an_error_with_its_path():
    with pytest.raises(nnx.errors.StructureError, match=r"^model\.x\[0\] .* of types int, str"):
        nnx.split(Net(x=[{1: param(1), "a": 2}]))


def test_dict_with_data_and_other_keys_is_an_error():
    with pytest.raises(nnx.errors.StructureError, match=r"keys of types Color"):
        nnx.split(Net(x={Color.RED: {"deep": [param(1)]}}))


@pytest.mark.parametrize("element", [Net(), (1, Net()), Net().double])
def test_set_that_holds_data_is_an_error_with_its_path(element):
    with pytest.raises(nnx.errors.StructureError, match=r"^model\.x is a set that holds a "):
        nnx.split(Net(x={1, element}))


def test_frozenset_that_holds_an_object_is_an_error_with_its_path():
    with pytest.raises(nnx.errors.StaticValueError, match=r"^model\.x.* is a Net"):
        nnx.split(Net(x=frozenset({Net()})))


@pytest.mark.parametrize("value", [param(1), Net(), [Net()], (1, param(1))])
def test_object_put_into_a_static_list_is_an_error_with_its_path(value):
    net = Net(x=nnx.static([]))
    net.x.append(value)
    with pytest.raises(nnx.errors.StaticValueError, match=r"^model\.x\[0\].* is marked static"):
        nnx.split(net)


def test_registered_pytree_that_holds_itself_is_an_error_with_its_path():
    box = Box(None)
    box.inner = (box,)
    with pytest.raises(
        nnx.errors.StructureError, match=r"^model\.x\.inner\[0\] is one of the Boxs"
    ):
        nnx.split(Net(x=box))


def test_value_may_hold_objects_that_hold_it_again():
    inner = Net(w=param(1))
    box = inner.box = Box([inner])
    assert paths(Net(box=box)) == [("box", "inner", 0, "w")]
    made = nnx.clone(Net(box=box))
    assert made.box.inner[0] is made.box.inner[0].box.inner[0]


def test_registered_pytree_with_data_and_odd_keys_is_an_error_with_its_path():
    odd = collections.OrderedDict({Color.RED: param(1)})
    with pytest.raises(nnx.errors.StructureError, match=r"^model\.x holds .* of types Color"):
        nnx.split(Net(x=odd))
    assert paths(Net(x=collections.OrderedDict({Color.RED: 1}))) == []


def test_children_with_the_same_key_are_told_apart_by_number():
    assert paths(Net(x=Twins(param(1), param(2)))) == [("x", 0), ("x", 1)]
    assert nnx.clone(Net(x=Twins(param(1), param(2)))).x.parts[1].shape == (2,)


def test_failed_walk_leaves_the_object_usable():
    net = Net(w=param(1), bad={1: param(1), "a": param(1)})
    with pytest.raises(nnx.errors.StructureError, match=r"model\.bad"):
        nnx.split(net)
    del net.bad
    assert list(nnx.state(net)) == ["w"]


def test_state_as_attribute_is_a_leaf_with_paths_below_it():
    net = Net(s=nnx.state(Net(a=param(2), b=[jnp.ones(1)])))
    assert [path for path, _ in nnx.state(net).flat_state()] == [("s", "a"), ("s", "b", 0)]


def test_data_mark_makes_leaves_of_numbers_also_in_containers():
    net = Net(x=nnx.data([0.5, np.float32(2), "text"]))
    assert nnx.to_pure_dict(nnx.state(net)) == {"x": {0: 0.5, 1: np.float32(2)}}


def test_partial_of_a_method_may_hold_arrays():
    net = Net(w=param(1))
    net.f = functools.partial(net.double, jnp.ones(2))
    assert paths(net) == [("f", "args", 0), ("w",)]

"""Kinds: what takes which part in an object graph, and values taken apart and rebuilt."""

import collections
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core import kinds
from nnxlite._core.kinds import (
    Foreign,
    has_data,
    is_graph_method,
    kind_of,
    one_level,
    rebuild_value,
    value_children,
)
from tests.objects import Box, Color, Net, Pair, param


class Shape(tuple):
    """A tuple that is no named tuple: JAX does not look inside."""


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("relu", kinds.STATIC),
        (None, kinds.STATIC),
        (np.float32(1), kinds.STATIC),
        (Color.RED, kinds.STATIC),
        (Net, kinds.STATIC),
        (nnx.List, kinds.STATIC),
        (jnp.sin, kinds.STATIC),
        (jnp.float32, kinds.STATIC),
        (frozenset({1}), kinds.STATIC),
        (Shape((1, 2)), kinds.STATIC),
        (jax.sharding.PartitionSpec("data"), kinds.STATIC),
        (np.ones(2), kinds.ARRAY),
        (jnp.ones(2), kinds.ARRAY),
        (jax.random.key(0), kinds.ARRAY),
        (jax.ShapeDtypeStruct((2,), jnp.float32), kinds.ARRAY),
        (param(2), kinds.VARIABLE),
        (nnx.State({}), kinds.STATE),
        (Net(), kinds.OBJECT),
        (nnx.List(), kinds.OBJECT),
        (nnx.Rngs(0), kinds.OBJECT),
        ([], kinds.LIST),
        ({}, kinds.DICT),
        ((), kinds.TUPLE),
        (Pair(1, 2), kinds.TUPLE),
        (Box(1), kinds.FOREIGN),
        (collections.OrderedDict(a=1), kinds.FOREIGN),
        ({1}, kinds.SET),
        (Net().double, kinds.METHOD),
        (functools.partial(max, 1), kinds.PARTIAL),
        (nnx.graphdef(Net()), kinds.STATIC),
    ],
)
def test_each_value_has_a_kind(value, kind):
    assert kind_of(value) == kind


def test_tracer_is_an_array():
    jax.jit(lambda x: None if kind_of(x) == kinds.ARRAY else pytest.fail("no array"))(1.0)


def test_type_registered_with_jax_later_is_foreign():
    class Late:
        pass

    assert kind_of(Late()) == kinds.STATIC
    jax.tree_util.register_pytree_node(Late, lambda x: ((), None), lambda aux, children: Late())
    assert kind_of(Late()) == kinds.FOREIGN


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (param(1), True),
        (jnp.ones(2), True),
        (Net(), True),
        ([1, {"a": (2, np.ones(1))}], True),
        (Box(jnp.ones(1)), True),
        (Net().double, True),
        (functools.partial(Net().double, 1), True),
        ([1, {"a": (2, "x")}], False),
        (Box(3), False),
        (functools.partial(max, 1), False),
        ("abc".upper, False),
        ({1, 2}, False),
    ],
)
def test_has_data_looks_into_containers_and_values(value, expected):
    assert has_data(value) is expected


def test_has_data_ends_on_a_list_that_holds_itself():
    loop = [1]
    loop.append(loop)
    assert not has_data(loop)
    loop.append({"x": jnp.ones(1)})
    assert has_data(loop)


@pytest.mark.parametrize(
    "value",
    [
        (1, "a"),
        Pair(1, 2),
        Box(3, "tag"),
        collections.OrderedDict(b=1, a=2),
        collections.defaultdict(list, b=1, a=2),
    ],
)
def test_rebuild_undoes_taking_apart(value):
    how, keys, children = value_children(value)
    rebuilt = rebuild_value(how, children)
    assert type(rebuilt) is type(value)
    assert len(keys) == len(children)
    assert jax.tree.structure(rebuilt) == jax.tree.structure(value)
    assert jax.tree.leaves(rebuilt) == jax.tree.leaves(value)


@pytest.mark.parametrize("wrap", [functools.partial, jax.tree_util.Partial])
def test_partial_of_a_method_is_taken_apart_with_its_arguments(wrap):
    net = Net()
    value = wrap(net.double, x=2)
    assert is_graph_method(value)
    how, keys, children = value_children(value)
    assert keys == ("func", "args", "keywords")
    rebuilt = rebuild_value(how, children)
    assert type(rebuilt) is wrap
    assert rebuilt() == 4


def test_jitted_bound_method_is_a_value_of_its_object():
    net = Net(k=2)
    value = nnx.jit(net.double)
    assert is_graph_method(value)
    assert kinds.is_value(value)
    how, _, children = value_children(value)
    assert rebuild_value(how, children)(3) == 6
    assert children[1][0] is net


def test_value_that_holds_itself_is_taken_apart_by_one_level():
    box = Box(None)
    box.inner = box
    assert one_level(box)[1][0] is box
    assert not has_data(box)


def test_keys_of_foreign_levels_are_those_of_jax():
    assert value_children(collections.OrderedDict(b=1, a=2))[1] == ("b", "a")
    assert value_children(Box(3))[1] == ("inner",)


def test_foreign_levels_are_equal_by_typed_static_parts():
    def how(tag):
        return one_level(Box(jnp.ones(1), tag))[0]

    assert how(1) == how(1)
    assert hash(how(1)) == hash(how(1))
    assert how(1) != how(True)
    assert how((1, 2)) != how((1.0, 2))
    assert how("a") != how("b")


def test_foreign_level_with_an_unkeyable_static_part_compares_as_in_jax():
    array = np.ones(())  # of size one, so that JAX can compare it
    assert one_level(Box(1, array))[0] == one_level(Box(1, np.ones(())))[0]


def test_foreign_level_of_builtin_containers_pickles():
    foreign = one_level(collections.OrderedDict(a=1))[0]
    again = pickle.loads(pickle.dumps(foreign))
    assert isinstance(again, Foreign)
    assert again == foreign

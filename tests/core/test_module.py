"""Pytree and Module: plain Python objects, with a few things kept beside their attributes."""

import abc
import copy
import pickle
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, param

T = TypeVar("T")


def test_attributes_are_the_users_own():
    net = Net(a=1, b=param(1))
    nnx.split(net)
    jax.tree.leaves(net)
    assert sorted(vars(net)) == ["a", "b"]
    assert {"a", "b", "double", "train"} <= set(dir(net))


def test_subclass_needs_no_decorator_and_no_super():
    class Layer(nnx.Module):
        def __init__(self):
            self.w = param(1)

    class Sub(Layer):
        def __init__(self):
            self.v = param(1)

    assert list(nnx.state(Sub())) == ["v"]
    assert len(jax.tree.leaves(Sub())) == 1


def test_class_without_init_takes_no_arguments():
    class Empty(nnx.Module):
        pass

    assert vars(Empty()) == {}
    with pytest.raises(TypeError, match=r"Empty\(\) takes no arguments"):
        Empty(1)


def test_objects_compare_and_hash_by_identity():
    a, b = Net(x=1), Net(x=1)
    assert a != b
    assert a == a
    assert len({a, b, a}) == 2


@pytest.mark.parametrize("name", ["_level", "_version", "_plan", "_tree", "_marks"])
def test_names_of_the_library_are_refused(name):
    with pytest.raises(AttributeError, match=f"'{name}' is a name that the library keeps"):
        setattr(Net(), name, 1)
    with pytest.raises(TypeError, match=f"'{name}' is a name that the library keeps"):
        type("Layer", (nnx.Module,), {name: 1})


def test_slots_are_refused():
    with pytest.raises(TypeError, match="Layer has __slots__"):
        type("Layer", (nnx.Module,), {"__slots__": ("w",)})
    type("Layer", (nnx.Module,), {"__slots__": ()})


def test_generic_and_abstract_classes_work():
    class Layer(nnx.Module, Generic[T], abc.ABC):
        @abc.abstractmethod
        def __call__(self): ...

    class Real(Layer[int]):
        def __call__(self):
            return 1

    real = Real()
    assert real() == 1
    assert vars(Net()) == vars(real) == {}
    with pytest.raises(TypeError, match="abstract"):
        Layer[int]()


def test_properties_and_class_attributes_are_no_attributes_of_the_graph():
    class Layer(Net):
        size = 3

        @property
        def doubled(self):
            return self.w * 2

        @doubled.setter
        def doubled(self, value):
            self.w = nnx.Param(value / 2)

        @doubled.deleter
        def doubled(self):
            del self.w

    layer = Layer(w=param(1))
    nnx.split(layer)
    layer.doubled = jnp.ones(1)
    assert layer.w[...].tolist() == [0.5]
    assert list(nnx.state(layer)) == ["w"]
    del layer.doubled
    assert list(nnx.state(layer)) == []


def test_missing_attribute_cannot_be_deleted():
    with pytest.raises(AttributeError, match="nope"):
        del Net().nope


def test_init_subclass_takes_the_flag_of_flax_and_those_of_the_class():
    class Layer(nnx.Module, pytree=False):
        def __init_subclass__(cls, *, size, **kwargs):
            super().__init_subclass__(**kwargs)
            cls.size = size

    class Sized(Layer, size=3):
        pass

    assert Sized().size == 3


def rich():
    w = param(2, tag="t")
    net = Net(w=w, layers=[Net(w=w), {"k": 1}], rate=nnx.data(0.5), x=jnp.ones(2), s={1})
    net.me, net.method, net.items, net.table = net, net.double, nnx.List([w]), nnx.Dict(a=w)
    return net


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda n: pickle.loads(pickle.dumps(n))])
def test_deep_copies_are_isomorphic_and_separate(copied):
    net = rich()
    nnx.split(net)
    jax.tree.leaves(net)
    made = copied(net)
    assert_isomorphic(made, net)
    assert nnx.graphdef(made) is nnx.graphdef(net)
    made.w[...] = jnp.zeros(2)
    made.new = 1
    assert net.w[...].tolist() == [1.0, 1.0]
    assert made.items[0] is made.w
    assert made.method.__self__ is made


def test_shallow_copy_shares_its_contents():
    net = rich()
    made = copy.copy(net)
    assert type(made) is Net
    assert made.w is net.w
    assert made.layers is net.layers
    made.new = 1
    assert not hasattr(net, "new")


def test_bound_and_unbound_methods_pickle():
    net = Net(w=param(1))
    assert pickle.loads(pickle.dumps(Net.double)) is Net.double
    assert pickle.loads(pickle.dumps(net.double))(2) == 4


@pytest.mark.parametrize(
    "write",
    [
        lambda n: setattr(n, "a", 2),
        lambda n: setattr(n, "new", 2),
        lambda n: delattr(n, "a"),
        lambda n: setattr(n, "a", nnx.data(2)),
    ],
)
def test_write_from_another_level_names_the_attribute_and_changes_nothing(write):
    net = Net(a=1)

    def f(x):
        write(net)
        return x

    with pytest.raises(nnx.errors.TraceLevelError, match=r"attribute '(a|new)' of Net"):
        jax.jit(f)(1.0)
    assert vars(net) == {"a": 1}


def test_set_and_remove_of_the_library_see_to_marks():
    net = Net(a=nnx.data(1))
    net._node_set("b", 2, 1)
    assert sorted(nnx.to_pure_dict(nnx.state(net))) == ["a", "b"]
    net._node_remove(("a", "b"))
    net.a = net.b = 3
    assert len(nnx.state(net)) == 0


def test_pytree_is_enough_for_state():
    class Counter(nnx.Object):
        def __init__(self):
            self.n = nnx.Variable(0)

    counter = Counter()
    nnx.jit(lambda c: c.n.set_value(c.n + 1))(counter)
    assert int(counter.n[...]) == 1
    assert not isinstance(counter, nnx.Module)
    assert nnx.Object is nnx.Pytree


def test_user_may_override_setattr():
    class Frozen(Net):
        def __setattr__(self, name, value):
            if getattr(self, "done", False):
                raise AttributeError("frozen")
            super().__setattr__(name, value)

    net = Frozen(w=param(1), done=True)
    assert len(jax.tree.leaves(jax.jit(lambda n: n)(net))) == 1
    nnx.jit(lambda n: n.w.set_value(n.w + 1))(net)
    assert nnx.clone(net).w[...].tolist() == [2.0]
    nnx.pop(net, nnx.Param)
    assert not hasattr(net, "w")


def test_array_attribute_set_at_each_step_keeps_the_plan():
    net = Net(x=jnp.zeros(1))
    nnx.split(net)
    plan = net._plan
    for n in range(3):
        net.x = jnp.full(1, n)
        nnx.split(net)
    assert net._plan is plan

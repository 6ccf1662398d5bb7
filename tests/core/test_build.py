"""Building: what comes out fresh, and existing objects brought into another shape."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.build import assemble
from nnxlite._core.graph import flatten
from nnxlite._core.trace import EAGER
from tests.isomorphism import assert_isomorphic
from tests.objects import Box, Net, Pair, param


def rich_net():
    w = param(2, tag="w")
    net = Net(w=w, tied=w, x=np.ones(3, np.float32), k=1, s={1, 2}, box=Box(jnp.ones(1), "t"))
    net.layers = [Net(w=w), {"a": param(1), "self": net}, (1, Pair(param(1), "p"))]
    net.list, net.dict = nnx.List([param(1), 2]), nnx.Dict(a=net.layers, b=net)
    net.method, net.partial = net.double, functools.partial(net.layers[0].triple, x=1)
    net.state = nnx.state(Net(a=[param(1), jnp.ones(1)]))
    return net


@pytest.mark.parametrize(
    "copied",
    [
        lambda net: nnx.merge(*nnx.split(net)),
        lambda net: nnx.merge(*nnx.split(net, nnx.Param, nnx.PathContains("x"), ...)),
        nnx.clone,
        functools.partial(nnx.clone, share=True),
        lambda net: jax.tree.map(lambda x: x, net),
        lambda net: jax.jit(lambda n: n)(net),
        lambda net: nnx.jit(nnx.clone)(net),
    ],
)
def test_copies_are_isomorphic_and_share_no_object(copied):
    net = rich_net()
    made = copied(net)
    states = made.__dict__.pop("state"), net.__dict__.pop("state")
    assert_isomorphic(made, net)
    assert_isomorphic(*[state.flat_state() for state in states])
    assert made.tied is made.w is made.layers[0].w
    assert made.tied is not net.tied
    assert made.layers is made.dict.a is not net.layers


def test_methods_and_their_partials_are_bound_to_the_copy():
    made = nnx.clone(rich_net())
    assert made.method.__self__ is made
    assert made.partial.func.__self__ is made.layers[0]
    assert made.partial() == 3


def test_jitted_methods_are_bound_to_the_copy():
    class Layer(Net):
        def scale(self, x):
            return self.w * x

        @nnx.jit
        def jitted(self, x):
            return self.w * x

    layer = Layer(w=param(2))
    layer.f, layer.g = nnx.jit(layer.scale), layer.jitted
    made = nnx.clone(layer)
    made.w[...] = jnp.zeros(2)
    assert nnx.graphdef(made) is nnx.graphdef(layer)
    for f in (made.f, made.g):
        assert f(jnp.ones(2)).tolist() == [0.0, 0.0]
    assert layer.f(jnp.ones(2)).tolist() == [1.0, 1.0]


def test_mutable_statics_of_copies_are_their_own():
    net = Net(s={1}, nested=({2}, [3]))
    made = nnx.clone(net)
    made.s.add(9)
    made.nested[1].append(9)
    assert (net.s, net.nested) == ({1}, ({2}, [3]))


def test_init_and_setattr_of_the_class_do_not_run():
    class Guarded(Net):
        def __setattr__(self, name, value):
            assert name in ("w", "made_by_init")
            super().__setattr__(name, value)

    net = Guarded(w=param(1), made_by_init=1)
    made = nnx.clone(net)
    jax.tree.leaves(made)
    assert made.w.shape == (1,)


def test_variable_hooks_do_not_run():
    def fail(variable, value):
        raise AssertionError("a hook ran")

    w = nnx.Param._make(jnp.ones(1), nnx.Param(0, on_set_value=fail)._meta, EAGER)
    nnx.clone(Net(w=w))
    nnx.merge(*nnx.split(Net(w=w)))


def apply_structure(target, source):
    """Gives `target` the structure and leaves of `source`, keeping nodes that correspond."""
    before, after = flatten((target,)), flatten((source,))
    nodes = [*before.nodes, *[None] * (len(after.nodes) - len(before.nodes))]
    assemble(after.graphdef.skeleton, nodes[: len(after.nodes)], after.leaves, EAGER)


def test_existing_objects_are_changed_in_place():
    target, source = Net(a=1, gone=2), Net(a=2, new=[param(1)])
    apply_structure(target, source)
    assert_isomorphic(target, source)


def test_existing_lists_and_dicts_are_changed_in_place():
    target = Net(x=[1, 2, 3], y={"a": 1})
    before = target.x, target.y
    apply_structure(target, Net(x=[4], y={"b": 2, "c": 3}))
    assert (target.x, target.y) == ([4], {"b": 2, "c": 3})
    assert before == (target.x, target.y)
    assert before[0] is target.x


@pytest.mark.parametrize(
    "value",
    [
        (1, (2.5, "a")),
        Pair([1], {2}),
        Box(3, "t"),
        {1, 2},
        functools.partial(max, 1),
        (1, functools.partial(max, 1)),
    ],
)
def test_values_that_stay_keep_their_identity(value):
    target = Net(x=value, n=1)
    apply_structure(target, Net(x=value, n=2))
    assert target.x is value
    assert target.n == 2


def test_mutable_contents_changed_in_a_jitted_function_arrive():
    net = Net(l=[1], d={"a": 1}, s={1}, o=collections.OrderedDict(a=1), box=Box(jnp.ones(1), "t"))
    plain = net.l, net.d

    @nnx.jit
    def f(net):
        net.l.append(2)
        net.d["b"] = net.l
        net.s.add(True and 2)
        net.o["z"] = 5
        net.box.tag, net.box.inner = "u", net.box.inner * 2

    f(net)
    assert (net.l, net.d, net.s, dict(net.o)) == (
        [1, 2],
        {"a": 1, "b": [1, 2]},
        {1, 2},
        {"a": 1, "z": 5},
    )
    assert (net.box.tag, net.box.inner.tolist()) == ("u", [2.0])
    assert net.d["b"] is net.l is plain[0]
    assert net.d is plain[1]


def test_tuples_may_change_their_length():
    target, source = Net(x=(1, 2)), Net(x=(1, 2, param(1)))
    apply_structure(target, source)
    assert_isomorphic(target, source)


def test_marks_arrive_on_existing_objects():
    target, source = Net(x=0.5), Net(x=nnx.data(0.5))
    apply_structure(target, source)
    assert list(nnx.state(target)) == ["x"]


def test_unchanged_objects_stay_untouched():
    net = rich_net()
    nnx.split(net)
    version = net._version
    apply_structure(net, net)
    assert net._version == version


def test_check_runs_before_anything_changes():
    net, other = Net(a=1, b=[1]), Net(a=2, b=[2])
    flat, wanted = flatten((net,)), flatten((other,))

    def refuse(number):
        raise RuntimeError("refused")

    with pytest.raises(RuntimeError, match="refused"):
        assemble(wanted.graphdef.skeleton, list(flat.nodes), [], EAGER, refuse)
    assert (net.a, net.b) == (1, [1])


@pytest.mark.parametrize(
    "copied", [nnx.clone, lambda net: nnx.jit(lambda net: nnx.clone(net))(net)]
)
def test_a_pytree_that_copies_its_dict_is_made_around_the_full_dict(copied):
    inner = Net(w=param(2))
    partial = jax.tree_util.Partial(lambda *, net: net.w[...], net=inner)  # copies its keywords
    made = copied(Net(a=partial, inner=inner))
    assert made.a.keywords["net"] is made.inner is not inner
    assert (made.a() == inner.w[...]).all()


def test_such_a_pytree_may_be_put_on_an_object_inside_a_transform():
    def add(net):
        net.a = jax.tree_util.Partial(lambda *, net: net.w[...], net=net.inner)

    net = Net(inner=Net(w=param(2)))
    nnx.jit(add)(net)
    assert net.a.keywords["net"] is net.inner

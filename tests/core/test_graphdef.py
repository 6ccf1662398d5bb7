"""GraphDef and Skeleton: interned, typed, picklable, and holding nothing alive."""

import copy
import gc
import pickle
import weakref

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.graphdef import ARRAY_LEAF
from tests.objects import Net, Other, Pair, param


def test_equal_structures_give_the_same_graphdef():
    a, b = Net(x=param(2), y=1), Net(y=1, x=param(2))
    assert nnx.graphdef(a) is nnx.graphdef(b)
    assert nnx.graphdef(a).skeleton is nnx.graphdef(b).skeleton


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (Net(k=1), Net(k=True)),
        (Net(k=1), Net(k=1.0)),
        (Net(k=0.0), Net(k=-0.0)),
        (Net(k=(1, (2,))), Net(k=(1, (2.0,)))),
        (Net(k=[1]), Net(k=(1,))),
        (Net(k={"a": 1}), Net(k={"a": True})),
        (Net(k={1}), Net(k=frozenset({1}))),
        (Net(), Other()),
        (Net(k=1), Net(j=1)),
        (Net(k=param(2)), Net(k=nnx.BatchStat(jnp.ones(2)))),
        (Net(k=param(2)), Net(k=param(2, tag="x"))),
        (Net(k=param(2)), Net(k=jnp.ones(2))),
        (Net(k=Pair(1, 2)), Net(k=(1, 2))),
        (Net(k=Net().double), Net(k=Net().triple)),
    ],
)
def test_different_structures_give_different_graphdefs(left, right):
    assert nnx.graphdef(left) is not nnx.graphdef(right)
    assert nnx.graphdef(left) != nnx.graphdef(right)


@pytest.mark.parametrize("value", [1.0, True])
def test_treedefs_tell_statics_of_different_types_apart(value):
    assert jax.tree.structure(Net(k=1)) != jax.tree.structure(Net(k=value))


def test_values_shapes_and_dtypes_are_no_structure():
    assert nnx.graphdef(Net(k=param(2))) is nnx.graphdef(Net(k=nnx.Param(jnp.zeros((3, 4), int))))


def test_skeleton_has_no_kinds_and_metadata():
    a, b = Net(k=param(2, tag="x")), Net(k=nnx.BatchStat(jnp.ones(2)))
    assert nnx.graphdef(a).skeleton is nnx.graphdef(b).skeleton


def test_sharing_is_structure():
    w = param(2)
    assert nnx.graphdef(Net(a=w, b=w)) is not nnx.graphdef(Net(a=param(2), b=param(2)))


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_pickled_graphdef_is_interned_again(protocol):
    net = Net(a=param(2, tag="x"), b=jnp.ones(2), c=[1, {"k": 2.0}], d=(1, param(1)))
    graphdef = nnx.graphdef(net)
    assert pickle.loads(pickle.dumps(graphdef, protocol)) is graphdef


def test_kind_of_arrays_is_one_object_in_each_process():
    assert pickle.loads(pickle.dumps(ARRAY_LEAF)) is ARRAY_LEAF
    assert copy.deepcopy(ARRAY_LEAF) is ARRAY_LEAF


def test_copies_of_a_graphdef_are_itself():
    graphdef = nnx.graphdef(Net(a=param(2)))
    assert copy.copy(graphdef) is graphdef
    assert copy.deepcopy(graphdef) is graphdef
    assert copy.deepcopy(graphdef.skeleton) is graphdef.skeleton


def test_graphdef_is_a_pytree_without_leaves():
    graphdef, state = nnx.split(Net(a=param(2)))
    out = jax.jit(lambda g, s: nnx.merge(g, s).a[...] + 1)(graphdef, state)
    assert jax.tree.leaves(graphdef) == []
    assert out.tolist() == [2.0, 2.0]


def test_repr_is_one_line():
    graphdef = nnx.graphdef(Net(a=param(2), text="word " * 1000, more=[Net(), Net()]))
    assert repr(graphdef).startswith("<GraphDef of Net: 4 nodes, 1 leaves, ")
    assert repr(graphdef.skeleton).startswith("<Net(text='word word")
    assert all("\n" not in repr(x) and len(repr(x)) < 300 for x in (graphdef, graphdef.skeleton))


def test_mismatch_message_of_jax_shows_class_and_statics():
    with pytest.raises(ValueError, match=r"<Net\(mode='a'\), 1 nodes, 1 leaves>"):
        jax.tree.map(lambda a, b: a, Net(w=param(2), mode="a"), Net(w=param(2), mode="b"))


def test_paths_are_those_of_first_meeting():
    w = param(1)
    net = Net(b={"x": w, "y": (param(1), jnp.ones(1))}, a=[param(1), w], c=nnx.List([w]))
    assert nnx.graphdef(net).paths == (("a", 0), ("a", 1), ("b", "y", 0), ("b", "y", 1))


def test_paths_of_several_roots_start_with_the_number_of_the_root():
    graphdef = nnx.graphdef((Net(w=param(1)), Net(w=param(1))))
    assert graphdef.paths == ((0, "w"), (1, "w"))


class Trainer:
    """A plain object that is static, and leads back to the model."""


def test_interned_graphdef_keeps_no_model_alive_through_its_statics():
    net = Net(w=param(2), trainer=Trainer())
    net.trainer.model = net
    nnx.split(net)
    jax.tree.leaves(net)
    died = weakref.ref(net)
    del net
    gc.collect()
    assert died() is None


def test_graphdefs_of_dropped_objects_are_forgotten():
    died = weakref.ref(nnx.graphdef(Net(only="here")))
    gc.collect()
    assert died() is None


def test_apply_calls_a_method_and_splits_again():
    class Counter(Net):
        def step(self, by):
            self.n[...] += by
            return self.n[...]

    graphdef, state = nnx.split(Counter(n=nnx.Variable(jnp.int32(1))))
    out, (graphdef, after) = graphdef.apply(state).step(jnp.int32(2))
    assert (int(out), int(after["n"][...]), int(state["n"][...])) == (3, 3, 1)

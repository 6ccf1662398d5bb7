"""StateDef: interned paths and kinds."""

import copy
import gc
import pickle
import weakref

import jax.numpy as jnp

import nnxlite as nnx
from nnxlite._core.statedef import StateDef
from tests.objects import Net, param


def net():
    return Net(layers=[Net(kernel=param(2), bias=param(2))], head=param(2), x=jnp.ones(2))


def test_repr_of_the_statedef_is_one_line():
    assert repr(nnx.state(net())._meta).startswith("<StateDef: 4 leaves, ")


def test_statedefs_are_interned_and_forgotten():
    statedef = nnx.state(net())._meta
    assert pickle.loads(pickle.dumps(statedef)) is statedef
    assert copy.deepcopy(statedef) is statedef
    died = weakref.ref(StateDef.of((("only", "here"),), statedef.leaves[:1]))
    gc.collect()
    assert died() is None


def test_kinds_and_metadata_are_part_of_it():
    a, b, c = param(1), nnx.BatchStat(jnp.ones(1)), param(1, tag="x")
    defs = {nnx.State({"w": each})._meta for each in (a, b, c, jnp.ones(1))}
    assert len(defs) == 4
    assert nnx.State({"w": a})._meta is nnx.State({"w": param(7)})._meta

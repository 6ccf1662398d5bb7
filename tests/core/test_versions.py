"""Structure versions: nothing moves until a plan has met an object, then every change does."""

import jax
import jax.numpy as jnp

import nnxlite as nnx
from nnxlite._core.versions import EPOCH
from tests.objects import Net, param


def test_building_a_model_moves_nothing():
    before = EPOCH.now
    net = Net(layers=nnx.List([Net(w=param(2)) for _ in range(3)]), k=1)
    net.k = 2
    del net.layers[0]
    assert EPOCH.now == before
    assert net._version == net.layers._version == 0


def test_changes_of_met_objects_move_version_and_epoch():
    net = Net(w=param(2), k=1)
    nnx.split(net)
    before = EPOCH.now
    net.k = 2
    assert net._version == 2
    net.w.set_metadata("tag", "x")
    assert net.w._version == 2
    assert EPOCH.now >= before + 2


def test_values_move_nothing():
    net = Net(w=param(2), x=jnp.ones(2), k=1)
    nnx.split(net)
    before = EPOCH.now
    net.w[...] = jnp.zeros(2)
    net.x = jnp.zeros(3)
    net.k = 1
    net.w.value = jnp.zeros(5)
    assert EPOCH.now == before


def test_changed_object_lets_go_of_its_flattened_form():
    net = Net(w=param(2))
    jax.tree.leaves(net)
    assert net._tree is not None
    net.new = 1
    assert net._tree is None

"""Flags of flax that choose a mode: accepted, or refused with the way out; never in the way."""

import inspect

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.objects import Net, param

# Functions that look at objects, as flax has them, with something to call them with.
LOOKS = {
    "split": lambda model, **flag: nnx.split(model, nnx.Param, ..., **flag),
    "state": lambda model, **flag: nnx.state(model, nnx.Param, **flag),
    "graphdef": nnx.graphdef,
    "variables": nnx.variables,
    "clone": nnx.clone,
    "flatten": nnx.flatten,
    "iter_graph": nnx.iter_graph,
    "iter_modules": nnx.iter_modules,
    "iter_children": nnx.iter_children,
    "iter_module_children": nnx.iter_module_children,
    "map": lambda model, **flag: nnx.map(lambda path, x: x, model, **flag),
    "recursive_map": lambda model, **flag: nnx.recursive_map(lambda path, x: x, model, **flag),
    "prefix": lambda model, **flag: nnx.prefix(model, {...: 0}, **flag),
    "view": lambda model, **flag: nnx.view(model, mode="b", **flag),
    "with_attributes": lambda model, **flag: nnx.with_attributes(model, mode="b", **flag),
    "view_info": lambda model, **flag: nnx.view_info(model.inner, **flag),
    "as_abstract": nnx.as_abstract,
    "with_rngs": lambda model, **flag: nnx.with_rngs(model, fork=..., **flag),
}


def net():
    return Net(w=param(1), inner=Net(w=param(2)), mode="a", rngs=nnx.Rngs(0))


def leaves_of(found):
    return repr(list(found) if inspect.isgenerator(found) else found)


@pytest.mark.parametrize("graph", [None, True, False])
@pytest.mark.parametrize("name", LOOKS)
def test_graph_changes_nothing(name, graph):
    look = LOOKS[name]
    assert leaves_of(look(net(), graph=graph)) == leaves_of(look(net()))


def test_sharing_is_kept_whatever_the_flag_says():
    shared = param(1)
    graphdef, state = nnx.split(Net(a=shared, b=shared), graph=False)
    again = nnx.merge(graphdef, state)
    assert again.a is again.b


@pytest.mark.parametrize(
    "name", sorted({*LOOKS, "set_attributes", "reseed", "split_rngs", "fork_rngs"})
)
def test_signatures_stay_clean(name):
    shown = inspect.signature(getattr(nnx, name)).parameters
    assert "graph_updates" not in shown
    assert "graph" not in shown or name in ("split", "state", "graphdef", "as_abstract")


def test_set_attributes_takes_the_flag_unless_an_object_has_that_attribute():
    model = net()
    model.set_attributes(mode="b", graph=False)
    assert model.mode == "b"
    assert not hasattr(model, "graph")
    model.inner.graph = True
    nnx.set_attributes(model, mode="c", graph=False)
    assert (model.mode, model.inner.graph, hasattr(model, "graph")) == ("c", False, False)
    with pytest.raises(nnx.errors.StructureError, match="has the attribute 'graph'"):
        nnx.set_attributes(net(), graph="a graph of mine")


def test_reseed_takes_the_flag():
    flagged, plain = nnx.Rngs(0), nnx.Rngs(0)
    nnx.reseed(flagged, default=1, graph=False)
    nnx.reseed(plain, default=1)
    assert (flagged() == plain()).all()


@pytest.mark.parametrize("switch", [nnx.set_graph_mode, nnx.set_graph_updates])
def test_switches_take_the_one_mode_there_is(switch):
    switch(True)
    with switch(True):
        assert nnx.state(Net(w=param()))["w"].shape == ()

    @switch(True)
    def twice(x):
        return 2 * x

    assert twice(jnp.int32(2)) == 4


@pytest.mark.parametrize("switch", [nnx.set_graph_mode, nnx.set_graph_updates])
def test_switches_refuse_tree_mode(switch):
    with pytest.raises(ValueError, match=r"tree mode, which nnxlite does not have.*Remove the"):
        switch(False)

"""Spots: where things hang, as the walk finds them."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.graph import flatten
from nnxlite._core.spots import spots_of
from tests.objects import Box, Net, Pair, param


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: list


def net():
    shared, w = [param(1)], param(1)
    late = Net(z=shared, w=w)
    made = Net(
        b=late,
        y=shared,
        t=(w, [Pair(1, {"k": jnp.ones(1)})], Box({2})),
        s={1},
        f=Frozen([1]),
        items=nnx.List([shared, w]),
    )
    made.me, made.method = made, late.double
    return made


@pytest.mark.parametrize("make", [net, lambda: Net(a=Net()), lambda: [net(), param(1)]])
def test_watched_spots_are_those_of_the_walk(make):
    flat = flatten((make(),))
    numbers = {id(node): number for number, node in enumerate(flat.nodes)}
    walked = [
        (numbers[id(place.holder)], place.attribute, place.steps)
        for place, _ in flat.watched
        if id(place.holder) in numbers
    ]
    assert spots_of(flat.graphdef.skeleton).watched == walked


def test_every_place_of_a_leaf_is_listed_and_shared_ones_known():
    model = net()
    flat = flatten((model,))
    spots = spots_of(flat.graphdef.skeleton)
    (shared,) = [n for n, leaf in enumerate(flat.leaves) if leaf is model.b.w]
    assert spots.shared == {shared}
    at = [(spot[1], spot[2]) for spot, leaf in spots.leaves if leaf == shared]
    assert sorted(at, key=repr) == [("t", (0,)), ("w", ()), (1, ())]


def test_contents_of_a_list_without_holder_have_no_spot():
    flat = flatten(([param(1), [param(1)]],))
    spots = spots_of(flat.graphdef.skeleton)
    assert spots.leaves == []
    assert spots.watched == []
    assert jax.tree.structure(Net()) == jax.tree.structure(Net())

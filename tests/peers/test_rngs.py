"""Random streams hand out the keys that flax.nnx hands out."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx as peer

import nnxlite as nnx

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def keys_and_counts(tree: Any) -> dict[tuple[Any, ...], Any]:
    """Key data and counts by path, of an object of either library."""
    library = nnx if isinstance(tree, nnx.Pytree) else peer
    return {
        path: np.asarray(
            jax.random.key_data(value[...])
            if jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
            else value[...]
        )
        for path, value in library.to_flat_state(library.state(tree))
    }


def assert_same(ours: Any, theirs: Any) -> None:
    ours, theirs = keys_and_counts(ours), keys_and_counts(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        np.testing.assert_array_equal(value, theirs[path], err_msg=str(path))


PROGRAMS: dict[str, Callable[[Any], Any]] = {
    "one seed": lambda lib: lib.Rngs(3),
    "names": lambda lib: lib.Rngs(0, params=1, dropout=jax.random.key(2)),
    "mapping": lambda lib: lib.Rngs({"params": 1, "noise": 2}, noise=3),
    "from a stream": lambda lib: lib.Rngs(params=used(lib.Rngs(4), 2).default),
    "draws": lambda lib: used(lib.Rngs(0, params=1), 3),
    "fork": lambda lib: lib.Rngs(0, params=1).fork(),
    "fork twice": lambda lib: used(lib.Rngs(0, params=1), 2).fork().fork(),
    "fork with split": lambda lib: lib.Rngs(0, params=1).fork(split={"params": 3}),
    "split": lambda lib: lib.Rngs(0, params=1).split(3),
    "split by shape": lambda lib: lib.Rngs(0, params=1).split((2, 3)),
    "split by filter": lambda lib: lib.Rngs(0, params=1, noise=2).split(
        {"params": 3, "noise": (2, 2)}
    ),
    "broadcast": lambda lib: lib.Rngs(0, params=1).broadcast({"params": 2, ...: None}),
    "stream fork": lambda lib: lib.Rngs(0).default.fork(),
    "split_rngs": lambda lib: in_place(lib, lambda rngs: lib.split_rngs(rngs, splits=3)),
    "split_rngs only": lambda lib: in_place(
        lib, lambda rngs: lib.split_rngs(rngs, splits=(2, 3), only="params")
    ),
    "split_rngs squeeze": lambda lib: in_place(
        lib, lambda rngs: lib.split_rngs(rngs, splits=1, squeeze=True)
    ),
    "restore_rngs": lambda lib: in_place(
        lib, lambda rngs: lib.restore_rngs(lib.split_rngs(rngs, splits=3))
    ),
    "fork_rngs": lambda lib: in_place(lib, lambda rngs: lib.fork_rngs(rngs)),
    "fork_rngs split": lambda lib: in_place(
        lib, lambda rngs: lib.fork_rngs(rngs, split={"params": 3})
    ),
    "reseed": lambda lib: in_place(lib, lambda rngs: lib.reseed(rngs, params=5)),
    "reseed split": lambda lib: in_place(
        lib,
        lambda rngs: (
            lib.split_rngs(rngs, splits=3),
            lib.reseed(rngs, params=5, policy="match_shape"),
        ),
    ),
    "with_rngs": lambda lib: lib.with_rngs(
        used(lib.Rngs(0, params=1, noise=2), 1),
        split={"params": 3},
        fork="noise",
        graph=True,
        graph_updates=False,
    ),
}


def used(rngs: Any, times: int) -> Any:
    for _ in range(times):
        rngs.params()
    return rngs


def in_place(lib: Any, change: Callable[[Any], Any]) -> Any:
    rngs = used(lib.Rngs(0, params=1), 2)
    change(rngs)
    return rngs


@pytest.mark.parametrize("program", PROGRAMS)
def test_keys_and_counts_are_those_of_flax(program: str) -> None:
    assert_same(PROGRAMS[program](nnx), PROGRAMS[program](peer))


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_drawn_keys_are_those_of_flax(make_key: Callable[[int], jax.Array]) -> None:
    ours, theirs = nnx.Rngs(make_key(0)), peer.Rngs(make_key(0))
    for _ in range(3):
        drawn, expected = ours.params(), theirs.params()
        np.testing.assert_array_equal(jax.random.key_data(drawn), jax.random.key_data(expected))


def test_reseeding_goes_through_a_graph_in_the_order_of_flax() -> None:
    def build(lib: Any) -> Any:
        class Model(lib.Module):
            def __init__(self, rngs: Any) -> None:
                self.z = lib.Dropout(0.5, rngs=rngs)
                self.a = lib.List([lib.Dropout(0.5, rngs=rngs) for _ in range(3)])
                self.rngs = rngs
                self.m = lib.Dict(b=lib.Dropout(0.5, rngs=rngs), a=lib.Dropout(0.5, rngs=rngs))

        model = Model(lib.Rngs(dropout=0))
        lib.reseed(model, dropout=42)
        return model

    assert_same(build(nnx), build(peer))


DRAWS = [
    ("ball", (3,)),
    ("bernoulli", (0.3, (4,))),
    ("beta", (1.0, 2.0, (3,))),
    ("bits", ((3,),)),
    ("categorical", (np.zeros((2, 3), np.float32),)),
    ("cauchy", ((3,),)),
    ("choice", (5, (2,))),
    ("exponential", ((3,),)),
    ("gamma", (2.0, (3,))),
    ("gumbel", ((3,),)),
    ("laplace", ((3,),)),
    ("logistic", ((3,),)),
    ("normal", ((2, 3),)),
    ("orthogonal", (3,)),
    ("permutation", (5,)),
    ("poisson", (2.0, (3,))),
    ("rademacher", ((3,),)),
    ("randint", ((3,), 0, 9)),
    ("truncated_normal", (-1.0, 1.0, (3,))),
    ("uniform", ((2, 3),)),
]


@pytest.mark.parametrize(("name", "args"), DRAWS, ids=[name for name, _ in DRAWS])
def test_draws_are_those_of_flax(name: str, args: tuple[Any, ...]) -> None:
    for ours, theirs in ((nnx.Rngs(0), peer.Rngs(0)), (nnx.Rngs(0).a, peer.Rngs(0).a)):
        np.testing.assert_array_equal(getattr(ours, name)(*args), getattr(theirs, name)(*args))


def test_every_draw_and_initializer_of_flax_exists() -> None:
    public = {name for name in dir(peer.Rngs) if not name.startswith("_")}
    assert public - set(dir(nnx.Rngs)) <= {"attributes"}


@pytest.mark.parametrize("name", ["lecun_normal", "he_uniform", "xavier_normal"])
def test_initializers_are_those_of_flax(name: str) -> None:
    ours, theirs = getattr(nnx.Rngs(0), name)(), getattr(peer.Rngs(0), name)()
    np.testing.assert_array_equal(ours((3, 4)), theirs((3, 4)))

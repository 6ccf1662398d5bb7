"""Splitting, forking, reseeding and restoring the streams of a graph."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite._core.errors import TraceLevelError
from nnxlite._core.filters import Not, PathContains
from nnxlite._core.module import Pytree
from nnxlite._core.random_state import fork_rngs, reseed, restore_rngs, split_rngs, with_rngs
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._core.variable import Param, RngKey


class Noisy(Pytree):
    """An object with streams at several depths, one of them shared."""

    def __init__(self, rngs: Rngs) -> None:
        self.weight = Param(rngs.params.normal((2,)))
        self.heads = [rngs.dropout.fork(), rngs.noise.fork()]
        self.shared = self.heads[0]


def make() -> Noisy:
    return Noisy(Rngs(params=0, dropout=1, noise=2))


def folded(seed: int, count: int) -> jax.Array:
    return jax.random.fold_in(jax.random.key(seed), count)


def same(a: Any, b: Any) -> bool:
    return bool((jax.random.key_data(a) == jax.random.key_data(b)).all())


def snapshot(*streams: RngStream) -> list[Any]:
    return [
        (np.asarray(jax.random.key_data(s.key[...])).tolist(), s.count[...].tolist())
        for s in streams
    ]


def test_split_rngs_gives_each_stream_many_keys_in_place() -> None:
    rngs = Rngs(params=0, dropout=1)
    split_rngs(rngs, splits=5)
    assert same(rngs.params.key[...], jax.random.split(folded(0, 0), 5))
    assert same(rngs.dropout.key[...], jax.random.split(folded(1, 0), 5))
    assert rngs.params.count[...].tolist() == [0] * 5


def test_restoring_goes_on_with_unused_keys() -> None:
    rngs = Rngs(0)
    restore_rngs(split_rngs(rngs, splits=5))
    assert same(rngs(), folded(0, 1))


def test_a_context_restores_on_an_exception() -> None:
    rngs = Rngs(0)
    shapes = []

    def fail() -> None:
        with split_rngs(rngs, splits=(2, 3)):
            shapes.append(rngs.default.key.shape)
            raise RuntimeError("stop")

    with pytest.raises(RuntimeError, match="stop"):
        fail()
    assert shapes == [(2, 3)]
    assert rngs.default.key.shape == ()


@pytest.mark.parametrize(
    ("only", "shapes"),
    [
        (..., [(3,), (3,)]),
        ("dropout", [(3,), ()]),
        (Not("dropout"), [(), (3,)]),
        (PathContains(1), [(), (3,)]),
        (RngKey, [(), ()]),
    ],
    ids=["all", "tag", "not", "path", "keys without counts"],
)
def test_only_chooses_streams(only: Any, shapes: list[tuple[int, ...]]) -> None:
    model = make()
    split_rngs({"model": [model]}, splits=3, only=only)
    assert [stream.key.shape for stream in model.heads] == shapes


def test_a_shared_stream_is_split_once() -> None:
    model = make()
    split_rngs(model, splits=3)
    assert model.shared is model.heads[0]
    assert model.shared.key.shape == (3,)


def test_squeeze_gives_one_new_key() -> None:
    rngs = Rngs(0)
    split_rngs(rngs, splits=1, squeeze=True)
    assert same(rngs.default.key[...], jax.random.split(folded(0, 0), 1)[0])
    assert rngs.default.count.shape == ()


def test_squeeze_needs_one_split() -> None:
    with pytest.raises(ValueError, match="squeeze=True needs splits=1, found splits=2"):
        split_rngs(Rngs(0), splits=2, squeeze=True)


def test_as_decorator_it_splits_the_arguments_of_each_call() -> None:
    seen = []

    @split_rngs(splits=4, only="params")
    def build(rngs: Rngs, *, other: Rngs) -> str:
        seen.append((rngs.params.key.shape, other.params.key.shape, rngs.noise.key.shape))
        return "built"

    rngs, other = Rngs(params=0, noise=1), Rngs(params=2)
    assert [build(rngs, other=other), build(rngs, other=other)] == ["built", "built"]
    assert seen == [((4,), (4,), ())] * 2
    assert rngs.params.key.shape == ()
    assert int(rngs.params.count[...]) == 2
    assert build.__name__ == "build"


def test_old_keys_are_split_as_old_keys() -> None:
    rngs = Rngs(jax.random.PRNGKey(0))
    with split_rngs(rngs, splits=3):
        assert rngs.default.key.shape == (3, 2)
        assert rngs.default.key.dtype == jnp.uint32
        assert same(rngs.default.key[...], jax.random.split(folded(0, 0), 3))


def test_a_stream_that_cannot_be_split_leaves_the_others_alone() -> None:
    rngs = Rngs(a=0, b=1)
    split_rngs(rngs, splits=2, only="b")
    before = snapshot(rngs.a, rngs.b)
    with pytest.raises(ValueError, match=r"'b' was split into keys of shape \(2,\)"):
        split_rngs(rngs, splits=2)
    assert snapshot(rngs.a, rngs.b) == before


def test_a_stream_of_another_trace_level_cannot_be_split() -> None:
    rngs = Rngs(0)
    with pytest.raises(TraceLevelError, match="replace the keys of the random stream 'default'"):
        jax.jit(lambda: split_rngs(rngs, splits=2))()
    assert same(rngs(), folded(0, 0))


@pytest.mark.parametrize("function", [split_rngs, fork_rngs])
def test_flags_for_another_mode_are_refused(function: Any) -> None:
    splits = {"splits": 2} if function is split_rngs else {}
    with pytest.raises(TypeError, match=r"no graph_updates=False.*nnx\.with_rngs"):
        function(Rngs(0), graph_updates=False, **splits)
    function(Rngs(0), graph=True, graph_updates=True, **splits)


def test_fork_rngs_goes_on_from_the_next_key() -> None:
    rngs = Rngs(0)
    with fork_rngs(rngs):
        assert same(rngs(), jax.random.fold_in(folded(0, 0), 0))
    assert same(rngs(), folded(0, 1))


def test_fork_rngs_splits_by_the_first_filter_that_matches() -> None:
    rngs = Rngs(params=0, dropout=1)
    fork_rngs(rngs, split={"params": 5, ...: None})
    assert same(rngs.params.key[...], jax.random.split(folded(0, 0), 5))
    assert same(rngs.dropout.key[...], folded(1, 0))


def test_fork_rngs_leaves_streams_alone_that_no_filter_matches() -> None:
    rngs = Rngs(params=0, dropout=1)
    fork_rngs(rngs, split={"params": None})
    assert int(rngs.dropout.count[...]) == 0


def test_fork_rngs_decorates() -> None:
    rngs = Rngs(0)
    drawn = fork_rngs(split=2)(lambda rngs: rngs.default.key.shape)(rngs)
    assert drawn == (2,)
    assert rngs.default.key.shape == ()


def test_with_rngs_copies_and_advances_the_original() -> None:
    rngs = Rngs(params=0, dropout=1, noise=2)
    copy = with_rngs(rngs, split={"params": 4}, broadcast={"noise": 2}, fork="dropout")
    assert same(copy.params.key[...], jax.random.split(folded(0, 0), 4))
    assert same(copy.noise.key[...], jnp.broadcast_to(folded(2, 0), (2,)))
    assert same(copy.dropout.key[...], folded(1, 0))
    assert [int(stream.count[...]) for _, stream in rngs.items()] == [1, 1, 1]
    assert rngs.params.key.shape == ()


def test_with_rngs_shares_everything_else() -> None:
    model = make()
    copy = with_rngs(model, fork="noise")
    assert copy is not model
    assert copy.weight is model.weight
    assert copy.heads[0].key is model.heads[0].key
    assert copy.shared is copy.heads[0]
    assert copy.heads[1].key is not model.heads[1].key


def test_with_rngs_decorates() -> None:
    rngs = Rngs(0)
    assert with_rngs(split=3)(lambda rngs: rngs.default.key.shape)(rngs) == (3,)
    assert rngs.default.key.shape == ()


def test_rules_that_name_the_same_stream_are_refused() -> None:
    with pytest.raises(ValueError, match=r"node\.params matches the rules split and fork"):
        with_rngs(Rngs(params=0), split={"params": 2}, fork="params")


def test_a_named_rule_goes_before_one_for_all() -> None:
    copy = with_rngs(Rngs(params=0, noise=1), split={"params": 2}, fork=...)
    assert copy.params.key.shape == (2,)
    assert copy.noise.key.shape == ()


def test_none_exempts_a_stream_from_a_split() -> None:
    copy = with_rngs(Rngs(params=0, noise=1), split={"noise": None, ...: 2})
    assert copy.params.key.shape == (2,)
    assert copy.noise.key.shape == ()


def test_reseed_starts_streams_of_a_name_anew() -> None:
    model = make()
    model.heads[0]()
    before = snapshot(model.heads[1])
    reseed(model, dropout=42)
    assert same(model.heads[0].key[...], folded(42, 0))
    assert int(model.heads[0].count[...]) == 0
    assert snapshot(model.heads[1]) == before


def test_reseed_gives_streams_of_one_name_different_keys() -> None:
    streams = [RngStream(0, tag="dropout"), RngStream(0, tag="dropout")]
    reseed(streams, dropout=42)
    assert same(streams[0].key[...], folded(42, 0))
    assert same(streams[1].key[...], folded(42, 1))


def test_reseed_refuses_split_streams_unless_told_how() -> None:
    model = make()
    split_rngs(model, splits=3, only="noise")
    before = snapshot(*model.heads)
    with pytest.raises(ValueError, match=r"node\.heads\[1\] has keys of shape \(3,\).*match_shape"):
        reseed(model, dropout=1, noise=2)
    assert snapshot(*model.heads) == before
    reseed(model, noise=2, policy="match_shape")
    assert same(model.heads[1].key[...], jax.random.split(folded(2, 0), 3))


def test_reseed_takes_a_policy() -> None:
    calls = []

    def policy(path: tuple[Any, ...], key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        calls.append((path, shape))
        return jax.random.key(5)

    rngs = Rngs(0)
    reseed(rngs, policy=policy, default=1)
    assert calls == [(("default",), ())]
    assert same(rngs(), folded(5, 0))


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Unknown policy 'all'\. Expected 'scalars_only'"):
        reseed(Rngs(0), policy="all", default=1)  # type: ignore[arg-type]  # the point of the test

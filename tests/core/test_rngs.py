"""Random streams, against keys folded and split by hand."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite._core.errors import TraceLevelError
from nnxlite._core.merge import merge
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._core.split import split, state
from nnxlite._core.variable import RngCount, RngKey


def folded(seed: int, count: int) -> jax.Array:
    """The key number `count` of a stream that starts from `seed`."""
    return jax.random.fold_in(jax.random.key(seed), count)


def same(a: Any, b: Any) -> bool:
    return bool((jax.random.key_data(a) == jax.random.key_data(b)).all())


def test_a_stream_folds_its_count_into_its_key() -> None:
    stream = RngStream(7, tag="params")
    keys = [stream() for _ in range(3)]
    assert all(same(key, folded(7, n)) for n, key in enumerate(keys))
    assert int(stream.count[...]) == 3
    assert stream.count.dtype == jnp.uint32
    assert same(stream.key[...], jax.random.key(7))


def test_key_and_count_carry_the_name_of_the_stream_as_tag() -> None:
    rngs = Rngs(params=0)
    assert isinstance(rngs.params.key, RngKey)
    assert isinstance(rngs.params.count, RngCount)
    assert rngs.params.tag == rngs.params.key.tag == rngs.params.count.tag == "params"


@pytest.mark.parametrize(
    "seed",
    [
        3,
        np.int64(3),
        jnp.int32(3),
        jax.random.key(3),
        jax.random.PRNGKey(3),
        np.asarray(jax.random.PRNGKey(3)),
        RngStream(3, tag="other"),
        RngKey(jax.random.key(3)),
    ],
    ids=["int", "numpy int", "jax int", "key", "old key", "numpy key", "stream", "RngKey"],
)
def test_every_form_of_a_seed_gives_the_same_keys(seed: Any) -> None:
    assert same(Rngs(params=seed).params(), folded(3, 0))


@pytest.mark.parametrize(
    ("seed", "found"),
    [
        ("3", r"'3' of type str"),
        (1.5, r"1\.5 of type float"),
        (True, r"True of type bool"),
        (jnp.ones(2), r"float32\[2\] of type ArrayImpl"),
        (jnp.ones(2, jnp.int32), r"int32\[2\] of type ArrayImpl"),
    ],
)
def test_what_is_no_seed_is_refused(seed: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"random stream 'noise' from {found}.*Expected a seed"):
        Rngs(noise=seed)


def test_old_keys_are_kept_as_numpy_can_hold_them() -> None:
    rngs = Rngs(jax.random.PRNGKey(0))
    streams = [rngs.default, rngs.fork().default, rngs.split(3).default, rngs.default.broadcast(3)]
    assert [stream.key.dtype.name for stream in streams] == ["uint32"] * 4
    assert [stream.key.shape for stream in streams] == [(2,), (2,), (3, 2), (3, 2)]
    assert [stream.count.shape for stream in streams] == [(), (), (3,), (3,)]


def test_old_keys_give_the_same_numbers_as_new_ones() -> None:
    old, new = Rngs(jax.random.PRNGKey(0)), Rngs(jax.random.key(0))
    assert same(old.fork().default(), new.fork().default())
    assert same(old.split(3).default.key[...], new.split(3).default.key[...])


def test_a_missing_name_stands_for_the_default() -> None:
    rngs = Rngs(0, params=1)
    assert same(rngs.params(), folded(1, 0))
    assert [same(key, folded(0, n)) for n, key in enumerate([rngs(), rngs.noise(), rngs["x"]()])]
    assert int(rngs.default.count[...]) == 3


def test_a_missing_name_without_default_names_the_streams() -> None:
    rngs = Rngs(params=1, dropout=2)
    text = (
        r"Rngs has no stream 'noise'; its streams are \['dropout', 'params'\].*nnx\.Rngs\(noise=0\)"
    )
    with pytest.raises(AttributeError, match=text):
        rngs.noise()
    with pytest.raises(KeyError, match="no stream 'noise'"):
        rngs["noise"]
    with pytest.raises(KeyError, match="no stream 'default'"):
        rngs()


def test_names_with_an_underscore_never_stand_for_the_default() -> None:
    with pytest.raises(AttributeError, match="no stream '_repr_html_'"):
        Rngs(0)._repr_html_


def test_rngs_are_a_collection_of_streams() -> None:
    rngs = Rngs({"params": 0, "noise": 1}, noise=2)
    assert list(rngs) == ["params", "noise"]
    assert len(rngs) == 2
    assert dict(rngs.items()) == {"params": rngs.params, "noise": rngs.noise}
    assert "params" in rngs
    assert "dropout" not in rngs
    assert same(rngs.noise(), folded(2, 0))


def test_a_stream_may_be_called_like_a_draw() -> None:
    assert isinstance(Rngs(normal=0).normal, RngStream)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("normal", ((2, 3),)),
        ("uniform", ((2, 3),)),
        ("bernoulli", (0.3, (4,))),
        ("categorical", (np.zeros((2, 3), np.float32),)),
        ("permutation", (5,)),
        ("randint", ((3,), 0, 10)),
        ("truncated_normal", (-1.0, 1.0, (3,))),
        ("choice", (5,)),
        ("bits", ((2,),)),
    ],
)
def test_draws_take_the_next_key(name: str, args: tuple[Any, ...]) -> None:
    rngs = Rngs(0, params=1)
    draw = getattr(jax.random, name)
    np.testing.assert_array_equal(getattr(rngs, name)(*args), draw(folded(0, 0), *args))
    np.testing.assert_array_equal(getattr(rngs.params, name)(*args), draw(folded(1, 0), *args))


def test_draws_take_keywords() -> None:
    drawn = Rngs(0).normal(shape=(2,), dtype=jnp.bfloat16)
    np.testing.assert_array_equal(drawn, jax.random.normal(folded(0, 0), (2,), jnp.bfloat16))


def test_initializers_draw_a_key_for_each_array() -> None:
    rngs = Rngs(0)
    init = rngs.lecun_normal()
    oracle = jax.nn.initializers.lecun_normal()
    np.testing.assert_array_equal(init((3, 4), jnp.float32), oracle(folded(0, 0), (3, 4)))
    np.testing.assert_array_equal(init((3, 4)), oracle(folded(0, 1), (3, 4)))


def test_fork_starts_from_the_next_key() -> None:
    rngs = Rngs(params=1, dropout=2)
    forked = rngs.fork()
    assert same(forked.params.key[...], folded(1, 0))
    assert int(forked.params.count[...]) == 0
    assert int(rngs.dropout.count[...]) == 1
    assert forked.params.tag == "params"


def test_split_divides_the_next_key() -> None:
    rngs = Rngs(params=1, dropout=2).split({"params": 5, ...: (2, 3)})
    assert same(rngs.params.key[...], jax.random.split(folded(1, 0), 5))
    assert same(rngs.dropout.key[...], jax.random.split(folded(2, 0), (2, 3)))
    assert rngs.dropout.count.shape == (2, 3)


def test_the_first_filter_that_matches_decides_about_a_split() -> None:
    rngs = Rngs(params=1, dropout=2).split({"params": None, ...: 4})
    assert same(rngs.params(), folded(1, 0))
    assert rngs.dropout.key.shape == (4,)


def test_fork_with_split_forks_the_rest() -> None:
    rngs = Rngs(params=1, dropout=2).fork(split={"params": 5})
    assert same(rngs.params.key[...], jax.random.split(folded(1, 0), 5))
    assert same(rngs.dropout.key[...], folded(2, 0))


def test_broadcast_repeats_the_next_key() -> None:
    keys = Rngs(0).broadcast(3).default.key[...]
    assert keys.shape == (3,)
    assert all(same(keys[n], folded(0, 0)) for n in range(3))


def test_a_split_stream_says_why_it_has_no_next_key() -> None:
    stream = RngStream(0, tag="noise").split(5)
    with pytest.raises(ValueError, match=r"'noise' was split into keys of shape \(5,\).*nnx\.vmap"):
        stream()
    assert stream.count[...].tolist() == [0] * 5


def test_each_entry_of_a_split_stream_is_a_stream() -> None:
    graphdef, keys = split(RngStream(0, tag="noise").split(5))
    drawn = jax.vmap(lambda keys: merge(graphdef, keys).normal((2,)))(keys)
    for n, key in enumerate(jax.random.split(folded(0, 0), 5)):
        np.testing.assert_array_equal(drawn[n], jax.random.normal(jax.random.fold_in(key, 0), (2,)))


def test_a_stream_of_another_trace_level_hands_out_nothing() -> None:
    rngs = Rngs(0)
    with pytest.raises(TraceLevelError, match="set the value of RngCount"):
        jax.jit(lambda: rngs.normal((2,)))()
    assert same(rngs(), folded(0, 0))


def test_streams_are_found_by_their_name() -> None:
    rngs = Rngs(params=0, dropout=1)
    assert list(state(rngs, "dropout")) == ["dropout"]
    assert [path for path, _ in state(rngs, RngKey).flat_state()] == [
        ("dropout", "key"),
        ("params", "key"),
    ]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_a_copy_goes_on_where_the_original_is(copied: Any) -> None:
    rngs = Rngs(0)
    rngs()
    assert same(copied(rngs)(), folded(0, 1))
    assert int(rngs.default.count[...]) == 1

"""split, state, variables: an object to its GraphDef and States."""

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, param


def batch_norm():
    return nnx.BatchNorm(3, rngs=nnx.Rngs(0))


def net():
    w = param(2)
    stat = nnx.BatchStat(jnp.ones(1))
    return Net(w=w, layers=[Net(w=w, stat=stat), {"a": param(1)}], x=jnp.ones(2), k=1)


def test_split_gives_a_state_per_filter_in_their_order():
    graphdef, stats, params, rest = nnx.split(net(), nnx.BatchStat, nnx.Param, ...)
    assert graphdef is nnx.graphdef(net())
    assert stats.flat_state().paths == (("layers", 0, "stat"),)
    assert params.flat_state().paths == (("layers", 0, "w"), ("layers", 1, "a"))
    assert list(rest) == ["x"]


def test_first_filter_that_matches_takes_the_leaf():
    _, first, second, rest = nnx.split(net(), nnx.PathContains(0), nnx.Param, ...)
    assert first.flat_state().paths == (("layers", 0, "stat"), ("layers", 0, "w"))
    assert second.flat_state().paths == (("layers", 1, "a"),)
    assert list(rest) == ["x"]


def test_filters_may_ask_for_values():
    model = Net(a=param(2), b=param(3))
    large = lambda path, leaf: leaf.size > 2  # noqa: E731
    assert list(nnx.state(model, large)) == ["b"]
    model.a.value = jnp.ones(5)
    assert list(nnx.state(model, large)) == ["a", "b"]
    assert [list(s) for s in nnx.split(model, lambda path, leaf: path == ("a",), ...)[1:]] == [
        ["a"],
        ["b"],
    ]


def test_filters_ask_for_arrays_as_they_are_now():
    model = Net(x=np.ones(2))
    assert list(nnx.state(model, nnx.OfType(np.ndarray))) == ["x"]
    model.x = jnp.ones(2)
    assert list(nnx.state(model, nnx.OfType(np.ndarray))) == []
    inner = Net(s=nnx.State({"x": np.ones(2)}))
    assert len(nnx.state(inner, np.ndarray).flat_state()) == 1
    inner.s["x"] = jnp.ones(2)
    assert len(nnx.state(inner, np.ndarray).flat_state()) == 0


def test_filters_may_be_lists_and_tags():
    model = Net(a=param(1, tag="x"), b=nnx.BatchStat(jnp.ones(1)), c=nnx.Cache(jnp.ones(1)))
    assert list(nnx.state(model, ["x", nnx.Cache])) == ["a", "c"]


def test_unmatched_leaves_are_an_error_that_lists_paths():
    with pytest.raises(
        nnx.errors.StructureError, match=r"leave 2 of 4 .*model\.layers\[0\]\.stat \(BatchStat\)"
    ):
        nnx.split(net(), nnx.Param)


def test_a_filter_after_the_last_one_is_an_error():
    with pytest.raises(nnx.errors.StructureError, match="nothing is left"):
        nnx.split(net(), ..., nnx.Param)


def test_state_leaves_out_what_matches_no_filter():
    assert list(nnx.state(batch_norm(), nnx.BatchStat)) == ["mean", "var"]
    params, stats = nnx.state(batch_norm(), nnx.Param, nnx.BatchStat)
    assert (list(params), list(stats)) == (["bias", "scale"], ["mean", "var"])


def test_bare_arrays_match_no_kind_but_everything():
    assert list(nnx.state(net(), nnx.Variable)) == ["layers"]
    assert list(nnx.state(net())) == ["layers", "x"]
    assert list(nnx.variables(net())) == ["layers"]
    assert [len(s.flat_state()) for s in nnx.variables(net(), nnx.Param, nnx.BatchStat)] == [2, 1]


def test_containers_are_split_as_objects_are():
    graphdef, state = nnx.split({"a": [param(1)], "b": (net(), jnp.ones(1))})
    merged = nnx.merge(graphdef, state)
    assert type(merged) is dict
    assert type(merged["b"]) is tuple
    assert isinstance(merged["b"][0], Net)


@pytest.mark.parametrize("bare", [param(1), jnp.ones(1)])
def test_bare_leaf_is_an_error(bare):
    with pytest.raises(nnx.errors.StructureError, match="has no path"):
        nnx.split(bare)


def test_state_is_split_like_an_object():
    state = nnx.state(net())
    graphdef, params, rest = nnx.split(state, nnx.Param, ...)
    merged = nnx.merge(graphdef, params, rest)
    assert isinstance(merged, nnx.State)
    assert_isomorphic(merged.flat_state(), state.flat_state())


def test_graphdef_keeps_a_bounded_number_of_selections():
    model = net()
    for n in range(200):
        nnx.state(model, nnx.PathContains(n))
        nnx.update(model, nnx.filter_state(nnx.state(model), nnx.Not(nnx.PathContains(n))))
    assert len(nnx.graphdef(model).cache) <= 70


def test_changes_after_the_split_are_not_in_the_state():
    model = net()
    graphdef, state = nnx.split(model)
    model.w[...] = jnp.zeros(2)
    model.layers.append(param(1))
    model.k = 2
    assert_isomorphic(nnx.merge(graphdef, state), net())

"""Copies of objects, and trees without Variables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.clone import _copied
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, param


def net():
    w = param(2)
    return Net(
        w=w,
        tied=[w],
        x=jnp.ones(2),
        host=np.ones(2, np.float32),
        key=nnx.RngKey(jax.random.key(0)),
        tree=nnx.Param({"u": jnp.ones(1), "none": None}),
        state=nnx.state(Net(v=param(1))),
    )


def pointers(tree):
    arrays = [x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array)]
    arrays = [x for x in arrays if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)]
    return {x.unsafe_buffer_pointer() for x in arrays}


def test_clone_has_buffers_of_its_own():
    a = net()
    b = nnx.clone(a)
    assert not pointers(a) & pointers(b)
    assert a.host is not b.host
    b.host[0] = 5
    assert a.host[0] == 1


def test_one_array_in_two_variables_becomes_two():
    x = jnp.ones(2)
    made = nnx.clone(Net(a=nnx.Param(x), b=nnx.Param(x)))
    assert len(pointers(made)) == 2


def test_donating_the_clone_keeps_the_original():
    a = net()
    a.host = None
    jax.jit(lambda n: jax.tree.map(lambda x: x, n), donate_argnums=0)(nnx.clone(a))
    assert a.w[...].tolist() == [1.0, 1.0]


def test_clone_copies_all_buffers_in_one_call():
    a = net()
    nnx.clone(a)
    before = _copied._cache_size()
    nnx.clone(a)
    assert _copied._cache_size() == before


def test_shared_clone_has_the_same_arrays_in_variables_of_its_own():
    a = net()
    b = nnx.clone(a, share=True)
    assert pointers(a) == pointers(b)
    assert b.w is not a.w
    b.w[...] = jnp.zeros(2)
    assert a.w[...].tolist() == [1.0, 1.0]


@pytest.mark.parametrize("share", [True, False])
def test_under_a_trace_nothing_is_copied(share):
    model = net()

    def f(inner):
        for source in (model, inner):
            made = nnx.clone(source, share=share)
            assert made.w is made.tied[0] is not source.w
            assert made.w.get_raw_value() is source.w.get_raw_value()
            assert made.x is source.x
        made.w[...] = made.w * 2
        return made.w[...]

    assert jax.jit(f)(net()).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("value", [jax.ShapeDtypeStruct((2,), jnp.float32), None, "label"])
def test_placeholders_are_kept(value):
    assert nnx.clone(Net(w=nnx.Param(value))).w.get_raw_value() is value


def test_clone_of_containers_and_variables():
    made = nnx.clone([param(1), {"a": jnp.ones(1)}])
    assert type(made) is list
    assert made[1]["a"].tolist() == [1.0]
    assert isinstance(nnx.clone(param(1)), nnx.Param)


@pytest.mark.parametrize("function", [nnx.pure, nnx.as_pure])
def test_pure_trees_hold_values(function):
    state = function(nnx.state(net()))
    assert isinstance(state, nnx.State)
    assert isinstance(state["w"] if "w" in state else state["tied"][0], jax.Array)
    model = function(Net(w=param(2), layers=[param(1)], k=1))
    assert isinstance(model.w, jax.Array)
    assert isinstance(model.layers[0], jax.Array)
    assert function({"a": 1, "v": param(1)})["v"].tolist() == [1.0]


def test_pure_tree_of_a_tied_model_stays_tied():
    w = param(2)
    pure = nnx.pure(Net(a=w, b=[w]))
    assert len(jax.tree.leaves(pure)) == 1
    nnx.update(pure, {"a": jnp.zeros(2)})
    assert pure.b[0].tolist() == [0.0, 0.0]
    assert_isomorphic(nnx.clone(pure), pure)
    pure.a = jnp.full(2, 5.0)
    assert [x.tolist() for x in jax.tree.leaves(pure)] == [[5.0, 5.0], [0.0, 0.0]]

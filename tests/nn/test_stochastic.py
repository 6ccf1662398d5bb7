"""Dropout, against a mask drawn by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx


def test_dropout_masks_by_the_key_of_a_forked_stream() -> None:
    rngs = nnx.Rngs(params=0, dropout=1)
    layer = nnx.Dropout(0.25, rngs=rngs)
    x = jnp.arange(1.0, 13.0).reshape(3, 4)
    forked = jax.random.fold_in(jax.random.key(1), 0)
    for n in range(2):
        mask = jax.random.bernoulli(jax.random.fold_in(forked, n), 0.75, (3, 4))
        np.testing.assert_array_equal(layer(x), jnp.where(mask, x / 0.75, 0.0))
    assert int(rngs.dropout.count[...]) == 1


def test_another_stream_may_be_named() -> None:
    layer = nnx.Dropout(0.5, rng_collection="noise", rngs=nnx.Rngs(noise=1))
    assert layer.rngs.tag == "noise"


def test_broadcast_dims_share_the_mask() -> None:
    y = nnx.Dropout(0.5, broadcast_dims=(0,), rngs=nnx.Rngs(0))(jnp.ones((4, 32)))
    assert (y == y[:1]).all()
    assert set(np.unique(y)) == {0.0, 2.0}


@pytest.mark.parametrize("way", ["call", "constructor", "eval", "rate"])
def test_the_input_is_returned_as_it_is(way: str) -> None:
    rate = 0.0 if way == "rate" else 0.5
    layer = nnx.Dropout(rate, deterministic=way == "constructor", rngs=nnx.Rngs(0))
    if way == "eval":
        layer.eval()
    x = jnp.ones(8)
    assert (layer(x, deterministic=True) if way == "call" else layer(x)) is x
    assert int(layer.rngs.count[...]) == 0


def test_the_call_goes_before_the_attribute() -> None:
    layer = nnx.Dropout(0.5, deterministic=True, rngs=nnx.Rngs(0))
    assert 0.0 in layer(jnp.ones(32), deterministic=False)


def test_a_rate_of_one_drops_everything_and_has_a_gradient() -> None:
    layer = nnx.Dropout(1.0, rngs=nnx.Rngs(0))
    assert (
        jax.grad(lambda x: nnx.clone(layer, share=True)(x).sum())(jnp.ones(3)).tolist() == [0] * 3
    )


@pytest.mark.parametrize(
    "source",
    [nnx.Rngs(dropout=3), nnx.RngStream(3, tag="any"), jax.random.fold_in(jax.random.key(3), 0)],
    ids=["Rngs", "RngStream", "key"],
)
def test_the_call_may_bring_the_randomness(source: Any) -> None:
    mask = jax.random.bernoulli(jax.random.fold_in(jax.random.key(3), 0), 0.5, (8,))
    y = nnx.Dropout(0.5)(jnp.ones(8), rngs=source)
    np.testing.assert_array_equal(y, np.where(mask, 2.0, 0.0))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_the_dtype_is_kept(dtype: str) -> None:
    assert nnx.Dropout(0.5, rngs=nnx.Rngs(0))(jnp.ones(8, dtype)).dtype == jnp.dtype(dtype)


@pytest.mark.parametrize("rate", [-0.1, 1.5, float("nan")])
def test_a_rate_that_is_no_share_is_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="rate between 0 and 1, found"):
        nnx.Dropout(rate)


def test_randomness_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match=r"nnx\.Rngs or an nnx\.RngStream, found .*int"):
        nnx.Dropout(0.5, rngs=0)  # type: ignore[arg-type]  # the point of the test
    with pytest.raises(TypeError, match=r"nnx\.RngStream or a key, found .*int"):
        nnx.Dropout(0.5)(jnp.ones(3), rngs=0)  # type: ignore[arg-type]  # the point of the test


def test_what_was_given_nowhere_is_an_error() -> None:
    with pytest.raises(ValueError, match="Dropout has no random stream"):
        nnx.Dropout(0.5)(jnp.ones(3))
    with pytest.raises(ValueError, match="Dropout was told `deterministic` nowhere"):
        nnx.Dropout(0.5, deterministic=None, rngs=nnx.Rngs(0))(jnp.ones(3))


def test_each_jitted_call_draws_anew_without_retracing() -> None:
    traces = []

    @nnx.jit
    def forward(layer: nnx.Dropout, x: jax.Array) -> jax.Array:
        traces.append(1)
        return layer(x)

    jitted, eager = (nnx.Dropout(0.5, rngs=nnx.Rngs(0)) for _ in range(2))
    for _ in range(3):
        np.testing.assert_array_equal(forward(jitted, jnp.ones(16)), eager(jnp.ones(16)))
    assert len(traces) == 1


def test_a_merged_copy_drops_inside_plain_grad() -> None:
    layer = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    graphdef, streams = nnx.split(layer)
    grads = jax.grad(lambda x: nnx.merge(graphdef, streams)(x).sum())(jnp.ones(16))
    np.testing.assert_array_equal(grads, layer(jnp.ones(16)))

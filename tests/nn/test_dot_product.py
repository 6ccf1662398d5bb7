"""Dot-product attention, against the formula in numpy, head by head."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import nnxlite as nnx
from nnxlite.nn.attention import dot_product_attention_weights


def inputs(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


STATIC = ("broadcast_dropout", "deterministic", "dropout_rate", "is_causal", "precision")
attend = jax.jit(nnx.dot_product_attention, static_argnames=STATIC)
attention_weights = jax.jit(dot_product_attention_weights, static_argnames=STATIC)


def attention(
    q: Any, k: Any, v: Any, bias: Any = 0.0, mask: Any = True
) -> tuple[np.ndarray, np.ndarray]:
    """Output and weights of Vaswani et al. 2017, equation 1, in float64, one head at a time."""
    heads = q.shape[-2]
    shared = heads // k.shape[-2]  # query heads per key head (Ainslie et al. 2023)
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    logits = np.stack(
        [q[..., n, :] @ k[..., n // shared, :].swapaxes(-1, -2) for n in range(heads)], -3
    )
    logits = np.where(mask, logits / np.sqrt(q.shape[-1]) + np.asarray(bias), -np.inf)
    weights = np.exp(logits - logits.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out = [weights[..., n, :, :] @ v[..., n // shared, :] for n in range(heads)]
    return np.stack(out, -2), weights


@pytest.mark.parametrize(
    ("batch", "kv_heads"), [((), 4), ((2,), 1), ((2,), 4), ((2, 3), 2)], ids=str
)
@pytest.mark.parametrize("precision", [None, "highest"], ids=["fused", "explicit"])
def test_attention_is_the_formula(batch: tuple[int, ...], kv_heads: int, precision: Any) -> None:
    q = inputs(*batch, 5, 4, 8)
    k, v = (inputs(*batch, 7, kv_heads, 8, seed=n) for n in (1, 2))
    bias = inputs(4, 5, 7)
    mask = inputs(5, 7, seed=4).at[:, 0].set(1.0) > 0  # the same for all heads and batch entries
    expected, _ = attention(q, k, v, bias, mask)
    out = attend(q, k, v, bias, mask, precision=precision)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", [None, "highest"], ids=["fused", "explicit"])
def test_a_causal_query_sees_itself_and_those_before(precision: Any) -> None:
    x = inputs(2, 5, 4, 8)
    padding = jnp.asarray(np.arange(5) < np.array([5, 3]).reshape(2, 1, 1, 1))
    out = attend(x, x, x, mask=padding, precision=precision, is_causal=True)
    expected, _ = attention(x, x, x, mask=np.tri(5, dtype=bool) & np.asarray(padding))
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)


def test_weights_are_those_of_the_formula() -> None:
    q, k = inputs(2, 5, 4, 8), inputs(2, 7, 2, 8, seed=1)
    mask = jnp.arange(7).reshape(1, 1, 1, 7) < 6
    weights = attention_weights(q, k, mask=mask)
    np.testing.assert_allclose(weights, attention(q, k, k, mask=mask)[1], rtol=1e-4, atol=1e-6)
    assert (weights[..., 6] == 0).all()


def test_values_may_have_another_size() -> None:
    q, k, v = inputs(5, 4, 8), inputs(7, 2, 8, seed=1), inputs(7, 2, 3, seed=2)
    out = attend(q, k, v)
    np.testing.assert_allclose(out, attention(q, k, v)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("precision", [None, "highest"], ids=["fused", "explicit"])
def test_what_is_masked_does_not_matter(precision: Any) -> None:
    q, k, v = inputs(2, 5, 4, 8), inputs(2, 7, 4, 8, seed=1), inputs(2, 7, 4, 8, seed=2)
    mask = (jnp.arange(7) < 4).reshape(1, 1, 1, 7)
    outs = [
        attend(q, k.at[:, 4:].set(x), v.at[:, 4:].set(x), mask=mask, precision=precision)
        for x in (0.0, 1e4)
    ]
    np.testing.assert_array_equal(*outs)


@pytest.mark.parametrize("precision", [None, "highest"], ids=["fused", "explicit"])
def test_a_query_that_sees_nothing_takes_the_mean(precision: Any) -> None:
    x = inputs(1, 3, 2, 8)
    mask = jnp.array([[True] * 3, [False] * 3, [True] * 3])
    out = attend(x, x, x, mask=mask, precision=precision)
    np.testing.assert_allclose(out[:, 1], x.mean(1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_dropout_drops_weights_by_the_key(shared: bool) -> None:
    q, k = inputs(2, 5, 4, 8), inputs(2, 7, 4, 8, seed=1)
    key = jax.random.key(3)
    options = {"dropout_rng": key, "dropout_rate": 0.25, "broadcast_dropout": shared}
    _, weights = attention(q, k, k)
    kept = np.asarray(jax.random.bernoulli(key, 0.75, (1, 1, 5, 7) if shared else (2, 4, 5, 7)))
    dropped = attention_weights(q, k, **options)
    np.testing.assert_allclose(dropped, weights * kept / 0.75, rtol=1e-4, atol=1e-6)
    out = attend(q, k, k, **options)
    expected = np.einsum("bhqk,bkhd->bqhd", weights * kept / 0.75, k)
    np.testing.assert_allclose(out, expected, rtol=1e-4, atol=1e-5)
    quiet = attend(q, k, k, **options, deterministic=True)
    np.testing.assert_allclose(quiet, attention(q, k, k)[0], rtol=1e-4, atol=1e-5)


def test_half_precision_has_float32_logits_either_way() -> None:
    q, k = (inputs(1, 5, 1, 64, seed=n).astype(jnp.bfloat16) * 8 for n in (0, 1))
    expected, _ = attention(q, k, k)
    for precision in (None, "default"):
        out = attend(q, k, k, precision=precision)
        assert out.dtype == jnp.bfloat16
        np.testing.assert_allclose(out.astype(jnp.float32), expected, rtol=2e-2, atol=5e-2)


@pytest.mark.parametrize("precision", [None, "highest"], ids=["fused", "explicit"])
def test_gradients_are_those_of_differences(precision: Any) -> None:
    q, k, v = inputs(3, 2, 4), inputs(4, 1, 4, seed=1), inputs(4, 1, 4, seed=2)
    mask = jnp.arange(4).reshape(1, 1, 4) < 3

    def masked(*args: jax.Array) -> jax.Array:
        return attend(*args, mask=mask, precision=precision)

    check_grads(masked, (q, k, v), order=1, modes=["rev"], rtol=2e-2)


def test_rotated_queries_see_distances_only() -> None:
    q, k = inputs(2, 5, 4, 8), inputs(2, 5, 2, 8, seed=1)
    rope = nnx.RoPE(embedding_size=8, max_seq_len=5)
    start = jnp.array([[10], [20]])
    plain = nnx.dot_product_attention_with_rope(q, k, k, rope=rope)
    later = nnx.dot_product_attention_with_rope(
        q, k, k, rope=rope, input_positions=start + jnp.arange(5)[None]
    )
    np.testing.assert_allclose(plain, later, rtol=1e-3, atol=1e-4)
    rotated = [rope(x.swapaxes(1, 2)).swapaxes(1, 2) for x in (q, k)]
    np.testing.assert_allclose(plain, attention(*rotated, k)[0], rtol=1e-4, atol=1e-5)


def test_queries_may_have_positions_of_their_own() -> None:
    x, rope = inputs(5, 2, 8), nnx.RoPE()
    whole = nnx.dot_product_attention_with_rope(x, x, x, rope=rope)
    last = nnx.dot_product_attention_with_rope(
        x[3:], x, x, rope=rope, query_positions=jnp.arange(3, 5)
    )
    np.testing.assert_allclose(last, whole[3:], rtol=1e-5, atol=1e-6)


def test_the_implementation_is_that_of_jax() -> None:
    x = inputs(1, 5, 2, 8)
    xla = nnx.dot_product_attention(x, x, x, implementation="xla")
    np.testing.assert_allclose(xla, attention(x, x, x)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="Unsupported implementation option: abacus"):
        nnx.dot_product_attention(x, x, x, implementation="abacus")  # type: ignore[arg-type]  # the point


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}, "dropout"),
        ({"precision": "highest"}, "a precision"),
        ({"module": nnx.Module()}, "sowing the weights"),
    ],
    ids=["dropout", "precision", "sow"],
)
def test_an_implementation_without_weights_refuses_what_needs_them(
    options: dict[str, Any], reason: str
) -> None:
    x = inputs(1, 5, 2, 8)
    with pytest.raises(ValueError, match=f"'cudnn' never makes .* which {reason} needs"):
        nnx.dot_product_attention(x, x, x, implementation="cudnn", **options)


@pytest.mark.parametrize(
    ("q", "k", "v", "expected"),
    [
        ((5, 8), (7, 8), (7, 8), "of one rank"),
        ((2, 5, 4, 8), (7, 4, 8), (7, 4, 8), "of one rank"),
        ((2, 5, 4, 8), (3, 7, 4, 8), (3, 7, 4, 8), "the same batch axes"),
        ((5, 4, 8), (7, 4, 6), (7, 4, 8), "the same depth"),
        ((5, 4, 8), (7, 4, 8), (6, 4, 8), "the same length"),
        ((5, 4, 8), (7, 3, 8), (7, 3, 8), "a number of query heads that is a multiple"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(q: Any, k: Any, v: Any, expected: str) -> None:
    with pytest.raises(ValueError, match=rf"expects .*{expected}.*found query \({q[0]}, "):
        nnx.dot_product_attention(jnp.ones(q), jnp.ones(k), jnp.ones(v))


@pytest.mark.parametrize("shape", [(4, 7), (2, 1, 5, 7), (1, 1, 1, 5, 7)], ids=str)
@pytest.mark.parametrize("precision", [None, "highest"], ids=["fused", "explicit"])
@pytest.mark.parametrize("name", ["mask", "bias"])
def test_masks_and_biases_that_do_not_fit_are_refused(
    name: str, shape: tuple[int, ...], precision: Any
) -> None:
    q, k = jnp.ones((3, 5, 4, 8)), jnp.ones((3, 7, 4, 8))
    with pytest.raises(ValueError, match=rf"expects a {name} that .*\(3, 4, 5, 7\), found shape"):
        nnx.dot_product_attention(q, k, k, precision=precision, **{name: jnp.ones(shape)})


def test_dropout_without_a_key_or_a_share_is_refused() -> None:
    x = jnp.ones((5, 4, 8))
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5 has no key"):
        nnx.dot_product_attention(x, x, x, dropout_rate=0.5)
    with pytest.raises(ValueError, match=r"from 0 to less than 1, found 1\.0"):
        nnx.dot_product_attention(x, x, x, dropout_rate=1.0)

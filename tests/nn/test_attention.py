"""MultiHeadAttention, against its own parameters put into the formula by hand."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import nnxlite as nnx


def inputs(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def made(**options: Any) -> nnx.MultiHeadAttention:
    options = {"decode": False, "bias_init": jax.nn.initializers.normal(), **options}
    return nnx.MultiHeadAttention(4, 8, **options, rngs=nnx.Rngs(0))


def with_rope(**options: Any) -> nnx.MultiHeadAttention:
    rope = nnx.RoPE(theta=20.0, embedding_size=2, max_seq_len=16)
    attend = functools.partial(nnx.dot_product_attention_with_rope, rope=rope)
    return made(attention_fn=attend, **options)


@functools.partial(nnx.jit, static_argnames=("is_causal", "decode"))
def forward(layer: nnx.MultiHeadAttention, *args: jax.Array, **options: Any) -> jax.Array:
    return layer(*args, **options)


def projected(layer: Any, x: Any) -> np.ndarray:
    y = np.einsum("blf,fhd->blhd", x, np.asarray(layer.kernel[...], np.float64))
    return y if layer.bias is None else y + np.asarray(layer.bias[...])


def attention(layer: nnx.MultiHeadAttention, q: Any, k: Any, v: Any, mask: Any = True) -> Any:
    """Vaswani et al. 2017, section 3.2.2, in float64."""
    q, k, v = (
        projected(part, x) for part, x in ((layer.query, q), (layer.key, k), (layer.value, v))
    )
    k, v = (np.repeat(x, layer.num_heads // layer.num_kv_heads, axis=2) for x in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(layer.head_dim)
    weights = np.exp(np.where(mask, logits, -np.inf))
    weights /= weights.sum(-1, keepdims=True)
    heads = np.einsum("bhqk,bkhd->bqhd", weights, v)
    out = np.einsum("bqhd,hdf->bqf", heads, np.asarray(layer.out.kernel[...], np.float64))
    return out if layer.out.bias is None else out + np.asarray(layer.out.bias[...])


@pytest.mark.parametrize(
    "options",
    [{}, {"num_kv_heads": 2, "qkv_features": 16, "out_features": 5}, {"use_bias": False}],
    ids=str,
)
def test_a_layer_is_the_formula(options: dict[str, Any]) -> None:
    layer = made(**options)
    x = inputs(2, 5, 8)
    mask = np.tri(5, dtype=bool)
    expected = attention(layer, x, x, x, mask)
    masked = forward(layer, x, mask=jnp.asarray(mask))
    np.testing.assert_allclose(masked, expected, rtol=1e-4, atol=1e-5)
    causal = forward(layer, x, is_causal=True)
    np.testing.assert_allclose(causal, expected, rtol=1e-4, atol=1e-5)


def test_queries_keys_and_values_may_differ() -> None:
    layer = made(in_kv_features=6)
    q, k, v = inputs(2, 5, 8), inputs(2, 7, 6, seed=1), inputs(2, 7, 6, seed=2)
    np.testing.assert_allclose(
        forward(layer, q, k, v), attention(layer, q, k, v), rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
        forward(layer, q, k), attention(layer, q, k, k), rtol=1e-4, atol=1e-5
    )


def test_normalized_queries_do_not_feel_the_size_of_the_input() -> None:
    layer = made(normalize_qk=True, bias_init=jax.nn.initializers.zeros)
    q, k = inputs(1, 5, 8), inputs(1, 7, 8, seed=1)
    np.testing.assert_allclose(
        forward(layer, q, k), forward(layer, 100.0 * q, k), rtol=1e-3, atol=1e-4
    )
    assert layer.query_ln.scale.shape == layer.key_ln.scale.shape == (2,)


def test_gradients_are_those_of_differences() -> None:
    layer = made(num_kv_heads=2)
    attend = jax.jit(lambda x: layer(x, is_causal=True))
    check_grads(attend, (inputs(1, 3, 8),), order=1, modes=["rev"], rtol=2e-2)


@pytest.mark.parametrize("pieces", [(1, 1, 1, 1, 1), (3, 2)], ids=str)
@pytest.mark.parametrize(
    ("make", "options"),
    [(made, {}), (made, {"num_kv_heads": 1, "normalize_qk": True}), (with_rope, {})],
    ids=["plain", "grouped", "rope"],
)
def test_decoding_is_full_attention_piece_by_piece(
    make: Any, options: dict[str, Any], pieces: tuple[int, ...]
) -> None:
    layer = make(**options)
    x = inputs(2, 5, 8)
    whole = forward(layer, x, is_causal=True)
    layer.init_cache((2, 7, 8))
    start = 0
    for length in pieces:
        piece = forward(layer, x[:, start : start + length], decode=True)
        np.testing.assert_allclose(piece, whole[:, start : start + length], rtol=1e-4, atol=1e-5)
        start += length
    assert int(layer.cache_index[...]) == 5


def test_decoding_steps_are_traced_once() -> None:
    layer = made(decode=True)
    layer.init_cache((2, 7, 8))
    traces = []

    @nnx.jit
    def step(layer: nnx.MultiHeadAttention, x: jax.Array) -> jax.Array:
        traces.append(1)
        return layer(x)

    for _ in range(3):
        step(layer, inputs(2, 1, 8))
    assert len(traces) == 1


def test_a_mask_holds_while_decoding_too() -> None:
    layer = made()
    x = inputs(2, 3, 8)
    mask = jnp.arange(4) != 1
    expected = attention(layer, x, x, x, np.tri(3, dtype=bool) & np.asarray(mask[:3]))
    layer.init_cache((2, 4, 8))
    forward(layer, x[:, :2], decode=True)
    last = forward(layer, x[:, 2:], decode=True, mask=mask.reshape(1, 1, 1, 4))
    np.testing.assert_allclose(last, expected[:, 2:], rtol=1e-4, atol=1e-5)


def test_past_the_end_of_the_cache_comes_nan() -> None:
    layer = made(decode=True)
    layer.init_cache((1, 2, 8))
    finite = [bool(jnp.isfinite(layer(inputs(1, 1, 8))).all()) for _ in range(3)]
    assert finite == [True, True, False]


def test_the_cache_may_have_a_dtype_of_its_own() -> None:
    layer = made(decode=True)
    layer.init_cache((1, 2, 8), jnp.bfloat16)
    assert layer(inputs(1, 1, 8)).dtype == jnp.float32
    assert layer.cached_key.dtype == layer.cached_value.dtype == jnp.bfloat16


def test_a_view_decodes_with_a_cache_of_its_own() -> None:
    layer = made()
    decoder = nnx.view(layer, decode=True)
    decoder.set_view(deterministic=True, batch_size=2, max_length=7)
    assert decoder(inputs(2, 1, 8)).shape == (2, 1, 8)
    assert decoder.cached_key.shape == (2, 7, 4, 2)
    assert decoder.query.kernel is layer.query.kernel
    assert layer.cached_key is None
    with pytest.raises(TypeError, match="both batch_size and max_length, found 2 and None"):
        layer.set_view(batch_size=2)


def test_a_failed_step_leaves_the_cache() -> None:
    layer = made(decode=True)
    layer.init_cache((2, 3, 8))
    bad: list[tuple[tuple[int, ...], Any, str]] = [
        ((1, 1, 8), None, r"cache of shape \(2, 3, 4, 2\) .*found \(1, 1, 4, 2\)"),
        ((2, 4, 8), None, r"length up to 3, found \(2, 4, 4, 2\)"),
        ((2, 1, 8), jnp.ones((1, 2)), r"a mask that .*\(2, 4, 1, 3\), found shape \(1, 2\)"),
    ]
    for shape, mask, match in bad:
        with pytest.raises(ValueError, match=match):
            layer(jnp.ones(shape), mask=mask)
    with pytest.raises(ValueError, match="as many queries as keys, found 2 and 1"):
        layer(jnp.ones((2, 2, 8)), jnp.ones((2, 1, 8)))
    assert int(layer.cache_index[...]) == 0
    assert not layer.cached_key[...].any()


def test_decoding_without_a_cache_is_refused() -> None:
    with pytest.raises(ValueError, match=r"has none. Make one first.*layer\.init_cache\(shape\)"):
        made(decode=True)(inputs(2, 1, 8))
    with pytest.raises(ValueError, match=r"\(\.\.\., max_length, features\), found \(8,\)"):
        made().init_cache((8,))


def test_a_rotating_layer_counts_positions_while_it_decodes() -> None:
    layer = with_rope(decode=True)
    layer.init_cache((2, 7, 8))
    with pytest.raises(ValueError, match="Leave out input_positions"):
        layer(inputs(2, 1, 8), input_positions=jnp.zeros(1))


def test_positions_reach_the_attention_function() -> None:
    layer, x = with_rope(), inputs(2, 5, 8)
    later = layer(x, input_positions=jnp.arange(5) + 100)
    np.testing.assert_allclose(layer(x), later, rtol=1e-3, atol=1e-4)
    scrambled = layer(x, input_positions=jnp.array([0, 9, 3, 7, 1]))
    assert not np.allclose(layer(x), scrambled, atol=1e-3)


def test_a_layer_owns_what_its_attention_function_was_given() -> None:
    layer, x = with_rope(), inputs(2, 5, 8)
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(layer))]
    assert ("attention_fn", "keywords", "rope", "cached_sin") in paths
    copy = nnx.clone(layer)
    copy.attention_fn.keywords["rope"].cached_sin[...] *= 0.5
    np.testing.assert_allclose(layer(x), forward(layer, x), rtol=1e-4, atol=1e-5)
    assert not np.allclose(layer(x), copy(x), atol=1e-3)


def test_an_attention_function_of_the_user_gets_all_it_may_need() -> None:
    seen = {}

    def attend(query: Any, key: Any, value: Any, **options: Any) -> jax.Array:
        seen.update(options)
        return query * 2

    layer = made(attention_fn=attend, dtype=jnp.bfloat16, precision="highest")
    layer(inputs(2, 5, 8), is_causal=True)
    assert seen == {
        "mask": None,
        "dropout_rng": None,
        "dropout_rate": 0.0,
        "broadcast_dropout": True,
        "deterministic": True,
        "dtype": jnp.bfloat16,
        "precision": "highest",
        "module": None,
        "is_causal": True,
    }


def test_weights_are_sown_on_demand() -> None:
    layer = made(num_kv_heads=2)
    captured = nnx.capture(layer, nnx.Intermediate)
    y, sown = captured(inputs(2, 5, 8), sow_weights=True)
    (weights,) = sown["attention_weights"].get_value()
    np.testing.assert_allclose(weights.sum(-1), np.ones((2, 4, 5)), rtol=1e-5)
    np.testing.assert_allclose(y, layer(inputs(2, 5, 8)), rtol=1e-4, atol=1e-5)
    assert not nnx.to_flat_state(captured(inputs(2, 5, 8))[1])


@pytest.mark.parametrize("way", ["own", "call", "stream"])
def test_dropout_draws_from_a_stream(way: str) -> None:
    rngs = nnx.Rngs(params=0, dropout=1)
    layer = nnx.MultiHeadAttention(
        4, 8, dropout_rate=0.5, decode=False, keep_rngs=way == "own", deterministic=False, rngs=rngs
    )
    x = inputs(2, 5, 8)
    stream = jax.random.fold_in(jax.random.key(1), 0) if way == "own" else jax.random.key(3)
    brought = {"own": None, "call": nnx.Rngs(dropout=3), "stream": nnx.RngStream(3, tag="any")}
    y = layer(x, rngs=brought[way])
    expected = nnx.dot_product_attention(
        layer.query(x),
        layer.key(x),
        layer.value(x),
        dropout_rate=0.5,
        dropout_rng=jax.random.fold_in(stream, 0),
    )
    np.testing.assert_allclose(y, layer.out(expected), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(
        layer(x, deterministic=True), nnx.view(layer, deterministic=True)(x)
    )


def test_what_was_given_nowhere_is_an_error() -> None:
    x = inputs(2, 5, 8)
    with pytest.raises(ValueError, match="was told `decode` nowhere"):
        made(decode=None)(x)
    with pytest.raises(ValueError, match="was told `deterministic` nowhere"):
        made(dropout_rate=0.5)(x)
    with pytest.raises(ValueError, match=r"dropout_rate=0\.5 has no random stream"):
        made(dropout_rate=0.5, keep_rngs=False)(x, deterministic=False)
    with pytest.raises(TypeError, match=r"nnx\.Rngs or an nnx\.RngStream, found .*int"):
        made(dropout_rate=0.5)(x, deterministic=False, rngs=3)


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        ([(2, 5, 7)], r"inputs_q of shape \(\.\.\., length, 8\), found \(2, 5, 7\)"),
        ([(8,)], r"inputs_q of shape \(\.\.\., length, 8\), found \(8,\)"),
        ([(2, 5, 8), (2, 5, 7)], r"inputs_k of shape \(\.\.\., length, 8\), found \(2, 5, 7\)"),
        ([(2, 5, 8), (3, 5, 8)], r"same batch axes.*inputs_k \(3, 5, 8\)"),
        ([(2, 5, 8), (2, 5, 8), (2, 6, 8)], r"same length.*inputs_v \(2, 6, 8\)"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(shapes: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        made()(*(jnp.ones(shape) for shape in shapes))


def test_values_without_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="inputs_v without inputs_k"):
        made()(jnp.ones((2, 5, 8)), inputs_v=jnp.ones((2, 5, 8)))


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of num_heads, found 9 and 4"):
        made(qkv_features=9)
    with pytest.raises(ValueError, match="multiple of num_kv_heads, found 4 and 3"):
        made(num_kv_heads=3)

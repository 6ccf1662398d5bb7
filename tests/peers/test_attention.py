"""LinearGeneral, Einsum, attention, masks and RoPE give what those of flax.nnx give.

On purpose not the same: `RoPE` keeps the dtype of its input, takes positions of a batch and decodes
with the right ones; the logits of bfloat16 are float32 with weights sown or dropped, too.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as peer

import nnxlite as nnx

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

LIBRARIES = (nnx, peer)


def values(tree: Any) -> dict[tuple[Any, ...], np.ndarray]:
    """Values by path, of an object or State of either library; keys as their data."""
    ours = isinstance(tree, nnx.Pytree | nnx.State)
    library = nnx if ours else peer
    state = tree if isinstance(tree, library.State) else library.state(tree)
    found = {}
    for path, variable in library.to_flat_state(state):
        value = variable.get_value()
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        found[tuple(path)] = np.asarray(jax.random.key_data(value) if is_key else value)
    return found


def assert_same(ours: Any, theirs: Any, rtol: float = 0.0) -> None:
    ours, theirs = values(ours), values(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype, path
        np.testing.assert_allclose(value, theirs[path], rtol=rtol, atol=rtol, err_msg=str(path))


def assert_close(ours: jax.Array, theirs: jax.Array) -> None:
    assert ours.dtype == theirs.dtype
    tolerance = 2e-6 if ours.dtype == jnp.float32 else 2e-2
    ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
    np.testing.assert_allclose(ours, theirs, tolerance, tolerance)


def inputs(*shape: int, dtype: Any = np.float32, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(0.0, 1.0, shape)).astype(dtype)


Make = Callable[[Any], Any]

LINEAR: dict[str, tuple[Make, tuple[int, ...]]] = {
    "one axis": (lambda lib: lib.LinearGeneral(3, 4, rngs=lib.Rngs(0)), (5, 3)),
    "many out": (lambda lib: lib.LinearGeneral(3, (4, 2), rngs=lib.Rngs(0)), (2, 5, 3)),
    "two axes": (
        lambda lib: lib.LinearGeneral(
            (2, 3), (4, 5), axis=(-1, 1), bias_init=lib.initializers.normal(), rngs=lib.Rngs(1)
        ),
        (6, 2, 7, 3),
    ),
    "batch axes": (
        lambda lib: lib.LinearGeneral(
            3,
            (4, 2),
            axis=-2,
            batch_axis={0: 2},
            bias_init=lib.initializers.normal(),
            rngs=lib.Rngs(1),
        ),
        (2, 5, 3, 7),
    ),
    "no bias, bfloat16": (
        lambda lib: lib.LinearGeneral(
            3, 4, use_bias=False, dtype=jnp.bfloat16, precision="highest", rngs=lib.Rngs(0)
        ),
        (5, 3),
    ),
    "class of products": (
        lambda lib: lib.LinearGeneral(
            3, 4, dot_general_cls=lambda: jax.lax.dot_general, rngs=lib.Rngs(0)
        ),
        (5, 3),
    ),
    "Einsum": (
        lambda lib: lib.Einsum(
            "nta, hab -> nthb",
            (8, 2, 4),
            (8, 4),
            bias_init=lib.initializers.normal(),
            rngs=lib.Rngs(0),
        ),
        (3, 5, 2),
    ),
    "Einsum, any batch": (
        lambda lib: lib.Einsum(
            "...ta,ab->t...b",
            (2, 4),
            (4,),
            bias_init=lib.initializers.normal(),
            rngs=lib.Rngs(0),
        ),
        (3, 6, 5, 2),
    ),
    "Einsum, many heads": (
        lambda lib: lib.Einsum(
            "bna,n...a->b...n",
            (3, 2, 4),
            (2, 3),
            bias_init=lib.initializers.normal(),
            rngs=lib.Rngs(0),
        ),
        (5, 3, 4),
    ),
    "Einsum in bfloat16": (
        lambda lib: lib.Einsum(
            "ab,bc->ac", (3, 4), dtype=jnp.bfloat16, preferred_element_type="float32",
            rngs=lib.Rngs(0),
        ),
        (5, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINEAR)
def test_a_linear_layer_is_that_of_flax(name: str) -> None:
    make, shape = LINEAR[name]
    ours, theirs = (make(lib) for lib in LIBRARIES)
    assert_same(ours, theirs)
    x = inputs(*shape)
    assert_close(ours(x), theirs(x))


ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "sizes": {"qkv_features": 16, "out_features": 6, "use_bias": False},
    "grouped": {"num_kv_heads": 2},
    "one key head": {"num_kv_heads": 1, "normalize_qk": True},
    "normalized": {"normalize_qk": True, "out_bias_init": jax.nn.initializers.normal()},
    "bfloat16": {"dtype": jnp.bfloat16},
    "bfloat16 parameters": {"param_dtype": jnp.bfloat16, "normalize_qk": True},
    "precision": {"precision": "highest"},
    "dropout": {"dropout_rate": 0.5, "deterministic": False},
    "dropout by element": {
        "dropout_rate": 0.3, "deterministic": False, "broadcast_dropout": False,
        "num_kv_heads": 2,
    },
    "dropout, quiet": {"dropout_rate": 0.5, "deterministic": True},
}  # fmt: skip


def layers(**options: Any) -> tuple[Any, Any]:
    return tuple(
        lib.MultiHeadAttention(4, 8, decode=False, **options, rngs=lib.Rngs(0)) for lib in LIBRARIES
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ATTENTION)
def test_self_attention_is_that_of_flax(name: str, dtype: str) -> None:
    ours, theirs = layers(**ATTENTION[name])
    assert_same(ours, theirs)
    x = inputs(2, 5, 8, dtype=dtype)
    mask = nnx.make_causal_mask(x[..., 0])
    assert_close(ours(x, mask=mask), theirs(x, mask=mask))
    assert_close(ours(x, is_causal=True), theirs(x, is_causal=True))
    assert_same(ours, theirs)


def test_cross_attention_is_that_of_flax() -> None:
    ours, theirs = layers(in_kv_features=6)
    assert_same(ours, theirs)
    q, k, v = inputs(2, 5, 8), inputs(2, 7, 6, seed=1), inputs(2, 7, 6, seed=2)
    assert_close(ours(q, k), theirs(q, k))
    assert_close(ours(q, k, v), theirs(q, k, v))


@pytest.mark.parametrize("name", ["plain", "grouped", "normalized"])
def test_gradients_are_those_of_flax(name: str) -> None:
    both = layers(**ATTENTION[name])
    x = inputs(2, 5, 8)
    ours, theirs = (
        lib.grad(lambda layer: (layer(x, is_causal=True) ** 2).sum())(layer)
        for lib, layer in zip(LIBRARIES, both, strict=True)
    )
    assert_same(ours, theirs, rtol=2e-5)


@pytest.mark.parametrize("options", [{}, {"num_kv_heads": 2}, {"dtype": jnp.bfloat16}])
def test_decoding_is_that_of_flax(options: dict[str, Any]) -> None:
    both = layers(**options)
    x = inputs(2, 3, 8)
    for layer in both:
        layer.init_cache((2, 4, 8), options.get("dtype", jnp.float32))
    for n in range(3):
        ours, theirs = (layer(x[:, n : n + 1], decode=True) for layer in both)
        assert_close(ours, theirs)
        assert_same(*both, rtol=1e-6 if not options.get("dtype") else 2e-2)


def test_sown_weights_are_those_of_flax() -> None:
    ours, theirs = layers(num_kv_heads=2)
    x = inputs(2, 5, 8)
    _, sown = nnx.capture(ours, nnx.Intermediate)(x, sow_weights=True)
    theirs(x, sow_weights=True)
    (weights,) = sown["attention_weights"].get_value()
    (expected,) = theirs.attention_weights.get_value()
    assert_close(weights, expected)


GRID = [
    {},
    {"mask": 1},
    {"bias": 1},
    {"is_causal": True},
    {"mask": 1, "bias": 1, "is_causal": True},
    {"deterministic": True, "dropout_rate": 0.5},
    {"dropout_rate": 0.25, "mask": 1},
    {"dtype": jnp.bfloat16},
]


@pytest.mark.parametrize("shape", [(5, 4, 8), (2, 5, 4, 8), (2, 3, 5, 4, 8)], ids=str)
@pytest.mark.parametrize("options", GRID, ids=str)
def test_dot_product_attention_is_that_of_flax(
    options: dict[str, Any], shape: tuple[int, ...]
) -> None:
    options = dict(options)
    weights = (*shape[:-3], 4, 5, 5)
    if "mask" in options:
        options["mask"] = inputs(*weights, seed=4) > -0.5
    if "bias" in options:
        options["bias"] = inputs(*weights, seed=3)
    if options.get("dropout_rate"):
        options["dropout_rng"] = jax.random.key(1)
    q, k, v = (inputs(*shape, seed=n) for n in range(3))
    ours, theirs = (lib.dot_product_attention(q, k, v, **options) for lib in LIBRARIES)
    assert_close(ours, theirs)


def test_masks_are_those_of_flax() -> None:
    q, k = jnp.array([[1, 1, 0], [1, 0, 0]]), jnp.array([[1, 0], [1, 1]])
    for make in (
        lambda lib: lib.make_attention_mask(q, k),
        lambda lib: lib.make_attention_mask(q, k, jnp.greater, 2, bool),
        lambda lib: lib.make_attention_mask(q[0], k),
        lambda lib: lib.make_causal_mask(q),
        lambda lib: lib.make_causal_mask(q, 1, jnp.int32),
        lambda lib: lib.combine_masks(
            lib.make_causal_mask(q), None, lib.make_attention_mask(q, q), dtype=bool
        ),
    ):
        with jax.numpy_rank_promotion("allow"):
            ours, theirs = (make(lib) for lib in LIBRARIES)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)
    assert nnx.combine_masks(None) is peer.combine_masks(None) is None


has_rope = pytest.mark.skipif(not hasattr(peer, "RoPE"), reason=f"flax {flax.__version__}")


@has_rope
@pytest.mark.parametrize("sizes", [{}, {"embedding_size": 8, "max_seq_len": 9}])
def test_rope_is_that_of_flax(sizes: dict[str, int]) -> None:
    ours, theirs = (lib.RoPE(theta=100.0, **sizes) for lib in LIBRARIES)
    assert_same(ours, theirs, rtol=1e-6)
    x = inputs(2, 3, 5, 8)
    assert_close(ours(x), theirs(x))
    positions = jnp.array([3, 1, 4, 1, 5])
    assert_close(ours(x, positions), theirs(x, positions))
    ours, theirs = (
        lib.MultiHeadAttention(
            2, 16, decode=False, rngs=lib.Rngs(0),
            attention_fn=functools.partial(lib.dot_product_attention_with_rope, rope=rope),
        )
        for lib, rope in zip(LIBRARIES, (ours, theirs), strict=True)
    )  # fmt: skip
    assert_close(ours(inputs(2, 5, 16)), theirs(inputs(2, 5, 16)))


SIGNATURES = [
    ("LinearGeneral", "__init__"), ("LinearGeneral", "__call__"), ("Einsum", "__init__"),
    ("Einsum", "__call__"), ("MultiHeadAttention", "__init__"), ("MultiHeadAttention", "__call__"),
    ("MultiHeadAttention", "init_cache"), ("MultiHeadAttention", "set_view"),
    ("RoPE", "__init__"), ("RoPE", "__call__"), ("make_attention_mask", ""),
    ("make_causal_mask", ""), ("combine_masks", ""), ("dot_product_attention", ""),
]  # fmt: skip


@pytest.mark.parametrize(("name", "method"), SIGNATURES)
def test_arguments_are_those_of_flax(name: str, method: str) -> None:
    if not hasattr(peer, name):
        pytest.skip(f"flax {flax.__version__} has no {name}")
    found = [getattr(lib, name) for lib in LIBRARIES]
    ours, theirs = (
        list(inspect.signature(inspect.unwrap(getattr(f, method) if method else f)).parameters)
        for f in found
    )
    added = {"implementation"} if hasattr(peer, "RoPE") else {"implementation", "input_positions"}
    assert [p for p in ours if p in theirs or p not in added] == theirs

"""Layers have the parameters, outputs and gradients of flax.nnx for the same seeds."""

import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as peer

import nnxlite as nnx
from nnxlite.nn import activations, dtypes, initializers, statistics

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
        # flax.nnx has tuples among the keys of a path, where nnxlite has dicts in dicts.
        flat = tuple(k for key in path for k in (key if isinstance(key, tuple) else (key,)))
        found[flat] = np.asarray(jax.random.key_data(value) if is_key else value)
    return found


def assert_same(ours: Any, theirs: Any, rtol: float = 0.0) -> None:
    ours, theirs = values(ours), values(theirs)
    assert ours.keys() == theirs.keys()
    for path, value in ours.items():
        assert value.dtype == theirs[path].dtype, path
        np.testing.assert_allclose(value, theirs[path], rtol=rtol, atol=rtol, err_msg=str(path))


def inputs(*shape: int, dtype: Any = np.float32) -> jax.Array:
    drawn = np.random.default_rng(0).normal(1.0, 2.0, shape)
    # As indices too, integers mean the same everywhere: of these none is negative.
    return jnp.asarray(np.abs(drawn) if np.issubdtype(dtype, np.integer) else drawn).astype(dtype)


LAYERS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...], Any]] = {
    "Linear": (lambda lib: lib.Linear(3, 4, rngs=lib.Rngs(0)), (5, 3), np.float32),
    "Linear of a batch of batches": (
        lambda lib: lib.Linear(3, 4, rngs=lib.Rngs(params=1)),
        (2, 5, 3),
        np.float32,
    ),
    "Linear of a vector": (lambda lib: lib.Linear(3, 4, rngs=lib.Rngs(0)), (3,), np.float32),
    "Linear without bias": (
        lambda lib: lib.Linear(3, 4, use_bias=False, rngs=lib.Rngs(0)),
        (5, 3),
        np.float32,
    ),
    "Linear of integers": (lambda lib: lib.Linear(3, 4, rngs=lib.Rngs(0)), (5, 3), np.int32),
    "Linear in bfloat16": (
        lambda lib: lib.Linear(
            3, 4, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, rngs=lib.Rngs(0)
        ),
        (5, 3),
        np.float32,
    ),
    "Linear with initializers": (
        lambda lib: lib.Linear(
            3,
            4,
            kernel_init=lib.initializers.he_normal(),
            bias_init=lib.initializers.normal(0.1),
            precision="highest",
            rngs=lib.Rngs(0, params=7),
        ),
        (5, 3),
        np.float32,
    ),
    "BatchNorm": (lambda lib: lib.BatchNorm(3, rngs=lib.Rngs(0)), (8, 3), np.float32),
    "BatchNorm along another axis": (
        lambda lib: lib.BatchNorm(3, axis=1, momentum=0.5, epsilon=0.1, rngs=lib.Rngs(0)),
        (4, 3, 5),
        np.float32,
    ),
    "BatchNorm, slow variance": (
        lambda lib: lib.BatchNorm(3, use_fast_variance=False, rngs=lib.Rngs(0)),
        (8, 3),
        np.float32,
    ),
    "BatchNorm without parameters": (
        lambda lib: lib.BatchNorm(3, use_scale=False, use_bias=False, rngs=lib.Rngs(0)),
        (8, 3),
        np.float32,
    ),
    "BatchNorm of float16": (lambda lib: lib.BatchNorm(3, rngs=lib.Rngs(0)), (8, 3), np.float16),
    "BatchNorm in bfloat16": (
        lambda lib: lib.BatchNorm(3, dtype=jnp.bfloat16, rngs=lib.Rngs(0)),
        (8, 3),
        np.float32,
    ),
    "BatchNorm, running": (
        lambda lib: lib.BatchNorm(3, use_running_average=True, rngs=lib.Rngs(0)),
        (8, 3),
        np.float32,
    ),
    "BatchNorm with initializers": (
        lambda lib: lib.BatchNorm(
            3,
            scale_init=lib.initializers.normal(),
            bias_init=lib.initializers.normal(),
            rngs=lib.Rngs(3),
        ),
        (8, 3),
        np.float32,
    ),
    "Conv of sequences": (lambda lib: lib.Conv(3, 4, 3, rngs=lib.Rngs(0)), (2, 7, 3), np.float32),
    "Conv": (lambda lib: lib.Conv(3, 4, (3, 3), rngs=lib.Rngs(0)), (2, 7, 6, 3), np.float32),
    "Conv of volumes": (
        lambda lib: lib.Conv(3, 4, (2, 3, 2), (1, 2, 1), rngs=lib.Rngs(0)),
        (2, 5, 6, 4, 3),
        np.float32,
    ),
    "Conv of one image": (
        lambda lib: lib.Conv(3, 4, (3, 3), 2, rngs=lib.Rngs(0)),
        (7, 6, 3),
        np.float32,
    ),
    "Conv of batches of batches": (
        lambda lib: lib.Conv(3, 4, (3, 3), padding="VALID", rngs=lib.Rngs(0)),
        (2, 3, 7, 6, 3),
        np.float32,
    ),
    "Conv in groups": (
        lambda lib: lib.Conv(4, 6, (3,), feature_group_count=2, use_bias=False, rngs=lib.Rngs(0)),
        (2, 7, 4),
        np.float32,
    ),
    "Conv, dilated": (
        lambda lib: lib.Conv(
            3, 4, (3, 2), padding=1, kernel_dilation=2, input_dilation=(1, 2), rngs=lib.Rngs(0)
        ),
        (2, 7, 6, 3),
        np.float32,
    ),
    "Conv, circular": (
        lambda lib: lib.Conv(3, 4, (3, 4), padding="CIRCULAR", rngs=lib.Rngs(0)),
        (2, 7, 6, 3),
        np.float32,
    ),
    "Conv, circular and dilated": (
        lambda lib: lib.Conv(3, 4, (4, 3), padding="CIRCULAR", kernel_dilation=2, rngs=lib.Rngs(0)),
        (2, 9, 8, 3),
        np.float32,
    ),
    "Conv, reflected": (
        lambda lib: lib.Conv(3, 4, (3, 4), padding="REFLECT", rngs=lib.Rngs(0)),
        (2, 7, 6, 3),
        np.float32,
    ),
    "Conv, causal": (
        lambda lib: lib.Conv(3, 4, 4, padding="CAUSAL", kernel_dilation=2, rngs=lib.Rngs(0)),
        (2, 9, 3),
        np.float32,
    ),
    "Conv, padded": (
        lambda lib: lib.Conv(3, 4, (3, 3), padding=[1, (0, 2)], rngs=lib.Rngs(0)),
        (2, 7, 6, 3),
        np.float32,
    ),
    "Conv in bfloat16": (
        lambda lib: lib.Conv(3, 4, (3,), dtype=jnp.bfloat16, rngs=lib.Rngs(0)),
        (2, 7, 3),
        np.float32,
    ),
    "Conv of integers": (lambda lib: lib.Conv(3, 4, (3,), rngs=lib.Rngs(0)), (2, 7, 3), np.int32),
    "LayerNorm": (lambda lib: lib.LayerNorm(3, rngs=lib.Rngs(0)), (8, 3), np.float32),
    "LayerNorm, slow variance": (
        lambda lib: lib.LayerNorm(3, use_fast_variance=False, epsilon=0.1, rngs=lib.Rngs(0)),
        (8, 3),
        np.float32,
    ),
    "LayerNorm without parameters": (
        lambda lib: lib.LayerNorm(3, use_scale=False, use_bias=False, rngs=lib.Rngs(0)),
        (2, 5, 3),
        np.float32,
    ),
    "LayerNorm over several axes": (
        lambda lib: lib.LayerNorm(
            15,
            reduction_axes=(-2, -1),
            feature_axes=(-2, -1),
            scale_init=lib.initializers.normal(),
            bias_init=lib.initializers.normal(),
            rngs=lib.Rngs(3),
        ),
        (2, 5, 3),
        np.float32,
    ),
    "LayerNorm of float16": (lambda lib: lib.LayerNorm(3, rngs=lib.Rngs(0)), (8, 3), np.float16),
    "LayerNorm in bfloat16": (
        lambda lib: lib.LayerNorm(3, dtype=jnp.bfloat16, rngs=lib.Rngs(0)),
        (8, 3),
        np.float32,
    ),
    "RMSNorm over several axes": (
        lambda lib: lib.RMSNorm(
            15,
            reduction_axes=(1, 2),
            feature_axes=(1, 2),
            scale_init=lib.initializers.normal(),
            rngs=lib.Rngs(3),
        ),
        (2, 5, 3),
        np.float32,
    ),
    "GroupNorm of vectors": (
        lambda lib: lib.GroupNorm(6, None, 2, rngs=lib.Rngs(0)),
        (8, 6),
        np.float32,
    ),
    "GroupNorm over chosen axes": (
        lambda lib: lib.GroupNorm(6, 3, reduction_axes=(1, 2, -1), epsilon=0.1, rngs=lib.Rngs(0)),
        (2, 4, 3, 6),
        np.float32,
    ),
    "InstanceNorm along other axes": (
        lambda lib: lib.InstanceNorm(
            15,
            feature_axes=(1, -1),
            scale_init=lib.initializers.normal(),
            bias_init=lib.initializers.normal(),
            rngs=lib.Rngs(3),
        ),
        (2, 5, 4, 3),
        np.float32,
    ),
    "InstanceNorm of integers": (
        lambda lib: lib.InstanceNorm(3, rngs=lib.Rngs(0)),
        (2, 5, 3),
        np.int32,
    ),
    "Conv, same and lower": (
        lambda lib: lib.Conv(3, 4, 4, 2, padding="SAME_LOWER", rngs=lib.Rngs(0)),
        (2, 7, 3),
        np.float32,
    ),
    "ConvTranspose of volumes": (
        lambda lib: lib.ConvTranspose(3, 4, (2, 3, 2), (1, 2, 1), rngs=lib.Rngs(0)),
        (2, 3, 4, 2, 3),
        np.float32,
    ),
    "ConvTranspose of one image": (
        lambda lib: lib.ConvTranspose(3, 4, (3, 3), 2, padding="VALID", rngs=lib.Rngs(0)),
        (5, 4, 3),
        np.float32,
    ),
    "ConvTranspose, dilated and padded": (
        lambda lib: lib.ConvTranspose(
            3, 4, (3, 2), 2, padding=[1, (0, 2)], kernel_dilation=2, rngs=lib.Rngs(0)
        ),
        (2, 5, 4, 3),
        np.float32,
    ),
    "ConvTranspose, circular": (
        lambda lib: lib.ConvTranspose(
            3, 4, (4, 3), (1, 2), padding="CIRCULAR", kernel_dilation=(2, 1), rngs=lib.Rngs(0)
        ),
        (2, 3, 5, 4, 3),
        np.float32,
    ),
    "ConvTranspose, circular and transposed": (
        lambda lib: lib.ConvTranspose(
            3, 4, (4, 3), (1, 2), padding="CIRCULAR", transpose_kernel=True, rngs=lib.Rngs(0)
        ),
        (2, 5, 4, 3),
        np.float32,
    ),
    "ConvTranspose, circular with a window of several rounds": (
        lambda lib: lib.ConvTranspose(3, 4, 8, 1, padding="CIRCULAR", rngs=lib.Rngs(0)),
        (2, 3, 3),
        np.float32,
    ),
    "ConvTranspose in bfloat16": (
        lambda lib: lib.ConvTranspose(
            3, 4, 3, 2, dtype=jnp.bfloat16, use_bias=False, rngs=lib.Rngs(0)
        ),
        (2, 5, 3),
        np.float32,
    ),
    "Embed": (lambda lib: lib.Embed(9, 4, rngs=lib.Rngs(0)), (5, 3), np.uint8),
    "Embed of one": (lambda lib: lib.Embed(1, 4, rngs=lib.Rngs(0)), (5,), np.int32),
    "Embed in bfloat16": (
        lambda lib: lib.Embed(9, 4, dtype=jnp.bfloat16, rngs=lib.Rngs(0)),
        (5, 3),
        np.int32,
    ),
    "Dropout": (lambda lib: lib.Dropout(0.3, rngs=lib.Rngs(0)), (5, 3), np.float32),
    "Dropout with shared axes": (
        lambda lib: lib.Dropout(0.3, broadcast_dims=(0,), rngs=lib.Rngs(dropout=1)),
        (5, 3),
        np.float32,
    ),
    "Dropout of a stream": (
        lambda lib: lib.Dropout(0.3, rngs=lib.Rngs(0).noise),
        (5, 3),
        np.float32,
    ),
    "Dropout, all": (lambda lib: lib.Dropout(1.0, rngs=lib.Rngs(0)), (5, 3), np.float32),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_that_of_flax(name: str) -> None:
    make, shape, dtype = LAYERS[name]
    ours, theirs = (make(lib) for lib in LIBRARIES)
    assert_same(ours, theirs)
    x = inputs(*shape, dtype=dtype)
    for _ in range(2):
        y, expected = ours(x), theirs(x)
        assert y.dtype == expected.dtype
        tolerance = 1e-6 if y.dtype == jnp.float32 else 1e-2
        np.testing.assert_allclose(
            np.asarray(y, np.float32), np.asarray(expected, np.float32), tolerance, tolerance
        )
    assert_same(ours, theirs, rtol=1e-6)


@pytest.mark.parametrize(
    "name",
    [
        "Linear",
        "BatchNorm",
        "BatchNorm, running",
        "Conv",
        "Conv, circular",
        "ConvTranspose, circular",
        "GroupNorm of vectors",
        "InstanceNorm along other axes",
        "LayerNorm",
        "RMSNorm over several axes",
    ],
)
def test_gradients_are_those_of_flax(name: str) -> None:
    make, shape, dtype = LAYERS[name]
    x = inputs(*shape, dtype=dtype)
    layers = [make(lib) for lib in LIBRARIES]
    ours, theirs = (
        lib.grad(lambda layer: (layer(x) ** 2 * x.sum()).mean())(layer)
        for lib, layer in zip(LIBRARIES, layers, strict=True)
    )
    assert_same(ours, theirs, rtol=1e-4)
    assert_same(*layers, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"use_scale": False}, {"use_fast_variance": False}])
@pytest.mark.parametrize("dtypes", ["float32 None", "bfloat16 None", "float32 bfloat16"])
@pytest.mark.parametrize("name", ["RMSNorm", "GroupNorm", "InstanceNorm"])
def test_a_norm_is_that_of_flax(name: str, dtypes: str, options: dict[str, Any]) -> None:
    dtype_in, dtype = dtypes.split()
    args = (6, 3) if name == "GroupNorm" else (6,)
    x = inputs(2, 4, 6, dtype=dtype_in)
    mask = jnp.broadcast_to(jnp.arange(4)[:, None] % 3 < 2, x.shape)
    ours, theirs = (
        getattr(lib, name)(
            *args, dtype=None if dtype == "None" else dtype, **options, rngs=lib.Rngs(0)
        )
        for lib in LIBRARIES
    )
    assert_same(ours, theirs)
    for marked in ({}, {"mask": mask}):
        y, expected = ours(x, **marked), theirs(x, **marked)
        assert y.dtype == expected.dtype
        tolerance = 1e-5 if y.dtype == jnp.float32 else 2e-2
        np.testing.assert_allclose(
            np.asarray(y, np.float32), np.asarray(expected, np.float32), tolerance, tolerance
        )


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "SpectralNorm": lambda lib: lib.SpectralNorm(
        lib.Linear(3, 4, rngs=lib.Rngs(0)), rngs=lib.Rngs(1)
    ),
    "SpectralNorm of several layers": lambda lib: lib.SpectralNorm(
        lib.Sequential(lib.Linear(3, 4, rngs=lib.Rngs(0)), lib.Linear(4, 2, rngs=lib.Rngs(1))),
        n_steps=2,
        rngs=lib.Rngs(2),
    ),
    "SpectralNorm of a bfloat16 kernel": lambda lib: lib.SpectralNorm(
        lib.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=lib.Rngs(0)), rngs=lib.Rngs(1)
    ),
    "WeightNorm": lambda lib: lib.WeightNorm(lib.Linear(3, 4, rngs=lib.Rngs(0)), rngs=lib.Rngs(1)),
    "WeightNorm of several layers, without scale": lambda lib: lib.WeightNorm(
        lib.Sequential(lib.Linear(3, 4, rngs=lib.Rngs(0)), lib.Linear(4, 2, rngs=lib.Rngs(1))),
        use_scale=False,
        rngs=lib.Rngs(2),
    ),
    "WeightNorm along another axis": lambda lib: lib.WeightNorm(
        lib.Linear(3, 4, rngs=lib.Rngs(0)),
        feature_axes=0,
        scale_init=lib.initializers.constant(2.0),
        rngs=lib.Rngs(1),
    ),
    "WeightNorm of a bfloat16 kernel": lambda lib: lib.WeightNorm(
        lib.Linear(3, 4, param_dtype=jnp.bfloat16, rngs=lib.Rngs(0)), rngs=lib.Rngs(1)
    ),
}


@pytest.mark.filterwarnings("ignore:scatter inputs:FutureWarning")  # flax casts in a write
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_layer_with_normalized_weights_is_that_of_flax(name: str) -> None:
    """Parameters at first, outputs and estimates; flax then overwrites the weights themselves."""
    ours, theirs = (WRAPPERS[name](lib) for lib in LIBRARIES)
    assert_same(ours, theirs)
    before = values(ours)
    x = inputs(5, 3)
    tolerance = 2e-2 if "bfloat16" in name else 1e-4
    for _ in range(3):
        y, expected = ours(x), theirs(x)
        assert y.dtype == expected.dtype
        np.testing.assert_allclose(y, expected, tolerance, tolerance)
    after, peers = values(ours), values(theirs)
    for path, value in after.items():
        if path[-1] == "u":
            np.testing.assert_allclose(value, peers[path], tolerance, tolerance)
        elif path[-1] == "kernel":
            np.testing.assert_array_equal(value, before[path])


@pytest.mark.parametrize("name", ["SpectralNorm", "WeightNorm"])
def test_gradients_through_normalized_weights_are_those_of_flax(name: str) -> None:
    x = inputs(5, 3)
    ours, theirs = (
        lib.grad(lambda layer: (layer(x) ** 2).mean())(WRAPPERS[name](lib)) for lib in LIBRARIES
    )
    assert_same(ours, theirs, rtol=1e-4)


@pytest.mark.parametrize(
    "name",
    [
        "BatchNorm",
        "Conv",
        "ConvTranspose",
        "Dropout",
        "Embed",
        "GroupNorm",
        "InstanceNorm",
        "LayerNorm",
        "Linear",
        "RMSNorm",
        "SpectralNorm",
        "WeightNorm",
    ],
)
def test_constructor_and_call_take_what_those_of_flax_take(name: str) -> None:
    for function in ("__init__", "__call__"):
        ours, theirs = (
            inspect.signature(inspect.unwrap(getattr(getattr(lib, name), function))).parameters
            for lib in LIBRARIES
        )
        assert list(ours) == list(theirs)
        assert [p.kind for p in ours.values()] == [p.kind for p in theirs.values()]
        for parameter in ours:
            default = theirs[parameter].default
            if isinstance(default, int | float | str | tuple | None):
                assert ours[parameter].default == default, parameter


def test_a_mask_is_used_as_in_flax() -> None:
    x = inputs(8, 3)
    mask = jnp.arange(8)[:, None] < 5
    ours, theirs = (lib.BatchNorm(3, rngs=lib.Rngs(0)) for lib in LIBRARIES)
    np.testing.assert_allclose(ours(x, mask=mask), theirs(x, mask=mask), 1e-5, 1e-5)
    assert_same(ours, theirs, rtol=1e-6)


def test_layer_norm_of_a_mask_is_that_of_flax() -> None:
    x = inputs(8, 3)
    mask = jnp.arange(24).reshape(8, 3) % 5 < 3
    ours, theirs = (lib.LayerNorm(3, rngs=lib.Rngs(0))(x, mask=mask) for lib in LIBRARIES)
    np.testing.assert_allclose(ours, theirs, 1e-5, 1e-5)


@pytest.mark.parametrize("dtype", [bool, np.float32, np.int32])
@pytest.mark.parametrize("name", ["Conv", "ConvTranspose"])
def test_a_masked_kernel_is_that_of_flax(name: str, dtype: Any) -> None:
    mask = jnp.tril(jnp.ones((3, 3, 4), dtype))
    ours, theirs = (getattr(lib, name)(3, 4, 3, mask=mask, rngs=lib.Rngs(0)) for lib in LIBRARIES)
    x = inputs(2, 7, 3)
    assert ours(x).dtype == theirs(x).dtype
    np.testing.assert_allclose(ours(x), theirs(x), 1e-5, 1e-5)


def test_attend_is_that_of_flax() -> None:
    ours, theirs = (lib.Embed(9, 4, rngs=lib.Rngs(0)).attend(inputs(5, 4)) for lib in LIBRARIES)
    np.testing.assert_allclose(ours, theirs, 1e-6, 1e-6)


@pytest.mark.parametrize("name", ["avg_pool", "max_pool", "min_pool"])
@pytest.mark.parametrize(
    ("shape", "window", "options"),
    [
        ((2, 7, 6, 3), (2, 3), {}),
        ((7, 6, 3), (2, 3), {"strides": (2, 1)}),
        ((2, 4, 7, 6, 3), (2, 3), {"padding": "SAME"}),
        ((2, 9, 3), (4,), {"padding": ((1, 2),), "strides": (3,)}),
    ],
)
def test_pooling_is_that_of_flax(name: str, shape: Any, window: Any, options: Any) -> None:
    ours, theirs = (getattr(lib, name)(inputs(*shape), window, **options) for lib in LIBRARIES)
    np.testing.assert_allclose(ours, theirs, 1e-6, 1e-6)
    assert ours.dtype == theirs.dtype
    if name == "avg_pool":
        options = {**options, "count_include_pad": False}
        ours, theirs = (lib.avg_pool(inputs(*shape), window, **options) for lib in LIBRARIES)
        np.testing.assert_allclose(ours, theirs, 1e-6, 1e-6)


def test_general_pooling_is_that_of_flax() -> None:
    args = (inputs(2, 7, 6, 3), 1.0, jax.lax.mul, (2, 3), (1, 2), ((0, 1), (1, 1)))
    ours, theirs = (lib.pool(*args) for lib in LIBRARIES)
    np.testing.assert_allclose(ours, theirs, 1e-6, 1e-6)


def test_modules_of_flax_have_their_names_here() -> None:
    for module in ("linear", "normalization"):
        theirs = vars(getattr(peer.nn, module)).values()
        layers = {x.__name__ for x in theirs if isinstance(x, type) and issubclass(x, peer.Module)}
        missing = (
            layers - set(getattr(nnx.nn, module).__all__) - {"Module", "LinearGeneral", "Einsum"}
        )
        assert not missing, module
    assert {"canonicalize_padding", "default_embed_init"} < set(nnx.nn.linear.__all__)


@pytest.mark.parametrize("options", [{}, {"use_mean": False}, {"use_fast_variance": False}])
def test_statistics_are_those_of_flax(options: dict[str, Any]) -> None:
    x = inputs(4, 5, 3, dtype=np.complex64) * (1 + 2j)
    ours = statistics.compute_stats(x, (0, -2), None, **options)
    theirs = peer.nn.normalization._compute_stats(x, (0, -2), None, **options)
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, 1e-5, 1e-5)


@pytest.mark.parametrize("name", activations.__all__)
def test_activations_are_those_of_flax(name: str) -> None:
    args = (jnp.array([0, 1]), 3) if name == "one_hot" else (inputs(2, 4),)
    np.testing.assert_array_equal(getattr(nnx, name)(*args), getattr(peer, name)(*args))


def test_no_activation_or_initializer_of_flax_is_missing() -> None:
    assert set(peer.nn.activations.__all__) - set(activations.__all__) == {"PReLU"}
    theirs = {n for n, v in vars(peer.initializers).items() if n[0] != "_" and callable(v)}
    assert theirs - set(initializers.__all__) <= {"DtypeLikeInexact", "Initializer"}


@pytest.mark.parametrize(
    "dtypes_of_args", [("float32",), ("bfloat16", "float32"), ("int32", "float16"), ("int8",)]
)
def test_dtypes_promote_as_in_flax(dtypes_of_args: tuple[str, ...]) -> None:
    args = tuple(jnp.ones(2, dtype) for dtype in dtypes_of_args)
    ours, theirs = dtypes.promote_dtype(args), peer.nn.dtypes.promote_dtype(args)
    assert [x.dtype for x in ours] == [x.dtype for x in theirs]

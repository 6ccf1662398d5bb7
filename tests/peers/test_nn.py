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
from nnxlite.nn import activations, dtypes, initializers, normalization

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


def inputs(*shape: int, dtype: Any = np.float32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(0).normal(1.0, 2.0, shape)).astype(dtype)


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


@pytest.mark.parametrize("name", ["Linear", "BatchNorm", "BatchNorm, running"])
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


@pytest.mark.parametrize("name", ["BatchNorm", "Dropout", "Linear"])
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


@pytest.mark.parametrize("options", [{}, {"use_mean": False}, {"use_fast_variance": False}])
def test_statistics_are_those_of_flax(options: dict[str, Any]) -> None:
    x = inputs(4, 5, 3, dtype=np.complex64) * (1 + 2j)
    ours = normalization._compute_stats(x, (0, -2), None, **options)
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

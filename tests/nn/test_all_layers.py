"""What every layer does alike: views, scopes, transforms and captures.

`LAYERS` has a line for each layer: how to make it, and the shape of its input. To have another
layer checked, add its line; the class of a layer is the first word of the name of the line.
"""

import inspect
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import treescope

import nnxlite as nnx

Make = Callable[[nnx.Rngs], Any]

LAYERS: dict[str, tuple[Make, tuple[int, ...]]] = {
    "BatchNorm": (lambda rngs: nnx.BatchNorm(4, rngs=rngs), (2, 4)),
    "Conv": (lambda rngs: nnx.Conv(4, 3, 2, rngs=rngs), (2, 5, 4)),
    "ConvTranspose": (lambda rngs: nnx.ConvTranspose(4, 3, 2, 2, rngs=rngs), (2, 5, 4)),
    "Dropout": (lambda rngs: nnx.Dropout(0.5, rngs=rngs), (2, 4)),
    "Embed": (lambda rngs: nnx.Embed(3, 4, rngs=rngs), (2, 4)),
    "GroupNorm": (lambda rngs: nnx.GroupNorm(4, 2, rngs=rngs), (2, 5, 4)),
    "InstanceNorm": (lambda rngs: nnx.InstanceNorm(4, rngs=rngs), (2, 5, 4)),
    "LayerNorm": (lambda rngs: nnx.LayerNorm(4, rngs=rngs), (2, 4)),
    "Linear": (lambda rngs: nnx.Linear(4, 3, rngs=rngs), (2, 4)),
    "RMSNorm": (lambda rngs: nnx.RMSNorm(4, rngs=rngs), (2, 4)),
    "SpectralNorm": (
        lambda rngs: nnx.SpectralNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs),
        (2, 4),
    ),
    "WeightNorm": (lambda rngs: nnx.WeightNorm(nnx.Linear(4, 3, rngs=rngs), rngs=rngs), (2, 4)),
}
INTEGERS = {"Embed"}  # what takes integers, as many as 3
NEEDS_NO_RNGS = {"Dropout"}

all_layers = pytest.mark.parametrize("name", LAYERS)


class Net(nnx.Module):
    def __init__(self, layer: Any) -> None:
        self.inner = layer

    def __call__(self, x: jax.Array) -> Any:
        return self.inner(x)


def made(name: str) -> tuple[Net, jax.Array]:
    make, shape = LAYERS[name]
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    if name in INTEGERS:
        x = np.abs(x * 9).astype(np.int32) % 3
    return Net(make(nnx.Rngs(0))), jnp.asarray(x)


def loss(net: Net, x: jax.Array) -> jax.Array:
    return sum((y**2).sum() for y in jax.tree.leaves(net(x)))


def assert_close(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@all_layers
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of NumPy, about what treescope reads
def test_text_and_treescope_name_the_layer_and_its_parameters(name: str) -> None:
    net, _ = made(name)
    assert type(net.inner).__name__ == name.split(",")[0]
    with treescope.using_expansion_strategy(max_height=None):
        texts = [repr(net), treescope.render_to_text(net)]
    for text in texts:
        assert type(net.inner).__name__ in text
        for path, variable in nnx.to_flat_state(nnx.state(net)):
            assert str(path[-1]) in text
            assert type(variable).__name__ in text


@all_layers
def test_operations_carry_the_path_of_the_layer(name: str) -> None:
    net, x = made(name)
    graphdef, state = nnx.split(net)
    lowered = jax.jit(lambda x: nnx.merge(graphdef, state)(x)).lower(x)
    assert "Net/inner/" in lowered.as_text(debug_info=True)


@all_layers
def test_jit_gives_the_same_output_and_changes(name: str) -> None:
    net, x = made(name)
    copy = nnx.clone(net)
    assert_close(nnx.jit(lambda net, x: net(x))(copy, x), net(x))
    assert_close(nnx.state(copy), nnx.state(net))


@all_layers
def test_gradients_are_those_of_plain_jax_also_with_remat(name: str) -> None:
    net, x = made(name)
    copies = [nnx.clone(net), nnx.clone(net)]
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)
    expected = jax.grad(lambda params: loss(nnx.merge(graphdef, params, rest), x))(params)
    assert all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(expected))
    for function, copy in zip((loss, nnx.remat(loss)), copies, strict=True):
        assert_close(nnx.grad(function)(copy, x), expected)
    net(x)
    assert_close(nnx.state(copies[1]), nnx.state(net))


@all_layers
def test_vmap_over_layers_is_a_loop(name: str) -> None:
    make, _ = LAYERS[name]
    _, x = made(name)
    keys = jax.random.split(jax.random.key(0), 2)
    layers = nnx.vmap(lambda key: make(nnx.Rngs(key)))(keys)
    ys = nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(layers, x)
    one_by_one = [make(nnx.Rngs(key))(x) for key in keys]
    assert_close(ys, jax.tree.map(lambda *parts: jnp.stack(parts), *one_by_one))


@all_layers
def test_a_capture_has_the_output_of_the_layer(name: str) -> None:
    net, x = made(name)
    expected = nnx.clone(net)(x)
    y, found = nnx.capture(net, nnx.Intermediate, method_outputs=nnx.Intermediate)(x)
    assert_close(y, expected)
    assert_close(found["inner"]["__call__"][...][0], expected)


@all_layers
def test_missing_rngs_are_an_error_that_names_the_layer(name: str) -> None:
    cls = type(made(name)[0].inner)
    parameters = inspect.signature(cls).parameters
    if cls.__name__ in NEEDS_NO_RNGS:
        assert parameters["rngs"].default is None
        return
    needed = {name: 1 for name, p in parameters.items() if p.default is p.empty and name != "rngs"}
    with pytest.raises(TypeError, match=rf"{cls.__name__}.* argument: 'rngs'"):
        cls(**needed)


@all_layers
def test_a_layer_of_the_same_options_does_not_retrace(name: str) -> None:
    make, _ = LAYERS[name]
    _, x = made(name)
    traces = []

    @nnx.jit
    def forward(layer: Any, x: jax.Array) -> Any:
        traces.append(1)
        return layer(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in range(2):
            forward(make(nnx.Rngs(seed)), x)
    assert len(traces) == 1

"""nnx.transform_metadata: names of axes in step under plain jax transforms, and under ours."""

import functools

import jax
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError

f32 = np.float32


class Layer(nnx.Module):
    def __init__(self, key=None):
        kernel = np.ones((2, 4), f32) if key is None else jax.random.normal(key, (2, 4))
        self.kernel = nnx.Param(kernel, out_sharding=("data", "model"))
        self.bias = nnx.Param(np.ones(4, f32), out_sharding=("model",))
        self.plain = nnx.BatchStat(np.ones(3, f32))


def named(*names):
    """A Param of that rank with these names."""
    return nnx.Param(np.ones((3,) * len(names), f32), out_sharding=names)


def names_of(layer):
    return layer.kernel.out_sharding, layer.bias.out_sharding


MAPS = {
    "jax.vmap": jax.vmap,
    "nnx.vmap": nnx.vmap,
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "jax.lax.map": lambda f: functools.partial(jax.lax.map, f),
    "nnx.scan": lambda f: nnx.scan(f, in_axes=0, out_axes=0),
}


@pytest.mark.parametrize("name", MAPS)
def test_what_is_made_gains_the_name(name):
    make = MAPS[name](nnx.transform_metadata(Layer, partition="layers"))
    layers = make(jax.random.split(jax.random.key(0), 3))
    assert names_of(layers) == (("layers", "data", "model"), ("layers", "model"))
    assert layers.kernel.shape == (3, 2, 4) and layers.plain.shape == (3, 3)


@pytest.mark.parametrize("name", MAPS)
def test_what_comes_in_loses_it_and_gets_it_back(name):
    @MAPS[name]
    @nnx.transform_metadata(partition="layers")
    def run(layer):
        assert names_of(layer) == (("data", "model"), ("model",)) and layer.kernel.shape == (2, 4)
        return layer, layer.kernel[...]

    layers = jax.vmap(nnx.transform_metadata(Layer, partition="layers"))(
        jax.random.split(jax.random.key(0), 3)
    )
    found, kernel = run(layers)
    assert names_of(found) == names_of(layers) == (("layers", "data", "model"), ("layers", "model"))
    np.testing.assert_array_equal(kernel, layers.kernel[...])


def test_axes_and_filters():
    in_axes = (nnx.StateAxes({nnx.PathContains("kernel"): 1, ...: None}), None)

    def f(layer, other):
        assert names_of(layer) == (("data",), ("model",)) and names_of(other)[1] == ("model",)
        return nnx.Param(layer.kernel[...], out_sharding=("data",))

    layer = Layer()
    kept = nnx.transform_metadata(f, in_axes=in_axes, out_axes=1, partition="model")
    assert kept(layer, Layer()).out_sharding == ("data", "model")
    assert names_of(layer) == (("data", "model"), ("model",))


def test_states_variables_and_keywords():
    state, v = nnx.state(Layer(), nnx.Param), named("data", None)

    def f(state, *, v):
        assert state["kernel"].out_sharding == ("model",) and v.out_sharding == (None,)
        return {"s": state, "v": v}

    out = nnx.transform_metadata(
        f,
        in_axes=(nnx.StateAxes({nnx.PathContains("kernel"): 0, ...: None}),),
        out_axes=0,
        partition="data",
    )(state, v=v)
    assert out["s"]["kernel"].out_sharding == ("data", "model") and v.out_sharding == ("data", None)


def test_methods_and_partials_bring_what_is_not_mapped():
    class Scale(Layer):
        def run(self, v):
            assert names_of(self)[1] == ("model",) and v.out_sharding == ("model",)
            return v

    scale = Scale()
    for axes in (0, (0,)):
        f = nnx.transform_metadata(scale.run, in_axes=axes, partition="d")
        assert f(named("d", "model")).out_sharding == ("d", "model")


def test_shared_variables_change_once():
    v = named("d", None)

    def f(a, b):
        assert a is b and a.out_sharding == (None,)
        return a, [b]

    nnx.transform_metadata(f, partition="d")(v, v)
    assert v.out_sharding == ("d", None)
    with pytest.raises(StructureError, match=r"is there twice, and in_axes gives it 0 .* 1"):
        nnx.transform_metadata(f, in_axes=(0, 1), partition="d")(v, v)


def test_other_name_is_an_error_and_harms_nothing():
    a, b = named("layers", None), named("stages", None)
    with pytest.raises(ValueError, match=r"Expected the name 'layers' for axis 0 .* 'stages'"):
        nnx.transform_metadata(lambda a, b: a, partition="layers")(a, b)
    assert a.out_sharding == ("layers", None) and b.out_sharding == ("stages", None)


def test_function_that_fails_harms_nothing():
    def f(v):
        raise ZeroDivisionError("inside")

    v = named("d", None)
    with pytest.raises(ZeroDivisionError, match="inside"):
        nnx.transform_metadata(f, partition="d")(v)
    assert v.out_sharding == ("d", None)


def test_name_is_told_once():
    f = nnx.transform_metadata(lambda v: v, partition="layers")
    told = {nnx.PARTITION_NAME: "layers"}
    for transform in (nnx.vmap, nnx.scan, nnx.pmap):
        with pytest.raises(ValueError, match=r"both name the mapped axis\. Leave out one"):
            transform(f, transform_metadata=told)


def test_axes_that_are_no_prefix():
    f = nnx.transform_metadata(lambda v: v, in_axes=({"a": 0},), partition="d")
    with pytest.raises(StructureError, match=r"nnx\.transform_metadata: in_axes is \({'a': 0},\)"):
        f(named("d"))

"""Stages of jit: traced, lowered and compiled functions that take objects."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.errors import DonatedBufferError, StructureError
from tests.transforms.samples import Cell

ONE = jnp.float32(1)
X = jnp.ones((2, 3), jnp.float32)


def linear(seed=0):
    return nnx.Linear(3, 4, rngs=nnx.Rngs(seed))


def forward(model, x):
    return model(x)


def test_stages_lower_trace_and_compile():
    m, jitted = Cell(), nnx.jit(lambda m, x: m(x))
    traced = jitted.trace(m, ONE)
    assert "mul" in str(traced.jaxpr)
    lowered = traced.lower()
    assert "stablehlo" in lowered.as_text()
    compiled = lowered.compile()
    assert int(m.n[...]) == 0
    assert compiled(m, ONE) == 2 and compiled(m, ONE) == 2 and int(m.n[...]) == 2
    assert jitted.cache_info().traces == 1


def test_lower_takes_shapes_in_place_of_arrays():
    abstract = nnx.eval_shape(linear)
    lowered = nnx.jit(forward).lower(abstract, jax.ShapeDtypeStruct((2, 3), jnp.float32))
    compiled = lowered.compile()
    model = linear()
    assert np.allclose(compiled(model, X), model(X))


def test_compiled_stage_gives_back_arguments_and_structure():
    def f(m):
        m.extra = Cell()
        return m, m.extra

    m = Cell()
    compiled = nnx.jit(f).lower(m).compile()
    out, extra = compiled(m)
    assert out is m and extra is m.extra


def test_compiled_stage_refuses_another_structure():
    m = Cell()
    m.k = 2
    compiled = nnx.jit(lambda m, x: x * jnp.float32(m.k)).lower(m, ONE).compile()
    assert compiled(m, ONE) == 2
    m.k = 3
    with pytest.raises(StructureError, match="compiled for arguments of another structure"):
        compiled(m, ONE)
    static = nnx.jit(lambda x, k: x * jnp.float32(k), static_argnums=1).lower(ONE, 2).compile()
    assert static(ONE, 2) == 2
    with pytest.raises(StructureError, match="another structure"):
        static(ONE, 3)


def test_compiled_stage_checks_donation():
    m = Cell()
    compiled = nnx.jit(lambda m: None, donate_argnums=0).lower(m).compile()
    m.n.value = m.w.value = jnp.ones(())
    m.n.value = m.w.value
    with pytest.raises((DonatedBufferError, TypeError), match=r"same buffer|float32"):
        compiled(m)


def test_eval_shape_computes_and_changes_nothing():
    m, jitted = Cell(), nnx.jit(lambda m, x: (m(x), m))
    out, abstract = jitted.eval_shape(m, jax.ShapeDtypeStruct((5,), jnp.float32))
    assert out.shape == (5,) and int(m.n[...]) == 0
    assert abstract is not m and abstract.n.get_value().dtype == jnp.int32

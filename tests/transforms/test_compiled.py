"""The inner jit: options that go to JAX as they are."""

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.samples import Cell


def test_options_are_those_of_jax():
    m, x = Cell(), jnp.ones(3)
    unused = nnx.jit(lambda m, x: m.w[...] * 2.0, keep_unused=True).lower(m, x).compile()
    dropped = nnx.jit(lambda m, x: m.w[...] * 2.0).lower(m, x).compile()
    size = lambda c: c.memory_analysis().argument_size_in_bytes  # noqa: E731
    assert size(unused) > size(dropped)
    inner = {inline: nnx.jit(lambda m, x: m.w[...] * x, inline=inline) for inline in (False, True)}
    text = {k: jax.jit(lambda x, f=f: f(m, x)).lower(x).as_text() for k, f in inner.items()}
    assert text[False].count("func.func") == 2 and text[True].count("func.func") == 1
    options = {"xla_embed_ir_in_executable": True}
    assert nnx.jit(lambda m: m.w[...], compiler_options=options)(m) == 2
    with pytest.raises(Exception, match="no_such_option"):
        nnx.jit(lambda m: m.w[...], compiler_options={"no_such_option": True})(m)

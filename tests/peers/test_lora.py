"""LoRA layers have the parameters, outputs and gradients of flax.nnx for the same seeds."""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tests.peers.test_nn import LIBRARIES, assert_same, inputs
from tests.peers.test_recurrent import assert_close

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

random = {"b_initializer": jax.nn.initializers.normal()}
half = {"dtype": jnp.bfloat16, "param_dtype": jnp.bfloat16}


@pytest.mark.parametrize(
    "options", [{}, random, {**random, **half}], ids=["zero", "random", "half"]
)
@pytest.mark.parametrize("has_base", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lora_is_that_of_flax(options: dict[str, Any], has_base: bool, dtype: str) -> None:
    layers = []
    for lib in LIBRARIES:
        base = lib.Linear(3, 4, rngs=lib.Rngs(1)) if has_base else None
        layers.append(lib.LoRA(3, 2, 4, base_module=base, **options, rngs=lib.Rngs(0)))
    assert_same(*layers)
    assert_close(*(layer(inputs(5, 3, dtype=dtype)) for layer in layers))


@pytest.mark.parametrize(
    "options",
    [
        random,
        {**random, "lora_dtype": jnp.bfloat16, "lora_param_dtype": jnp.bfloat16},
        {**random, "dtype": jnp.bfloat16, "use_bias": False},
    ],
    ids=["random", "half update", "half kernel"],
)
def test_lora_linear_is_that_of_flax(options: dict[str, Any]) -> None:
    layers = [lib.LoRALinear(3, 4, lora_rank=2, **options, rngs=lib.Rngs(0)) for lib in LIBRARIES]
    assert_same(*layers)
    assert_close(*(layer(inputs(5, 3)) for layer in layers))
    ours, theirs = (
        lib.grad(
            lambda layer: (layer(inputs(5, 3)) ** 2).mean(),
            argnums=lib.DiffState(0, lib.LoRAParam),
        )(layer)
        for lib, layer in zip(LIBRARIES, layers, strict=True)
    )
    assert_same(ours, theirs, rtol=1e-2 if jnp.bfloat16 in options.values() else 1e-5)


@pytest.mark.parametrize("name", ["LoRA", "LoRALinear", "PReLU"])
def test_constructor_and_call_take_what_those_of_flax_take(name: str) -> None:
    for function in ("__init__", "__call__"):
        ours, theirs = (
            inspect.signature(inspect.unwrap(getattr(getattr(lib, name), function))).parameters
            for lib in LIBRARIES
        )
        assert [(p.name, p.kind) for p in ours.values()] == [
            (p.name, p.kind) for p in theirs.values()
        ]

"""LoRA and LoRALinear, against `W x + B A x` (Hu et al. 2021)."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

normal = jax.nn.initializers.normal()
x = jnp.arange(15, dtype=jnp.float32).reshape(5, 3) / 7


def adapted(**options: Any) -> nnx.LoRA:
    base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    return nnx.LoRA(3, 2, 4, base_module=base, **options, rngs=nnx.Rngs(1))


def test_the_update_is_a_product_of_two_matrices() -> None:
    layer = nnx.LoRA(3, 2, 4, b_initializer=normal, rngs=nnx.Rngs(0))
    expected = np.asarray(x) @ np.asarray(layer.lora_a[...]) @ np.asarray(layer.lora_b[...])
    np.testing.assert_allclose(layer(x), expected, rtol=1e-5)


def test_the_update_is_added_to_the_base() -> None:
    layer = adapted(b_initializer=normal)
    kernel = layer.base_module.kernel[...] + layer.lora_a[...] @ layer.lora_b[...]
    np.testing.assert_allclose(layer(x), x @ kernel, rtol=1e-5, atol=1e-6)


def test_the_update_starts_with_zero() -> None:
    layer = adapted()
    np.testing.assert_array_equal(layer(x), layer.base_module(x))
    assert layer.lora_a[...].any() and not layer.lora_b[...].any()


def test_a_linear_with_an_update_has_the_parameters_of_a_linear() -> None:
    plain = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
    layer = nnx.LoRALinear(3, 4, lora_rank=2, b_initializer=normal, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer.kernel[...], plain.kernel[...])
    np.testing.assert_allclose(layer(x), plain(x) + layer.lora(x), rtol=1e-6)


def test_the_update_alone_is_trained() -> None:
    layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
    before = jax.tree.map(jnp.copy, nnx.state(layer))
    optimizer = nnx.Optimizer(layer, optax.sgd(0.1), wrt=nnx.LoRAParam)

    @nnx.jit
    def train_step(layer: nnx.LoRALinear, optimizer: Any) -> None:
        update = nnx.DiffState(0, nnx.LoRAParam)
        optimizer.update(layer, nnx.grad(lambda m: (m(x) ** 2).mean(), argnums=update)(layer))

    train_step(layer, optimizer)
    changed = {
        path
        for (path, new), (_, old) in zip(
            nnx.to_flat_state(nnx.state(layer)), nnx.to_flat_state(before), strict=True
        )
        if not jnp.array_equal(new[...], old[...])
    }
    assert changed == {("lora", "lora_b")}  # the gradient of lora_a is zero while lora_b is


def test_the_update_may_be_in_another_dtype() -> None:
    options = {"lora_dtype": jnp.bfloat16, "lora_param_dtype": jnp.bfloat16}
    layer = nnx.LoRALinear(3, 4, lora_rank=2, **options, rngs=nnx.Rngs(0))
    assert layer.lora(x).dtype == jnp.bfloat16
    assert layer(x).dtype == jnp.float32
    assert adapted(dtype=jnp.bfloat16, param_dtype=jnp.bfloat16)(x).dtype == jnp.float32


def test_type_and_metadata_of_the_parameters() -> None:
    class Mine(nnx.LoRAParam): ...

    layer = adapted(lora_param_type=Mine, a_metadata={"note": "a"}, b_metadata={"note": "b"})
    assert type(layer.lora_a) is type(layer.lora_b) is Mine
    assert (layer.lora_a.note, layer.lora_b.note) == ("a", "b")


def test_keyword_arguments_are_for_the_base() -> None:
    base = nnx.Dropout(0.5)
    layer = nnx.LoRA(3, 2, 3, base_module=base, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(layer(x, deterministic=True), x)
    with pytest.raises(TypeError, match=r"no base_module that could take \['deterministic'\]"):
        nnx.LoRA(3, 2, 3, rngs=nnx.Rngs(0))(x, deterministic=True)


def test_wrong_inputs_and_bases_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"lora_a of shape \(3, 2\) .* \(\.\.\., 3\), found \(5, 4\)"
    ):
        nnx.LoRA(3, 2, 4, rngs=nnx.Rngs(0))(jnp.ones((5, 4)))
    with pytest.raises(ValueError, match=r"Linear with a kernel of shape \(3, 4\)"):
        nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))(jnp.ones((5, 4)))
    with pytest.raises(TypeError, match=r"base_module that can be called, found .*int"):
        nnx.LoRA(3, 2, 4, base_module=3, rngs=nnx.Rngs(0))

"""Low-rank adaptation: a frozen layer, and a learned update of few parameters beside it."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs
from nnxlite._core.variable import LoRAParam, Variable
from nnxlite.nn import initializers
from nnxlite.nn.dtypes import PromoteDtype, promote_dtype
from nnxlite.nn.initializers import Initializer
from nnxlite.nn.linear import Linear

default_a_initializer = initializers.he_uniform()
default_b_initializer = initializers.zeros


class LoRA(Module):
    """A linear map of low rank, `x @ lora_a @ lora_b`, added to what a base module gives.

    At first `lora_b` is zero, and so is the update. To learn the update alone, differentiate
    `nnx.DiffState(0, nnx.LoRAParam)`, and give the optimizer `wrt=nnx.LoRAParam`. The factor
    alpha / rank of the paper is left to the learning rate.

    Args:
      in_features: Size of the last axis of the input.
      lora_rank: The rank of the map.
      out_features: Size of the last axis of the output.
      base_module: Called with the input too; its output is added.
      dtype: The dtype to compute in; by default what input and parameters promote to. The base
        module gets its input in this dtype.
      param_dtype: The dtype of the parameters.
      a_initializer: Initializes `lora_a`.
      b_initializer: Initializes `lora_b`.
      lora_param_type: The type of the Variables, which filters find.
      promote_dtype: Brings `(x, lora_a, lora_b)` to one dtype.
      rngs: The stream `params` initializes `lora_a` and `lora_b`, in this order.
      a_metadata: Metadata of `lora_a`.
      b_metadata: Metadata of `lora_b`.

    Attributes:
      lora_a: `LoRAParam` of shape `(in_features, lora_rank)`.
      lora_b: `LoRAParam` of shape `(lora_rank, out_features)`.

    Raises:
      TypeError: `base_module` cannot be called.

    Example:
      >>> base = nnx.Linear(3, 4, rngs=nnx.Rngs(0))
      >>> layer = nnx.LoRA(3, 2, 4, base_module=base, rngs=nnx.Rngs(1))
      >>> layer(jnp.ones((8, 3))).shape
      (8, 4)
      >>> adapted = nnx.DiffState(0, nnx.LoRAParam)
      >>> list(nnx.grad(lambda m: m(jnp.ones((8, 3))).sum(), argnums=adapted)(layer))
      ['lora_a', 'lora_b']

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    base_module: Callable[..., jax.Array] | None
    lora_a: Variable[jax.Array]
    lora_b: Variable[jax.Array]

    def __init__(
        self,
        in_features: int,
        lora_rank: int,
        out_features: int,
        *,
        base_module: Callable[..., jax.Array] | None = None,
        dtype: DTypeLike | None = None,
        param_dtype: DTypeLike = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        a_metadata: Mapping[str, Any] = MappingProxyType({}),
        b_metadata: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        if base_module is not None and not callable(base_module):
            raise TypeError(
                f"LoRA expects a base_module that can be called, found {type(base_module)}."
            )
        self.in_features = in_features
        self.out_features = out_features
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.lora_param_type = lora_param_type
        self.base_module = base_module
        self.promote_dtype = promote_dtype
        a = a_initializer(rngs.params(), (in_features, lora_rank), param_dtype)
        self.lora_a = lora_param_type(a, **a_metadata)
        b = b_initializer(rngs.params(), (lora_rank, out_features), param_dtype)
        self.lora_b = lora_param_type(b, **b_metadata)

    def __call__(self, x: jax.Array, **kwargs: Any) -> jax.Array:
        """Returns the update, plus the output of the base module if there is one.

        Args:
          x: `(..., in_features)`.
          **kwargs: For the base module.

        Returns:
          `(..., out_features)`.

        Raises:
          ValueError: The last axis of `x` is not `in_features`.
          TypeError: There are `kwargs` and no base module.
        """
        if self.base_module is None and kwargs:
            raise TypeError(f"LoRA has no base_module that could take {sorted(kwargs)}.")
        if jnp.shape(x)[-1:] != (self.in_features,):
            raise ValueError(
                f"LoRA with lora_a of shape {self.lora_a.shape} expects inputs of shape "
                f"(..., {self.in_features}), found {jnp.shape(x)}."
            )
        a, b = self.lora_a[...], self.lora_b[...]
        x, a, b = self.promote_dtype((x, a, b), dtype=self.dtype)
        update = x @ a @ b
        return update if self.base_module is None else _sum(update, self.base_module(x, **kwargs))


class LoRALinear(Linear):
    """A `Linear` with a `LoRA` beside it: `x @ kernel + bias + x @ lora.lora_a @ lora.lora_b`.

    Its kernel and bias are those of a `Linear`: same names, shapes, and values for a seed.

    Args:
      in_features: Size of the last axis of the input.
      out_features: Size of the last axis of the output.
      lora_rank: The rank of the update.
      lora_dtype: The dtype to compute the update in.
      lora_param_dtype: The dtype of its parameters.
      a_initializer: Initializes `lora.lora_a`.
      b_initializer: Initializes `lora.lora_b`.
      lora_param_type: The type of both.
      lora_promote_dtype: As `promote_dtype` of `LoRA`.
      rngs: The stream `params` initializes kernel, bias, `lora_a` and `lora_b`, in this order.
      a_metadata: Metadata of `lora.lora_a`.
      b_metadata: Metadata of `lora.lora_b`.
      **kwargs: All other options of `Linear`.

    Attributes:
      kernel: As for `Linear`.
      bias: As for `Linear`.
      lora: The `LoRA`.

    Example:
      >>> layer = nnx.LoRALinear(3, 4, lora_rank=2, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((8, 3))).shape, layer.lora.lora_a.shape
      ((8, 4), (3, 2))

    Source: Hu et al. 2021, arXiv:2106.09685.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        lora_rank: int,
        lora_dtype: DTypeLike | None = None,
        lora_param_dtype: DTypeLike = jnp.float32,
        a_initializer: Initializer = default_a_initializer,
        b_initializer: Initializer = default_b_initializer,
        lora_param_type: type[Variable[Any]] = LoRAParam,
        lora_promote_dtype: PromoteDtype = promote_dtype,
        rngs: Rngs,
        a_metadata: Mapping[str, Any] = MappingProxyType({}),
        b_metadata: Mapping[str, Any] = MappingProxyType({}),
        **kwargs: Any,
    ) -> None:
        super().__init__(in_features, out_features, rngs=rngs, **kwargs)
        self.lora = LoRA(
            in_features,
            lora_rank,
            out_features,
            dtype=lora_dtype,
            param_dtype=lora_param_dtype,
            a_initializer=a_initializer,
            b_initializer=b_initializer,
            lora_param_type=lora_param_type,
            promote_dtype=lora_promote_dtype,
            rngs=rngs,
            a_metadata=a_metadata,
            b_metadata=b_metadata,
        )

    def __call__(self, x: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Returns the transformed input; as for `Linear`.

        Args:
          x: `(..., in_features)`.
          out_sharding: The sharding of the result without the update.

        Returns:
          `(..., out_features)`.

        Raises:
          ValueError: The last axis of `x` is not `in_features`.
        """
        return _sum(super().__call__(x, out_sharding=out_sharding), self.lora(x))


def _sum(a: jax.Array, b: jax.Array) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # the update may be in another dtype
        return a + b

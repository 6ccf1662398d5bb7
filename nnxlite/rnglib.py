"""Random streams, under the module path that they have in flax.nnx."""

from nnxlite._core.random_state import (
    fork_rngs,
    reseed,
    restore_rngs,
    split_rngs,
    with_rngs,
)
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._core.variable import RngCount, RngKey, RngState

__all__ = [
    "RngCount",
    "RngKey",
    "RngState",
    "RngStream",
    "Rngs",
    "fork_rngs",
    "reseed",
    "restore_rngs",
    "split_rngs",
    "with_rngs",
]

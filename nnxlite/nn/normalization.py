"""The normalizing layers, all in one place; each file of theirs tells of its own."""

from nnxlite.nn.batch_norm import BatchNorm
from nnxlite.nn.group_norm import GroupNorm, InstanceNorm
from nnxlite.nn.layer_norm import LayerNorm, RMSNorm
from nnxlite.nn.spectral_norm import SpectralNorm
from nnxlite.nn.weight_norm import WeightNorm

__all__ = [
    "BatchNorm",
    "GroupNorm",
    "InstanceNorm",
    "LayerNorm",
    "RMSNorm",
    "SpectralNorm",
    "WeightNorm",
]

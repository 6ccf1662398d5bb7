"""The names of `nnxlite.graph`, under flax.nnx's newer module path."""

from nnxlite.graph import *  # noqa: F403 - that module lists its names

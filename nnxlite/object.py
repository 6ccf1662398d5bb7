"""The names of `nnxlite.pytreelib`, under flax.nnx's older module path."""

from nnxlite.pytreelib import *  # noqa: F403 - that module lists its names

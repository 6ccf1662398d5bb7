"""Small objects that tests of the core are made with."""

import enum
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import nnxlite as nnx


class Net(nnx.Module):
    """A module with the attributes that it is given."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def double(self, x):
        return x + x

    def triple(self, x):
        return x + x + x


class Other(Net):
    """Another class with the same attributes."""


class Pair(NamedTuple):
    left: Any
    right: Any


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@jax.tree_util.register_pytree_with_keys_class
class Box:
    """A registered pytree, mutable, with one child and one static field."""

    def __init__(self, inner: Any, tag: Any = "box") -> None:
        self.inner, self.tag = inner, tag

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("inner"), self.inner)], self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(*children, tag)


def param(*shape: int, **metadata: Any) -> nnx.Param:
    return nnx.Param(jnp.ones(shape), **metadata)


def is_variable(value: Any) -> bool:
    return isinstance(value, nnx.Variable)


def key_paths(tree: Any) -> list[str]:
    """The key paths of the leaves, as `jax.tree_util.keystr` writes them."""
    return [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]

"""Copies of objects, and trees without Variables."""

import copy
from collections import defaultdict
from typing import Any, TypeVar

import jax
import numpy as np

from nnxlite._core.build import build
from nnxlite._core.modes import graph_flag
from nnxlite._core.plan import plan_of
from nnxlite._core.trace import EAGER, current_level
from nnxlite._core.variable import Variable

A = TypeVar("A")


@graph_flag
def clone(node: A, /, *, share: bool = False) -> A:
    """Returns a copy of an object: same structure and sharing, Variables of its own.

    Args:
      node: The object.
      share: If true, the copy's Variables hold the very same arrays, which is cheaper. By default
        all buffers are copied in one jitted call, so that donating one object keeps the other.
        Under a trace nothing is copied either way.

    Example:
      >>> a = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> b = nnx.clone(a)
      >>> bool((a.kernel == b.kernel).all()), a.kernel is b.kernel
      (True, False)
    """
    plan = plan_of(node)
    values, level = plan.gather(), current_level()
    if not share and level is EAGER:
        values = copy_arrays(values)
    return build(plan.graphdef, values, level)[0][0]


def copy_arrays(values: Any) -> Any:
    """Returns a tree with every array copied, those on the same devices in one call."""
    leaves, treedef = jax.tree.flatten(values)
    by_place: dict[Any, list[int]] = defaultdict(list)
    for number, leaf in enumerate(leaves):
        if isinstance(leaf, np.ndarray):
            leaves[number] = copy.copy(leaf)
        elif isinstance(leaf, jax.Array):
            sharding = leaf.sharding
            by_place[frozenset(sharding.device_set), sharding.memory_kind].append(number)
    for numbers in by_place.values():
        copies = _copied([leaves[number] for number in numbers])
        for number, new in zip(numbers, copies, strict=True):
            leaves[number] = new
    return jax.tree.unflatten(treedef, leaves)


@jax.jit
def _copied(arrays: list[jax.Array]) -> list[jax.Array]:
    return [jax.numpy.copy(array) for array in arrays]


def pure(tree: Any) -> Any:
    """Returns a tree with the Variables of its States and objects replaced by their values.

    Example:
      >>> nnx.pure(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))["kernel"].shape
      (2, 3)
    """
    return jax.tree.map(
        lambda x: x.get_value() if isinstance(x, Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Variable),
    )


as_pure = pure

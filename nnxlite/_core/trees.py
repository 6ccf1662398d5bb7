"""Objects as trees for JAX: prefixes of them, and flax.nnx's step between objects and trees.

Objects are pytrees themselves here, so `to_tree` and `from_tree` only copy. What they add is a
check: JAX flattens the objects of a tree one by one, and what two of them share would become two.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax

from nnxlite._core import iterate
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import Filter, to_predicate
from nnxlite._core.kinds import OBJECT, VARIABLE, kind_of
from nnxlite._core.modes import graph_flag
from nnxlite._core.trace import Opaque, opaque_nodes
from nnxlite._core.variable import Variable

A = TypeVar("A")


@graph_flag
def prefix(node: Any, filter_map: Mapping[Filter, Any] | Callable[[Path, Any], Any], /) -> Any:
    """Returns a copy of an object or State with something else in the place of each leaf.

    Such as axes or shardings, for `in_axes` or `out_shardings` of JAX's own transforms; nnxlite's
    take `nnx.StateAxes` and `nnx.StateSharding` as well.

    Args:
      node: An object, a State, or a pytree of them.
      filter_map: What each leaf becomes, by filter, of which the first that matches counts; or a
        function of path and leaf.

    Raises:
      StructureError: A leaf matches no filter.

    Example:
      >>> rngs = nnx.Rngs(params=0, dropout=1).split({"dropout": 5})
      >>> axes = nnx.prefix(rngs, {"dropout": 0, ...: None})
      >>> keys = jax.vmap(lambda rngs: rngs.dropout(), in_axes=(axes,))(rngs)
      >>> keys.shape
      (5,)
    """
    choose = _by_filter(filter_map) if isinstance(filter_map, Mapping) else filter_map
    return jax.tree_util.tree_map_with_path(
        lambda keys, leaf: choose(tuple(map(_plain_key, keys)), leaf),
        node,
        is_leaf=lambda x: isinstance(x, Variable),
    )


def to_tree(tree: A, /) -> A:
    """Returns a copy of a tree of objects, for `jax.tree.flatten` and the like.

    Args:
      tree: Objects, States, Variables, or a pytree of them.

    Raises:
      StructureError: Two objects of the tree share an object or Variable; the message says where.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> leaves, treedef = jax.tree.flatten(nnx.to_tree(model))
      >>> nnx.from_tree(jax.tree.unflatten(treedef, leaves))(jnp.ones((1, 2))).shape
      (1, 3)
    """
    _check_apart(tree)
    return jax.tree.map(lambda leaf: leaf, tree)


def from_tree(tree: A, /) -> A:
    """Returns a copy of a tree of objects, with Variables of its own; the inverse of `to_tree`."""
    return jax.tree.map(lambda leaf: leaf, tree)


def _by_filter(filter_map: Mapping[Filter, Any]) -> Callable[[Path, Any], Any]:
    rules = [(to_predicate(filter), value) for filter, value in filter_map.items()]

    def choose(path: Path, leaf: Any) -> Any:
        for predicate, value in rules:
            if predicate(path, leaf):
                return value
        raise StructureError(
            f"No filter of the prefix matches {format_path(path)} ({type(leaf).__name__}). Add one "
            "for it, or end with `...: value` for the rest."
        )

    return choose


def _plain_key(key: Any) -> Any:
    """Returns what stands in an entry of JAX's key paths."""
    for name in ("key", "idx", "name"):
        if hasattr(key, name):
            return getattr(key, name)
    return key


def _check_apart(tree: Any) -> None:
    with opaque_nodes():
        leaves = jax.tree.leaves(tree)
    roots = [leaf.node for leaf in leaves if type(leaf) is Opaque]
    if len(roots) < 2:
        return
    seen: dict[int, tuple[int, str]] = {}
    for number, root in enumerate(roots):
        for path, value in iterate.iter_graph(root):
            if kind_of(value) not in (OBJECT, VARIABLE):
                continue
            place = format_path(path, type(root).__name__)
            first, where = seen.setdefault(id(value), (number, place))
            if first != number:
                raise StructureError(
                    f"{where} and {place} are one {type(value).__name__}. JAX flattens the "
                    "objects of a tree one by one, and would make two of it. Put both into one "
                    "object, or use nnx.split((a, b)), which keeps what they share."
                )

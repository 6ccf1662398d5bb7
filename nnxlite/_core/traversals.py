"""Nested mappings as flat dicts of paths, and back; under the names that flax.nnx has for it.

For States `to_flat_state` and `from_flat_state` say more. These are for mappings of anything, such
as the parameters of another library.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias

__all__ = ["empty_node", "flatten_mapping", "flatten_to_sequence", "unflatten_mapping"]

IsLeaf: TypeAlias = Callable[[tuple[Any, ...], Mapping[Any, Any]], bool]


class _EmptyNode:
    """Stands for an empty mapping among flat values; there is one."""

    def __repr__(self) -> str:
        return "empty_node"

    def __reduce__(self) -> str:
        return "empty_node"


empty_node = _EmptyNode()


def flatten_mapping(
    xs: Mapping[Any, Any],
    /,
    *,
    keep_empty_nodes: bool = False,
    is_leaf: IsLeaf | None = None,
    sep: str | None = None,
) -> dict[Any, Any]:
    """Returns a dict from the path of each leaf of nested mappings to the leaf.

    Args:
      xs: The mapping; a State works too.
      keep_empty_nodes: Whether an empty mapping below counts as a leaf, `empty_node`. Otherwise it
        is left out.
      is_leaf: Given path and mapping, says whether that mapping is a leaf.
      sep: Joins the keys of a path, which then all have to be strings. Otherwise paths are tuples.

    Example:
      >>> nnx.traversals.flatten_mapping({"a": 1, "b": {"c": 2, "d": {}}})
      {('a',): 1, ('b', 'c'): 2}
      >>> nnx.traversals.flatten_mapping({"a": 1, "b": {"c": 2}}, sep="/")
      {'a': 1, 'b/c': 2}
    """
    pairs = _pairs(xs, is_leaf, keep_empty_nodes)
    return {path if sep is None else sep.join(path): leaf for path, leaf in pairs}


def flatten_to_sequence(
    xs: Mapping[Any, Any], /, *, is_leaf: IsLeaf | None = None
) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns the pairs of path and leaf of nested mappings, without empty ones.

    Args:
      xs: The mapping.
      is_leaf: Given path and mapping, says whether that mapping is a leaf.

    Example:
      >>> nnx.traversals.flatten_to_sequence({"a": 1, "b": {"c": 2}})
      [(('a',), 1), (('b', 'c'), 2)]
    """
    return _pairs(xs, is_leaf, keep_empty_nodes=False)


def unflatten_mapping(
    xs: Mapping[Any, Any] | Iterable[tuple[Any, Any]], /, *, sep: str | None = None
) -> dict[Any, Any]:
    """Returns nested dicts of leaves by path; the inverse of `flatten_mapping`.

    Args:
      xs: A mapping from paths to leaves, or pairs of them. `empty_node` becomes an empty dict.
      sep: What joins the keys of a path, as in `flatten_mapping`.

    Raises:
      ValueError: A path is a leaf and the parent of another one.

    Example:
      >>> nnx.traversals.unflatten_mapping({("a",): 1, ("b", "c"): 2})
      {'a': 1, 'b': {'c': 2}}
    """
    tree: dict[Any, Any] = {}
    leaves: set[tuple[Any, ...]] = set()
    given: Any
    for given, leaf in xs.items() if isinstance(xs, Mapping) else xs:
        path = tuple(given.split(sep) if sep is not None else given)
        level = tree
        for depth, key in enumerate(path[:-1], start=1):
            if path[:depth] in leaves:
                raise ValueError(f"{path[:depth]} is a leaf and the parent of {path}. Rename one.")
            level = level.setdefault(key, {})
        if path[-1] in level and path not in leaves:
            raise ValueError(f"{path} is a leaf and the parent of others. Rename one.")
        leaves.add(path)
        level[path[-1]] = {} if leaf is empty_node else leaf
    return tree


def _pairs(
    xs: Mapping[Any, Any], is_leaf: IsLeaf | None, keep_empty_nodes: bool
) -> list[tuple[tuple[Any, ...], Any]]:
    if not isinstance(xs, Mapping):
        raise TypeError(f"Expected a mapping, found {type(xs).__name__}.")
    pairs: list[tuple[tuple[Any, ...], Any]] = []
    stack: list[tuple[tuple[Any, ...], Any]] = [((), xs)]
    while stack:
        path, value = stack.pop()
        if not isinstance(value, Mapping) or (is_leaf is not None and is_leaf(path, value)):
            pairs.append((path, value))
        elif value:
            stack.extend(((*path, key), value[key]) for key in reversed(list(value)))
        elif keep_empty_nodes and path:
            pairs.append((path, empty_node))
    return pairs

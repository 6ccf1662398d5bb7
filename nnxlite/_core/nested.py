"""Nested dicts of leaves: what a State is made of, and what stands for one.

The dicts of a State are *own* ones: plain, in sorted order, with Variables that belong to the
State. Mappings that a user gives are copied into such, and checked: keys of one level are all str
or all int, and no mapping holds itself.
"""

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np

from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.trace import FOREIGN_READS, Level, record_foreign_read
from nnxlite._core.variable import Variable


def nest(paths: Iterable[Path], leaves: Iterable[Any]) -> dict[Hashable, Any]:
    """Returns nested dicts of leaves, given in sorted order of their paths."""
    tree: dict[Hashable, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        level = tree
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = leaf
    return tree


def leaves_of_own(tree: dict[Hashable, Any], above: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yields path and leaf of own dicts."""
    for key, value in tree.items():
        if type(value) is dict:
            yield from leaves_of_own(value, (*above, key))
        else:
            yield (*above, key), value


def leaves_of(
    mapping: Mapping[Any, Any], known: Container[Path] = ()
) -> Iterator[tuple[Path, Any]]:
    """Yields path and leaf of nested mappings.

    Args:
      mapping: The mapping.
      known: Paths of leaves: a mapping at one of them is the value of that leaf.

    Raises:
      StructureError: A mapping holds itself.
    """
    return _leaves_of(mapping, (), (), known)


def _leaves_of(
    mapping: Mapping[Any, Any], above: Path, holders: tuple[Any, ...], known: Container[Path]
) -> Iterator[tuple[Path, Any]]:
    holders = _checked_holders(mapping, above, holders)
    for key, value in mapping.items():
        path = (*above, key)
        if isinstance(value, Mapping) and path not in known:
            yield from _leaves_of(value, path, holders, known)
        else:
            yield path, value


def owned(mapping: Mapping[Any, Any], path: Path, level: Level) -> dict[Hashable, Any]:
    """Returns own dicts of what nested mappings hold; `path` is where they will be.

    Raises:
      StructureError: Keys of one level are not all str or all int, or a mapping holds itself.
    """
    return _owned(mapping, path, level, ())


def _owned(
    mapping: Mapping[Any, Any], path: Path, level: Level, holders: tuple[Any, ...]
) -> dict[Hashable, Any]:
    holders = _checked_holders(mapping, path, holders)
    check_keys(list(mapping), path)
    tree: dict[Hashable, Any] = {}
    for key in sorted(mapping):
        value = mapping[key]
        if isinstance(value, Mapping):
            value = _owned(value, (*path, key), level, holders)
        elif isinstance(value, Variable):
            value = copied(value, level)
        elif isinstance(value, np.ndarray):
            value = value.copy()  # it may be changed in place
        tree[key] = value
    return tree


def copied(variable: Variable[Any], level: Level) -> Variable[Any]:
    """Returns a Variable with the same array, kind and metadata; no hooks run."""
    if FOREIGN_READS.recorders:
        record_foreign_read(variable)
    return type(variable)._make(variable._value, variable._meta, level)


def become(tree: dict[Hashable, Any], new: dict[Hashable, Any]) -> None:
    """Gives a dict, in place, other items in the order of `new`; dicts below that stay are kept."""
    before = dict(tree)
    tree.clear()
    for key, value in new.items():
        old = before.get(key)
        if type(old) is dict and type(value) is dict and old is not value:
            become(old, value)
            value = old
        tree[key] = value


def check_keys(keys: list[Any], path: Path) -> None:
    """Raises `StructureError` if the keys of one level are not all str or all int."""
    found = {type(key) for key in keys}
    if len(found) > 1 or not found <= {str, int}:
        names = ", ".join(sorted(cls.__name__ for cls in found))
        raise StructureError(
            f"{format_path(path, 'state')} has keys of types {names}. The keys of one level of a "
            "State must be all str or all int; nnx.restore_int_paths turns digit strings, as "
            "checkpoint formats write them, into ints."
        )


def _checked_holders(value: Any, path: Path, holders: tuple[Any, ...]) -> tuple[Any, ...]:
    if any(value is each for each in holders):
        raise StructureError(
            f"{format_path(path, 'state')} is one of the mappings that it is in: a State is a "
            "tree, without cycles. nnx.split keeps cycles of objects, in the GraphDef."
        )
    return (*holders, value)


def some_keys(tree: Mapping[Hashable, Any]) -> str:
    """Writes the first keys of a level, for messages."""
    keys = [repr(key) for key in tree]
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") or "none"


def sum_of_versions(leaves: Iterable[Any]) -> int:
    """Returns the sum of the structure versions of the Variables among the leaves."""
    return sum([leaf._version for leaf in leaves if isinstance(leaf, Variable)])

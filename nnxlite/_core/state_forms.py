"""The functions on States: flat and dict forms, filters, merging, mapping.

All give States with Variables of their own, and take nested mappings of leaves wherever they take
a State. Their forms as methods are in `state.py`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import Filter, Predicate, filters_to_predicates
from nnxlite._core.nested import nest
from nnxlite._core.state import GraphState, State, walk
from nnxlite._core.statedef import StateDef
from nnxlite._core.trace import check_writable
from nnxlite._core.variable import Variable

__all__ = [
    "FlatState",
    "GraphState",
    "State",
    "StateDef",
    "filter_state",
    "from_flat_state",
    "map_state",
    "merge_state",
    "replace_by_pure_dict",
    "restore_int_paths",
    "select",
    "split_state",
    "to_flat_state",
    "to_pure_dict",
    "unmatched_error",
    "without_paths",
]


@jax.tree_util.register_pytree_node_class
class FlatState(tuple[tuple[Path, Any], ...]):
    """The pairs of path and Variable of a State, in sorted order; a pytree of the Variables."""

    __slots__ = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths."""
        return tuple([path for path, _ in self])

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The Variables, or bare values."""
        return tuple([leaf for _, leaf in self])

    def tree_flatten(self) -> tuple[tuple[Any, ...], tuple[Path, ...]]:
        """Returns the leaves, and the paths as static data."""
        return self.leaves, self.paths

    @classmethod
    def tree_unflatten(cls, paths: tuple[Path, ...], leaves: Iterable[Any]) -> "FlatState":
        """The inverse of `tree_flatten`."""
        return cls(zip(paths, leaves, strict=True))


def to_flat_state(state: Mapping[Any, Any]) -> FlatState:
    """Returns the pairs of path and Variable of a State, in sorted order.

    The Variables are the State's own.

    Example:
      >>> nnx.to_flat_state(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))).paths
      (('bias',), ('kernel',))
    """
    return FlatState(walk(_as_state(state)))


def from_flat_state(flat: Mapping[Path, Any] | Iterable[tuple[Path, Any]]) -> State:
    """Makes a State from paths and Variables; the inverse of `to_flat_state`.

    Raises:
      StructureError: A path is a leaf and the parent of another one, or no path at all.

    Example:
      >>> nnx.from_flat_state({("a", "b"): nnx.Param(jnp.ones(2))})["a"]["b"].shape
      (2,)
    """
    tree: dict[Any, Any] = {}
    for path, leaf in dict(flat).items():
        if not isinstance(path, tuple) or not path:
            raise StructureError(f"{path!r} is no path of a State: expected a tuple of keys.")
        level = tree
        for depth, key in enumerate(path[:-1]):
            level = level.setdefault(key, {})
            if type(level) is not dict:
                raise _both_leaf_and_parent(path[: depth + 1])
        if path[-1] in level:
            raise _both_leaf_and_parent(path)
        level[path[-1]] = leaf
    return State(tree)


def _both_leaf_and_parent(path: Path) -> StructureError:
    return StructureError(
        f"{format_path(path, 'state')} cannot be both a leaf and the parent of other leaves."
    )


def _as_state(state: Mapping[Any, Any]) -> State:
    return state if isinstance(state, State) else State(state)


def select(
    pairs: Sequence[tuple[Path, Any]], predicates: Sequence[Predicate]
) -> tuple[list[list[int]], list[int]]:
    """Gives each leaf to the first predicate that takes it.

    Returns:
      Per predicate the numbers of its leaves, and the numbers of those that none took.
    """
    groups: list[list[int]] = [[] for _ in predicates]
    rest = []
    for number, (path, leaf) in enumerate(pairs):
        for group, predicate in zip(groups, predicates, strict=True):
            if predicate(path, leaf):
                group.append(number)
                break
        else:
            rest.append(number)
    return groups, rest


def unmatched_error(pairs: Sequence[tuple[Path, Any]], rest: Sequence[int]) -> StructureError:
    """The error for leaves that no filter of a split took."""
    shown = ", ".join(
        f"{format_path(pairs[n][0])} ({type(pairs[n][1]).__name__})" for n in rest[:5]
    )
    more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
    return StructureError(
        f"The filters leave {len(rest)} of {len(pairs)} leaves unmatched: {shown}{more}. Add a "
        "filter for them, or end with `...` to take the rest."
    )


def filter_state(state: Mapping[Any, Any], first: Filter, /, *filters: Filter) -> Any:
    """Returns the leaves that match, as one State per filter; the rest is left out.

    Example:
      >>> state = nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
      >>> list(nnx.filter_state(state, nnx.BatchStat))
      ['mean', 'var']
    """
    return _selected(state, (first, *filters), partial=True)


def split_state(state: Mapping[Any, Any], first: Filter, /, *filters: Filter) -> Any:
    """Returns one State per filter; each leaf has to match one of them.

    Raises:
      StructureError: A leaf matches no filter; the message lists paths.
    """
    return _selected(state, (first, *filters), partial=False)


def _selected(state: Mapping[Any, Any], filters: tuple[Filter, ...], *, partial: bool) -> Any:
    pairs = to_flat_state(state)
    groups, rest = select(pairs, filters_to_predicates(filters))
    if rest and not partial:
        raise unmatched_error(pairs, rest)
    states = [from_flat_state([pairs[n] for n in group]) for group in groups]
    return tuple(states) if len(states) > 1 else states[0]


def merge_state(state: Mapping[Any, Any], /, *states: Mapping[Any, Any]) -> State:
    """Merges States; of two leaves at one path, the later State's stays.

    Raises:
      StructureError: A path is a leaf in one State and a parent in another.

    Example:
      >>> params, rest = nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Param, ...)
      >>> list(nnx.merge_state(params, rest))
      ['bias', 'mean', 'scale', 'var']
    """
    flat: dict[Path, Any] = {}
    for each in (state, *states):
        flat.update(walk(each))
    return from_flat_state(flat)


def without_paths(state: Mapping[Any, Any], other: Mapping[Any, Any]) -> State:
    """Returns the leaves of a State at whose path another one has none."""
    taken = {path for path, _ in walk(other)}
    return from_flat_state([(path, leaf) for path, leaf in walk(state) if path not in taken])


def map_state(f: Callable[[Path, Any], Any], state: Mapping[Any, Any]) -> State:
    """Returns the State of `f(path, leaf)` for each leaf.

    Example:
      >>> state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> nnx.map_state(lambda path, leaf: leaf.size, state).kernel
      6
    """
    return from_flat_state([(path, f(path, leaf)) for path, leaf in to_flat_state(state)])


def to_pure_dict(
    state: Mapping[Any, Any], extract_fn: Callable[[Any], Any] | None = None
) -> dict[Any, Any]:
    """Returns nested plain dicts of the values.

    Args:
      state: The State.
      extract_fn: What to take from each leaf; by default the value of a Variable.

    Example:
      >>> nnx.to_pure_dict(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))["kernel"].shape
      (2, 3)
    """
    extract = extract_fn or (lambda leaf: leaf.get_value() if isinstance(leaf, Variable) else leaf)
    flat = to_flat_state(state)
    return nest(flat.paths, [extract(leaf) for leaf in flat.leaves])


def replace_by_pure_dict(
    state: State,
    pure_dict: Mapping[Any, Any],
    replace_fn: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Sets the values of a State from nested plain dicts, in place.

    Args:
      state: The State to change.
      pure_dict: Values by path; paths may be left out. Digit strings stand for ints, as in
        checkpoint formats whose keys are all strings.
      replace_fn: Given the leaf and the value, returns the leaf to keep, or the value to set. By
        default the value is set on the Variable.

    Raises:
      StructureError: A path is not in the State; nothing is changed then.
      TraceLevelError: The State belongs to another trace level; nothing is changed then.
    """
    known = dict(walk(state))
    found = list(_values_at(pure_dict, (), known))
    check_writable(state._owner, "replace values of a State")
    for path, _ in found:
        if isinstance(known[path], Variable):
            check_writable(known[path], f"replace {format_path(path, 'state')}")
    if replace_fn is not None:
        found = [(path, replace_fn(known[path], value)) for path, value in found]
    for path, value in found:
        leaf = known[path]
        if value is leaf:
            continue
        if isinstance(value, Variable):
            level = state
            for key in path[:-1]:
                level = level[key]
            level[path[-1]] = value
        elif isinstance(leaf, Variable):
            leaf.set_value(value)
        else:
            state._write(path, leaf, value)


def _values_at(
    values: Mapping[Any, Any], above: Path, known: Mapping[Path, Any]
) -> Iterator[tuple[Path, Any]]:
    """Yields paths of the State and values; a dict that stands for one Variable is a value."""
    for key, value in values.items():
        paths = [(*above, key), (*above, _as_int(key))]
        path = next((path for path in paths if path in known), None)
        if path is not None:
            yield path, value
        elif isinstance(value, Mapping):
            below = next((p for p in paths if any(k[: len(p)] == p for k in known)), paths[0])
            yield from _values_at(value, below, known)
        else:
            shown = ", ".join([format_path(path, "state") for path in list(known)[:8]])
            raise StructureError(
                f"{format_path(paths[0], 'state')} is not in the State, which has {shown or 'none'}"
                f"{', ...' if len(known) > 8 else ''}."
            )


def restore_int_paths(pure_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns nested dicts with digit strings turned into ints, as checkpoint formats need it.

    Raises:
      StructureError: A level has a key both as an int and as a string of digits.

    Example:
      >>> nnx.restore_int_paths({"layers": {"0": {"kernel": 1}}})
      {'layers': {0: {'kernel': 1}}}
    """
    restored = {
        _as_int(key): restore_int_paths(value) if isinstance(value, Mapping) else value
        for key, value in pure_dict.items()
    }
    if len(restored) != len(pure_dict):
        raise StructureError(
            f"Two of the keys {', '.join(map(repr, pure_dict))} are the same int. Remove one."
        )
    return restored


def _as_int(key: Any) -> Any:
    return int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key

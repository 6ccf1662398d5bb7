"""Tangents and cotangents as rules write them, and as the lift needs them.

A rule speaks of arguments and results: the derivative of an array is an array, that of an object is
a State with paths and values, an object of the same structure, or None for zero. The lift speaks of
entries: numbers of leaves. `state_at` goes from entries to a State, `entries_of` the other way; it
checks paths, shapes and dtypes, since JAX would name none.
"""

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.graphdef import FILL_LEAF, GraphDef, Leaf, Slot, leaf_paths
from nnxlite._core.kinds import OBJECT, VARIABLE, kind_of
from nnxlite._core.split import state
from nnxlite._core.state import State, walk
from nnxlite._core.statedef import StateDef
from nnxlite._core.trace import Level
from nnxlite._core.variable import Variable
from nnxlite._transforms.axes import Entry
from nnxlite._transforms.differentiated import is_inexact, is_number, type_text

Found: TypeAlias = dict[Entry, Any]
"""Values by entry."""


def types_of(tree: Any) -> Any:
    """Returns the type of each array of a tree."""
    return jax.tree.map(jax.typeof, tree)


def differentiable(found: Found) -> Found:
    """Returns those of some types that hold a float."""
    return {
        entry: aval for entry, aval in found.items() if any(map(_is_float, jax.tree.leaves(aval)))
    }


def expanded(graphdef: GraphDef[Any], values: Iterable[tuple[int, Any]]) -> Found:
    """Returns by entry what is given by leaf number; a State has an entry per Variable."""
    found: Found = {}
    for number, value in values:
        if graphdef.leaves[number][0] is State:
            found |= {(number, inner): part for inner, part in enumerate(value)}
        else:
            found[number, None] = value
    return found


def folded(found: Mapping[Entry, Any], values: Mapping[int, Any]) -> list[Any]:
    """Returns derivatives in the order of `values`, which go by leaf number; None for zero."""
    by_number: dict[int, Any] = dict.fromkeys(values)
    for (number, inner), derivative in found.items():
        if inner is None:
            by_number[number] = derivative
        else:
            if by_number[number] is None:
                by_number[number] = [None] * len(values[number])
            by_number[number][inner] = derivative
    return list(by_number.values())


def entries_at(graphdef: GraphDef[Any], slot: Slot) -> list[tuple[Path, Leaf, Entry]]:
    """Lists path, kind and entry of the leaves of what a slot holds."""
    found: list[tuple[Path, Leaf, Entry]] = []
    for number, path in leaf_paths(graphdef.skeleton, [((), slot)]).items():
        cls, meta = kind = graphdef.leaves[number]
        if cls is State:
            pairs = zip(meta.paths, meta.leaves, strict=True)
            found += [((*path, *p), k, (number, n)) for n, (p, k) in enumerate(pairs)]
        else:
            found.append((path, kind, (number, None)))
    return found


def state_at(graphdef: GraphDef[Any], slot: Slot, values: Mapping[Entry, Any], level: Level) -> Any:
    """Returns the derivative of what a slot holds: a State of the entries that have a value.

    That of a Variable is a Variable, or None without a value.
    """
    found = [(path, kind, entry) for path, kind, entry in entries_at(graphdef, slot)]
    found = [each for each in found if _is_derivative(values.get(each[2]))]
    if slot[1] == FILL_LEAF and graphdef.leaves[slot[2]][0] is not State:
        cls, meta = graphdef.leaves[slot[2]]
        return cls._make(values[found[0][2]], meta, level) if found else None
    paths, kinds = tuple(path for path, _, _ in found), tuple(kind for _, kind, _ in found)
    return State._make([values[entry] for *_, entry in found], StateDef.of(paths, kinds), level)


def _is_derivative(value: Any) -> bool:
    """Tells whether there is the derivative of a float in a value."""
    leaves = jax.tree.leaves(value)
    return any(getattr(leaf, "dtype", None) != jax.dtypes.float0 for leaf in leaves)


def numbered(tree: Any) -> Any:
    """Returns a tree of that structure with a number for each leaf, objects being one."""
    return jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))


def spread(given: Any, tree: Any, what: str) -> list[Any]:
    """Returns per leaf of `tree` its derivative, None for zero.

    Args:
      given: A derivative, with None in the place of whatever has none.
      tree: The structure of what it is the derivative of, objects being one leaf each.
      what: What is given, for messages.

    Raises:
      StructureError: They differ in structure.
    """
    whole = numbered(tree)
    found: list[Any] = [None] * tree.num_leaves

    def give(derivative: Any, below: Any) -> bool:
        if derivative is None:
            return True
        if type(below) is int:
            found[below] = derivative
            return True
        ours, theirs = map(_one_level, (below, derivative))
        if type(derivative) is not type(below) or ours is None or theirs is None:
            return False
        (parts, about), (wholes, like) = theirs, ours
        return len(parts) == len(wholes) and about == like and all(map(give, parts, wholes))

    if not give(given, whole):
        raise StructureError(
            f"{what} has the structure {jax.tree.structure(given)}, expected "
            f"{jax.tree.structure(whole)}. In the place of an object stands a State, an object "
            "like it, or None; None stands wherever the derivative is zero."
        )
    return found


def _one_level(tree: Any) -> tuple[list[Any], Any] | None:
    found = jax.tree_util.default_registry.flatten_one_level(tree)
    return None if found is None else (list(found[0]), found[1])


def entries_of(
    given: Any,
    graphdef: GraphDef[Any],
    slot: Slot,
    avals: Mapping[Entry, Any],
    what: str,
    place: str,
) -> Found:
    """Returns by entry the derivative of one object.

    Args:
      given: A State, of which leaves may be missing; an object of the same structure, whose float
        leaves are the derivatives; for a Variable also an array; or None.
      graphdef: Of the graph in which the entries count.
      slot: What holds the object there.
      avals: The types of the entries that a derivative may be given for.
      what: What is given, for messages.
      place: How messages call the object.

    Raises:
      StructureError: A path is unknown, or has no derivative.
      ValueError: A value has another shape or dtype.
      TypeError: It is something else.
    """
    if given is None:
        return {}
    known = {path: entry for path, _, entry in entries_at(graphdef, slot)}
    leaves = _leaves_of(given, known, what, place)
    is_object = kind_of(given) == OBJECT
    if is_object and leaves.keys() != known.keys():
        unlike = sorted(leaves.keys() ^ known.keys(), key=repr)[0]
        raise StructureError(
            f"{what} for {place} is a {type(given).__name__} of another structure: only one of "
            f"the two has {format_path(unlike, place)}. Give an object of the same structure, "
            "such as a clone, or a State."
        )
    found: Found = {}
    for path, value in leaves.items():
        entry, where = known.get(path), format_path(path, place)
        if entry is None:
            names = ", ".join(format_path(each, place) for each in known)
            raise StructureError(f"{what} has {where}, which does not exist; there is {names}.")
        if entry in avals:
            found[entry] = checked(value, avals[entry], f"{what} for {where}")
        elif not is_object and any(map(is_inexact, jax.tree.leaves(value))):
            raise StructureError(f"{what} has {where}, which is not differentiated: leave it out.")
    return found


def _leaves_of(given: Any, known: Mapping[Path, Entry], what: str, place: str) -> dict[Path, Any]:
    kind = kind_of(given)
    if kind == OBJECT or isinstance(given, Mapping):
        pairs = walk(state(given) if kind == OBJECT else given, known)
        return {path: x._value if isinstance(x, Variable) else x for path, x in pairs}
    if kind == VARIABLE:
        return {(): given._value}
    if known.keys() == {()}:
        return {(): given}
    raise TypeError(
        f"{what} for {place} is a {type(given).__name__}. Expected a State of its leaves, an "
        "object of the same structure, or None."
    )


def checked(value: Any, avals: Any, what: str) -> Any:
    """Returns a derivative of the structure of `avals`, None standing for zero.

    Raises:
      StructureError: The structures differ.
      ValueError: A value has another shape or dtype.
      TypeError: A value is no array.
    """
    if value is None:
        return None
    leaves, tree = jax.tree_util.tree_flatten(avals)
    found, found_tree = jax.tree_util.tree_flatten(value, is_leaf=lambda x: x is None)
    if found_tree != tree:
        raise StructureError(f"{what} has the structure {found_tree}, expected {tree}.")
    parts = [_checked_array(x, aval, what) for x, aval in zip(found, leaves, strict=True)]
    return jax.tree_util.tree_unflatten(tree, parts)


def _checked_array(value: Any, aval: Any, what: str) -> Any:
    """Returns the derivative of one array; None for zero, and for an integer."""
    if value is None or not _is_float(aval):
        return None
    if not is_number(value):
        raise TypeError(f"{what} is a {type(value).__name__}, expected {_text(aval)}.")
    dtype = jnp.result_type(value)
    is_weak = getattr(value, "weak_type", not hasattr(value, "dtype"))
    if jnp.shape(value) != aval.shape or (dtype != aval.dtype and not is_weak):
        raise ValueError(f"{what} is {type_text(value)}, expected {_text(aval)}.")
    return value if dtype == aval.dtype else jnp.asarray(value, aval.dtype)


def _is_float(aval: Any) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.inexact)


def _text(aval: Any) -> str:
    return f"{aval.dtype}{list(aval.shape)}"


def added(first: Any, second: Any) -> Any:
    """Returns the sum of two derivatives, None being zero."""
    if first is None or second is None:
        return second if first is None else first
    if jax.tree_util.all_leaves([first]):
        return first + second
    return jax.tree.map(added, first, second, is_leaf=lambda x: x is None)

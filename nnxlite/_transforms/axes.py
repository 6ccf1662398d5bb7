"""What each leaf does in a transform, said by ordinary JAX prefixes and by filters.

A prefix of the arguments may end at an object with one role for all its leaves, with a
`StateAxes`, `StateSharding` or `DiffState` that gives roles by filter, or with a State of roles
by path. `roles_of` spreads such a prefix over arguments and leaves.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import (
    Filter,
    PathIn,
    Predicate,
    filters_to_predicates,
    to_predicate,
)
from nnxlite._core.graphdef import GraphDef
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.split import state
from nnxlite._core.state import State
from nnxlite._core.variable import Variable
from nnxlite._transforms.packing import opaque_flatten

Entry = tuple[int, int | None]
"""A leaf number, and for the leaves of a State that is an attribute the position inside it."""


class Carry:
    """Stands in `in_axes` and `out_axes` of `scan` for what one step hands to the next."""


def is_carry(role: Any) -> bool:
    """Tells whether a role is `Carry`, the class or an instance."""
    return role is Carry or isinstance(role, Carry)


class _ByFilter:
    """Roles by filter, in order; the first filter that matches a leaf counts."""

    __slots__ = ("filters", "predicates", "roles")

    def __init__(
        self, roles: State | Mapping[Filter, Any] | Iterable[tuple[Filter, Any]], /
    ) -> None:
        if isinstance(roles, State):
            paths: dict[Any, list[Path]] = {}
            for path, leaf in roles.flat_state():
                paths.setdefault(_value_of(leaf), []).append(path)
            pairs: list[Any] = [(PathIn(*found), role) for role, found in paths.items()]
        else:
            pairs = list(roles.items() if isinstance(roles, Mapping) else roles)
        self.filters: tuple[Filter, ...] = tuple(
            tuple(f) if isinstance(f, list) else f for f, _ in pairs
        )
        self.roles = tuple(role for _, role in pairs)
        self.predicates = filters_to_predicates(self.filters)

    def role(self, path: Path, leaf: Any) -> Any:
        """Returns the role of one leaf."""
        for predicate, role in zip(self.predicates, self.roles, strict=True):
            if predicate(path, leaf):
                return role
        raise StructureError(
            f"{type(self).__name__} has no filter for {format_path(path)} "
            f"({type(leaf).__name__}). Add one, or end with `...` for the rest."
        )

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is type(self)
            and isinstance(other, _ByFilter)
            and (self.filters, self.roles) == (other.filters, other.roles)
        )

    def __hash__(self) -> int:
        return hash((type(self), self.filters, self.roles))

    def __repr__(self) -> str:
        pairs = ", ".join(
            f"{f!r}: {role!r}" for f, role in zip(self.filters, self.roles, strict=True)
        )
        return f"{type(self).__name__}({{{pairs}}})"


class StateSharding(_ByFilter):
    """Shardings of an object's leaves by filter, for `jit`, or their specs for `shard_map`.

    Args:
      roles: A mapping, or pairs, of filter and sharding (or None, to leave it to JAX); or a State
        with a sharding for each path.

    Example:
      >>> nnx.StateSharding({nnx.Param: None, ...: None})
      StateSharding({<class 'nnxlite._core.variable.Param'>: None, Ellipsis: None})
    """

    __slots__ = ()

    @property
    def shardings(self) -> tuple[Any, ...]:
        """The shardings, in the order of the filters."""
        return self.roles


class StateAxes(_ByFilter):
    """Axes of an object's leaves by filter, for `vmap` and `scan`.

    Args:
      roles: A mapping, or pairs, of filter and axis: an int (mapped), None (broadcast: the same for
        all, and not to be written), or for `scan` also `Carry`. Or a State with an axis for each
        path.

    Example:
      >>> nnx.StateAxes({nnx.Param: 0, ...: None}).axes
      (0, None)
    """

    __slots__ = ()

    @property
    def axes(self) -> tuple[Any, ...]:
        """The axes, in the order of the filters."""
        return self.roles


@dataclasses.dataclass(frozen=True)
class DiffState:
    """Which leaves of an argument `grad` differentiates.

    Attributes:
      argnum: The position of the argument.
      filter: Which of its leaves; the others are constants.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> only_bias = nnx.DiffState(0, nnx.PathContains("bias"))
      >>> list(nnx.grad(lambda m: m(jnp.ones((1, 2))).sum(), argnums=only_bias)(model))
      ['bias']
    """

    argnum: int
    filter: Filter

    @property
    def predicate(self) -> Predicate:
        """The filter as a predicate."""
        return to_predicate(self.filter)


def _is_role(value: Any) -> bool:
    return value is None or isinstance(value, _ByFilter | State) or kind_of(value) == OBJECT


def spread(prefix: Any, tree: Any, name: str) -> list[Any]:
    """Returns the role of each leaf of `tree`, objects being one leaf each.

    Args:
      prefix: A prefix of `tree` whose leaves are roles; None is a role.
      tree: Arguments or results.
      name: What the prefix is called in the error message.

    Raises:
      StructureError: `prefix` is not a prefix of `tree`.
    """
    roles: list[Any] = []

    def give(role: Any, below: Any) -> None:
        roles.extend([role] * len(opaque_flatten(below)[0]))

    try:
        jax.tree_util.tree_map(give, prefix, tree, is_leaf=_is_role)
    except (ValueError, TypeError) as error:
        raise StructureError(f"{name} is not a prefix of what it applies to: {error}") from None
    return roles


def leaf_roles(
    role: Any, entries: Sequence[tuple[Any, Path]], leaf_at: Callable[[Any], Any]
) -> dict[Any, Any]:
    """Returns per leaf number of one object its role.

    Args:
      role: One role for all, roles by filter, or a State or object of roles by path.
      entries: Number and path of each leaf of the object.
      leaf_at: Gives the leaf itself, for filters.
    """
    if isinstance(role, _ByFilter):
        return {number: role.role(path, leaf_at(number)) for number, path in entries}
    if kind_of(role) == OBJECT:
        role = state(role)
    if isinstance(role, State):
        by_path = dict(role.flat_state())
        return {number: _role_at(by_path, path) for number, path in entries}
    return {number: role for number, _ in entries}


def _role_at(by_path: Mapping[Path, Any], path: Path) -> Any:
    """Returns the role at a path, or at the longest beginning of it, as in a prefix."""
    for size in range(len(path), 0, -1):
        if path[:size] in by_path:
            return _value_of(by_path[path[:size]])
    return None


def _value_of(role: Any) -> Any:
    return role._value if isinstance(role, Variable) else role


def entry_roles(
    graphdef: GraphDef[Any], paths: Mapping[int, Path], leaf_at: Callable[[int], Any], role: Any
) -> list[tuple[Entry, Path, Any]]:
    """Returns entry, path and role of what hangs below one object.

    Args:
      graphdef: Of the graph that the leaf numbers count in.
      paths: Per leaf number its path from the object.
      leaf_at: Gives the leaf itself: a Variable, a State or an array.
      role: As for `leaf_roles`.
    """
    leaves: dict[Entry, Any] = {}
    entries: list[tuple[Entry, Path]] = []
    for number, path in paths.items():
        leaf = leaf_at(number)
        if graphdef.leaves[number][0] is State:
            for inner, (inner_path, variable) in enumerate(leaf.flat_state()):
                entries.append(((number, inner), (*path, *inner_path)))
                leaves[number, inner] = variable
        else:
            entries.append(((number, None), path))
            leaves[number, None] = leaf
    roles = leaf_roles(role, entries, leaves.__getitem__)
    return [(entry, path, roles[entry]) for entry, path in entries]

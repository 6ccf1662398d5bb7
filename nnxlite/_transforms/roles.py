"""Roles: what `vmap` and `scan` do with each thing that enters, an axis or `Carry` or None.

Leaves are counted in *entries*: a Variable or array is one, a State that is an attribute is one per
Variable in it. The role of an entry is an int (mapped along that axis), None (broadcast: the same
for all), or `Carry`.
"""

import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.graphdef import ARRAY_LEAF, GraphDef
from nnxlite._core.state import State
from nnxlite._transforms.axes import (
    Carry,
    Entry,
    StateAxes,
    StateSharding,
    entry_roles,
    is_carry,
    spread,
)
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.crossing import Crossing


class Roles(NamedTuple):
    """The roles of everything that goes into a mapped function.

    Attributes:
      entries: The entries of the object leaves, in order.
      axes: Their roles.
      rest: The roles of the plain arguments.
    """

    entries: list[Entry]
    axes: list[Any]
    rest: list[Any]

    def by_entry(self) -> dict[Entry, Any]:
        """Returns the role of each entry."""
        return dict(zip(self.entries, self.axes, strict=True))


class RoleKind(NamedTuple):
    """What the roles of one family of transforms are.

    Attributes:
      option: The argument of the transform that gives them.
      named: The role of keyword arguments.
      of_array: What the role of an array may be, for messages.
    """

    option: str
    named: Any
    of_array: str


AXES = RoleKind("in_axes", 0, "an int or None")


def roles_of(
    binding: Binding,
    leaves: list[Any],
    in_axes: Any,
    bound: Sequence[str] = (),
    kind: RoleKind = AXES,
) -> Roles:
    """Spreads `in_axes` over the positional arguments; keyword arguments are mapped along axis 0.

    Args:
      binding: The arguments.
      leaves: Their leaves.
      in_axes: A prefix of the positional arguments.
      bound: Keyword arguments that a partial brought along: they are the same for all.
      kind: What the roles are, if they are not axes.

    Raises:
      StructureError: `in_axes` is no prefix, or a leaf that is reached in two ways would have two
        roles.
    """
    crossing, title = binding.crossing, binding.lift.title
    args, kwargs = jax.tree_util.tree_unflatten(crossing.treedef, leaves)
    if isinstance(in_axes, tuple) and len(in_axes) != len(args):
        raise StructureError(
            f"{title}: {kind.option} has {len(in_axes)} entries, but the call has {len(args)} "
            "positional arguments. Give one entry for each."
        )
    roles = spread_over(in_axes, args, kind.option, title)
    of_named = {name: None if name in bound else kind.named for name in kwargs}
    roles += spread_over(of_named, kwargs, kind.option, title)
    found: dict[Entry, tuple[Any, int, Path]] = {}
    for root, position in enumerate(crossing.roots):
        paths, role = _root_paths(crossing, root), roles[position]
        for entry, path, given in entry_roles(crossing.graphdef, paths, binding.leaf_at, role):
            axis = given if kind is not AXES else _plain(given, crossing, root, path, title)
            before = found.setdefault(entry, (axis, root, path))
            if before[0] != axis:
                raise StructureError(
                    f"{title}: {_place(crossing, *before[1:])} and {_place(crossing, root, path)} "
                    f"are the same leaf, but {kind.option} gives it {show(before[0])} in one "
                    f"place and {show(axis)} in the other. Give both the same."
                )
    entries = entries_of(crossing.graphdef)
    rest = [roles[n] for n in crossing.rest]
    for position, role in zip(crossing.rest, rest, strict=True):
        if isinstance(role, StateAxes | StateSharding):
            raise TypeError(
                f"{title}: {kind.option} has {type(role).__name__} for {crossing.place(position)}, "
                f"which is an array. That is for objects; for an array use {kind.of_array}."
            )
    return Roles(entries, [found[entry][0] for entry in entries], rest)


def spread_over(prefix: Any, tree: Any, name: str, title: str) -> list[Any]:
    """As `spread`, with `Carry` for its instances, and an error in the terms of the transform.

    Raises:
      StructureError: `prefix` is no prefix of `tree`.
    """
    try:
        roles = spread(prefix, tree, name)
    except StructureError:
        what = "the function returned" if name.startswith("out_") else "the arguments are"
        raise StructureError(
            f"{title}: {name} is {show(prefix)}, but {what} {_outline(tree)}. Give one entry for "
            "all, or a tuple, list or dict of the same structure."
        ) from None
    return [Carry if is_carry(role) else role for role in roles]


def show(role: Any) -> str:
    """Writes roles as a user does."""
    if isinstance(role, tuple):
        return "(" + ", ".join(map(show, role)) + ("," if len(role) == 1 else "") + ")"
    return "nnx.Carry" if is_carry(role) else repr(role)


def _outline(tree: Any) -> str:
    """Writes a tree with the type of each leaf in its place."""
    if type(tree) in (tuple, list):
        inner = ", ".join(map(_outline, tree))
        return f"[{inner}]" if type(tree) is list else f"({inner}{',' if len(tree) == 1 else ''})"
    if type(tree) is dict:
        return "{" + ", ".join(f"{key!r}: {_outline(x)}" for key, x in tree.items()) + "}"
    if tree is None:
        return "None"
    return jax.typeof(tree).str_short() if isinstance(tree, jax.Array) else type(tree).__name__


def _plain(role: Any, crossing: Crossing, root: int, path: Path, title: str) -> Any:
    if role is None or type(role) is int:
        return role
    if is_carry(role):
        return Carry
    try:
        return operator.index(role)
    except TypeError:
        raise TypeError(
            f"{title}: in_axes has {role!r} for {_place(crossing, root, path)}. Give an int, None, "
            "or in nnx.scan nnx.Carry."
        ) from None


def _place(crossing: Crossing, root: int, path: Path) -> str:
    return format_path(path, crossing.argument_name(root))


def _root_paths(crossing: Crossing, root: int) -> dict[int, Path]:
    cache = crossing.graphdef.skeleton.cache
    found = cache.get(("root paths", root))
    if found is None:
        found = cache["root paths", root] = crossing.root_entries(root)
    return found


def entries_of(graphdef: GraphDef[Any]) -> list[Entry]:
    """Lists the entries of a graph."""
    found: list[Entry] = []
    for number, (cls, meta) in enumerate(graphdef.leaves):
        if cls is State:
            found.extend((number, inner) for inner in range(len(meta.paths)))
        else:
            found.append((number, None))
    return found


def entry_place(crossing: Crossing, entry: Entry) -> str:
    """Writes where an entry is and what it is."""
    number, inner = entry
    kind, path = crossing.graphdef.leaves[number], crossing.leaf_path(number)
    if inner is not None:
        path, kind = format_path(kind[1].paths[inner], path), kind[1].leaves[inner]
    return f"{path} ({'array' if kind is ARRAY_LEAF else kind[0].__name__})"


def by_entry(values: Sequence[Any], entries: Sequence[Entry]) -> list[Any]:
    """Returns the value of each entry."""
    return [values[n] if inner is None else values[n][inner] for n, inner in entries]


def by_leaf(given: Sequence[Any], entries: Sequence[Entry], size: int) -> list[Any]:
    """Puts the values of entries together to those of leaves; the inverse of `by_entry`."""
    values: list[Any] = [[] for _ in range(size)]
    for (number, inner), value in zip(entries, given, strict=True):
        if inner is None:
            values[number] = value
        else:
            values[number].append(value)
    return values


def mapped_size(
    binding: Binding, roles: Roles, values: Sequence[Any], rest: Sequence[Any], given: int | None
) -> int | None:
    """Returns the size of the mapped axes; None if nothing is mapped and no size was given.

    Raises:
      ValueError: Two of them differ, or one is not there; the message names both places.
    """

    def place(number: int) -> str:
        if number < len(values):
            return entry_place(binding.crossing, roles.entries[number])
        return binding.crossing.place(binding.crossing.rest[number - len(values)])

    def described(mapped: tuple[int, tuple[int, ...], int] | None) -> str:
        if mapped is None:
            return "the size given"
        number, shape, axis = mapped
        return f"{place(number)} of shape {shape} along axis {axis}"

    size = given
    first: tuple[int, tuple[int, ...], int] | None = None
    for number, (role, value) in enumerate(
        zip([*roles.axes, *roles.rest], [*values, *rest], strict=True)
    ):
        if not isinstance(role, int):
            continue
        for leaf in jax.tree.leaves(value):
            shape = getattr(leaf, "shape", ())
            if not -len(shape) <= role < len(shape):
                raise ValueError(
                    f"{binding.lift.title} maps {place(number)} along axis {role}, but its shape "
                    f"is {shape}. Give it another axis in in_axes, or None to broadcast it."
                )
            if size is None:
                size, first = shape[role], (number, shape, role)
            elif size != shape[role]:
                raise ValueError(
                    f"{binding.lift.title} maps axes of different sizes: {size} "
                    f"({described(first)}) and {shape[role]} ({described((number, shape, role))})."
                )
    return size

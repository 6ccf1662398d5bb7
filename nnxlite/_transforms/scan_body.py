"""The body of a `scan`: what is carried, what is sliced, what may change.

JAX sees one function of a carry and a slice. The carry holds whatever is not sliced, also what is
broadcast: what the body hands through unchanged, JAX makes a constant of the loop. Changed values
that are not carried leave beside the result, stacked.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._core.errors import StructureError, format_path
from nnxlite._core.graphdef import FILL_NODE, Leaf
from nnxlite._core.state import State
from nnxlite._transforms.axes import Carry, Entry, StateAxes, is_carry
from nnxlite._transforms.changes import Emission, Frame, emissions, structure_change
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.mapped import (
    AxisNames,
    Rider,
    array_places,
    array_roles,
    broadcast_error,
)
from nnxlite._transforms.packing import OutDef, same_value
from nnxlite._transforms.roles import Roles, by_leaf, entry_place

_NUMBERS = (jax.Array, np.ndarray, np.generic, int, float, complex)


def is_flag(value: Any) -> bool:
    """Tells whether an argument that is the same for all steps is a constant of the body."""
    return isinstance(value, bool) or not (
        isinstance(value, _NUMBERS) or hasattr(value, "__jax_array__")
    )


class Split:
    """Which of a list of things go by the carry, and which are sliced along which axis."""

    def __init__(self, roles: Sequence[Any]) -> None:
        self.roles = list(roles)

    def carried(self, things: Sequence[Any]) -> list[Any]:
        """Returns what is carried or broadcast."""
        return [x for x, r in zip(things, self.roles, strict=True) if not isinstance(r, int)]

    def sliced(self, things: Sequence[Any]) -> list[Any]:
        """Returns what is sliced, with its axis in front."""
        return [
            jax.tree.map(lambda a, r=r: jnp.moveaxis(jnp.asarray(a), r, 0), x) if r else x
            for x, r in zip(things, self.roles, strict=True)
            if isinstance(r, int)
        ]

    def joined(self, carried: Sequence[Any], sliced: Sequence[Any]) -> list[Any]:
        """Puts both together again, in order."""
        a, b = iter(carried), iter(sliced)
        return [next(b) if isinstance(r, int) else next(a) for r in self.roles]


def moved_back(value: Any, axis: int) -> Any:
    """Moves the axis of the steps from the front to where it is wanted."""
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, axis), value) if axis else value


class Exit(NamedTuple):
    """What one traced body says of itself.

    Attributes:
      definition: Of the result and the changes.
      frames: How the changes are put together.
      emissions: What leaves beside the result.
      result_roles: Per leaf of the result `Carry` or an axis.
      axes: Per emission `Carry` or an axis.
      carried_as: Per emission that is carried, the entry of the arguments in whose place.
    """

    definition: OutDef
    frames: tuple[Frame, ...]
    emissions: tuple[Emission, ...]
    result_roles: tuple[Any, ...]
    axes: tuple[Any, ...]
    carried_as: tuple[Entry | None, ...]


class Scanned(Protocol):
    """What the body has to know of the scan."""

    metadata: Mapping[str, Any]
    out_axes: Any

    @property
    def title(self) -> str: ...


class ScanBody:
    """The body of a scan, for one crossing; JAX knows it again by its identity.

    Attributes:
      loops: What a transform made of the body, to be known again as well; None at first.
    """

    loops: Any = None

    def __init__(
        self,
        scanned: Scanned,
        crossing: Crossing,
        roles: Roles,
        in_axes: Any,
        flags: Mapping[int, Any],
    ) -> None:
        self.title, self.metadata = scanned.title, scanned.metadata
        self.out_axes, self.roles, self.flags = scanned.out_axes, roles, flags
        self.graphdef, self.pure, self.crossing = crossing.graphdef, crossing.pure, crossing
        self.entries = Split(roles.axes)
        self.rest = Split(self.without_flags(roles.rest))
        self.carry_tree = _carry_tree(crossing, in_axes)

    def without_flags(self, rest: Sequence[Any]) -> list[Any]:
        """Returns the plain arguments that JAX sees."""
        return [x for n, x in enumerate(rest) if n not in self.flags]

    def _with_flags(self, rest: Sequence[Any]) -> list[Any]:
        given = iter(rest)
        size = len(self.roles.rest)
        return [self.flags[n] if n in self.flags else next(given) for n in range(size)]

    def carried_arguments(self, carry_rest: list[Any]) -> list[Any]:
        """Returns the plain arrays that are Carry, without those that are broadcast."""
        roles = self.rest.carried(self.rest.roles)
        return [x for x, role in zip(carry_rest, roles, strict=True) if role is Carry]

    def __call__(self, carry: Any, xs: Any) -> Any:
        carry_values, carry_rest, same_extras = carry
        extras = _joined_extras(same_extras, xs[2])
        flat = self.entries.joined(carry_values, xs[0])
        rest = self._with_flags(self.rest.joined(carry_rest, xs[1]))
        inside = by_leaf(flat, self.roles.entries, len(self.graphdef.leaves))
        names = AxisNames(self.crossing, self.roles, self.out_axes, self.metadata, self.title)
        out = self.pure(inside, rest, extras, names)
        definition, roles = out.definition, names.result_roles
        self._check_structure(definition)
        frames, given, parts = emissions(self.graphdef, out, inside)
        axes = tuple(names.axis_of(emission) for emission in given)
        for emission, axis in zip(given, axes, strict=True):
            if axis is None and emission.old is not None:
                raise broadcast_error(self.title, self.crossing, emission.old)
        self._check_stacked(definition, roles, given, axes)
        replaced = self._check_carry(definition, out.arrays, rest)
        carried_as = self._carried_as(given, axes, replaced)
        of_arrays = array_roles(definition, roles)
        next_rest = self._next_rest(carry_rest, of_arrays, out.arrays)
        next_values = self._next_values(carry_values, carried_as, parts)
        stacked = [x for x, r in zip(out.arrays, of_arrays, strict=True) if r is not Carry]
        emitted = [x for x, axis in zip(parts, axes, strict=True) if axis is not Carry]
        exit_ = Exit(definition, frames, given, tuple(roles), axes, carried_as)
        return (next_values, next_rest, same_extras), (stacked, emitted, out.extras, Rider(exit_))

    def _check_structure(self, definition: OutDef) -> None:
        if definition.update is None:
            return
        change = structure_change(self.crossing, definition.update)
        if change is not None:
            raise StructureError(
                f"{self.title}: {change} in the loop, which is compiled once for all steps: only "
                "values may change. Make the structure before the loop."
            )

    def _check_stacked(
        self,
        definition: OutDef,
        roles: Sequence[Any],
        given: Sequence[Emission],
        axes: Sequence[Any],
    ) -> None:
        """Raises unless what each step makes anew has an axis to be stacked along."""
        wrong = [
            array_places(definition)[n]
            for n, role in enumerate(array_roles(definition, roles))
            if role is None or isinstance(role, StateAxes)
        ]
        wrong += [
            "an object in the result"
            for emission, axis in zip(given, axes, strict=True)
            if axis is None and emission.old is None
        ]
        if wrong:
            raise ValueError(
                f"{self.title}: out_axes has no axis for {wrong[0]}, which each step makes anew. "
                "Give an int, the axis along which the steps are stacked."
            )

    def _next_rest(
        self, carry_rest: list[Any], of_arrays: list[Any], arrays: list[Any]
    ) -> list[Any]:
        new = iter([x for x, role in zip(arrays, of_arrays, strict=True) if role is Carry])
        roles = self.rest.carried(self.rest.roles)
        return [
            next(new) if role is Carry else x for x, role in zip(carry_rest, roles, strict=True)
        ]

    def _next_values(
        self, carry_values: list[Any], carried_as: Sequence[Entry | None], parts: Sequence[Any]
    ) -> list[Any]:
        new = dict(zip(carried_as, parts, strict=True))
        next_values = []
        for entry, before in zip(
            self.entries.carried(self.roles.entries), carry_values, strict=True
        ):
            after = new.get(entry, before)
            if not same_value(after, before):
                self._check_same_type(entry, before, after)
            next_values.append(after)
        return next_values

    def _carried_as(
        self, given: Sequence[Emission], axes: Sequence[Any], replaced: Mapping[int, int]
    ) -> tuple[Entry | None, ...]:
        """Returns per emission the entry in whose place it is carried; None if it is stacked."""
        found: list[Entry | None] = []
        for emission, axis in zip(given, axes, strict=True):
            entry = emission.old
            if entry is None and emission.new is not None and emission.new[0] in replaced:
                entry = (replaced[emission.new[0]], emission.new[1])
            found.append(entry if axis is Carry else None)
        carried = [entry for entry in found if entry is not None]
        for entry in carried:
            if carried.count(entry) > 1:
                raise StructureError(
                    f"{self.title}: {entry_place(self.crossing, entry)} is written in a State that "
                    "is carried, and another State is returned in its place. Return the one that "
                    "was written, or write none."
                )
        return tuple(found)

    def _check_carry(
        self, definition: OutDef, arrays: list[Any], rest: list[Any]
    ) -> dict[int, int]:
        """Raises unless what is carried out is like what was carried in.

        Returns:
          Per State that takes the place of a carried one, its number after the call and that one's
          before. States are values there, as arrays are.
        """
        replaced: dict[int, int] = {}
        if self.carry_tree is None:
            return replaced
        size = definition.tree.num_leaves
        spec = definition.spec or (None,) * size
        numbers = jax.tree_util.tree_unflatten(definition.tree, list(range(size)))
        after = _carried_part(numbers, self.out_axes)
        after_leaves, after_tree = jax.tree_util.tree_flatten(after)
        before_tree, positions = self.carry_tree
        if before_tree != after_tree:
            raise StructureError(
                f"{self.title}: the carry has to keep its structure. Before the step it is "
                f"{_outline(before_tree)}, after it {_outline(after_tree)}."
            )
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(after)]
        array_numbers = {n: i for i, n in enumerate(n for n in range(size) if spec[n] is None)}
        rest_numbers = {position: i for i, position in enumerate(self.crossing.rest)}
        for path, number, position in zip(paths, after_leaves, positions, strict=True):
            place = "carry" + jax.tree_util.keystr(path)
            is_object = position in self.crossing.roots
            if is_object != (spec[number] is not None):
                sides = ("an object", "an array") if is_object else ("an array", "an object")
                raise StructureError(
                    f"{self.title}: {place} is {sides[0]} before the step and {sides[1]} after "
                    "it. Return what came in, in the same place."
                )
            if is_object:
                replaced |= self._check_same_object(place, definition, spec[number], position)
            else:
                before = rest[rest_numbers[position]]
                self._check_same_type(place, before, arrays[array_numbers[number]])
        return replaced

    def _check_same_object(
        self, place: str, definition: OutDef, entry: Any, position: int
    ) -> dict[int, int]:
        _, how, payload = self.graphdef.skeleton.roots[self.crossing.roots.index(position)]
        update = definition.update
        if update is None:
            found = entry
        else:
            _, how_out, number = update.graphdef.skeleton.roots[update.first_output + entry]
            is_node = how_out == FILL_NODE
            found = (is_node, (update.nodes if is_node else update.leaves)[number])
            if found == (False, -1) and how != FILL_NODE:
                before, after = self.graphdef.leaves[payload], update.graphdef.leaves[number]
                if before[0] is after[0] is State:
                    if before != after:
                        raise StructureError(
                            f"{self.title}: {place} is a State with {_entries(before)} before the "
                            f"step and with {_entries(after)} after it. A carried value keeps its "
                            "structure."
                        )
                    return {number: payload}
        if found != (how == FILL_NODE, payload):
            raise StructureError(
                f"{self.title}: {place} is another object after the step than before it. Carry the "
                "same object and write its Variables, or carry its State (nnx.split), which is a "
                "value."
            )
        return {}

    def _check_same_type(self, where: str | Entry, before: Any, after: Any) -> None:
        before_leaves, before_tree = jax.tree_util.tree_flatten(before)
        after_leaves, after_tree = jax.tree_util.tree_flatten(after)
        if before_tree != after_tree:
            raise StructureError(
                f"{self.title}: the value of {self._place(where)} has structure "
                f"{_outline(before_tree)} before the step and {_outline(after_tree)} after it. A "
                "carried value keeps its structure."
            )
        for x, y in zip(before_leaves, after_leaves, strict=True):
            a, b = jax.typeof(x), jax.typeof(y)
            weak = getattr(a, "weak_type", False)
            if a.shape != b.shape or (a.dtype != b.dtype and not weak):
                raise StructureError(
                    f"{self.title}: {self._place(where)} is {a.str_short()} before the step and "
                    f"{b.str_short()} after it. A carried value keeps its shape and dtype: convert "
                    "it, or return it as an output that is stacked."
                )

    def _place(self, where: str | Entry) -> str:
        return where if isinstance(where, str) else entry_place(self.crossing, where)


def _entries(leaf: Leaf) -> str:
    return ", ".join(format_path(path, "") for path in leaf[1].paths[:8]) or "no entries"


def _outline(tree: Any) -> str:
    return str(tree).removeprefix("PyTreeDef(").removesuffix(")")


def _joined_extras(same: Any, sliced: list[Any]) -> Any:
    leaves, rider = same
    if rider.data is None:
        return ()
    tree, is_mapped = rider.data
    split = Split([0 if mapped else None for mapped in is_mapped])
    return jax.tree_util.tree_unflatten(tree, split.joined(leaves, sliced))


def _carried_part(result: Any, out_axes: Any) -> Any:
    """Returns the part of a result where `out_axes` has Carry."""
    if is_carry(out_axes):
        return result
    index = next(n for n, part in enumerate(out_axes) if is_carry(part))
    return result[index]


def _carry_tree(crossing: Crossing, in_axes: Any) -> tuple[Any, list[int]] | None:
    """Returns the structure of the carried argument, and the positions of its leaves."""
    if not isinstance(in_axes, tuple) or not any(map(is_carry, in_axes)):
        return None
    size = crossing.treedef.num_leaves
    args, _ = jax.tree_util.tree_unflatten(crossing.treedef, list(range(size)))
    index = next(n for n, part in enumerate(in_axes) if is_carry(part))
    # Each object stands as a number here: both sides are compared with objects as leaves.
    positions, tree = jax.tree_util.tree_flatten(args[index])
    return tree, positions

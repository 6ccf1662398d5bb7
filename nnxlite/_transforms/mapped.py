"""What `vmap` and `scan` share: an axis for each leaf, and names of axes that come and go.

Leaves are counted in *entries*: a Variable or array is one, a State that is an attribute is one per
Variable in it. Each entry of the arguments has a role: an int (mapped along that axis), None
(broadcast), or `Carry`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxlite._core import sharding
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.extras import TRAVELLING, only_travelling
from nnxlite._core.graph import flatten
from nnxlite._core.graphdef import (
    ARRAY_LEAF,
    FILL_LEAF,
    FILL_METHOD,
    FILL_NODE,
    FILL_VALUE,
    GraphDef,
    Slot,
    leaf_paths,
    thaw_key,
)
from nnxlite._core.kinds import STATE, kind_of
from nnxlite._core.state import State
from nnxlite._core.trace import Opaque
from nnxlite._core.variable import Variable
from nnxlite._transforms.axes import Carry, StateAxes, leaf_roles, spread
from nnxlite._transforms.lift import (
    Binding,
    Crossing,
    Out,
    OutDef,
    Update,
    opaque_flatten,
    same_value,
)

Entry = tuple[int, int | None]  # a leaf number, and a position inside a State


class Rider:
    """Carries static data out of a traced function, in the structure of its result."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


jax.tree_util.register_pytree_node(
    Rider, lambda rider: ((), rider.data), lambda data, _: Rider(data)
)


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

    def of(self, entry: Entry) -> Any:
        """Returns the role of one entry."""
        return self.axes[self.entries.index(entry)]


def roles_of(binding: Binding, leaves: list[Any], in_axes: Any) -> Roles:
    """Spreads `in_axes` over the positional arguments; keyword arguments are mapped along axis 0.

    Raises:
      StructureError: A Variable that is reached in two ways would have two axes.
    """
    crossing = binding.crossing
    args, _ = jax.tree_util.tree_unflatten(crossing.treedef, leaves)
    prefix = tuple(in_axes) if isinstance(in_axes, list) else in_axes
    roles = spread(prefix, args, "in_axes")
    roles += [0] * (len(leaves) - len(roles))
    found: dict[Entry, tuple[Any, str]] = {}
    for root, position in enumerate(crossing.roots):
        for entry, path, axis in _entry_roles(binding, root, roles[position]):
            place = format_path(path, crossing.argument_name(root))
            before = found.setdefault(entry, (axis, place))
            if before[0] != axis:
                raise StructureError(
                    f"{binding.lift.title}: {before[1]} and {place} are the same leaf, but in_axes "
                    f"gives it {_show(before[0])} in one place and {_show(axis)} in the other. "
                    "Give both the same axis."
                )
    entries = entries_of(crossing.graphdef)
    return Roles(
        entries, [found[entry][0] for entry in entries], [roles[n] for n in crossing.rest]
    )


def _show(role: Any) -> str:
    return "Carry" if role is Carry else repr(role)


def _entry_roles(binding: Binding, root: int, role: Any) -> list[tuple[Entry, Path, Any]]:
    graphdef, handles = binding.crossing.graphdef, binding.plan.handles
    found: list[tuple[Entry, Path, Any]] = []
    for number, path in binding.crossing.root_entries(root).items():
        kind, handle = graphdef.leaves[number], handles[number]()
        if kind[0] is State:
            pairs = handle.flat_state()
            inner_entries = [((number, n), (*path, *p)) for n, (p, _) in enumerate(pairs)]
            given = leaf_roles(
                role, list(inner_entries), lambda entry, pairs=pairs: pairs[entry[1]][1]
            )
            found.extend((entry, inner, given[entry]) for entry, inner in inner_entries)
        else:
            leaf = handle._value if kind is ARRAY_LEAF else handle
            entry = (number, None)
            given = leaf_roles(role, [(entry, path)], lambda _, leaf=leaf: leaf)
            found.append((entry, path, given[entry]))
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
    """Returns the size of the mapped axes.

    Raises:
      ValueError: Two of them differ, or one is not there; the message names both places.
    """
    first: tuple[int, str] | None = None if given is None else (given, "the size given")
    places = [binding.crossing.leaf_path(number) for number, _ in roles.entries]
    places += [f"argument leaf {n}" for n in binding.crossing.rest]
    for role, value, place in zip(
        [*roles.axes, *roles.rest], [*values, *rest], places, strict=True
    ):
        if not isinstance(role, int):
            continue
        for leaf in jax.tree.leaves(value):
            shape = jnp.shape(leaf)
            if not -len(shape) <= role < len(shape):
                raise ValueError(
                    f"{binding.lift.title} maps {place} along axis {role}, but its shape is "
                    f"{shape}. Give it another axis in in_axes, or None to broadcast it."
                )
            size = (shape[role], f"{place} of shape {shape} along axis {role}")
            if first is None:
                first = size
            elif first[0] != size[0]:
                raise ValueError(
                    f"{binding.lift.title} maps axes of different sizes: {first[0]} "
                    f"({first[1]}) and {size[0]} ({size[1]})."
                )
    return None if first is None else first[0]


class AxisNames:
    """Takes the name of the mapped axis off Variables on the way in, and puts it on the way out.

    Also finds the axes of what the function adds: new Variables in results take those of
    `out_axes`, new attributes of arguments take axis 0.
    """

    def __init__(
        self,
        crossing: Crossing,
        roles: Roles,
        out_axes: Any,
        metadata: Mapping[str, Any],
    ) -> None:
        self.crossing, self.roles, self.out_axes = crossing, roles, out_axes
        self.metadata = metadata
        self.result_roles: list[Any] = []
        self.new_axes: dict[Entry, Any] = {}
        self.named: list[tuple[Any, Any]] = []

    def before(self, leaves: list[Any]) -> None:
        """Takes the names off the clones."""
        for variable, axis in self._variables(leaves):
            whole = variable._meta
            sharding.remove_axis(variable, axis, self.metadata)
            self.named.append((whole, variable._meta))

    def after(self, nodes: list[Any], leaves: list[Any], result: Any) -> None:
        """Puts the names on the clones and on new Variables, and notes the axes of these."""
        for (variable, axis), (whole, sliced) in zip(
            self._variables(leaves), self.named, strict=True
        ):
            if variable._meta is sliced and not _has_axis_hooks(variable):
                variable._meta = whole  # with the name it had, whatever the transform was told
            else:
                sharding.add_axis(variable, axis, self.metadata)
        outputs, _ = opaque_flatten(result)
        self.result_roles = spread(self.out_axes, result, "out_axes")
        owned = [
            leaf
            for leaf, kind in zip(leaves, self.crossing.graphdef.leaves, strict=True)
            if kind is not ARRAY_LEAF
        ]
        objects = [(x.node, r) for x, r in zip(outputs, self.result_roles, strict=True)
                   if type(x) is Opaque]
        known = {id(leaf) for leaf in owned}
        flat = flatten((*nodes, *owned, *[node for node, _ in objects]))
        skeleton = flat.graphdef.skeleton
        first = len(nodes) + len(owned)
        below_args = leaf_paths(skeleton, [((), slot) for slot in skeleton.roots[:first]])
        for offset, (_, role) in enumerate(objects):
            found = leaf_paths(skeleton, [((), skeleton.roots[first + offset])])
            for number, path in found.items():
                if number not in below_args:
                    self._note(flat.leaves[number], number, path, role)
        for number, path in below_args.items():
            if id(flat.leaves[number]) not in known:
                self._note(flat.leaves[number], number, path, 0)

    def _variables(self, leaves: list[Any]) -> list[tuple[Variable, int]]:
        found = []
        for (number, inner), axis in zip(self.roles.entries, self.roles.axes, strict=True):
            if isinstance(axis, int):
                leaf = leaves[number]
                if inner is not None:
                    leaf = leaf._flat()[1][inner]
                if _has_names(leaf):
                    found.append((leaf, axis))
        return found

    def _note(self, leaf: Any, number: int, path: Path, role: Any) -> None:
        if kind_of(leaf) == STATE:
            pairs = leaf.flat_state()
            entries = [((number, n), (*path, *p), x) for n, (p, x) in enumerate(pairs)]
        else:
            entries = [((number, None), path, leaf)]
        for entry, inner_path, variable in entries:
            if entry in self.new_axes:
                continue
            axis = role.role(inner_path, variable) if isinstance(role, StateAxes) else role
            self.new_axes[entry] = axis
            if isinstance(axis, int) and _has_names(variable):
                sharding.add_axis(variable, axis, self.metadata)


def _has_names(leaf: Any) -> bool:
    return isinstance(leaf, Variable) and bool(leaf._meta.mapping or leaf._class_hooks)


def extra_axes(
    binding: Binding,
    inputs: tuple[Any, ...],
    size: int | None,
    run: Callable[[tuple[Any, ...]], Any],
) -> tuple[Any, ...]:
    """Returns the axes of what the travelling extras hand in.

    A perturbation is mapped if the body meets it, so the body runs once abstractly to learn that.

    Args:
      binding: The arguments.
      inputs: What the extras hand in.
      size: The size of the mapped axis.
      run: Runs the mapped function abstractly, and returns what the extras hand out.
    """
    if not jax.tree.leaves(inputs):
        return tuple(None for _ in inputs)
    extras = TRAVELLING.active
    learners = [extra.learner() for extra in extras]
    with only_travelling(*learners):
        outputs = run(binding.extra_inputs())
        for learner, output in zip(learners, outputs, strict=True):
            learner.deliver(output, binding.live_nodes())
    return tuple(
        extra.axes(given, learner, size)
        for extra, given, learner in zip(extras, inputs, learners, strict=True)
    )


def _has_axis_hooks(variable: Variable) -> bool:
    return any(
        name in variable._meta.mapping or name in variable._class_hooks
        for name in ("on_add_axis", "on_remove_axis")
    )


class Emission(NamedTuple):
    """One value that leaves the mapped function beside its result.

    Attributes:
      position: Which of `Out.changed` it belongs to.
      old: The entry of the arguments that it replaces; None for something new.
      new: For something new, its entry in the graph after the call.
    """

    position: int
    old: Entry | None
    new: Entry | None


def emissions(
    graphdef: GraphDef[Any], out: Out, values: Sequence[Any]
) -> tuple[tuple[Emission, ...], list[Any]]:
    """Takes `out.changed` apart into entries, and leaves out what did not change.

    Args:
      graphdef: Of the arguments.
      out: What the pure function returned.
      values: What it was given.
    """
    update = out.definition.update
    if update is None:
        origins = [(number, None) for number in out.definition.changed]
    else:
        origins = [
            (number if number >= 0 else None, new)
            for new, (number, kept) in enumerate(zip(update.leaves, update.kept, strict=True))
            if not kept
        ]
    found: list[Emission] = []
    emitted: list[Any] = []
    for position, ((number, new), value) in enumerate(zip(origins, out.changed, strict=True)):
        is_state = isinstance(value, list)
        parts = list(enumerate(value)) if is_state else [(None, value)]
        same_paths = number is not None and (
            update is None or update.graphdef.leaves[new] == graphdef.leaves[number]
        )
        for inner, part in parts:
            if number is not None and is_state and same_paths:
                if same_value(part, values[number][inner]):
                    continue
            old = (number, inner) if number is not None and (same_paths or not is_state) else None
            found.append(Emission(position, old, None if new is None else (new, inner)))
            emitted.append(part)
    return tuple(found), emitted


def changed_values(
    definition: OutDef, given: Sequence[Emission], parts: Sequence[Any], originals: Sequence[Any]
) -> list[Any]:
    """Puts `Out.changed` together again, around the caller's values of what did not change."""
    update = definition.update
    if update is None:
        numbers = list(definition.changed)
    else:
        numbers = [n for n, kept in zip(update.leaves, update.kept, strict=True) if not kept]
    changed: list[Any] = [
        list(originals[n]) if n >= 0 and isinstance(originals[n], list) else None for n in numbers
    ]
    for emission, part in zip(given, parts, strict=True):
        entry = emission.old or emission.new
        if entry is None or entry[1] is None:
            changed[emission.position] = part
        elif emission.old is not None:
            changed[emission.position][entry[1]] = part
        else:
            changed[emission.position] = [*(changed[emission.position] or []), part]
    return changed


def broadcast_error(title: str, crossing: Crossing, number: int) -> ValueError:
    """The error for a leaf that is the same for all, and was written by one."""
    name = crossing.graphdef.leaves[number][0].__name__
    return ValueError(
        f"{title} changed {crossing.leaf_path(number)} ({name}), which is broadcast (axis None): "
        "there is one of it, and each mapped step would write its own value. Map it along an axis "
        "with nnx.StateAxes({...: axis}), carry it (in nnx.scan), or do not write it."
    )


def structure_change(crossing: Crossing, update: Update) -> str | None:
    """Names the first change of structure to what was there before; None if things were only added.

    Used by transforms that let values change, and nothing else.
    """
    before, after = crossing.graphdef, update.graphdef
    for new, number in enumerate(update.nodes):
        if number < 0:
            continue
        old_slots = {s[0]: s for s in before.skeleton.records[number].slots}
        new_slots = {s[0]: s for s in after.skeleton.records[new].slots}
        for key in sorted({*old_slots, *new_slots}, key=str):
            a, b = old_slots.get(key), new_slots.get(key)
            if a is None or b is None or _translated(b, update) != (a[1], a[2]):
                where = _node_path(crossing, number)
                verb = "added" if a is None else "removed" if b is None else "replaced"
                return f"{where}{format_path((thaw_key(key),), '')} was {verb}"
    for new, number in enumerate(update.leaves):
        if number >= 0 and after.leaves[new] != before.leaves[number]:
            return f"the metadata of {crossing.leaf_path(number)} changed"
    return None


def _translated(slot: Slot, update: Update) -> tuple[int, Any]:
    """Returns how a slot is filled, in the numbers from before the call; -1 for what is new."""
    _, how, payload = slot
    if how == FILL_LEAF:
        return how, update.leaves[payload]
    if how == FILL_NODE:
        return how, update.nodes[payload]
    if how == FILL_METHOD:
        return how, (update.nodes[payload[0]], payload[1])
    if how == FILL_VALUE:
        slots = tuple((s[0], *_translated(s, update)) for s in payload[1])
        return how, (payload[0], slots)
    return how, payload


def _node_path(crossing: Crossing, number: int) -> str:
    """Writes where a node is, from the name of the argument."""
    skeleton = crossing.graphdef.skeleton
    stack: list[tuple[Path, Slot]] = [((slot[0],), slot) for slot in reversed(skeleton.roots)]
    seen: set[int] = set()
    while stack:
        path, (_, how, payload) = stack.pop()
        slots: tuple[Slot, ...] = ()
        if how == FILL_VALUE:
            slots = payload[1]
        elif how in (FILL_NODE, FILL_METHOD):
            found = payload if how == FILL_NODE else payload[0]
            if found == number:
                return format_path(path[1:], crossing.argument_name(path[0]))
            if found not in seen:
                seen.add(found)
                slots = skeleton.records[found].slots
        stack.extend(((*path, thaw_key(slot[0])), slot) for slot in reversed(slots))
    return "an argument"

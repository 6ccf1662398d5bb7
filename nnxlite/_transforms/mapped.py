"""What `vmap` and `scan` share: axes of what the body makes, and names of axes that come and go."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nnxlite._core import sharding
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.extras import TRAVELLING, only_travelling
from nnxlite._core.graph import flatten
from nnxlite._core.graphdef import ARRAY_LEAF, leaf_paths
from nnxlite._core.kinds import STATE, kind_of
from nnxlite._core.metadata import Meta
from nnxlite._core.state import State
from nnxlite._core.trace import EAGER, Level, Opaque
from nnxlite._core.variable import Variable
from nnxlite._transforms.arguments import closed_over
from nnxlite._transforms.axes import Entry, leaf_roles
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.changes import Emission
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.packing import OutDef, opaque_flatten
from nnxlite._transforms.roles import Roles, entry_place, show, spread_over


class Rider:
    """Carries static data out of a traced function, in the structure of its result."""

    __slots__ = ("data",)

    def __init__(self, data: Any) -> None:
        self.data = data


jax.tree_util.register_pytree_node(
    Rider, lambda rider: ((), rider.data), lambda data, _: Rider(data)
)


class _Sliced(NamedTuple):
    """A Variable that lost an axis on the way in."""

    variable: Variable
    axis: int
    whole: Meta
    meta: Meta


class AxisNames:
    """Takes the name of the mapped axis off Variables on the way in, and puts it on the way out.

    Also finds the axes of what the function makes: new Variables in results take those of
    `out_axes`, new attributes of arguments take axis 0.

    Attributes:
      result_roles: Per leaf of the result, objects being one, its role.
      new_axes: The axes of new entries, numbered as in the graph after the call.
    """

    option = "out_axes"

    def __init__(
        self,
        crossing: Crossing,
        roles: Roles,
        out_axes: Any,
        metadata: Mapping[str, Any],
        title: str,
    ) -> None:
        self.crossing, self.roles, self.out_axes = crossing, roles, out_axes
        self.metadata, self.title = metadata, title
        self.old_axes = roles.by_entry()
        self.result_roles: list[Any] = []
        self.new_axes: dict[Entry, Any] = {}
        self._sliced: list[_Sliced] = []

    def before(self, leaves: list[Any]) -> None:
        """Takes the names off the clones."""
        for entry, axis in zip(self.roles.entries, self.roles.axes, strict=True):
            if not isinstance(axis, int):
                continue
            number, inner = entry
            leaf = leaves[number] if inner is None else leaves[number]._flat()[1][inner]
            if isinstance(leaf, Variable):
                whole = leaf._meta
                if _has_names(leaf):
                    sharding.remove_axis(leaf, axis, self.metadata)
                self._sliced.append(_Sliced(leaf, axis, whole, leaf._meta))

    def after(self, nodes: list[Any], leaves: list[Any], result: Any) -> None:
        """Puts the names on the clones and on new Variables, and notes the axes of these."""
        for variable, axis, whole, meta in self._sliced:
            if variable._meta is meta and not _has_axis_hooks(variable):
                variable._meta = whole  # with the name it had, whatever the transform was told
            elif _has_names(variable):
                sharding.add_axis(variable, axis, self.metadata)
        outputs, _ = opaque_flatten(result)
        self.result_roles = spread_over(self.out_axes, result, self.option, self.title)
        objects = [
            (output.node, role)
            for output, role in zip(outputs, self.result_roles, strict=True)
            if type(output) is Opaque
        ]
        self._note_new(nodes, leaves, objects)

    def axis_of(self, emission: Emission) -> Any:
        """Returns the axis along which a changed value leaves."""
        if emission.old is not None:
            return self.old_axes[emission.old]
        assert emission.new is not None, "only a changed structure has something new"
        return self.new_axes[emission.new]

    def _note_new(
        self, nodes: list[Any], leaves: list[Any], objects: Sequence[tuple[Any, Any]]
    ) -> None:
        kinds = self.crossing.graphdef.leaves
        owned = {
            id(leaf): number
            for number, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True))
            if kind is not ARRAY_LEAF
        }
        known = [leaves[number] for number in owned.values()]
        # The order in which the lift packs them, so that leaves have the same numbers.
        flat = flatten((*nodes, *known, *[node for node, _ in objects]))
        skeleton = flat.graphdef.skeleton
        first = len(nodes) + len(known)
        below_arguments = leaf_paths(skeleton, [((), slot) for slot in skeleton.roots[:first]])
        for (_, role), slot in zip(objects, skeleton.roots[first:], strict=True):
            for number, path in leaf_paths(skeleton, [((), slot)]).items():
                if number not in below_arguments:
                    self._note(flat.leaves[number], number, path, role)
        for number, path in below_arguments.items():
            leaf = flat.leaves[number]
            if id(leaf) not in owned:
                self._note(leaf, number, path, 0)
            elif kind_of(leaf) == STATE:
                self._note_state(leaf, number, owned[id(leaf)])

    def _note_state(self, state: State, number: int, old: int) -> None:
        """Notes what a State of the arguments gained."""
        before = set(self.crossing.graphdef.leaves[old][1].paths)
        for inner, (path, variable) in enumerate(state.flat_state()):
            if path not in before:
                self._name((number, inner), variable, 0)

    def _note(self, leaf: Any, number: int, path: Path, role: Any) -> None:
        if kind_of(leaf) != STATE:
            found: dict[Entry, tuple[Path, Any]] = {(number, None): (path, leaf)}
        else:
            found = {
                (number, inner): ((*path, *below), variable)
                for inner, (below, variable) in enumerate(leaf.flat_state())
            }
        paths = [(entry, at) for entry, (at, _) in found.items()]
        for entry, axis in leaf_roles(role, paths, lambda entry: found[entry][1]).items():
            if entry not in self.new_axes:
                self._name(entry, found[entry][1], axis)
            elif self.new_axes[entry] != axis:
                raise StructureError(
                    f"{self.title}: {format_path(found[entry][0], 'an object of the result')} "
                    f"({type(found[entry][1]).__name__}) is in the result twice, and {self.option} "
                    f"gives it {show(self.new_axes[entry])} in one place and {show(axis)} in the "
                    "other. Give both the same."
                )

    def _name(self, entry: Entry, leaf: Any, axis: Any) -> None:
        self.new_axes[entry] = axis
        if isinstance(axis, int) and isinstance(leaf, Variable) and _has_names(leaf):
            sharding.add_axis(leaf, axis, self.metadata)


def _has_names(variable: Variable) -> bool:
    return bool(variable._meta.mapping or variable._class_hooks)


def _has_axis_hooks(variable: Variable) -> bool:
    return any(
        name in variable._meta.mapping or name in variable._class_hooks
        for name in ("on_add_axis", "on_remove_axis")
    )


def array_roles(definition: OutDef, roles: Sequence[Any]) -> list[Any]:
    """Returns the roles of the arrays among the leaves of a result."""
    spec = definition.spec or (None,) * len(roles)
    return [role for role, entry in zip(roles, spec, strict=True) if entry is None]


def array_places(definition: OutDef) -> list[str]:
    """Writes where the arrays of a result are in it."""
    tree, spec = definition.tree, definition.spec
    numbered = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbered)]
    return [
        "the result" + jax.tree_util.keystr(path)
        for number, path in enumerate(paths)
        if spec is None or spec[number] is None
    ]


def emission_place(crossing: Crossing, emission: Emission, definition: OutDef) -> str:
    """Writes where something is that leaves beside the result, and what it is."""
    if emission.old is not None or emission.new is None or definition.update is None:
        return entry_place(crossing, emission.old or (0, None))
    graphdef = definition.update.graphdef
    kind, path = graphdef.leaves[emission.new[0]], graphdef.paths[emission.new[0]]
    return f"the new {kind[0].__name__} {format_path(path[1:], 'result')}"


def broadcast_error(title: str, crossing: Crossing, entry: Entry) -> ValueError:
    """The error for a leaf that is the same for all, and was written by one."""
    return ValueError(
        f"{title} changed {entry_place(crossing, entry)}, which is broadcast (axis None): there "
        "is one of it, and each mapped step would write its own value. Map it along an axis with "
        "nnx.StateAxes({...: axis}), carry it (in nnx.scan), or do not write it."
    )


class Kept(NamedTuple):
    """Something that JAX knows again by its identity, and when it may be used again.

    What a function reads of objects that it closes over becomes constants of its trace, so a trace
    serves as long as these are the same objects (the lift compares their values). Under another
    trace their values belong to that one, and may change between two calls.
    """

    key: Any
    reached: tuple[int, ...]
    made: Any

    @classmethod
    def of(cls, made: Any, key: Any, fn: Callable[..., Any]) -> "Kept":
        """Returns `made` of `fn`, to be kept under `key`."""
        return cls(key, _reached(fn), made)

    def serves(self, key: Any, crossing: Crossing, fn: Callable[..., Any], level: Level) -> bool:
        """Tells whether what was made before can be used."""
        if self.key != key:
            return False
        if level is EAGER:
            return not crossing.foreign or self.reached == _reached(fn)
        values = [value for _, value in closed_over(fn)]
        return not any(type(leaf) is Opaque for leaf in opaque_flatten(values)[0])


def _reached(fn: Callable[..., Any]) -> tuple[int, ...]:
    return tuple(id(value) for _, value in closed_over(fn))


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

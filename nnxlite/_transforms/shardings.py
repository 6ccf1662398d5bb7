"""The shardings of `jit`, spread over the leaves of objects.

`in_shardings` go to the inner `jax.jit`, leaf by leaf. What the function gives back is known only
once it was traced, so `out_shardings` become constraints inside it; what changed of an argument
keeps the sharding that the argument came in with.
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._core.build import make_leaves
from nnxlite._core.errors import StructureError, format_path
from nnxlite._core.graphdef import FILL_LEAF, FILL_NODE, GraphDef, Slot, leaf_paths
from nnxlite._core.trace import current_level
from nnxlite._transforms.axes import entry_roles, spread
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.packing import Out, OutDef


class JitShardings:
    """The shardings of one inner jit.

    Attributes:
      leaves: Per leaf number of the objects a sharding or None; for a State a list of them.
      rest: Per position of a plain argument a sharding or None.
      results: A prefix of the result.
    """

    def __init__(self, binding: Binding, leaves: Sequence[Any], given: Any, results: Any) -> None:
        self.graphdef = binding.crossing.graphdef
        self.results = results
        self.leaves: dict[int, Any] = {}
        self.rest: dict[int, Any] = {}
        if given is None:
            return
        crossing, places = binding.crossing, {}
        args, _ = jax.tree_util.tree_unflatten(crossing.treedef, leaves)
        prefix = tuple(given) if isinstance(given, list) else given
        for position, role in enumerate(spread(prefix, args, "in_shardings")):
            if position not in crossing.roots:
                self.rest[position] = role
                continue
            root = crossing.roots.index(position)
            paths, at = crossing.root_entries(root), binding.leaf_at
            for entry, path, sharding in entry_roles(self.graphdef, paths, at, role):
                if sharding is None:
                    continue
                place = format_path(path, crossing.argument_name(root))
                other, where = places.setdefault(entry, (sharding, place))
                if other != sharding:
                    raise StructureError(
                        f"{binding.lift.title}: {where} and {place} are the same leaf, but "
                        f"in_shardings gives it {other} in one place and {sharding} in the other. "
                        "Give both the same sharding."
                    )
        self.leaves = _by_leaf(self.graphdef, {entry: s for entry, (s, _) in places.items()})

    def constrain(self, out: Out, values: Sequence[Any]) -> Out:
        """Puts the shardings on the results, and those of the arguments on what changed of them.

        Args:
          out: What the pure function returned.
          values: What it was given.
        """
        if self.results is None and not self.leaves:
            return out
        definition, update = out.definition, out.definition.update
        arrays, roles = out.arrays, self._result_roles(definition)
        spec = definition.spec or (None,) * len(roles)
        if roles:
            plain = [role for role, entry in zip(roles, spec, strict=True) if entry is None]
            arrays = [constrained(x, role) for x, role in zip(arrays, plain, strict=True)]
        # Per leaf after the call: its value, whether it is handed out, its sharding.
        emitted = iter(out.changed)
        if update is None:
            graphdef, numbers = self.graphdef, range(len(values))
            changed = set(definition.changed)
        else:
            graphdef, numbers = update.graphdef, update.leaves
            changed = {n for n, kept in enumerate(update.kept) if not kept}
        after = [next(emitted) if n in changed else values[old] for n, old in enumerate(numbers)]
        wanted = {n: self.leaves[old] for n, old in enumerate(numbers) if old in self.leaves}
        for role, entry in zip(roles, spec, strict=False):
            if entry is None or role is None:
                continue
            slot: Slot
            if update is None:
                slot = (None, FILL_NODE if entry[0] else FILL_LEAF, entry[1])
            else:
                slot = graphdef.skeleton.roots[update.first_output + entry]
            found = _output_shardings(graphdef, slot, after, role)
            wanted |= found
            changed |= found.keys()  # what was not changed may have to move all the same
        new_values = [constrained(after[n], wanted.get(n)) for n in sorted(changed)]
        if update is None:
            definition = definition._replace(changed=tuple(sorted(changed)))
        else:
            kept = tuple(n not in changed for n in range(len(numbers)))
            definition = definition._replace(update=update._replace(kept=kept))
        return Out(arrays, new_values, out.extras, definition)

    def _result_roles(self, definition: OutDef) -> list[Any]:
        if self.results is None:
            return []
        size = definition.tree.num_leaves
        result = jax.tree_util.tree_unflatten(definition.tree, range(size))
        return spread(self.results, result, "out_shardings")


def _output_shardings(
    graphdef: GraphDef[Any], slot: Slot, values: Sequence[Any], role: Any
) -> dict[int, Any]:
    paths = leaf_paths(graphdef.skeleton, [((), slot)])
    level = current_level()

    def leaf_at(number: int) -> Any:
        return make_leaves([graphdef.leaves[number]], [values[number]], level)[0]

    found = entry_roles(graphdef, paths, leaf_at, role)
    return _by_leaf(graphdef, {entry: s for entry, _, s in found if s is not None})


def _by_leaf(graphdef: GraphDef[Any], by_entry: dict[Any, Any]) -> dict[int, Any]:
    leaves: dict[int, Any] = {}
    for (number, inner), sharding in by_entry.items():
        if inner is None:
            leaves[number] = sharding
        else:
            size = len(graphdef.leaves[number][1].paths)
            leaves.setdefault(number, [None] * size)[inner] = sharding
    return leaves


def constrained(value: Any, sharding: Any) -> Any:
    """Returns a value, inside of `jit`, with its arrays placed as `sharding` says."""
    if sharding is None:
        return value
    if isinstance(sharding, list):  # the values of a State
        return [constrained(x, s) for x, s in zip(value, sharding, strict=True)]
    if isinstance(sharding, NamedSharding):
        kinds = set(sharding.mesh.axis_types)
        # `reshard` would need the mesh in the context; on Auto axes `device_put` is only a wish.
        put = jax.device_put if kinds == {AxisType.Explicit} else None
    elif isinstance(sharding, PartitionSpec):
        kinds = set(jax.sharding.get_abstract_mesh().axis_types)
        put = jax.sharding.reshard if kinds == {AxisType.Explicit} else None
    else:
        put = None
    put = put or jax.lax.with_sharding_constraint
    return jax.tree.map(lambda x: put(x, sharding), value)

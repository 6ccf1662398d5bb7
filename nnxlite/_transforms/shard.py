"""shard_map: `jax.shard_map` over objects.

Each leaf of an object has a `PartitionSpec`, and what is written leaves by the spec that it came in
by. The mapped function is jitted and kept with its crossing: JAX's own runs one operation at a time
outside of `jit`, which is far slower. `pmap.py` is for programs that still map over a leading axis.
"""

import functools
from collections.abc import Callable, Set
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from nnxlite._core.modes import mode_flags
from nnxlite._core.statics import static
from nnxlite._core.trace import Level
from nnxlite._transforms.arguments import Bound, resolve
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.changes import changed_values
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.mapped import Kept, Rider, extra_axes
from nnxlite._transforms.packing import Out
from nnxlite._transforms.roles import RoleKind, by_entry, roles_of
from nnxlite._transforms.scan_body import is_flag
from nnxlite._transforms.shard_body import Options, Shards

MAX_KEPT = 8  # per structure of arguments: one for each combination of constants and meshes
SPECS = RoleKind("in_specs", None, "a PartitionSpec or None")


@mode_flags()
def shard_map(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    in_specs: Any,
    out_specs: Any,
    axis_names: Set[Any] = frozenset(),
    check_vma: bool = True,
) -> Any:
    """Maps a function of objects over the shards of arrays and of Variables, one per device.

    The function sees a shard of each Variable and may write it: what it writes leaves by the spec
    that it came in by, and is changed on the caller's objects. What is replicated has to be written
    alike on all shards; JAX checks it. Only values may change: new Variables belong in the result.

    Inside, JAX's collectives (`jax.lax.psum`) run over the axes of the mesh. Unless `check_vma` is
    off, a gradient with respect to a replicated Variable arrives summed over all shards already.
    What an `nnx.capture` around records has an axis in front, with an entry for each shard.

    Args:
      fn: The function; without it, a decorator is returned.
      mesh: The devices; without it, the mesh in force (`jax.set_mesh`).
      in_specs: A prefix of the positional arguments of `PartitionSpec`s. For an object: a spec for
        all its leaves, a `StateSharding` of specs, or a State or object with a spec for each path.
        None, like `PartitionSpec()`, is for what is replicated; under None, what is no array is a
        constant of the function. Keyword arguments are taken as under None.
      out_specs: The same for the result. Objects that came in need none.
      axis_names: As for `jax.shard_map`.
      check_vma: As for `jax.shard_map`.

    Raises:
      StructureError: The specs are no prefix, a filter is missing, a shared leaf would have two
        specs, or the structure of an argument changed; with the path.
      ValueError: A spec does not fit a shape or the mesh, or what is replicated was written by each
        shard differently; with the path.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> @nnx.shard_map(mesh=mesh, in_specs=(None, jax.P("data")), out_specs=jax.P("data"))
      ... def apply(model, x):
      ...     return model(x)
      >>> apply(model, jnp.ones((8, 2))).shape
      (8, 3)
    """
    make = functools.partial(
        _shard_map,
        mesh=mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=frozenset(axis_names),
        check_vma=check_vma,
    )
    return make if fn is None else make(fn)


def _shard_map(fn: Callable[..., Any], *, in_specs: Any, **options: Any) -> Callable[..., Any]:
    function, args, kwargs = resolve(fn)
    if isinstance(in_specs, list):
        in_specs = tuple(in_specs)
    if isinstance(in_specs, tuple):  # what comes with the function is replicated
        in_specs = (*[None] * len(args), *in_specs)
    mapped = ShardMapFunction(function, in_specs=in_specs, first=len(args), **options)
    return Bound(mapped, *args, **kwargs) if args or kwargs else mapped


class ShardMapFunction(LiftedFunction):
    """A function of objects mapped over shards; made by `shard_map`.

    `first` is the number of positional arguments that come with the function.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        mesh: Mesh | AbstractMesh | None,
        in_specs: Any,
        out_specs: Any,
        axis_names: frozenset[Any],
        check_vma: bool,
        first: int = 0,
    ) -> None:
        super().__init__(fn, "nnx.shard_map")
        self._mesh, self._in_specs, self._first = mesh, in_specs, first
        self._axis_names, self._check_vma = axis_names, check_vma
        self._out_specs = tuple(out_specs) if isinstance(out_specs, list) else out_specs

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mesh = self._current_mesh()
        with self._bound(args, kwargs) as (binding, leaves, level):
            in_specs = self._in_specs
            if self._first and not isinstance(in_specs, tuple):
                in_specs = (*[None] * self._first, *[in_specs] * (len(args) - self._first))
            shards = self._shards(binding, leaves, in_specs, mesh, level)
            return binding.deliver(self._run(binding, leaves, shards), level)

    def _current_mesh(self) -> Mesh | AbstractMesh:
        mesh = jax.sharding.get_abstract_mesh() if self._mesh is None else self._mesh
        if mesh.empty:
            raise ValueError(
                f"{self._lift.title} has no mesh. Give it one, or call it inside of "
                "`with jax.set_mesh(mesh):`."
            )
        return mesh

    def _shards(
        self,
        binding: Binding,
        leaves: list[Any],
        in_specs: Any,
        mesh: Mesh | AbstractMesh,
        level: Level,
    ) -> Shards:
        """Returns the mapped function for these arguments; JAX knows it again by its identity."""
        crossing, fn = binding.crossing, self._lift.fn
        roles = roles_of(binding, leaves, in_specs, kind=SPECS)
        flags = {
            n: static(leaves[position], f"{self._lift.title}: {crossing.place(position)}")
            for n, position in enumerate(crossing.rest)
            if roles.rest[n] is None and is_flag(leaves[position])
        }
        key, known = (roles, flags, mesh), crossing.kept.setdefault("shard_map", [])
        kept = next((each for each in known if each.serves(key, crossing, fn, level)), None)
        if kept is None:
            shards = Shards(crossing, roles, flags, self._options(mesh), self._lift)
            kept = Kept.of(shards, key, fn)
            known[:] = [kept, *(each for each in known if each.key != key)][:MAX_KEPT]
        return kept.made

    def _options(self, mesh: Mesh | AbstractMesh) -> Options:
        if unknown := self._axis_names.difference(mesh.axis_names):
            raise ValueError(
                f"{self._lift.title}: axis_names has {', '.join(map(repr, unknown))}, but the axes "
                f"of the mesh are {', '.join(map(repr, mesh.axis_names))}."
            )
        kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
        manual = tuple(
            name
            for name, kind in kinds
            if kind is not AxisType.Manual and name in (self._axis_names or mesh.axis_names)
        )
        return Options(mesh, manual, self._check_vma, self._out_specs)

    def _run(self, binding: Binding, leaves: list[Any], shards: Shards) -> Out:
        values = binding.plan.gather()
        flat = by_entry(values, shards.roles.entries)
        rest = shards.without_flags([leaves[n] for n in binding.crossing.rest])
        inputs = binding.extra_inputs()
        mapped: tuple[bool, ...] = ()
        if inputs:
            run = functools.partial(shards.abstract_extras, flat, rest)
            mapped = _mapped_leaves(extra_axes(binding, inputs, shards.number, run), inputs)
        arrays, parts, extras, rider = shards.jitted(Rider(mapped), flat, rest, inputs)
        definition, frames, given = rider.data
        return Out(arrays, changed_values(frames, given, parts, values), extras, definition)


def _mapped_leaves(axes: Any, inputs: Any) -> tuple[bool, ...]:
    """Tells per leaf of what the extras hand in whether each shard has its own."""
    mapped: list[bool] = []
    jax.tree.map(
        lambda axis, below: mapped.extend([axis == 0] * len(jax.tree.leaves(below))),
        axes,
        inputs,
        is_leaf=lambda x: x is None,
    )
    return tuple(mapped)

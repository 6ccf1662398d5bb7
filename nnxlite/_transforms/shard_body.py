"""The mapped function of `shard_map`: what goes in by which spec, and what comes out.

JAX sees a function of the entries of objects, the plain arguments, and what captures hand in. What
changed of an entry leaves by the spec that it came in by; what is new takes that of the result.
What a capture records is another thing on each shard, so it leaves with an axis of shards in front.
"""

import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from nnxlite._core.errors import StructureError
from nnxlite._core.statics import Static
from nnxlite._transforms.axes import StateSharding
from nnxlite._transforms.changes import Emission, emissions, structure_change
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.lift import Lift
from nnxlite._transforms.mapped import (
    AxisNames,
    Rider,
    array_places,
    array_roles,
    emission_place,
)
from nnxlite._transforms.packing import Out, OutDef
from nnxlite._transforms.roles import Roles, by_leaf, entry_place

WHOLE = PartitionSpec()


class Options(NamedTuple):
    """How a function is mapped; `manual` are the axes of the mesh over which it is."""

    mesh: Mesh | AbstractMesh
    manual: tuple[Any, ...]
    check_vma: bool
    out_specs: Any

    def size_of(self, entry: Any) -> int:
        """Returns the number of parts that an entry of a spec splits an axis into."""
        return math.prod(self.mesh.shape[name] for name in _members(entry))

    def check(self, spec: Any, option: str, place: Callable[[], str], title: str) -> None:
        """Raises unless this is a spec over the axes that the function is mapped over."""
        if isinstance(spec, StateSharding):
            raise TypeError(
                f"{title}: {option} has StateSharding for {place()}, which is an array. That is "
                "for objects; for an array use a PartitionSpec or None."
            )
        if not isinstance(spec, PartitionSpec):
            raise TypeError(
                f"{title}: {option} has {spec!r} for {place()}. Give a PartitionSpec, or None for "
                "what is replicated."
            )
        for name in (name for entry in spec for name in _members(entry)):
            if name not in self.manual:
                raise ValueError(
                    f"{title}: {option} has {spec} for {place()}, but {name!r} is none of the mesh "
                    f"axes that the function is mapped over: {', '.join(map(repr, self.manual))}."
                )


class OutSpecs(AxisNames):
    """Finds the specs of what the function makes; there are no names of axes to keep in step."""

    option = "out_specs"


class Shards:
    """The mapped function of one crossing, with the specs of all that goes in."""

    def __init__(
        self,
        crossing: Crossing,
        roles: Roles,
        flags: Mapping[int, Static],
        options: Options,
        lift: Lift,
    ) -> None:
        self.crossing, self.roles, self.flags = crossing, roles, flags
        self.options, self.title = options, lift.title
        self.number = options.size_of(options.manual)
        rest = self.without_flags(roles.rest)
        self.specs = [_whole_if_none(spec) for spec in (*roles.axes, *rest)]
        for place, spec in zip(self._places(), self.specs, strict=True):
            options.check(spec, "in_specs", place, self.title)
        run = functools.partial(_run, self)
        functools.update_wrapper(run, lift.fn, ("__name__", "__qualname__"), ())
        self.jitted = jax.jit(run)  # JAX names the program after the function

    def without_flags(self, rest: Sequence[Any]) -> list[Any]:
        """Returns the plain arguments that JAX sees."""
        return [x for n, x in enumerate(rest) if n not in self.flags]

    def with_flags(self, rest: Sequence[Any]) -> list[Any]:
        """Puts the constants back among the plain arguments."""
        given = iter(rest)
        size = len(self.roles.rest)
        return [self.flags[n].value if n in self.flags else next(given) for n in range(size)]

    def abstract_extras(self, flat: list[Any], rest: list[Any], inputs: Any) -> Any:
        """Returns what the extras hand out."""
        return jax.eval_shape(self.jitted, Rider(None), flat, rest, inputs)[2]

    def _places(self) -> Iterator[Callable[[], str]]:
        for entry in self.roles.entries:
            yield functools.partial(entry_place, self.crossing, entry)
        for position in self.without_flags(self.crossing.rest):
            yield functools.partial(self.crossing.place, position)

    def check_shapes(self, operands: Sequence[Any]) -> None:
        """Raises unless every array can be split as its spec says."""
        mesh, manual = self.options.mesh, self.options.manual
        explicit = manual == mesh.axis_names and {*mesh.axis_types} == {AxisType.Explicit}
        for place, spec, value in zip(self._places(), self.specs, operands, strict=True):
            for leaf in jax.tree.leaves(value):
                kind = jax.typeof(leaf)
                wrong = self._misfit(spec, kind.shape)
                if wrong is None and explicit:
                    wrong = self._elsewhere(spec, kind.sharding.spec)
                if wrong is not None:
                    raise ValueError(f"{self.title}: in_specs has {spec} for {place()}, {wrong}")

    def _misfit(self, spec: PartitionSpec, shape: tuple[int, ...]) -> str | None:
        if len(spec) > len(shape):
            return (
                f"whose shape is {shape}. Name at most one mesh axis, or tuple of them, per axis."
            )
        for axis, entry in enumerate(spec):
            parts = self.options.size_of(entry)
            if shape[axis] % parts:
                return (
                    f"whose shape is {shape}: axis {axis} cannot be split into {parts} equal parts "
                    f"over {', '.join(map(repr, _members(entry)))}. Pad it, or give another spec."
                )
        return None

    def _elsewhere(self, wanted: PartitionSpec, found: PartitionSpec) -> str | None:
        """Tells how an array on an explicit mesh is placed otherwise: JAX moves none by itself."""
        size_of = self.options.size_of
        splits = [
            [(axis, _members(entry)) for axis, entry in enumerate(spec) if size_of(entry) > 1]
            for spec in (wanted, found)
        ]
        if splits[0] == splits[1]:
            return None
        return (
            f"which is placed as {found}. JAX moves nothing by itself on axes of the kind "
            "Explicit: place it before the call (jax.device_put, jax.reshard), or use a mesh of "
            "Auto axes."
        )


def _run(shards: Shards, rider: Rider, flat: list[Any], rest: list[Any], extras: Any) -> Any:
    """What is jitted. Each trace of it has its own lists of specs."""
    shards.check_shapes((*flat, *rest))
    return _Trace(shards, rider.data).run(flat, rest, extras)


class _Trace:
    """One trace of a mapped function.

    `mapped` tells which leaves of what the extras hand in each shard has its own of; None is for a
    trace that learns what they hand out. JAX asks for the specs of the result when it knows the
    result: the two lists are filled by then.
    """

    def __init__(self, shards: Shards, mapped: tuple[bool, ...] | None) -> None:
        self.shards, self.options, self.crossing = shards, shards.options, shards.crossing
        self.mapped = mapped or ()
        self.array_specs: list[PartitionSpec] = []
        self.emitted_specs: list[PartitionSpec] = []
        self.outcome: tuple[OutDef, Sequence[Emission]] | None = None

    def run(self, flat: list[Any], rest: list[Any], extras: Any) -> Any:
        leaves, self.extras_tree = jax.tree_util.tree_flatten(extras)
        self.mapped = self.mapped or (False,) * len(leaves)
        each = PartitionSpec(self.options.manual)
        specs = self.shards.specs
        mapped = jax.shard_map(
            self.body,
            mesh=self.options.mesh,
            in_specs=(
                specs[: len(flat)],
                specs[len(flat) :],
                [each if is_mapped else WHOLE for is_mapped in self.mapped],
            ),
            out_specs=(self.array_specs, self.emitted_specs, each, WHOLE),
            axis_names=set(self.options.manual),
            check_vma=self.options.check_vma,
        )
        try:
            return mapped(flat, rest, leaves)
        except ValueError as error:
            found = re.search(r"out_specs\[(\d)\]\[(\d+)\](.*)", str(error))
            if self.outcome is None or found is None:
                raise
            text = self._output_error(int(found[1]), int(found[2]), found[3], *self.outcome)
            raise ValueError(text) from error

    def body(self, flat: list[Any], rest: list[Any], extras: list[Any]) -> Any:
        shards, crossing, title = self.shards, self.crossing, self.shards.title
        inside = by_leaf(flat, shards.roles.entries, len(crossing.graphdef.leaves))
        given_extras = [
            jnp.squeeze(x, 0) if is_mapped else x
            for x, is_mapped in zip(extras, self.mapped, strict=True)
        ]
        names = OutSpecs(crossing, shards.roles, self.options.out_specs, {}, title)
        out = crossing.pure(
            inside,
            shards.with_flags(rest),
            jax.tree_util.tree_unflatten(self.extras_tree, given_extras),
            names,
        )
        self._check_structure(out.definition)
        frames, given, parts = emissions(crossing.graphdef, out, inside)
        self.outcome = out.definition, given
        self._note_specs(names, out, given, parts)
        handed_out = jax.tree.map(lambda x: jnp.expand_dims(x, 0), out.extras)
        return out.arrays, parts, handed_out, Rider((out.definition, frames, given))

    def _check_structure(self, definition: OutDef) -> None:
        if definition.update is None:
            return
        change = structure_change(self.crossing, definition.update)
        if change is not None:
            raise StructureError(
                f"{self.shards.title}: {change}, but only values may change here: what is new has "
                "no spec. Return it, with a spec in out_specs, or make the structure before."
            )

    def _note_specs(
        self, names: OutSpecs, out: Out, given: Sequence[Emission], parts: Sequence[Any]
    ) -> None:
        specs = array_roles(out.definition, names.result_roles)
        self.array_specs[:] = map(_whole_if_none, specs)
        self.emitted_specs[:] = (_whole_if_none(names.axis_of(emission)) for emission in given)
        for number, (spec, array) in enumerate(zip(self.array_specs, out.arrays, strict=True)):
            self._check_result(spec, array, lambda n=number: array_places(out.definition)[n])
        for emission, spec, part in zip(given, self.emitted_specs, parts, strict=True):
            place = functools.partial(emission_place, self.crossing, emission, out.definition)
            self._check_result(spec, part, place)

    def _check_result(self, spec: Any, value: Any, place: Callable[[], str]) -> None:
        title = self.shards.title
        self.options.check(spec, "out_specs", place, title)
        for shape in map(jnp.shape, jax.tree.leaves(value)):
            if len(spec) > len(shape):
                raise ValueError(
                    f"{title}: out_specs has {spec} for {place()}, which is of shape {shape} on "
                    "each shard: there is no axis to join the parts along. Give it one (x[None]), "
                    "or reduce it over the shards (jax.lax.psum) and give PartitionSpec()."
                )

    def _output_error(
        self,
        part: int,
        number: int,
        reason: str,
        definition: OutDef,
        given: Sequence[Emission],
    ) -> str:
        """Writes an error of JAX about the spec of what leaves in terms of the caller."""
        title = self.shards.title
        if part == 0:
            place = array_places(definition)[number]
        else:
            place = emission_place(self.crossing, given[number], definition)
        if part == 0 or given[number].old is None:
            text = (
                f"{title}: out_specs for {place}{reason}. Where a spec names no mesh axis, all "
                "shards have to return the same: reduce it (jax.lax.psum), or name the axis."
            )
        else:
            text = (
                f"{title} changed {place}, whose spec{reason}. Let all shards write the same "
                "(jax.lax.pmean), split it by its spec in in_specs, or pass check_vma=False if you "
                "know that it is the same."
            )
        if any(self.mapped):
            text += (
                " Each shard has a perturbation of its own: map over those axes alone that split "
                "the perturbed values (axis_names), or pass check_vma=False."
            )
        return text


def _whole_if_none(spec: Any) -> Any:
    return WHOLE if spec is None else spec


def _members(entry: Any) -> tuple[Any, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)

"""vmap: `jax.vmap` over objects."""

import functools
import re
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from nnxlite._core.modes import mode_flags
from nnxlite._transforms.arguments import Bound, resolve
from nnxlite._transforms.axes import StateAxes, is_carry
from nnxlite._transforms.axis_metadata import told_by
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.changes import Emission, changed_values, emissions
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.mapped import (
    AxisNames,
    Rider,
    array_places,
    array_roles,
    broadcast_error,
    emission_place,
    extra_axes,
)
from nnxlite._transforms.packing import Out, OutDef
from nnxlite._transforms.roles import by_entry, by_leaf, mapped_size, roles_of, show


@mode_flags()
def vmap(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_axes: int | Sequence[Any] | None = 0,
    out_axes: Any = 0,
    axis_name: Hashable | None = None,
    axis_size: int | None = None,
    spmd_axis_name: Hashable | tuple[Hashable, ...] | None = None,
    transform_metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Maps a function of objects over axes of arrays and of Variables.

    Of a mapped Variable each call sees a slice and may write it. A broadcast one (axis None) may
    be read only. What the function adds to an argument takes out axis 0.

    Args:
      fn: The function; without it, a decorator is returned.
      in_axes: A prefix of the positional arguments of axes, None to broadcast. For an object: an
        axis for all its leaves, or `StateAxes`. Keyword arguments are mapped along axis 0.
      out_axes: The same for the result.
      axis_name: As for `jax.vmap`.
      axis_size: As for `jax.vmap`; needed where nothing is mapped.
      spmd_axis_name: As for `jax.vmap`.
      transform_metadata: `{nnx.PARTITION_NAME: name}` names the axis in the sharding metadata of
        Variables that gain it; it is taken off what loses it.

    Raises:
      ValueError: A broadcast Variable was written, or mapped sizes differ; with the path.
      StructureError: A shared leaf would have two axes; with both places.

    Example:
      >>> @nnx.split_rngs(splits=3)
      ... @nnx.vmap
      ... def make(rngs):
      ...     return nnx.Linear(2, 4, rngs=rngs)
      >>> make(nnx.Rngs(0)).kernel.shape
      (3, 2, 4)
    """
    make = functools.partial(
        _vmap,
        in_axes=in_axes,
        out_axes=out_axes,
        transform_metadata=dict(transform_metadata or {}),
        axis_name=axis_name,
        axis_size=axis_size,
        spmd_axis_name=spmd_axis_name,
    )
    return make if fn is None else make(fn)


def _vmap(fn: Callable[..., Any], *, in_axes: Any, **options: Any) -> Callable[..., Any]:
    function, args, kwargs = resolve(fn)
    function, options["transform_metadata"] = told_by(function, options["transform_metadata"])
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple):  # what comes with the function is the same for all
        in_axes = (*[None] * len(args), *in_axes)
    mapped = VmapFunction(
        function, in_axes=in_axes, first=len(args), bound=tuple(kwargs), **options
    )
    return Bound(mapped, *args, **kwargs) if args or kwargs else mapped


class VmapFunction(LiftedFunction):
    """A vectorised function of objects; made by `vmap`.

    `first` and `bound` are the number of positional and the names of keyword arguments that come
    with the function, as those of a partial.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        in_axes: Any,
        out_axes: Any,
        transform_metadata: Mapping[str, Any],
        axis_name: Any,
        axis_size: int | None,
        spmd_axis_name: Any,
        first: int = 0,
        bound: tuple[str, ...] = (),
    ) -> None:
        super().__init__(fn, "nnx.vmap")
        for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
            given = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, StateAxes))
            roles = [r for x in given for r in (x.axes if isinstance(x, StateAxes) else (x,))]
            if any(map(is_carry, roles)):
                raise ValueError(
                    f"{self._lift.title}: {name} has nnx.Carry, but mapped calls hand nothing to "
                    "each other. Use nnx.scan, or an int or None."
                )
        self._in_axes, self._out_axes = in_axes, out_axes
        self._first, self._bound_names = first, bound
        self._metadata, self._axis_size = transform_metadata, axis_size
        self._options: dict[str, Any] = {"axis_name": axis_name}
        if spmd_axis_name is not None:
            self._options["spmd_axis_name"] = spmd_axis_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._bound(args, kwargs) as (binding, leaves, level):
            in_axes = self._in_axes
            if self._first and not isinstance(in_axes, tuple):
                in_axes = (*[None] * self._first, *[in_axes] * (len(args) - self._first))
            return binding.deliver(self._map(binding, leaves, in_axes), level)

    def _map(self, binding: Binding, leaves: list[Any], in_axes: Any) -> Out:
        call = _Call(self, binding, leaves, in_axes)
        extras = binding.extra_inputs()
        axes: Any = None
        if extras:
            axes = extra_axes(binding, extras, call.size, call.abstract_extras)
        arrays, parts, extras, rider = call.run(extras, axes)
        definition, frames, given = rider.data
        changed = changed_values(frames, given, parts, call.values)
        return Out(arrays, changed, extras, definition)


class _Call:
    """One call of a mapped function."""

    def __init__(
        self, function: VmapFunction, binding: Binding, leaves: list[Any], in_axes: Any
    ) -> None:
        self.function, self.binding, self.title = function, binding, function._lift.title
        self.crossing = binding.crossing
        self.roles = roles_of(binding, leaves, in_axes, function._bound_names)
        self.values = binding.plan.gather()
        self.flat = by_entry(self.values, self.roles.entries)
        self.rest = [leaves[n] for n in self.crossing.rest]
        self.size = mapped_size(binding, self.roles, self.flat, self.rest, function._axis_size)
        if self.size is None:
            raise ValueError(
                f"{self.title} maps none of its arguments, so the size of the mapped axis is not "
                "known. Give axis_size, or an axis in in_axes."
            )
        self.array_axes: list[Any] = []
        self.emitted_axes: list[Any] = []
        self.outcome: tuple[OutDef, Sequence[Emission]] | None = None  # once the body has run

    def run(self, extras: Any, extra_axes: Any) -> Any:
        # JAX asks for the axes of the result when it knows the result: the two lists are filled
        # by then. Were they read earlier, JAX would raise for their length.
        mapped = jax.vmap(
            self.body,
            in_axes=(self.roles.axes, self.roles.rest, extra_axes),
            out_axes=(self.array_axes, self.emitted_axes, 0, 0),
            axis_size=self.size,
            **self.function._options,
        )
        try:
            return mapped(self.flat, self.rest, extras)
        except ValueError as error:
            if self.outcome is None:
                raise
            raise self._output_error(error, *self.outcome) from error

    def abstract_extras(self, extras: Any) -> Any:
        """Returns what the extras hand out."""

        def run(flat: list[Any], rest: list[Any]) -> Any:
            self.flat, self.rest = flat, rest
            return self.run(extras, None)[2]

        concrete = self.flat, self.rest
        try:
            return jax.eval_shape(run, *concrete)
        finally:
            self.flat, self.rest = concrete
            self.outcome = None

    def body(self, flat: list[Any], rest: list[Any], extras: Any) -> Any:
        function, crossing = self.function, self.crossing
        inside = by_leaf(flat, self.roles.entries, len(self.values))
        names = AxisNames(crossing, self.roles, function._out_axes, function._metadata, self.title)
        out = crossing.pure(inside, rest, extras, names)
        frames, given, parts = emissions(crossing.graphdef, out, inside)
        emitted_axes = [names.axis_of(emission) for emission in given]
        for emission, axis in zip(given, emitted_axes, strict=True):
            if axis is None and emission.old is not None:
                raise broadcast_error(self.title, crossing, emission.old)
        self.array_axes[:] = array_roles(out.definition, names.result_roles)
        self.emitted_axes[:] = emitted_axes
        self.outcome = out.definition, given
        self._check_array_axes(out.definition)
        return out.arrays, parts, out.extras, Rider((out.definition, frames, given))

    def _check_array_axes(self, definition: OutDef) -> None:
        for number, axis in enumerate(self.array_axes):
            if isinstance(axis, StateAxes):
                raise TypeError(
                    f"{self.title}: out_axes has StateAxes for {array_places(definition)[number]}, "
                    "which is an array. StateAxes give the axes of objects; for an array use an "
                    "int or None."
                )

    def _output_error(
        self, error: ValueError, definition: OutDef, given: Sequence[Emission]
    ) -> ValueError:
        """Puts the path of a result into an error of JAX about its axis."""
        found = re.search(r"out_axes\[(\d)\]\[(\d+)\]", str(error))
        place = "a result"
        if found is not None:
            part, number = int(found[1]), int(found[2])
            if part == 0:
                place = array_places(definition)[number]
            else:
                place = emission_place(self.crossing, given[number], definition)
        return ValueError(
            f"{self.title}: {place} does not fit out_axes {show(self.function._out_axes)} "
            f"({error}). None is for what is the same in all mapped calls; give an int, the axis "
            "along which they are stacked."
        )

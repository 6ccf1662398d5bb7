"""vmap: `jax.vmap` over objects."""

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

from nnxlite._transforms.arguments import resolve
from nnxlite._transforms.axes import StateAxes
from nnxlite._transforms.lift import Binding, LiftedFunction, Out
from nnxlite._transforms.mapped import (
    AxisNames,
    Rider,
    broadcast_error,
    by_entry,
    by_leaf,
    changed_values,
    emissions,
    extra_axes,
    mapped_size,
    roles_of,
)


def vmap(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_axes: int | None | Sequence[Any] = 0,
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
    if args:  # the object of a bound method is the same for all
        given = in_axes if isinstance(in_axes, tuple | list) else None
        if given is None:
            mapped = VmapFunction(function, in_axes=in_axes, first=len(args), **options)
        else:
            in_axes = (*[None] * len(args), *given)
            mapped = VmapFunction(function, in_axes=in_axes, **options)
        return functools.partial(mapped, *args, **kwargs)
    return VmapFunction(function, in_axes=in_axes, **options)


class VmapFunction(LiftedFunction):
    """A vectorised function of objects; made by `vmap`."""

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
    ) -> None:
        super().__init__(fn, "nnx.vmap")
        self._in_axes, self._out_axes, self._first = in_axes, out_axes, first
        self._metadata, self._axis_size = transform_metadata, axis_size
        self._options: dict[str, Any] = {"axis_name": axis_name}
        if spmd_axis_name is not None:
            self._options["spmd_axis_name"] = spmd_axis_name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._bound(args, kwargs) as (binding, leaves, level):
            in_axes = self._in_axes
            if self._first:
                in_axes = (*[None] * self._first, *[in_axes] * (len(args) - self._first))
            values = binding.plan.gather()
            out = self._map(binding, leaves, values, in_axes)
            return binding.deliver(out, level)

    def _map(self, binding: Binding, leaves: list[Any], values: list[Any], in_axes: Any) -> Out:
        crossing = binding.crossing
        roles = roles_of(binding, leaves, in_axes)
        flat = by_entry(values, roles.entries)
        rest = [leaves[n] for n in crossing.rest]
        size = mapped_size(binding, roles, flat, rest, self._axis_size)
        array_axes: list[Any] = []
        emitted_axes: list[Any] = []

        def body(flat: list[Any], rest: list[Any], extras: Any) -> Any:
            inside = by_leaf(flat, roles.entries, len(values))
            names = AxisNames(crossing, roles, self._out_axes, self._metadata)
            out = crossing.pure(inside, rest, extras, names)
            given, parts = emissions(crossing.graphdef, out, inside)
            spec = out.definition.spec or (None,) * len(names.result_roles)
            array_axes[:] = [
                self._array_axis(role)
                for role, entry in zip(names.result_roles, spec, strict=True)
                if entry is None
            ]
            emitted_axes[:] = [
                names.new_axes[e.new] if e.old is None else roles.of(e.old) for e in given
            ]
            for emission, axis in zip(given, emitted_axes, strict=True):
                if axis is None and emission.old is not None:
                    raise broadcast_error(self._lift.title, crossing, emission.old[0])
            return out.arrays, parts, out.extras, Rider((out.definition, given))

        def mapped(flat: list[Any], rest: list[Any], extras: Any, extra_axes: Any) -> Any:
            # JAX asks for the axes of the result when it knows the result: the two lists are
            # filled by then. Were they read earlier, JAX would raise for their length.
            return jax.vmap(
                body,
                in_axes=(roles.axes, roles.rest, extra_axes),
                out_axes=(array_axes, emitted_axes, 0, 0),
                axis_size=size,
                **self._options,
            )(flat, rest, extras)

        extras = binding.extra_inputs()
        axes: Any = None
        if extras:
            axes = extra_axes(
                binding,
                extras,
                size,
                lambda given: jax.eval_shape(
                    lambda flat, rest: mapped(flat, rest, given, None)[2], flat, rest
                ),
            )
        arrays, parts, extras, rider = mapped(flat, rest, extras, axes)
        definition, given = rider.data
        changed = changed_values(definition, given, parts, values)
        return Out(arrays, changed, extras, definition)

    def _array_axis(self, role: Any) -> int | None:
        if isinstance(role, StateAxes):
            raise TypeError(
                f"{self._lift.title}: out_axes has StateAxes for an array. StateAxes give the axes "
                "of objects; for an array use an int or None."
            )
        return role

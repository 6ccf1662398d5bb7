"""scan: `jax.lax.scan` over objects.

The body is kept with its crossing, so that JAX's caches know it again: an eager scan on known
objects costs about what `jax.lax.scan` does. Everything that is not sliced goes in by the carry:
what the body hands through unchanged, JAX turns into a constant of the loop.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxlite._core.errors import StructureError
from nnxlite._transforms.arguments import resolve
from nnxlite._transforms.axes import Carry, StateAxes, is_carry
from nnxlite._transforms.lift import Binding, Crossing, LiftedFunction, Out, OutDef, same_value
from nnxlite._transforms.mapped import (
    AxisNames,
    Emission,
    Rider,
    Roles,
    broadcast_error,
    by_entry,
    by_leaf,
    changed_values,
    emissions,
    extra_axes,
    mapped_size,
    roles_of,
    structure_change,
)


def scan(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
    in_axes: Any = (Carry, 0),
    out_axes: Any = (Carry, 0),
    transform_metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Loops a function of objects over axes of arrays and of Variables, carrying some along.

    Values of carried and of sliced Variables may be written. Broadcast ones (axis None) may be read
    only, and the structure of objects stays as it is.

    Args:
      fn: The body; without it, a decorator is returned.
      length: The number of steps; needed where nothing is sliced.
      reverse: As for `jax.lax.scan`.
      unroll: As for `jax.lax.scan`.
      in_axes: A prefix of the positional arguments: `Carry` for the argument that each step hands
        to the next, ints for what is sliced, None for what is broadcast. For an object also
        `StateAxes`, which may hold `Carry`.
      out_axes: A prefix of the result: `Carry` where the next carry is, ints for what is stacked.
      transform_metadata: As for `vmap`.

    Raises:
      ValueError: A broadcast Variable was written, or sliced sizes differ; with the path.
      StructureError: The structure of an object changed, or the carry is not of the same structure,
        shapes and dtypes as before; with the path, before and after.

    Example:
      >>> layers = nnx.split_rngs(splits=3)(nnx.vmap(lambda r: nnx.Linear(2, 2, rngs=r)))(nnx.Rngs(0))
      >>> @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
      ... def run(x, layer):
      ...     return layer(x)
      >>> run(jnp.ones((1, 2)), layers).shape
      (1, 2)
    """
    make = functools.partial(
        _scan,
        length=length,
        reverse=reverse,
        unroll=unroll,
        in_axes=in_axes,
        out_axes=out_axes,
        transform_metadata=dict(transform_metadata or {}),
    )
    return make if fn is None else make(fn)


def _scan(fn: Callable[..., Any], *, in_axes: Any, **options: Any) -> Callable[..., Any]:
    function, args, kwargs = resolve(fn)
    if not args and not kwargs:
        return ScanFunction(function, in_axes=in_axes, **options)
    given = tuple(in_axes) if isinstance(in_axes, tuple | list) else (in_axes,)
    in_axes = (*[None] * len(args), *given)
    return functools.partial(ScanFunction(function, in_axes=in_axes, **options), *args, **kwargs)


class _Exit(NamedTuple):
    """What one traced body says of itself.

    Attributes:
      definition: Of the result and the changes.
      emissions: What leaves beside the result.
      result_roles: Per leaf of the result `Carry` or an axis.
      axes: Per emission `Carry` or an axis.
    """

    definition: OutDef
    emissions: tuple[Emission, ...]
    result_roles: tuple[Any, ...]
    axes: tuple[Any, ...]


class ScanFunction(LiftedFunction):
    """A scanned function of objects; made by `scan`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        length: int | None,
        reverse: bool,
        unroll: int | bool,
        in_axes: Any,
        out_axes: Any,
        transform_metadata: Mapping[str, Any],
    ) -> None:
        super().__init__(fn, "nnx.scan")
        # `in_axes=Carry` and `in_axes=0` speak of the only argument, or of each.
        self._in_axes = tuple(in_axes) if isinstance(in_axes, list) else in_axes
        self._out_axes = tuple(out_axes) if isinstance(out_axes, list) else out_axes
        self._metadata, self._length = transform_metadata, length
        self._options = {"reverse": reverse, "unroll": unroll}
        carries = sum(map(is_carry, _parts(self._in_axes)))
        if carries > 1:
            raise ValueError(
                f"{self._lift.title}: in_axes has {carries} arguments that are Carry. Carry one "
                "argument, which may be a tuple of several things."
            )
        self._carries = carries == 1
        if any(map(is_carry, _parts(self._out_axes))) != self._carries:
            raise ValueError(
                f"{self._lift.title}: in_axes is {self._in_axes} and out_axes is {self._out_axes}; "
                "one has a Carry and the other has none. What is carried in has to come out."
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._bound(args, kwargs) as (binding, leaves, level):
            values = binding.plan.gather()
            return binding.deliver(self._scan(binding, leaves, values), level)

    def _scan(self, binding: Binding, leaves: list[Any], values: list[Any]) -> Out:
        crossing = binding.crossing
        roles = roles_of(binding, leaves, self._in_axes)
        kept = crossing.kept.get("scan")
        if kept is None or kept[0] != roles:
            kept = crossing.kept["scan"] = (roles, _Body(self, crossing, roles))
        body = kept[1]
        flat = by_entry(values, roles.entries)
        rest = [leaves[n] for n in crossing.rest]
        length = mapped_size(binding, roles, flat, rest, self._length)
        entry_split, rest_split = body.entries, body.rest
        carry = (entry_split.carried(flat), rest_split.carried(rest))
        xs = (entry_split.sliced(flat), rest_split.sliced(rest))
        extras = self._split_extras(binding, body, carry, xs, length)
        (carry_values, carry_rest, _), (arrays, parts, extras_out, rider) = jax.lax.scan(
            body, (*carry, extras[0]), (*xs, extras[1]), length=length, **self._options
        )
        exit_ = rider.data
        carried_arrays = iter(body.carried_arguments(carry_rest))
        stacked = iter(arrays)
        spec = exit_.definition.spec or (None,) * len(exit_.result_roles)
        results = [
            next(carried_arrays) if role is Carry else _moved_back(next(stacked), role)
            for role, entry in zip(exit_.result_roles, spec, strict=True)
            if entry is None
        ]
        new_carried = dict(zip(entry_split.carried(roles.entries), carry_values, strict=True))
        stacked_parts = iter(parts)
        outer = [
            new_carried[emission.old]
            if axis is Carry
            else _moved_back(next(stacked_parts), axis)
            for emission, axis in zip(exit_.emissions, exit_.axes, strict=True)
        ]
        changed = changed_values(exit_.definition, exit_.emissions, outer, values)
        return Out(results, changed, extras_out, exit_.definition)


    def _split_extras(
        self, binding: Binding, body: "_Body", carry: Any, xs: Any, length: int | None
    ) -> Any:
        """Returns what the extras hand in: the part that is the same for all, and what is sliced."""
        inputs = binding.extra_inputs()
        if not inputs:
            return ([], Rider(None)), []

        def run(given: tuple[Any, ...]) -> Any:
            def once(carry: Any, xs: Any) -> Any:
                first = jax.tree.map(lambda a: a[0], xs)
                leaves, tree = jax.tree_util.tree_flatten(given)
                rider = Rider((tree, (False,) * len(leaves)))
                return body((*carry, (leaves, rider)), (*first, []))[1][2]

            return jax.eval_shape(once, carry, xs)

        axes = extra_axes(binding, inputs, length, run)
        leaves, tree = jax.tree_util.tree_flatten(inputs)
        is_mapped: list[bool] = []
        jax.tree.map(
            lambda axis, below: is_mapped.extend([axis == 0] * len(jax.tree.leaves(below))),
            axes,
            inputs,
            is_leaf=lambda x: x is None,
        )
        same = [x for x, mapped in zip(leaves, is_mapped, strict=True) if not mapped]
        sliced = [x for x, mapped in zip(leaves, is_mapped, strict=True) if mapped]
        return (same, Rider((tree, tuple(is_mapped)))), sliced


class _Split:
    """Which of a list of things go by the carry, and which are sliced along which axis."""

    def __init__(self, roles: Sequence[Any]) -> None:
        self.roles = list(roles)

    def carried(self, things: Sequence[Any]) -> list[Any]:
        """Returns what is carried or broadcast."""
        return [x for x, r in zip(things, self.roles, strict=True) if not isinstance(r, int)]

    def sliced(self, things: Sequence[Any]) -> list[Any]:
        """Returns what is sliced, with its axis in front."""
        return [
            jax.tree.map(lambda a, r=r: jnp.moveaxis(jnp.asarray(a), r, 0) if r else a, x)
            for x, r in zip(things, self.roles, strict=True)
            if isinstance(r, int)
        ]

    def joined(self, carried: Sequence[Any], sliced: Sequence[Any]) -> list[Any]:
        """Puts both together again, in order."""
        a, b = iter(carried), iter(sliced)
        return [next(b) if isinstance(r, int) else next(a) for r in self.roles]


class _Body:
    """The body of a scan, for one crossing; JAX knows it again by its identity."""

    def __init__(self, function: ScanFunction, crossing: Crossing, roles: Roles) -> None:
        self.title, self.metadata = function._lift.title, function._metadata
        self.out_axes, self.roles = function._out_axes, roles
        self.graphdef, self.pure = crossing.graphdef, crossing.pure
        self.crossing = crossing
        self.entries, self.rest = _Split(roles.axes), _Split(roles.rest)
        self.carry_tree = _carry_tree(crossing, function._in_axes) if function._carries else None

    def carried_arguments(self, carry_rest: list[Any]) -> list[Any]:
        """Returns the plain arrays that are Carry, without those that are broadcast."""
        roles = self.rest.carried(self.rest.roles)
        return [x for x, role in zip(carry_rest, roles, strict=True) if role is Carry]

    def __call__(self, carry: Any, xs: Any) -> Any:
        carry_values, carry_rest, same_extras = carry
        extras = _joined_extras(same_extras, xs[2])
        flat = self.entries.joined(carry_values, xs[0])
        rest = self.rest.joined(carry_rest, xs[1])
        inside = by_leaf(flat, self.roles.entries, len(self.graphdef.leaves))
        names = AxisNames(self.crossing, self.roles, self.out_axes, self.metadata)
        out = self.pure(inside, rest, extras, names)
        definition = out.definition
        if definition.update is not None:
            change = structure_change(self.crossing, definition.update)
            if change is not None:
                raise StructureError(
                    f"{self.title}: {change} in the loop, which is compiled once for all steps: "
                    "only values may change. Make the structure before the loop."
                )
        given, parts = emissions(self.graphdef, out, inside)
        axes = tuple(
            self.roles.of(e.old) if e.old is not None else names.new_axes[e.new] for e in given
        )
        for emission, axis in zip(given, axes, strict=True):
            if axis is None and emission.old is not None:
                raise broadcast_error(self.title, self.crossing, emission.old[0])
        self._check_carry(definition, names.result_roles, out.arrays, rest)
        spec = definition.spec or (None,) * len(names.result_roles)
        array_roles = [r for r, s in zip(names.result_roles, spec, strict=True) if s is None]
        next_rest = self._next_rest(carry_rest, array_roles, out.arrays)
        next_values = self._next_values(carry_values, given, axes, parts)
        stacked = [x for x, r in zip(out.arrays, array_roles, strict=True) if r is not Carry]
        emitted = [x for x, axis in zip(parts, axes, strict=True) if axis is not Carry]
        exit_ = _Exit(definition, given, tuple(names.result_roles), axes)
        return (next_values, next_rest, same_extras), (stacked, emitted, out.extras, Rider(exit_))

    def _next_rest(
        self, carry_rest: list[Any], array_roles: list[Any], arrays: list[Any]
    ) -> list[Any]:
        new = iter([x for x, role in zip(arrays, array_roles, strict=True) if role is Carry])
        roles = self.rest.carried(self.rest.roles)
        return [
            next(new) if role is Carry else x for x, role in zip(carry_rest, roles, strict=True)
        ]

    def _next_values(
        self,
        carry_values: list[Any],
        given: Sequence[Emission],
        axes: Sequence[Any],
        parts: Sequence[Any],
    ) -> list[Any]:
        new = {e.old: x for e, x, axis in zip(given, parts, axes, strict=True) if axis is Carry}
        entries = self.entries.carried(self.roles.entries)
        next_values = []
        for entry, before in zip(entries, carry_values, strict=True):
            after = new.get(entry, before)
            if not same_value(after, before):
                self._check_same_type(self.crossing.leaf_path(entry[0]), before, after)
            next_values.append(after)
        return next_values

    def _check_carry(
        self, definition: OutDef, roles: Sequence[Any], arrays: list[Any], rest: list[Any]
    ) -> None:
        """Raises unless what is carried out is like what was carried in."""
        if self.carry_tree is None:
            return
        size = definition.tree.num_leaves
        spec = definition.spec or (None,) * size
        numbers = jax.tree_util.tree_unflatten(definition.tree, list(range(size)))
        after = _carried_part(numbers, self.out_axes)
        after_leaves, after_tree = jax.tree_util.tree_flatten(after)
        before_tree, positions = self.carry_tree
        if before_tree != after_tree:
            raise StructureError(
                f"{self.title}: the carry has to keep its structure. Before the step it is "
                f"{before_tree}, after it {after_tree}."
            )
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(after)]
        array_numbers = {n: i for i, n in enumerate(n for n in range(size) if spec[n] is None)}
        rest_numbers = {position: i for i, position in enumerate(self.crossing.rest)}
        for path, number, position in zip(paths, after_leaves, positions, strict=True):
            place = "carry" + jax.tree_util.keystr(path)
            is_object = position in self.crossing.roots
            if is_object != (spec[number] is not None):
                raise StructureError(
                    f"{self.title}: {place} is an object on one side of the step and an array on "
                    "the other. Return what came in, in the same place."
                )
            if is_object:
                self._check_same_object(place, definition, spec[number], position)
            else:
                before = rest[rest_numbers[position]]
                self._check_same_type(place, before, arrays[array_numbers[number]])

    def _check_same_object(
        self, place: str, definition: OutDef, entry: Any, position: int
    ) -> None:
        skeleton = self.graphdef.skeleton
        _, how, payload = skeleton.roots[self.crossing.roots.index(position)]
        if definition.update is not None:
            update = definition.update
            _, how_out, number = update.graphdef.skeleton.roots[update.first_output + entry]
            found = (how_out, (update.nodes if how_out == 2 else update.leaves)[number])
            same = found == (how, payload)
        else:
            is_node, number = entry
            same = (is_node, number) == (how == 2, payload)
        if not same:
            raise StructureError(
                f"{self.title}: {place} is another object after the step than before it. Carry the "
                "same object, and write its Variables."
            )

    def _check_same_type(self, place: str, before: Any, after: Any) -> None:
        before_leaves, before_tree = jax.tree_util.tree_flatten(before)
        after_leaves, after_tree = jax.tree_util.tree_flatten(after)
        if before_tree != after_tree:
            raise StructureError(
                f"{self.title}: the value of {place} has structure {before_tree} before the step "
                f"and {after_tree} after it. A carried value keeps its structure."
            )
        for a, b in zip(before_leaves, after_leaves, strict=True):
            a, b = jax.typeof(a), jax.typeof(b)
            weak = getattr(a, "weak_type", False)
            if a.shape != b.shape or (a.dtype != b.dtype and not weak):
                raise StructureError(
                    f"{self.title}: {place} is {a.str_short()} before the step and {b.str_short()} "
                    "after it. A carried value keeps its shape and dtype: convert it, or return it "
                    "as an output that is stacked."
                )


def _joined_extras(same: Any, sliced: list[Any]) -> Any:
    leaves, rider = same
    if rider.data is None:
        return ()
    tree, is_mapped = rider.data
    a, b = iter(leaves), iter(sliced)
    return jax.tree_util.tree_unflatten(tree, [next(b) if m else next(a) for m in is_mapped])


def _parts(axes: Any) -> tuple[Any, ...]:
    return axes if isinstance(axes, tuple) else (axes,)


def _carried_part(result: Any, out_axes: Any) -> Any:
    """Returns the part of a result where `out_axes` has Carry."""
    if is_carry(out_axes):
        return result
    index = next(n for n, part in enumerate(out_axes) if is_carry(part))
    return result[index]


def _carry_tree(crossing: Crossing, in_axes: Any) -> tuple[Any, list[int]]:
    """Returns the structure of the carried argument, and the positions of its leaves."""
    size = crossing.treedef.num_leaves
    args, _ = jax.tree_util.tree_unflatten(crossing.treedef, list(range(size)))
    index = 0
    if isinstance(in_axes, tuple):
        index = next(n for n, part in enumerate(in_axes) if is_carry(part))
    # Each object stands as a number here: both sides are compared with objects as leaves.
    positions, tree = jax.tree_util.tree_flatten(args[index])
    return tree, positions


def _moved_back(value: Any, axis: Any) -> Any:
    if isinstance(axis, StateAxes) or axis is None:
        raise TypeError(
            "nnx.scan: out_axes has None or StateAxes for something that each step makes anew. Give "
            "it an int, the axis along which the steps are stacked."
        )
    return jax.tree.map(lambda a: jnp.moveaxis(a, 0, axis) if axis else a, value)



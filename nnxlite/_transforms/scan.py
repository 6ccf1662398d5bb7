"""scan: `jax.lax.scan` over objects.

The body is kept with its crossing, so that JAX's caches know it again: an eager scan on known
objects costs about what `jax.lax.scan` does. Everything that is not sliced goes in by the carry:
what the body hands through unchanged, JAX turns into a constant of the loop.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from nnxlite._core.modes import mode_flags
from nnxlite._core.trace import Level
from nnxlite._transforms.arguments import Bound, resolve
from nnxlite._transforms.axes import Carry, StateAxes, is_carry
from nnxlite._transforms.axis_metadata import told_by
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.changes import changed_values
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.mapped import Kept, Rider, array_roles, extra_axes
from nnxlite._transforms.packing import Out
from nnxlite._transforms.roles import by_entry, mapped_size, roles_of, show
from nnxlite._transforms.scan_body import ScanBody, Split, is_flag, moved_back

MAX_BODIES = 8  # per structure of arguments: one for each combination of flags


@mode_flags()
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
        to the next, ints for what is sliced, None for what is broadcast; of that, bools and
        strings stay Python values. For an object also `StateAxes`, which may hold `Carry`.
      out_axes: A prefix of the result: `Carry` where the next carry is, ints for what is stacked.
      transform_metadata: As for `vmap`.

    Raises:
      ValueError: A broadcast Variable was written, or sliced sizes differ; with the path.
      StructureError: The structure of an object changed, or the carry is not of the same structure,
        shapes and dtypes as before; with the path, before and after.

    Example:
      >>> layers = nnx.split_rngs(splits=3)(nnx.vmap(lambda r: nnx.Linear(2, 2, rngs=r)))(
      ...     nnx.Rngs(0)
      ... )
      >>> @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
      ... def run(x, layer):
      ...     return layer(x)
      >>> run(jnp.ones((1, 2)), layers).shape
      (1, 2)
    """
    make = functools.partial(
        scanned,
        ScanFunction,
        length=length,
        reverse=reverse,
        unroll=unroll,
        in_axes=in_axes,
        out_axes=out_axes,
        transform_metadata=dict(transform_metadata or {}),
    )
    return make if fn is None else make(fn)


def scanned(
    kind: "type[ScanFunction]", fn: Callable[..., Any], *, in_axes: Any, **options: Any
) -> Callable[..., Any]:
    """Makes a scanned function of a function, a method, a partial or a Module."""
    function, args, kwargs = resolve(fn)
    function, options["transform_metadata"] = told_by(function, options["transform_metadata"])
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple):  # what comes with the function is the same for all
        in_axes = (*[None] * len(args), *in_axes)
    made = kind(function, in_axes=in_axes, first=len(args), bound=tuple(kwargs), **options)
    return Bound(made, *args, **kwargs) if args or kwargs else made


class ScanFunction(LiftedFunction):
    """A scanned function of objects; made by `scan`.

    `first` and `bound` are the number of positional and the names of keyword arguments that come
    with the function, as those of a partial.
    """

    transform = "nnx.scan"

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
        first: int = 0,
        bound: tuple[str, ...] = (),
    ) -> None:
        super().__init__(fn, self.transform)
        self._in_axes, self._first, self._bound_names = in_axes, first, bound
        self.out_axes = tuple(out_axes) if isinstance(out_axes, list) else out_axes
        self.metadata, self._length = transform_metadata, length
        self._options = {"reverse": reverse, "unroll": unroll}
        self._check_carries()

    @property
    def title(self) -> str:
        """How messages call the function."""
        return self._lift.title

    def _check_carries(self) -> None:
        given, taken = self._in_axes, self.out_axes
        for name, axes in (("in_axes", given), ("out_axes", taken)):
            carries = sum(map(is_carry, _parts(axes)))
            if carries != sum(map(is_carry, jax.tree.leaves(axes))):
                raise ValueError(
                    f"{self.title}: {name} is {show(axes)}, with nnx.Carry inside of an entry. It "
                    "stands for a whole argument or a whole part of the result."
                )
            if carries > 1:
                raise ValueError(
                    f"{self.title}: {name} is {show(axes)}, with {carries} times nnx.Carry. Carry "
                    "one thing, which may be a tuple of several."
                )
        if any(map(is_carry, _parts(given))) != any(map(is_carry, _parts(taken))):
            raise ValueError(
                f"{self.title}: in_axes is {show(given)} and out_axes is {show(taken)}; one has "
                "nnx.Carry and the other has none. What is carried in has to come out."
            )
        for axes in _parts(taken):
            if isinstance(axes, StateAxes) and any(map(is_carry, axes.axes)):
                raise ValueError(
                    f"{self.title}: out_axes has nnx.Carry inside of {axes!r}. Objects that come "
                    "in and are carried need no entry there: return them, or do not."
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._bound(args, kwargs) as (binding, leaves, level):
            body = self._body(binding, leaves, self._axes_of(len(args)), level)
            return binding.deliver(self._run(binding, leaves, body), level)

    def _axes_of(self, count: int) -> Any:
        """Returns `in_axes` for that many positional arguments."""
        axes = self._in_axes
        if isinstance(axes, tuple) or not (self._first or is_carry(axes)):
            return axes
        if is_carry(axes) and count != self._first + 1:
            raise ValueError(
                f"{self.title}: in_axes is nnx.Carry, which is one argument, but the call has "
                f"{count - self._first}. Give a tuple with an entry for each."
            )
        return (*[None] * self._first, *[axes] * (count - self._first))

    def _body(self, binding: Binding, leaves: list[Any], in_axes: Any, level: Level) -> ScanBody:
        """Returns the body for these arguments; JAX knows it again by its identity."""
        crossing, fn = binding.crossing, self._lift.fn
        roles = roles_of(binding, leaves, in_axes, self._bound_names)
        flags = {
            n: leaves[position]
            for n, position in enumerate(crossing.rest)
            if roles.rest[n] is None and is_flag(leaves[position])
        }
        key, known = (roles, flags), crossing.kept.setdefault("scan", [])
        kept = next((each for each in known if each.serves(key, crossing, fn, level)), None)
        if kept is None:
            body = ScanBody(self, crossing, roles, in_axes, flags)
            kept = Kept.of(body, key, fn)
            known[:] = [kept, *(each for each in known if each.key != key)][:MAX_BODIES]
        return kept.made

    def _run(self, binding: Binding, leaves: list[Any], body: ScanBody) -> Out:
        roles, entries, rest_split = body.roles, body.entries, body.rest
        values = binding.plan.gather()
        flat, rest = by_entry(values, roles.entries), [leaves[n] for n in binding.crossing.rest]
        length = mapped_size(binding, roles, flat, rest, self._length)
        if length is None:
            raise ValueError(
                f"{self.title} slices none of its arguments, so the number of steps is not known. "
                "Give length, or an axis in in_axes."
            )
        seen = body.without_flags(rest)
        carry = (entries.carried(flat), rest_split.carried(seen))
        xs = (entries.sliced(flat), rest_split.sliced(seen))
        same, mapped = self._split_extras(binding, body, carry, xs, length)
        (carry_values, carry_rest, _), (arrays, parts, extras, rider) = self._loop(
            body, (*carry, same), (*xs, mapped), length
        )
        exit_ = rider.data
        carried_arrays = iter(body.carried_arguments(carry_rest))
        stacked = iter(arrays)
        results = [
            next(carried_arrays) if role is Carry else moved_back(next(stacked), role)
            for role in array_roles(exit_.definition, exit_.result_roles)
        ]
        carried = dict(zip(entries.carried(roles.entries), carry_values, strict=True))
        stacked = iter(parts)
        outer = [
            moved_back(next(stacked), axis) if entry is None else carried[entry]
            for entry, axis in zip(exit_.carried_as, exit_.axes, strict=True)
        ]
        changed = changed_values(exit_.frames, exit_.emissions, outer, values)
        return Out(results, changed, extras, exit_.definition)

    def _loop(self, body: ScanBody, carry: Any, xs: Any, length: int) -> Any:
        """Runs the steps, and returns the last carry and what they hand out, stacked."""
        return jax.lax.scan(body, carry, xs, length=length, **self._options)

    def _split_extras(
        self, binding: Binding, body: ScanBody, carry: Any, xs: Any, length: int
    ) -> tuple[Any, list[Any]]:
        """Returns what the extras hand in: what is the same for all, and what is sliced."""
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
        split = Split([0 if mapped else None for mapped in is_mapped])
        return (split.carried(leaves), Rider((tree, tuple(is_mapped)))), split.sliced(leaves)


def _parts(axes: Any) -> tuple[Any, ...]:
    return axes if isinstance(axes, tuple) else (axes,)

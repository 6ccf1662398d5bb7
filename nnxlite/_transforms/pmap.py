"""pmap: `jax.pmap` over objects, for programs that map a leading axis over devices.

JAX keeps `pmap` for them, made of `jit` and `shard_map`; new programs use `nnx.shard_map`. It is
`vmap` over devices, with one difference: what is broadcast may be written, as each device is
trusted to write the same (a mean over all of them).

JAX asks for the axes of all that leaves before it maps. So each new structure or shape is traced
once more, abstractly, to learn what leaves.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from nnxlite._core.modes import mode_flags
from nnxlite._core.state import State
from nnxlite._core.trace import Level
from nnxlite._transforms.arguments import (
    Bound,
    Chosen,
    Statics,
    by_position,
    numbers,
    parameters,
    resolve,
)
from nnxlite._transforms.axes import StateAxes
from nnxlite._transforms.axis_metadata import told_by
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.changes import changed_values, emissions
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.donation import Donation, with_all_changed
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.mapped import (
    AxisNames,
    Kept,
    Rider,
    array_places,
    array_roles,
    emission_place,
    extra_axes,
)
from nnxlite._transforms.packing import Out
from nnxlite._transforms.roles import Roles, by_entry, by_leaf, mapped_size, roles_of, show

MAX_SHAPES = 32


@mode_flags()
def pmap(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    axis_name: Hashable | None = None,
    in_axes: Any = 0,
    out_axes: Any = 0,
    static_broadcasted_argnums: int | Iterable[int] = (),
    devices: Sequence[Any] | None = None,
    backend: str | None = None,
    axis_size: int | None = None,
    donate_argnums: int | Iterable[int] = (),
    transform_metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Maps a function of objects over axes of arrays and of Variables, one slice per device.

    Of a mapped Variable each device sees a slice and may write it. A broadcast one (axis None) may
    be written too: it gets what one device wrote, so let all write the same. JAX does not check it;
    `nnx.shard_map` does, and is what new programs use.

    Args:
      fn: The function; without it, a decorator is returned.
      axis_name: The name of the axis for collectives, such as `jax.lax.pmean`.
      in_axes: A prefix of the positional arguments, static ones included, of axes counted from the
        front, None to broadcast. For an object: an axis for all its leaves, or `StateAxes`.
        Keyword arguments are mapped along axis 0.
      out_axes: The same for the result.
      static_broadcasted_argnums: Positions of arguments that are compile-time constants.
      devices: As for `jax.pmap`.
      backend: As for `jax.pmap`.
      axis_size: As for `jax.pmap`.
      donate_argnums: Positions of arguments whose buffers may be reused for results. Objects get
        new arrays; other arguments are gone after the call.
      transform_metadata: As for `vmap`.

    Raises:
      ValueError: Mapped sizes differ, or there are fewer devices; with the path.
      StructureError: A shared leaf would have two axes; with both places.

    Example:
      >>> @nnx.pmap(in_axes=(None, 0), axis_name="devices")
      ... def apply(model, x):
      ...     return model(x)
      >>> apply(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jnp.ones((1, 8, 2))).shape
      (1, 8, 3)
    """
    make = functools.partial(
        _pmap,
        in_axes=in_axes,
        out_axes=out_axes,
        static_argnums=numbers(static_broadcasted_argnums),  # type: ignore[arg-type]
        donate_argnums=numbers(donate_argnums),  # type: ignore[arg-type]
        transform_metadata=dict(transform_metadata or {}),
        axis_name=axis_name,
        devices=None if devices is None else tuple(devices),
        backend=backend,
        axis_size=axis_size,
    )
    return make if fn is None else make(fn)


def _pmap(
    fn: Callable[..., Any],
    *,
    in_axes: Any,
    static_argnums: tuple[int, ...],
    donate_argnums: tuple[int, ...],
    **options: Any,
) -> Callable[..., Any]:
    function, args, kwargs = resolve(fn)
    function, options["transform_metadata"] = told_by(function, options["transform_metadata"])
    first = len(args)
    if isinstance(in_axes, list):
        in_axes = tuple(in_axes)
    if isinstance(in_axes, tuple):  # what comes with the function is the same for all
        in_axes = (*[None] * first, *in_axes)
    mapped = PmapFunction(
        function,
        in_axes=in_axes,
        static_argnums=tuple(n + first if n >= 0 else n for n in static_argnums),
        donate_argnums=tuple(n + first if n >= 0 else n for n in donate_argnums),
        first=first,
        bound=tuple(kwargs),
        **options,
    )
    return Bound(mapped, *args, **kwargs) if args or kwargs else mapped


class PmapFunction(LiftedFunction):
    """A function of objects mapped over devices; made by `pmap`.

    `first` and `bound` are the number of positional and the names of keyword arguments that come
    with the function, as those of a partial.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        in_axes: Any,
        out_axes: Any,
        static_argnums: tuple[int, ...],
        donate_argnums: tuple[int, ...],
        transform_metadata: Mapping[str, Any],
        first: int = 0,
        bound: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        super().__init__(fn, "nnx.pmap")
        self._in_axes, self._first, self._bound_names = in_axes, first, bound
        self.out_axes = tuple(out_axes) if isinstance(out_axes, list) else out_axes
        self.metadata, self.options = transform_metadata, options
        title, self._known = self.title, parameters(fn)
        for name, axes in (("in_axes", in_axes), ("out_axes", out_axes)):
            _check_axes(name, axes, title)
        self._static = Chosen(self._known, static_argnums, (), title)
        self.donated = Chosen(self._known, donate_argnums, (), title)
        self._static.check(fn, "static_broadcasted_argnums")
        self.donated.check(fn, "donate_argnums")

    @property
    def title(self) -> str:
        """How messages call the function."""
        return self._lift.title

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        in_axes, statics = self._in_axes, None
        if self._first and not isinstance(in_axes, tuple):
            in_axes = (*[None] * self._first, *[in_axes] * (len(args) - self._first))
        if self._static:
            args, kwargs = by_position(args, kwargs, self._known)
            if isinstance(in_axes, tuple):
                chosen = self._static.positions
                in_axes = tuple(axis for n, axis in enumerate(in_axes) if n not in chosen)
            args, kwargs, statics = Statics.take(args, kwargs, self._static)
        with self._bound(args, kwargs, statics) as (binding, leaves, level):
            return binding.deliver(self._map(binding, leaves, in_axes, level), level)

    def _map(self, binding: Binding, leaves: list[Any], in_axes: Any, level: Level) -> Out:
        crossing, fn = binding.crossing, self._lift.fn
        roles = roles_of(binding, leaves, in_axes, self._bound_names)
        kept = crossing.kept.get("pmap")
        if kept is None or not kept.serves(roles, crossing, fn, level):
            kept = crossing.kept["pmap"] = Kept.of(_Mapped(self, crossing, roles), roles, fn)
        mapped: _Mapped = kept.made
        values = binding.plan.gather()
        flat, rest = by_entry(values, roles.entries), [leaves[n] for n in crossing.rest]
        size = mapped_size(binding, roles, flat, rest, self.options["axis_size"])
        self._check_devices(size)
        operands, inputs = mapped.split(flat, rest), binding.extra_inputs()
        axes: Any = None
        if inputs:
            run = functools.partial(mapped.abstract_extras, operands)
            axes = extra_axes(binding, inputs, size, run)
        ready = mapped.ready((*operands, inputs), axes)
        if mapped.donation:
            out: Any = mapped.donation.call(ready, binding, (*operands, inputs))
        else:
            out = ready(*operands, inputs)
        arrays, parts, extras, rider = out
        definition, frames, given, _ = rider.data
        return Out(arrays, changed_values(frames, given, parts, values), extras, definition)

    def _check_devices(self, size: int | None) -> None:
        devices = self.options["devices"]
        known = jax.local_devices(backend=self.options["backend"]) if devices is None else devices
        if size is None:
            raise ValueError(
                f"{self.title} maps none of its arguments. Give one of them an axis in in_axes."
            )
        if jax.process_count() == 1 and (size > len(known) or (devices and size != len(devices))):
            raise ValueError(
                f"{self.title} maps axes of size {size} over {len(known)} device(s), one slice "
                "each. Put more than one slice on a device by an axis of its own (nnx.vmap "
                "inside), or use nnx.shard_map, which splits axes into equal parts."
            )


def _check_axes(option: str, axes: Any, title: str) -> None:
    given = jax.tree.leaves(axes, is_leaf=lambda x: isinstance(x, StateAxes))
    for axis in (r for x in given for r in (x.axes if isinstance(x, StateAxes) else (x,))):
        if axis is not None and (type(axis) is not int or axis < 0):
            raise ValueError(
                f"{title}: {option} is {show(axes)}, with {show(axis)} in it. JAX's pmap takes "
                "axes counted from the front, 0 or more, or None."
            )


class _Leaving(NamedTuple):
    """The axes of what leaves: of the arrays of the result, and of what changed."""

    arrays: tuple[Any, ...]
    emitted: tuple[Any, ...]


class _Mapped:
    """The mapped function of one crossing, with one `jax.pmap` for each shape of the arguments."""

    def __init__(self, function: PmapFunction, crossing: Crossing, roles: Roles) -> None:
        self.function, self.crossing, self.roles = function, crossing, roles
        self.title = function.title
        self.donation = Donation(crossing, function.donated)
        # Of a State only what changed leaves, so its other buffers could not be replaced.
        kinds = crossing.graphdef.leaves
        self.donation.leaves = tuple(n for n in self.donation.leaves if kinds[n][0] is not State)
        self._gives = [number in self.donation.leaves for number, _ in roles.entries]
        self._gives_rest = [position in self.donation.rest for position in crossing.rest]
        self._ready: OrderedDict[Any, Callable[..., Any]] = OrderedDict()
        self._lock = threading.Lock()

    def split(self, flat: Sequence[Any], rest: Sequence[Any]) -> tuple[list[Any], ...]:
        """Splits what goes in, or its axes, into what is donated and what is kept."""
        return (
            [x for x, gives in zip(flat, self._gives, strict=True) if gives],
            [x for x, gives in zip(flat, self._gives, strict=True) if not gives],
            [x for x, gives in zip(rest, self._gives_rest, strict=True) if gives],
            [x for x, gives in zip(rest, self._gives_rest, strict=True) if not gives],
        )

    def ready(self, operands: tuple[Any, ...], extra_axes: Any) -> Callable[..., Any]:
        """Returns the `jax.pmap` for operands of these shapes."""
        leaves, tree = jax.tree_util.tree_flatten(operands)
        mapped = tuple(jax.tree.leaves(extra_axes, is_leaf=lambda x: x is None))
        key = tree, tuple(map(self._type_of, leaves)), mapped
        with self._lock:
            found = self._ready.get(key)
        if found is None:
            learned = jax.eval_shape(self._pmapped(extra_axes, 0), *operands)
            found = self._pmapped(extra_axes, (*self._axes_of(learned), 0, 0))
            with self._lock:
                self._ready[key] = found
                while len(self._ready) > MAX_SHAPES:
                    self._ready.popitem(last=False)
        return found

    def _type_of(self, leaf: Any) -> Any:
        try:
            return jax.typeof(leaf)
        except TypeError:
            raise TypeError(
                f"{self.title}: an argument is a {type(leaf).__name__}, which JAX cannot trace. "
                "Pass an array or a number; name a constant in static_broadcasted_argnums."
            ) from None

    def _pmapped(self, extra_axes: Any, out_axes: Any) -> Callable[..., Any]:
        axes = self.split(self.roles.axes, self.roles.rest)
        return jax.pmap(
            functools.wraps(self.function._lift.fn, ("__name__", "__qualname__"), ())(
                functools.partial(self._body)
            ),
            in_axes=(*axes, extra_axes),
            out_axes=out_axes,
            donate_argnums=(0, 2),
            **self.function.options,
        )

    def _body(self, *operands: Any) -> Any:
        function, crossing, entries = self.function, self.crossing, self.roles.entries
        donated, kept, donated_rest, kept_rest, extras = operands
        flat = _joined(self._gives, donated, kept)
        rest = _joined(self._gives_rest, donated_rest, kept_rest)
        inside = by_leaf(flat, entries, len(crossing.graphdef.leaves))
        names = AxisNames(crossing, self.roles, function.out_axes, function.metadata, self.title)
        out = crossing.pure(inside, rest, extras, names)
        out = with_all_changed(out, self.donation.leaves, inside)
        frames, given, parts = emissions(crossing.graphdef, out, inside)
        leaving = _Leaving(
            tuple(array_roles(out.definition, names.result_roles)),
            tuple(names.axis_of(emission) for emission in given),
        )
        return out.arrays, parts, out.extras, Rider((out.definition, frames, given, leaving))

    def _axes_of(self, learned: Any) -> tuple[list[Any], list[Any]]:
        """Returns the axes of what leaves; `learned` has its shapes, mapped along axis 0."""
        arrays, parts, _, rider = learned
        definition, _, given, leaving = rider.data
        for number, (axis, array) in enumerate(zip(leaving.arrays, arrays, strict=True)):
            self._check_leaving(axis, array, lambda n=number: array_places(definition)[n])
        for emission, axis, part in zip(given, leaving.emitted, parts, strict=True):
            place = functools.partial(emission_place, self.crossing, emission, definition)
            self._check_leaving(axis, part, place)
        return list(leaving.arrays), list(leaving.emitted)

    def _check_leaving(self, axis: Any, value: Any, place: Callable[[], str]) -> None:
        if isinstance(axis, StateAxes):
            raise TypeError(
                f"{self.title}: out_axes has StateAxes for {place()}, which is an array. That is "
                "for objects; for an array use an int or None."
            )
        for leaf in jax.tree.leaves(value):
            if axis is not None and axis >= len(leaf.shape):
                raise ValueError(
                    f"{self.title}: out_axes has {axis} for {place()}, which is of shape "
                    f"{leaf.shape[1:]} on each device. Give an axis from 0 to {leaf.ndim - 1}, "
                    "or None for what is the same on all devices."
                )

    def abstract_extras(self, operands: tuple[Any, ...], inputs: Any) -> Any:
        """Returns what the extras hand out."""
        return jax.eval_shape(self._pmapped(None, 0), *operands, inputs)[2]


def _joined(gives: Sequence[bool], donated: Sequence[Any], kept: Sequence[Any]) -> list[Any]:
    a, b = iter(donated), iter(kept)
    return [next(a) if given else next(b) for given in gives]

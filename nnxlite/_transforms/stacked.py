"""Stacked: many equal layers as one Module, made by `vmap` and applied by `scan`.

A Python loop over layers is traced and compiled once per layer. `Stacked` is compiled once: its one
*block* has Variables with an axis of layers in front, and a call scans it along that axis. What
it computes is what the loop over the single layers computes; this file says how the arguments of
the loop become those of a scan.

    block    the stacked layers: their Variables have the axis 0 for the layer
    carry    the argument that each layer hands to the next
    shared   what all layers get; objects in it are carried along, as each layer may write them
"""

import dataclasses
import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, overload

import jax

from nnxlite._core import iterate, sharding
from nnxlite._core.errors import Path, TraceLevelError
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.module import Module
from nnxlite._core.rngs import Rngs, RngStream
from nnxlite._core.statics import Static, static
from nnxlite._core.trace import Opaque
from nnxlite._core.variable import Variable
from nnxlite._transforms.axes import Carry, StateAxes, is_carry
from nnxlite._transforms.packing import opaque_flatten
from nnxlite._transforms.remat_scan import checked_lengths, remat_scan
from nnxlite._transforms.roles import show
from nnxlite._transforms.scan import scan
from nnxlite._transforms.vmap import vmap


class Stacked(Module):
    """Equal layers, one after the other: compiled once, however many there are.

    Each layer is made with random keys of its own, and called with what the one before returned.
    All that holds for a list of such layers in a loop holds here: batch statistics and random
    streams are those of each layer, `train`, `eval`, gradients and captures reach all of them.
    Values that layers sow come with the axis of the layers in front.

    Args:
      make: A class or function that makes one layer.
      length: The number of layers.
      *args: For `make`, the same for all layers, except for `Rngs` and `RngStream`: of these each
        layer gets its own, split off. Keyword arguments other than those below are for `make` too.
      remat: Whether a layer is computed again in the backward pass instead of stored; or what may
        be stored, from `jax.checkpoint_policies`.
      lengths: Lengths of nested loops, as for `nnx.remat_scan`; their product is `length`.
      in_axes: What happens to the positional arguments of a call: one entry for each, `nnx.Carry`
        for the one that is handed on, None for what is the same for all layers, an int (or
        `StateAxes`) for what has an axis of layers. By default the first one is handed on, and the
        others are the same for all.
      out_axes: The same for what a layer returns. `(nnx.Carry, 0)` is for layers that return
        `(x, y)`: what they return second is stacked.
      partition_name: The name of the axis of the layers in sharding metadata.

    Attributes:
      block: The layers as one Module whose Variables have the axis of the layers in front, for
        `nnx.vmap` and `nnx.scan` by hand.
      length: The number of layers.
      lengths: The lengths of the loops that are rematerialised; empty without `remat`.
      policy: What may be stored of a layer that is computed again.
      in_axes: As given.
      out_axes: As given.
      partition_name: As given.

    Raises:
      ValueError: `length` is not positive, or not the product of `lengths`; or `in_axes` and
        `out_axes` do not fit together.
      TypeError: `make` is an object instead of what makes one, or does not make something that can
        be called.

    Example:
      >>> layers = nnx.Stacked(nnx.Linear, 12, 4, 4, remat=True, rngs=nnx.Rngs(0))
      >>> layers(jnp.ones((1, 4))).shape, layers.block.kernel.shape
      ((1, 4), (12, 4, 4))
      >>> len(layers), layers[0].kernel.shape
      (12, (4, 4))
    """

    def __init__(
        self,
        make: Callable[..., Any],
        length: int,
        /,
        *args: Any,
        remat: bool | Callable[..., Any] = False,
        lengths: Sequence[int] | None = None,
        in_axes: Sequence[Any] | None = None,
        out_axes: Any = Carry,
        partition_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        self.length = operator.index(length)
        if self.length < 1:
            raise ValueError(f"nnx.Stacked expected a positive number of layers, found {length}.")
        self.lengths = _loops(self.length, remat, lengths)
        self.policy = None if isinstance(remat, bool) else remat
        self.in_axes = None if in_axes is None else _with_carry("in_axes", in_axes)
        self.out_axes = out_axes if is_carry(out_axes) else _with_carry("out_axes", out_axes)
        self.partition_name = partition_name
        self.block = _made(make, self.length, args, kwargs, _metadata(partition_name))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the last layer returns, and what `out_axes` says of the others.

        Args:
          *args: For each layer, as `in_axes` says: the first one is handed from layer to layer.
            Objects among the others may be written by each, as in a loop.
          **kwargs: The same for all layers. As among the positional arguments, bools, strings and
            other things that are no arrays or numbers stay what they are.
        """
        axes = self._axes_of(args)
        leaves, tree = opaque_flatten(
            ([x for x, axis in zip(args, axes, strict=True) if axis is None], kwargs)
        )
        objects = [leaf.node for leaf in leaves if type(leaf) is Opaque]
        others = [leaf for leaf in leaves if type(leaf) is not Opaque]
        order = _Order(axes, tree, tuple(type(leaf) is Opaque for leaf in leaves))
        (carry,) = (x for x, axis in zip(args, axes, strict=True) if is_carry(axis))
        per_layer = tuple(x for x, axis in zip(args, axes, strict=True) if _is_per_layer(axis))
        return self._scan(axes)(self.block, carry, objects, others, order, per_layer)

    def _axes_of(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        if not args:
            raise TypeError("nnx.Stacked was called without an argument to hand to its layers.")
        if self.in_axes is None:
            return (Carry, *[None] * (len(args) - 1))
        if len(args) != len(self.in_axes):
            raise TypeError(
                f"nnx.Stacked: in_axes is {show(self.in_axes)}, but the call has {len(args)} "
                "positional arguments. Give one entry for each."
            )
        return self.in_axes

    def _scan(self, axes: tuple[Any, ...]) -> Callable[..., Any]:
        per_layer = tuple(axis for axis in axes if _is_per_layer(axis))
        how = self.length, self.lengths, self.policy
        return _scan_for(static((*how, per_layer, self.out_axes, self.partition_name)))

    def __len__(self) -> int:
        return self.length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        """Returns a copy of one layer, or a list of copies; writing them leaves the stack as it is.

        To write one layer, write `stacked.block` at that index.
        """
        if isinstance(index, slice):
            return [self._layer(n) for n in range(*index.indices(self.length))]
        number = operator.index(index)
        if not -self.length <= number < self.length:
            raise IndexError(f"Stacked of {self.length} layers has no layer {number}")
        return self._layer(number % self.length)

    def __iter__(self) -> Iterator[Any]:
        return (self._layer(number) for number in range(self.length))

    def _layer(self, number: int) -> Any:
        def single(path: Path, leaf: Any) -> Any:
            if not isinstance(leaf, Variable):
                return leaf[number]
            variable = leaf.replace(jax.tree.map(lambda a: a[number], leaf.get_raw_value()))
            return sharding.remove_axis(variable, 0, _metadata(self.partition_name))

        return iterate.map(single, self.block)


def layer(
    block: Any,
    carry: Any,
    objects: list[Any],
    others: list[Any],
    order: "_Order",
    per_layer: tuple[Any, ...],
) -> Any:
    """One step of the scan: calls one layer as the caller of the stack would."""
    args, kwargs = order.arguments(carry, objects, others, per_layer)
    return block(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _Order:
    """Where the arguments of a call stand that the scan gets by what it does with them.

    Attributes:
      axes: Per positional argument what happens to it.
      tree: Of those that all layers share, and of the keyword arguments.
      is_object: Per leaf of it.
    """

    axes: tuple[Any, ...]
    tree: Any
    is_object: tuple[bool, ...]

    def arguments(
        self, carry: Any, objects: list[Any], others: list[Any], per_layer: tuple[Any, ...]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Returns the positional and keyword arguments of one layer."""
        of_objects, of_others, of_layer = iter(objects), iter(others), iter(per_layer)
        leaves = [next(of_objects) if each else next(of_others) for each in self.is_object]
        shared, kwargs = jax.tree_util.tree_unflatten(self.tree, leaves)
        of_shared = iter(shared)
        args = [
            carry if is_carry(axis) else next(of_shared) if axis is None else next(of_layer)
            for axis in self.axes
        ]
        return args, kwargs


@functools.lru_cache(maxsize=256)
def _scan_for(options: Static) -> Callable[..., Any]:
    """Returns the scan of `layer`, one and the same for all stacks with equal options.

    So equal models find each other's traces, and a call has nothing to make.
    """
    length, lengths, policy, per_layer, out_axes, partition_name = options.value
    # What is carried and never written costs as much as what is broadcast.
    shared = StateAxes({...: Carry})
    axes = {
        "in_axes": (0, Carry, shared, None, None, per_layer),
        "out_axes": out_axes,
        "transform_metadata": _metadata(partition_name),
    }
    if lengths:
        return remat_scan(layer, lengths=lengths, policy=policy, **axes)
    return scan(layer, length=length, **axes)


def _is_per_layer(axis: Any) -> bool:
    return axis is not None and not is_carry(axis)


def _with_carry(name: str, axes: Any) -> tuple[Any, ...]:
    if not isinstance(axes, tuple | list) or sum(map(is_carry, axes)) != 1:
        raise ValueError(
            f"nnx.Stacked: {name} is {show(axes)}. Give a tuple with nnx.Carry for one entry: what "
            "a layer returns there is handed to the next one."
        )
    return tuple(axes)


def _metadata(partition_name: str | None) -> dict[str, Any]:
    return {} if partition_name is None else {sharding.PARTITION_NAME: partition_name}


def _loops(length: int, remat: Any, lengths: Sequence[int] | None) -> tuple[int, ...]:
    """Returns the lengths of the loops that are rematerialised; none if nothing is."""
    if not isinstance(remat, bool) and not callable(remat):
        raise TypeError(
            "nnx.Stacked expected remat to be True, False or one of jax.checkpoint_policies, "
            f"found {remat!r}."
        )
    if lengths is None:
        return () if remat is False else (length,)
    found = checked_lengths(lengths, "nnx.Stacked")
    if math.prod(found) != length:
        raise ValueError(
            f"nnx.Stacked has {length} layers, but lengths={found} are for {math.prod(found)}."
        )
    return found


def _made(
    make: Callable[..., Any],
    length: int,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    metadata: dict[str, Any],
) -> Any:
    """Returns the layers, stacked."""
    name = getattr(make, "__name__", "what makes a layer")
    if kind_of(make) == OBJECT:
        raise TypeError(
            "nnx.Stacked makes its layers itself, each with values of its own, and was given a "
            f"{type(make).__name__}. Give the class, or a function that makes one layer."
        )
    given = {id(x): x for x in (*args, *kwargs.values()) if isinstance(x, Rngs | RngStream)}
    number = {identity: n for n, identity in enumerate(given)}

    def one(streams: list[Any]) -> Any:
        def own(value: Any) -> Any:
            return streams[number[id(value)]] if id(value) in number else value

        return make(*map(own, args), **{name: own(value) for name, value in kwargs.items()})

    with _restored_if_it_fails(given.values()):
        streams = [value.split(length) for value in given.values()]
        try:
            made = vmap(one, axis_size=length, transform_metadata=metadata)(streams)
        except TraceLevelError as error:
            raise TraceLevelError(
                f"{error} In nnx.Stacked, random streams are given as arguments beside {name}, and "
                "an object that all layers share is given to each call."
            ) from error
        if kind_of(made) != OBJECT or not callable(made):
            raise TypeError(
                f"nnx.Stacked expected {name} to make a Module that can be called, found "
                f"{type(made).__name__}."
            )
    return made


@contextmanager
def _restored_if_it_fails(given: Iterable[Rngs | RngStream]) -> Iterator[None]:
    """Puts back how many keys were drawn if the block raises."""
    streams: list[RngStream] = []
    for each in given:
        streams += [each] if isinstance(each, RngStream) else [stream for _, stream in each.items()]
    before = [(stream.count, stream.count.get_value()) for stream in streams]
    try:
        yield
    except BaseException:
        for count, value in before:
            count.set_value(value)
        raise

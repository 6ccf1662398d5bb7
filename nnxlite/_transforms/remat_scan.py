"""remat_scan: a scan over layers whose backward pass needs little memory.

The steps of one `scan` are run in nested loops, and each step of each loop is rematerialised. To
the objects it is the same scan: roles, writes, names and records are those of `scan.py`, which
also makes the body. What is sliced is reshaped on the way in, from one axis for all steps to one
for each loop, and what is stacked is reshaped back on the way out.

JAX makes a constant of the loop of what a body hands through in its carry, and does not store it
for the backward pass; it does not see that through a rematerialised function. So each level hands
out only what it changed, and puts the rest back by itself.
"""

import functools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._transforms.axes import Carry
from nnxlite._transforms.mapped import Rider
from nnxlite._transforms.scan import ScanFunction, scanned
from nnxlite._transforms.scan_body import ScanBody

Policy = Callable[..., Any]
Step = Callable[[Any, Any], tuple[Any, tuple[Any, Rider]]]
"""Takes carry and slices; gives the next carry, what is stacked, and what changed in the carry."""


def remat_scan(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    lengths: Sequence[int],
    policy: Policy | None = None,
    reverse: bool = False,
    in_axes: Any = (0, Carry),
    out_axes: Any = Carry,
    transform_metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Loops a function over many equal layers, with little memory for the backward pass.

    It does what `nnx.scan` does with the same axes and `prod(lengths)` steps: the layers have one
    axis of that size, and so have results and records. The steps run in nested loops of `lengths`,
    each step of each loop rematerialised. With `n` layers in `d` loops of equal length, the
    backward pass holds about `d * n ** (1 / d)` carries, and what one call of `fn` keeps; `fn` is
    computed `d` more times.

    One length is `nnx.scan(nnx.remat(fn))`: it holds `n` carries and computes `fn` once more. That
    is the better tool as long as `n` carries fit in memory, which for most models they do. Two
    lengths near the square root of `n` are for hundreds of layers, or carries as large as a long
    sequence. `nnx.scan` alone holds what all calls keep, and computes nothing twice.

    Args:
      fn: `fn(layer, x) -> x` with the axes given by default; without it, a decorator is returned.
      lengths: The lengths of the loops, the outermost first.
      policy: What may be stored of every step, as for `nnx.remat`. It is stored for all steps.
      reverse: Whether to start with the last layer.
      in_axes: As for `nnx.scan`. Of an object, `StateAxes` say by filter what is stacked (an int,
        the axis of the layers), carried from layer to layer (`Carry`), and the same for all
        (None). Random streams are Variables like others: those with a key per layer
        (`nnx.split_rngs(splits=n)`) are stacked, a single one that all draw from is carried.
      out_axes: As for `nnx.scan`.
      transform_metadata: As for `nnx.scan`; the name is that of the one axis of the layers.

    Raises:
      ValueError: `lengths` are not positive, or the layers are not `prod(lengths)`; and as for
        `nnx.scan`.
      StructureError: As for `nnx.scan`.

    Example:
      >>> make = nnx.vmap(lambda rngs: nnx.Linear(4, 4, rngs=rngs))
      >>> layers = nnx.split_rngs(splits=6)(make)(nnx.Rngs(0))
      >>> @nnx.remat_scan(lengths=(2, 3))
      ... def tower(layer, x):
      ...     return jax.nn.relu(layer(x))
      >>> tower(layers, jnp.ones((1, 4))).shape, layers.kernel.shape
      ((1, 4), (6, 4, 4))
    """
    make = functools.partial(
        scanned,
        RematScanFunction,
        lengths=checked_lengths(lengths, "nnx.remat_scan"),
        policy=policy,
        reverse=reverse,
        in_axes=in_axes,
        out_axes=out_axes,
        transform_metadata=dict(transform_metadata or {}),
    )
    return make if fn is None else make(fn)


def checked_lengths(lengths: Any, title: str) -> tuple[int, ...]:
    """Returns the lengths of nested loops as a tuple of positive ints; `title` is for messages."""
    try:
        found = tuple(operator.index(length) for length in lengths)
    except TypeError:
        raise TypeError(
            f"{title} expected lengths as a sequence of ints, such as (8, 8) for 64 layers, found "
            f"{lengths!r}."
        ) from None
    if not found or min(found) < 1:
        raise ValueError(
            f"{title} expected one positive length per loop, found {lengths!r}. For 64 layers give "
            "lengths=(8, 8), or (64,)."
        )
    return found


class RematScanFunction(ScanFunction):
    """A function of objects, scanned in nested loops; made by `remat_scan`."""

    transform = "nnx.remat_scan"

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        lengths: tuple[int, ...],
        policy: Policy | None,
        reverse: bool,
        in_axes: Any,
        out_axes: Any,
        transform_metadata: Mapping[str, Any],
        first: int = 0,
        bound: tuple[str, ...] = (),
    ) -> None:
        super().__init__(
            fn,
            length=math.prod(lengths),
            reverse=reverse,
            unroll=1,
            in_axes=in_axes,
            out_axes=out_axes,
            transform_metadata=transform_metadata,
            first=first,
            bound=bound,
        )
        self._lengths, self._policy, self._reverse = lengths, policy, reverse

    def _loop(self, body: ScanBody, carry: Any, xs: Any, length: int) -> Any:
        lengths = self._lengths
        if body.loops is None:
            step = _step_of(body)
            for each in reversed(lengths):
                step = _loop_of(_recomputed(step, self._policy), each, self._reverse)
            body.loops = step
        by_loop = jax.tree.map(lambda x: jnp.reshape(x, (*lengths, *x.shape[1:])), xs)
        after, (stacked, _) = body.loops(carry, by_loop)
        depth = len(lengths)
        return after, jax.tree.map(lambda y: jnp.reshape(y, (length, *y.shape[depth:])), stacked)


def _step_of(body: ScanBody) -> Step:
    def step(carry: Any, xs: Any) -> Any:
        after, stacked = body(carry, xs)
        pairs = zip(jax.tree.leaves(carry), jax.tree.leaves(after), strict=True)
        changed = tuple(n for n, (old, new) in enumerate(pairs) if new is not old)
        return after, (stacked, Rider(changed))

    return step


def _recomputed(step: Step, policy: Policy | None) -> Step:
    """Returns the step, rematerialised; what it hands through in the carry goes around that."""

    # In a loop, XLA does not merge what is computed again with what was computed before.
    @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
    def changes(carry: Any, xs: Any) -> Any:
        after, (stacked, rider) = step(carry, xs)
        return _picked(after, rider), stacked, rider

    def run(carry: Any, xs: Any) -> Any:
        new, stacked, rider = changes(carry, xs)
        return _replaced(carry, rider, new), (stacked, rider)

    return run


def _loop_of(step: Step, length: int, reverse: bool) -> Step:
    def run(carry: Any, xs: Any) -> Any:
        after, (stacked, rider) = jax.lax.scan(step, carry, xs, length=length, reverse=reverse)
        return _replaced(carry, rider, _picked(after, rider)), (stacked, rider)

    return run


def _picked(carry: Any, rider: Rider) -> list[Any]:
    leaves = jax.tree.leaves(carry)
    return [leaves[n] for n in rider.data]


def _replaced(carry: Any, rider: Rider, new: list[Any]) -> Any:
    leaves, tree = jax.tree.flatten(carry)
    for n, value in zip(rider.data, new, strict=True):
        leaves[n] = value
    return jax.tree.unflatten(tree, leaves)

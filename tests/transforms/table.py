"""The table of transforms that random programs are run through, each with what it means.

An entry of `TRANSFORMS` says how a function of objects is lifted, and what that does in plain
Python (see `lifts.py`). It also says which effects it forbids: there the law is the error.

A new transform is one entry: two functions, and what differs from the default.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

import nnxlite as nnx
from tests.programs import ALL_EFFECTS
from tests.transforms.lifts import (
    LAST,
    Function,
    as_it_is,
    changing,
    lift_capture,
    lift_capture_with_init,
    lift_cond,
    lift_custom_jvp,
    lift_custom_vjp,
    lift_eval_shape,
    lift_fori_loop,
    lift_grad,
    lift_jvp,
    lift_make_jaxpr,
    lift_merge_in,
    lift_remat_scan,
    lift_scan_of_broadcast,
    lift_scan_of_carried,
    lift_scan_of_carried_axes,
    lift_shard_map,
    lift_switch,
    lift_vjp,
    lift_vmap_of_broadcast,
    lift_while_loop,
    not_changing,
    plain_broadcast,
    plain_capture,
    plain_capture_with_init,
    plain_constant,
    plain_eval_shape,
    plain_grad,
    plain_jvp,
    plain_last_slices,
    plain_number,
    plain_of_arrays,
    plain_shard,
    plain_slices,
    plain_steps,
    plain_sum_of_steps,
    scanned,
)

STRUCTURAL = frozenset({"attribute", "structure", "static", "metadata", "shape"})
VALUES = frozenset({"read", "value", "output", "record"})
AS_BEFORE = ALL_EFFECTS - {"attribute", "structure"}  # `init` goes by paths before the call
PLACED = ALL_EFFECTS - {"structure"}  # what moves an array takes its axis along or leaves it
FORWARD, REVERSE, ROOM = (frozenset({name}) for name in ("forward", "reverse", "room"))


class Transform(NamedTuple):
    """One entry of the table.

    Attributes:
      lift: Lifts a function by the library.
      plain: What that means, in Python alone. It may raise `Unjoinable`.
      forbids: Effects that are an error, with the path, if they show.
      may_refuse: Effects that are done as `plain` says, or are such an error.
      hides_records: Whether sow and perturb below it are an error under a capture around it.
      draws: Effects that make sense below it at all.
      tiled: The axis along which all arrays of its arguments are mapped.
      captures: Whether it takes what is sown below it.
      atomic: Whether a failed call changes nothing.
      outermost: Whether it stands only outside of others.
      takes: What it asks of what is below: derivatives, or room for perturbations.
      has: What of that it has.
      writes: Whether it writes all values, changed or not.
      once: Whether JAX does not nest it in itself.
    """

    lift: Callable[[Function], Function]
    plain: Callable[[Function], Function]
    forbids: frozenset[str] = frozenset()
    may_refuse: frozenset[str] = frozenset()
    hides_records: bool = False
    draws: frozenset[str] = ALL_EFFECTS
    tiled: int | None = None
    captures: bool = False
    atomic: bool = True
    outermost: bool = False
    takes: frozenset[str] = frozenset()
    has: frozenset[str] = FORWARD | REVERSE | ROOM
    writes: bool = False
    once: bool = False


ONE_SIDED: dict[str, Any] = {"forbids": STRUCTURAL, "hides_records": True}
FIXED: dict[str, Any] = {
    "forbids": STRUCTURAL - {"shape"},
    "may_refuse": frozenset({"shape"}),
}
IN_LOOPS: dict[str, Any] = {"forbids": STRUCTURAL}
UNBOUNDED: dict[str, Any] = {"forbids": STRUCTURAL, "hides_records": True}
BROADCAST: dict[str, Any] = {"forbids": frozenset({"value", "shape"}), "draws": VALUES | {"shape"}}
BY_HAND: dict[str, Any] = {"draws": VALUES, "hides_records": True, "writes": True}

TRANSFORMS: dict[str, Transform] = {
    "call": Transform(as_it_is, as_it_is, atomic=False),
    "jit": Transform(nnx.jit, as_it_is),
    "grad": Transform(lift_grad, plain_grad, takes=REVERSE),
    "vjp": Transform(lift_vjp, plain_grad, takes=REVERSE),
    "jvp": Transform(lift_jvp, plain_jvp, takes=FORWARD),
    "custom_vjp": Transform(lift_custom_vjp, plain_constant, has=REVERSE | ROOM),
    "custom_jvp": Transform(lift_custom_jvp, plain_constant),
    "remat": Transform(nnx.remat, as_it_is),
    "vmap": Transform(nnx.vmap, plain_slices, tiled=0),
    "vmap of last axis": Transform(
        lambda f: nnx.vmap(f, in_axes=LAST), plain_last_slices, draws=PLACED, tiled=LAST
    ),
    "vmap of broadcast": Transform(lift_vmap_of_broadcast, plain_broadcast, **BROADCAST),
    "scan": Transform(lambda f: nnx.scan(f, in_axes=0, out_axes=0), plain_slices, tiled=0, **FIXED),
    "scan of last axis": Transform(
        lambda f: nnx.scan(f, in_axes=LAST, out_axes=0),
        plain_last_slices,
        draws=PLACED,
        tiled=LAST,
        **FIXED,
    ),
    "scan of carried": Transform(lift_scan_of_carried, plain_steps, **IN_LOOPS),
    "scan of carried axes": Transform(lift_scan_of_carried_axes, plain_steps, **IN_LOOPS),
    "remat_scan": Transform(lift_remat_scan, plain_steps, **IN_LOOPS),
    "scan of broadcast": Transform(lift_scan_of_broadcast, plain_broadcast, **BROADCAST),
    "while_loop": Transform(lift_while_loop, plain_sum_of_steps, has=FORWARD | ROOM, **UNBOUNDED),
    "fori_loop": Transform(lift_fori_loop, plain_sum_of_steps, **UNBOUNDED),
    "cond, taken": Transform(lift_cond(True), changing, **ONE_SIDED),
    "cond, not taken": Transform(lift_cond(False), not_changing, **ONE_SIDED),
    "switch": Transform(lift_switch, as_it_is),
    "eval_shape": Transform(lift_eval_shape, plain_eval_shape),
    "make_jaxpr": Transform(lift_make_jaxpr, plain_number, has=FORWARD | REVERSE),
    "checkify": Transform(lambda f: lambda *roots: nnx.checkify(f)(*roots)[1], as_it_is),
    "jit_partial": Transform(lambda f: lambda *roots: nnx.jit_partial(f, *roots)(), as_it_is),
    "shard_map": Transform(lift_shard_map, plain_shard, once=True, **FIXED),
    "capture": Transform(lift_capture, plain_capture, captures=True, atomic=False),
    "capture with init": Transform(
        lift_capture_with_init,
        plain_capture_with_init,
        draws=AS_BEFORE,
        takes=ROOM,
        captures=True,
        atomic=False,
        outermost=True,
    ),
    "jax.jit": Transform(lift_merge_in(jax.jit), changing, **BY_HAND),
    "jax.checkpoint": Transform(lift_merge_in(jax.checkpoint), changing, **BY_HAND),
    "jax.vmap": Transform(
        lift_merge_in(jax.vmap), plain_of_arrays(plain_slices), tiled=0, **BY_HAND
    ),
    "jax.lax.scan": Transform(lift_merge_in(scanned), plain_of_arrays(plain_steps), **BY_HAND),
}

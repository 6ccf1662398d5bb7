"""remat: `jax.checkpoint` over objects."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

from nnxlite._core.extras import ONCE
from nnxlite._core.modes import mode_flags
from nnxlite._transforms.arguments import (
    Bound,
    Chosen,
    Statics,
    by_position,
    names,
    numbers,
    parameters,
    resolve,
)
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.mapped import Kept


@mode_flags()
def remat(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    prevent_cse: bool = True,
    static_argnums: int | Sequence[int] = (),
    static_argnames: str | Iterable[str] = (),
    policy: Callable[..., bool] | None = None,
) -> Any:
    """Lets a function of objects be computed again in the backward pass instead of stored.

    What the function changes is changed once, on the caller's objects.

    Args:
      fn: The function; without it, a decorator is returned.
      prevent_cse: As for `jax.checkpoint`.
      static_argnums: Positions of arguments that are compile-time constants, counted in the
        signature of `fn`, the module included. Negative ones count from the end.
      static_argnames: Names of such arguments. By position or by name is the same. Bools and
        strings given by keyword are static in any case.
      policy: What may be stored, from `jax.checkpoint_policies`.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> loss = lambda m, x: nnx.remat(lambda m, x: m(x))(m, x).sum()
      >>> nnx.grad(loss)(model, jnp.ones((4, 2)))["bias"][...]
      Array([4., 4., 4.], dtype=float32)
    """
    make = functools.partial(
        _remat,
        prevent_cse=prevent_cse,
        policy=policy,
        static_argnums=numbers(static_argnums),
        static_argnames=names(static_argnames),
    )
    return make if fn is None else make(fn)


def _remat(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    function, args, kwargs = resolve(fn)
    if args:
        options["static_argnums"] = tuple(
            n + len(args) if n >= 0 else n for n in options["static_argnums"]
        )
    rematted = RematFunction(function, **options)
    return Bound(rematted, *args, **kwargs) if args or kwargs else rematted


class RematFunction(LiftedFunction):
    """A rematerialised function of objects; made by `remat`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        prevent_cse: bool,
        policy: Callable[..., bool] | None,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
    ) -> None:
        super().__init__(fn, "nnx.remat")
        self._known = parameters(fn)
        self._static = Chosen(self._known, static_argnums, static_argnames, self._lift.title)
        self._static.check(fn, "static_argnums or static_argnames")
        self._options = {"prevent_cse": prevent_cse, "policy": policy}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._static:
            args, kwargs = by_position(args, kwargs, self._known)
        args, kwargs, statics = Statics.take(args, kwargs, self._static, also=_is_flag)
        with self._bound(args, kwargs, statics) as (binding, leaves, level):
            crossing, fn = binding.crossing, self._lift.fn
            kept = crossing.kept.get("remat")
            if kept is None or not kept.serves(None, crossing, fn, level):
                # JAX keeps traces by the identity of the function: a partial is a new one.
                pure = functools.partial(crossing.pure)
                kept = Kept.of(jax.checkpoint(pure, **self._options), None, fn)
                crossing.kept["remat"] = kept
            out = kept.made(
                binding.plan.gather(),
                [leaves[n] for n in crossing.rest],
                binding.extra_inputs(ONCE),
            )
            return binding.deliver(out, level)


def _is_flag(value: Any) -> bool:
    return value is None or isinstance(value, bool | str)

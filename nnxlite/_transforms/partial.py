"""jit_partial and cached_partial: flax's ways to spare a jitted function the walk of its arguments.

Every lifted function of nnxlite remembers the objects it was called with, and walks an unchanged
one no second time. So these two only give the first arguments beforehand: a call costs what the
same call with all arguments costs.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nnxlite._core.modes import mode_flags
from nnxlite._transforms.arguments import Bound
from nnxlite._transforms.jit import BoundJit, JitFunction, jit
from nnxlite._transforms.lift import LiftedFunction


@mode_flags()
def jit_partial(
    fun: Callable[..., Any],
    /,
    *partial_args: Any,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    device: None = None,
    backend: None = None,
    inline: bool = False,
) -> Any:
    """Jits a function whose first arguments are given now; for programs written for flax.

    It is `nnx.jit(fun, ...)` with these arguments in front of those of each call. Changes of the
    objects reach the caller as always, changes of their structure too.

    Args:
      fun: The function.
      *partial_args: Its first arguments.
      in_shardings: As for `nnx.jit`; the first entries are those of `partial_args`.
      out_shardings: As for `nnx.jit`.
      static_argnums: As for `nnx.jit`: positions in `fun`, where `partial_args` come first.
      static_argnames: As for `nnx.jit`.
      donate_argnums: As `static_argnums`. With flax, 0 means all of `partial_args`; here each has
        its own position.
      donate_argnames: As for `nnx.jit`.
      keep_unused: As for `nnx.jit`.
      device: None, as for `nnx.jit`.
      backend: None, as for `nnx.jit`.
      inline: As for `nnx.jit`.

    Raises:
      TypeError: `device` or `backend` is given.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> forward = nnx.jit_partial(lambda model, x: model(x), model)
      >>> forward(jnp.ones((1, 2))).shape
      (1, 3)
    """
    jitted = jit(
        fun,
        in_shardings=in_shardings,
        out_shardings=out_shardings,
        static_argnums=static_argnums,
        static_argnames=static_argnames,
        donate_argnums=donate_argnums,
        donate_argnames=donate_argnames,
        keep_unused=keep_unused,
        inline=inline,
        device=device,
        backend=backend,
    )
    return with_arguments(jitted, *partial_args)


@mode_flags("The objects that are given are graphs here, and what changes on them stays changed.")
def cached_partial(f: Callable[..., Any], /, *cached_args: Any) -> Any:
    """Returns a function with its first arguments given; for programs written for flax.

    With flax this saves the walk through the objects at each call; here every call does. Unlike
    there, the function may change the structure of the objects.

    Args:
      f: A function made by a transform, such as `nnx.jit`.
      *cached_args: Its first arguments.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> forward = nnx.cached_partial(nnx.jit(lambda model, x: model(x)), model)
      >>> forward(jnp.ones((1, 2))).shape
      (1, 3)
    """
    if not callable(f):
        raise TypeError(f"nnx.cached_partial expected a function, found {type(f).__name__}.")
    return with_arguments(f, *cached_args)


def with_arguments(f: Callable[..., Any], *args: Any) -> functools.partial[Any]:
    """Returns `f` with its first arguments given, and with the methods of a lifted function."""
    function = f.func if isinstance(f, functools.partial) else f
    if isinstance(function, JitFunction):
        return BoundJit(f, *args)
    return (Bound if isinstance(function, LiftedFunction) else functools.partial)(f, *args)

"""checkify: `jax.experimental.checkify` over objects."""

from collections.abc import Callable
from typing import Any

from jax.experimental import checkify as jax_checkify

from nnxlite._core.extras import ONCE
from nnxlite._core.modes import mode_flags
from nnxlite._transforms.arguments import Bound, resolve
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.scan_body import is_flag


@mode_flags()
def checkify(
    fn: Callable[..., Any],
    /,
    errors: frozenset[jax_checkify.ErrorCategory] = jax_checkify.user_checks,
) -> Callable[..., Any]:
    """Returns a function of objects that reports failed checks as a value, beside its result.

    What the function changes is changed on the caller's objects, whether a check failed or not:
    look at the error before you use them. The checked function runs one operation at a time; put
    `nnx.jit` around it for speed.

    Args:
      fn: The function, a method or a Module.
      errors: Which checks, from `jax.experimental.checkify`: `user_checks` are the calls of
        `checkify.check`; `float_checks`, `index_checks`, `div_checks` find NaN and the like.

    Returns:
      A function that returns `(error, result)`; `error.throw()` raises if a check failed.

    Example:
      >>> from jax.experimental import checkify
      >>> def log(model, x):
      ...     checkify.check(jnp.all(x > 0), "x is not positive")
      ...     return jnp.log(model(x))
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> error, _ = nnx.jit(nnx.checkify(log))(model, jnp.zeros((1, 2)))
      >>> error.get()
      'x is not positive (`check` failed)'
    """
    function, args, kwargs = resolve(fn)
    checked = CheckifyFunction(function, errors)
    return Bound(checked, *args, **kwargs) if args or kwargs else checked


class CheckifyFunction(LiftedFunction):
    """A function of objects that reports failed checks; made by `checkify`."""

    def __init__(self, fn: Callable[..., Any], errors: Any) -> None:
        super().__init__(fn, "nnx.checkify")
        self._errors = errors

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._bound(args, kwargs) as (binding, leaves, level):
            crossing = binding.crossing
            rest = [leaves[n] for n in crossing.rest]
            arrays = [None if is_flag(x) else x for x in rest]

            def run(values: list[Any], arrays: list[Any], extras: Any) -> Any:
                given = [x if is_flag(x) else a for x, a in zip(rest, arrays, strict=True)]
                return crossing.pure(values, given, extras)

            checked = jax_checkify.checkify(run, self._errors)
            error, out = checked(binding.plan.gather(), arrays, binding.extra_inputs(ONCE))
            return error, binding.deliver(out, level)

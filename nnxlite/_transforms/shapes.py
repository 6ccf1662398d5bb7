"""eval_shape: the result of a function without computing it."""

from collections.abc import Callable
from typing import Any

import jax

from nnxlite._transforms.arguments import resolve
from nnxlite._transforms.lift import Lift


def eval_shape(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns what `fn(*args, **kwargs)` returns, with `jax.ShapeDtypeStruct` in place of arrays.

    Nothing is computed and no argument is changed: objects in the result are fresh.

    Args:
      fn: A function, a class, a method or a Module.
      *args: Arguments; arrays may be given as `jax.ShapeDtypeStruct`.
      **kwargs: Keyword arguments.

    Example:
      >>> model = nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> model.kernel.get_value()
      ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    function, first, named = resolve(fn)
    lift = Lift(function, "nnx.eval_shape")
    binding, leaves = lift.bind((*first, *args), {**named, **kwargs}, None, False)
    out = jax.eval_shape(
        binding.crossing.pure,
        binding.plan.gather(),
        [leaves[n] for n in binding.crossing.rest],
        binding.extra_inputs(),
    )
    return binding.abstract_result(out)

"""eval_shape and make_jaxpr: what a function of objects would do, without doing it.

Both trace the pure function of the lift, and write nothing back.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from nnxlite._core.extras import ONCE
from nnxlite._core.modes import mode_flags
from nnxlite._transforms.arguments import (
    Bound,
    Chosen,
    Statics,
    by_position,
    numbers,
    parameters,
    resolve,
)
from nnxlite._transforms.lift import Lift, LiftedFunction

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)


@mode_flags()
def eval_shape(fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Returns what `fn(*args, **kwargs)` returns, with `jax.ShapeDtypeStruct` in place of arrays.

    Nothing is computed and no argument is changed: objects in the result are fresh. Under a mesh
    (`jax.set_mesh`) the shapes in Variables have a sharding: the one that the Variable names, else
    a replicated one.

    Args:
      fn: A function, a class, a method or a Module.
      *args: Arguments; arrays, also those in objects, may be `jax.ShapeDtypeStruct`. What is no
        array, such as a size, is given to `fn` as it is.
      **kwargs: Keyword arguments.

    Example:
      >>> model = nnx.eval_shape(nnx.Linear, 2, 3, rngs=nnx.Rngs(0))
      >>> model.kernel.get_value()
      ShapeDtypeStruct(shape=(2, 3), dtype=float32)
    """
    function, first, named = resolve(fn)
    lift = Lift(function, "nnx.eval_shape")
    binding, leaves = lift.bind((*first, *args), {**named, **kwargs}, None, False)
    crossing = binding.crossing
    rest = [leaves[n] for n in crossing.rest]
    arrays = [x if _is_array(x) else None for x in rest]

    def run(values: list[Any], arrays: list[Any], extras: Any) -> Any:
        given = [a if _is_array(x) else x for x, a in zip(rest, arrays, strict=True)]
        return crossing.pure(values, given, extras)

    out = jax.eval_shape(run, binding.plan.gather(), arrays, binding.extra_inputs(ONCE))
    return binding.abstract_result(out)


def _is_array(value: Any) -> bool:
    return isinstance(value, _ARRAYS) or hasattr(value, "__jax_array__")


@mode_flags()
def make_jaxpr(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    static_argnums: int | Sequence[int] = (),
    return_shape: bool = False,
) -> Any:
    """Returns a function that gives the jaxpr of `fn`, a function of objects.

    Nothing is computed and no argument is changed. The inputs of the jaxpr are the arrays in the
    objects among the arguments, each once, in the order of `jax.tree.leaves`; then the other
    arguments. Its outputs are the arrays of the result; then the new values of what changed, in the
    order of the inputs. The names of modules are in it: `jaxpr.pretty_print(name_stack=True)`.

    Args:
      fn: The function; without it, a decorator is returned.
      static_argnums: Positions of arguments that are constants.
      return_shape: Whether to return `(jaxpr, result)`, the result as `eval_shape` has it.

    Returns:
      A function of the arguments of `fn`, abstract ones too, that returns a
      `jax.extend.core.ClosedJaxpr`.

    Example:
      >>> def count(v, x):
      ...     v[...] = v[...] + 1
      ...     return -x
      >>> jaxpr = nnx.make_jaxpr(count)(nnx.Variable(0), jnp.float32(2))
      >>> [kind.str_short() for kind in jaxpr.in_avals]
      ['int32[]', 'float32[]']
      >>> [kind.str_short() for kind in jaxpr.out_avals]
      ['float32[]', 'int32[]']
    """
    make = functools.partial(
        _make_jaxpr, static_argnums=numbers(static_argnums), return_shape=return_shape
    )
    return make if fn is None else make(fn)


def _make_jaxpr(
    fn: Callable[..., Any], *, static_argnums: tuple[int, ...], return_shape: bool
) -> Callable[..., Any]:
    function, args, kwargs = resolve(fn)
    shifted = tuple(n + len(args) if n >= 0 else n for n in static_argnums)
    made = JaxprFunction(function, static_argnums=shifted, return_shape=return_shape)
    return Bound(made, *args, **kwargs) if args or kwargs else made


class JaxprFunction(LiftedFunction):
    """Gives the jaxpr of a function of objects; made by `make_jaxpr`."""

    def __init__(
        self, fn: Callable[..., Any], *, static_argnums: tuple[int, ...], return_shape: bool
    ) -> None:
        super().__init__(fn, "nnx.make_jaxpr")
        self._known = parameters(fn)
        self._static = Chosen(self._known, static_argnums, (), self._lift.title)
        self._static.check(fn, "static_argnums")
        self._return_shape = return_shape

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        statics = None
        if self._static:
            args, kwargs = by_position(args, kwargs, self._known)
            args, kwargs, statics = Statics.take(args, kwargs, self._static)
        with self._bound(args, kwargs, statics) as (binding, leaves, _):
            crossing = binding.crossing
            # JAX keeps traces by the identity of the function: a partial is a new one.
            pure = functools.partial(crossing.pure)
            jaxpr, out = jax.make_jaxpr(pure, return_shape=True)(
                binding.plan.gather(),
                [leaves[n] for n in crossing.rest],
                binding.extra_inputs(ONCE),
            )
            return (jaxpr, binding.abstract_result(out)) if self._return_shape else jaxpr

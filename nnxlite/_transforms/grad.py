"""grad and value_and_grad: gradients of functions of objects.

The values that are differentiated are picked out of the flat leaves of the lift (see
`differentiated.py`); the others, and everything that the function changes, travel beside them, so
state changes in a loss reach the caller. Gradients of an object come as a State with the same paths
and kinds as `state(model, filter)`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnxlite._core.modes import mode_flags
from nnxlite._transforms.arguments import Bound, by_position, parameters, resolve
from nnxlite._transforms.axes import DiffState
from nnxlite._transforms.differentiated import (
    Argnum,
    arrange,
    choose,
    function_of,
    shifted,
)
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.packing import Out


@mode_flags("Gradients of an object are a State of its Params; nnx.DiffState chooses other leaves.")
def grad(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    argnums: Argnum | Sequence[Argnum] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Returns a function that computes the gradient of `fn`, a scalar function of objects.

    Args:
      fn: The loss; without it, a decorator is returned. What it changes is changed on the caller's
        objects.
      argnums: Which arguments to differentiate: positions, or `DiffState(position, filter)` to
        choose leaves of an object. A plain position of an object means its `Param`s.
      has_aux: Whether `fn` returns `(loss, aux)`; then `(gradients, aux)` is returned.
      holomorphic: As for `jax.grad`.
      allow_int: As for `jax.grad`.

    Returns:
      For an object a State, else what `jax.grad` returns; with several `argnums`, a tuple.

    Raises:
      TypeError: A leaf to differentiate has an integer dtype; the message has its path.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> grads = nnx.grad(lambda m, x: m(x).sum())(model, jnp.ones((4, 2)))
      >>> grads["bias"][...]
      Array([4., 4., 4.], dtype=float32)
    """
    build = functools.partial(
        _gradient,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        with_value=False,
    )
    return build if fn is None else build(fn)


@mode_flags("Gradients of an object are a State of its Params; nnx.DiffState chooses other leaves.")
def value_and_grad(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    argnums: Argnum | Sequence[Argnum] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
) -> Any:
    """Returns a function that computes both the value and the gradient of `fn`.

    Arguments as for `grad`. With `has_aux` the result is `((loss, aux), gradients)`.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> loss, grads = nnx.value_and_grad(lambda m: (m.bias[...] ** 2).sum())(model)
      >>> float(loss), grads["kernel"].shape
      (0.0, (2, 3))
    """
    build = functools.partial(
        _gradient,
        argnums=argnums,
        has_aux=has_aux,
        holomorphic=holomorphic,
        allow_int=allow_int,
        with_value=True,
    )
    return build if fn is None else build(fn)


def _gradient(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    function, args, kwargs = resolve(fn)
    gradient = GradFunction(function, shift=len(args), **options)
    return Bound(gradient, *args, **kwargs) if args or kwargs else gradient


class GradFunction(LiftedFunction):
    """A differentiated function of objects; made by `grad` and `value_and_grad`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        argnums: Argnum | Sequence[Argnum],
        has_aux: bool,
        holomorphic: bool,
        allow_int: bool,
        with_value: bool,
        shift: int = 0,
    ) -> None:
        super().__init__(fn, "nnx.value_and_grad" if with_value else "nnx.grad")
        self._single = isinstance(argnums, int | DiffState)
        given = (argnums,) if isinstance(argnums, int | DiffState) else tuple(argnums)
        self._wanted = tuple(shifted(each, shift) for each in given)
        self._has_aux, self._with_value = has_aux, with_value
        self._integers = None if allow_int else ", or pass allow_int=True"
        self._options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int}
        self._known = parameters(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(args, kwargs, self._known)
        with self._bound(args, kwargs) as (binding, leaves, level):
            choice = choose(binding, leaves, self._wanted, self._integers)
            pure, values = function_of(choice, binding, leaves)

            def loss(given: list[Any]) -> tuple[Any, Out]:
                out = pure(given)
                return self._loss_of(out), out

            (_, out), grads = jax.value_and_grad(loss, has_aux=True, **self._options)(values)
            result = binding.deliver(out, level)
        if self._has_aux:
            result = tuple(result)
        gradients = arrange(choice.forms, grads, level)
        gradients = gradients[0] if self._single else tuple(gradients)
        if self._with_value:
            return result, gradients
        return (gradients, result[1]) if self._has_aux else gradients

    def _loss_of(self, out: Out) -> Any:
        tree = out.definition.tree
        if self._has_aux:
            parts = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
            if not isinstance(parts, tuple | list) or len(parts) != 2:
                raise TypeError(
                    f"{self._lift.title} with has_aux=True expected the function to return "
                    f"(loss, aux), found {tree}."
                )
            tree = jax.tree.structure(parts[0])
        spec = out.definition.spec
        is_array = tree.num_leaves == tree.num_nodes == 1  # None is one node without a leaf
        if not is_array or (spec is not None and spec[0] is not None):
            raise TypeError(
                f"{self._lift.title} expected a scalar loss, found a result of structure {tree}. "
                "Return the loss alone, or (loss, aux) with has_aux=True."
            )
        return out.arrays[0]

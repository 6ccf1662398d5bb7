"""capture_gradients: values inside a loss, and the gradient of the loss with respect to each.

It takes two runs. The first is abstract, and tells which values there are. The second is
differentiated with respect to zeros added to each value: the gradient of such a zero is that of the
value. All that has to agree between the two are the labels of objects (see `records.py`).
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._core.capture import final_paths, record, recorder_for, root_of, warn_of_skipped
from nnxlite._core.context import current, entered
from nnxlite._core.errors import Path
from nnxlite._core.extras import only_travelling
from nnxlite._core.filters import Everything, Filter, Nothing, to_predicate
from nnxlite._core.metadata import EMPTY
from nnxlite._core.records import Bundle, Wanted
from nnxlite._core.sowing import zeros_for
from nnxlite._core.state import State
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Intermediate
from nnxlite._transforms.arguments import resolve
from nnxlite._transforms.grad import value_and_grad
from nnxlite._transforms.shapes import eval_shape


def capture_gradients(
    loss_fn: Callable[..., Any],
    /,
    *,
    method_filter: Filter = ...,
    has_aux: bool = False,
) -> Callable[..., tuple[Any, State, State]]:
    """Returns a function that computes a loss, the values inside it, and their gradients.

    The values are what modules `perturb`, and the outputs of their public methods, as far as there
    are floats in them. Several values of one name in one module are numbered: `h`, `h#1`. It works
    through every transform of this library; values under `vmap` and `scan` have the mapped axis in
    front. What the loss changes is changed on the caller's objects, once.

    The loss is traced one time more, to learn what there is. In a loop, call it inside of
    `nnx.jit`.

    Args:
      loss_fn: A scalar function whose first argument holds the modules, or a method.
      method_filter: Chooses the methods whose outputs are taken, as in `nnx.capture`; None takes
        only what is perturbed.
      has_aux: Whether `loss_fn` returns `(loss, aux)`.

    Returns:
      A function that returns `(result, values, gradients)`: what `loss_fn` returned, and two States
      of the same paths, kinds and shapes, so that `jax.tree.map` walks over both. Gradients of
      integers are zero.

    Raises:
      StructureError: The first argument holds no module.
      TypeError: The loss is no float scalar.
      TraceLevelError: A plain JAX transform stands between the loss and a module that perturbs.

    Example:
      >>> class Net(nnx.Module):
      ...     def __call__(self, x):
      ...         return 3 * self.perturb("squares", x**2)
      >>> loss, values, gradients = nnx.capture_gradients(lambda net, x: net(x).sum())(
      ...     Net(), jnp.arange(3.0)
      ... )
      >>> values["squares"][...], gradients["squares"][...]
      (Array([0., 1., 4.], dtype=float32), Array([3., 3., 3.], dtype=float32))
    """
    chosen = to_predicate(method_filter)
    outputs = None if chosen == Nothing() else Intermediate
    wanted = Wanted((), False, outputs, None if chosen == Everything() else chosen, each=True)

    @functools.wraps(loss_fn, updated=())
    def captured(*args: Any, **kwargs: Any) -> tuple[Any, State, State]:
        function, first, named = resolve(loss_fn)
        args, kwargs = (*first, *args), {**named, **kwargs}
        found = _learn(function, wanted, args, kwargs)
        known, skipped = found.about
        warn_of_skipped(dict(skipped))
        zeros = [zeros_for(value) for value in found.values]
        loss = _perturbed(function, wanted._replace(has_init=True), known, has_aux)
        (_, (result, values)), gradients = value_and_grad(loss, has_aux=True)(
            zeros, *args, **kwargs
        )
        states = _states(values.about, values.values, gradients)
        return (result, *states)

    return captured


def _learn(
    function: Callable[..., Any], wanted: Wanted, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Bundle:
    """Returns shapes of all values, described by labels and names; nothing is changed."""

    def learn(*args: Any, **kwargs: Any) -> Bundle:
        recorder = recorder_for(root_of(function, args, kwargs), wanted)
        record(recorder, function, args, kwargs)
        found = [
            ((label, key.name), kept.start)
            for label, records in recorder.records.items()
            for key, kept in records.items()
        ]
        known = tuple(which for which, _ in found)
        return Bundle((known, tuple(recorder.skipped.items())), [value for _, value in found])

    # Captures around this call are to see the second run only.
    with entered(current().but(captured=())), only_travelling():
        return eval_shape(functools.wraps(function, updated=())(learn), *args, **kwargs)


def _perturbed(
    function: Callable[..., Any], wanted: Wanted, known: tuple[Any, ...], has_aux: bool
) -> Callable[..., Any]:
    """Returns the loss as a function of perturbations, with all else beside it."""

    def loss(zeros: list[Any], *args: Any, **kwargs: Any) -> Any:
        init: dict[Any, dict[str, Any]] = {}
        for (label, name), zero in zip(known, zeros, strict=True):
            init.setdefault(label, {})[name] = zero
        root = root_of(function, args, kwargs)
        recorder = recorder_for(root, wanted, init)
        result = record(recorder, function, args, kwargs)
        if has_aux and not (isinstance(result, tuple) and len(result) == 2):
            raise TypeError(
                "nnx.capture_gradients with has_aux=True expected the function to return "
                f"(loss, aux), found {type(result).__name__}."
            )
        paths = final_paths(recorder, root)
        recorded = {
            (label, key.name): ((*paths[label], key.name), kept.start)
            for label, records in recorder.records.items()
            for key, kept in records.items()
        }
        found = [recorded.get(which, (None, None)) for which in known]
        values = Bundle(tuple(path for path, _ in found), [value for _, value in found])
        return result[0] if has_aux else result, (result, values)

    loss.__name__ = loss.__qualname__ = getattr(function, "__name__", type(function).__name__)
    return loss


def _states(
    paths: tuple[Path | None, ...], values: list[Any], gradients: list[Any]
) -> tuple[State, State]:
    level = current_level()
    found: tuple[dict[Path, Any], dict[Path, Any]] = ({}, {})
    for path, value, gradient in zip(paths, values, gradients, strict=True):
        if path is not None:
            gradient = jax.tree.map(_gradient, gradient, value, is_leaf=lambda g: g is None)
            found[0][path] = Intermediate._make(value, EMPTY, level)
            found[1][path] = Intermediate._make(gradient, EMPTY, level)
    return State.from_flat_path(found[0]), State.from_flat_path(found[1])


def _gradient(gradient: Any, value: Any) -> Any:
    """Returns a gradient; zeros of an integer, None of what is no number."""
    if gradient is not None or value is None or jnp.issubdtype(value.dtype, jax.dtypes.extended):
        return gradient
    return jnp.zeros_like(value)

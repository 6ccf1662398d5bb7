"""Functions whose result is parted: an output that is differentiated, and what comes beside it.

The output may be any tree of arrays and States; `vjp` and `jvp` differentiate its leaves. What a
function returns in `aux` may be anything, objects too, and has no derivative.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from nnxlite._core import scope
from nnxlite._core.trace import OPEN_STATES, Opaque
from nnxlite._transforms.differentiated import is_number
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.packing import Out, opaque_flatten


class Result:
    """What a parted function returns.

    Attributes:
      tree: The output, with the values of States as leaves.
      values: Its leaves, which are differentiated.
      aux: What comes beside them.
    """

    __slots__ = ("aux", "tree", "values")

    def __init__(self, tree: Any, values: list[Any], aux: Any) -> None:
        self.tree, self.values, self.aux = tree, values, aux


jax.tree_util.register_pytree_node(
    Result,
    lambda result: ((result.values, result.aux), result.tree),
    lambda tree, children: Result(tree, *children),
)


def output_of(out: Out) -> list[Any]:
    """Returns what is differentiated among the arrays that a parted function returned."""
    values, _ = out.definition.tree.children()  # of the `Result`
    return out.arrays[: values.num_leaves]


class PartedFunction(LiftedFunction):
    """A lifted function that returns a `Result`."""

    def __init__(self, fn: Callable[..., Any], transform: str, has_aux: bool) -> None:
        super().__init__(fn, transform)
        self._has_aux = has_aux
        self._lift.fn = _parted(fn, has_aux, self._lift.title)

    def __set_name__(self, owner: type, name: str) -> None:
        super().__set_name__(owner, name)
        # The method is scoped inside, so that a capture of outputs sees what it returns.
        method = scope.scoped_method(name, self.__wrapped__)  # type: ignore[attr-defined]
        self._lift.fn = _parted(method, self._has_aux, self._lift.title)


def _parted(fn: Callable[..., Any], has_aux: bool, title: str) -> Callable[..., Result]:
    @functools.wraps(fn, updated=())
    def parted(*args: Any, **kwargs: Any) -> Result:
        output, aux = fn(*args, **kwargs), None
        if has_aux:
            if not isinstance(output, tuple | list) or len(output) != 2:
                raise TypeError(
                    f"{title} with has_aux=True expected the function to return (output, aux), "
                    f"found {type(output).__name__}."
                )
            output, aux = output
        values, tree = opaque_flatten(output, OPEN_STATES)
        for number, value in enumerate(values):
            if not is_number(value):
                raise _no_array(title, place_in(tree, number), value)
        return Result(tree, values, aux)

    parted.__name__ = getattr(fn, "__name__", type(fn).__name__)
    return parted


def _no_array(title: str, place: str, value: Any) -> TypeError:
    if type(value) is Opaque:
        return TypeError(
            f"{title}: {place} is an object ({type(value.node).__name__}). Return "
            "nnx.state(...) of it or the values of its Variables, or pass has_aux=True and return "
            "(output, aux) with the object in aux."
        )
    return TypeError(
        f"{title}: {place} is no array but {type(value).__name__}. Pass has_aux=True and return "
        "(output, aux) with it in aux."
    )


def place_in(tree: Any, number: int) -> str:
    """Writes where a leaf of the output is."""
    numbered = jax.tree_util.tree_unflatten(tree, range(tree.num_leaves))
    path, _ = jax.tree_util.tree_leaves_with_path(numbered)[number]
    return "output" + jax.tree_util.keystr(path)

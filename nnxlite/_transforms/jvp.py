"""jvp: the output of a function of objects, and its change along given tangents.

Tangents are matched with the leaves of objects by path. A leaf without a tangent, or with None, is
a constant of the derivative; so is every integer.
"""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._core.errors import Path, format_path
from nnxlite._core.kinds import OBJECT, VARIABLE, kind_of
from nnxlite._core.modes import mode_flags
from nnxlite._core.split import state
from nnxlite._core.state import walk
from nnxlite._core.trace import Opaque
from nnxlite._core.variable import Variable
from nnxlite._transforms.arguments import parameters, resolve
from nnxlite._transforms.axes import Entry
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.differentiated import (
    Choice,
    Source,
    arguments_of,
    dtype_of,
    function_of,
    is_inexact,
    is_number,
    leaves_below,
    structure_text,
    type_text,
    value_of,
)
from nnxlite._transforms.packing import Out, same_value
from nnxlite._transforms.parted import PartedFunction, Result, output_of


@mode_flags()
def jvp(
    fn: Callable[..., Any] | None = None,
    /,
    primals: Sequence[Any] | None = None,
    tangents: Sequence[Any] | None = None,
    *,
    has_aux: bool = False,
) -> Any:
    """Calls a function of objects, and returns with its output the derivative along tangents.

    What `fn` changes is changed on the caller's objects, once.

    Args:
      fn: The function; without it, a decorator is returned. Its output is any tree of arrays and
        States; an object may be returned in `aux`.
      primals: A tuple of its arguments; without it, the function of `(primals, tangents)` is
        returned. That one takes keyword arguments too, which are constants.
      tangents: A tuple with one entry per argument. For an object: a State with paths of float
        leaves of it (what is left out has tangent zero), or an object of the same structure, such
        as `jax.tree.map(jnp.zeros_like, model)`, whose integers do not count. For other arguments
        one of the same structure, shapes and dtypes. None stands for zero in any case.
      has_aux: Whether `fn` returns `(output, aux)`.

    Returns:
      `(output, tangent)`, with `aux` as third if there is one.

    Raises:
      TypeError: The output holds an object, or a tangent is of the wrong kind or dtype.
      ValueError: A tangent has a path or shape that the argument does not have.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> tangent = nnx.State({"bias": jnp.ones(3)})
      >>> x = jnp.ones((1, 2))
      >>> y, dy = nnx.jvp(lambda m, x: 2 * m(x), (model, x), (tangent, None))
      >>> dy
      Array([[2., 2., 2.]], dtype=float32)
    """
    if fn is None:
        return functools.partial(jvp, has_aux=has_aux)
    function, first, named = resolve(fn)
    lifted = JvpFunction(function, has_aux=has_aux)
    bound = lifted.bound_to(*first, **named) if first or named else lifted
    if primals is None and tangents is None:
        return bound
    return bound(primals, tangents)


class JvpFunction(PartedFunction):
    """A function of objects differentiated along tangents; made by `jvp`."""

    def __init__(self, fn: Callable[..., Any], *, has_aux: bool) -> None:
        super().__init__(fn, "nnx.jvp", has_aux)
        self.__signature__ = inspect.signature(self.__call__)  # not that of `fn`

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else self.bound_to(instance)

    def bound_to(self, *first: Any, **named: Any) -> functools.partial[Any]:
        """Returns the function with constant arguments before the primals."""
        bound = functools.partial(self.after, first, **named)
        vars(bound)["explain_retrace"] = self.explain_retrace
        return bound

    def __call__(self, primals: Any, tangents: Any, /, **kwargs: Any) -> Any:
        return self.after((), primals, tangents, **kwargs)

    def after(self, first: tuple[Any, ...], primals: Any, tangents: Any, /, **kwargs: Any) -> Any:
        """Calls with constant arguments before the primals: the object of a method, for one."""
        self._check(primals, tangents)
        with self._bound((*first, *primals), kwargs) as (binding, leaves, level):
            directions = _Directions(binding, leaves)
            for argnum, tangent in enumerate(tangents, start=len(first)):
                directions.argument(argnum, tangent)
            pure, values = function_of(Choice(tuple(directions.given)), binding, leaves)

            def outputs(given: list[Any]) -> tuple[list[Any], Out]:
                out = pure(given)
                return output_of(out), out

            along = list(directions.given.values())
            output, change, out = jax.jvp(outputs, (values,), (along,), has_aux=True)
            result: Result = binding.deliver(out, level)
        given = (
            jax.tree_util.tree_unflatten(result.tree, output),
            jax.tree_util.tree_unflatten(result.tree, change),
        )
        return (*given, result.aux) if self._has_aux else given

    def _check(self, primals: Any, tangents: Any) -> None:
        for name, value in (("primals", primals), ("tangents", tangents)):
            if not isinstance(value, tuple | list):
                raise TypeError(
                    f"{self._lift.title}: {name} is {type(value).__name__}. Expected a tuple with "
                    "one entry per argument, as for jax.jvp."
                )
        if len(primals) != len(tangents):
            raise ValueError(
                f"{self._lift.title}: there are {len(primals)} primals and {len(tangents)} "
                "tangents. Give a tangent for each argument; None stands for zero."
            )


class _Directions:
    """Finds the tangents, argument after argument.

    Attributes:
      given: Per leaf that has a tangent, the tangent.
    """

    def __init__(self, binding: Binding, leaves: Sequence[Any]) -> None:
        self.binding, self.leaves = binding, leaves
        self.title = binding.lift.title
        crossing = binding.crossing
        self.trees, self.positions = arguments_of(crossing.treedef)
        self.others = {position: n for n, position in enumerate(crossing.rest)}
        self.given: dict[Source, Any] = {}
        self._places: dict[Entry, str] = {}

    def argument(self, argnum: int, tangent: Any) -> None:
        """Takes the tangent of one argument."""
        if tangent is None:
            return
        positions = self.positions[argnum]
        # Where an object was, there is its position now, a leaf.
        numbered = jax.tree_util.tree_unflatten(self.trees[argnum], positions)
        try:
            parts = jax.tree.structure(numbered).flatten_up_to(tangent)
        except (ValueError, TypeError):
            known = parameters(self.binding.lift.fn)
            name = known[argnum] if argnum < len(known) else f"argument {argnum}"
            raise ValueError(
                f"{self.title}: the tangent of {name} has structure {structure_text(tangent)}. "
                f"Expected that of the argument: {jax.tree.structure(numbered)}."
            ) from None
        for position, part in zip(positions, parts, strict=True):
            if part is None:
                continue
            leaf = self.leaves[position]
            if type(leaf) is Opaque:
                self._object(self.binding.crossing.roots.index(position), leaf.node, part)
            else:
                self._array(position, leaf, part)

    def _array(self, position: int, primal: Any, tangent: Any) -> None:
        place = functools.partial(self.binding.crossing.place, position)
        if _is_float0(tangent) and not is_inexact(primal):
            return
        tangent = _plain(tangent)
        self._check(primal, tangent, place)
        self.given[self.others[position]] = tangent

    def _object(self, root: int, node: Any, tangent: Any) -> None:
        name = self.binding.crossing.argument_name(root)
        by_path = self._by_path(node, tangent, name)
        for path, kind, entry, leaf in leaves_below(self.binding, root):
            if path in by_path:
                place = format_path(path, name)
                self._leaf(entry, value_of(kind, leaf), by_path.pop(path), place)
            elif kind_of(tangent) == OBJECT:
                raise ValueError(
                    f"{self.title}: the tangent of {name} is an object without "
                    f"{format_path(path, name)}. Give one of the same structure, or a State of the "
                    "leaves that have a tangent."
                )
        for path in by_path:
            raise ValueError(
                f"{self.title}: the tangent of {name} has {format_path(path, name)}, which is no "
                f"leaf of the argument ({type(node).__name__}). Expected paths that nnx.state(...) "
                "of it has."
            )

    def _by_path(self, node: Any, tangent: Any, name: str) -> dict[Path, Any]:
        """Returns the values of a tangent by path."""
        if kind_of(node) == VARIABLE:
            return {(): _plain(tangent)}
        if kind_of(tangent) == OBJECT:
            tangent = state(tangent)
        if not isinstance(tangent, Mapping):
            raise TypeError(
                f"{self.title}: the tangent of {name} ({type(node).__name__}) is "
                f"{type(tangent).__name__}. Expected a State with paths of it, an object of the "
                "same structure, or None for zero."
            )
        return {path: _plain(leaf) for path, leaf in walk(tangent)}

    def _leaf(self, entry: Entry, primal: Any, tangent: Any, place: str) -> None:
        primals, tree = jax.tree_util.tree_flatten_with_path(primal)
        try:
            parts = tree.flatten_up_to(tangent)
        except (ValueError, TypeError):
            raise ValueError(
                f"{self.title}: the tangent of {place} has structure {structure_text(tangent)}. "
                f"Expected that of its value: {tree}."
            ) from None
        along = [
            self._direction(x, part, place, path)
            for (path, x), part in zip(primals, parts, strict=True)
        ]
        if all(direction is None for direction in along):
            return
        whole = [_zero(x) if t is None else t for (_, x), t in zip(primals, along, strict=True)]
        new = jax.tree_util.tree_unflatten(tree, whole)
        if entry in self.given and not same_value(self.given[entry], new):
            raise ValueError(
                f"{self.title}: {place} is {self._places[entry]} too, which has another tangent. "
                "What is shared has one: give it in one place."
            )
        self.given[entry], self._places[entry] = new, place

    def _direction(self, primal: Any, tangent: Any, place: str, path: Any) -> Any:
        """Returns the tangent of an array; None for zero, and for an integer."""
        if tangent is None:
            return None
        if not is_inexact(primal) and (
            _is_float0(tangent) or dtype_of(tangent) == dtype_of(primal)
        ):
            return None
        self._check(primal, tangent, lambda: place + jax.tree_util.keystr(path))
        return tangent

    def _check(self, primal: Any, tangent: Any, place: Callable[[], str]) -> None:
        if not is_inexact(primal):
            raise TypeError(
                f"{self.title}: {place()} is {type_text(primal)} and has no tangent, but "
                f"{type_text(tangent)} is given for one. Give None."
            )
        if type_text(primal) != type_text(tangent):
            error = ValueError if is_number(tangent) else TypeError
            raise error(
                f"{self.title}: the tangent of {place()} is {type_text(tangent)}. Expected "
                f"{type_text(primal)}, as the argument is."
            )


def _plain(leaf: Any) -> Any:
    return leaf._value if isinstance(leaf, Variable) else leaf


def _is_float0(value: Any) -> bool:
    return getattr(value, "dtype", None) == jax.dtypes.float0


def _zero(primal: Any) -> Any:
    """Returns the tangent zero of an array."""
    if is_inexact(primal):
        return jnp.zeros_like(primal)
    return np.zeros(jnp.shape(primal), jax.dtypes.float0)

"""vjp: the output of a function of objects, and the function that pulls cotangents back.

What the function changes is changed on the caller's objects by the call of `vjp`. The `Pullback`
that comes out knows none of them: it holds arrays, and how to arrange the results, and may be
called as often as one likes, later and in another trace.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxlite._core import nested, scope
from nnxlite._core.context import current
from nnxlite._core.kinds import STATE, VARIABLE, kind_of
from nnxlite._core.modes import mode_flags
from nnxlite._core.trace import EAGER, OPEN_STATES, Opaque, current_level
from nnxlite._transforms.arguments import Bound, by_position, parameters, resolve
from nnxlite._transforms.axes import DiffState
from nnxlite._transforms.differentiated import (
    Argnum,
    Form,
    arrange,
    choose,
    function_of,
    shifted,
    type_text,
)
from nnxlite._transforms.lift import first_object
from nnxlite._transforms.packing import Out, opaque_flatten
from nnxlite._transforms.parted import PartedFunction, Result, output_of, place_in


@mode_flags()
def vjp(
    fn: Callable[..., Any] | None = None,
    /,
    *primals: Any,
    has_aux: bool = False,
    argnums: Argnum | Sequence[Argnum] | None = None,
) -> Any:
    """Calls a function of objects, and returns with its output the function of cotangents.

    What `fn` changes is changed on the caller's objects, once, by this call.

    Args:
      fn: The function; without it, a decorator is returned. Its output is any tree of arrays and
        States; an object may be returned in `aux`.
      *primals: Its arguments; without any, the function of them is returned. That one takes keyword
        arguments too, which are constants.
      has_aux: Whether `fn` returns `(output, aux)`.
      argnums: Which arguments to differentiate, as for `nnx.grad`; all of them unless given.

    Returns:
      `(output, vjp_fn)`, with `aux` as third if there is one. `vjp_fn(cotangent)`, of a cotangent
      like the output, returns a tuple with an entry per differentiated argument: a State for an
      object, of its `Param`s unless `argnums` says otherwise; for any other argument one like it,
      as from `jax.vjp`. It may be called many times, and be passed through `jax.jit`.

    Raises:
      TypeError: The output holds an object, or a leaf to differentiate is no float; the message has
        its path.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> y, vjp_fn = nnx.vjp(lambda m, x: m(x), model, jnp.ones((4, 2)))
      >>> grads, x_bar = vjp_fn(jnp.ones_like(y))
      >>> grads["bias"][...], x_bar.shape
      (Array([4., 4., 4.], dtype=float32), (4, 2))
    """
    if fn is None:
        return functools.partial(vjp, has_aux=has_aux, argnums=argnums)
    function, first, named = resolve(fn)
    lifted = VjpFunction(function, has_aux=has_aux, argnums=argnums, shift=len(first))
    bound = Bound(lifted, *first, **named) if first or named else lifted
    return bound(*primals) if primals else bound


class VjpFunction(PartedFunction):
    """A function of objects that returns its pullback beside its output; made by `vjp`."""

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        has_aux: bool,
        argnums: Argnum | Sequence[Argnum] | None,
        shift: int = 0,
    ) -> None:
        super().__init__(fn, "nnx.vjp", has_aux)
        given = (argnums,) if isinstance(argnums, int | DiffState) else argnums
        self._wanted = None if given is None else tuple(shifted(each, shift) for each in given)
        self._known, self._shift = parameters(fn), shift

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._wanted is None:
            wanted: Sequence[Argnum] = range(self._shift, len(args))
        else:
            wanted = self._wanted
            args, kwargs = by_position(args, kwargs, self._known)
        level = current_level()
        is_named = level is not EAGER and current().scopes
        receiver = first_object(args, kwargs) if is_named else None
        binding, leaves = self._lift.bind(args, kwargs, None, receiver is not None)
        choice = choose(binding, leaves, wanted, integers="")
        pure, values = function_of(choice, binding, leaves)

        def outputs(given: list[Any]) -> tuple[list[Any], Out]:
            # Pushed here, and not around the call, for the backward pass to have the name too.
            with scope.enter_transform(receiver, self._lift.method):
                out = pure(given)
            return output_of(out), out

        output, vjp_fn, out = jax.vjp(outputs, values, has_aux=True)
        result: Result = binding.deliver(out, level)
        types = tuple(jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in output)
        about = _About(self._lift.title, result.tree, types, choice.forms)
        given = jax.tree_util.tree_unflatten(result.tree, output), Pullback(vjp_fn, about)
        return (*given, result.aux) if self._has_aux else given


class _About(NamedTuple):
    """What is static about a pullback.

    Attributes:
      title: How messages call it.
      tree: Of the output, with the values of States as leaves.
      types: Shape and dtype of each of them.
      forms: Per differentiated argument, how its cotangent is put together.
    """

    title: str
    tree: Any
    types: tuple[jax.ShapeDtypeStruct, ...]
    forms: tuple[Form, ...]


class Pullback:
    """Takes a cotangent of the output to those of the arguments; made by `vjp`.

    A pytree, whose leaves are the arrays that it needs.
    """

    __slots__ = ("__weakref__", "_about", "_vjp_fn")

    def __init__(self, vjp_fn: Callable[..., Any], about: _About) -> None:
        self._vjp_fn, self._about = vjp_fn, about

    def __call__(self, cotangent: Any, /) -> tuple[Any, ...]:
        """Returns one entry per differentiated argument.

        Args:
          cotangent: Like the output: structure, shapes and dtypes.

        Raises:
          ValueError: It is not; the message has the path.
        """
        (given,) = self._vjp_fn(self._checked(cotangent))
        return tuple(arrange(self._about.forms, given, current_level()))

    def _checked(self, cotangent: Any) -> list[Any]:
        title, tree, types, _ = self._about
        leaves, found = opaque_flatten(cotangent, OPEN_STATES)
        if found != tree:
            leaves = self._leaves_by_path(cotangent)
        for number, (leaf, wanted) in enumerate(zip(leaves, types, strict=True)):
            if jnp.issubdtype(wanted.dtype, jnp.inexact) and type_text(leaf) != type_text(wanted):
                raise ValueError(
                    f"{title}: the cotangent of {place_in(tree, number)} is {type_text(leaf)}. "
                    f"Expected {type_text(wanted)}, as the output is."
                )
        return leaves

    def _leaves_by_path(self, cotangent: Any) -> list[Any]:
        """Returns the leaves of a cotangent whose States have other kinds of Variables, at most."""
        tree = self._about.tree
        wanted = _bare(jax.tree_util.tree_unflatten(tree, range(tree.num_leaves)))
        found = _bare(cotangent)
        if jax.tree.structure(wanted) == jax.tree.structure(found):
            return jax.tree.leaves(found)
        expected, given = _paths(wanted), _paths(found)
        missing = [path for path in expected if path not in given]
        surplus = [path for path in given if path not in expected]
        what = f"has structure {jax.tree.structure(found)}"
        if missing and not surplus:
            what = f"has nothing for {missing[0]}"
        elif surplus and not missing:
            what = f"has a leaf for {surplus[0]}, which is not there"
        raise ValueError(
            f"{self._about.title}: the cotangent {what}. Expected the structure of the output: "
            f"{jax.tree.structure(wanted)}."
        )

    def __repr__(self) -> str:
        return f"<vjp_fn of {self._about.title}>"


jax.tree_util.register_pytree_node(
    Pullback,
    lambda pullback: ((pullback._vjp_fn,), pullback._about),
    lambda about, children: Pullback(children[0], about),
)


def _bare(tree: Any) -> Any:
    """Returns a tree with nested dicts of values in place of States."""
    leaves, treedef = opaque_flatten(tree)
    bare = [_bare_value(leaf.node) if type(leaf) is Opaque else leaf for leaf in leaves]
    return jax.tree_util.tree_unflatten(treedef, bare)


def _bare_value(node: Any) -> Any:
    if kind_of(node) == STATE:
        return nested.nest(node._meta.paths, node._value)
    return node._value if kind_of(node) == VARIABLE else node


def _paths(tree: Any) -> list[str]:
    pairs = jax.tree_util.tree_leaves_with_path(tree)
    return ["output" + jax.tree_util.keystr(path) for path, _ in pairs]

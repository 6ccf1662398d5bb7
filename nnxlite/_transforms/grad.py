"""grad and value_and_grad: gradients of functions of objects.

The values that are differentiated are picked out of the flat leaves of the lift; the others, and
everything that the function changes, travel beside them, so state changes in a loss reach the
caller. Gradients of an object come as a State with the same paths and kinds as
`state(model, filter)`.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxlite._core.errors import Path, format_path
from nnxlite._core.graphdef import ARRAY_LEAF, FILL_NODE, Leaf
from nnxlite._core.state import State
from nnxlite._core.statedef import StateDef
from nnxlite._core.trace import Level, Opaque
from nnxlite._core.variable import Param
from nnxlite._transforms.arguments import by_position, parameters, resolve
from nnxlite._transforms.axes import DiffState, Entry
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.packing import Out

Argnum = int | DiffState


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
    return functools.partial(gradient, *args, **kwargs) if args or kwargs else gradient


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
        self._wanted = tuple(_shifted(each, shift) for each in given)
        self._has_aux, self._with_value, self._allow_int = has_aux, with_value, allow_int
        self._options: dict[str, Any] = {"holomorphic": holomorphic, "allow_int": allow_int}
        self._known = parameters(fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = by_position(args, kwargs, self._known)
        with self._bound(args, kwargs) as (binding, leaves, level):
            return self._differentiate(binding, leaves, args, level)

    def _differentiate(
        self, binding: Binding, leaves: list[Any], args: tuple[Any, ...], level: Level
    ) -> Any:
        crossing = binding.crossing
        choice = _choose(binding, leaves, self._wanted, len(args), self._allow_int)
        values = binding.plan.gather()
        others = [leaves[n] for n in crossing.rest]
        place = {position: n for n, position in enumerate(crossing.rest)}

        def loss(diff: tuple[list[Any], list[Any]], extras: Any) -> tuple[Any, Out]:
            all_values, all_others = list(values), list(others)
            for (number, inner), value in zip(choice.values, diff[0], strict=True):
                if inner is None:
                    all_values[number] = value
                else:
                    all_values[number] = list(all_values[number])
                    all_values[number][inner] = value
            for position, value in zip(choice.others, diff[1], strict=True):
                all_others[place[position]] = value
            out = crossing.pure(all_values, all_others, extras)
            return self._loss_of(out), out

        diff = (
            [values[n] if inner is None else values[n][inner] for n, inner in choice.values],
            [leaves[position] for position in choice.others],
        )
        (_, out), grads = jax.value_and_grad(loss, has_aux=True, **self._options)(
            diff, binding.extra_inputs()
        )
        result = binding.deliver(out, level)
        if self._has_aux:
            result = tuple(result)
        gradients = choice.arrange(grads, level)
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


def _shifted(argnum: Argnum, by: int) -> Argnum:
    if isinstance(argnum, DiffState):
        return DiffState(argnum.argnum + by, argnum.filter) if argnum.argnum >= 0 else argnum
    return argnum + by if argnum >= 0 else argnum


class _Wanted(NamedTuple):
    """How to put the gradients of one argument together.

    Attributes:
      tree: The argument, with each object one leaf.
      parts: Per leaf of it: None for an array; else the entries of the object's gradient.
    """

    tree: Any
    parts: list["_ObjectPart | None"]


class _ObjectPart(NamedTuple):
    statedef: StateDef
    size: int
    leaf: Leaf | None  # set for a bare Variable: its kind


class _Choice(NamedTuple):
    """What is differentiated, over all arguments.

    Attributes:
      values: Leaf numbers (and positions inside a State) of the lift.
      others: Positions of plain arguments.
      wanted: Per differentiated argument how to arrange the gradients.
    """

    values: list[Entry]
    others: list[int]
    wanted: list[_Wanted]

    def arrange(self, grads: tuple[list[Any], list[Any]], level: Level) -> list[Any]:
        """Returns per wanted argument its gradient."""
        values, others = iter(grads[0]), iter(grads[1])
        results = []
        for tree, parts in self.wanted:
            leaves: list[Any] = []
            for part in parts:
                if part is None:
                    leaves.append(next(others))
                    continue
                given = [next(values) for _ in range(part.size)]
                if part.leaf is not None:
                    leaves.append(part.leaf[0]._make(given[0], part.leaf[1], level))
                else:
                    leaves.append(State._make(given, part.statedef, level))
            results.append(jax.tree_util.tree_unflatten(tree, leaves))
        return results


def _choose(
    binding: Binding,
    leaves: list[Any],
    wanted: tuple[Argnum, ...],
    num_args: int,
    allow_int: bool,
) -> _Choice:
    crossing = binding.crossing
    args_tree = crossing.treedef.children()[0]
    trees = args_tree.children()
    starts = [0]
    for tree in trees:
        starts.append(starts[-1] + tree.num_leaves)
    choice = _Choice([], [], [])
    taken: set[Entry] = set()
    seen: dict[int, bool] = {}
    for each in wanted:
        argnum = each.argnum if isinstance(each, DiffState) else each
        if not -num_args <= argnum < num_args:
            raise ValueError(
                f"{binding.lift.title}: argnums has {argnum}, but the call has {num_args} "
                "positional arguments. Give the arguments to differentiate by position."
            )
        argnum %= num_args
        by_filter = isinstance(each, DiffState)
        if argnum in seen and not (by_filter and seen[argnum]):
            raise ValueError(
                f"{binding.lift.title}: argnums names argument {argnum} twice. Name it once, or "
                "give several nnx.DiffState with filters that take different leaves of it."
            )
        seen[argnum] = by_filter
        parts: list[_ObjectPart | None] = []
        for position in range(starts[argnum], starts[argnum + 1]):
            if type(leaves[position]) is not Opaque:
                choice.others.append(position)
                parts.append(None)
                continue
            root = crossing.roots.index(position)
            parts.append(_choose_object(binding, root, each, choice, taken, allow_int))
        choice.wanted.append(_Wanted(trees[argnum], parts))
    return choice


def _choose_object(
    binding: Binding, root: int, each: Argnum, choice: _Choice, taken: set[Entry], allow_int: bool
) -> _ObjectPart:
    crossing = binding.crossing
    whole = crossing.graphdef.skeleton.roots[root][1] != FILL_NODE  # a State or Variable itself
    if isinstance(each, DiffState):
        predicate = each.predicate
    else:
        # Of an object, its parameters; a State or Variable was chosen leaf by leaf already.
        predicate = (lambda path, leaf: True) if whole else DiffState(0, Param).predicate
    paths: list[Path] = []
    kinds: list[Leaf] = []
    for path, kind, number, inner, leaf in _leaves_below(binding, root):
        if (number, inner) in taken or not predicate(path, leaf):
            continue
        value = leaf if kind is ARRAY_LEAF else leaf._value
        _check_inexact(path, kind, value, allow_int, binding, root)
        taken.add((number, inner))
        choice.values.append((number, inner))
        paths.append(path)
        kinds.append(kind)
    if paths == [()]:
        return _ObjectPart(StateDef.of((), ()), 1, kinds[0])
    return _ObjectPart(StateDef.of(tuple(paths), tuple(kinds)), len(paths), None)


def _leaves_below(binding: Binding, root: int) -> list[tuple[Path, Leaf, int, int | None, Any]]:
    """Lists path, kind, number, position inside a State, and the leaf itself."""
    graphdef, handles = binding.crossing.graphdef, binding.plan.handles
    found: list[tuple[Path, Leaf, int, int | None, Any]] = []
    for number, path in binding.crossing.root_entries(root).items():
        kind, handle = graphdef.leaves[number], handles[number]()
        if kind[0] is State:
            variables = handle._flat()[1]
            found.extend(
                ((*path, *inner_path), inner_kind, number, inner, variables[inner])
                for inner, (inner_path, inner_kind) in enumerate(
                    zip(kind[1].paths, kind[1].leaves, strict=True)
                )
            )
        else:
            leaf = handle._value if kind is ARRAY_LEAF else handle
            found.append((path, kind, number, None, leaf))
    return found


def _check_inexact(
    path: Path, kind: Leaf, value: Any, allow_int: bool, binding: Binding, root: int
) -> None:
    if allow_int:
        return
    for leaf in jax.tree.leaves(value):
        dtype = getattr(leaf, "dtype", None)
        if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
            name = binding.crossing.argument_name(root)
            raise TypeError(
                f"{binding.lift.title} cannot differentiate {format_path(path, name)} "
                f"({kind[0].__name__}): its dtype is {dtype}. Leave it out with "
                "nnx.DiffState(argnum, filter), or pass allow_int=True."
            )

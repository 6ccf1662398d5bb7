"""Which leaves are differentiated, among those of all arguments.

The lift flattens arguments to the values of the leaves of objects, and to other arguments. A
`Choice` names those among them that a transform differentiates, hands them out, puts traced values
in their places, and arranges derivatives by argument: that of an object is a State with the paths
and kinds of the leaves that were chosen. A leaf that two arguments share belongs to the first.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._core.errors import Path, format_path
from nnxlite._core.extras import ONCE
from nnxlite._core.graphdef import ARRAY_LEAF, FILL_NODE, Leaf
from nnxlite._core.kinds import ARRAY, kind_of
from nnxlite._core.state import State
from nnxlite._core.statedef import StateDef
from nnxlite._core.trace import Level, Opaque
from nnxlite._core.variable import Param
from nnxlite._transforms.axes import DiffState, Entry
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.packing import Out, opaque_flatten

Argnum: TypeAlias = int | DiffState
Source: TypeAlias = Entry | int
"""Where a differentiated value is: a leaf of an object, or a number in `Crossing.rest`."""


def shifted(argnum: Argnum, by: int) -> Argnum:
    """Counts the arguments that a method or partial brings before those of a call."""
    if isinstance(argnum, DiffState):
        return DiffState(argnum.argnum + by, argnum.filter) if argnum.argnum >= 0 else argnum
    return argnum + by if argnum >= 0 else argnum


class Form(NamedTuple):
    """How the derivatives of one argument are put together; hashable.

    Attributes:
      tree: The argument, with each object one leaf.
      parts: Per leaf of it, None for an array, else paths and kinds of the derivative of the
        object; a Variable has the one path `()`.
    """

    tree: Any
    parts: tuple[StateDef | None, ...]

    def join(self, values: Iterator[Any], level: Level) -> Any:
        """Returns the derivative of the argument, of the next values."""
        leaves = [
            next(values) if part is None else _joined(part, values, level) for part in self.parts
        ]
        return jax.tree_util.tree_unflatten(self.tree, leaves)


def _joined(part: StateDef, values: Iterator[Any], level: Level) -> Any:
    given = list(itertools.islice(values, len(part.paths)))
    if part.paths == ((),):
        cls, meta = part.leaves[0]
        return cls._make(given[0], meta, level)
    return State._make(given, part, level)


def arrange(forms: Iterable[Form], values: Iterable[Any], level: Level) -> list[Any]:
    """Returns per argument its derivative."""
    rest = iter(values)
    return [form.join(rest, level) for form in forms]


class Choice(NamedTuple):
    """What is differentiated, over all arguments.

    Attributes:
      sources: Where the values are, in the order of the arguments.
      forms: Per differentiated argument, how its derivatives are put together.
    """

    sources: tuple[Source, ...]
    forms: tuple[Form, ...] = ()

    def of(self, values: Sequence[Any], others: Sequence[Any]) -> list[Any]:
        """Returns the chosen ones among the values and other arguments."""
        return [
            others[source] if isinstance(source, int) else _value_at(values, *source)
            for source in self.sources
        ]

    def put(
        self, given: Sequence[Any], values: Sequence[Any], others: Sequence[Any]
    ) -> tuple[list[Any], list[Any]]:
        """Returns all values and other arguments, the given ones in place of the chosen."""
        all_values, all_others = list(values), list(others)
        for number in {s[0] for s in self.sources if not isinstance(s, int) and s[1] is not None}:
            all_values[number] = list(values[number])  # of a State
        for source, value in zip(self.sources, given, strict=True):
            if isinstance(source, int):
                all_others[source] = value
            elif source[1] is None:
                all_values[source[0]] = value
            else:
                all_values[source[0]][source[1]] = value
        return all_values, all_others


def _value_at(values: Sequence[Any], number: int, inner: int | None) -> Any:
    return values[number] if inner is None else values[number][inner]


def function_of(
    choice: Choice, binding: Binding, leaves: Sequence[Any]
) -> tuple[Callable[[Sequence[Any]], Out], list[Any]]:
    """Returns the pure function of the chosen values alone, and these values.

    Args:
      choice: What is differentiated; all else is constant.
      binding: The arguments.
      leaves: Their leaves, as they were bound.
    """
    crossing = binding.crossing
    values = binding.plan.gather()
    others = [leaves[position] for position in crossing.rest]
    extras = binding.extra_inputs(ONCE)

    def pure(given: Sequence[Any]) -> Out:
        return crossing.pure(*choice.put(given, values, others), extras)

    return pure, choice.of(values, others)


def choose(
    binding: Binding, leaves: Sequence[Any], wanted: Sequence[Argnum], integers: str | None
) -> Choice:
    """Chooses the leaves to differentiate.

    Args:
      binding: The arguments.
      leaves: Their leaves, as they were bound.
      wanted: Which arguments, or which leaves of them. Of an object, its `Param`s are meant unless
        a filter is given; of a State or Variable all.
      integers: What the error for an integer leaf offers beside a filter; None lets it be chosen.

    Raises:
      TypeError: An integer leaf of an object is chosen, or an argument that is no array.
      ValueError: There is no such argument, or it is named twice.
    """
    chooser = _Chooser(binding, leaves, integers)
    positions = _positions(binding.lift.title, wanted, len(chooser.trees))
    forms = [chooser.argument(n, each) for n, each in zip(positions, wanted, strict=True)]
    return Choice(tuple(chooser.sources), tuple(forms))


def _positions(title: str, wanted: Sequence[Argnum], size: int) -> list[int]:
    """Returns the positions of the wanted arguments, counted from the first."""
    seen: dict[int, bool] = {}
    found = []
    for each in wanted:
        by_filter = isinstance(each, DiffState)
        argnum = each.argnum if isinstance(each, DiffState) else each
        if not -size <= argnum < size:
            raise ValueError(
                f"{title}: argnums has {argnum}, but the call has {size} positional arguments. "
                "Give the arguments to differentiate by position."
            )
        argnum %= size
        if argnum in seen and not (by_filter and seen[argnum]):
            raise ValueError(
                f"{title}: argnums names argument {argnum} twice. Name it once, or give several "
                "nnx.DiffState with filters that take different leaves of it."
            )
        seen[argnum] = by_filter
        found.append(argnum)
    return found


class _Chooser:
    """Chooses argument after argument."""

    def __init__(self, binding: Binding, leaves: Sequence[Any], integers: str | None) -> None:
        self.binding, self.leaves, self.integers = binding, leaves, integers
        crossing = binding.crossing
        self.trees, self.positions = arguments_of(crossing.treedef)
        self.others = {position: n for n, position in enumerate(crossing.rest)}
        self.sources: list[Source] = []
        self.taken: set[Entry] = set()

    def argument(self, argnum: int, each: Argnum) -> Form:
        parts = [self._leaf(position, each) for position in self.positions[argnum]]
        return Form(self.trees[argnum], tuple(parts))

    def _leaf(self, position: int, each: Argnum) -> StateDef | None:
        leaf = self.leaves[position]
        if type(leaf) is Opaque:
            return self._object(self.binding.crossing.roots.index(position), each)
        if not is_number(leaf):
            place = self.binding.crossing.place(position)
            raise TypeError(
                f"{self.binding.lift.title} cannot differentiate {place}: it is no array but "
                f"{type(leaf).__name__}. Name the arguments to differentiate with argnums, or give "
                "this one by keyword."
            )
        self.sources.append(self.others[position])
        return None

    def _object(self, root: int, each: Argnum) -> StateDef:
        skeleton = self.binding.crossing.graphdef.skeleton
        if isinstance(each, DiffState):
            predicate = each.predicate
        elif skeleton.roots[root][1] == FILL_NODE:
            predicate = DiffState(0, Param).predicate
        else:  # a State or Variable was chosen leaf by leaf already
            predicate = _everything
        paths: list[Path] = []
        kinds: list[Leaf] = []
        for path, kind, entry, leaf in leaves_below(self.binding, root):
            if entry in self.taken or not predicate(path, leaf):
                continue
            self._check_inexact(path, kind, value_of(kind, leaf), root)
            self.taken.add(entry)
            self.sources.append(entry)
            paths.append(path)
            kinds.append(kind)
        return StateDef.of(tuple(paths), tuple(kinds))

    def _check_inexact(self, path: Path, kind: Leaf, value: Any, root: int) -> None:
        if self.integers is None:
            return
        for leaf in jax.tree.leaves(value):
            dtype = getattr(leaf, "dtype", None)
            if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
                name = self.binding.crossing.argument_name(root)
                raise TypeError(
                    f"{self.binding.lift.title} cannot differentiate {format_path(path, name)} "
                    f"({kind[0].__name__}): its dtype is {dtype}. Leave it out with "
                    f"nnx.DiffState(argnum, filter){self.integers}."
                )


def _everything(path: Path, leaf: Any) -> bool:
    return True


def value_of(kind: Leaf, leaf: Any) -> Any:
    """Returns the value of a Variable, or an array itself."""
    return leaf if kind is ARRAY_LEAF else leaf._value


def is_number(value: Any) -> bool:
    """Tells whether JAX takes a value for an array."""
    return (
        kind_of(value) == ARRAY
        or isinstance(value, bool | int | float | complex | np.generic)
        or hasattr(type(value), "__jax_array__")
    )


def dtype_of(value: Any) -> Any:
    """Returns the dtype of what JAX takes for an array; None of anything else."""
    return jnp.result_type(value) if is_number(value) else None


def is_inexact(value: Any) -> bool:
    """Tells whether a value is a float or complex array or number."""
    return is_number(value) and jnp.issubdtype(dtype_of(value), jnp.inexact)


def type_text(value: Any) -> str:
    """Writes dtype and shape of an array, and the type of anything else."""
    if not is_number(value):
        return type(value).__name__
    return f"{dtype_of(value)}{list(jnp.shape(value))}"


def structure_text(tree: Any) -> str:
    """Writes the structure of a tree, with each object a leaf."""
    leaves, treedef = opaque_flatten(tree)
    return str(jax.tree.structure(jax.tree_util.tree_unflatten(treedef, range(len(leaves)))))


def arguments_of(treedef: Any) -> tuple[list[Any], list[range]]:
    """Returns per positional argument its tree, and where its leaves stand among all."""
    trees = treedef.children()[0].children()
    ends = list(itertools.accumulate((tree.num_leaves for tree in trees), initial=0))
    return trees, [range(start, end) for start, end in itertools.pairwise(ends)]


def leaves_below(binding: Binding, root: int) -> list[tuple[Path, Leaf, Entry, Any]]:
    """Lists path, kind, entry and leaf of what hangs below one object."""
    graphdef, handles = binding.crossing.graphdef, binding.plan.handles
    found: list[tuple[Path, Leaf, Entry, Any]] = []
    for number, path in binding.crossing.root_entries(root).items():
        kind, handle = graphdef.leaves[number], handles[number]()
        if kind[0] is State:
            variables = handle._flat()[1]
            found.extend(
                ((*path, *inner_path), inner_kind, (number, inner), variables[inner])
                for inner, (inner_path, inner_kind) in enumerate(
                    zip(kind[1].paths, kind[1].leaves, strict=True)
                )
            )
        else:
            leaf = handle._value if kind is ARRAY_LEAF else handle
            found.append((path, kind, (number, None), leaf))
    return found

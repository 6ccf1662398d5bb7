"""Crossings: the pure function of one structure of arguments.

A `Crossing` holds all that such a function depends on, and refers to no object of the caller: it
serves all callers with arguments of that structure. The pure function builds fresh clones around
the values that it is given, runs the user's function on them, and packs the result.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol

import jax

from nnxlite._core import scope
from nnxlite._core.build import build
from nnxlite._core.errors import Path, TraceLevelError, format_path
from nnxlite._core.extras import TRAVELLING
from nnxlite._core.graphdef import GraphDef, containers_of, leaf_paths, node_paths
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.statics import Static
from nnxlite._core.trace import (
    EAGER,
    ForeignRead,
    Level,
    current_level,
    recording,
)
from nnxlite._transforms.arguments import Chosen, Statics, parameters, paths_in_closure
from nnxlite._transforms.packing import Out, opaque_flatten, pack


class Log(Protocol):
    """Where a crossing notes that its function is traced."""

    def add(
        self,
        crossing: "Crossing",
        values: Sequence[Any],
        rest: Sequence[Any],
        extras: Sequence[Any],
    ) -> None: ...


class Lifted(Protocol):
    """What a crossing asks of the lift it is made for: the function, and how it is called."""

    fn: Callable[..., Any]
    method: str | None
    mode: Any

    @property
    def traces(self) -> Log: ...

    @property
    def title(self) -> str: ...


class Around(Protocol):
    """What a transform does to the clones before and after the user's function."""

    def before(self, leaves: list[Any]) -> None: ...
    def after(self, nodes: list[Any], leaves: list[Any], result: Any) -> None: ...


class Crossing:
    """All that a pure function depends on; it refers to no object of the caller.

    Attributes:
      graphdef: Of all objects among the arguments.
      treedef: Of the arguments, each object one leaf.
      roots: Where objects stand among the leaves of `treedef`.
      rest: Where the other arguments stand.
      pure: `pure(values, rest, extras) -> Out`; a transform may add an `Around`.
      kept: For whoever uses the crossing: what it made of `pure`.
      foreign: What the traces in `kept` read of objects that the function closes over.
    """

    def __init__(
        self,
        lift: Lifted,
        graphdef: GraphDef[Any],
        treedef: Any,
        roots: tuple[int, ...],
        statics: Statics | None,
        nested: bool,
    ) -> None:
        self.graphdef, self.treedef, self.roots = graphdef, treedef, roots
        self.statics = statics
        self.rest = tuple(n for n in range(treedef.num_leaves) if n not in set(roots))
        self.kept: dict[Any, Any] = {}
        self.foreign: dict[int, ForeignRead] = {}
        self._fn, self._method, self.nested = lift.fn, lift.method, nested
        self._title, self.mode, self._traces = lift.title, lift.mode, lift.traces
        self.pure = self._make_pure()

    def _make_pure(self) -> Callable[..., Out]:
        graphdef, treedef, positions = self.graphdef, self.treedef, self.roots
        rest_positions, statics = self.rest, self.statics
        fn, method, nested = self._fn, self._method, self.nested
        title, mode = self._title, self.mode

        def run(level: Level, args: Any, kwargs: Any) -> Any:
            if level is EAGER:  # under jax.disable_jit
                return fn(*args, **kwargs)
            found: dict[int, ForeignRead] = {}
            with recording(found):
                result = fn(*args, **kwargs)
            if self.kept:  # else each call traces anew
                self.foreign.update(found)
            return result

        def pure(
            values: list[Any],
            rest: list[Any],
            extras: Sequence[Any],
            around: "Around | None" = None,
        ) -> Out:
            level = current_level()
            if level is not EAGER:
                self._traces.add(self, values, rest, extras)
            roots, nodes, leaves = build(graphdef, values, level)
            arguments: list[Any] = [None] * treedef.num_leaves
            for position, value in zip(rest_positions, rest, strict=True):
                arguments[position] = value
            for position, root in zip(positions, roots, strict=True):
                arguments[position] = root
            args, kwargs = jax.tree_util.tree_unflatten(treedef, arguments)
            if statics is not None:
                args, kwargs = statics.joined(args, kwargs)
            receiver = next((root for root in roots if kind_of(root) == OBJECT), None)
            if around is not None:
                around.before(leaves)
            try:
                with (
                    _extras_inside(extras, nodes) as outputs,
                    scope.inside_transform(receiver if nested else None, method),
                ):
                    result = run(level, args, kwargs)
                    given_out = [output() for output in outputs]
                if around is not None:
                    around.after(nodes, leaves, result)
                outputs_tree = opaque_flatten(result, mode)
                return pack(graphdef, tuple(roots), nodes, leaves, values, outputs_tree, given_out)
            except TraceLevelError as error:
                _say_where(error, fn, title)
                raise

        return pure

    def beside(self, fn: Callable[..., Any]) -> "Crossing":
        """Returns the crossing of another function that takes the same arguments."""
        lift = _Beside(fn, self._method, self.mode, self._title, _LogOf(self))
        return Crossing(lift, self.graphdef, self.treedef, self.roots, self.statics, self.nested)

    def is_like(self, other: "Crossing") -> bool:
        """Tells whether one and the same pure function serves both."""
        return (
            self.graphdef is other.graphdef
            and self.treedef == other.treedef
            and _key_of(self.statics) == _key_of(other.statics)
        )

    def summary(self) -> str:
        """Describes the arguments in one line, for messages."""
        named = [] if self.statics is None else self.statics.named.items()
        static = [] if self.statics is None else self.statics.positional.items()
        fixed = "".join(f", {name}={value!r}" for name, value in [*static, *named])
        return f"{self.graphdef!r}, {len(self.rest)} other values{fixed}"

    def argument_positions(self, chosen: Chosen) -> list[int]:
        """Returns the positions, among the leaves of `treedef`, of the chosen arguments."""
        size = self.treedef.num_leaves
        args, kwargs = jax.tree_util.tree_unflatten(self.treedef, range(size))
        taken = set() if self.statics is None else set(self.statics.positional)
        numbers = [n for n in range(len(args) + len(taken)) if n not in taken]
        found = [arg for n, arg in zip(numbers, args, strict=True) if n in chosen.positions]
        found += [arg for name, arg in kwargs.items() if name in chosen.names]
        return jax.tree_util.tree_leaves(found)

    def leaf_path(self, number: int) -> str:
        """Writes where a leaf is, starting with the name of the argument."""
        path = self.graphdef.paths[number]
        if len(self.roots) == 1:
            return format_path(path, self.argument_name(0))
        root: Any = path[0]  # with several roots, paths start with their number
        return format_path(path[1:], self.argument_name(root))

    def argument_name(self, root: int) -> str:
        """Returns the name of the parameter that the root object with this number came in by."""
        return self.place(self.roots[root])

    def place(self, position: int) -> str:
        """Writes where a leaf of the arguments is: the name of the parameter, and the way there."""
        places = (place for place, at in self.argument_places() if at == position)
        return next(places, "argument")

    def argument_places(self) -> Iterator[tuple[str, int | None]]:
        """Yields for each leaf of the arguments where it is, and its position; None for a None."""
        args, kwargs = jax.tree_util.tree_unflatten(self.treedef, range(self.treedef.num_leaves))
        taken: Iterable[int] = ()
        if self.statics is not None:
            taken = self.statics.positional
            args, _ = self.statics.joined(args, {})
        named = [(self._parameter(n), arg) for n, arg in enumerate(args) if n not in taken]
        for name, value in [*named, *kwargs.items()]:
            leaves = jax.tree_util.tree_leaves_with_path(value, is_leaf=lambda x: x is None)
            for path, position in leaves:
                yield name + jax.tree_util.keystr(path), position

    def named_statics(self) -> dict[str, Static]:
        """Returns the static arguments by the names of their parameters."""
        if self.statics is None:
            return {}
        positional, named = self.statics.key
        return {self._parameter(n): value for n, value in positional} | dict(named)

    def _parameter(self, number: int) -> str:
        known = parameters(self._fn)
        return known[number] if number < len(known) else f"args[{number}]"

    def node_path(self, number: int) -> str:
        """Writes where a node is first met, starting with the name of the argument."""
        skeleton = self.graphdef.skeleton
        for root, slot in enumerate(skeleton.roots):
            path = node_paths(skeleton, [((), slot)]).get(number)
            if path is not None:
                return format_path(path, self.argument_name(root))
        return "an argument"

    def owner(self, number: int) -> int:
        """Returns the number of the object that a list or dict belongs to, or its own."""
        records = self.graphdef.skeleton.records
        if records[number].cls not in (list, dict):
            return number
        objects = [n for n, record in enumerate(records) if record.cls not in (list, dict)]
        return next(n for n in objects if number in containers_of(records, records[n].slots))

    def root_entries(self, root: int) -> dict[int, Path]:
        """Returns, per leaf number reached from one root, the path from there."""
        return leaf_paths(self.graphdef.skeleton, [((), self.graphdef.skeleton.roots[root])])


@dataclasses.dataclass
class _Beside:
    """A function that crosses as the one beside it does."""

    fn: Callable[..., Any]
    method: str | None
    mode: Any
    title: str
    traces: Log


class _LogOf(NamedTuple):
    """Notes traces as those of a crossing that lives as long as its lift does."""

    crossing: Crossing

    def add(
        self, crossing: Crossing, values: Sequence[Any], rest: Sequence[Any], extras: Sequence[Any]
    ) -> None:
        self.crossing._traces.add(self.crossing, values, rest, extras)


def _say_where(error: TraceLevelError, fn: Callable[..., Any], title: str) -> None:
    """Puts into the message by which name the function reaches what it tried to write."""
    if error.node is None:
        return
    paths = paths_in_closure(fn, [error.node])
    if paths:
        error.node = None
        error.args = (f"{title} closes over {paths[0]}. {error.args[0]}",)


@contextmanager
def _extras_inside(inputs: Sequence[Any], clones: list[Any]) -> Iterator[list[Callable[[], Any]]]:
    if not inputs:
        yield []
        return
    nodes = [functools.partial(_itself, clone) for clone in clones]
    active = TRAVELLING.active
    TRAVELLING.active = ()
    try:
        with ExitStack() as stack:
            yield [
                stack.enter_context(extra.inside(given, nodes))
                for extra, given in zip(active, inputs, strict=True)
            ]
    finally:
        TRAVELLING.active = active


def _key_of(statics: Statics | None) -> Any:
    return None if statics is None else statics.key


def _itself(value: Any) -> Any:
    return value

"""Records: what a capture asks for, what it gets, and how both are labelled.

An object that records goes by a *label*. In the recorder of a capture, an object of the root has
its path as label; any other is a *stranger*, known by its class and by how many of that class were
met before. Inside a transform, clones are known by the number of their node, and what the function
closes over by identity. `recording.py` translates.
"""

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp

from nnxlite._core.errors import Path
from nnxlite._core.variable import Perturbation, Variable

Reduce = Callable[[Any, Any], Any]


def append(records: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """The default way to keep records: all of them, in order."""
    return (*records, value)


def only(_: Any, value: Any) -> Any:
    """The way to keep values that have a name of their own each."""
    return value


def append_output(records: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """The way to keep outputs of methods: as `append`, where nothing else is asked for."""
    return (*records, value)


def only_output(_: Any, value: Any) -> Any:
    """The way to keep outputs of methods that have a name of their own each."""
    return value


def same(before: Any, value: Any) -> Any:
    """Joins perturbations of one name: they are one, and shapes have to agree."""
    if before is None:
        return value
    shapes = shapes_of(before), shapes_of(value)
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"One name is perturbed twice in one object, with shapes {shapes[0]} and {shapes[1]}. "
            "Each call adds the same perturbation, so shapes have to agree: use two names."
        )
    return before


def shapes_of(tree: Any) -> Any:
    """Returns what has to agree between a value and its perturbation: structure, shapes, dtypes."""
    leaves, treedef = jax.tree.flatten(tree)
    shapes = [(jnp.shape(leaf), jnp.result_type(leaf).name) for leaf in leaves]
    return shapes[0] if treedef == jax.tree.structure(0) else (treedef, *shapes)


OF_OUTPUTS = (append_output, only_output)
"""How values are kept that nobody sowed; where there is no room for them, they are left out."""

_EARLY = (only, only_output, same)  # joined where they are recorded, however deep
_GROWING = (append, append_output)


class Wanted(NamedTuple):
    """What a capture asks for; static, so it is part of every cache key.

    Attributes:
      kinds: The kinds of Variables to record.
      has_init: Whether perturbations have initial values.
      outputs: The kind under which outputs of methods are recorded, or None.
      filter: Which methods these are; None for all.
      each: Whether perturbed values and outputs of methods are recorded one by one, each under a
        name of its own, and perturbed there.
    """

    kinds: tuple[type[Variable], ...]
    has_init: bool = False
    outputs: type[Variable] | None = None
    filter: Hashable = None
    each: bool = False

    def place_of(self, kind: type[Variable]) -> type[Variable] | None:
        """Returns the nearest of the kinds asked for, under which records of `kind` come out.

        A subclass counts as its base, but a perturbation is asked for by that name only: its
        value, zeros, is no intermediate value of the model.
        """
        for base in kind.__mro__:
            if base in self.kinds:
                return base
            if base is Perturbation:
                return None
        return None


@dataclass(frozen=True, slots=True)
class Stranger:
    """The label of an object that is no part of the root: the how manieth of its class."""

    class_name: str
    number: int


class ById:
    """The label, inside a transform, of a known object that the function closes over."""

    __slots__ = ("class_name", "number", "ref")

    def __init__(self, owner: Any) -> None:
        self.ref, self.number = weakref.ref(owner), id(owner)
        self.class_name = type(owner).__name__

    def __eq__(self, other: object) -> bool:
        return type(other) is ById and self.ref() is other.ref() is not None

    def __hash__(self) -> int:
        return self.number


class Below(NamedTuple):
    """Where an object is that was made inside a transform: the node that holds it, and the way."""

    node: int
    path: Path


Label: TypeAlias = Path | int | ById | Stranger


class Key(NamedTuple):
    """Which record of an object: the kind it comes out under, and its name."""

    place: type[Variable]
    name: str


class Record(NamedTuple):
    """What one object recorded under one key.

    Attributes:
      kind: The kind of Variable it becomes.
      reduce: How values are joined; None until the first value says so, if it was handed in.
      start: What the values are joined to.
      values: Inside a transform, what waits to be joined outside of it.
      constant: `start` as a static value, inside a transform, if it is one (see `totals.py`).
      total: Whether a loop has joined values to `start`, which keeps its type then.
      steady: Whether the last value joined without a change of structure.
    """

    kind: type[Variable]
    reduce: Any
    start: Any
    values: tuple[Any, ...]
    constant: Any = None
    total: bool = False
    steady: bool = False

    @property
    def accumulates(self) -> bool:
        """Whether a `reduce_fn` of the user's joins the values."""
        return self.reduce is not None and self.reduce not in (*_EARLY, *_GROWING)

    def joined_to(self, values: Sequence[Any]) -> "Record":
        """Returns the record with more values, joined."""
        start, steady = self.start, self.steady
        for value in values:
            before = start
            if _is_abstract((start, value)):  # recorded inside of nnx.eval_shape
                start = jax.eval_shape(self.reduce, start, value)
            else:
                start = self.reduce(start, value)
            steady = jax.tree.structure(before) == jax.tree.structure(start)
        return self._replace(start=start, steady=steady)

    def with_more(self, values: Sequence[Any]) -> "Record":
        """Returns the record with more values, which wait."""
        if self.total:
            return self.joined_to(values)
        if self.reduce in _EARLY:
            kept = self._replace(start=self.values[0] if self.values else None, values=())
            return kept._replace(start=None, values=(kept.joined_to(values).start,))
        return self._replace(values=(*self.values, *values))


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


class Given(NamedTuple):
    """The static half of what goes into a transform.

    Attributes:
      init: Label and name of each perturbation, in the order of the arrays.
      unknown: The nodes that no label is known of.
      taken: Labels and names in use, where each value has a name of its own.
      paths: Labels and paths, where a filter asks for them.
      running: Nodes and methods under way, whose outputs are recorded by those.
      cut_off: Why no value can be handed out to the capture; empty if it can.
      totals: What is handed in to be joined to, after the perturbations in the order of the arrays.
      loop: How messages call the body of a loop, if that is the function; it has room for totals.
      condition: How they call the condition of one, which can hand out nothing.
    """

    init: tuple[tuple[Label, str], ...]
    unknown: tuple[int, ...]
    taken: tuple[tuple[Label, str], ...]
    paths: tuple[tuple[Label, Path], ...]
    running: tuple[tuple[int, str], ...]
    cut_off: str
    totals: "tuple[Total, ...]" = ()
    loop: str = ""
    condition: str = ""


class Total(NamedTuple):
    """A record that is handed in.

    Attributes:
      label: Whose it is.
      key: Which one.
      kind: Of its Variable.
      fresh: Whether it began in the loop that hands it in.
    """

    label: Label
    key: Key
    kind: type[Variable]
    fresh: bool


class Reduction:
    """How values are joined, as static data: functions with the same code count as the same."""

    __slots__ = ("function",)

    def __init__(self, function: Reduce | None) -> None:
        self.function = function

    def __eq__(self, other: object) -> bool:
        return type(other) is Reduction and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def _key(self) -> Hashable:
        return getattr(self.function, "__code__", self.function)


WHOLE, ONWARD = "whole", "onward"


class Entry(NamedTuple):
    """One record that is handed out.

    Attributes:
      label: Whose it is.
      key: Which one.
      kind: Of its Variable.
      reduce: How values are joined.
      constant: What it starts from, as for `Record`.
      total: Empty if values wait to be joined; `WHOLE` if they are joined, `ONWARD` if they are to
        what was handed in.
    """

    label: Label
    key: Key
    kind: type[Variable]
    reduce: Reduction
    constant: Any = None
    total: str = ""


class Outcome(NamedTuple):
    """The static half of what comes out of a transform.

    Attributes:
      entries: The records, in the order of the arrays.
      met: Labels and names of the perturbations that were met.
      strangers: In the order met, each label and where the object is, if it lives on: a node
        number, `ById` or `Below`.
      skipped: Outputs that were left out, and why.
    """

    entries: tuple[Entry, ...]
    met: tuple[tuple[Label, str], ...]
    strangers: tuple[tuple[Stranger, Any], ...]
    skipped: tuple[tuple[str, str], ...]


class Bundle:
    """Arrays and what they are: a pytree node whose structure is a static description."""

    __slots__ = ("about", "values")

    def __init__(self, about: Any, values: Sequence[Any]) -> None:
        self.about, self.values = about, list(values)

    def names(self) -> list[str]:
        """Names what an `Outcome` describes, for messages."""
        return [f"{each.kind.__name__} {each.key.name!r}" for each in self.about.entries]


jax.tree_util.register_pytree_node(
    Bundle, lambda b: (b.values, b.about), lambda about, values: Bundle(about, values)
)

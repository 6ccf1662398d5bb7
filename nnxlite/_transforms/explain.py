"""Why a function was traced again: how two traces differ, place by place.

What a trace depends on is written down as *facts*: at each place, such as
`model.layers[0].kernel`, what is there, of which type, with which metadata. Places are written as
errors write them, starting with the name of the argument. Facts are made when somebody asks; a
trace that runs notes only what they are made of (see `traces.py`).
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import jax

from nnxlite._core.errors import format_path
from nnxlite._core.graph import DATA, HELD_STATIC
from nnxlite._core.graphdef import (
    ARRAY_LEAF,
    FILL_LEAF,
    FILL_METHOD,
    FILL_NODE,
    FILL_STATIC,
    FILL_VALUE,
    GraphDef,
    Slot,
    thaw_key,
)
from nnxlite._core.kinds import Foreign
from nnxlite._core.metadata import EMPTY
from nnxlite._core.state import State
from nnxlite._core.statics import short_text
from nnxlite._transforms.crossing import Crossing

# What is compared, and how it is written.
Part: TypeAlias = tuple[Any, str]


class Fact(NamedTuple):
    """What a trace depends on at one place.

    Attributes:
      what: A class, a static value, or None for a plain array.
      type: Of an array: shape, dtype and all else that JAX keeps traces by.
      about: The metadata of a Variable, or the marks of an object.
    """

    what: Part | None
    type: Part | None = None
    about: Part | None = None

    def __str__(self) -> str:
        return " ".join(part[1] for part in (self.what, self.type) if part is not None)


Facts: TypeAlias = dict[str, Fact]


class Types(NamedTuple):
    """The types of all that a pure function was given, each an abstract value of JAX.

    Of a value that is no single array there is a tree definition with the types of its leaves.

    Attributes:
      values: Per leaf of the graph.
      rest: Per plain argument.
      extras: Per array that a capture hands in.
    """

    values: tuple[Any, ...]
    rest: tuple[Any, ...]
    extras: tuple[Any, ...]

    @classmethod
    def of(cls, values: Sequence[Any], rest: Sequence[Any], extras: Sequence[Any]) -> "Types":
        """Returns the types of what a pure function is given; a third of a microsecond each."""
        inside = jax.tree.leaves(extras) if extras else ()
        return cls(
            tuple(map(type_of, values)), tuple(map(type_of, rest)), tuple(map(type_of, inside))
        )


class _Tree(NamedTuple):
    treedef: Any
    types: tuple[Any, ...]


def type_of(value: Any) -> Any:
    """Returns JAX's type of an array or number, the types in a tree, or the class of all else."""
    if isinstance(value, list):  # as the values of a State are
        return tuple(map(type_of, value))
    try:
        return jax.typeof(value)
    except TypeError:
        leaves, treedef = jax.tree.flatten(value)
    if jax.tree_util.treedef_is_leaf(treedef):
        return type(value)
    return _Tree(treedef, tuple(map(type_of, leaves)))


def _type_text(found: Any) -> str:
    if type(found) is _Tree:
        return str(jax.tree_util.tree_unflatten(found.treedef, map(_bare, found.types)))
    if type(found) is tuple:
        return str(list(map(_bare, found)))
    if isinstance(found, type):
        return found.__name__
    text = str(found)
    return f"{text[1:]} (weak type)" if text.startswith("~") else text


def _bare(found: Any) -> "_Bare":
    return _Bare(_type_text(found))


class _Bare(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def facts_of(crossing: Crossing, types: Types, settings: Facts) -> Facts:
    """Returns all that a trace depended on: settings, arguments, and the graph of their objects."""
    walk = _Walk(crossing.graphdef, types.values)
    facts = walk.facts
    facts.update(settings)
    where = "inside another trace" if crossing.nested else "outside of every trace"
    facts["the call"] = Fact((crossing.nested, where))
    if types.extras:
        facts["what a capture adds"] = Fact((types.extras, _type_text(types.extras)))
    for name, value in crossing.named_statics().items():
        facts[f"static argument {name}"] = Fact((value, short_text(value.value)))
    numbers = {position: n for n, position in enumerate(crossing.rest)}
    roots = {position: n for n, position in enumerate(crossing.roots)}
    for place, position in crossing.argument_places():
        if position is None:
            facts[place] = Fact((None, "None"))
        elif position in roots:
            walk.below(place, crossing.graphdef.skeleton.roots[roots[position]])
        else:
            found = types.rest[numbers[position]]
            facts[place] = Fact(None, (found, _type_text(found)))
    facts[_CONTAINERS] = Fact((crossing.treedef, _tree_text(crossing.treedef)))
    return facts


def graph_facts(graphdef: GraphDef[Any], places: Iterable[tuple[str, Slot]]) -> Facts:
    """Returns what a graph is, without the types of its arrays, below some places of it."""
    states = [[None] * len(leaf[1].paths) if leaf[0] is State else None for leaf in graphdef.leaves]
    walk = _Walk(graphdef, states)
    for place, slot in places:
        walk.below(place, slot)
    return {place: fact._replace(type=None) for place, fact in walk.facts.items()}


_CONTAINERS = "the containers of the arguments"


def _tree_text(treedef: Any) -> str:
    return str(jax.tree_util.tree_unflatten(treedef, [_Bare("*")] * treedef.num_leaves))


_MARKS = {DATA: "data", HELD_STATIC: "static"}


class _Walk:
    """A walk through the graph of a crossing that writes down facts."""

    def __init__(self, graphdef: GraphDef[Any], types: Sequence[Any]) -> None:
        self.graphdef, self.types = graphdef, types
        self.facts: Facts = {}
        self.nodes: dict[int, str] = {}
        self.leaves: dict[int, str] = {}

    def below(self, place: str, slot: Slot) -> None:
        """Writes down what fills a slot, and all below it, in the order of the graph."""
        stack = [(place, slot)]  # models may be nested deeper than Python calls may be
        while stack:
            place, slot = stack.pop()
            inner = self.fill(place, slot)
            stack.extend((format_path((thaw_key(s[0]),), place), s) for s in reversed(inner))

    def fill(self, place: str, slot: Slot) -> Sequence[Slot]:
        """Writes down what fills one slot, and returns the slots in it."""
        _, how, payload = slot
        if how == FILL_NODE:
            return self.node(place, payload)
        if how == FILL_LEAF:
            self.leaf(place, payload)
        elif how == FILL_STATIC:
            self.facts[place] = Fact((payload, short_text(payload.value)))
        elif how == FILL_METHOD:
            number, function = payload
            owner = self.nodes.get(number, f"{place}.__self__")
            text = f"{short_text(function.value)} of {owner}"
            self.facts[place] = Fact(((function, owner), text))
            return () if number in self.nodes else [("__self__", FILL_NODE, number)]
        elif how == FILL_VALUE:
            self.facts[place] = Fact((payload[0], _name_of(payload[0])))
            return payload[1]
        return ()

    def node(self, place: str, number: int) -> Sequence[Slot]:
        if self.is_again(self.nodes, place, number):
            return ()
        record = self.graphdef.skeleton.records[number]
        marks = None
        if record.marks:
            said = ", ".join(f"{key} is {_MARKS.get(mark, mark)}" for key, mark in record.marks)
            marks = (record.marks, said)
        self.facts[place] = Fact((record.cls, record.cls.__name__), about=marks)
        return record.slots

    def leaf(self, place: str, number: int) -> None:
        if self.is_again(self.leaves, place, number):
            return
        kind, found = self.graphdef.leaves[number], self.types[number]
        if kind[0] is not State:
            self.facts[place] = _leaf_fact(kind, found)
            return
        self.facts[place] = Fact((State, "State"))
        for path, leaf, inner in zip(kind[1].paths, kind[1].leaves, found, strict=True):
            self.facts[place + _subscripts(path)] = _leaf_fact(leaf, inner)

    def is_again(self, seen: dict[int, str], place: str, number: int) -> bool:
        first = seen.setdefault(number, place)
        if first is place:
            return False
        self.facts[place] = Fact((first, f"the same as {first}"))
        return True


def _subscripts(path: Iterable[Any]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _leaf_fact(kind: tuple[type, Any], found: Any) -> Fact:
    written = (found, _type_text(found))
    if kind is ARRAY_LEAF:
        return Fact(None, written)
    cls, meta = kind
    about = None if meta is EMPTY else (meta, str(meta).removeprefix("Meta"))
    return Fact((cls, cls.__name__), written, about)


def _name_of(how: Any) -> str:
    if type(how) is Foreign:
        return short_text(how.treedef)
    return how.__name__


def differences(before: Facts, now: Facts) -> list[str]:
    """Writes in what two traces differ; of something new or gone, only where it starts."""
    lines: list[str] = []
    covered: list[str] = []
    for place in [*now, *(place for place in before if place not in now)]:
        old, new = before.get(place), now.get(place)
        if old == new or any(_is_below(place, above) for above in covered):
            continue
        if old is None or new is None or old.what != new.what:
            covered.append(place)
        lines.append(_line(place, old, new))
    if len(lines) > 1:  # the containers differ wherever an argument was added
        lines = [line for line in lines if not line.startswith(_CONTAINERS)]
    return lines


def _is_below(place: str, above: str) -> bool:
    return place.startswith(above) and place[len(above) :][:1] in (".", "[")


def _line(place: str, old: Fact | None, new: Fact | None) -> str:
    if old is None:
        return f"{place} was added ({new})"
    if new is None:
        return f"{place} was removed ({old})"
    if old.what != new.what:
        return f"{place}: {_change(str(old), str(new))}"
    if old.type != new.type:
        return f"{place}: {_change(_written(old.type), _written(new.type))}"
    about = _change(_written(old.about), _written(new.about))
    return f"what is said of {place}: {about}"


def _written(part: Part | None) -> str:
    return "nothing" if part is None else part[1]


def _change(old: str, new: str) -> str:
    return f"{old} -> another one" if old == new else f"{old} -> {new}"


def nearest(
    now: Facts, earlier: Iterable[tuple[int, Facts | None]]
) -> tuple[int | None, list[str]]:
    """Returns the number of the trace that differs least, the latest of equals, and how."""
    found: tuple[int | None, list[str]] = None, []
    for number, facts in earlier:
        if facts is None:
            continue
        lines = differences(facts, now)
        if found[0] is None or len(lines) <= len(found[1]):
            found = number, lines
    return found

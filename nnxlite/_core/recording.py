"""Recorders: where sown values and perturbations go while a capture runs.

A `Recorder` belongs to one capture and to one trace level. It knows objects by labels (see
`records.py`), which are the same each time a program runs, so perturbations captured in one run
find their objects in the next.

A transform of this library hands a recorder on (see `extras.py`). Inside, a fresh one at the level
of the clones takes its place; what that one recorded comes out with the results, in labels that
mean something outside as well, whichever cached trace ran. A plain JAX transform in between cannot
do so: a record made under it has another level, which is an error.
"""

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._core.errors import Path, TraceLevelError, format_path
from nnxlite._core.extras import TRAVELLING, Nodes, travelling
from nnxlite._core.graph import flatten
from nnxlite._core.graphdef import node_paths
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.records import (
    Below,
    Bundle,
    ById,
    Given,
    Key,
    Label,
    Outcome,
    Record,
    Reduce,
    Stranger,
    Wanted,
)
from nnxlite._core.scope import OUTPUTS
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Variable


class Recorder:
    """Takes the records of one capture at one trace level. An `Extras`, so transforms thread it.

    Args:
      wanted: What to record.
      init: Initial values of perturbations, by label and name.
      learning: Only note which perturbations are met, and record nothing.
      inner: Whether it stands in for another one inside a transform; then values wait to be joined.
      cut_off: Whether a plain JAX transform stands between it and the capture.
    """

    def __init__(
        self,
        wanted: Wanted,
        init: Mapping[Label, Mapping[str, Any]] | None = None,
        *,
        learning: bool = False,
        inner: bool = False,
        cut_off: bool = False,
    ) -> None:
        self.wanted, self.learning = wanted, learning
        self.inner, self.cut_off = inner, cut_off
        self.init: dict[Label, dict[str, Any]] = {k: dict(v) for k, v in (init or {}).items()}
        self.level = current_level()
        self.records: dict[Label, dict[Key, Record]] = {}
        self.met: dict[Label, dict[str, None]] = {}
        self.skipped: dict[str, None] = {}
        self.paths: dict[Label, Path] = {}
        self._paths_inside: dict[Label, Path] = {}  # of the transform that is entered
        # Objects are held, so that no other can get their identity.
        self.owners: dict[int, tuple[Any, Label]] = {}
        self.strangers: list[tuple[Stranger, Any]] = []
        self._counts: dict[str, int] = {}

    # Labels.

    def know(self, owner: Any, label: Label) -> None:
        """Gives an object a label."""
        self.owners.setdefault(id(owner), (owner, label))

    def label(self, owner: Any) -> Label:
        """Returns the label of an object; one that is met for the first time is a stranger."""
        found = self.owners.get(id(owner))
        if found is None:
            found = owner, self._new_stranger(type(owner).__name__, owner)
            self.owners[id(owner)] = found
        return found[1]

    def _new_stranger(self, class_name: str, owner: Any = None) -> Stranger:
        number = self._counts.get(class_name, 0)
        self._counts[class_name] = number + 1
        label = Stranger(class_name, number)
        self.strangers.append((label, owner))
        return label

    def as_stranger(self, label: Label) -> Stranger:
        """Returns a new label for an object whose place in the root is another's by now."""
        owner = next(owner for owner, known in self.owners.values() if known == label)
        return self._new_stranger(type(owner).__name__, owner)

    def path_of(self, owner: Any) -> Path:
        """Returns the path of an object from the root; that of a stranger is its class name."""
        _, label = self.owners.get(id(owner), (None, None))
        path = self._path(label)
        return (type(owner).__name__,) if path is None else path

    def _path(self, label: Label | None) -> Path | None:
        return label if type(label) is tuple else self.paths.get(label)  # type: ignore[arg-type]

    def describe(self, owner: Any) -> str:
        """Writes which object it is, for messages."""
        _, label = self.owners.get(id(owner), (None, None))
        path, name = self._path(label), type(owner).__name__
        return name if path is None else f"{format_path(path)} ({name})"

    def _text(self, label: Label) -> str:
        path = self._path(label)
        return getattr(label, "class_name", "a module") if path is None else format_path(path)

    # Records.

    def wants(self, kind: type[Variable]) -> bool:
        """Tells whether records of this kind are taken."""
        return self.wanted.place_of(kind) is not None

    def add(
        self,
        owner: Any,
        kind: type[Variable],
        name: str,
        value: Any,
        reduce: Reduce,
        init: Callable[[], Any],
    ) -> None:
        """Records one value."""
        label = self.label(owner)
        if self.learning:
            return
        key = Key(self.wanted.place_of(kind) or kind, name)
        records = self.records.setdefault(label, {})
        if key not in records:
            records[key] = Record(kind, reduce, init(), ())
        self._more(records, key, (value,))

    def _more(self, records: dict[Key, Record], key: Key, values: Sequence[Any]) -> None:
        record = records[key]
        records[key] = record.with_more(values) if self.inner else record.joined_to(values)

    def meet(self, owner: Any, name: str) -> str:
        """Notes that an object perturbs a value, and returns the name it goes by.

        Where each value has a name of its own, a name that the object has used is numbered: `h`,
        `h#1`, `h#2`.
        """
        used = self.met.setdefault(self.label(owner), {})
        free, number = name, 0
        while self.wanted.each and free in used:
            number += 1
            free = f"{name}#{number}"
        used[free] = None
        return free

    def at_its_level(self) -> bool:
        """Tells whether the running trace is the recorder's, and no plain one stands around it."""
        return self.level == current_level() and not self.cut_off

    def check_level(self, what: Callable[[], str]) -> None:
        """Raises if the running trace is another than the recorder's."""
        if not self.at_its_level():
            raise TraceLevelError(
                f"{what()} happens under a plain JAX transform that stands between the capture and "
                "the module, and JAX gives no way to hand the value out. Use the transform of "
                "nnxlite (nnx.jit, nnx.grad, nnx.vmap, nnx.scan, ...) in its place, or capture "
                "inside of it and return the captured State."
            )

    # As an Extras: outside of a transform.

    def key(self) -> Hashable:
        return self.wanted, self.learning

    def inputs(self, nodes: Nodes) -> Bundle:
        numbers = {id(owner): n for n, node in enumerate(nodes) if (owner := node()) is not None}
        places: dict[Label, Label] = {
            label: numbers[number] if number in numbers else ById(owner)
            for number, (owner, label) in self.owners.items()
        }
        known = set(places)
        for label, _ in self._sent():
            if label not in places and type(label) is Stranger:  # counted from where we are
                met = self._counts.get(label.class_name, 0)
                places[label] = Stranger(label.class_name, label.number - met)
        taken = self.met.items() if self.wanted.each else ()
        paths = {
            places[label]: path
            for label in places
            if label in known and (path := self._path(label)) is not None
        }
        self._paths_inside = paths
        running = [(numbers[n], method) for n, method in OUTPUTS.running if n in numbers]
        given = Given(
            tuple((places[label], name) for label, name in self._sent()),
            tuple(n for number, n in numbers.items() if number not in self.owners),
            tuple(
                (places[label], name) for label, names in taken for name in names if label in places
            ),
            tuple(paths.items()) if self.wanted.filter is not None else (),
            tuple(sorted(running)),
            not self.at_its_level(),
        )
        return Bundle(given, [self.init[label][name] for label, name in self._sent()])

    def _sent(self) -> list[tuple[Label, str]]:
        """Lists the perturbations to hand in: all but those of strangers that are gone."""
        if not self.at_its_level():
            return []
        gone = {label for label, owner in self.strangers if owner is None}
        return [
            (label, n) for label, named in self.init.items() for n in named if label not in gone
        ]

    def learner(self) -> "Recorder":
        learner = Recorder(self.wanted, learning=True, inner=self.inner, cut_off=self.cut_off)
        learner.owners, learner.strangers = dict(self.owners), list(self.strangers)
        learner._counts, learner.paths = dict(self._counts), self.paths
        if self.wanted.each:  # the names it gives have to be those that this one will give
            learner.met = {label: dict(names) for label, names in self.met.items()}
        return learner

    def axes(self, inputs: Bundle, learner: "Recorder", size: int | None) -> Bundle:
        self.skipped |= learner.skipped
        axes: list[int | None] = []
        for (label, name), value in zip(self._sent(), inputs.values, strict=True):
            before = self.met.get(label, {}) if self.wanted.each else {}
            is_met = name in learner.met.get(label, {}) and name not in before
            axes.append(0 if is_met else None)
            shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(value) if is_met]
            if any(shape[:1] != (size,) for shape in shapes):
                raise ValueError(
                    f"{self._text(label)} perturbs {name!r} in a function that is mapped "
                    f"{size} times, but init has a value of shape {shapes[0]}, without an axis of "
                    "that size in front. Capture the perturbations with inputs of the same shapes."
                )
        return Bundle(inputs.about, axes)

    def deliver(self, outputs: Bundle, nodes: Nodes) -> None:
        outcome: Outcome = outputs.about
        self.skipped |= dict.fromkeys(outcome.skipped)
        if not self.at_its_level():
            return  # nothing was recorded
        known: dict[Label, Label] = {}
        for label, origin in outcome.strangers:
            owner = _found(origin, nodes)
            known[label] = (
                self._new_stranger(label.class_name) if owner is None else self.label(owner)
            )
        for label, names in outcome.met:
            self.met.setdefault(self._outer(label, nodes, known), {})[names] = None
        for (label, key, kind, reduce), (start, values) in zip(
            outcome.entries, outputs.values, strict=True
        ):
            records = self.records.setdefault(self._outer(label, nodes, known), {})
            records.setdefault(key, Record(kind, reduce, start, ()))
            self._more(records, key, values)

    def _outer(self, label: Label, nodes: Nodes, known: dict[Label, Label]) -> Label:
        """Returns the label, out here, of what has this one inside."""
        if label not in known:
            owner = _found(label, nodes)
            known[label] = (
                self._new_stranger(label.class_name)  # type: ignore[union-attr]  # a dead `ById`
                if owner is None
                else self.label(owner)
            )
        return known[label]

    # As an Extras: inside of a transform.

    @contextmanager
    def inside(self, inputs: Bundle, nodes: Nodes) -> Iterator[Callable[[], Bundle]]:
        given: Given = inputs.about
        inner = Recorder(self.wanted, learning=self.learning, inner=True, cut_off=given.cut_off)
        clones = [node() for node in nodes]
        unknown = {n: clones[n] for n in given.unknown}
        for number, clone in enumerate(clones):
            if kind_of(clone) == OBJECT and number not in unknown:
                inner.know(clone, number)
        for owner, _ in self.owners.values():
            inner.know(owner, ById(owner))
        for (label, name), value in zip(given.init, inputs.values, strict=True):
            inner.init.setdefault(label, {})[name] = value
        for label, name in given.taken:
            inner.met.setdefault(label, {})[name] = None
        taken = set(given.taken)
        inner.paths = dict(given.paths) or self._paths_inside
        with _running({(id(clones[n]), method) for n, method in given.running}), travelling(inner):
            yield lambda: inner.outcome(clones, unknown, taken)

    def outcome(
        self, clones: list[Any], unknown: Mapping[int, Any], taken: set[tuple[Label, str]]
    ) -> Bundle:
        """Packs what was recorded in a body, in labels that mean something outside of it."""
        entries, values = [], []
        for label, records in self.records.items():
            for key, record in records.items():
                entries.append((label, key, record.kind, record.reduce))
                values.append((record.start, record.values))
        met = [(label, name) for label, names in self.met.items() for name in names]
        outcome = Outcome(
            tuple(entries),
            tuple(pair for pair in met if pair not in taken),
            tuple(self._origins(clones, unknown)),
            tuple(self.skipped),
        )
        return Bundle(outcome, values)

    def _origins(
        self, clones: list[Any], unknown: Mapping[int, Any]
    ) -> Iterator[tuple[Stranger, Any]]:
        numbers = {id(clone): n for n, clone in unknown.items()}
        paths: dict[int, Below] | None = None
        for label, owner in self.strangers:
            if id(owner) in numbers:
                yield label, numbers[id(owner)]
            elif owner is None:
                yield label, None
            elif owner._level is not None and owner._level != self.level:
                yield label, ById(owner)
            else:  # it was made here, and may have become part of an argument
                paths = _places_below(clones) if paths is None else paths
                yield label, paths.get(id(owner)) or ById(owner)


@contextmanager
def _running(calls: set[tuple[int, str]]) -> Iterator[None]:
    new = calls - OUTPUTS.running
    OUTPUTS.running |= new
    try:
        yield
    finally:
        OUTPUTS.running -= new


def _places_below(clones: list[Any]) -> dict[int, Below]:
    """Returns where each object is that hangs on the clones by now, by identity."""
    holders = {n: clone for n, clone in enumerate(clones) if kind_of(clone) == OBJECT}
    found: dict[int, Below] = {}
    for number, holder in holders.items():
        for path, owner in object_paths(holder):
            found.setdefault(id(owner), Below(number, path))
    return found


def object_paths(root: Any) -> list[tuple[Path, Any]]:
    """Returns the path of each object at and below `root`, each once."""
    flat = flatten((root,))
    skeleton = flat.graphdef.skeleton
    paths = node_paths(skeleton, [((), skeleton.roots[0])])
    return [
        (path, flat.nodes[number])
        for number, path in paths.items()
        if kind_of(flat.nodes[number]) == OBJECT
    ]


def _found(origin: Any, nodes: Nodes) -> Any:
    """Returns the object that a label of the inside speaks of, None if it is gone."""
    if type(origin) is int:
        return nodes[origin]()
    if type(origin) is ById:
        return origin.ref()
    if type(origin) is Below:
        return next((x for p, x in object_paths(nodes[origin.node]()) if p == origin.path), None)
    return None


def recorders() -> tuple[Recorder, ...]:
    """Returns the recorders at work in this thread, the innermost last."""
    return tuple(extra for extra in TRAVELLING.active if isinstance(extra, Recorder))

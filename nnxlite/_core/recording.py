"""Recorders: where sown values and perturbations go while a capture runs.

A `Recorder` belongs to one capture and to one trace level. It knows objects by labels (see
`records.py`), which are the same each time a program runs, so perturbations captured in one run
find their objects in the next.

A transform of this library hands a recorder on (see `extras.py`). Inside, a fresh one at the level
of the clones takes its place; what that one recorded comes out with the results, in labels that
mean something outside as well, whichever cached trace ran. A plain JAX transform in between cannot
do so: a record made under it has another level, which is an error.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._core.agreement import agreed
from nnxlite._core.errors import Path
from nnxlite._core.extras import MAPPED, TRAVELLING, Nodes, Use, travelling
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.owners import found
from nnxlite._core.recorded import UNDER_PLAIN_JAX, Recorded
from nnxlite._core.records import (
    ONWARD,
    WHOLE,
    Bundle,
    ById,
    Entry,
    Given,
    Key,
    Label,
    Outcome,
    Record,
    Reduction,
    Stranger,
    Wanted,
)
from nnxlite._core.scope import OUTPUTS
from nnxlite._core.totals import Totalled


class Recorder(Recorded, Totalled):
    """Takes the records of one capture at one trace level. An `Extras`, so transforms thread it.

    Args:
      wanted: What to record.
      init: Initial values of perturbations, by label and name.
      **where: Where it works; see `Recorded`.
    """

    def __init__(
        self,
        wanted: Wanted,
        init: Mapping[Label, Mapping[str, Any]] | None = None,
        **where: Any,
    ) -> None:
        super().__init__(wanted, **where)
        self.init: dict[Label, dict[str, Any]] = {k: dict(v) for k, v in (init or {}).items()}
        self._paths_inside: dict[Label, Path] = {}  # of the transform that is entered

    # Outside of a transform.

    def key(self) -> Hashable:
        return self.wanted, self.learning

    def inputs(self, nodes: Nodes, use: Use = MAPPED) -> Bundle:
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
            if label in known and (path := self.path(label)) is not None
        }
        self._paths_inside = paths
        running = [(numbers[n], method) for n, method in OUTPUTS.running if n in numbers]
        totals = list(self.handed_in(places, use))
        given = Given(
            tuple((places[label], name) for label, name in self._sent()),
            tuple(n for number, n in numbers.items() if number not in self.owners),
            tuple(
                (places[label], name) for label, names in taken for name in names if label in places
            ),
            tuple(paths.items()) if self.wanted.filter is not None else (),
            tuple(sorted(running)),
            self.cut_off or ("" if self.at_its_level() else UNDER_PLAIN_JAX),
            tuple(total for total, _ in totals),
            use.loop,
            use.condition or self.condition,
        )
        values = [self.init[label][name] for label, name in self._sent()]
        return Bundle(given, [*values, *(start for _, start in totals)])

    def _sent(self) -> list[tuple[Label, str]]:
        """Lists the perturbations to hand in: all but those of strangers that are gone."""
        if not self.at_its_level():
            return []
        gone = {label for label, owner in self.strangers if owner is None}
        return [
            (label, n) for label, named in self.init.items() for n in named if label not in gone
        ]

    def later(self) -> "Callable[[], Recorder]":
        wanted, learning, paths = self.wanted, self.learning, self._paths_inside
        owners = [(weakref.ref(owner), label) for owner, label in self.owners.values()]

        def stand_in() -> Recorder:
            made = Recorder(wanted, learning=learning)
            made._paths_inside = paths
            for ref, label in owners:
                if (owner := ref()) is not None:
                    made.know(owner, label)
            return made

        return stand_in

    def learner(self) -> "Recorder":
        learner = Recorder(
            self.wanted,
            learning=True,
            inner=self.inner,
            cut_off=self.cut_off,
            loop=self.loop,
            condition=self.condition,
        )
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
        self.skipped |= dict(outcome.skipped)
        if not self.at_its_level():
            return  # nothing was recorded
        known: dict[Label, Label] = {}
        for label, origin in outcome.strangers:
            owner = found(origin, nodes)
            known[label] = (
                self.new_stranger(label.class_name) if owner is None else self.label(owner)
            )
        for label, names in outcome.met:
            self.met.setdefault(self._outer(label, nodes, known), {})[names] = None
        for entry, (start, values) in zip(outcome.entries, outputs.values, strict=True):
            self.take(self._outer(entry.label, nodes, known), entry, start, values)

    def _outer(self, label: Label, nodes: Nodes, known: dict[Label, Label]) -> Label:
        """Returns the label, out here, of what has this one inside."""
        if label not in known:
            owner = found(label, nodes)
            known[label] = (
                self.new_stranger(label.class_name)  # type: ignore[union-attr]  # a dead `ById`
                if owner is None
                else self.label(owner)
            )
        return known[label]

    # Inside of a transform.

    @contextmanager
    def inside(self, inputs: Bundle, nodes: Nodes) -> Iterator[Callable[[], Bundle]]:
        given: Given = inputs.about
        inner = Recorder(
            self.wanted,
            learning=self.learning,
            inner=True,
            cut_off=given.cut_off,
            loop=given.loop,
            condition=given.condition,
        )
        clones = [node() for node in nodes]
        unknown = {n: clones[n] for n in given.unknown}
        for number, clone in enumerate(clones):
            if kind_of(clone) == OBJECT and number not in unknown:
                inner.know(clone, number)
        for owner, _ in self.owners.values():
            inner.know(owner, ById(owner))
        for (label, name), value in zip(given.init, inputs.values, strict=False):
            inner.init.setdefault(label, {})[name] = value
        for total, value in zip(given.totals, self.totals(inputs), strict=True):
            handed_in = Record(total.kind, None, value, (), None, True)
            inner.records.setdefault(total.label, {})[total.key] = handed_in
        for label, name in given.taken:
            inner.met.setdefault(label, {})[name] = None
        taken = set(given.taken)
        inner.paths = dict(given.paths) or self._paths_inside
        with _running({(id(clones[n]), method) for n, method in given.running}), travelling(inner):
            onward = {(x.label, x.key) for x in given.totals if not x.fresh}
            yield lambda: inner.outcome(clones, unknown, taken, onward)

    def outcome(
        self,
        clones: list[Any],
        unknown: Mapping[int, Any],
        taken: set[tuple[Label, str]],
        onward: set[tuple[Label, Key]],
    ) -> Bundle:
        """Packs what was recorded in a body, in labels that mean something outside of it."""
        entries, values = [], []
        for label, records in self.records.items():
            for key, record in records.items():
                total = (ONWARD if (label, key) in onward else WHOLE) if record.total else ""
                reduce = Reduction(record.reduce)
                entries.append(Entry(label, key, record.kind, reduce, record.constant, total))
                values.append((record.start, record.values))
        met = [(label, name) for label, names in self.met.items() for name in names]
        outcome = Outcome(
            tuple(entries),
            tuple(pair for pair in met if pair not in taken),
            tuple(self.origins(clones, unknown)),
            tuple(self.skipped.items()),
        )
        return Bundle(outcome, values)

    agreed = staticmethod(agreed)


@contextmanager
def _running(calls: set[tuple[int, str]]) -> Iterator[None]:
    new = calls - OUTPUTS.running
    OUTPUTS.running |= new
    try:
        yield
    finally:
        OUTPUTS.running -= new


def recorders() -> tuple[Recorder, ...]:
    """Returns the recorders at work in this thread, the innermost last."""
    return tuple(extra for extra in TRAVELLING.active if isinstance(extra, Recorder))

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
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._core.agreement import agreed
from nnxlite._core.errors import Path, StructureError, TraceLevelError
from nnxlite._core.extras import MAPPED, TRAVELLING, Nodes, Use, travelling
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.owners import Owners, found
from nnxlite._core.records import (
    OF_OUTPUTS,
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
    Reduce,
    Reduction,
    Stranger,
    Total,
    Wanted,
    same,
)
from nnxlite._core.scope import OUTPUTS
from nnxlite._core.totals import (
    Totalled,
    check_growth,
    constant_of,
    is_scalar,
    joined_in_loop,
)
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Variable

UNDER_PLAIN_JAX = (
    "under a plain JAX transform that stands between the capture and the module, and JAX gives no "
    "way to hand the value out. Use the transform of nnxlite (nnx.jit, nnx.grad, nnx.vmap, "
    "nnx.scan, ...) in its place, or capture inside of it and return the captured State."
)


LEFT_OUT = (
    "a plain JAX transform, or a function with a derivative rule of its own, stands between the "
    "capture and the methods, and gives no way to hand them out. Use the transform of nnxlite in "
    "place of that of JAX."
)

LEFT_OUT_OF_LOOP = (
    "{} is a loop whose number of steps is not known when it is compiled, so there is no room for "
    "the outputs of all steps. nnx.scan stacks them."
)


class Recorder(Owners, Totalled):
    """Takes the records of one capture at one trace level. An `Extras`, so transforms thread it.

    Args:
      wanted: What to record.
      init: Initial values of perturbations, by label and name.
      learning: Only note which perturbations are met, and record nothing.
      inner: Whether it stands in for another one inside a transform; then values wait to be joined.
      cut_off: Why no value can be handed out from here to the capture, for messages; else empty.
      loop: How messages call the loop whose body it works in, at its own level; else empty.
      condition: How they call the condition that it works in; else empty.
    """

    def __init__(
        self,
        wanted: Wanted,
        init: Mapping[Label, Mapping[str, Any]] | None = None,
        *,
        learning: bool = False,
        inner: bool = False,
        cut_off: str = "",
        loop: str = "",
        condition: str = "",
    ) -> None:
        super().__init__()
        self.wanted, self.learning = wanted, learning
        self.inner, self.cut_off = inner, cut_off
        self.loop, self.condition = loop, condition
        self.init: dict[Label, dict[str, Any]] = {k: dict(v) for k, v in (init or {}).items()}
        self.records: dict[Label, dict[Key, Record]] = {}
        self.met: dict[Label, dict[str, None]] = {}
        self.skipped: dict[str, str] = {}
        self._paths_inside: dict[Label, Path] = {}  # of the transform that is entered

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
        if self.condition:
            raise self._in_condition(self.describe(owner), name)
        record = self.records.setdefault(label, {}).get(key)
        if record is None or record.reduce is None:
            made = Record(kind, reduce, None, ())
            if self.inner and made.accumulates:
                start, constant = constant_of(init)
                made = made._replace(start=start, constant=constant)
            else:
                made = made._replace(start=init())
            if record is not None:  # it was handed in
                made = made._replace(start=record.start, total=True)
            record = made
        self._join(lambda: self.describe(owner), label, key, record, (value,))

    def _join(
        self,
        who: Callable[[], str],
        label: Label,
        key: Key,
        record: Record,
        values: Sequence[Any],
    ) -> None:
        """Puts a record with more values in its place."""
        if (self.loop or self.condition) and record.reduce in OF_OUTPUTS:
            return self.leave_out(f"{who()}.{key.name}")
        if self.loop:
            joined = joined_in_loop(self.loop, who, key.name, record, values)
        elif self.inner:
            joined = record.with_more(values)
        else:
            joined = record.joined_to(values)
        self.records.setdefault(label, {})[key] = joined
        return None

    def _in_condition(self, who: str, name: str) -> StructureError:
        return StructureError(
            f"{self.condition}: {who} sows {name!r} in the condition of a loop, which hands out a "
            "boolean alone. Sow in the body."
        )

    def leave_out(self, output: str) -> None:
        """Notes that the output of a method is not recorded."""
        loop = self.loop or self.condition
        self.skipped[output] = LEFT_OUT_OF_LOOP.format(loop) if loop else LEFT_OUT

    @property
    def takes_outputs(self) -> bool:
        """Whether outputs of methods can be recorded here."""
        return self.at_its_level() and not self.loop and not self.condition

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
            raise TraceLevelError(f"{what()} happens {self.cut_off or UNDER_PLAIN_JAX}")

    # As an Extras: outside of a transform.

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
        totals = list(self._totals(places, use))
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

    def _totals(self, places: Mapping[Label, Label], use: Use) -> Iterator[tuple[Total, Any]]:
        """Yields what values inside are to be joined to, of what was recorded before."""
        if not (use.loop or use.once) or not self.at_its_level():
            return
        for label, records in self.records.items():
            for key, record in records.items():
                if label not in places or not (record.accumulates or record.reduce is None):
                    continue
                joined = record.joined_to(record.values)
                if use.loop or joined.total or joined.steady:
                    yield Total(places[label], key, record.kind, False), joined.start

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
            self._take(self._outer(entry.label, nodes, known), entry, start, values)

    def _take(self, label: Label, entry: Entry, start: Any, values: Sequence[Any]) -> None:
        """Takes one record from inside a transform."""
        key, reduce = entry.key, entry.reduce.function
        records = self.records.setdefault(label, {})
        before = records.get(key)
        made = Record(entry.kind, reduce, start, (), entry.constant)
        if not entry.total and is_scalar(entry.constant):  # then no axis of a map belongs in front
            made = made._replace(start=entry.constant.value)
        if before is not None and before.reduce is None:  # it was handed in
            before = made._replace(start=before.start, total=True)

        def who() -> str:
            return self.describe_label(label)

        if self.condition and reduce not in OF_OUTPUTS:
            raise self._in_condition(who(), key.name)
        if entry.total and reduce is same:  # a perturbation, the same at each step
            self._join(who, label, key, before or made._replace(start=None), (start,))
        elif entry.total == ONWARD:
            assert before is not None, "it was handed in"
            if self.loop and before.total:
                check_growth(self.loop, who, key.name, before.start, start)
            records[key] = before._replace(start=start, values=(), total=True)
        elif entry.total == WHOLE:
            if before is not None:
                raise StructureError(
                    f"{who()} sows {key.name!r} in a loop, and did so before in the same capture, "
                    "and a transform in between does not hand the total on. Sow under two names, "
                    "or sow the total that the loop returns, once, outside of it."
                )
            records[key] = made._replace(total=True)
        else:
            self._join(who, label, key, before or made, values)

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

    # As an Extras: inside of a transform.

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

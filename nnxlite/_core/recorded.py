"""What was recorded at one trace level, and how more joins it.

A `Recorded` takes single values from modules, and packed records from inside of transforms. What it
does with them depends on where it works: at the top values are joined at once; inside a transform
they wait; in the body of a loop there is room for totals only (see `totals.py`).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from nnxlite._core.errors import StructureError, TraceLevelError
from nnxlite._core.extras import Use
from nnxlite._core.owners import Owners
from nnxlite._core.records import (
    OF_OUTPUTS,
    ONWARD,
    WHOLE,
    Entry,
    Key,
    Label,
    Record,
    Reduce,
    Total,
    Wanted,
    same,
)
from nnxlite._core.totals import check_growth, constant_of, is_scalar, joined_in_loop
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


class Recorded(Owners):
    """The records of one capture at one trace level.

    Args:
      wanted: What to record.
      learning: Only note which perturbations are met, and record nothing.
      inner: Whether it is inside a transform; then values wait to be joined.
      cut_off: Why no value can be handed out from here to the capture, for messages; else empty.
      loop: How messages call the loop whose body it works in, at its own level; else empty.
      condition: How they call the condition that it works in; else empty.
    """

    def __init__(
        self,
        wanted: Wanted,
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
        self.records: dict[Label, dict[Key, Record]] = {}
        self.met: dict[Label, dict[str, None]] = {}
        self.skipped: dict[str, str] = {}

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

    def take(self, label: Label, entry: Entry, start: Any, values: Sequence[Any]) -> None:
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

    def handed_in(self, places: Mapping[Label, Label], use: Use) -> Iterator[tuple[Total, Any]]:
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

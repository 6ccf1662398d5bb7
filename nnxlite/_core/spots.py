"""Spots: where things hang below the roots of a skeleton.

A *spot* is the number of an object, one of its attributes, and the steps from there through lists,
dicts and values. What hangs on a root that is no object has no spot.
"""

from collections import Counter
from collections.abc import Hashable
from typing import Any, TypeAlias

from nnxlite._core.graphdef import (
    FILL_LEAF,
    FILL_NODE,
    FILL_STATIC,
    FILL_VALUE,
    Record,
    Skeleton,
    Slot,
    thaw_key,
)

Spot: TypeAlias = tuple[int, Hashable, tuple[Any, ...]]


def spots_of(skeleton: Skeleton) -> "Spots":
    """Returns the spots of a skeleton, which are kept on it."""
    found = skeleton.cache.get("spots")
    if found is None:
        found = skeleton.cache["spots"] = Spots(skeleton)
    return found


class Spots:
    """The spots of a skeleton, each container at that of its first meeting, as `flatten` finds it.

    Attributes:
      watched: Of what is mutable and has no version.
      leaves: Of each leaf, wherever it is, with its number.
      shared: The numbers of leaves with more than one spot.
    """

    __slots__ = ("_records", "_seen", "leaves", "shared", "watched")

    def __init__(self, skeleton: Skeleton) -> None:
        self._records = skeleton.records
        self._seen: set[int] = set()
        self.watched: list[Spot] = []
        self.leaves: list[tuple[Spot, int]] = []
        for slot in skeleton.roots:
            self._visit(slot, None, ())
        counts = Counter(leaf for _, leaf in self.leaves)
        self.shared = {leaf for leaf, count in counts.items() if count > 1}

    def _visit(
        self, slot: Slot, holder: tuple[int, Hashable] | None, steps: tuple[Any, ...]
    ) -> None:
        _, fill, payload = slot
        if fill == FILL_LEAF:
            if holder is not None:
                self.leaves.append(((*holder, steps), payload))
        elif fill == FILL_STATIC:
            if payload._mutable:
                self._watch(holder, steps)
        elif fill == FILL_VALUE:
            if steps or not (isinstance(payload[0], type) and issubclass(payload[0], tuple)):
                self._watch(holder, steps)
            for index, child in enumerate(payload[1]):
                self._visit(child, holder, (*steps, index))
        else:
            number = payload if fill == FILL_NODE else payload[0]
            if number not in self._seen:
                self._seen.add(number)
                self._node(number, self._records[number], holder, steps)

    def _node(
        self,
        number: int,
        record: Record,
        holder: tuple[int, Hashable] | None,
        steps: tuple[Any, ...],
    ) -> None:
        if record.cls not in (list, dict):
            for slot in record.slots:
                self._visit(slot, (number, slot[0]), ())
            return
        self._watch(holder, steps)
        for slot in record.slots:
            self._visit(slot, holder, (*steps, thaw_key(slot[0])))

    def _watch(self, holder: tuple[int, Hashable] | None, steps: tuple[Any, ...]) -> None:
        if holder is not None:
            self.watched.append((*holder, steps))

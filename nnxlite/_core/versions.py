"""Structure versions: how a cached plan learns that an object changed shape.

Objects and Variables carry a slot `_version`. Zero means "no plan has met me yet", so that
building a model costs nothing. A plan sets it to one; from then on each *structure* change (an
attribute added, removed or of another kind, a child replaced, a static value or metadata
changed) adds one and moves the process-wide epoch. Values of Variables and arrays are not
structure. A plan made at the present epoch needs no check at all.
"""

import itertools
from typing import Protocol

_ticks = itertools.count(1)
_set = object.__setattr__


class Versioned(Protocol):
    """Anything with a structure version."""

    _version: int


class Epoch:
    """The process-wide count of structure changes, as one attribute so that a read is one load."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0


EPOCH = Epoch()


def structure_changed(node: Versioned) -> None:
    """Tells all plans that met `node` that they have to be made anew."""
    version = node._version
    if version:
        # Past what the class of the user does in `__setattr__`. The version moves before the
        # epoch: a plan that validates in between sees the version.
        _set(node, "_version", version + 1)
        EPOCH.now = next(_ticks)


def object_changed(node: Versioned) -> None:
    """Tells all plans about a changed object, and lets go of the flattened form kept on it."""
    _set(node, "_tree", None)
    structure_changed(node)

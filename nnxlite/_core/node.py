"""What the library keeps on each object, beside the attributes of the user.

    _version   structure version, 0 until a plan meets the object (`versions.py`)
    _plan      how the graph below it is read and written (`plan.py`)
    _tree      its flattened form for JAX (`pytree.py`)
    _level     the trace level of its creation (`trace.py`)
    _marks     what was said of attributes by `nnx.data` and `nnx.static` (`marks.py`)

All are slots, so `vars(model)` holds the attributes of the user and nothing else.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import repeat
from typing import Any

from nnxlite._core.trace import Level

BOOKKEEPING = ("_version", "_plan", "_tree", "_level", "_marks")


class Node:
    """The slots of an object; the base of `Pytree`."""

    __slots__ = ("__dict__", "__weakref__", *BOOKKEEPING)


# A class of the user may override `__setattr__`, and a descriptor of a slot is also twice as fast.
_set_version, _set_plan, _set_tree, _set_level, _set_marks = (
    Node.__dict__[name].__set__ for name in BOOKKEEPING
)
_set_items = Node.__dict__["__dict__"].__set__


def settle_node(node: Any, version: int, level: Level, marks: dict[Hashable, Any] | None) -> None:
    """Fills the slots of a node that `object.__new__` made."""
    _set_version(node, version)
    _set_plan(node, None)
    _set_tree(node, None)
    _set_level(node, level)
    _set_marks(node, marks)


def settle_nodes(
    nodes: Sequence[Any],
    version: int,
    level: Level,
    marks: Iterable[dict[Hashable, Any] | None],
    items: Iterable[dict[Any, Any]],
) -> None:
    """Fills the slots of many nodes, and gives them their attributes."""
    # Slot by slot, in C: a loop over the nodes takes three times as long.
    for setter, values in (
        (_set_version, repeat(version)),
        (_set_plan, repeat(None)),
        (_set_tree, repeat(None)),
        (_set_level, repeat(level)),
        (_set_marks, marks),
        (_set_items, items),
    ):
        deque(map(setter, nodes, values), maxlen=0)

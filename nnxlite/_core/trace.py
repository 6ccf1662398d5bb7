"""What the library knows about the running JAX trace.

A *trace level* is JAX's opaque name for the innermost trace of this thread. Objects and Variables
remember the level of their creation: reading them is always allowed, writing them only from
that level. `None` stands for "not known yet": JAX built the object while unflattening a tree, and
it takes the level at which the library first touches it.
"""

import functools
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jax
import numpy as np
from jax.core import Tracer
from jax.extend.core import get_opaque_trace_state

from nnxlite._core.errors import TraceLevelError

Level = Any  # JAX does not name the type of its opaque trace state


class Leveled(Protocol):
    """Anything that belongs to a trace level."""

    _level: Level


def _eager_level() -> Level:
    # nnxlite may be imported while a function is being traced; a new thread is always eager.
    found: list[Level] = []
    thread = threading.Thread(
        target=lambda: found.append(get_opaque_trace_state(convention="nnxlite"))
    )
    thread.start()
    thread.join()
    return found[0]


EAGER = _eager_level()


def current_level() -> Level:
    """Returns the level of the running trace; `EAGER` itself outside of every trace."""
    level = get_opaque_trace_state(convention="nnxlite")
    return EAGER if level == EAGER else level


def settle(node: Leveled) -> Level:
    """Returns the level of a node; a pending one is given that of its value.

    JAX makes Variables while it unflattens a tree, and asking for the level each time would be
    dear. A value that is traced belongs to the trace that runs when it is first touched, any other
    to none.
    """
    level = node._level
    if level is None:
        leaves = jax.tree_util.tree_leaves(getattr(node, "_value", ()))
        traced = any(isinstance(leaf, Tracer) for leaf in leaves)
        level = node._level = current_level() if traced else EAGER
    return level


def is_writable(node: Leveled) -> bool:
    """Tells whether `node` belongs to the running trace."""
    return settle(node) == get_opaque_trace_state(convention="nnxlite")


def check_writable(node: Leveled, what: str) -> None:
    """Raises `TraceLevelError` if `node` belongs to another trace level than the running one.

    Args:
      node: The object or Variable about to be written.
      what: How the message names the write, such as "set the value of Param 'kernel'".
    """
    if not is_writable(node):
        error = TraceLevelError(
            f"Cannot {what}: it was created at another trace level than the one that runs now, so "
            "the write would leak a tracer or be lost. Pass the object as an argument of the "
            "nnxlite transform (nnx.jit, nnx.grad, nnx.vmap, ...), or merge a copy of it inside "
            "the function and return what changed."
        )
        error.node = node
        raise error


class _Flattening(threading.local):
    opaque: Any = False


FLATTENING = _Flattening()
"""How this thread flattens objects, States and Variables.

`opaque` is True where each is to be one leaf, and `RECORD` while foreign reads are recorded. One
flag for both, as asking twice would cost a tenth of flattening a State.
"""

SPECIAL: list[None] = []
"""Holds an entry per use of `FLATTENING` under way, in any thread: while it is empty, flattening a
Variable need not ask the thread-local, which would cost a third of it."""

RECORD = None
OPEN_STATES = "objects are opaque, States flatten to their values"
"""How loops flatten what they carry: a State is a value there, as arrays are."""


@contextmanager
def opaque_nodes() -> Iterator[None]:
    """Lets JAX's tree functions see every object, State and Variable as a single leaf."""
    before = FLATTENING.opaque
    FLATTENING.opaque = True
    SPECIAL.append(None)
    try:
        yield
    finally:
        SPECIAL.pop()
        FLATTENING.opaque = before


class Opaque:
    """The single leaf that stands for a node while `FLATTENING.opaque` is set."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


OPAQUE = object()
"""The auxiliary data of a node that was flattened to one leaf."""


class ForeignRead:
    """That a running trace baked in the value of an eager Variable or State that it closed over."""

    __slots__ = ("arrays", "leaf", "pending")

    def __init__(self, leaf: Any, arrays: Sequence[Any], pending: bool) -> None:
        self.leaf = weakref.ref(leaf)
        # Numbers and strings inside a value cannot be referred to weakly, and are cheap to keep.
        self.arrays = [
            weakref.ref(x) if isinstance(x, (jax.Array, np.ndarray)) else functools.partial(_it, x)
            for x in arrays
        ]
        self.pending = pending

    def is_current(self) -> bool:
        """Tells whether the leaf still holds the value that was read."""
        leaf, arrays = self.leaf(), self.arrays
        if leaf is None:
            return self.pending  # perhaps a temporary of the trace; else the closure holds another
        value = leaf._value
        if len(arrays) == 1 and arrays[0]() is value:
            return True
        now = jax.tree.leaves(value)
        return len(now) == len(arrays) and all(
            ref() is x for ref, x in zip(arrays, now, strict=True)
        )


def _it(value: Any) -> Any:
    return value


class ForeignReads(threading.local):
    """The recorders of running traces, the innermost last; each maps an `id` to what was read."""

    def __init__(self) -> None:
        self.recorders: list[dict[int, ForeignRead]] = []


FOREIGN_READS = ForeignReads()


@contextmanager
def recording(into: dict[int, ForeignRead]) -> Iterator[None]:
    """Records what the body reads of eager Variables and States that it was not given."""
    before, FLATTENING.opaque = FLATTENING.opaque, RECORD
    SPECIAL.append(None)
    FOREIGN_READS.recorders.append(into)
    try:
        yield
    finally:
        FOREIGN_READS.recorders.pop()
        SPECIAL.pop()
        FLATTENING.opaque = before


def record_foreign_read(leaf: Any) -> None:
    """Notes that all running traces bake in the value of a Variable or State, if it is eager."""
    level = leaf._level
    if level is not EAGER and level is not None:
        return
    arrays = jax.tree.leaves(leaf._value)
    if level is None and any(isinstance(x, Tracer) for x in arrays):
        return
    read = ForeignRead(leaf, arrays, level is None)
    for recorder in FOREIGN_READS.recorders:
        recorder[id(leaf)] = read

"""What the library knows about the running JAX trace.

A *trace level* is JAX's opaque name for the innermost trace of this thread. Objects and Variables
remember the level of their creation: reading them is always allowed, writing them only from
that level. `None` stands for "not known yet": JAX built the object while unflattening a tree, and
it takes the level at which the library first touches it.
"""

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import jax
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


def is_writable(node: Leveled) -> bool:
    """Tells whether `node` belongs to the running trace; a pending node is claimed by it."""
    level = node._level
    if level is None:
        node._level = current_level()
        return True
    return level == get_opaque_trace_state(convention="nnxlite")


def check_writable(node: Leveled, what: str) -> None:
    """Raises `TraceLevelError` if `node` belongs to another trace level than the running one.

    Args:
      node: The object or Variable about to be written.
      what: How the message names the write, such as "set the value of Param 'kernel'".
    """
    if not is_writable(node):
        raise TraceLevelError(
            f"Cannot {what}: it was created at another trace level than the one that runs now, so "
            "the write would leak a tracer or be lost. Pass the object as an argument of the "
            "nnxlite transform (nnx.jit, nnx.grad, nnx.vmap, ...), or merge a copy of it inside "
            "the function and return what changed."
        )


class _Flattening(threading.local):
    opaque = False


FLATTENING = _Flattening()
"""While `FLATTENING.opaque` is set in this thread, objects, States and Variables flatten to one leaf."""


@contextmanager
def opaque_nodes() -> Iterator[None]:
    """Lets JAX's tree functions see every object, State and Variable as a single leaf."""
    before = FLATTENING.opaque
    FLATTENING.opaque = True
    try:
        yield
    finally:
        FLATTENING.opaque = before


class Opaque:
    """The single leaf that stands for a node while `FLATTENING.opaque` is set."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


OPAQUE = object()
"""The auxiliary data of a node that was flattened to one leaf."""


class ForeignReads(threading.local):
    """The recorders of running traces, the innermost last."""

    def __init__(self) -> None:
        self.recorders: list[dict[int, tuple[Any, Any]]] = []


FOREIGN_READS = ForeignReads()


def record_foreign_read(variable: Any) -> None:
    """Notes that a running trace baked in the value of an eager Variable that it closed over."""
    value = variable._value
    if variable._level is EAGER and isinstance(value, jax.Array):
        for recorder in FOREIGN_READS.recorders:
            recorder[id(variable)] = (weakref.ref(variable), weakref.ref(value))

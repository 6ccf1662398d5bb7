"""The ambient context: what, besides its arguments, decides how a method is traced.

An `Ambient` is a small interned record: are scopes on, which kinds are captured, and so on. It
stands in two places that always agree. The wrappers around methods read the one in `LOCAL`; JAX
keys all its caches, ours and those of plain `jax.jit`, by the one in a user context, so code
traced under one record is never served under another. Both are per thread, as every context
manager of JAX is: a `ContextVar` would follow an asynchronous task while JAX's key stays with the
thread, and code without scopes would be cached as code with scopes.

The record is static and has few values: each new one compiles eager operations once more. Values
that travel (captured arrays, initial perturbations) never stand in it.
"""

import os
import threading
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any
from weakref import WeakValueDictionary

import jax

NAMED_CALL_VARIABLE = "NNXLITE_NAMED_CALL"


@dataclass(frozen=True, eq=False, slots=True, weakref_slot=True, kw_only=True)
class Ambient:
    """One static record of the ambient context; equal records are one object (see `but`).

    Attributes:
      scopes: Whether methods name the operations they stage.
      captured: What each capture that runs asks for, the innermost last.
      sow: What `sow` does without a capture; None for the configured mode.
    """

    scopes: bool = True
    captured: tuple[Hashable, ...] = ()
    sow: str | None = None

    def but(self, **changes: Any) -> "Ambient":
        """Returns the one record that differs from this one by `changes`."""
        return _interned(replace(self, **changes))


_RECORDS: WeakValueDictionary[tuple[Hashable, ...], Ambient] = WeakValueDictionary()
_RECORDS_LOCK = threading.Lock()


def _interned(ambient: Ambient) -> Ambient:
    values = tuple(getattr(ambient, field.name) for field in fields(ambient))
    with _RECORDS_LOCK:
        return _RECORDS.setdefault(values, ambient)


def named_call_default(environ: Mapping[str, str]) -> bool:
    """Returns whether scopes are on at the start, from the variable `NNXLITE_NAMED_CALL`.

    Raises:
      ValueError: The variable holds something that is neither on nor off.

    Example:
      >>> named_call_default({"NNXLITE_NAMED_CALL": "off"}), named_call_default({})
      (False, True)
    """
    text = environ.get(NAMED_CALL_VARIABLE, "").strip().lower()
    if text in ("", "1", "true", "on", "yes"):
        return True
    if text in ("0", "false", "off", "no"):
        return False
    raise ValueError(
        f"The environment variable {NAMED_CALL_VARIABLE} is {environ[NAMED_CALL_VARIABLE]!r}, "
        "neither on nor off. Set it to 1 (names in profiles, the default) or 0 (no names)."
    )


START = _interned(Ambient(scopes=named_call_default(os.environ)))
"""The record this process started with. JAX sees it as None: default use adds no cache key."""

USER_CONTEXT: Any = jax.make_user_context(None)


class _Process:
    """The default of all threads, which `enable_named_call` and `disable_named_call` set."""

    __slots__ = ("default",)

    def __init__(self) -> None:
        self.default = START


class _Local(threading.local):
    ambient: Ambient | None = None  # entered by a context manager in this thread
    default: Ambient = START  # what this thread follows where JAX has no process-wide value


PROCESS = _Process()
LOCAL = _Local()

# jax 0.12 can set a user context for the whole process, jax 0.10.0 cannot.
DEFAULTS: _Process | _Local = PROCESS if hasattr(USER_CONTEXT, "set_global") else LOCAL


BY_THREAD = DEFAULTS is LOCAL
"""Whether each thread has to follow the process by itself, at a transform that asks `signature`."""


def current() -> Ambient:
    """Returns the record that is in force in this thread."""
    return LOCAL.ambient or DEFAULTS.default


def signature() -> Ambient | None:
    """Returns what JAX's caches are keyed by in this thread: None for the record of the start.

    JAX keys its own caches by it. A cache of ours that holds traced code, or a function that JAX
    may have traced, has to include it in its key.
    """
    if DEFAULTS is LOCAL:
        _follow_process()
    return _key(current())


def _key(ambient: Ambient) -> Ambient | None:
    return None if ambient is START else ambient


@contextmanager
def entered(ambient: Ambient) -> Iterator[None]:
    """Puts `ambient` in force in this thread, for our wrappers and for JAX's caches alike."""
    before = LOCAL.ambient
    try:
        with USER_CONTEXT(_key(ambient)):
            LOCAL.ambient = ambient
            yield
    finally:
        LOCAL.ambient = before
        if DEFAULTS is LOCAL:
            _follow_process()


def set_process_default(ambient: Ambient) -> None:
    """Puts `ambient` in force wherever no context manager says otherwise.

    This needs the user context's `set_global`, which JAX has from 0.12 on but does not document.
    Without it the calling thread enters the user context for good, and each other thread does so
    at its next nnxlite transform, which asks for `signature()`; until then it keeps tracing, and
    caching, under the old record. So cached code is right in either case, later in some threads.
    """
    PROCESS.default = ambient
    if DEFAULTS is PROCESS:
        USER_CONTEXT.set_global(_key(ambient))
    else:
        _follow_process()


def _follow_process() -> None:
    if LOCAL.ambient is None and LOCAL.default is not PROCESS.default:
        LOCAL.default = PROCESS.default
        USER_CONTEXT(_key(LOCAL.default)).__enter__()  # never left: the next one replaces it


def enable_named_call() -> None:
    """Turns the names of methods in profiles on, in the whole process; they are on by default.

    Cached functions are traced anew at their next call. The environment variable
    `NNXLITE_NAMED_CALL` (1 or 0) sets how a process starts. Call it before other threads trace.
    On JAX without a process-wide user context (0.10), other threads follow at their next call of an
    nnxlite transform.
    """
    set_process_default(PROCESS.default.but(scopes=True))


def disable_named_call() -> None:
    """Turns the names of methods in profiles off, in the whole process.

    See `enable_named_call`.
    """
    set_process_default(PROCESS.default.but(scopes=False))


@contextmanager
def override_named_call(enable: bool = True) -> Iterator[None]:
    """Turns the names of methods in profiles on or off in this thread until the block ends.

    Blocks nest, and an exception restores what was before. Functions cached outside of the block
    are traced anew inside; each of the two versions stays cached. As with all context managers of
    JAX, do not `await` inside the block: another task of the thread would run under it.

    Args:
      enable: Whether names are on inside the block.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> x = jnp.ones((1, 2))
      >>> with override_named_call(False):
      ...     text = jax.jit(lambda x: model(x)).lower(x).as_text(debug_info=True)
      >>> "/Linear/" in text
      False
    """
    with entered(current().but(scopes=enable)):
        yield

"""Traces: how often a lifted function was traced, and what for.

A *trace* is one run of the user's Python code under a transform, to find out what it computes.
Each is noted here while it runs, which costs a call of compiled code nothing: of the last few, the
crossing (weakly), the types of what came in, and the settings in force. No array and no object of
the caller is held. `explain.py` makes sentences of it.
"""

import contextlib
import inspect
import os
import threading
import warnings
import weakref
from collections import OrderedDict, deque
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax

from nnxlite._core.context import current
from nnxlite._core.errors import RetraceWarning
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.explain import Fact, Facts, Types, facts_of, nearest

RETRACE_VARIABLE = "NNXLITE_WARN_AFTER_TRACES"
DEFAULT_LIMIT = 16
MAX_TRACES = 16
MAX_RECEIVERS = 64
MAX_REASONS = 8


def limit_of(environ: Mapping[str, str]) -> int | None:
    """Returns after how many traces a jitted function warns; None for never.

    Args:
      environ: Where `NNXLITE_WARN_AFTER_TRACES` may be set: to a number, or to 0 for never.

    Raises:
      ValueError: The variable holds something else.

    Example:
      >>> limit_of({}), limit_of({"NNXLITE_WARN_AFTER_TRACES": "0"})
      (16, None)
    """
    text = environ.get(RETRACE_VARIABLE, "").strip().lower()
    if not text:
        return DEFAULT_LIMIT
    if text in ("0", "off", "false", "no"):
        return None
    if text.isdecimal():
        return int(text)
    raise ValueError(
        f"The environment variable {RETRACE_VARIABLE} is {environ[RETRACE_VARIABLE]!r}. Set it to "
        f"the number of traces after which nnx.jit warns (by default {DEFAULT_LIMIT}), or to 0 for "
        "no such warning."
    )


LIMIT = limit_of(os.environ)


class RetraceReport(NamedTuple):
    """Why a function was traced the last time; prints as a few lines of text.

    Attributes:
      title: The transform and the function.
      traces: How often it was traced in all.
      nearest: Which earlier trace, counted from 1, the last one is compared with; None without one.
      reasons: In what the two differ, such as `x: float32[4,2] -> float32[8,2]`, or what happened.
      note: What else there is to say.
    """

    title: str
    traces: int
    nearest: int | None = None
    reasons: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        if self.traces == 0:
            return f"{self.title} was not traced yet."
        if self.traces == 1:
            return f"{self.title} was traced once."
        text = f"{self.title} was traced {self.traces} times."
        if not self.reasons:
            return f"{text} {self.note}"
        if self.nearest is None:
            text += " The last time:"
        else:
            text += f" The last trace differs from trace {self.nearest}:"
        shown = self.reasons[:MAX_REASONS]
        if len(self.reasons) > len(shown):
            shown = (*shown, f"and {len(self.reasons) - len(shown)} more")
        return "\n  ".join([text, *shown])

    __repr__ = __str__


class Traced(Protocol):
    """What is asked of the lift whose traces are noted."""

    @property
    def title(self) -> str: ...
    @property
    def receiver(self) -> Any: ...


class _Trace(NamedTuple):
    """One trace: its number, what came in, what held, and why it ran if the lift knows."""

    number: int
    crossing: weakref.ref[Crossing]
    types: Types
    settings: tuple[tuple[str, Any, str], ...]
    cause: str | None

    def facts(self) -> Facts | None:
        """Returns all that it depended on; None if the crossing is gone."""
        crossing = self.crossing()
        if crossing is None:
            return None
        settings = {name: Fact((key, text)) for name, key, text in self.settings}
        return facts_of(crossing, self.types, settings)


class Traces:
    """The traces of one lift: their number, and what is known of the last few.

    Attributes:
      count: How often the function was traced in all.
      lasting: Whether a trace serves all later calls like it, so that many are a sign of trouble.
    """

    def __init__(self, lift: Traced) -> None:
        self.count = 0
        self.lasting = False
        self._lift = lift
        self._cause: str | None = None
        self._recent: deque[_Trace] = deque(maxlen=MAX_TRACES)
        self._of_receivers: OrderedDict[int, tuple[Any, int]] = OrderedDict()
        self._lock = threading.Lock()

    def expect(self, cause: str) -> None:
        """Says why the next trace will run."""
        self._cause = cause

    def add(
        self, crossing: Crossing, values: Sequence[Any], rest: Sequence[Any], extras: Sequence[Any]
    ) -> None:
        """Notes that a trace starts."""
        types, settings = Types.of(values, rest, extras), settings_now()
        with self._lock:
            self.count += 1
            cause, self._cause = self._cause, None
            self._recent.append(_Trace(self.count, weakref.ref(crossing), types, settings, cause))
            traced = self._count_of_receiver() if self.lasting and LIMIT else 0
        if LIMIT and _is_doubling(traced, LIMIT):
            self._warn(traced)

    def _count_of_receiver(self) -> int:
        """Counts the traces of one object: a function for many models is traced for each."""
        receiver = self._lift.receiver
        key = id(receiver)
        ref, traced = self._of_receivers.get(key, (None, 0))
        if receiver is not None and (ref is None or ref() is not receiver):
            ref, traced = weakref.ref(receiver), 0
        self._of_receivers[key] = ref, traced + 1
        self._of_receivers.move_to_end(key)
        while len(self._of_receivers) > MAX_RECEIVERS:
            self._of_receivers.popitem(last=False)
        return traced + 1

    def _warn(self, traced: int) -> None:
        receiver = self._lift.receiver
        whose = "" if receiver is None else f", {traced} of them for one {type(receiver).__name__}"
        warnings.warn(
            f"{self.report()}\nThat is often{whose}, and a trace with its compilation takes far "
            "longer than a call. Put what changes from call to call into arrays: a Variable, "
            "nnx.data(x) or jnp.asarray(x); pad arrays to a few sizes. If all are meant, ignore "
            f"nnx.errors.RetraceWarning, or set {RETRACE_VARIABLE}=0.",
            RetraceWarning,
            stacklevel=frames_below_the_caller(),
        )

    def report(self) -> RetraceReport:
        """Says why the last trace ran."""
        with self._lock:
            recent, count = list(self._recent), self.count
        title = self._lift.title
        if count < 2:
            return RetraceReport(title, count)
        last = recent[-1]
        if last.cause is not None:
            return RetraceReport(title, count, None, (last.cause,))
        now = last.facts()
        if now is None:
            return RetraceReport(title, count, note="What it was traced for is gone by now.")
        number, reasons = nearest(now, [(each.number, each.facts()) for each in recent[:-1]])
        if reasons:
            return RetraceReport(title, count, number, tuple(reasons))
        if number is None:
            note = "What the traces before were for is gone by now."
        elif self.lasting:
            note = (
                f"Nothing differs from trace {number} that nnxlite knows of: JAX has dropped what "
                "it kept (jax.clear_caches), or works in another context."
            )
        else:
            note = (
                f"Nothing differs from trace {number}: this transform runs the function at each "
                "call, or whenever one around it is traced. Under nnx.jit it runs once."
            )
        return RetraceReport(title, count, number, note=note)


def _is_doubling(number: int, limit: int) -> bool:
    """Tells whether `number` is `limit` times a power of two."""
    times, rest = divmod(number, limit)
    return times > 0 and rest == 0 and times & (times - 1) == 0


_FLAGS = (
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_numpy_rank_promotion",
)


def settings_now() -> tuple[tuple[str, Any, str], ...]:
    """Returns name, key and text of what traces depend on beside arguments."""
    ambient = current()
    captures = "; ".join(map(_capture_text, ambient.captured)) or "none"
    flags = [(name, getattr(jax.config, name, None)) for name in _FLAGS]
    mesh = jax.sharding.get_abstract_mesh()
    return (
        ("named scopes", ambient.scopes, "on" if ambient.scopes else "off"),
        ("captures", hash(ambient.captured), captures),
        ("sow without a capture", ambient.sow, ambient.sow or "as configured"),
        ("mesh", mesh, "none" if mesh.empty else str(mesh)),
        *[(name, value, str(value)) for name, value in flags],
    )


def _capture_text(wanted: Any) -> str:
    names = " and ".join([kind.__name__ for kind in wanted.kinds]) or "nothing"
    return f"{names} with init" if wanted.has_init else names


def frames_below_the_caller() -> int:
    """Returns the `stacklevel` of the line outside of this package and JAX that runs now."""
    level, frame = 1, inspect.currentframe()
    while frame is not None:
        frame, level = frame.f_back, level + 1
        name = "" if frame is None else frame.f_code.co_filename
        if not name.startswith(_PACKAGES) and name != contextlib.__file__:
            break
    return level - 1


_PACKAGES = (
    os.path.dirname(os.path.dirname(__file__)) + os.sep,
    os.path.dirname(str(jax.__file__)) + os.sep,
)

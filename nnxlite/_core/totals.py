"""Totals: records that are joined while a loop runs.

A loop whose number of steps is not known has room for one value per record, the *total*: it starts
from what `init_fn` gives, or from what was recorded before the loop, and each step joins its values
to it. So it travels as part of what the loop carries. Its structure and shape stay as they are; the
start is brought to the shape and dtype that `reduce_fn` gives.

What a perturbation adds is the same at each step: its record, too, is one value.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnxlite._core.errors import StructureError
from nnxlite._core.oneline import types_line
from nnxlite._core.records import Bundle, Entry, Label, Record, Total, append, only, same


class Constant:
    """What a record starts from, as a static value that can be compared."""

    __slots__ = ("_key", "value")

    def __init__(self, value: Any) -> None:
        leaves, tree = jax.tree.flatten(value)
        self.value = value
        self._key = (tree, *map(_leaf_key, leaves))

    def __eq__(self, other: object) -> bool:
        return type(other) is Constant and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _leaf_key(leaf: Any) -> Hashable:
    if isinstance(leaf, bool | int | float | complex):
        return type(leaf), repr(leaf)
    array = np.asarray(leaf)
    return array.dtype.name, array.shape, array.tobytes()


def constant_of(init: Callable[[], Any]) -> tuple[Any, Constant | None]:
    """Returns what `init` gives, and the same as a constant unless it depends on traced values."""
    with jax.ensure_compile_time_eval():
        value = init()
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(value)):
        return value, None
    return value, Constant(value)


def is_scalar(constant: Constant | None) -> bool:
    """Tells whether a constant holds nothing but scalars."""
    return constant is not None and all(jnp.ndim(x) == 0 for x in jax.tree.leaves(constant.value))


def joined_in_loop(
    title: str, who: Callable[[], str], name: str, record: Record, values: Sequence[Any]
) -> Record:
    """Returns the record of a loop's body with more values.

    Args:
      title: How messages call the loop.
      who: Writes which object it is.
      name: Of the record.
      record: What there is.
      values: What joins.

    Raises:
      StructureError: There is no room for the values, or `init_fn` gives no constant.
    """
    if record.reduce is same:
        return record.joined_to(values)._replace(total=True)
    if record.reduce in (append, only):
        verb = "sows" if record.reduce is append else "perturbs"
        cure = (
            "Keep one: sow with a reduce_fn and an init_fn, such as reduce_fn=lambda a, b: a + b, "
            "init_fn=lambda: 0.0. Or use nnx.scan, which stacks the values."
            if record.reduce is append
            else "Use nnx.scan, which stacks them, each with its own gradient."
        )
        raise StructureError(
            f"{title}: {who()} {verb} {name!r} inside a loop whose number of steps is not known "
            f"when it is compiled, so there is no room for all values. {cure}"
        )
    if not record.total and record.constant is None:
        raise StructureError(
            f"{title}: {who()} sows {name!r} with an init_fn that depends on traced values. Inside "
            "of a loop it has to give a constant, as it is needed before the first step."
        )
    joined = record.joined_to(values)._replace(total=True)
    check_growth(title, who, name, record.start, joined.start)
    return joined


def check_growth(title: str, who: Callable[[], str], name: str, before: Any, after: Any) -> None:
    """Raises unless what was joined has the structure and shapes of what it was joined to."""
    if jax.tree.structure(before) != jax.tree.structure(after) or not all(
        _fits(a, b) for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    ):
        raise StructureError(
            f"{title}: {who()} sows {name!r} with a reduce_fn that makes {types_line(after)} of "
            f"{types_line(before)}. Inside of a loop, whose number of steps is not known when it "
            "is compiled, what is kept has one structure and shape: accumulate, as "
            "reduce_fn=lambda a, b: a + b does, or use nnx.scan, which stacks the values."
        )


def _fits(before: Any, after: Any) -> bool:
    try:
        return np.broadcast_shapes(jnp.shape(before), jnp.shape(after)) == jnp.shape(after)
    except ValueError:
        return False


class Totalled:
    """The part of a recorder that a loop needs: what to hand to each step, and what comes out."""

    def totals(self, given: Bundle) -> list[Any]:
        """Returns the totals among what is handed in."""
        return given.values[len(given.about.init) :]

    def with_totals(self, given: Bundle, totals: Sequence[Any]) -> Bundle:
        """Returns what is handed in, with other totals."""
        return Bundle(given.about, [*given.values[: len(given.about.init)], *totals])

    def totals_after(self, given: Bundle, outputs: Bundle) -> list[Any]:
        """Returns the totals after a step, in the order of those that were handed in."""
        found = _by_key(outputs)
        return [found[total.label, total.key][1] for total in given.about.totals]

    def for_steps(self, given: Bundle, outputs: Bundle) -> Bundle:
        """Returns what to hand to a step, given, abstractly, what one handed out.

        Raises:
          StructureError: A total is no constant in structure and shape.
        """
        before = dict(zip(_keys(given), self.totals(given), strict=True))
        fresh = {(total.label, total.key) for total in given.about.totals if total.fresh}
        totals, starts, changed = [], [], False
        for (label, key), (entry, after) in _by_key(outputs).items():
            is_known = (label, key) in before
            start = before[label, key] if is_known else _start(given, entry, after)
            settled = is_known and _same_types(start, after)
            changed |= not settled
            starts.append(start if settled else _promoted(start, after))
            is_fresh = not is_known or (label, key) in fresh
            totals.append(Total(label, key, entry.kind, is_fresh))
        if not changed:
            return given
        about = given.about._replace(totals=tuple(totals))
        return self.with_totals(Bundle(about, given.values[: len(about.init)]), starts)

    def after_loop(
        self, given: Bundle, totals: Sequence[Any], outputs: Bundle, asked: Bundle | None
    ) -> Bundle:
        """Returns what the loop hands out, given what a step did and the totals at the end."""
        found = _by_key(outputs)
        entries = tuple(found[total.label, total.key][0] for total in given.about.totals)
        skipped = dict(outputs.about.skipped) | dict(asked.about.skipped if asked else ())
        about = outputs.about._replace(entries=entries, skipped=tuple(skipped.items()))
        return Bundle(about, [(total, ()) for total in totals])


def _keys(given: Bundle) -> list[tuple[Label, Any]]:
    return [(total.label, total.key) for total in given.about.totals]


def _by_key(outputs: Bundle) -> dict[tuple[Label, Any], tuple[Entry, Any]]:
    return {
        (entry.label, entry.key): (entry, start)
        for entry, (start, _) in zip(outputs.about.entries, outputs.values, strict=True)
    }


def _start(given: Bundle, entry: Entry, after: Any) -> Any:
    """Returns what a total starts from that the first step made."""
    if entry.reduce.function is not same:
        return entry.constant.value
    names = dict(zip(given.about.init, given.values, strict=False))
    added = names.get((entry.label, entry.key.name))
    return jax.tree.map(jnp.zeros_like, after) if added is None else added


def _same_types(before: Any, after: Any) -> bool:
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return all(
        hasattr(a, "dtype")
        and not getattr(a, "weak_type", False)
        and (jnp.shape(a), a.dtype) == (jnp.shape(b), b.dtype)
        for a, b in pairs
    )


def _promoted(start: Any, after: Any) -> Any:
    return jax.tree.map(
        lambda a, b: jnp.broadcast_to(jnp.asarray(a).astype(b.dtype), b.shape), start, after
    )

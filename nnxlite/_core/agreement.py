"""Agreement: branches of which one runs have to record alike.

What is recorded leaves a branch as arrays, and JAX needs the same from each. An output of a method
that nobody sowed is left out where only some branches compute it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._core.errors import StructureError
from nnxlite._core.oneline import types_line
from nnxlite._core.records import OF_OUTPUTS, Bundle, Entry, Key, Label, Outcome, Stranger

Which = tuple[Label, Key]


def agreed(
    transform: str,
    names: Sequence[str],
    outputs: Sequence[Bundle],
    where: Callable[[int], str],
) -> tuple[list[Callable[[Bundle], list[Any]]], Callable[[list[Any]], Bundle]]:
    """Compares what branches record; see `Extras.agreed`."""
    tables = [_table(bundle) for bundle in outputs]
    everywhere = [which for which in tables[0] if all(which in table for table in tables)]
    left_out: dict[str, str] = {}
    for bundle, table in zip(outputs, tables, strict=True):
        for which, number in table.items():
            if which in everywhere:
                continue
            entry: Entry = bundle.about.entries[number]
            if entry.reduce.function not in OF_OUTPUTS:
                raise _differ(transform, names, outputs, where)
            text = f"{_place(entry.label, where)}.{entry.key.name}"
            left_out[text] = f"only some branches of {transform} compute them."
    for which in everywhere:
        numbers = [table[which] for table in tables]
        _check_alike(transform, names, outputs, numbers, where)
    picks = [_picking([table[which] for which in everywhere]) for table in tables]
    about = _about(outputs, [tables[0][which] for which in everywhere], left_out)
    return picks, lambda values: Bundle(about, values)


def _table(bundle: Bundle) -> dict[Which, int]:
    return {(entry.label, entry.key): n for n, entry in enumerate(bundle.about.entries)}


def _picking(numbers: Sequence[int]) -> Callable[[Bundle], list[Any]]:
    return lambda bundle: [bundle.values[number] for number in numbers]


def _about(outputs: Sequence[Bundle], numbers: Sequence[int], left_out: dict[str, str]) -> Outcome:
    abouts = [bundle.about for bundle in outputs]
    strangers: dict[Stranger, Any] = {}
    for about in abouts:
        for label, origin in about.strangers:
            strangers.setdefault(label, origin)
    skipped = {text: why for about in abouts for text, why in about.skipped}
    return Outcome(
        tuple(abouts[0].entries[number] for number in numbers),
        tuple(dict.fromkeys(pair for about in abouts for pair in about.met)),
        tuple(strangers.items()),
        tuple((skipped | left_out).items()),
    )


def _check_alike(
    transform: str,
    names: Sequence[str],
    outputs: Sequence[Bundle],
    numbers: Sequence[int],
    where: Callable[[int], str],
) -> None:
    entries = [bundle.about.entries[n] for bundle, n in zip(outputs, numbers, strict=True)]
    values = [bundle.values[n] for bundle, n in zip(outputs, numbers, strict=True)]
    for entry, value, name in zip(entries, values, names, strict=True):
        if (_types(value), entry.total) != (_types(values[0]), entries[0].total):
            what = f"{entry.kind.__name__} {entry.key.name!r} of {_place(entry.label, where)}"
            raise StructureError(
                f"{transform}: branches have to record alike under a capture. {names[0]} records "
                f"{_shown(values[0])} as {what}, {name} records {_shown(value)}. Sow the same "
                "names as often, with the same shapes and dtypes, in each."
            )


def _types(values: Any) -> Any:
    leaves, tree = jax.tree.flatten(values)
    return tree, [(jnp.shape(leaf), jnp.result_type(leaf)) for leaf in leaves]


def _shown(values: tuple[Any, tuple[Any, ...]]) -> str:
    start, waiting = values
    return " and ".join(map(types_line, waiting or (start,)))


def _differ(
    transform: str,
    names: Sequence[str],
    outputs: Sequence[Bundle],
    where: Callable[[int], str],
) -> StructureError:
    texts = [
        f"{name} records {_records(bundle, where)}"
        for name, bundle in zip(names, outputs, strict=True)
    ]
    return StructureError(
        f"{transform}: branches have to record alike under a capture. {', '.join(texts)}. Sow the "
        "same names, with the same structure, in each."
    )


def _records(bundle: Bundle, where: Callable[[int], str]) -> str:
    texts = [
        f"{entry.kind.__name__} {entry.key.name!r} of {_place(entry.label, where)}"
        for entry in bundle.about.entries
    ]
    return " and ".join(texts) or "nothing"


def _place(label: Label, where: Callable[[int], str]) -> str:
    return where(label) if type(label) is int else getattr(label, "class_name", "a module")

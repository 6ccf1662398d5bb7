"""What programs sow and perturb, noted beside the library: an oracle for captures.

In `plain` mode nothing goes through the library. `taped` collects what is sown and perturbed as a
list, in the order of the program; the oracle of a mapped loop stacks such lists, and `by_path` says
what a capture has to return.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx
from tests.isomorphism import has_identity, is_object, items_of


class Entry(NamedTuple):
    """One value: of which object, under which kind and name."""

    owner: Any
    kind: type[nnx.Variable]
    name: str
    value: Any


class _Tape(threading.local):
    plain = False
    entries: list[Entry] | None = None
    added = 0.0


_TAPE = _Tape()


def sow(node: nnx.Module, name: str, value: jax.Array) -> None:
    """Sows a value; on the tape alone in plain mode."""
    if not _TAPE.plain:
        node.sow(nnx.Intermediate, name, value)
    else:
        note(Entry(node, nnx.Intermediate, name, value))


def perturb(node: nnx.Module, name: str, value: jax.Array) -> jax.Array:
    """Perturbs a value; on the tape alone in plain mode."""
    if not _TAPE.plain:
        return node.perturb(name, value)
    note(Entry(node, nnx.Perturbation, name, jnp.zeros_like(value)))
    return value + _TAPE.added


def note(entry: Entry) -> None:
    """Puts an entry on the tape, if one runs."""
    if _TAPE.entries is not None:
        _TAPE.entries.append(entry)


@contextmanager
def plain() -> Iterator[None]:
    """Keeps what programs sow and perturb away from the library."""
    before, _TAPE.plain = _TAPE.plain, True
    try:
        yield
    finally:
        _TAPE.plain = before


@contextmanager
def taped(added: float = 0.0) -> Iterator[list[Entry]]:
    """Yields the entries of the body, and adds to what it perturbs. A tape outside gets none."""
    before = _TAPE.entries, _TAPE.added
    _TAPE.entries, _TAPE.added = [], before[1] + added
    try:
        yield _TAPE.entries
    finally:
        _TAPE.entries, _TAPE.added = before


# What captures return.

Records = dict[str, Any]


def by_path(entries: Sequence[Entry], root: Any) -> Records:
    """Returns what a capture of these entries finds, in the form of `of_states`."""
    paths = {id(owner): path for path, owner in object_paths(root)}
    records: Records = {}
    others: dict[str, list[Any]] = defaultdict(list)
    for owner, kind, name, value in entries:
        sown = kind is nnx.Intermediate
        if id(owner) not in paths:
            # One perturbation has a zero for each object; which zero it is cannot be told.
            others[f"{kind.__name__} {name}"].append(value)
        elif sown:
            records.setdefault(_key(kind, paths[id(owner)], name), []).append(value)
        else:
            records[_key(kind, paths[id(owner)], name)] = [value]
    return records | {name: _total(values) for name, values in others.items()}


def of_states(states: Sequence[nnx.State], root: Any) -> Records:
    """Returns captured States as lists of values by kind and path.

    What is no part of the root has a path that depends on how the objects were counted: of that,
    the sum is compared.
    """
    known = {path for path, _ in object_paths(root)}
    records: Records = {}
    others: dict[str, list[Any]] = defaultdict(list)
    for state in states:
        for (*path, name), variable in state.flat_state():
            kind, value = type(variable), jax.tree.map(_concrete, variable.get_value())
            values = list(value) if kind is nnx.Intermediate else [value]
            if tuple(path) in known:
                records[_key(kind, tuple(path), name)] = values
            else:
                others[f"{kind.__name__} {name}"] += values
    return records | {name: _total(values) for name, values in others.items()}


def _key(kind: type, path: tuple[Any, ...], name: Any) -> str:
    return f"{kind.__name__} {'/'.join(map(repr, path))} {name}"


def _total(values: list[Any]) -> Any:
    return [sum((jnp.sum(value) for value in values), jnp.float32(0))]


def _concrete(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        return np.zeros(value.shape, value.dtype)
    return value


def object_paths(root: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Returns each object at and below `root` with the path at which it is first met."""
    found: list[tuple[tuple[Any, ...], Any]] = []
    seen: set[int] = set()

    def visit(value: Any, path: tuple[Any, ...]) -> None:
        if hasattr(value, "__func__") and is_object(value.__self__):
            value = value.__self__  # a method stands where its object is
        if has_identity(value):
            if id(value) in seen:
                return
            seen.add(id(value))
        if is_object(value):
            found.append((path, value))
        for key, child in items_of(value) or ():
            visit(child, (*path, key))

    visit(root, ())
    return found

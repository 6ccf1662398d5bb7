"""Recorders: where sown values and perturbations go while a capture runs.

A `Recorder` belongs to one capture and to one trace level. Records are kept by the identity of the
object that made them; paths come at the end, from the root of the capture. A transform of this
library hands a recorder on: inside, a fresh one at the level of the clones takes its place, and what
that one recorded comes out with the results (see `extras.py`). A plain JAX transform in between
cannot do so: a record made under it has another level, which is an error.
"""

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxlite._core.errors import TraceLevelError
from nnxlite._core.extras import TRAVELLING, Nodes, travelling
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Perturbation, Variable

Reduce = Callable[[Any, Any], Any]


def append(records: tuple[Any, ...], value: Any) -> tuple[Any, ...]:
    """The default way to keep records: all of them, in order."""
    return (*records, value)


class Record(NamedTuple):
    """What one object recorded under one kind and name.

    Attributes:
      value: A tuple of the values by default; with a `reduce_fn`, what it made of them.
      reduce: How records are joined.
    """

    value: Any
    reduce: Reduce


class Key(NamedTuple):
    """Which record: the kind, and the name below the object."""

    kind: type[Variable]
    name: Hashable


class Stranger:
    """Stands for an object made inside a transform, which is gone; it keeps the class name."""

    __slots__ = ("class_name",)

    def __init__(self, class_name: str) -> None:
        self.class_name = class_name


class _Identity:
    """A weak reference that compares and hashes by the identity of its object."""

    __slots__ = ("number", "ref")

    def __init__(self, value: Any) -> None:
        self.ref, self.number = weakref.ref(value), id(value)

    def __eq__(self, other: object) -> bool:
        return type(other) is _Identity and self.ref() is other.ref() is not None

    def __hash__(self) -> int:
        return self.number


class Wanted(NamedTuple):
    """What a capture asks for; static, so it is part of every cache key.

    Attributes:
      kinds: The kinds of Variables to record.
      has_init: Whether perturbations have initial values.
      outputs: The kind under which method outputs are recorded, or None.
      filter: Which methods these are.
      perturb_outputs: Whether recorded outputs and perturbed values are perturbed, each under a
        number of its own, and recorded beside it.
    """

    kinds: tuple[type[Variable], ...]
    has_init: bool = False
    outputs: type[Variable] | None = None
    filter: Hashable = None
    each_perturbed: bool = False

    def place_of(self, kind: type[Variable]) -> type[Variable] | None:
        """Returns the nearest of the kinds asked for, under which records of `kind` come out.

        A subclass counts as its base, but a perturbation is asked for by that name only: its
        value, zeros, is no intermediate value of the model.
        """
        for base in kind.__mro__:
            if base in self.kinds:
                return base
            if base is Perturbation:
                return None
        return None


class Bundle:
    """Arrays by static keys: a pytree node whose structure is the keys."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: tuple[Any, ...], values: Any) -> None:
        self.keys, self.values = keys, list(values)


jax.tree_util.register_pytree_node(
    Bundle, lambda b: (b.values, b.keys), lambda keys, values: Bundle(keys, values)
)


class Recorder:
    """Takes the records of one capture at one trace level. An `Extras`, so transforms thread it.

    Args:
      wanted: What to record.
      init: Initial values of perturbations, by object identity and name.
      learning: Only note which perturbations are met, and record nothing.
    """

    def __init__(
        self,
        wanted: Wanted,
        init: Mapping[int, tuple[Any, dict[Hashable, Any]]],
        learning: bool = False,
    ) -> None:
        self.wanted, self.init, self.learning = wanted, init, learning
        self.level = current_level()
        self.records: dict[int, tuple[Any, dict[Key, Record]]] = {}
        self.met: dict[tuple[int, Hashable], Any] = {}
        self.taken: set[tuple[int, Hashable]] = set()
        self.skipped: dict[str, None] = {}
        self._input_names: list[tuple[int, Hashable]] = []

    def wants(self, kind: type[Variable]) -> bool:
        """Tells whether records of this kind are taken."""
        return self.wanted.place_of(kind) is not None

    def add(self, owner: Any, key: Key, value: Any, reduce: Reduce, init: Callable[[], Any]) -> None:
        """Records one value."""
        if self.learning:
            return
        _, records = self.records.setdefault(id(owner), (owner, {}))
        before = records[key].value if key in records else init()
        records[key] = Record(reduce(before, value), reduce)

    def put(self, owner: Any, key: Key, record: Record) -> None:
        """Takes a record that was made inside a transform."""
        _, records = self.records.setdefault(id(owner), (owner, {}))
        if key not in records:
            records[key] = record
        elif record.reduce is append:
            records[key] = Record((*records[key].value, *record.value), append)
        elif record.reduce is same:
            records[key] = Record(same(records[key].value, record.value), same)
        else:
            joined = record.reduce(records[key].value, record.value)
            records[key] = Record(joined, record.reduce)

    def names(self) -> set[tuple[int, Hashable]]:
        """Returns the names in use, by object identity."""
        here = {
            (number, key.name) for number, (_, keys) in self.records.items() for key in keys
        }
        return here | self.taken | set(self.met)

    def free_name(self, owner: Any, name: Hashable) -> Hashable:
        """Returns `name`, numbered if the object has used it: `h`, `h#1`, `h#2`."""
        used, free, number = self.names(), name, 0
        while (id(owner), free) in used:
            number += 1
            free = f"{name}#{number}"
        return free

    def check_level(self, what: Callable[[], str]) -> None:
        """Raises if the running trace is another than the recorder's."""
        if self.level != current_level():
            raise TraceLevelError(
                f"{what()} happens under a plain JAX transform that stands between the capture and "
                "the module, and JAX gives no way to hand the value out. Use the transform of "
                "nnxlite (nnx.jit, nnx.grad, nnx.vmap, nnx.scan, ...) in its place, or capture "
                "inside of it and return the captured State."
            )

    # As an Extras.

    def key(self) -> Hashable:
        return self.wanted, self.learning

    def inputs(self, nodes: Nodes) -> Bundle:
        numbers = {id(node()): n for n, node in enumerate(nodes) if node() is not None}
        taken = sorted(
            (numbers[owner], name) for owner, name in self.names() if owner in numbers
        ) if self.wanted.each_perturbed else ()
        keys: list[Any] = [tuple(taken)]
        values: list[Any] = []
        self._input_names = [(n, name) for n, (_, named) in self.init.items() for name in named]
        for number, (owner, named) in self.init.items():
            where = ("node", numbers[number]) if number in numbers else ("object", _Identity(owner))
            for name, value in named.items():
                keys.append((where, name))
                values.append(value)
        return Bundle(tuple(keys), values)

    def learner(self) -> "Recorder | None":
        return Recorder(self.wanted, {}, learning=True) if self.init else None

    def axes(self, inputs: Bundle, learner: "Recorder | None") -> Bundle:
        met = set() if learner is None else set(learner.met)
        mapped = [(number, name) in met for number, name in self._input_names]
        return Bundle(inputs.keys, [0 if each else None for each in mapped])

    @contextmanager
    def inside(self, inputs: Bundle, nodes: Nodes) -> Iterator[Callable[[], Bundle]]:
        init: dict[int, tuple[Any, dict[Hashable, Any]]] = {}
        for ((place, number), name), value in zip(inputs.keys[1:], inputs.values, strict=True):
            owner = nodes[number]() if place == "node" else number.ref()
            init.setdefault(id(owner), (owner, {}))[1][name] = value
        inner = Recorder(self.wanted, init, self.learning)
        inner.taken = {(id(nodes[number]()), name) for number, name in inputs.keys[0]}
        clones = {id(node()): n for n, node in enumerate(nodes)}
        with travelling(inner):
            yield lambda: inner.bundle(clones)

    def bundle(self, clones: Mapping[int, int]) -> Bundle:
        """Packs the records of a body, with places that mean something outside of it."""
        keys: list[Any] = []
        values: list[Any] = []
        strangers: dict[int, int] = {}
        for number, (owner, records) in self.records.items():
            where = _where(owner, number, clones, self.level, strangers)
            for key, record in records.items():
                keys.append((where, key, record.reduce))
                values.append(record.value)
        met = tuple(
            (_where(owner, number, clones, self.level, strangers), name)
            for (number, name), owner in self.met.items()
        )
        keys.append((met, tuple(self.skipped)))
        return Bundle(tuple(keys), values)

    def deliver(self, outputs: Bundle, nodes: Nodes) -> None:
        met, skipped = outputs.keys[-1]
        strangers: dict[Any, Stranger] = {}
        for (where, key, reduce), value in zip(outputs.keys[:-1], outputs.values, strict=True):
            self.put(_resolved(where, nodes, strangers), key, Record(value, reduce))
        for where, name in met:
            owner = _resolved(where, nodes, strangers)
            self.met[id(owner), name] = owner
        self.skipped.update(dict.fromkeys(skipped))


def _where(
    owner: Any, number: int, clones: Mapping[int, int], level: Any, strangers: dict[int, int]
) -> tuple[Any, ...]:
    if number in clones:
        return "node", clones[number]
    if type(owner) is Stranger:
        return "stranger", owner.class_name, strangers.setdefault(number, len(strangers))
    if owner._level != level:  # closed over: it lives outside as well
        return "object", _Identity(owner)
    return "stranger", type(owner).__name__, strangers.setdefault(number, len(strangers))


def _resolved(where: tuple[Any, ...], nodes: Nodes, strangers: dict[Any, Stranger]) -> Any:
    if where[0] == "node":
        return nodes[where[1]]()
    if where[0] == "object":
        return where[1].ref()
    return strangers.setdefault(where, Stranger(where[1]))


def same(before: Any, value: Any) -> Any:
    """Joins perturbations of one name: they are one, and shapes have to agree."""
    if before is None:
        return value
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (before, value)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"One name is perturbed twice in one object, with shapes {shapes[0]} and {shapes[1]}. "
            "Each call adds the same perturbation, so shapes have to agree: use two names."
        )
    return before


def recorders() -> tuple[Recorder, ...]:
    """Returns the recorders at work in this thread, the innermost last."""
    return tuple(extra for extra in TRAVELLING.active if isinstance(extra, Recorder))

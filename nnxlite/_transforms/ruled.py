"""One call of a function with a derivative rule: what `custom_vjp` and `custom_jvp` share.

JAX decides which runs: the function where nothing is differentiated, the rule where something is,
or first the one and later the other, under `grad` of `jit`. Both cross like any lifted function, so
what either changes comes out as values (see `packing.py`); if both ran, the rule has to change what
the function did, since by then JAX has settled what comes out.

JAX caches nothing by the identity of a function with a rule, so each traced call makes its own. A
call keeps no value: JAX may hold it, in a trace, for long.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

import jax
from jax.core import Tracer

from nnxlite._core import scope
from nnxlite._core.errors import StructureError
from nnxlite._core.extras import TRAVELLING, only_travelling
from nnxlite._core.graphdef import ARRAY_LEAF, FILL_LEAF, FILL_NODE, GraphDef, Slot
from nnxlite._core.recording import Recorder
from nnxlite._core.records import Bundle
from nnxlite._core.trace import EAGER, Level
from nnxlite._transforms.axes import DiffState, Entry
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.changes import structure_change
from nnxlite._transforms.derivatives import Found, differentiable, expanded, numbered, types_of
from nnxlite._transforms.differentiated import arguments_of, is_number, leaves_below
from nnxlite._transforms.packing import Out, OutDef, Update

Inputs: TypeAlias = tuple[list[Any], list[Any], tuple[Any, ...]]
"""What crosses: the values of leaves, other arguments, and what the extras hand in."""


class Ruled(Protocol):
    """What a call asks of the function with a rule.

    Attributes:
      nondiff: The numbers of the arguments without a derivative.
      filters: By argument, which of its leaves have one.
      method: The name of the method that it is, or None.
      is_named: Whether calls of the method carry its name.
    """

    nondiff: tuple[int, ...]
    filters: dict[int, DiffState]
    is_named: bool

    @property
    def method(self) -> str | None: ...


class Call:
    """One call, without its values.

    Attributes:
      title: How messages call the function.
      crossing: Of its arguments.
      trees: Per argument, its structure.
      positions: Per argument, where its leaves stand among all.
      diff: The numbers of the arguments that have a derivative.
      fixed: By position, arguments without a derivative that are no tracers: used as they are.
      dynamic: The positions of the other arguments that are no objects.
      input_types: The types of the values and of the other inputs.
      first: The types of what the function returned, once it ran.
    """

    def __init__(self, function: Ruled, binding: Binding, leaves: list[Any]) -> None:
        self.function, self.crossing = function, binding.crossing
        self.title = binding.lift.title
        self.trees, self.positions = arguments_of(self.crossing.treedef)
        self.diff = [n for n in range(len(self.trees)) if n not in function.nondiff]
        nondiff = {p for n in function.nondiff if n < len(self.trees) for p in self.positions[n]}
        self.fixed = {
            position: leaves[position]
            for position in self.crossing.rest
            if position in nondiff and not isinstance(leaves[position], Tracer)
        }
        self.dynamic = [p for p in self.crossing.rest if p not in self.fixed]
        self.first: Out | None = None
        self.input_types: tuple[list[Any], list[Any]] = ([], [])
        self._chosen = self._choose(binding)
        self._extras: list[Callable[[], Any]] = []

    def _choose(self, binding: Binding) -> dict[int, set[Entry]]:
        """Returns, per object that a `DiffState` is given for, the entries it chooses."""
        chosen: dict[int, set[Entry]] = {}
        for number, each in self.function.filters.items():
            for position in self.positions[number] if number < len(self.trees) else ():
                if position in self.crossing.roots:
                    root = self.crossing.roots.index(position)
                    chosen[root] = {
                        entry
                        for path, _, entry, leaf in leaves_below(binding, root)
                        if each.predicate(path, leaf)
                    }
        return chosen

    def inputs(self, binding: Binding, leaves: list[Any]) -> Inputs:
        """Returns what crosses.

        Raises:
          TypeError: An argument is neither an array nor an object, and not named as one without
            derivative.
        """
        others = []
        for position in self.dynamic:
            if not is_number(leaves[position]):
                raise TypeError(
                    f"{self.title}: {self.crossing.place(position)} is a "
                    f"{type(leaves[position]).__name__}, neither an array nor an object. Name its "
                    "position in nondiff_argnums."
                )
            others.append(leaves[position])
        given = zip(TRAVELLING.active, binding.extra_inputs(), strict=True)
        extras = tuple(self._extra_input(*pair) for pair in given)
        self._extras = [extra.later() for extra in TRAVELLING.active]
        return binding.plan.gather(), others, extras

    def _extra_input(self, extra: Any, given: Any) -> Any:
        """Closes a capture that gives each value a gradient: a rule has none for those inside."""
        if not (isinstance(extra, Recorder) and extra.wanted.each):
            return given
        reason = (
            f"inside of {self.title}, whose rule has no gradient for it. Perturb the result "
            "outside of the function."
        )
        return Bundle(given.about._replace(cut_off=given.about.cut_off or reason), given.values)

    def run(self, inputs: Inputs, level: Level) -> Out:
        """Runs the function, differentiable where a trace runs."""
        if level is EAGER:
            return self._run_function(*inputs)
        self.input_types = types_of(inputs[:2])
        return self.with_rule()(*inputs)

    def with_rule(self) -> Callable[..., Out]:
        """Returns the function of the inputs with its rule, for JAX."""
        raise NotImplementedError

    # The function, and the rule in its place. JAX may run a rule long after the call.

    def primal(self, values: list[Any], others: list[Any], extras: Any) -> Out:
        """Runs the function."""
        out = self._run_function(values, others, extras)
        self.first = types_of(out)
        return out

    def _run_function(self, values: list[Any], others: list[Any], extras: Any) -> Out:
        return self.crossing.pure(values, self._joined(others), extras)

    def run_rule(
        self,
        name: str,
        rule: Callable[..., Any],
        body: Callable[[tuple[Any, ...]], Any],
        inputs: Inputs,
    ) -> Out:
        """Runs the rule as the function would run, and returns what the function returns.

        Args:
          name: What the rule is called, for messages.
          rule: The function of the user that it consists of.
          body: Calls it with the arguments of the function, and returns the result.
          inputs: What crosses.
        """

        @functools.wraps(rule, updated=())
        def ruled(*args: Any) -> Any:
            return body(args)

        method = self.function.method
        fn = scope.scoped_method(method, ruled) if method and self.function.is_named else ruled
        values, others, extras = inputs
        with only_travelling(*[extra() for extra in self._extras]):
            out = self.crossing.beside(fn).pure(values, self._joined(others), extras)
        self._refuse_perturbations(extras, out.extras)
        return out if self.first is None else self._as_first(name, out, values)

    def _joined(self, others: list[Any]) -> list[Any]:
        """Returns all arguments that are no objects."""
        rest, fixed = iter(others), self.fixed
        return [fixed[p] if p in fixed else next(rest) for p in self.crossing.rest]

    def _refuse_perturbations(self, given: Any, outputs: Any) -> None:
        for before, after in zip(given, outputs, strict=True):
            if isinstance(before, Bundle) and isinstance(after, Bundle):
                perturbed = set(before.about.init).intersection(after.about.met)
                if perturbed:
                    names = ", ".join(sorted(repr(name) for _, name in perturbed))
                    raise StructureError(
                        f"{self.title}: perturb({names}) is called inside, but its rule has no "
                        "gradient for the perturbation, and zero would hide it. Perturb the result "
                        "outside of the function, or leave the name out of init."
                    )

    def _as_first(self, name: str, out: Out, values: list[Any]) -> Out:
        """Returns what the rule gave in the form of what the function gave before."""
        first = self.first
        assert first is not None
        before, after = first.definition, out.definition
        if _structure(before.update) != _structure(after.update):
            update = after.update or before.update
            assert update is not None
            change = structure_change(self.crossing, update) or "an object was made"
            who, other = ("the function", name) if after.update is None else (name, "the function")
            raise self._differs(f"in {who}, {change}, and not in {other}")
        if (before.tree, before.spec) != (after.tree, after.spec):
            raise self._differs(
                f"the function returns {_shown(before)}, and {name} gives {_shown(after)} as "
                "its result"
            )
        mine, theirs = (_entries(x.extras) for x in (out, first))
        if mine != theirs:
            raise self._differs(
                f"under a capture, the function records {_records(first.extras)}, and {name} "
                f"records {_records(out.extras)}"
            )
        extras = jax.tree.unflatten(jax.tree.structure(first.extras), jax.tree.leaves(out.extras))
        changed = self._changed_as_first(name, before, out, values)
        result = Out(out.arrays, changed, extras, before)
        self._check_types(name, first, result)
        return result

    def _changed_as_first(
        self, name: str, before: OutDef, out: Out, values: list[Any]
    ) -> list[Any]:
        after = out.definition
        new = self.output_values(out)
        surplus = sorted(new.keys() - set(_changed(before)))
        if surplus:
            number = surplus[0] if after.update is None else after.update.leaves[surplus[0]]
            kind = self.crossing.graphdef.leaves[number]
            what = "array" if kind is ARRAY_LEAF else kind[0].__name__
            raise self._differs(
                f"{name} changes {self.crossing.leaf_path(number)} ({what}), and the function does "
                "not"
            )
        old = None if after.update is None else after.update.leaves
        return [
            new[n] if n in new else values[n if old is None else old[n]] for n in _changed(before)
        ]

    def _check_types(self, name: str, first: Out, out: Out) -> None:
        expected, found = jax.tree.leaves(first), jax.tree.leaves(types_of(out))
        for a, b in zip(expected, found, strict=True):
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                raise self._differs(
                    f"the function gives a {a.dtype}{list(a.shape)} where {name} gives a "
                    f"{b.dtype}{list(b.shape)}"
                )

    def _differs(self, how: str) -> StructureError:
        return StructureError(
            f"{self.title}: {how}. A transform, such as nnx.jit, stands between the call and its "
            "derivative, so JAX ran the function first, and both have to return and change the "
            "same. The rule may call the function."
        )

    # What has a derivative.

    def input_entries(self, root: int) -> Found:
        """Returns the types of the leaves of an argument that have a derivative, by entry."""
        values, _ = self.input_types
        chosen = self._chosen.get(root)
        numbered = [(n, values[n]) for n in self.crossing.root_entries(root)]
        found = differentiable(expanded(self.crossing.graphdef, numbered))
        if chosen is None:
            return found
        return {entry: aval for entry, aval in found.items() if entry in chosen}

    def input_slot(self, root: int) -> Slot:
        """Returns what holds an argument in the graph of all."""
        return self.crossing.graphdef.skeleton.roots[root]

    def roots_of(self, number: int) -> list[tuple[int, int | None]]:
        """Lists the leaves of an argument: position, and number of the object that stands there."""
        return [
            (p, self.crossing.roots.index(p) if p in self.crossing.roots else None)
            for p in self.positions[number]
        ]

    def output_graph(self, definition: OutDef) -> GraphDef[Any]:
        """Returns the graph after the call."""
        update = definition.update
        return self.crossing.graphdef if update is None else update.graphdef

    def output_values(self, out: Out) -> dict[int, Any]:
        """Returns what changed, by leaf number in the graph after the call."""
        return dict(zip(_changed(out.definition), out.changed, strict=True))

    def output_entries(self, out: Out) -> Found:
        """Returns what changed, by entry of the graph after the call."""
        return expanded(self.output_graph(out.definition), self.output_values(out).items())

    def argument_slot(self, root: int, definition: OutDef) -> Slot:
        """Returns what holds an argument in the graph after the call."""
        slot, update = self.input_slot(root), definition.update
        if update is None:
            return slot
        skeleton = self.crossing.graphdef.skeleton
        if slot[1] == FILL_NODE:
            return update.graphdef.skeleton.roots[slot[2]]
        owned = [
            n for n, kind in enumerate(self.crossing.graphdef.leaves) if kind is not ARRAY_LEAF
        ]
        return update.graphdef.skeleton.roots[len(skeleton.records) + owned.index(slot[2])]

    def result_slot(self, entry: Any, definition: OutDef) -> Slot:
        """Returns what holds an object of the result in the graph after the call."""
        update = definition.update
        if update is not None:
            return update.graphdef.skeleton.roots[update.first_output + entry]
        is_node, number = entry
        return "", FILL_NODE if is_node else FILL_LEAF, number


def named_like(fn: Any, run: Callable[..., Any]) -> Callable[..., Any]:
    """Returns `run` with the name of a function of the user, under which JAX shows it."""

    def named(*args: Any) -> Any:
        return run(*args)

    named.__name__ = named.__qualname__ = getattr(fn, "__name__", type(fn).__name__)
    return named


def _changed(definition: OutDef) -> Sequence[int]:
    """Returns the numbers of the changed leaves in the graph after the call."""
    update = definition.update
    if update is None:
        return definition.changed
    return [number for number, kept in enumerate(update.kept) if not kept]


def _structure(update: Update | None) -> Any:
    return None if update is None else update._replace(kept=())


def _shown(definition: OutDef) -> str:
    return str(jax.tree.structure(numbered(definition.tree)))


def _entries(extras: Any) -> list[Any]:
    """Returns what two runs have to agree on: which records there are, and their structure."""
    return [
        (each.about.entries, jax.tree.structure(each.values))
        if isinstance(each, Bundle)
        else jax.tree.structure(each)
        for each in extras
    ]


def _records(extras: Any) -> str:
    names = [name for each in extras if isinstance(each, Bundle) for name in each.names()]
    return ", ".join(names) or "nothing"

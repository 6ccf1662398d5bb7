"""Branches: `cond` and `switch` over objects.

All branches get the same arguments, cross together (see `family.py`), and are traced once per
structure, inside of an inner `jax.jit`: an eager call on known objects is one call of compiled
code. A branch may leave a value as it is where another one writes it, so each hands out the values
that any of them changes. All else has to agree: what is returned, what changes in structure, and
what is recorded under a capture.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from nnxlite._core.errors import StructureError
from nnxlite._core.extras import ONCE, TRAVELLING
from nnxlite._core.graphdef import FILL_NODE
from nnxlite._core.modes import mode_flags
from nnxlite._core.oneline import types_line
from nnxlite._transforms.changes import result_text, structure_change
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.explain import Facts, differences, graph_facts
from nnxlite._transforms.family import (
    Compiled,
    Family,
    Members,
    family_of,
    jitted,
    kept_of,
    name_of,
    value_of,
)
from nnxlite._transforms.packing import Out, OutDef, Update


@mode_flags()
def cond(
    pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], *operands: Any
) -> Any:
    """Calls one of two functions of objects, by a traced boolean.

    What the taken branch changes is changed on the caller's objects. Values may be changed by one
    branch alone; statics and structure only if both agree. In the result a State is a value, as
    arrays are; all other objects are new ones, or the same argument in both branches.

    Args:
      pred: A boolean scalar, or a Variable that holds one.
      true_fun: Called if `pred` is true. A bound method may change its object.
      false_fun: Called if it is not. Both return the same structure, shapes and dtypes.
      *operands: Arguments of both.

    Raises:
      StructureError: The branches differ in what they return, record or change in structure.

    Example:
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> def reset(m):
      ...     m.bias[...] = jnp.ones(2)
      >>> nnx.cond(jnp.array(True), reset, lambda m: None, model)
      >>> model.bias[...]
      Array([1., 1.], dtype=float32)
    """
    members = Members.of("nnx.cond", ("true_fun", "false_fun"), (true_fun, false_fun))
    return _branch(members, value_of(pred), operands)


@mode_flags()
def switch(index: Any, branches: Sequence[Callable[..., Any]], *operands: Any) -> Any:
    """Calls one of several functions of objects, by a traced index.

    Args:
      index: An int scalar, or a Variable that holds one; clamped to the range of `branches`.
      branches: The functions; as for `cond`.
      *operands: Arguments of all.

    Example:
      >>> nnx.switch(jnp.array(1), [lambda x: x, lambda x: 2 * x], jnp.ones(2))
      Array([2., 2.], dtype=float32)
    """
    if not branches:
        raise ValueError("nnx.switch needs at least one branch.")
    roles = [f"branches[{n}]" for n in range(len(branches))]
    return _branch(Members.of("nnx.switch", roles, branches), value_of(index), operands)


def _branch(members: Members, index: Any, operands: tuple[Any, ...]) -> Any:
    family = family_of(members, len(operands))
    with family.bound((*members.arguments, *operands)) as (binding, leaves, level):
        crossing = binding.crossing
        run = kept_of(crossing, "run", lambda: _runner(members, family, crossing))
        rest = family.rest(crossing, leaves)
        out = run(level, index, binding.plan.gather(), rest, binding.extra_inputs(ONCE))
        return binding.deliver(out, level)


def _runner(members: Members, family: Family, crossing: Crossing) -> Compiled:
    """Makes the function that chooses a branch; it holds no object of the caller."""
    crossings = family.crossings(crossing)
    pures = [jitted(*of) for of in zip(family.members, crossings, strict=True)]
    names = [
        f"{role} ({name_of(function)})"
        for role, function in zip(members.roles, members.functions, strict=True)
    ]
    transform = members.transform

    def run(index: Any, values: list[Any], rest: list[Any], extras: Any) -> Out:
        outs = [pure.eval_shape(values, rest, extras) for pure in pures]
        each = [_Traced(*of) for of in zip(names, crossings, outs, strict=True)]
        joined = _Joining(transform, each, values).joined()
        functions = [_emitting(*of, joined) for of in zip(pures, joined.records, strict=True)]
        if transform == "nnx.cond":
            result = jax.lax.cond(index, *functions, values, rest, extras)
        else:
            result = jax.lax.switch(index, functions, values, rest, extras)
        arrays, changed, recorded = result
        extras = tuple(about(given) for about, given in zip(joined.extras, recorded, strict=True))
        return Out(arrays, changed, extras, joined.definition)

    return Compiled(transform.removeprefix("nnx."), run)


class _Traced(NamedTuple):
    """One branch, and what it does in the abstract."""

    name: str
    crossing: Crossing
    out: Out

    @property
    def definition(self) -> OutDef:
        return self.out.definition


class _Joined(NamedTuple):
    """What all branches agree on.

    Attributes:
      definition: Of the result and of all that any branch changes.
      emitted: What each branch hands out beside its result: leaf numbers, or, if the structure
        changes, numbers of leaves of the structure after it.
      records: Per branch and extra, a function that picks what is handed out of its outputs.
      extras: Per extra, a function that makes its outputs of what was picked.
    """

    definition: OutDef
    emitted: tuple[int, ...]
    records: tuple[tuple[Callable[[Any], Any], ...], ...]
    extras: tuple[Callable[[Any], Any], ...]


def _emitting(
    pure: Callable[..., Out], picks: Sequence[Callable[[Any], Any]], joined: _Joined
) -> Callable[..., Any]:
    """Makes a branch that hands out the same leaves as the others."""

    def branch(values: list[Any], rest: list[Any], extras: Any) -> Any:
        out = pure(values, rest, extras)
        emitted = [_value_after(out, values, number) for number in joined.emitted]
        recorded = [pick(given) for pick, given in zip(picks, out.extras, strict=True)]
        return out.arrays, emitted, recorded

    return branch


def _value_after(out: Out, values: list[Any], number: int) -> Any:
    """Returns the value of one emitted leaf after a branch that may not have changed it."""
    update = out.definition.update
    if update is None:
        changed = dict(zip(out.definition.changed, out.changed, strict=True))
        return changed.get(number, values[number])
    if update.kept[number]:
        return values[update.leaves[number]]
    return out.changed[sum(not stays for stays in update.kept[:number])]


class _Joining:
    """Compares the branches, and finds what they agree on."""

    def __init__(self, transform: str, traced: Sequence[_Traced], values: list[Any]) -> None:
        self.transform, self.traced, self.values = transform, traced, values
        self.first = traced[0]

    def joined(self) -> _Joined:
        """Returns what all branches agree on.

        Raises:
          StructureError: They differ.
        """
        for other in self.traced[1:]:
            self._check_results(other)
            self._check_structure(other)
            self._check_objects(other)
            self._check_arrays(other)
        definition, emitted = self._emitted()
        self._check_emitted(emitted)
        records, extras = self._records()
        return _Joined(definition, emitted, records, extras)

    def _differ(self, text: str) -> StructureError:
        return StructureError(f"{self.transform}: {text}")

    def _check_results(self, other: _Traced) -> None:
        a, b = self.first.definition, other.definition
        if a.tree != b.tree:
            raise self._differ(
                f"branches have to return the same. {self.first.name} returns "
                f"{result_text(self.first.crossing, self.first.out)}, {other.name} returns "
                f"{result_text(other.crossing, other.out)}."
            )

    def _check_structure(self, other: _Traced) -> None:
        a, b = self.first.definition.update, other.definition.update
        if _structure(a) == _structure(b):
            return
        changes = [
            None if update is None else structure_change(each.crossing, update)
            for each, update in ((self.first, a), (other, b))
        ]
        if changes[1] is None and changes[0] is not None:
            what = f"{changes[0]} in {self.first.name}, and not in {other.name}"
        elif changes[0] is None and changes[1] is not None:
            what = f"{changes[1]} in {other.name}, and not in {self.first.name}"
        else:
            lines = differences(self._facts(self.first), self._facts(other))
            what = f"from {self.first.name} to {other.name}, {'; '.join(lines[:4])}"
        raise self._differ(
            f"{what}. Structure and static values may only change alike in all branches, and new "
            "objects have to be alike; values may differ."
        )

    def _facts(self, each: _Traced) -> Facts:
        """Returns what the objects of the arguments and of the result are after a branch."""
        crossing, update = each.crossing, each.definition.update
        if update is None:
            skeleton = crossing.graphdef.skeleton
            names = [crossing.argument_name(n) for n in range(len(crossing.roots))]
            return graph_facts(crossing.graphdef, zip(names, skeleton.roots, strict=True))
        roots = update.graphdef.skeleton.roots
        nodes = [crossing.node_path(n) for n in range(len(crossing.graphdef.skeleton.records))]
        spec = each.definition.spec or ()
        made = [
            place
            for place, entry in zip(_places(each.definition), spec, strict=False)
            if entry is not None
        ]
        known = zip(nodes, roots, strict=False)
        new = zip(made, roots[update.first_output :], strict=True)
        return graph_facts(update.graphdef, [*known, *new])

    def _check_objects(self, other: _Traced) -> None:
        a, b = self.first.definition, other.definition
        if a.spec == b.spec:
            return
        size = a.tree.num_leaves
        for place, mine, theirs in zip(
            _places(a), a.spec or (None,) * size, b.spec or (None,) * size, strict=True
        ):
            if mine != theirs:
                raise self._differ(
                    f"{place} is {self._object(self.first, mine)} in {self.first.name} and "
                    f"{self._object(other, theirs)} in {other.name}. Which object it is cannot "
                    "depend on a traced value: return the same one in all branches, or its State "
                    "(nnx.state), which is chosen by value."
                )

    def _object(self, each: _Traced, entry: Any) -> str:
        if entry is None:
            return "an array"
        if each.definition.update is not None:
            skeleton = each.definition.update.graphdef.skeleton
            _, how, number = skeleton.roots[each.definition.update.first_output + entry]
            numbers = (
                each.definition.update.nodes if how == FILL_NODE else each.definition.update.leaves
            )
            if numbers[number] < 0:
                return "a new object"
            entry = (how == FILL_NODE, numbers[number])
        is_node, number = entry
        crossing = each.crossing
        return crossing.node_path(number) if is_node else crossing.leaf_path(number)

    def _check_arrays(self, other: _Traced) -> None:
        a, b = self.first, other
        places = _places(a.definition)
        spec = a.definition.spec or (None,) * len(places)
        arrays = [place for place, entry in zip(places, spec, strict=True) if entry is None]
        for place, mine, theirs in zip(arrays, a.out.arrays, b.out.arrays, strict=True):
            self._check_type(place, a, mine, b, theirs)

    def _check_type(self, place: str, a: _Traced, mine: Any, b: _Traced, theirs: Any) -> None:
        if types_line(mine) != types_line(theirs):
            raise self._differ(
                f"{place} is {types_line(mine)} after {a.name} and {types_line(theirs)} after "
                f"{b.name}. It needs one shape and dtype after all branches: convert it in one."
            )

    def _emitted(self) -> tuple[OutDef, tuple[int, ...]]:
        first = self.first.definition
        if first.update is None:
            emitted = tuple(sorted({n for each in self.traced for n in each.definition.changed}))
            return first._replace(changed=emitted), emitted
        updates = [each.definition.update for each in self.traced]
        kept = tuple(all(flags) for flags in zip(*[u.kept for u in updates if u], strict=True))
        emitted = tuple(n for n, stays in enumerate(kept) if not stays)
        return first._replace(update=first.update._replace(kept=kept)), emitted

    def _check_emitted(self, emitted: Sequence[int]) -> None:
        first = self.first
        for number in emitted:
            before = _value_after(first.out, self.values, number)
            for other in self.traced[1:]:
                after = _value_after(other.out, self.values, number)
                self._check_type(self._place(number), first, before, other, after)

    def _place(self, number: int) -> str:
        update, crossing = self.first.definition.update, self.first.crossing
        if update is None:
            return crossing.leaf_path(number)
        if update.leaves[number] >= 0:
            return crossing.leaf_path(update.leaves[number])
        return f"a new {update.graphdef.leaves[number][0].__name__}"

    def _records(self) -> tuple[Any, Any]:
        names = [each.name for each in self.traced]
        found = [
            extra.agreed(self.transform, names, outputs, self.first.crossing.node_path)
            for extra, outputs in zip(
                TRAVELLING.active,
                zip(*[each.out.extras for each in self.traced], strict=True),
                strict=True,
            )
        ]
        picks = tuple(zip(*[picks for picks, _ in found], strict=True))
        return picks or ((),) * len(self.traced), tuple(about for _, about in found)


def _structure(update: Update | None) -> Any:
    return None if update is None else update._replace(kept=())


def _places(definition: OutDef) -> list[str]:
    """Writes where each leaf of a result is in it."""
    leaves = jax.tree_util.tree_leaves_with_path(definition.numbered())
    return ["the result" + jax.tree_util.keystr(path) for path, _ in leaves]

"""Random cases: a program, the graph it runs on, and the transforms it goes through.

The law of all of them: the lifted program does what the plain one does, to the same objects; or,
where a transform forbids what the program does, it is an error that names the path, and nothing has
changed.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

import hypothesis.strategies as st
import jax.numpy as jnp

from tests import tape
from tests.isomorphism import assert_isomorphic, difference, reachable
from tests.programs import ALL_EFFECTS, Program, programs, watching
from tests.slices import Unjoinable, map_arrays, tiled
from tests.strategies import Blueprint, blueprints
from tests.transforms.lifts import Function, Result, copies
from tests.transforms.table import TRANSFORMS, Transform

# What may stand around a mapped function: no step of these makes an array.
SAFE_AROUND_TILES = frozenset({"read", "value", "static", "metadata", "record"})
HARMLESS = frozenset({"read", "output", "record"})
# How errors say where: by argument and path, or by the name of a record.
PLACE = re.compile(r"\b(args|carry|value)\[\d\]|'(sown|perturbed)\w*'")


# A step that acted: whether it is one of the inner program, and its effect.
Seen = tuple[bool, str]


@dataclasses.dataclass(frozen=True)
class Case:
    """One case. `around` runs before and after the inner of two transforms.

    With `between` there are two calls, and it changes the objects between them.
    """

    transforms: tuple[str, ...]
    blueprint: Blueprint
    program: Program
    around: Program | None = None
    between: Program | None = None

    @property
    def entries(self) -> list[Transform]:
        """The entries of the table, the outermost first."""
        return [TRANSFORMS[name] for name in self.transforms]

    def build(self) -> tuple[Any, ...]:
        """Returns new roots, with the axes that the mapped ones of the transforms want."""
        roots = self.blueprint.build()
        for entry in reversed(self.entries):
            if entry.tiled is not None:
                tiled(roots, entry.tiled)
        return roots

    @property
    def is_mapped(self) -> bool:
        """Whether one of the transforms maps all arrays."""
        return any(entry.tiled is not None for entry in self.entries)

    def lifted(self) -> Function:
        """Returns the program through all transforms."""
        f: Function = self.program
        for n, entry in reversed(list(enumerate(self.entries))):
            f = entry.lift(f if n else self._inside(f))
        return f

    def plain(self) -> Function:
        """Returns what that means."""
        f: Function = self.program
        for n, entry in reversed(list(enumerate(self.entries))):
            f = entry.plain(f if n else self._inside(f))
        return f

    def _inside(self, f: Function) -> Function:
        return f if self.around is None else functools.partial(_sandwich, self.around, f)

    def refused(self, acted: Iterable[Seen]) -> dict[Seen, bool]:
        """Returns which of the effects seen are an error, and whether they have to be."""
        found: dict[Seen, bool] = {}
        captured = False
        for n, entry in enumerate(self.entries):
            for inner, effect in acted:
                if n and not inner:
                    continue
                hidden = captured and entry.hides_records and effect == "record"
                if effect in entry.forbids:
                    found[inner, effect] = True
                elif effect in entry.may_refuse or hidden:
                    found.setdefault((inner, effect), False)
            captured |= entry.captures
        return found

    def stays(self, acted: Iterable[Seen]) -> bool:
        """Tells whether a failed call has to leave all as it was."""
        around = {effect for inner, effect in acted if not inner}
        return self.entries[0].atomic or around <= HARMLESS


def _sandwich(around: Program, f: Function, *roots: Any) -> Result:
    before, given = around(*roots)
    number, rest = f(*roots)
    after, more = around(*roots)
    return before + jnp.sum(number) + after, (number, rest, given, more)


def check(case: Case) -> None:
    """Runs a case both ways and compares; raises AssertionError if the law does not hold."""
    eager, lifted = case.build(), case.build()
    plain, run = case.plain(), case.lifted()
    if not _agree(case, plain, eager, run, lifted) or case.between is None:
        return
    case.between(*eager)
    case.between(*lifted)
    if not case.is_mapped or has_arrays(eager):  # else nothing is left to map
        _agree(case, plain, eager, run, lifted)


def _agree(
    case: Case, plain: Function, eager: tuple[Any, ...], run: Function, lifted: tuple[Any, ...]
) -> bool:
    """Makes one call both ways; tells whether it was done, and not refused."""
    nodes, kept = reachable(lifted), copies(lifted)
    expected: Any = None
    with tape.plain(), watching() as steps, contextlib.suppress(Unjoinable):
        expected = plain(*eager)
    acted = [(program is case.program, effect) for program, effect in steps]
    refused = case.refused(acted)
    try:
        found = run(*lifted)
    except (ValueError, TypeError, RuntimeError) as error:
        if not refused:
            raise
        _check_failure(error, kept, lifted, nodes if case.stays(acted) else None)
        return False
    assert expected is not None, "the steps differ in structure, and no error says so"
    assert_isomorphic((eager, expected), (lifted, found))
    assert not _has_to_be_refused(refused, acted, kept, eager), f"no error for {refused}"
    return True


def _check_failure(error: Exception, before: Any, after: Any, nodes: list[Any] | None) -> None:
    """Raises unless an error says where, and has left these nodes as they were."""
    assert PLACE.search(str(error)), f"no path in: {error}"
    if nodes is not None:
        assert_isomorphic(before, after)
        assert all(a is b for a, b in zip(nodes, reachable(after), strict=True))


def has_arrays(root: Any) -> bool:
    found: list[Any] = []
    map_arrays(root, lambda x: found.append(x) or x)
    return bool(found)


def _has_to_be_refused(
    refused: dict[Seen, bool], acted: Iterable[Seen], before: Any, after: Any
) -> bool:
    """Tells whether forbidden effects show in the graph, and nothing else can have made that."""
    forbidden = {seen for seen, must in refused.items() if must}
    values = any(effect == "value" for _, effect in forbidden)
    others = {seen[1] for seen in acted if seen not in forbidden}
    if not forbidden or not others <= HARMLESS | (set() if values else {"value"}):
        return False
    return difference(before, after, values=values) is not None


@st.composite
def cases(draw: st.DrawFn, transforms: tuple[str, ...]) -> Case:
    """Draws cases of one transform or two, the outermost first."""
    entries = [TRANSFORMS[name] for name in transforms]
    drawn = frozenset.intersection(*(entry.draws for entry in entries))
    allowed = drawn.difference(*(entry.forbids | entry.may_refuse for entry in entries))
    # Two of three programs are to run to their end.
    program = draw(_programs(draw(st.sampled_from([allowed, drawn, allowed])), 10))
    around = None
    if len(entries) == 2:
        effects = entries[0].draws & _safe(entries[1:])
        effects = draw(st.sampled_from([effects - entries[0].forbids, effects]))
        around = dataclasses.replace(draw(_programs(effects, 3)), name="_around")
    between = draw(_programs(_safe(entries), 2)) if draw(st.booleans()) else None
    blueprint = draw(_blueprints(draw(st.integers(1, 2))))
    return Case(transforms, blueprint, program, around, between)


def _safe(entries: Sequence[Transform]) -> frozenset[str]:
    """Returns the effects that leave all arrays mapped, if these transforms map them."""
    return ALL_EFFECTS if all(entry.tiled is None for entry in entries) else SAFE_AROUND_TILES


@functools.cache
def _programs(effects: frozenset[str], max_steps: int) -> st.SearchStrategy[Program]:
    # Of few effects each: of many, all programs would change the structure.
    chosen = st.frozensets(st.sampled_from(sorted(effects)), min_size=1, max_size=4)
    return chosen.flatmap(lambda some: _programs_of(some, max_steps))


@functools.cache
def _programs_of(effects: frozenset[str], max_steps: int) -> st.SearchStrategy[Program]:
    return programs(effects, max_steps=max_steps)


@functools.cache
def _blueprints(roots: int) -> st.SearchStrategy[Blueprint]:
    return blueprints(roots=roots, max_nodes=4)


def nestings(outer: str) -> list[tuple[str, ...]]:
    """Returns the transform alone, and with each other one inside of it that makes sense there."""
    inner = [name for name, entry in TRANSFORMS.items() if _fits(TRANSFORMS[outer], entry)]
    return [(outer,), *((outer, name) for name in inner)]


def _fits(outer: Transform, inner: Transform) -> bool:
    if inner.outermost or (inner is outer and inner.once):
        return False
    is_written = inner.writes and "value" in outer.forbids
    return outer.takes <= inner.has and not is_written

"""Families: several functions of the same arguments that cross together.

The branches of a `cond`, or the condition and the body of a loop, take the same arguments, so one
binding serves them all. These functions are given anew at each call, so families are kept here and
found again by what their functions do (see `likeness.py`): a new lambda that is like the one before
meets compiled code.

Objects that come with a function, that of a bound method or those in a partial, are arguments too,
before those of the call: what a method changes on its object is changed. Each member of a family
picks its own.
"""

import dataclasses
import inspect
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax

from nnxlite._core import scope
from nnxlite._core.trace import EAGER, OPEN_STATES, Level, current_level
from nnxlite._core.variable import Variable
from nnxlite._transforms.arguments import parameters, resolve
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.crossing import Crossing, Log
from nnxlite._transforms.differentiated import is_number
from nnxlite._transforms.lift import Lift, first_object
from nnxlite._transforms.likeness import Likeness, Weakly, likeness_of
from nnxlite._transforms.packing import Out

MAX_FAMILIES = 256
MAX_OF_ONE = 8
MAX_KEPT = 64


class Members(NamedTuple):
    """The functions of a family as they were given.

    Attributes:
      transform: The name of the transform in messages.
      roles: What each function is called there, such as `true_fun`.
      functions: Without what came with them.
      arguments: Of all of them, in order.
      picks: Per function, which of `arguments` come first, and by which name others come.
    """

    transform: str
    roles: tuple[str, ...]
    functions: tuple[Callable[..., Any], ...]
    arguments: tuple[Any, ...]
    picks: "tuple[_Picks, ...]"

    @classmethod
    def of(
        cls, transform: str, roles: Sequence[str], functions: Sequence[Callable[..., Any]]
    ) -> "Members":
        """Takes bound methods and partials apart.

        Raises:
          TypeError: One of the functions cannot be called.
        """
        plain, arguments, picks = [], [], []
        for role, function in zip(roles, functions, strict=True):
            if not callable(function):
                raise TypeError(
                    f"{transform} expected a function as {role}, found a {type(function).__name__}."
                )
            inner, first, named = resolve(function)
            start, middle = len(arguments), len(arguments) + len(first)
            arguments += [*first, *named.values()]
            by_name = tuple((name, middle + n) for n, name in enumerate(named))
            picks.append(_Picks(tuple(range(start, middle)), by_name))
            plain.append(inner)
        return cls(transform, tuple(roles), tuple(plain), tuple(arguments), tuple(picks))

    def bare(self, weak: Sequence[int] = ()) -> "Members":
        """Returns what may be kept: without arguments, and some functions held weakly."""
        functions = tuple(Weakly(f) if n in weak else f for n, f in enumerate(self.functions))
        return self._replace(functions=functions, arguments=(None,) * len(self.arguments))


class _Picks(NamedTuple):
    """Which of the arguments that come with the functions belong to one of them."""

    first: tuple[int, ...]
    named: tuple[tuple[str, int], ...]


@dataclasses.dataclass
class Member:
    """One function of a family, as its crossing asks for it."""

    fn: Callable[..., Any]
    method: str | None
    mode: Any
    title: str
    traces: Log


class Family(Lift):
    """Functions of the same arguments, with their caches.

    Args:
      members: The functions.
      count: The number of arguments of a call.
      mode: How arguments are flattened, as for `Lift`. In results a State is a value.
    """

    def __init__(self, members: Members, count: int, mode: Any) -> None:
        given = [name_of(function) for function in members.functions]
        fns = [
            _Picking(function, picks, count, members) if members.arguments else function
            for function, picks in zip(members.functions, members.picks, strict=True)
        ]
        super().__init__(fns[0], members.transform, mode=mode)
        self._title = f"{members.transform}({', '.join(given)})"
        self._members = [
            Member(fn, None, OPEN_STATES, f"{members.transform}({role}={name})", self.traces)
            for fn, role, name in zip(fns, members.roles, given, strict=True)
        ]

    @property
    def title(self) -> str:
        """How messages call the transformed functions."""
        return self._title

    @property
    def members(self) -> list[Member]:
        """The functions."""
        return self._members

    @property
    def titles(self) -> list[str]:
        """How messages call each of the functions."""
        return [member.title for member in self._members]

    @contextmanager
    def bound(self, args: tuple[Any, ...]) -> Iterator[tuple[Binding, list[Any], Level]]:
        """Binds the arguments, with the name of the receiver around what follows if nested."""
        level = current_level()
        receiver = None if level is EAGER else first_object(args, {})
        with scope.enter_transform(receiver) as nested:
            binding, leaves = self.bind(args, {}, None, nested)
            yield binding, leaves, level

    def rest(self, crossing: Crossing, leaves: Sequence[Any]) -> list[Any]:
        """Returns the arguments that are no objects.

        Raises:
          TypeError: One of them is no array either.
        """
        found = [leaves[position] for position in crossing.rest]
        for position, leaf in zip(crossing.rest, found, strict=True):
            if not is_number(leaf):
                raise TypeError(
                    f"{self.title}: {crossing.place(position)} is a {type(leaf).__name__}, neither "
                    "an array nor an object. Let the functions close over it."
                )
        return found

    def crossings(self, first: Crossing) -> list[Crossing]:
        """Returns the crossings of all members, beside that of the first."""
        found = first.kept.get("family")
        if found is None:
            found = first.kept["family"] = [self._beside(first, each) for each in self._members]
        return found

    def _beside(self, first: Crossing, member: Member) -> Crossing:
        beside = Crossing(
            member, first.graphdef, first.treedef, first.roots, first.statics, first.nested
        )
        # What one of them has read makes the traces of all stale.
        beside.kept, beside.foreign = first.kept, first.foreign
        return beside


class Compiled:
    """A function of arrays that is one call of compiled code, unless a trace runs anyway.

    Inside of a trace it stages what it does right there: one more `jit` would stand in the names of
    all operations.
    """

    def __init__(self, name: str, function: Callable[..., Out]) -> None:
        function.__name__ = function.__qualname__ = name
        self._function, self._jitted = function, jax.jit(function)

    def __call__(self, level: Level, *args: Any) -> Out:
        return (self._jitted if level is EAGER else self._function)(*args)


def jitted(member: Member, crossing: Crossing) -> Any:
    """Returns the pure function of a member, traced once for arguments of the same types."""

    def pure(values: list[Any], rest: list[Any], extras: Any) -> Out:
        return crossing.pure(values, rest, extras)

    pure.__name__ = pure.__qualname__ = name_of(member.fn)
    return jax.jit(pure, inline=True)


def kept_of(crossing: Crossing, key: Any, make: Callable[[], Any]) -> Any:
    """Returns what was made for a crossing under a key before, or makes it."""
    kept = crossing.kept.setdefault("made", OrderedDict())
    found = kept.get(key)
    if found is None:
        found = kept[key] = make()
        while len(kept) > MAX_KEPT:
            kept.popitem(last=False)
    return found


def value_of(scalar: Any) -> Any:
    """Returns the value of a Variable, or what is given."""
    return scalar.get_value() if isinstance(scalar, Variable) else scalar


def name_of(function: Callable[..., Any]) -> str:
    """Returns how messages call a function."""
    return getattr(function, "__name__", type(function).__name__)


class _Picking:
    """A member that takes its own of the arguments that come first, and those of the call."""

    def __init__(
        self, function: Callable[..., Any], picks: _Picks, count: int, members: Members
    ) -> None:
        self.__wrapped__ = function
        self.__name__ = name_of(function)
        self._first, self._named, self._start = picks.first, picks.named, len(members.arguments)
        known = parameters(function)[len(picks.first) :]
        known = known[:count] + [f"operand_{n}" for n in range(len(known), count)]
        kind = inspect.Parameter.POSITIONAL_ONLY
        self.__signature__ = inspect.Signature(
            [inspect.Parameter(name, kind) for name in _distinct([*_names(members), *known])]
        )

    def __call__(self, *args: Any) -> Any:
        first = [args[n] for n in self._first]
        named = {name: args[n] for name, n in self._named}
        return self.__wrapped__(*first, *args[self._start :], **named)


def _names(members: Members) -> list[str]:
    """Names the arguments that come with the functions, by their parameters."""
    names = []
    for function, picks in zip(members.functions, members.picks, strict=True):
        known = parameters(function)[: len(picks.first)]
        names += known + [f"operand_{n}" for n in range(len(known), len(picks.first))]
        names += [name for name, _ in picks.named]
    return names


def _distinct(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        number, free = 1, name
        while free in found:
            number += 1
            free = f"{name}_{number}"
        found.append(free)
    return found


# The families that are kept.

_EXACT: OrderedDict[Any, Family] = OrderedDict()
"""By what functions do that can be told by it."""

_OWN: "weakref.WeakKeyDictionary[Any, OrderedDict[Any, Family]]" = weakref.WeakKeyDictionary()
"""By the first function that is like itself only; it dies with that."""

_LOCK = threading.Lock()


def family_of(members: Members, count: int, mode: Any = True) -> Family:
    """Returns the family of these functions: the one that was there before, or a new one.

    Args:
      members: The functions.
      count: The number of arguments of a call, without those that come with the functions.
      mode: How arguments are flattened; `OPEN_STATES` where a State is a value.
    """
    likes = [likeness_of(function) for function in members.functions]
    own = [n for n, like in enumerate(likes) if not like.exact]
    key = (members.transform, count, members.picks, tuple(like.key for like in likes))
    if not own:
        return _kept(_EXACT, key, MAX_FAMILIES, lambda: Family(members.bare(), count, mode))
    if not _is_keepable(members, likes, own):
        return Family(members, count, mode)
    with _LOCK:
        table = _OWN.setdefault(members.functions[own[0]], OrderedDict())
        while len(_OWN) > MAX_FAMILIES:
            _OWN.pop(next(iter(_OWN)))
    refs = [weakref.ref(members.functions[n]) for n in own]
    return _kept(table, (key, *refs), MAX_OF_ONE, lambda: Family(members.bare(own), count, mode))


def _is_keepable(members: Members, likes: Sequence[Likeness], own: Sequence[int]) -> bool:
    """Tells whether functions that are like themselves only may be found again.

    What an object holds that a function closes over may change from call to call, and so may what
    belongs to a trace.
    """
    if any(likes[n].holds_object for n in own) or current_level() is not EAGER:
        return False
    try:
        for n in own:
            hash(weakref.ref(members.functions[n]))
    except TypeError:
        return False
    return True


def _kept(
    table: OrderedDict[Any, Family], key: Any, most: int, make: Callable[[], Family]
) -> Family:
    with _LOCK:
        found = table.get(key)
        if found is None:
            found = table[key] = make()
        table.move_to_end(key)
        while len(table) > most:
            table.popitem(last=False)
        return found

"""Arguments before they cross: callables taken apart, and arguments chosen by number or name."""

import functools
import inspect
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from nnxlite._core.graph import OBJECT, kind_of
from nnxlite._core.statics import static


def resolve(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Takes bound methods, partials and callable objects apart.

    Returns:
      A function, and the arguments that come before those of a call, so that the state of objects
      among them is threaded like that of any argument.
    """
    if isinstance(fn, functools.partial):
        function, args, kwargs = resolve(fn.func)
        return function, (*args, *fn.args), {**kwargs, **fn.keywords}
    if isinstance(fn, types.MethodType) and kind_of(fn.__self__) == OBJECT:
        return fn.__func__, (fn.__self__,), {}
    if kind_of(fn) == OBJECT:
        return type(fn).__call__, (fn,), {}  # type: ignore[operator]
    return fn, (), {}


def numbers(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Returns `*_argnums` as a tuple."""
    return () if given is None else (given,) if isinstance(given, int) else tuple(given)


def names(given: str | Iterable[str] | None) -> tuple[str, ...]:
    """Returns `*_argnames` as a tuple."""
    return () if given is None else (given,) if isinstance(given, str) else tuple(given)


def parameters(fn: Callable[..., Any]) -> list[str]:
    """Returns the names of the parameters that may be given by position."""
    try:
        found = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):  # some callables of C have no signature
        return []
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [parameter.name for parameter in found if parameter.kind in kinds]


def by_position(
    args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Moves keyword arguments to their positions, as far as these follow on each other."""
    if not kwargs:
        return args, kwargs
    positional, left = list(args), dict(kwargs)
    for name in known[len(args) :]:
        if name not in left:
            break
        positional.append(left.pop(name))
    return tuple(positional), left


class Chosen:
    """Arguments chosen by number or by name; each way means the other too.

    Args:
      known: The names of the function's positional parameters.
      given: Positions; negative ones count from the last parameter.
      given_names: Names.
      title: What is chosen for, for messages.
    """

    def __init__(
        self, known: Sequence[str], given: tuple[int, ...], given_names: tuple[str, ...], title: str
    ) -> None:
        positions = set()
        for number in given:
            if number < 0 and not -len(known) <= number:
                raise ValueError(
                    f"{title}: argument number {number} is out of range: the function has "
                    f"{len(known)} positional parameters ({', '.join(known) or 'none'})."
                )
            positions.add(number + len(known) if number < 0 else number)
        self.positions = positions | {n for n, name in enumerate(known) if name in given_names}
        self.names = set(given_names) | {known[n] for n in positions if n < len(known)}

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)


class Statics:
    """The static arguments of one call: by position and by keyword, keyed by typed value."""

    __slots__ = ("key", "named", "positional")

    def __init__(self, positional: dict[int, Any], named: dict[str, Any]) -> None:
        self.positional, self.named = positional, named
        self.key = (
            tuple((n, static(x, f"static argument {n}")) for n, x in positional.items()),
            tuple((k, static(x, f"static argument {k!r}")) for k, x in sorted(named.items())),
        )

    @classmethod
    def take(
        cls, args: tuple[Any, ...], kwargs: dict[str, Any], chosen: Chosen
    ) -> "tuple[tuple[Any, ...], dict[str, Any], Statics]":
        """Splits arguments into those that are dynamic and those that are static."""
        positional = {n: x for n, x in enumerate(args) if n in chosen.positions}
        named = {k: x for k, x in kwargs.items() if k in chosen.names}
        rest = tuple(x for n, x in enumerate(args) if n not in positional)
        return rest, {k: x for k, x in kwargs.items() if k not in named}, cls(positional, named)

    def joined(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Any], dict[str, Any]]:
        """Puts the static arguments back among the others."""
        rest = iter(args)
        size = len(args) + len(self.positional)
        return [self.positional[n] if n in self.positional else next(rest) for n in range(size)], {
            **kwargs,
            **self.named,
        }

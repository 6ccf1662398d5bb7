"""Arguments before they cross: callables taken apart, and arguments chosen by number or name."""

import functools
import inspect
import types
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import jax

from nnxlite._core.errors import StaticValueError, format_path
from nnxlite._core.iterate import iter_graph
from nnxlite._core.kinds import ARRAY, OBJECT, kind_of
from nnxlite._core.statics import static
from nnxlite._core.trace import Opaque, opaque_nodes

_BY_POSITION = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


class Bound(functools.partial[Any]):
    """A transformed function with its first arguments, such as a method of an object.

    A partial, as its calls and its making then cost no Python code.
    """

    @property
    def __func__(self) -> Callable[..., Any]:
        return self.func

    @property
    def __self__(self) -> Any:
        return self.args[0] if self.args else None

    def __getattr__(self, name: str) -> Any:
        if name in ("__wrapped__", "__signature__", "func"):  # these would have `self` in them
            raise AttributeError(name)
        return getattr(self.func, name)


def resolve(fn: Callable[..., Any]) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Takes bound methods, partials and callable objects apart.

    Arguments of a partial that hold neither objects nor arrays are constants, as they are for
    JAX's transforms; they stay with the function.

    Returns:
      A function, and the arguments that come before those of a call, so that the state of objects
      among them is threaded like that of any argument.
    """
    if isinstance(fn, functools.partial):
        function, args, kwargs = resolve(fn.func)
        return _without_constants(function, (*args, *fn.args), {**kwargs, **fn.keywords})
    if isinstance(fn, types.MethodType) and kind_of(fn.__self__) == OBJECT:
        return fn.__func__, (fn.__self__,), {}
    if kind_of(fn) == OBJECT:
        return type(fn).__call__, (fn,), {}
    return fn, (), {}


def _without_constants(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    positional = {n: arg for n, arg in enumerate(args) if _is_constant(arg)}
    named = {name: arg for name, arg in kwargs.items() if _is_constant(arg)}
    if not positional and not named:
        return function, args, kwargs
    return (
        Fixed(function, positional, named),
        tuple(arg for n, arg in enumerate(args) if n not in positional),
        {name: arg for name, arg in kwargs.items() if name not in named},
    )


def _is_constant(value: Any) -> bool:
    with opaque_nodes():
        leaves = jax.tree.leaves(value)
    return not any(type(leaf) is Opaque or kind_of(leaf) == ARRAY for leaf in leaves)


class Fixed:
    """A function with constants for some arguments; equal to others with equal constants."""

    def __init__(
        self, function: Callable[..., Any], positional: dict[int, Any], named: dict[str, Any]
    ) -> None:
        functools.update_wrapper(self, function)
        self.function, self.positional, self.named = function, positional, named
        self._key = (
            function,
            tuple((n, _constant_key(x)) for n, x in positional.items()),
            frozenset((name, _constant_key(x)) for name, x in named.items()),
        )
        try:
            signature = inspect.signature(functools.partial(function, **named))
        except (TypeError, ValueError):  # some callables of C have no signature
            return
        left = [
            parameter
            for n, parameter in enumerate(signature.parameters.values())
            if n not in positional or parameter.kind not in _BY_POSITION
        ]
        self.__signature__ = signature.replace(parameters=left)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        rest = iter(args)
        size = len(args) + len(self.positional)
        joined = [self.positional[n] if n in self.positional else next(rest) for n in range(size)]
        return self.function(*joined, **{**self.named, **kwargs})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Fixed) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def _constant_key(value: Any) -> Hashable:
    try:
        return static(value)
    except StaticValueError:  # it stands for itself, and lives as long as the key does
        return id(value)


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
    return [parameter.name for parameter in found if parameter.kind in _BY_POSITION]


def closed_over(fn: Callable[..., Any]) -> list[tuple[str, Any]]:
    """Returns name and value of what a function can reach beside its arguments.

    What the functions among these reach is there too: those it closes over, and globals of the
    same file.
    """
    found: list[tuple[str, Any]] = []
    seen: set[int] = set()
    functions = [inspect.unwrap(fn)]
    for function in functions:
        if type(function) is not types.FunctionType or id(function) in seen:
            continue
        seen.add(id(function))
        own, shared = _enclosed(function), _globals_of(function)
        found += [*own.items(), *shared.items()]
        functions += [inspect.unwrap(x) for x in own.values() if callable(x)]
        functions += [x for x in shared.values() if _file_of(x) == function.__code__.co_filename]
    return found


def _file_of(fn: Any) -> str | None:
    return fn.__code__.co_filename if type(fn) is types.FunctionType else None


def _enclosed(fn: types.FunctionType) -> dict[str, Any]:
    code, defaults = fn.__code__, fn.__defaults__ or ()
    cells = zip(code.co_freevars, fn.__closure__ or (), strict=True)
    found = {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    first = code.co_argcount - len(defaults)
    found |= zip(code.co_varnames[first : code.co_argcount], defaults, strict=True)
    return found | (fn.__kwdefaults__ or {})


def _globals_of(fn: types.FunctionType) -> dict[str, Any]:
    values = fn.__globals__
    return {name: values[name] for name in sorted(_global_names(fn.__code__)) if name in values}


def _global_names(code: types.CodeType) -> set[str]:
    inner = (x for x in code.co_consts if isinstance(x, types.CodeType))
    return set(code.co_names).union(*map(_global_names, inner))


def paths_in_closure(fn: Callable[..., Any], nodes: Iterable[Any]) -> list[str]:
    """Writes where a function reaches these objects or Variables beside its arguments."""
    wanted = {id(node) for node in nodes}
    return [
        format_path(path, name)
        for name, value in closed_over(fn)
        for path, x in iter_graph(value)
        if id(x) in wanted
    ]


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
        positions: set[int] = set()
        for number in given:
            if number < 0 and not -len(known) <= number:
                raise ValueError(
                    f"{title}: argument number {number} is out of range: the function has "
                    f"{len(known)} positional parameters ({', '.join(known) or 'none'})."
                )
            positions.add(number + len(known) if number < 0 else number)
        self.title = title
        self.positions = positions | {n for n, name in enumerate(known) if name in given_names}
        self.names = set(given_names) | {known[n] for n in positions if n < len(known)}

    def __bool__(self) -> bool:
        return bool(self.positions or self.names)

    def check(self, fn: Callable[..., Any], option: str) -> None:
        """Raises if `fn` does not have these parameters; `option` is what they were given for."""
        try:
            found = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):  # some callables of C have no signature
            return
        kinds = {parameter.kind for parameter in found}
        known = [parameter.name for parameter in found]
        unknown: list[Any] = []
        if inspect.Parameter.VAR_KEYWORD not in kinds:
            unknown += sorted(self.names.difference(known))
        if inspect.Parameter.VAR_POSITIONAL not in kinds:
            unknown += sorted(n for n in self.positions if n >= len(known))
        if unknown:
            raise ValueError(
                f"{self.title}: {option} has {', '.join(map(repr, unknown))}, but the parameters "
                f"of the function are {', '.join(known) or 'none'}."
            )


class Statics:
    """The static arguments of one call: by position and by keyword, keyed by typed value."""

    __slots__ = ("key", "named", "positional")

    def __init__(self, positional: dict[int, Any], named: dict[str, Any]) -> None:
        fixed = {n: static(x, f"static argument {n}") for n, x in positional.items()}
        fixed_named = {k: static(x, f"static argument {k!r}") for k, x in sorted(named.items())}
        self.key = (tuple(fixed.items()), tuple(fixed_named.items()))
        # The values that the key stands for: a list may change after this call.
        self.positional = {n: x.value for n, x in fixed.items()}
        self.named = {k: x.value for k, x in fixed_named.items()}

    @classmethod
    def take(
        cls,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chosen: Chosen,
        also: Callable[[Any], bool] | None = None,
    ) -> "tuple[tuple[Any, ...], dict[str, Any], Statics | None]":
        """Splits arguments into those that are dynamic and those that are static, if any are.

        Keyword arguments for which `also` says so are static too.
        """
        positional = {n: x for n, x in enumerate(args) if n in chosen.positions}
        named = {
            k: x for k, x in kwargs.items() if k in chosen.names or (also is not None and also(x))
        }
        if not positional and not named:
            return args, kwargs, None
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

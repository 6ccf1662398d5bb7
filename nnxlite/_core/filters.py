"""Filters: short ways to say which leaves of an object graph are meant.

A *filter* is anything `to_predicate` understands; a *predicate* is a function of a leaf's path (a
tuple of attribute names, keys and indices) and its value (a Variable, or a bare array) that says
yes or no. Lists of filters, as `split` takes them, are read in order: each leaf goes to the first
that matches.

All filters of this file compare and hash by what they say, so that they may be parts of cache keys.
"""

import types
import typing
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from nnxlite._core.errors import Path, StructureError
from nnxlite._core.variable import Variable

Predicate = Callable[[Path, typing.Any], bool]

if typing.TYPE_CHECKING:
    Filter: typing.TypeAlias = (
        type
        | types.UnionType
        | str
        | bool
        | types.EllipsisType
        | Predicate
        | tuple["Filter", ...]
        | list["Filter"]
        | None
    )
else:
    Filter = typing.Any  # written out above: the recursive union cannot be built at run time


def to_predicate(filter: Filter) -> Predicate:
    """Returns the predicate that `filter` stands for.

    Args:
      filter: A Variable type or a union of types (an instance matches), `...` or True (everything),
        None or False (nothing), a string (Variables whose metadata `tag` is that string), a tuple
        or list (any of its filters), or a callable of path and value, taken as it is.

    Raises:
      TypeError: `filter` is none of these.

    Example:
      >>> to_predicate((nnx.Param, "dropout"))
      Any(OfType(Param), WithTag('dropout'))
      >>> to_predicate(nnx.Param)(("kernel",), nnx.Param(jnp.ones(3)))
      True
    """
    if filter is ... or filter is True:
        return Everything()
    if filter is None or filter is False:
        return Nothing()
    if isinstance(filter, str):
        return WithTag(filter)
    if isinstance(filter, type | types.UnionType):
        return OfType(filter)
    if isinstance(filter, tuple | list):
        return Any(*filter)
    origin = typing.get_origin(filter)  # Param[jax.Array] stands for Param
    if isinstance(origin, type):
        return OfType(origin)
    if getattr(type(filter), "__nnx_node__", False) or not callable(filter):
        raise TypeError(
            f"Cannot use {_short(filter)} of type {type(filter).__name__} as a filter. Expected a "
            "Variable type such as nnx.Param, `...`, True, False, None, a tag (str), a tuple or "
            "list of filters, or a callable of (path, value)."
        )
    return filter


def filters_to_predicates(filters: Sequence[Filter]) -> tuple[Predicate, ...]:
    """Returns the predicates of `filters`, of which only the last ones may take everything.

    Raises:
      StructureError: A filter after a `...` (or True) could never match.
    """
    predicates = tuple(to_predicate(filter) for filter in filters)
    for i, predicate in enumerate(predicates):
        rest = predicates[i + 1 :]
        if predicate == Everything() and any(after != Everything() for after in rest):
            raise StructureError(
                f"Filter {i} of {len(filters)} takes everything, so nothing is left for "
                f"{', '.join(map(repr, rest))}. Put `...` (or True) last."
            )
    return predicates


@dataclass(frozen=True, repr=False)
class Everything:
    """Matches every leaf, as `...` and True do."""

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells that every leaf matches."""
        return True

    def __repr__(self) -> str:
        return "Everything()"


@dataclass(frozen=True, repr=False)
class Nothing:
    """Matches no leaf, as None and False do."""

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells that no leaf matches."""
        return False

    def __repr__(self) -> str:
        return "Nothing()"


@dataclass(frozen=True, repr=False)
class OfType:
    """Matches instances of `type`, as the bare type does."""

    type: type | types.UnionType

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells whether the value is an instance of the type."""
        return isinstance(value, self.type)

    def __repr__(self) -> str:
        return f"OfType({getattr(self.type, '__name__', self.type)})"


@dataclass(frozen=True, repr=False)
class WithTag:
    """Matches values whose `tag` is the given one, as the bare string does.

    For a Variable this is its metadata `tag`; the Variables of a random stream carry its name.
    """

    tag: str

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells whether the value has the tag."""
        if isinstance(value, Variable) and not hasattr(type(value), "tag"):
            # Not getattr: it would fall through to the value, and count as reading it.
            return value._meta.mapping.get("tag") == self.tag
        return getattr(value, "tag", None) == self.tag

    def __repr__(self) -> str:
        return f"WithTag({self.tag!r})"


@dataclass(frozen=True, repr=False)
class PathContains:
    """Matches leaves below an attribute, dictionary key or list index.

    Args:
      key: The name, key or index looked for among the parts of the path.
      exact: If False, a part matches that merely contains the text of `key`.

    Example:
      >>> PathContains("encoder")(("encoder", "layers", 0, "kernel"), None)
      True
      >>> PathContains("lora", exact=False)(("attn", "lora_a"), None)
      True
    """

    key: Hashable
    exact: bool = True

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells whether the path has the key."""
        if self.exact:
            return self.key in path
        return any(str(self.key) in str(part) for part in path)

    def __repr__(self) -> str:
        return f"PathContains({self.key!r}{'' if self.exact else ', exact=False'})"


@dataclass(frozen=True, init=False, repr=False)
class PathIn:
    """Matches the leaves at exactly the given paths.

    Example:
      >>> PathIn(("head", "bias"), ("stem", "bias"))(("head", "bias"), None)
      True
    """

    paths: frozenset[Path]

    def __init__(self, *paths: Path) -> None:
        object.__setattr__(self, "paths", frozenset(tuple(path) for path in paths))

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells whether the path is one of the paths."""
        return path in self.paths

    def __repr__(self) -> str:
        return f"PathIn({', '.join(sorted(map(repr, self.paths)))})"


@dataclass(frozen=True, init=False, repr=False)
class Any:
    """Matches what at least one of the filters matches, as a tuple of them does."""

    predicates: tuple[Predicate, ...]

    def __init__(self, *filters: Filter) -> None:
        object.__setattr__(self, "predicates", tuple(map(to_predicate, filters)))

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells whether one of the filters matches."""
        return any(predicate(path, value) for predicate in self.predicates)

    def __repr__(self) -> str:
        return f"Any({', '.join(map(repr, self.predicates))})"


@dataclass(frozen=True, init=False, repr=False)
class All:
    """Matches what every one of the filters matches.

    Example:
      >>> All(nnx.Param, PathContains("encoder"))
      All(OfType(Param), PathContains('encoder'))
    """

    predicates: tuple[Predicate, ...]

    def __init__(self, *filters: Filter) -> None:
        object.__setattr__(self, "predicates", tuple(map(to_predicate, filters)))

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells whether all of the filters match."""
        return all(predicate(path, value) for predicate in self.predicates)

    def __repr__(self) -> str:
        return f"All({', '.join(map(repr, self.predicates))})"


@dataclass(frozen=True, init=False, repr=False)
class Not:
    """Matches what the filter does not match."""

    predicate: Predicate

    def __init__(self, filter: Filter, /) -> None:
        object.__setattr__(self, "predicate", to_predicate(filter))

    def __call__(self, path: Path, value: typing.Any) -> bool:
        """Tells whether the filter does not match."""
        return not self.predicate(path, value)

    def __repr__(self) -> str:
        return f"Not({self.predicate!r})"


def is_structural(predicate: Predicate) -> bool:
    """Tells whether `predicate` asks for path, kind and metadata only, never for a value.

    Of such a filter the answer holds as long as the structure of the object does. What a callable
    of the user asks for cannot be known.

    Example:
      >>> is_structural(Not(nnx.Param)), is_structural(lambda path, value: value.ndim > 1)
      (True, False)
    """
    kind = type(predicate)
    if kind in (Any, All):
        return all(is_structural(part) for part in predicate.predicates)  # type: ignore[attr-defined]
    if kind is Not:
        return is_structural(predicate.predicate)  # type: ignore[attr-defined]
    return kind in (Everything, Nothing, OfType, WithTag, PathContains, PathIn)


def _short(value: typing.Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else f"{text[: length - 3]}..."

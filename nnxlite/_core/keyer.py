"""The walk through a static value that makes its typed key.

A *rule* keys the values of one class; the `Keyer` finds the rule for each part of a value and
keeps track of where it is. The rules are in `keys.py`, those for functions in `function_keys.py`.
"""

from collections.abc import Callable, Hashable, Mapping
from typing import Any, TypeAlias

from nnxlite._core.errors import StaticValueError

_WAY_OUT = (
    "Static values are compared by value: use numbers, strings, tuples, lists, dicts, sets, "
    "functions, enums, frozen dataclasses or other hashable objects, or hold arrays in a Variable."
)


class Keyer:
    """Makes one key; knows where in the value it is and what it met on the way.

    Attributes:
      mutable: Whether a list, dict or set was met.
      rebindable: Whether a function was met that was keyed by its cells, defaults or attributes.
      holder: The function whose contents are being keyed, or None. There, objects that cannot be
        compared by value are compared by identity.
    """

    mutable = False
    rebindable = False
    holder: Any = None

    def __init__(self, where: object, rules: Mapping[type, "Rule"]) -> None:
        self.where = where
        self.rules = rules
        self.path: list[tuple[str, Any]] = []
        self.open: dict[int, int] = {}  # id of a container or function under way -> its depth

    def key(self, value: Any) -> Hashable:
        """Keys a value by the rule for its class."""
        cls = type(value)
        if cls is str or value is None:
            return value
        return self.rules[cls](self, value)

    def at(self, step: str, name: Any, value: Any) -> Hashable:
        """Keys a part of the value; `step.format(name)` says in messages which part it is."""
        cls = type(value)
        if cls is str or value is None:
            return value
        if cls is int:
            return (cls, value)
        self.path.append((step, name))
        key = self.key(value)
        self.path.pop()
        return key

    def items(self, values: Any) -> tuple[Hashable, ...]:
        """Keys each element of a sequence."""
        return tuple([self.at("[{}]", i, value) for i, value in enumerate(values)])

    def enter(self, value: Any) -> None:
        """Notes that a container is under way, which must not be met again inside of itself."""
        if id(value) in self.open:
            raise self.error(f"is a {type(value).__name__} that contains itself")
        self.open[id(value)] = len(self.open)

    def leave(self, value: Any) -> None:
        """Notes that a container is done."""
        del self.open[id(value)]

    def error(self, found: str, way_out: str = _WAY_OUT) -> StaticValueError:
        """Returns the error that says what was found, and where."""
        part = "".join([step.format(name) for step, name in self.path])
        return StaticValueError(f"{self.where}{part} {found}. {way_out}")


Rule: TypeAlias = Callable[[Keyer, Any], Hashable]


class Same:
    """A part of a key that is equal only to the same object, which it holds."""

    __slots__ = ("obj",)

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def __eq__(self, other: object) -> bool:
        return type(other) is Same and other.obj is self.obj

    def __hash__(self) -> int:
        return id(self.obj)

    def __repr__(self) -> str:
        return f"Same({type(self.obj).__name__})"


def single(value: Any) -> Hashable:
    """Keys a value by its identity; where that is what `==` compares, by the value itself."""
    cls = type(value)
    if cls.__eq__ is object.__eq__ and cls.__hash__ is object.__hash__:
        return value
    return Same(value)


def is_node(value: Any) -> bool:
    """Tells whether `value` is an object of the graph or a Variable."""
    return getattr(type(value), "__nnx_node__", False) is True

"""List, Dict and Sequential: containers that are Modules.

Plain Python lists and dicts work as attributes just as well. These are for programs that want a
container with versions of its own (an append is noticed when it happens, not at the next use), that
is a Module, or that exists under flax's name. Items live in the instance's `__dict__` under their
own keys, ints for a List; there is room for nothing else.
"""

import inspect
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, Generic, TypeVar, overload

from jax.tree_util import DictKey

from nnxlite._core.errors import StructureError
from nnxlite._core.graph import mark_of
from nnxlite._core.kinds import STATIC, kind_of
from nnxlite._core.marks import Marked, check_mark, unmarked
from nnxlite._core.module import Module, Pytree
from nnxlite._core.trace import check_writable

A = TypeVar("A")


class _Items(Module):
    """What List and Dict have in common: items by key in `__dict__`."""

    _node_by_item = True

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if cls.__module__ == __name__:
            Pytree.__init_subclass__.__func__(cls, **kwargs)
        else:
            super().__init_subclass__(**kwargs)

    def _set_item(self, key: Any, value: Any) -> None:
        check_writable(self, f"set item {key!r} of {type(self).__name__}")
        value, mark = unmarked(value)
        if mark or self._marks:
            check_mark(self, f"item {key!r}", value, mark or mark_of(self, key))
        self._node_set(key, value, mark)

    def __len__(self) -> int:
        return len(self.__dict__)

    def __dir__(self) -> list[str]:
        return [*dir(type(self)), *(key for key in self.__dict__ if type(key) is str)]

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class List(_Items, MutableSequence[A], Generic[A]):
    """A list that is a Module; indexed by ints, in numeric order.

    `in`, `index`, `count` and `remove` find objects, Variables and arrays by identity.

    Example:
      >>> layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(3)])
      >>> len(layers), layers[-1].kernel.shape
      (3, (2, 2))
    """

    def __init__(self, items: Iterable[A] | None = None, /) -> None:
        for item in () if items is None else items:
            self._set_item(len(self), item)

    @overload
    def __getitem__(self, index: int) -> A: ...
    @overload
    def __getitem__(self, index: slice) -> list[A]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._node_items()[i] for i in range(*index.indices(len(self)))]
        return self._node_items()[self._index(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            items = self._marked_items()
            items[index] = value
            self._replace(items)
        else:
            self._set_item(self._index(index), value)

    def __delitem__(self, index: Any) -> None:
        items = self._marked_items()
        del items[index if isinstance(index, slice) else self._index(index)]
        self._replace(items)

    def insert(self, index: int, value: A) -> None:
        """Inserts a value before `index`."""
        if index >= len(self):
            self._set_item(len(self), value)
            return
        items = self._marked_items()
        items.insert(index, value)
        self._replace(items)

    def index(self, value: Any, start: int = 0, stop: int | None = None) -> int:
        """Returns the first index of a value.

        Raises:
          ValueError: The value is not in the list.
        """
        for number in range(*slice(start, stop).indices(len(self))):
            if _is_same(self[number], value):
                return number
        raise ValueError(f"{type(value).__name__} is not in the List of {len(self)} items")

    def count(self, value: Any) -> int:
        """Returns how often a value is in the list."""
        return sum(_is_same(item, value) for item in self)

    def __contains__(self, value: object) -> bool:
        return any(_is_same(item, value) for item in self)

    def __iter__(self) -> Iterator[A]:
        index = 0
        while index < len(self):  # as with a list, items may be added on the way
            yield self._node_items()[index]
            index += 1

    def __add__(self, other: Iterable[A]) -> "List[A]":
        return List([*self, *other])

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(
            f"A List holds items only: {name!r} cannot be set on it. Use a Module with an "
            "attribute for the items."
        )

    def _index(self, index: Any) -> int:
        number, size = operator.index(index), len(self)
        if not -size <= number < size:
            raise IndexError(f"List of {size} items has no item {number}")
        return number % size

    def _marked_items(self) -> list[Any]:
        """Returns the items, those that something was said of as they were assigned."""
        marks = self._marks or {}
        return [
            Marked(item, marks[key]) if key in marks else item  # type: ignore[arg-type]
            for key, item in enumerate(self)
        ]

    def _replace(self, items: list[Any]) -> None:
        check_writable(self, f"change the items of {type(self).__name__}")
        pairs = [unmarked(item) for item in items]
        self._node_remove(tuple(self.__dict__))
        for key, (item, mark) in enumerate(pairs):
            self._node_set(key, item, mark)

    def _node_remove(self, keys: Iterable[Any]) -> None:
        gone = set(keys)
        kept = [item for key, item in enumerate(self._marked_items()) if key not in gone]
        super()._node_remove(tuple(self.__dict__))
        for key, item in enumerate(kept):
            self._node_set(key, *unmarked(item))


def _is_same(item: Any, value: Any) -> bool:
    if item is value:
        return True
    return kind_of(item) == kind_of(value) == STATIC and bool(item == value)


class Dict(_Items, MutableMapping[Any, A], Generic[A]):
    """A dict that is a Module; items with names are attributes too.

    Keys are all str or all int.

    Example:
      >>> heads = nnx.Dict(a=nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
      >>> heads["a"] is heads.a, list(heads)
      (True, ['a'])
    """

    _int_entry = DictKey

    def __init__(
        self, items: Mapping[Any, A] | Iterable[tuple[Any, A]] = (), /, **named: A
    ) -> None:
        for key, item in dict(items, **named).items():
            self[key] = item

    def __getitem__(self, key: Any) -> A:
        return self.__dict__[key]

    def __setitem__(self, key: Any, value: A) -> None:
        if type(key) not in (str, int):
            raise StructureError(
                f"Dict key {key!r} is a {type(key).__name__}. Keys become parts of paths: they "
                "must be str or int."
            )
        if self.__dict__ and type(next(iter(self.__dict__))) is not type(key):
            raise StructureError(
                f"Dict key {key!r} is a {type(key).__name__}, where other keys are not. The keys "
                "of one Dict must be all str or all int."
            )
        self._set_item(key, value)

    def __delitem__(self, key: Any) -> None:
        check_writable(self, f"delete item {key!r} of {type(self).__name__}")
        self.__dict__[key]  # raises KeyError before anything is changed
        self._node_remove((key,))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "__orig_class__":  # `typing` leaves it on what `Dict[int]()` makes, if it can
            raise AttributeError(name)
        self[name] = value

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__)

    def __contains__(self, key: object) -> bool:
        return key in self.__dict__


class Sequential(Module):
    """Applies layers one after the other.

    Args:
      *layers: Modules or functions. A tuple that one returns is spread over the arguments of the
        next, a dict over its keyword arguments.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), jax.nn.relu)
      >>> model(jnp.ones((1, 2))).shape
      (1, 3)
    """

    def __init__(self, *layers: Callable[..., Any]) -> None:
        self.layers = List(layers)

    def __iter__(self) -> Iterator[Callable[..., Any]]:
        return iter(self.layers)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the last layer returns; without layers, the arguments.

        Args:
          *args: For the first layer.
          **kwargs: For every layer that has parameters of these names, such as `rngs`.
        """
        if not len(self.layers):
            return args[0] if len(args) == 1 else args or kwargs or None
        output: Any = args
        for index, layer in enumerate(self.layers):
            if not callable(layer):
                raise TypeError(
                    f"layers[{index}] of Sequential is a {type(layer).__name__}, which cannot be "
                    "called. Expected a Module or a function."
                )
            named: dict[str, Any] = {}
            if isinstance(output, tuple):
                args = output
            elif isinstance(output, dict):
                args, named = (), output
            else:
                args = (output,)
            common = _accepted(layer, len(args), kwargs) if kwargs else {}
            output = layer(*args, **named, **common)
        return output


def _accepted(layer: Callable[..., Any], taken: int, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments that a layer has parameters for, besides `taken` positions."""
    try:
        parameters = list(inspect.signature(layer).parameters.values())
    except (TypeError, ValueError):  # some functions written in C have no signature
        return {}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return kwargs
    by_position = [
        p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD or p.kind is p.POSITIONAL_ONLY
    ]
    free = {
        p.name
        for p in parameters
        if p not in by_position[:taken] and p.kind is not p.POSITIONAL_ONLY
    }
    return {name: value for name, value in kwargs.items() if name in free}

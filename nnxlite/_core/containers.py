"""List, Dict and Sequential: containers that are objects.

Plain Python lists and dicts work as attributes just as well. These two are for programs that want
a container with versions of its own (an append is noticed when it happens, not at the next use), that
is a Module, or that exists under flax's name. Items live in the instance's `__dict__` under their
own keys, ints for a List.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, MutableSequence
from typing import Any, Generic, TypeVar, overload

from jax.tree_util import DictKey, SequenceKey

from nnxlite._core.errors import StructureError
from nnxlite._core.marks import Marked
from nnxlite._core.module import Module, Pytree
from nnxlite._core.trace import check_writable
from nnxlite._core.versions import structure_changed

A = TypeVar("A")


class _Items(Pytree):
    """What List and Dict have in common: items by key in `__dict__`."""

    _node_by_item = True

    def _set_item(self, key: Any, value: Any) -> None:
        self._check("set", key)
        mark = None
        if type(value) is Marked:
            value, mark = value.value, value.mark
        self.__dict__[key] = value
        if mark is not None:
            self._marks = {**(self._marks or {}), key: mark}
        structure_changed(self)

    def _check(self, verb: str, key: Any) -> None:
        check_writable(self, f"{verb} item {key!r} of {type(self).__name__}")

    def __len__(self) -> int:
        return len(self.__dict__)

    def __dir__(self) -> list[str]:
        return [*object.__dir__(type(self)), *(key for key in self.__dict__ if type(key) is str)]


class List(_Items, MutableSequence[A], Generic[A]):
    """A list that is an object; indexed by ints, in numeric order.

    Example:
      >>> layers = nnx.List([nnx.Linear(2, 2, rngs=nnx.Rngs(0)) for _ in range(3)])
      >>> len(layers), layers[-1].kernel.shape
      (3, (2, 2))
    """

    _key_entry = SequenceKey

    def __init__(self, items: Iterable[A] = (), /) -> None:
        for index, item in enumerate(items):
            self._set_item(index, item)

    @overload
    def __getitem__(self, index: int) -> A: ...
    @overload
    def __getitem__(self, index: slice) -> list[A]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self.__dict__[i] for i in range(*index.indices(len(self)))]
        return self.__dict__[self._index(index)]

    def __setitem__(self, index: Any, value: Any) -> None:
        if isinstance(index, slice):
            items = list(self)
            items[index] = value
            self._replace(items)
        else:
            self._set_item(self._index(index), value)

    def __delitem__(self, index: Any) -> None:
        items = list(self)
        del items[index if isinstance(index, slice) else self._index(index)]
        self._replace(items)

    def insert(self, index: int, value: A) -> None:
        """Inserts a value before `index`."""
        if index >= len(self):
            self._set_item(len(self), value)
            return
        items = list(self)
        items.insert(index, value)
        self._replace(items)

    def __iter__(self) -> Iterator[A]:
        items = self.__dict__
        return (items[index] for index in range(len(items)))

    def __add__(self, other: Iterable[A]) -> "List[A]":
        return List([*self, *other])

    def _index(self, index: Any) -> int:
        number = index.__index__()
        size = len(self)
        if not -size <= number < size:
            raise IndexError(f"List of {size} items has no item {number}")
        return number % size if size else number

    def _replace(self, items: list[Any]) -> None:
        self._check("replace", "[...]")
        marks, self._marks = self._marks, None
        self.__dict__.clear()
        self.__dict__.update(enumerate(items))
        if marks and len(items) == len(self.__dict__):
            self._marks = {k: m for k, m in marks.items() if k in self.__dict__}
        structure_changed(self)


class Dict(_Items, MutableMapping[Any, A], Generic[A]):
    """A dict that is an object; items are attributes too.

    Keys are all str or all int.

    Example:
      >>> heads = nnx.Dict(a=nnx.Linear(2, 1, rngs=nnx.Rngs(0)))
      >>> heads["a"] is heads.a, list(heads)
      (True, ['a'])
    """

    _key_entry = DictKey

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
                f"Dict key {key!r} is a {type(key).__name__}. Keys become parts of paths: they must "
                "be str or int."
            )
        if self.__dict__ and type(next(iter(self.__dict__))) is not type(key):
            raise StructureError(
                f"Dict key {key!r} is a {type(key).__name__}, where other keys are not. The keys of "
                "one Dict must be all str or all int."
            )
        self._set_item(key, value)

    def __delitem__(self, key: Any) -> None:
        self._check("delete", key)
        del self.__dict__[key]
        if self._marks:
            self._marks = {k: mark for k, mark in self._marks.items() if k != key}
        structure_changed(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.__dict__)

    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]


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

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what the last layer returns, or the only argument if there are no layers."""
        output: Any = args[0] if len(args) == 1 else args
        for index, layer in enumerate(self.layers):
            if not callable(layer):
                raise TypeError(
                    f"layers[{index}] of Sequential is a {type(layer).__name__}, which cannot be "
                    "called. Expected a Module or a function."
                )
            if index:
                args, kwargs = (output,), {}
                if isinstance(output, tuple):
                    args = output
                elif isinstance(output, dict):
                    args, kwargs = (), output
            output = layer(*args, **kwargs)
        return output

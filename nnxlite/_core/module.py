"""Pytree, the base of all objects, and Module, the base of models.

An object is a plain Python object: attributes are set and read as usual, and nothing has to be
declared. The library keeps four things about it in slots, so that `vars(obj)` is the user's:
structure version, cached plan, trace level and marks. A Module adds scopes around its methods and
the verbs on attributes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar, Self

from nnxlite._core import attributes, iterate, render, statics
from nnxlite._core import capture as recording
from nnxlite._core.errors import Path, StaticValueError
from nnxlite._core.filters import Filter
from nnxlite._core.graph import ARRAY, OBJECT, STATIC, kind_of, register_kind
from nnxlite._core.marks import Marked, annotated_marks
from nnxlite._core.pytree import register_object
from nnxlite._core.scope import wrap_methods
from nnxlite._core.trace import Level, check_writable, current_level
from nnxlite._core.variable import Perturbation, Variable
from nnxlite._core.versions import structure_changed

_MISSING: Any = object()
_BOOKKEEPING = frozenset(("_version", "_plan", "_tree", "_level", "_marks"))
_set = object.__setattr__


class Pytree:
    """The base of objects that may be split, merged, jitted, differentiated and so on.

    Attributes may hold Variables, arrays, other objects, plain lists, dicts and tuples of these,
    and static values of any kind. Objects have identity: they may be shared and may form cycles.
    A subclass needs no decorator, and no call of `super().__init__()`.

    Example:
      >>> class Counter(nnx.Pytree):
      ...     def __init__(self):
      ...         self.count = nnx.Variable(0)
      >>> counter = Counter()
      >>> nnx.jit(lambda c: c.count.set_value(c.count + 1))(counter)
      >>> int(counter.count[...])
      1
    """

    __slots__ = ("__dict__", "__weakref__", "_level", "_marks", "_plan", "_tree", "_version")
    __nnx_node__ = True

    _version: int
    _plan: Any
    _tree: Any
    _level: Level
    _marks: dict[str, int] | None
    _class_marks: ClassVar[Mapping[str, int]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        return cls._node_new(current_level(), None)

    def __init_subclass__(cls, *, pytree: bool = True, **kwargs: Any) -> None:
        # `pytree=False` is accepted for flax programs: ours are pytrees in any case.
        super().__init_subclass__(**kwargs)
        cls._class_marks = annotated_marks(cls)
        register_kind(cls, OBJECT)
        register_object(cls)

    @classmethod
    def _node_new(cls, level: Level, marks: dict[str, int] | None) -> Self:
        """Makes an object without attributes; `__init__` is not called."""
        self = object.__new__(cls)
        _set(self, "_version", 0)
        _set(self, "_plan", None)
        _set(self, "_tree", None)
        _set(self, "_level", level)
        _set(self, "_marks", marks)
        return self

    def _node_items(self) -> dict[Any, Any]:
        """Returns the live attributes."""
        return self.__dict__

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _BOOKKEEPING:
            _set(self, name, value)
            return
        mark = None
        if type(value) is Marked:
            value, mark = value.value, value.mark
        check_writable(self, f"set attribute {name!r} of {type(self).__name__}")
        if not self._version:  # in no plan yet
            _set(self, name, value)
            if mark is not None:
                self._marks = {**(self._marks or {}), name: mark}
            return
        old = self.__dict__.get(name, _MISSING)
        _set(self, name, value)
        if mark is not None and (self._marks or {}).get(name) != mark:
            self._marks = {**(self._marks or {}), name: mark}
            structure_changed(self)
        elif _changes_structure(old, value):
            structure_changed(self)

    def __delattr__(self, name: str) -> None:
        check_writable(self, f"delete attribute {name!r} of {type(self).__name__}")
        object.__delattr__(self, name)
        if self._marks and name in self._marks:
            self._marks = {key: mark for key, mark in self._marks.items() if key != name}
        structure_changed(self)

    def __getstate__(self) -> Any:
        marks = self._marks
        return (dict(self.__dict__), marks) if marks else dict(self.__dict__)

    def __setstate__(self, state: Any) -> None:
        items, marks = state if isinstance(state, tuple) else (state, None)
        self.__dict__.update(items)
        self._marks = marks

    def __repr__(self) -> str:
        return render.text(self)


register_kind(Pytree, OBJECT)
register_object(Pytree)
Object = Pytree


def _changes_structure(old: Any, new: Any) -> bool:
    """Tells whether plans that met `old` in an attribute are wrong about `new`."""
    if old is new:
        return False
    kind = kind_of(new)
    if old is _MISSING or kind_of(old) != kind:
        return True
    if kind == ARRAY:
        return False
    if kind != STATIC:
        return True
    try:
        return statics.static(old) is not statics.static(new)
    except StaticValueError:
        return True  # the next walk raises it, with the path


class Module(Pytree):
    """The base of models: a `Pytree` whose public methods name what they stage.

    Example:
      >>> class Net(nnx.Module):
      ...     def __init__(self, rngs):
      ...         self.layers = [nnx.Linear(4, 4, rngs=rngs) for _ in range(2)]
      ...
      ...     def __call__(self, x):
      ...         for layer in self.layers:
      ...             x = jax.nn.relu(layer(x))
      ...         return x
      >>> Net(nnx.Rngs(0))(jnp.ones((1, 4))).shape
      (1, 4)
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        wrap_methods(cls)

    def sow(
        self,
        kind: type[Variable] | str,
        name: str,
        value: Any,
        reduce_fn: Callable[[Any, Any], Any] | None = None,
        init_fn: Callable[[], Any] | None = None,
    ) -> bool:
        """Hands a value to the captures that run and asked for this kind; see `nnx.capture`.

        Without one, nothing happens and nothing is computed.

        Args:
          kind: The kind of Variable, such as `nnx.Intermediate`, or its registered name.
          name: The name below this module.
          value: Any pytree of arrays.
          reduce_fn: `reduce_fn(before, value)` joins values of one name; by default they are
            collected in a tuple.
          init_fn: Gives what stands before the first value; by default the empty tuple.

        Returns:
          Whether a capture took it.
        """
        return recording.sow(self, kind, name, value, reduce_fn, init_fn)

    def perturb(
        self, name: str, value: Any, kind: type[Variable] | str = Perturbation
    ) -> Any:
        """Returns `value`, plus the perturbation of this name that a capture gives.

        A capture of `kind` makes zeros for it, and a capture with `init` adds what is given there:
        the gradient of that is the gradient of `value`. Several calls with one name add the same
        perturbation, so its gradient is their sum.

        Args:
          name: The name below this module.
          value: Any pytree of arrays.
          kind: The kind of Variable to record the perturbation as.
        """
        return recording.perturb(self, name, value, kind)

    def train(self, **attributes_to_set: Any) -> None:
        """Puts the module and all modules in it into training mode.

        Sets `deterministic=False` and `use_running_average=False` wherever these attributes exist,
        and the given ones too.

        Example:
          >>> block = nnx.Sequential(nnx.Dropout(0.5), nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
          >>> block.train()
          >>> block.layers[0].deterministic
          False
        """
        attributes.train(self, **attributes_to_set)

    def eval(self, **attributes_to_set: Any) -> None:
        """Puts the module and all modules in it into evaluation mode; the opposite of `train`."""
        attributes.eval(self, **attributes_to_set)

    def set_attributes(
        self, *filters: Filter, raise_if_not_found: bool = True, **attributes_to_set: Any
    ) -> None:
        """Sets attributes on the module and the modules in it; see `nnx.set_attributes`."""
        attributes.set_attributes(
            self, *filters, raise_if_not_found=raise_if_not_found, **attributes_to_set
        )

    def view(self, *, raise_if_not_found: bool = True, **attributes_to_set: Any) -> Self:
        """Returns a view with other attributes that shares all Variables; see `nnx.view`."""
        return attributes.view(self, raise_if_not_found=raise_if_not_found, **attributes_to_set)

    def iter_modules(self) -> Iterator[tuple[Path, "Module"]]:
        """Yields path and Module for the module and each module in it, once each."""
        return iterate.iter_modules(self)

    def iter_children(self) -> Iterator[tuple[Any, "Module"]]:
        """Yields name and Module for the modules directly in it."""
        return iterate.iter_children(self)


iterate.MODULE_TYPES.append(Module)

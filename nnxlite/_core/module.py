"""Pytree, the base of all objects, and Module, the base of models.

An object is a plain Python object: attributes are set and read as usual, and nothing has to be
declared. The library keeps five things about it in slots, so that `vars(obj)` is the user's:
structure version, cached plan, flattened form, trace level and marks. A Module adds scopes around
its methods and the verbs on attributes.
"""

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any, ClassVar, Self

from nnxlite._core import attributes, iterate, render, sowing, statics
from nnxlite._core.errors import Path, StaticValueError
from nnxlite._core.filters import Filter
from nnxlite._core.graph import AUTO, DATA, HELD_STATIC, NUMBERS, Mark, mark_of
from nnxlite._core.kinds import ARRAY, OBJECT, STATIC, kind_of, register_kind
from nnxlite._core.marks import check_mark, class_marks, unmarked
from nnxlite._core.node import BOOKKEEPING, Node, settle_node
from nnxlite._core.pytree import register_object
from nnxlite._core.scope import wrap_methods
from nnxlite._core.trace import Level, check_writable, current_level
from nnxlite._core.treescope_view import treescope_repr
from nnxlite._core.variable import Perturbation, Variable
from nnxlite._core.versions import object_changed

_MISSING: Any = object()
_BOOKKEEPING = frozenset(BOOKKEEPING)
_set = object.__setattr__


class Pytree(Node):
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

    __slots__ = ()
    __nnx_node__ = True

    _version: int
    _plan: Any
    _tree: Any
    _level: Level
    _marks: dict[Hashable, Mark] | None
    _class_marks: ClassVar[Mapping[str, int]] = {}

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        if (args or kwargs) and cls.__init__ is object.__init__:
            raise TypeError(f"{cls.__name__}() takes no arguments")
        return cls._node_new(current_level(), None)

    def __init_subclass__(cls, *, pytree: bool = True, **kwargs: Any) -> None:
        # `pytree=False` is accepted for flax programs: ours are pytrees in any case.
        super().__init_subclass__(**kwargs)
        _check_names(cls)
        cls._class_marks = class_marks(cls)
        register_kind(cls, OBJECT)
        register_object(cls)

    @classmethod
    def _node_new(cls, level: Level, marks: dict[Hashable, Mark] | None) -> Self:
        """Makes an object without attributes; `__init__` is not called."""
        self = object.__new__(cls)
        settle_node(self, 0, level, marks)
        return self

    def _node_items(self) -> dict[Any, Any]:
        """Returns the live attributes, or items of a container."""
        return self.__dict__

    def _node_set(self, key: Hashable, value: Any, mark: int = AUTO) -> None:
        """Sets an attribute or item, and what was said of it, without a check of the level."""
        items = self._node_items()
        old = items.get(key, _MISSING)
        items[key] = value
        self._node_changed(key, old, value, mark)

    def _node_changed(self, key: Hashable, old: Any, new: Any, mark: int) -> None:
        marks = self._marks
        if old is new and mark == AUTO and not marks:
            return
        if marks and any(type(each) is tuple and each[0] == key for each in marks):
            # Where JAX had put something there is now what the user wants.
            marks = _without(marks, (key,), bare_only=True)
            _set(self, "_marks", marks)
            old = _MISSING
        if mark != AUTO and (marks or {}).get(key) != mark:
            _set(self, "_marks", {**(marks or {}), key: mark})
            object_changed(self)
        elif self._version and _changes_structure(old, new, mark_of(self, key)):
            object_changed(self)

    def _node_remove(self, keys: Iterable[Hashable]) -> None:
        """Takes attributes or items out, without a check of the level."""
        items = self._node_items()
        for key in keys:
            del items[key]
        if self._marks:
            _set(self, "_marks", _without(self._marks, keys))
        object_changed(self)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _BOOKKEEPING:
            raise AttributeError(_reserved(name, type(self)))
        if name == "__orig_class__":  # `typing` leaves it on what `Net[int]()` makes, if it can
            raise AttributeError(f"{type(self).__name__} does not keep {name}")
        value, mark = unmarked(value)
        check_writable(self, f"set attribute {name!r} of {type(self).__name__}")
        marks = self._marks or self._class_marks
        if not self._version and mark == AUTO and not marks:  # in no plan yet
            _set(self, name, value)
            return
        if mark or marks:
            check_mark(self, f"attribute {name!r}", value, mark or mark_of(self, name))
        old = self.__dict__.get(name, _MISSING)
        _set(self, name, value)
        self._node_changed(name, old, value, mark)

    def __delattr__(self, name: str) -> None:
        check_writable(self, f"delete attribute {name!r} of {type(self).__name__}")
        if name not in self.__dict__:
            object.__delattr__(self, name)  # a property, or an error
            return
        self._node_remove((name,))

    def __getstate__(self) -> Any:
        marks = self._marks
        return (dict(self.__dict__), marks) if marks else dict(self.__dict__)

    def __setstate__(self, state: Any) -> None:
        items, marks = state if isinstance(state, tuple) else (state, None)
        self.__dict__.update(items)
        _set(self, "_marks", marks)

    def __repr__(self) -> str:
        return render.text(self)

    __treescope_repr__ = treescope_repr


register_kind(Pytree, OBJECT)
register_object(Pytree)
Object = Pytree


def _check_names(cls: type) -> None:
    """Raises for class bodies that would hide attributes from the library."""
    taken = sorted(_BOOKKEEPING & vars(cls).keys())
    if taken:
        raise TypeError(_reserved(taken[0], cls))
    slots = vars(cls).get("__slots__", ())
    if slots:
        raise TypeError(
            f"{cls.__name__} has __slots__, and attributes in slots are no part of an object "
            "graph. Leave __slots__ out, or `slots=True` of the dataclass."
        )


def _reserved(name: str, cls: type) -> str:
    return (
        f"{name!r} is a name that the library keeps for itself on every object. Give the attribute "
        f"of {cls.__name__} another name."
    )


def _without(
    marks: dict[Hashable, Mark], keys: Iterable[Hashable], *, bare_only: bool = False
) -> dict[Hashable, Mark] | None:
    """Returns the marks without those of these attributes."""
    gone = set(keys)
    kept = {
        key: mark
        for key, mark in marks.items()
        if not (key[0] in gone if type(key) is tuple else key in gone and not bare_only)
    }
    return kept or None


def _changes_structure(old: Any, new: Any, mark: Mark) -> bool:
    """Tells whether plans that met `old` in an attribute are wrong about `new`."""
    if old is new:
        return False
    if old is _MISSING:
        return True
    kind = kind_of(new)
    if mark == DATA and _is_array_or_number(old) and _is_array_or_number(new):
        return False
    if kind_of(old) != kind:
        return True
    if kind == ARRAY:
        return mark == HELD_STATIC
    if kind != STATIC:
        return True
    try:
        return statics.static(old) is not statics.static(new)
    except StaticValueError:
        return True  # the next walk raises it, with the path


def _is_array_or_number(value: Any) -> bool:
    return kind_of(value) == ARRAY or isinstance(value, NUMBERS)


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
            collected in a tuple. In a `while_loop` or `fori_loop` it has to accumulate: what it
            gives keeps one structure and shape.
          init_fn: Gives what stands before the first value; by default the empty tuple.

        Returns:
          Whether a capture took it.

        Example:
          >>> class Net(nnx.Module):
          ...     def __call__(self, x):
          ...         self.sow(nnx.Intermediate, "size", jnp.abs(x).max())
          ...         return x
          >>> _, found = nnx.capture(Net(), nnx.Intermediate)(jnp.arange(3.0))
          >>> found["size"][...]
          (Array(2., dtype=float32),)
        """
        return sowing.sow(self, kind, name, value, reduce_fn, init_fn)

    def perturb(self, name: str, value: Any, kind: type[Variable] | str = Perturbation) -> Any:
        """Returns `value`, plus the perturbation of this name that a capture gives.

        A capture of `kind` makes zeros for it, and a capture with `init` adds what is given there:
        the gradient of that is the gradient of `value`. Several calls with one name add the same
        perturbation, so its gradient is their sum.

        Args:
          name: The name below this module.
          value: Any pytree of arrays.
          kind: The kind of Variable to record the perturbation as.

        Raises:
          StructureError: A capture has `init` without this name, and does not ask for `kind`.
          ValueError: `init` has other shapes or dtypes.

        Example:
          >>> class Net(nnx.Module):
          ...     def __call__(self, x):
          ...         return 3 * self.perturb("h", 2 * x)
          >>> net, x = Net(), jnp.ones(2)
          >>> _, zeros = nnx.capture(net, nnx.Perturbation)(x)
          >>> loss = lambda p: nnx.capture(net, init=p)(x).sum()
          >>> jax.grad(loss)(zeros)["h"][...]
          Array([3., 3.], dtype=float32)
        """
        return sowing.perturb(self, name, value, kind)

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

    def iter_children(self) -> Iterator[tuple[Any, Any]]:
        """Yields name and child for the objects and Variables directly in it."""
        return iterate.iter_children(self)


iterate.MODULE_TYPES.append(Module)

"""Kinds: how a value takes part in an object graph, told by its type.

- *Nodes* have identity and hold other things: objects, lists, dicts.
- *Leaves* hold arrays: Variables and States, which have identity too, and bare arrays, which have
  none.
- *Values* are rebuilt from what they hold: tuples, registered pytrees, bound methods of objects
  and partials of these.
- All else is *static*.

`value_children` takes a value apart by one level, `rebuild_value` puts it together again.
"""

import functools
import itertools
import types
from collections.abc import Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.tree_util import GetAttrKey, SequenceKey

from nnxlite._core.errors import StaticValueError
from nnxlite._core.statics import typed_key
from nnxlite._core.variable import Variable

STATIC, ARRAY, VARIABLE, STATE, OBJECT, LIST, DICT, TUPLE, FOREIGN, SET, METHOD, PARTIAL = range(12)

_KINDS: dict[type, int] = {
    **dict.fromkeys((str, bytes, int, float, bool, complex, type(None), type(...)), STATIC),
    **dict.fromkeys((types.FunctionType, types.BuiltinFunctionType, type, range, slice), STATIC),
    type(jnp.float32): STATIC,
    np.ndarray: ARRAY,
    jax.ShapeDtypeStruct: ARRAY,
    list: LIST,
    dict: DICT,
    tuple: TUPLE,
    set: SET,
    frozenset: STATIC,
    types.MethodType: METHOD,
    functools.partial: PARTIAL,
}


def register_kind(cls: type, kind: int) -> None:
    """Fixes the part that instances of exactly `cls` take in object graphs."""
    _KINDS[cls] = kind


def kind_of(value: Any) -> int:
    """Returns the part that `value` takes in an object graph when nothing is said of it."""
    kind = _KINDS.get(type(value))
    return _classify(value) if kind is None else kind


def _classify(value: Any) -> int:
    cls = type(value)
    if isinstance(value, Variable):
        kind = VARIABLE
    elif getattr(cls, "__nnx_node__", False):
        kind = OBJECT
    elif isinstance(value, (jax.Array, np.ndarray, Tracer)):
        kind = ARRAY
    elif isinstance(value, tuple) and hasattr(cls, "_fields"):
        kind = TUPLE
    elif is_registered(value):
        kind = FOREIGN
    elif isinstance(value, functools.partial):
        kind = PARTIAL
    else:
        return STATIC  # not remembered: the type may yet be registered with JAX
    _KINDS[cls] = kind
    return kind


def is_registered(value: Any) -> bool:
    """Tells whether JAX looks inside `value` as a pytree."""
    return not jax.tree_util.all_leaves([value])


def is_graph_method(value: Any) -> bool:
    """Tells whether `value` is a bound method of an object, or a partial of one.

    A jitted method is bound by a partial that has a `__self__`.
    """
    while isinstance(value, functools.partial) and not hasattr(type(value), "__self__"):
        value = value.func
    if not isinstance(value, types.MethodType | functools.partial):
        return False
    return kind_of(getattr(value, "__self__", None)) == OBJECT


def is_value(value: Any) -> bool:
    """Tells whether `value` is rebuilt from what it holds, by `value_children`."""
    return kind_of(value) in (TUPLE, FOREIGN) or (
        isinstance(value, functools.partial) and is_graph_method(value)
    )


def has_data(value: Any) -> bool:
    """Tells whether a value is or contains a Variable, an array or an object."""
    return _holds(value, (VARIABLE, STATE, OBJECT, ARRAY), ())


def has_nodes(value: Any) -> bool:
    """Tells whether a value is or contains a Variable, a State or an object."""
    return _holds(value, (VARIABLE, STATE, OBJECT), ())


def _holds(value: Any, kinds: tuple[int, ...], above: tuple[Any, ...]) -> bool:
    kind = kind_of(value)
    if kind in kinds:
        return True
    if is_graph_method(value):
        return True
    if any(value is each for each in above):  # a list may hold itself
        return False
    if kind == LIST:
        children = value
    elif kind == DICT:
        children = value.values()
    else:
        children = value_children(value)[2] if is_value(value) else ()
    return any(_holds(child, kinds, (*above, value)) for child in children)


class Foreign:
    """How to put one level of a registered pytree together again.

    Two are equal if the pytrees have the same structure at this level, with static parts of the
    same types: JAX itself takes 1 and True for equal.

    Attributes:
      entries: JAX's key entries of the children.
      treedef: Of this level alone.
    """

    __slots__ = ("_statics", "entries", "treedef")

    def __init__(self, entries: tuple[Any, ...], treedef: Any) -> None:
        self.entries, self.treedef = entries, treedef
        try:
            self._statics = typed_key(treedef.node_data())
        except StaticValueError:  # then JAX's comparison has to do
            self._statics = None

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The name, key or index in each entry; indices only, if two entries have the same."""
        keys = tuple(plain_key(entry) for entry in self.entries)
        return keys if len(set(keys)) == len(keys) else tuple(range(len(keys)))

    def __eq__(self, other: object) -> bool:
        return (
            type(other) is Foreign
            and self.entries == other.entries
            and self._statics == other._statics
            and self.treedef == other.treedef
        )

    def __hash__(self) -> int:
        return hash((self.entries, self.treedef))

    def __reduce__(self) -> Any:
        return Foreign, (self.entries, self.treedef)


def one_level(value: Any) -> tuple[Foreign, list[Any]]:
    """Takes a registered pytree apart by one level."""
    # All but the root, which JAX asks about first, are leaves: even `value` itself, if it holds
    # itself, as endless recursion in JAX's C++ code ruins the process.
    asked = itertools.count()
    is_leaf = lambda _: next(asked) > 0  # noqa: E731
    pairs, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_leaf)
    return Foreign(tuple(path[0] for path, _ in pairs), treedef), [child for _, child in pairs]


def plain_key(entry: Any) -> Hashable:
    """Returns the name, key or index that a JAX key entry holds."""
    for field in ("key", "name", "idx"):
        if hasattr(entry, field):
            return getattr(entry, field)
    return str(entry)


def value_children(value: Any) -> tuple[Any, tuple[Hashable, ...], list[Any]]:
    """Returns how to rebuild a value (its class or `Foreign`), the keys and the children."""
    cls = type(value)
    if cls is tuple:
        return tuple, tuple(range(len(value))), list(value)
    if isinstance(value, tuple) and hasattr(cls, "_fields"):
        return cls, tuple(cls._fields), list(value)
    if isinstance(value, functools.partial) and is_graph_method(value):
        keywords = tuple(sorted(value.keywords.items()))
        return cls, ("func", "args", "keywords"), [value.func, value.args, keywords]
    foreign, children = one_level(value)
    return foreign, foreign.keys, children


def rebuild_value(how: Any, children: Iterable[Any]) -> Any:
    """The inverse of `value_children`."""
    if how is tuple:
        return tuple(children)
    if type(how) is Foreign:
        return jax.tree_util.tree_unflatten(how.treedef, children)
    if issubclass(how, functools.partial):
        func, args, keywords = children
        return how(func, *args, **dict(keywords))
    return how._make(children)


def value_entries(how: Any, keys: Iterable[Hashable]) -> tuple[Any, ...]:
    """Returns JAX's key entries for the children of a value."""
    if type(how) is Foreign:
        return how.entries
    return tuple(SequenceKey(key) if isinstance(key, int) else GetAttrKey(key) for key in keys)

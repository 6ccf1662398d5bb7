"""State: a nested mapping from path to Variable, and the dynamic half of a split object.

A State *owns* its Variables: they are made when the State is, so writing them changes that State
and nothing else; `update` carries values back to an object. As a JAX pytree it is one node at the
root, plain dicts below it in sorted order, and Variables as nodes; it has no sharing and no cycles.

A State that comes from `split` starts as a flat list of values with a `StateDef` (its paths and
kinds), and makes dicts and Variables when they are first asked for. One that comes from JAX
starts with the dicts. `_values` and `_tree` hold the one form or the other. `state["a"]` is a
*view*: a State over the same inner dict, whose changes are changes of the root.

The functions on States, such as filters and dict forms, are in `state_forms.py`.
"""

import threading
from collections.abc import (
    Callable,
    Container,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any

import jax
from jax.tree_util import DictKey

from nnxlite._core import nested, render
from nnxlite._core.errors import Path, format_path
from nnxlite._core.filters import Filter
from nnxlite._core.graphdef import ARRAY_LEAF
from nnxlite._core.kinds import STATE, register_kind
from nnxlite._core.statedef import StateDef, kind_of_leaf
from nnxlite._core.trace import (
    FLATTENING,
    OPAQUE,
    OPEN_STATES,
    Level,
    Opaque,
    check_writable,
    current_level,
)
from nnxlite._core.treescope_view import treescope_repr
from nnxlite._core.values import own
from nnxlite._core.variable import Variable
from nnxlite._core.versions import structure_changed

# Held while a State turns its values into Variables, which two threads must not do twice.
_LOCK = threading.RLock()


class State(MutableMapping[Hashable, Any]):
    """A nested mapping from paths to Variables that owns them.

    `state["layers"][0]["kernel"]` and `state.layers[0].kernel` give the Variable, `[...]` its
    value. Arrays that an object holds as attributes appear as bare arrays. `a | b` merges, `b`
    winning; `a - b` takes away the paths of `b`.

    Args:
      mapping: A nested mapping, or pairs of key and value. Variables are copied (their arrays are
        shared): a State never aliases a model. Keys of one level are all str or all int.

    Raises:
      StructureError: One level mixes str and int keys, or has other ones, or a mapping holds
        itself; the path is named.

    Example:
      >>> state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> state["kernel"].shape, list(state)
      ((2, 3), ['bias', 'kernel'])
    """

    __slots__ = (
        "__weakref__",
        "_level",
        "_own_version",
        "_path",
        "_root",
        "_statedef",
        "_tree",
        "_values",
        "_variables",
    )
    __nnx_node__ = True

    _statedef: StateDef | None
    _values: list[Any] | None
    _tree: dict[Hashable, Any] | None
    _variables: list[Any] | None
    _root: "State | None"
    _path: Path

    def __init__(self, mapping: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (), /) -> None:
        level = current_level()
        source = mapping if isinstance(mapping, Mapping) else dict(mapping)
        _init(self, level, nested.owned(source, (), level))

    @classmethod
    def _make(cls, values: Iterable[Any], statedef: StateDef, level: Level) -> "State":
        """Makes a State around a list of values, without checks.

        Of bare arrays those of NumPy are copied: a State hands them out, to be changed in place.
        """
        self = object.__new__(cls)
        _init(self, level, None)
        own_values = list(values)
        for number in statedef.arrays:
            own_values[number] = own(own_values[number])
        self._values, self._statedef = own_values, statedef
        return self

    # The two forms.

    def _dicts(self) -> dict[Hashable, Any]:
        """Returns the nested dicts of Variables, making them if need be."""
        tree = self._tree
        return self._unfolded() if tree is None else tree

    def _unfolded(self) -> dict[Hashable, Any]:
        with _LOCK:
            if self._tree is None:
                values, statedef, level = self._values, self._statedef, self._level
                assert values is not None
                assert statedef is not None
                self._variables = [
                    value if kind is ARRAY_LEAF else _planned(kind[0]._make(value, kind[1], level))
                    for value, kind in zip(values, statedef.leaves, strict=True)
                ]
                self._tree = nested.nest(statedef.paths, self._variables)
                self._values = None
            return self._tree

    def _flat(self) -> tuple[StateDef, list[Any]]:
        """Returns the StateDef and the Variables (or bare values) in its order."""
        tree = self._dicts()
        variables, statedef = self._variables, self._statedef
        if variables is None or statedef is None:
            pairs = list(nested.leaves_of_own(tree))
            variables = [_planned(self._claimed(leaf)) for _, leaf in pairs]
            statedef = StateDef.of(
                tuple([path for path, _ in pairs]), tuple([kind_of_leaf(x) for x in variables])
            )
        elif any(
            isinstance(leaf, Variable) and leaf._meta is not kind[1]
            for leaf, kind in zip(variables, statedef.leaves, strict=True)
        ):
            statedef = StateDef.of(statedef.paths, tuple([kind_of_leaf(x) for x in variables]))
        if self._root is None:  # of a view nothing is kept: the root may change
            self._variables, self._statedef = variables, statedef
        return statedef, variables

    def _claimed(self, leaf: Any) -> Any:
        """Gives a Variable that JAX made the trace level at which JAX made the State."""
        if isinstance(leaf, Variable) and leaf._level is None:
            leaf._level = self._level
        return leaf

    # The face of a leaf: what plans and the lift use.

    @property
    def _meta(self) -> StateDef:
        statedef = self._statedef
        return statedef if self._values is not None and statedef else self._flat()[0]

    @property
    def _value(self) -> list[Any]:
        values = self._values
        if values is not None:
            return values
        return [leaf._value if isinstance(leaf, Variable) else leaf for leaf in self._flat()[1]]

    @_value.setter
    def _value(self, values: Sequence[Any]) -> None:
        if self._values is not None:
            self._values = list(values)
            return
        statedef, leaves = self._flat()
        for path, leaf, value in zip(statedef.paths, leaves, values, strict=True):
            self._write(path, leaf, value)

    def _write(self, path: Path, leaf: Any, value: Any) -> None:
        """Puts a value where `leaf` is: into the Variable, or in the place of a bare value."""
        if isinstance(leaf, Variable):
            leaf._value = value
        elif leaf is not value:
            level = self._dicts()
            for key in path[:-1]:
                level = level[key]
            level[path[-1]] = value
            self._owner._variables = None

    @property
    def _owner(self) -> "State":
        return self if self._root is None else self._root

    @property
    def _version(self) -> int:
        root = self._owner
        if not root._own_version or root._values is not None:
            return root._own_version
        # The sum of versions moves when the metadata of one Variable does.
        return root._own_version + nested.sum_of_versions(root._flat()[1])

    @_version.setter
    def _version(self, version: int) -> None:
        self._owner._own_version += 1

    def _restructured(self) -> None:
        """Notes that paths or kinds changed."""
        root = self._owner
        if root._own_version:
            # Not less than any sum that a plan has seen: no later one shall be equal to it.
            root._own_version += nested.sum_of_versions(root._variables or ())
        root._variables = root._statedef = None
        structure_changed(root)  # pyright: ignore[reportArgumentType]  # a property is as good

    def _restructure(self, values: Sequence[Any], statedef: StateDef) -> None:
        """Takes on other paths and values; Variables at paths that stay keep their identity."""
        before, leaves = self._flat()
        old = dict(zip(before.paths, leaves, strict=True))
        new: list[Any] = []
        for path, kind, value in zip(statedef.paths, statedef.leaves, values, strict=True):
            leaf: Any = old.get(path)
            if kind is ARRAY_LEAF:
                leaf = value
            elif type(leaf) is kind[0]:
                leaf._value, leaf._meta = value, kind[1]
            else:
                leaf = kind[0]._make(value, kind[1], self._level)
            new.append(leaf)
        nested.become(self._dicts(), nested.nest(statedef.paths, new))
        self._restructured()

    # The face of a mapping.

    def __getitem__(self, key: Hashable) -> Any:
        tree = self._dicts()
        try:
            value = tree[key]
        except KeyError:
            raise KeyError(
                f"{format_path(self._path, 'state')} has no key {key!r}; it has "
                f"{nested.some_keys(tree)}."
            ) from None
        if type(value) is dict:
            return self._view(key, value)
        return self._claimed(value)

    def _view(self, key: Hashable, tree: dict[Hashable, Any]) -> "State":
        view = object.__new__(type(self))
        _init(view, self._level, tree)
        view._root, view._path = self._owner, (*self._path, key)
        return view

    def __setitem__(self, key: Hashable, value: Any) -> None:
        check_writable(self._owner, f"set {format_path((*self._path, key), 'state')}")
        level = current_level()
        if isinstance(value, Mapping):
            value = nested.owned(value, (*self._path, key), level)
        elif isinstance(value, Variable):
            value = nested.copied(value, level)
        tree = self._dicts()
        if key in tree:
            tree[key] = value
        else:
            keys: list[Any] = [*tree, key]
            nested.check_keys(keys, self._path)
            nested.become(tree, {k: value if k == key else tree[k] for k in sorted(keys)})
        self._restructured()

    def __delitem__(self, key: Hashable) -> None:
        check_writable(self._owner, f"delete {format_path((*self._path, key), 'state')}")
        tree = self._dicts()
        if key not in tree:
            self[key]  # raises
        del tree[key]
        self._restructured()

    def __iter__(self) -> Iterator[Any]:
        return iter(self._dicts())

    def __len__(self) -> int:
        return len(self._dicts())

    def __contains__(self, key: object) -> bool:
        return key in self._dicts()

    # Comparing Variables gives arrays, so `==` cannot say whether two States are equal.
    __eq__ = object.__eq__
    __hash__ = object.__hash__  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name in _SLOTS or name.startswith("__"):
            raise AttributeError(f"State has no attribute {name!r}")
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _SLOTS or name in ("_value", "_version"):
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    def __delattr__(self, name: str) -> None:
        try:
            del self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __dir__(self) -> list[str]:
        return [*dir(type(self)), *(key for key in self if isinstance(key, str))]

    def __or__(self, other: Any) -> "State":
        return State.merge(self, other) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> "State":
        return State.merge(other, self) if isinstance(other, Mapping) else NotImplemented

    def __sub__(self, other: Any) -> "State":
        from nnxlite._core.state_forms import without_paths  # in a row below

        return without_paths(self, other) if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return render.text(self)

    __treescope_repr__ = treescope_repr

    def __getstate__(self) -> Any:
        return self._dicts()

    def __setstate__(self, tree: dict[Hashable, Any]) -> None:
        _init(self, current_level(), tree)

    def __copy__(self) -> "State":
        return State(self)

    # The verbs of `state_forms`, in a row below, as methods.

    def flat_state(self) -> Any:
        """Returns the pairs of path and Variable, in sorted order; see `nnx.to_flat_state`."""
        from nnxlite._core.state_forms import to_flat_state

        return to_flat_state(self)

    @staticmethod
    def from_flat_path(flat: Mapping[Path, Any] | Iterable[tuple[Path, Any]], /) -> "State":
        """Makes a State from paths and Variables; see `nnx.from_flat_state`.

        Example:
          >>> nnx.State.from_flat_path({("a", "b"): nnx.Param(jnp.ones(2))})["a"]["b"].shape
          (2,)
        """
        from nnxlite._core.state_forms import from_flat_state

        return from_flat_state(flat)

    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """Returns the leaves that match, as one State per filter; the rest is left out."""
        from nnxlite._core.state_forms import filter_state

        return filter_state(self, first, *filters)

    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """Returns one State per filter; each leaf has to match one of them."""
        from nnxlite._core.state_forms import split_state

        return split_state(self, first, *filters)

    @staticmethod
    def merge(state: Mapping[Any, Any], /, *states: Mapping[Any, Any]) -> "State":
        """Merges States, of two leaves at one path the later one."""
        from nnxlite._core.state_forms import merge_state

        return merge_state(state, *states)

    def map(self, f: Callable[[Path, Any], Any], /) -> "State":
        """Returns the State of `f(path, leaf)`."""
        from nnxlite._core.state_forms import map_state

        return map_state(f, self)

    def to_pure_dict(self, extract_fn: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
        """Returns nested plain dicts of the values; see `nnx.to_pure_dict`."""
        from nnxlite._core.state_forms import to_pure_dict

        return to_pure_dict(self, extract_fn)

    def replace_by_pure_dict(
        self,
        pure_dict: Mapping[Any, Any],
        replace_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Sets values from nested plain dicts; see `nnx.replace_by_pure_dict`."""
        from nnxlite._core.state_forms import replace_by_pure_dict

        replace_by_pure_dict(self, pure_dict, replace_fn)

    @property
    def raw_mapping(self) -> dict[Hashable, Any]:
        """Nested plain dicts, made anew, of the Variables themselves."""
        statedef, leaves = self._flat()
        return nested.nest(statedef.paths, leaves)


_SLOTS = frozenset(State.__slots__)
GraphState = State


def _init(state: State, level: Level, tree: dict[Hashable, Any] | None) -> None:
    state._values = state._variables = state._statedef = state._root = None
    state._own_version, state._path = 0, ()
    state._tree, state._level = tree, level


def _planned(leaf: Any) -> Any:
    """Lets changes of a Variable's metadata move the epoch, so that plans look at its State."""
    if isinstance(leaf, Variable) and not leaf._version:
        leaf._version = 1
    return leaf


def walk(mapping: Mapping[Any, Any], known: Container[Path] = ()) -> Iterator[tuple[Path, Any]]:
    """Yields path and leaf of a State or of nested mappings.

    Args:
      mapping: The State or mapping.
      known: Paths of leaves: a mapping at one of them is the value of that leaf.

    Raises:
      StructureError: A mapping holds itself.
    """
    if isinstance(mapping, State):
        statedef, leaves = mapping._flat()
        return zip(statedef.paths, leaves, strict=True)
    return nested.leaves_of(mapping, known)


# As a JAX pytree: State at the root, plain dicts below, Variables.


def _flatten(state: State) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        if FLATTENING.opaque is OPEN_STATES:
            return state._value, state._meta
        return (Opaque(state),), OPAQUE
    tree = state._dicts()
    return tree.values(), tuple(tree)


def _flatten_with_keys(state: State) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        return ((DictKey("state"), Opaque(state)),), OPAQUE
    tree = state._dicts()
    return [(DictKey(key), value) for key, value in tree.items()], tuple(tree)


def _unflatten(keys: Any, children: Iterable[Any]) -> Any:
    if type(keys) is StateDef:
        return State._make(children, keys, current_level())
    if keys is OPAQUE:
        (child,) = children
        return child.node if type(child) is Opaque else child
    state = object.__new__(State)
    # Asking for the level once here is 0.3 us; asking in each Variable would double the cost.
    _init(state, current_level(), dict(zip(keys, children, strict=True)))
    return state


jax.tree_util.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
register_kind(State, STATE)

"""State: a nested mapping from path to Variable, and the dynamic half of a split object.

A State *owns* its Variables: they are made when the State is, so writing them changes that State
and nothing else; `update` carries values back to an object. As a JAX pytree it is one node at the
root, plain dicts below it in sorted order, and Variables as nodes; it has no sharing and no cycles.

A State that comes from `split` starts as a flat list of values with a `StateDef` (its paths and
kinds), and makes dicts and Variables when they are first asked for. One that comes from JAX
starts with the dicts. `_values` and `_tree` hold the one form or the other.
"""

import threading
import weakref
from collections.abc import (
    Callable,
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

from nnxlite._core import graph
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import Filter, Predicate, filters_to_predicates
from nnxlite._core.graph import ARRAY_LEAF, Leaf
from nnxlite._core.trace import FLATTENING, OPAQUE, Level, Opaque, check_writable, current_level
from nnxlite._core.variable import Variable
from nnxlite._core.versions import structure_changed

_LOCK = threading.Lock()
_STATEDEFS: "weakref.WeakValueDictionary[Any, StateDef]" = weakref.WeakValueDictionary()


class StateDef:
    """Paths and kinds of a State's leaves, in sorted order; interned, compared by identity."""

    __slots__ = ("__weakref__", "leaves", "paths")

    paths: tuple[Path, ...]
    leaves: tuple[Leaf, ...]

    def __new__(cls, paths: tuple[Path, ...], leaves: tuple[Leaf, ...]) -> "StateDef":
        with _LOCK:
            found = _STATEDEFS.get((paths, leaves))
            if found is None:
                found = object.__new__(cls)
                found.paths, found.leaves = paths, leaves
                _STATEDEFS[paths, leaves] = found
            return found

    def __reduce__(self) -> Any:
        return StateDef, (self.paths, self.leaves)

    def __repr__(self) -> str:
        return f"<StateDef: {len(self.paths)} leaves, {hash(self) & 0xFFFFFF:06x}>"


class State(MutableMapping[Hashable, Any]):
    """A nested mapping from paths to Variables that owns them.

    `state["layers"][0]["kernel"]` and `state.layers[0].kernel` give the Variable, `[...]` its value.
    Arrays that an object holds as attributes appear as bare arrays. `a | b` merges, `b` winning;
    `a - b` takes away the paths of `b`.

    Args:
      mapping: A nested mapping, or pairs of key and value. Variables are copied (their arrays are
        shared): a State never aliases a model. Keys of one level are all str or all int.

    Raises:
      StructureError: One level mixes str and int keys, or has other ones; the path is named.

    Example:
      >>> state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> state["kernel"].shape, list(state)
      ((2, 3), ['bias', 'kernel'])
    """

    __slots__ = (
        "__weakref__",
        "_level",
        "_own_version",
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

    def __init__(self, mapping: Mapping[Any, Any] | Iterable[tuple[Any, Any]] = (), /) -> None:
        level = current_level()
        _init(self, level)
        self._tree = _owned_tree(dict(mapping), (), level)

    @classmethod
    def _make(cls, values: Sequence[Any], statedef: StateDef, level: Level) -> "State":
        """Makes a State around a list of values, without copies or checks."""
        self = object.__new__(cls)
        _init(self, level)
        self._values, self._statedef = list(values), statedef
        return self

    @classmethod
    def _of_tree(cls, tree: dict[Hashable, Any], level: Level, root: "State | None") -> "State":
        self = object.__new__(cls)
        _init(self, level)
        self._tree, self._root = tree, root
        return self

    def _dicts(self) -> dict[Hashable, Any]:
        """Returns the nested dicts of Variables, making them if need be."""
        if self._tree is None:
            values, statedef = self._values, self._statedef
            assert values is not None and statedef is not None
            level = self._level
            if level is None:
                level = self._level = current_level()
            self._variables = [
                value if kind is ARRAY_LEAF else _planned(kind[0]._make(value, kind[1], level))
                for value, kind in zip(values, statedef.leaves, strict=True)
            ]
            self._tree = _nest(statedef.paths, self._variables)
            self._values = None
        return self._tree

    def _flat(self) -> tuple[StateDef, list[Any]]:
        """Returns the StateDef and the Variables (or bare values) in its order."""
        tree = self._dicts()
        variables, statedef = self._variables, self._statedef
        if variables is None or statedef is None or self._root is not None:
            pairs = list(_walk(tree, ()))
            variables = [leaf for _, leaf in pairs]
            statedef = StateDef(
                tuple(path for path, _ in pairs), tuple(_kind(leaf) for leaf in variables)
            )
            if self._root is None:
                for leaf in variables:
                    _planned(leaf)
                self._variables, self._statedef = variables, statedef
        elif any(
            isinstance(leaf, Variable) and leaf._meta is not kind[1]
            for leaf, kind in zip(variables, statedef.leaves, strict=True)
        ):
            self._statedef = statedef = StateDef(
                statedef.paths, tuple(_kind(leaf) for leaf in variables)
            )
        return statedef, variables

    # The face of a leaf: what plans and the lift use.

    @property
    def _meta(self) -> StateDef:
        if self._values is not None:
            assert self._statedef is not None
            return self._statedef
        return self._flat()[0]

    @property
    def _value(self) -> list[Any]:
        if self._values is not None:
            return self._values
        return [leaf._value if isinstance(leaf, Variable) else leaf for leaf in self._flat()[1]]

    @_value.setter
    def _value(self, values: Sequence[Any]) -> None:
        if self._values is not None:
            self._values = list(values)
            return
        statedef, variables = self._flat()
        for number, value in enumerate(values):
            leaf = variables[number]
            if isinstance(leaf, Variable):
                leaf._value = value
            elif leaf is not value:
                _level_of(self._dicts(), statedef.paths[number])[statedef.paths[number][-1]] = value
                variables[number] = value

    @property
    def _version(self) -> int:
        variables = self._variables
        if variables is None:
            return self._own_version
        return self._own_version + sum(
            leaf._version for leaf in variables if isinstance(leaf, Variable)
        )

    @_version.setter
    def _version(self, version: int) -> None:
        self._own_version += 1

    def _restructured(self) -> None:
        root = self if self._root is None else self._root
        root._variables = root._statedef = None
        root._own_version = max(root._own_version, 1)
        structure_changed(root)

    def _restructure(self, values: Sequence[Any], statedef: StateDef) -> None:
        """Takes on other paths and values; Variables at paths that stay keep their identity."""
        old = dict(self.flat_state())
        leaves = []
        for path, kind, value in zip(statedef.paths, statedef.leaves, values, strict=True):
            leaf = old.get(path)
            if kind is not ARRAY_LEAF and type(leaf) is kind[0]:
                leaf._value, leaf._meta = value, kind[1]
            else:
                leaf = value if kind is ARRAY_LEAF else kind[0]._make(value, kind[1], self._level)
            leaves.append(leaf)
        tree = self._dicts()
        tree.clear()
        tree.update(_nest(statedef.paths, leaves))
        self._restructured()

    def __getitem__(self, key: Hashable) -> Any:
        tree = self._dicts()
        try:
            value = tree[key]
        except KeyError:
            raise KeyError(
                f"State has no key {key!r} at this level; it has {_some(tree)}."
            ) from None
        if type(value) is dict:
            root = self if self._root is None else self._root
            return State._of_tree(value, self._level, root)
        if isinstance(value, Variable) and value._level is None:
            value._level = self._level
        return value

    def __setitem__(self, key: Hashable, value: Any) -> None:
        tree = self._dicts()
        root = self if self._root is None else self._root
        check_writable(root, f"set {key!r} of a State")
        level = current_level()
        if isinstance(value, Mapping):
            value = _owned_tree(dict(value), (key,), level)
        elif isinstance(value, Variable):
            value = _copied(value, level)
        if key not in tree:
            _check_keys([*tree, key], ())
            items = sorted([*tree.items(), (key, value)], key=lambda item: item[0])
            tree.clear()
            tree.update(items)
        else:
            tree[key] = value
        self._restructured()

    def __delitem__(self, key: Hashable) -> None:
        root = self if self._root is None else self._root
        check_writable(root, f"delete {key!r} of a State")
        del self._dicts()[key]
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
        if name.startswith("__"):
            raise AttributeError(name)
        try:
            return self[name]
        except KeyError as error:
            raise AttributeError(str(error.args[0])) from None

    def __setattr__(self, name: str, value: Any) -> None:
        if name in State.__slots__ or name in ("_value", "_version"):
            object.__setattr__(self, name, value)
        else:
            self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]

    def __or__(self, other: Mapping[Any, Any]) -> "State":
        return State.merge(self, other)

    def __sub__(self, other: Mapping[Any, Any]) -> "State":
        taken = set(flat_paths(other))
        return State.from_flat_path(
            {path: leaf for path, leaf in self.flat_state() if path not in taken}
        )

    def __repr__(self) -> str:
        from nnxlite._core import render  # only where text is asked for

        return render.text(self)

    def __getstate__(self) -> Any:
        statedef, variables = self._flat()
        return [(path, leaf) for path, leaf in zip(statedef.paths, variables, strict=True)]

    def __setstate__(self, pairs: Any) -> None:
        _init(self, current_level())
        self._tree = _nest([path for path, _ in pairs], [leaf for _, leaf in pairs])

    def __copy__(self) -> "State":
        statedef, values = self._meta, self._value
        return State._make(values, statedef, current_level())

    def flat_state(self) -> "FlatState":
        """Returns the pairs of path and Variable, in sorted order."""
        statedef, variables = self._flat()
        return FlatState(zip(statedef.paths, variables, strict=True))

    @classmethod
    def from_flat_path(cls, flat: Mapping[Path, Any] | Iterable[tuple[Path, Any]], /) -> "State":
        """Makes a State from paths and Variables.

        Example:
          >>> nnx.State.from_flat_path({("a", "b"): nnx.Param(jnp.ones(2))})["a"]["b"].shape
          (2,)
        """
        tree: dict[Hashable, Any] = {}
        for path, leaf in dict(flat).items():
            level = tree
            for depth, key in enumerate(path[:-1]):
                level = level.setdefault(key, {})
                if type(level) is not dict:
                    raise StructureError(
                        f"{format_path(path[: depth + 1], 'state')} cannot be both a leaf and the "
                        f"parent of {format_path(path, 'state')}."
                    )
            if path[-1] in level:
                raise StructureError(
                    f"{format_path(path, 'state')} cannot be both a leaf and a parent."
                )
            level[path[-1]] = leaf
        return cls(tree)

    def filter(self, first: Filter, /, *filters: Filter) -> Any:
        """Returns the leaves that match, as one State per filter; the rest is left out."""
        return filter_state(self, first, *filters)

    def split(self, first: Filter, /, *filters: Filter) -> Any:
        """Returns one State per filter; each leaf has to match one of them."""
        return split_state(self, first, *filters)

    @staticmethod
    def merge(state: Mapping[Any, Any], /, *states: Mapping[Any, Any]) -> "State":
        """Merges States, of two leaves at one path the later one."""
        return merge_state(state, *states)

    def map(self, f: Callable[[Path, Any], Any], /) -> "State":
        """Returns the State of `f(path, leaf)`."""
        return map_state(f, self)

    def to_pure_dict(self, extract_fn: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
        """Returns nested plain dicts of the values; see `nnx.to_pure_dict`."""
        return to_pure_dict(self, extract_fn)

    def replace_by_pure_dict(
        self,
        pure_dict: Mapping[Any, Any],
        replace_fn: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Sets values from nested plain dicts; see `nnx.replace_by_pure_dict`."""
        replace_by_pure_dict(self, pure_dict, replace_fn)

    @property
    def raw_mapping(self) -> Mapping[Hashable, Any]:
        """The nested plain dicts themselves."""
        return self._dicts()


GraphState = State


def _init(state: State, level: Level) -> None:
    state._values = state._tree = state._variables = state._statedef = state._root = None
    object.__setattr__(state, "_own_version", 0)
    state._level = level


def _planned(leaf: Any) -> Any:
    """Lets changes of a Variable's metadata move the epoch, so that plans look at its State."""
    if isinstance(leaf, Variable) and not leaf._version:
        leaf._version = 1
    return leaf


def _kind(leaf: Any) -> Leaf:
    return (type(leaf), leaf._meta) if isinstance(leaf, Variable) else ARRAY_LEAF


def _copied(variable: Variable, level: Level) -> Variable:
    return type(variable)._make(variable._value, variable._meta, level)


def _nest(paths: Sequence[Path], leaves: Sequence[Any]) -> dict[Hashable, Any]:
    tree: dict[Hashable, Any] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        level = tree
        for key in path[:-1]:
            level = level.setdefault(key, {})
        level[path[-1]] = leaf
    return tree


def _level_of(tree: dict[Hashable, Any], path: Path) -> dict[Hashable, Any]:
    for key in path[:-1]:
        tree = tree[key]
    return tree


def _walk(tree: Mapping[Hashable, Any], path: Path) -> Iterator[tuple[Path, Any]]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _walk(value, (*path, key))
        else:
            yield (*path, key), value


def _owned_tree(mapping: dict[Any, Any], path: Path, level: Level) -> dict[Hashable, Any]:
    _check_keys(list(mapping), path)
    tree: dict[Hashable, Any] = {}
    for key in sorted(mapping):
        value = mapping[key]
        if isinstance(value, Mapping):
            tree[key] = _owned_tree(dict(value), (*path, key), level)
        else:
            tree[key] = _copied(value, level) if isinstance(value, Variable) else value
    return tree


def _check_keys(keys: list[Any], path: Path) -> None:
    found = {type(key) for key in keys}
    if len(found) > 1 or not found <= {str, int}:
        names = ", ".join(sorted(cls.__name__ for cls in found))
        raise StructureError(
            f"{format_path(path, 'state')} has keys of types {names}. The keys of one level of a "
            "State must be all str or all int; nnx.restore_int_paths turns digit strings, as "
            "checkpoint formats write them, into ints."
        )


def _some(tree: Mapping[Hashable, Any]) -> str:
    keys = [repr(key) for key in tree]
    return ", ".join(keys[:8]) + (f" and {len(keys) - 8} more" if len(keys) > 8 else "") or "none"


# Nodes of the pytree: State at the root, plain dicts below, Variables.


def _flatten(state: State) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        return (Opaque(state),), OPAQUE
    tree = state._dicts()
    return tree.values(), tuple(tree)


def _flatten_with_keys(state: State) -> tuple[Iterable[Any], Any]:
    if FLATTENING.opaque:
        return ((DictKey("state"), Opaque(state)),), OPAQUE
    tree = state._dicts()
    return [(DictKey(key), value) for key, value in tree.items()], tuple(tree)


def _unflatten(keys: Any, children: Iterable[Any]) -> Any:
    if keys is OPAQUE:
        (child,) = children
        return child.node if type(child) is Opaque else child
    return State._of_tree(dict(zip(keys, children, strict=True)), current_level(), None)


jax.tree_util.register_pytree_with_keys(State, _flatten_with_keys, _unflatten, _flatten)
graph.register_kind(State, graph.STATE)


class FlatState(tuple[tuple[Path, Any], ...]):
    """The pairs of path and Variable of a State, in sorted order."""

    __slots__ = ()

    @property
    def paths(self) -> tuple[Path, ...]:
        """The paths."""
        return tuple(path for path, _ in self)

    @property
    def leaves(self) -> tuple[Any, ...]:
        """The Variables, or bare values."""
        return tuple(leaf for _, leaf in self)


def flat_paths(mapping: Mapping[Any, Any]) -> Iterator[Path]:
    """Yields the paths of the leaves of a State or of nested dicts."""
    source = mapping._dicts() if isinstance(mapping, State) else mapping
    return (path for path, _ in _walk(source, ()))


def to_flat_state(state: State) -> FlatState:
    """Returns the pairs of path and Variable of a State, in sorted order.

    Example:
      >>> nnx.to_flat_state(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))).paths
      (('bias',), ('kernel',))
    """
    return state.flat_state()


def from_flat_state(flat: Mapping[Path, Any] | Iterable[tuple[Path, Any]]) -> State:
    """Makes a State from paths and Variables; the inverse of `to_flat_state`."""
    return State.from_flat_path(flat)


def select(
    pairs: Sequence[tuple[Path, Any]], predicates: Sequence[Predicate]
) -> tuple[list[list[int]], list[int]]:
    """Gives each leaf to the first predicate that takes it.

    Returns:
      Per predicate the numbers of its leaves, and the numbers of those that none took.
    """
    groups: list[list[int]] = [[] for _ in predicates]
    rest = []
    for number, (path, leaf) in enumerate(pairs):
        for group, predicate in zip(groups, predicates, strict=True):
            if predicate(path, leaf):
                group.append(number)
                break
        else:
            rest.append(number)
    return groups, rest


def unmatched_error(pairs: Sequence[tuple[Path, Any]], rest: Sequence[int]) -> StructureError:
    """The error for leaves that no filter of a split took."""
    shown = ", ".join(
        f"{format_path(pairs[n][0])} ({type(pairs[n][1]).__name__})" for n in rest[:5]
    )
    more = f" and {len(rest) - 5} more" if len(rest) > 5 else ""
    return StructureError(
        f"The filters leave {len(rest)} of {len(pairs)} leaves unmatched: {shown}{more}. Add a "
        "filter for them, or end with `...` to take the rest."
    )


def filter_state(state: State, first: Filter, /, *filters: Filter) -> Any:
    """Returns the leaves that match, as one State per filter; the rest is left out.

    Example:
      >>> state = nnx.state(nnx.BatchNorm(3, rngs=nnx.Rngs(0)))
      >>> list(nnx.filter_state(state, nnx.BatchStat))
      ['mean', 'var']
    """
    return _selected(state, (first, *filters), partial=True)


def split_state(state: State, first: Filter, /, *filters: Filter) -> Any:
    """Returns one State per filter; each leaf has to match one of them.

    Raises:
      StructureError: A leaf matches no filter; the message lists paths.
    """
    return _selected(state, (first, *filters), partial=False)


def _selected(state: State, filters: tuple[Filter, ...], *, partial: bool) -> Any:
    pairs = state.flat_state()
    groups, rest = select(pairs, filters_to_predicates(filters))
    if rest and not partial:
        raise unmatched_error(pairs, rest)
    states = tuple(State.from_flat_path([pairs[n] for n in group]) for group in groups)
    return states if len(states) > 1 else states[0]


def merge_state(state: Mapping[Any, Any], /, *states: Mapping[Any, Any]) -> State:
    """Merges States; of two leaves at one path, the later State's stays.

    Raises:
      StructureError: A path is a leaf in one State and a parent in another.
    """
    flat: dict[Path, Any] = {}
    for each in (state, *states):
        source = each._dicts() if isinstance(each, State) else each
        flat.update(_walk(source, ()))
    return State.from_flat_path(flat)


def map_state(f: Callable[[Path, Any], Any], state: State) -> State:
    """Returns the State of `f(path, leaf)` for each leaf.

    Example:
      >>> state = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> nnx.map_state(lambda path, leaf: leaf.size, state).kernel
      6
    """
    return State.from_flat_path([(path, f(path, leaf)) for path, leaf in state.flat_state()])


def to_pure_dict(state: State, extract_fn: Callable[[Any], Any] | None = None) -> dict[Any, Any]:
    """Returns nested plain dicts of the values.

    Args:
      state: The State.
      extract_fn: What to take from each leaf; by default the value of a Variable.

    Example:
      >>> nnx.to_pure_dict(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))["kernel"].shape
      (2, 3)
    """
    statedef, variables = state._flat()
    extract = extract_fn or (lambda leaf: leaf.get_value() if isinstance(leaf, Variable) else leaf)
    return _nest(statedef.paths, [extract(leaf) for leaf in variables])


def replace_by_pure_dict(
    state: State,
    pure_dict: Mapping[Any, Any],
    replace_fn: Callable[[Any, Any], Any] | None = None,
) -> None:
    """Sets the values of a State from nested plain dicts, in place.

    Args:
      state: The State to change.
      pure_dict: Values by path; paths may be left out. Digit strings stand for ints, as in
        checkpoint formats whose keys are all strings.
      replace_fn: Given the leaf and the value, returns the leaf to keep. By default the value is
        set on the Variable.

    Raises:
      StructureError: A path is not in the State; nothing is changed then.
    """
    statedef, variables = state._flat()
    numbers = {path: number for number, path in enumerate(statedef.paths)}
    found = []
    for path, value in _walk(pure_dict, ()):
        number = numbers.get(path, numbers.get(_with_ints(path)))
        if number is None:
            raise StructureError(
                f"{format_path(path, 'state')} is not in the State, which has "
                f"{', '.join(format_path(p, 'state') for p in statedef.paths[:8])}"
                f"{', ...' if len(statedef.paths) > 8 else ''}."
            )
        found.append((number, value))
    for number, value in found:
        leaf = variables[number]
        if replace_fn is not None:
            new = replace_fn(leaf, value)
            if new is leaf:
                continue
            value = new
        if isinstance(leaf, Variable) and not isinstance(value, Variable):
            leaf.set_value(value)
        else:
            path = statedef.paths[number]
            _level_of(state._dicts(), path)[path[-1]] = value
            state._restructured()


def restore_int_paths(pure_dict: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns nested dicts with digit strings turned into ints, as checkpoint formats need it.

    Example:
      >>> nnx.restore_int_paths({"layers": {"0": {"kernel": 1}}})
      {'layers': {0: {'kernel': 1}}}
    """
    return {
        _with_ints((key,))[0]: restore_int_paths(value) if isinstance(value, Mapping) else value
        for key, value in pure_dict.items()
    }


def _with_ints(path: Path) -> Path:
    return tuple(
        int(key) if isinstance(key, str) and key.isdecimal() and key.isascii() else key
        for key in path
    )

"""The verbs on object graphs: split, merge, update, state, pop, clone, and their kin.

`split` gives a `GraphDef` and States, `merge` makes a fresh object of them, `update` carries the
values of States to an existing object. All work through the plan of the object, so that on an
unchanged one they cost about as much as copying a list.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax

from nnxlite._core import filters as filterlib
from nnxlite._core import graph
from nnxlite._core.build import assemble, build, make_leaves
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import Filter, filters_to_predicates
from nnxlite._core.graph import ARRAY_LEAF, OBJECT, GraphDef, kind_of
from nnxlite._core.plan import Plan, make_plan, plan_of
from nnxlite._core.state import State, StateDef, _walk, select, unmatched_error
from nnxlite._core.trace import (
    FOREIGN_READS,
    check_writable,
    current_level,
    record_foreign_read,
)
from nnxlite._core.variable import Variable
from nnxlite._core.versions import structure_changed

A = TypeVar("A")

# One selection: its StateDef, and per entry the leaf number and, for the leaves of a State that is
# itself an attribute, the position inside it (else None).
_Selection = tuple[StateDef, list[tuple[int, int | None]]]


def split(node: A, /, *filters: Filter) -> Any:
    """Splits an object into its `GraphDef` and one State per filter.

    Args:
      node: An object, or a container of objects. Not changed.
      *filters: Each leaf goes to the first filter that matches; without filters all go to one
        State.

    Returns:
      `(graphdef, state, ...)`. The States hold Variables of their own: a snapshot.

    Raises:
      StructureError: A leaf matches no filter; the message lists paths.
      StaticValueError: A static attribute cannot be keyed; the message names it.

    Example:
      >>> graphdef, params, rest = nnx.split(nnx.BatchNorm(3, rngs=nnx.Rngs(0)), nnx.Param, ...)
      >>> list(params), list(rest)
      (['bias', 'scale'], ['mean', 'var'])
    """
    plan = plan_of(node)
    return plan.graphdef, *_states(plan, filters or (...,), partial=False)


def graphdef(node: A, /) -> GraphDef[A]:
    """Returns the static half of an object; equal for objects of equal structure.

    Example:
      >>> nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))  # doctest: +ELLIPSIS
      <GraphDef of Linear: 1 nodes, 2 leaves, ...>
    """
    return plan_of(node).graphdef


def state(node: Any, /, *filters: Filter) -> Any:
    """Returns the State of an object, or one State per filter; what matches none is left out.

    The States hold Variables of their own: writing them does not change `node`; see `update`.

    Example:
      >>> nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)["kernel"].shape
      (2, 3)
    """
    states = _states(plan_of(node), filters or (...,), partial=True)
    return states if len(filters) > 1 else states[0]


def variables(node: Any, /, *filters: Filter) -> Any:
    """Returns the State of the Variables of an object, as `state` does, without bare arrays."""
    predicates = filters_to_predicates(filters or (...,))
    only = [filterlib.All(filterlib.OfType(Variable), predicate) for predicate in predicates]
    return state(node, *only)


def _states(plan: Plan, filters: tuple[Filter, ...], *, partial: bool) -> list[State]:
    values = plan.gather()
    level = current_level()
    states = []
    for statedef, entries in _selections(plan, filters, partial=partial):
        picked = [
            values[number] if inner is None else values[number][inner] for number, inner in entries
        ]
        states.append(State._make(picked, statedef, level))
    return states


def _selections(plan: Plan, filters: tuple[Filter, ...], *, partial: bool) -> list[_Selection]:
    """Says which leaves each filter takes; kept on the GraphDef where values cannot matter."""
    cache = plan.graphdef.cache
    key = ("selections", filters, partial)
    try:
        found = cache.get(key)
    except TypeError:  # an unhashable filter, such as a list
        found, key = None, None
    if found is not None:
        return found
    predicates = filters_to_predicates(filters)
    entries = leaf_entries(plan.graphdef)
    structural = all(filterlib.is_structural(predicate) for predicate in predicates)
    pairs = [(path, _leaf_at(plan, number, inner, kind)) for path, kind, number, inner in entries]
    groups, rest = select(pairs, predicates)
    if rest and not partial:
        raise unmatched_error(pairs, rest)
    result = []
    for group in groups:
        chosen = [entries[n] for n in group]
        statedef = StateDef(
            tuple(path for path, *_ in chosen), tuple(kind for _, kind, *_ in chosen)
        )
        result.append((statedef, [(number, inner) for _, _, number, inner in chosen]))
    if key is not None and structural and ARRAY_LEAF not in plan.graphdef.leaves:
        if len(cache) > 64:
            cache.clear()
        cache[key] = result
    return result


_Entry = tuple[Path, graph.Leaf, int, int | None]


def leaf_entries(graphdef: GraphDef[Any]) -> list[_Entry]:
    """Lists the leaves in the order of a State: path, kind, leaf number, position inside a State."""
    found = graphdef.cache.get("entries")
    if found is not None:
        return found
    entries: list[_Entry] = []
    for number, (path, kind) in enumerate(zip(graphdef.paths, graphdef.leaves, strict=True)):
        if kind[0] is State:
            entries.extend(
                ((*path, *inner_path), inner_kind, number, inner)
                for inner, (inner_path, inner_kind) in enumerate(
                    zip(kind[1].paths, kind[1].leaves, strict=True)
                )
            )
        elif path == ():
            raise StructureError(
                f"A bare {kind[0].__name__} has no path, so it cannot be split into a State. Put it "
                "into an object or a dict, or use its value."
            )
        else:
            entries.append((path, kind, number, None))
    graphdef.cache["entries"] = entries
    return entries


def _leaf_at(plan: Plan, number: int, inner: int | None, kind: graph.Leaf) -> Any:
    handle = plan.handles[number]()
    if inner is not None:
        return handle._flat()[1][inner]
    return handle._value if kind is ARRAY_LEAF else handle


def merge(graphdef: GraphDef[A], state: Any, /, *states: Any, copy: bool = False) -> A:
    """Makes a fresh object from a GraphDef and States; the inverse of `split`.

    The new object never aliases the States, and belongs to the trace level that runs now, so that
    it may be changed inside `jax.grad`, `jax.jit` and the rest.

    Args:
      graphdef: From `split` or `graphdef`.
      state: A State, or nested dicts of Variables or arrays.
      *states: More of them; together they hold each leaf once.
      copy: Accepted for flax programs; both values mean the same here.

    Raises:
      StructureError: Leaves are missing or surplus; the message lists paths.

    Example:
      >>> model = nnx.merge(*nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
      >>> model(jnp.ones((1, 2))).shape
      (1, 3)
    """
    values, kinds = _collect(graphdef, (state, *states))
    level = current_level()
    if kinds is None:
        return build(graphdef, values, level)[0][0]
    return assemble(
        graphdef.skeleton,
        [None] * len(graphdef.skeleton.records),
        make_leaves(kinds, values, level),
        level,
    )[0]


def _collect(
    graphdef: GraphDef[Any], states: tuple[Any, ...]
) -> tuple[list[Any], list[graph.Leaf] | None]:
    """Returns the leaf values in the order of the GraphDef, and their kinds if those differ."""
    entries = leaf_entries(graphdef)
    by_path = {path: (number, inner) for path, _, number, inner in entries}
    values: list[Any] = [
        [_MISSING] * len(kind[1].paths) if kind[0] is State else _MISSING
        for kind in graphdef.leaves
    ]
    kinds = list(graphdef.leaves)
    surplus: list[Path] = []
    seen: set[Path] = set()
    for each in states:
        for path, kind, value in _items(each):
            if path in seen:
                raise StructureError(
                    f"{format_path(path)} is in two of the States. Give each leaf once."
                )
            seen.add(path)
            place = by_path.get(path)
            if place is None:
                surplus.append(path)
                continue
            number, inner = place
            if inner is not None:
                values[number][inner] = value
            else:
                values[number] = value
                if kind is not ARRAY_LEAF and kinds[number] is not ARRAY_LEAF:
                    kinds[number] = kind
    missing = [path for path, *_ in entries if path not in seen]
    if missing or surplus:
        raise StructureError(_mismatch(missing, surplus, set(by_path)))
    same = all(kind == mine for kind, mine in zip(kinds, graphdef.leaves, strict=True))
    return values, None if same else kinds


_MISSING: Any = object()


def _mismatch(missing: Sequence[Path], surplus: Sequence[Path], known: set[Path]) -> str:
    parts = []
    if missing:
        parts.append(f"{len(missing)} leaves are missing: {_some_paths(missing)}")
    if surplus:
        parts.append(f"{len(surplus)} leaves are not part of the object: {_some_paths(surplus)}")
    text = "The States do not fit the GraphDef: " + "; ".join(parts) + "."
    return text + _digit_hint(surplus, known)


def _some_paths(paths: Sequence[Path]) -> str:
    shown = ", ".join(format_path(path) for path in paths[:5])
    return shown + (f" and {len(paths) - 5} more" if len(paths) > 5 else "")


def _digit_hint(surplus: Sequence[Path], known: set[Path]) -> str:
    for path in surplus:
        turned = tuple(
            int(key) if isinstance(key, str) and key.isdecimal() else key for key in path
        )
        if turned != path and turned in known:
            return (
                " Some keys are digit strings where the object has list indices: turn them into "
                "ints with nnx.restore_int_paths."
            )
    return ""


def _items(source: Any) -> Any:
    """Yields path, kind and raw value of the leaves of a State or of nested dicts."""
    if isinstance(source, State):
        if FOREIGN_READS.recorders:
            record_foreign_read(source)
        statedef = source._meta
        return zip(statedef.paths, statedef.leaves, source._value, strict=True)
    if isinstance(source, Mapping):
        return (
            (path, (type(leaf), leaf._meta), leaf._value)
            if isinstance(leaf, Variable)
            else (path, ARRAY_LEAF, leaf)
            for path, leaf in _walk(source, ())
        )
    raise TypeError(
        f"Expected a State or nested dicts, found {type(source).__name__}. Use nnx.state(object) "
        "to get the State of an object."
    )


def update(node: Any, state: Any, /, *states: Any) -> None:
    """Carries the values of States to an object, in place.

    Args:
      node: The object to change. Leaves that the States do not have stay as they are.
      state: A State, or nested dicts of Variables or arrays.
      *states: More of them; of two values at one path the later one counts.

    Raises:
      StructureError: A path is not in the object. Nothing is changed then.
      TraceLevelError: The object belongs to another trace level.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
      >>> float(model.kernel[...].sum())
      0.0
    """
    plan = plan_of(node)
    updates = [_update_numbers(plan.graphdef, each) for each in (state, *states)]
    plan.check_writable((n for numbers, _, _ in updates for n, _ in numbers), "update")
    for numbers, values, kinds in updates:
        for (number, inner), value, kind in zip(numbers, values, kinds, strict=True):
            leaf = plan.handles[number]()
            if inner is not None:
                inside = list(leaf._value)
                inside[inner] = value
                leaf._value = inside
                continue
            leaf._value = value
            if kind is not ARRAY_LEAF and isinstance(leaf, Variable) and kind[1] is not leaf._meta:
                leaf._meta = kind[1]
                structure_changed(leaf)


def _update_numbers(
    graphdef: GraphDef[Any], source: Any
) -> tuple[list[tuple[int, int | None]], Sequence[Any], Sequence[graph.Leaf]]:
    if isinstance(source, State):
        if FOREIGN_READS.recorders:
            record_foreign_read(source)
        statedef, values = source._meta, source._value
        kinds: Sequence[graph.Leaf] = statedef.leaves
        found = graphdef.cache.get(("update", statedef))
        if found is None:
            found = _numbers_of(graphdef, statedef.paths)
            if len(graphdef.cache) > 64:
                graphdef.cache.clear()
            graphdef.cache["update", statedef] = found
        return found, values, kinds
    items = list(_items(source))
    paths = tuple(path for path, _, _ in items)
    return (
        _numbers_of(graphdef, paths),
        [value for _, _, value in items],
        [kind for _, kind, _ in items],
    )


def _numbers_of(graphdef: GraphDef[Any], paths: tuple[Path, ...]) -> list[tuple[int, int | None]]:
    by_path = {path: (number, inner) for path, _, number, inner in leaf_entries(graphdef)}
    surplus = [path for path in paths if path not in by_path]
    if surplus:
        raise StructureError(
            f"{len(surplus)} leaves of the State are not part of the object: "
            f"{_some_paths(surplus)}. Nothing was updated." + _digit_hint(surplus, set(by_path))
        )
    return [by_path[path] for path in paths]


def pop(node: Any, first: Filter, /, *filters: Filter) -> Any:
    """Takes the Variables that match out of an object, and returns their State(s).

    Raises:
      StructureError: A Variable that matches is the object itself, or part of a tuple.

    Example:
      >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
      >>> sorted(nnx.pop(model, nnx.BatchStat)), hasattr(model, "mean")
      (['mean', 'var'], False)
    """
    plan, flat = make_plan((node,))
    given = (first, *filters)
    selections = _selections(plan, given, partial=True)
    taken = {id(flat.leaves[n]) for _, entries in selections for n, inner in entries}
    check_holders = [
        holder for holder in flat.nodes if any(id(x) in taken for x in _contents(holder))
    ]
    reachable = {id(x) for holder in check_holders for x in _contents(holder)}
    if not taken <= reachable:
        raise StructureError(
            "pop can take Variables out of objects, lists and dicts; one that matches is part of a "
            "tuple or another value. Assign a new value to that attribute instead."
        )
    states = tuple(_states(plan, given, partial=True))
    for holder in check_holders:
        if kind_of(holder) == OBJECT:
            check_writable(holder, f"pop from {type(holder).__name__}")
    for holder in check_holders:
        _take_out(holder, taken)
    return states if len(states) > 1 else states[0]


def _contents(holder: Any) -> Sequence[Any]:
    if type(holder) is list:
        return holder
    return list((holder if type(holder) is dict else holder._node_items()).values())


def _take_out(holder: Any, taken: set[int]) -> None:
    if type(holder) is list:
        holder[:] = [x for x in holder if id(x) not in taken]
        return
    items = holder if type(holder) is dict else holder._node_items()
    for key in [key for key, x in items.items() if id(x) in taken]:
        del items[key]
    if type(holder) is not dict:
        structure_changed(holder)


def clone(node: A, /, *, share: bool = False) -> A:
    """Returns a copy of an object: same structure and sharing, Variables of its own.

    Args:
      node: The object.
      share: If true, the copy's Variables hold the very same arrays, which is cheaper. By default
        all buffers are copied in one jitted call, so that donating one object keeps the other.
        Under a trace nothing is copied either way.

    Example:
      >>> a = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> b = nnx.clone(a)
      >>> bool((a.kernel == b.kernel).all()), a.kernel is b.kernel
      (True, False)
    """
    plan = plan_of(node)
    values = plan.gather()
    if not share:
        values = copy_arrays(values)
    return build(plan.graphdef, values, current_level())[0][0]


def copy_arrays(values: list[Any]) -> list[Any]:
    """Copies every concrete array of a tree, all JAX arrays in one call."""
    leaves, treedef = jax.tree.flatten(values)
    numbers = [
        n
        for n, leaf in enumerate(leaves)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)
    ]
    for number, new in zip(numbers, _copied([leaves[n] for n in numbers]), strict=True):
        leaves[number] = new
    leaves = [copy.copy(leaf) if type(leaf) is graph.np.ndarray else leaf for leaf in leaves]
    return jax.tree.unflatten(treedef, leaves)


@jax.jit
def _copied(arrays: list[Any]) -> list[Any]:
    return [jax.numpy.copy(array) for array in arrays]


def pure(tree: Any) -> Any:
    """Returns a tree with the Variables of its States replaced by their values.

    Example:
      >>> nnx.pure(nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))["kernel"].shape
      (2, 3)
    """
    return jax.tree.map(
        lambda x: x.get_value() if isinstance(x, Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Variable),
    )


as_pure = pure


class ApplyCaller:
    """Reaches into an object and calls it; see `call` and `GraphDef.apply`."""

    __slots__ = ("_finish", "_object", "_target")

    def __init__(self, root: Any, target: Any, finish: Callable[[Any, Any], Any]) -> None:
        self._object, self._target, self._finish = root, target, finish

    def __getattr__(self, name: str) -> "ApplyCaller":
        return ApplyCaller(self._object, getattr(self._target, name), self._finish)

    def __getitem__(self, key: Any) -> "ApplyCaller":
        return ApplyCaller(self._object, self._target[key], self._finish)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._finish(self._target(*args, **kwargs), self._object)


def apply_graphdef(graphdef: GraphDef[Any], state: Any, *states: Any) -> ApplyCaller:
    """Merges, and returns what calls the object and splits it again."""
    root = merge(graphdef, state, *states)
    return ApplyCaller(root, root, lambda out, root: (out, split(root)))


def call(graphdef_state: tuple[GraphDef[Any], Any], /) -> ApplyCaller:
    """Returns a caller for a split object: calls give `(output, (graphdef, state))`.

    Example:
      >>> parts = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> out, parts = nnx.call(parts)(jnp.ones((1, 2)))
      >>> out.shape
      (1, 3)
    """
    return apply_graphdef(*graphdef_state)

"""merge and update: from States to a fresh object, or to one that exists.

`merge` is the inverse of `split`. `update` carries values to an object in place, by its plan.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nnxlite._core.build import build
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.graphdef import ARRAY_LEAF, GraphDef, Leaf
from nnxlite._core.plan import Plan, plan_of
from nnxlite._core.split import Entry, Spot, leaf_entries, remember
from nnxlite._core.state import State, walk
from nnxlite._core.statedef import StateDef, kind_of_leaf
from nnxlite._core.trace import FOREIGN_READS, current_level, record_foreign_read
from nnxlite._core.values import normalized, own
from nnxlite._core.variable import Variable
from nnxlite._core.versions import structure_changed

A = TypeVar("A")

_MISSING: Any = object()


def merge(graphdef: GraphDef[A], state: Any, /, *states: Any, copy: bool = False) -> A:
    """Makes a fresh object from a GraphDef and States; the inverse of `split`.

    The new object never aliases the States, and belongs to the trace level that runs now, so that
    it may be changed inside `jax.grad`, `jax.jit` and the rest.

    Args:
      graphdef: From `split` or `graphdef`.
      state: A State, or nested dicts of Variables or values.
      *states: More of them; together they hold each leaf once.
      copy: Accepted for flax programs; both values mean the same here.

    Raises:
      StructureError: Leaves are missing or surplus; the message lists paths.

    Example:
      >>> model = nnx.merge(*nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
      >>> model(jnp.ones((1, 2))).shape
      (1, 3)
    """
    if not isinstance(graphdef, GraphDef):
        raise TypeError(
            f"Expected a GraphDef, found {type(graphdef).__name__}. Call merge(graphdef, state, "
            "...) with what nnx.split gave."
        )
    given = (state, *states)
    order = _known_order(graphdef, given)
    if order is not None:
        if FOREIGN_READS.recorders:
            for each in given:
                record_foreign_read(each)
        sources = [each._value for each in given]
        kinds, values = graphdef.leaves, [sources[which][place] for which, place in order]
    else:
        kinds, values = _collected(graphdef, given)
    for number in _bare_arrays(graphdef):
        values[number] = own(values[number])
    return build(graphdef, values, current_level(), kinds)[0][0]


def _bare_arrays(graphdef: GraphDef[Any]) -> list[int]:
    """Returns the numbers of the leaves that are bare arrays."""
    found = graphdef.cache.get("bare arrays")
    if found is None:
        found = [n for n, kind in enumerate(graphdef.leaves) if kind is ARRAY_LEAF]
        remember(graphdef, "bare arrays", found)
    return found


def _known_order(graphdef: GraphDef[Any], states: tuple[Any, ...]) -> list[tuple[int, int]] | None:
    """Says where in the States each leaf is, if they hold just the leaves, of the same kinds."""
    if not all(isinstance(each, State) for each in states):
        return None
    statedefs = tuple(each._meta for each in states)
    key = ("merge", statedefs)
    order = graphdef.cache.get(key, _MISSING)
    if order is _MISSING:
        order = _order(leaf_entries(graphdef), statedefs)
        remember(graphdef, key, order)
    return order


def _order(entries: Sequence[Entry], statedefs: Sequence[StateDef]) -> list[tuple[int, int]] | None:
    places = {
        (path, kind): (which, place)
        for which, statedef in enumerate(statedefs)
        for place, (path, kind) in enumerate(zip(statedef.paths, statedef.leaves, strict=True))
    }
    order = [places.get((path, kind)) for path, kind, (_, inner) in entries if inner is None]
    if len(order) == len(entries) == sum(len(each.paths) for each in statedefs):
        return None if None in order else order  # type: ignore[return-value]
    return None


def _collected(
    graphdef: GraphDef[Any], states: tuple[Any, ...]
) -> tuple[Sequence[Leaf], list[Any]]:
    """Returns kinds and values of the leaves in the order of the GraphDef."""
    entries = leaf_entries(graphdef)
    by_path = {path: number for number, (path, _, _) in enumerate(entries)}
    kinds = [kind for _, kind, _ in entries]
    values: list[Any] = [_MISSING] * len(entries)
    surplus: list[Path] = []
    for each in states:
        for path, kind, value in _items(each, by_path):
            number = by_path.get(path)
            if number is None:
                surplus.append(path)
                continue
            if values[number] is not _MISSING:
                raise StructureError(
                    f"{format_path(path)} is in two of the States. Give each leaf once."
                )
            values[number] = value
            if kinds[number] is not ARRAY_LEAF:
                if kind is ARRAY_LEAF:
                    values[number] = normalized(value)
                else:
                    kinds[number] = kind
    missing = [path for path, number in by_path.items() if values[number] is _MISSING]
    if missing or surplus:
        raise StructureError(_mismatch(missing, surplus, by_path))
    return _by_leaf(graphdef, entries, kinds, values)


def _by_leaf(
    graphdef: GraphDef[Any], entries: Sequence[Entry], kinds: list[Leaf], values: list[Any]
) -> tuple[Sequence[Leaf], list[Any]]:
    """Puts the leaves of States that are attributes together again."""
    if len(entries) == len(graphdef.leaves) and all(inner is None for *_, (_, inner) in entries):
        return kinds, values
    by_number: list[tuple[list[Leaf], list[Any]]] = [([], []) for _ in graphdef.leaves]
    for (_, _, (number, _)), kind, value in zip(entries, kinds, values, strict=True):
        by_number[number][0].append(kind)
        by_number[number][1].append(value)
    all_kinds: list[Leaf] = []
    all_values: list[Any] = []
    for kind, (inner_kinds, inner_values) in zip(graphdef.leaves, by_number, strict=True):
        if kind[0] is State:
            all_kinds.append((State, StateDef.of(kind[1].paths, tuple(inner_kinds))))
            all_values.append(inner_values)
        else:
            all_kinds.append(inner_kinds[0])
            all_values.append(inner_values[0])
    return all_kinds, all_values


def _mismatch(missing: Sequence[Path], surplus: Sequence[Path], known: Mapping[Path, Any]) -> str:
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


def _digit_hint(surplus: Sequence[Path], known: Mapping[Path, Any]) -> str:
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


def _items(source: Any, known: Mapping[Path, Any]) -> Any:
    """Yields path, kind and raw value of the leaves of a State or of nested dicts."""
    if isinstance(source, State):
        if FOREIGN_READS.recorders:
            record_foreign_read(source)
        statedef = source._meta
        return zip(statedef.paths, statedef.leaves, source._value, strict=True)
    if isinstance(source, Mapping):
        return (
            (path, kind_of_leaf(leaf), leaf._value if isinstance(leaf, Variable) else leaf)
            for path, leaf in walk(source, known)
        )
    raise TypeError(
        f"Expected a State or nested dicts, found {type(source).__name__}. Use nnx.state(object) "
        "to get the State of an object."
    )


def update(node: Any, state: Any, /, *states: Any) -> None:
    """Carries the values of States to an object, in place.

    Args:
      node: The object to change. Leaves that the States do not have stay as they are.
      state: A State, or nested dicts of Variables or values.
      *states: More of them; of two values at one path the later one counts.

    Raises:
      StructureError: A path is not in the object. Nothing is changed then.
      TraceLevelError: The object belongs to another trace level. Nothing is changed then.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> nnx.update(model, jax.tree.map(jnp.zeros_like, nnx.state(model)))
      >>> float(model.kernel[...].sum())
      0.0
    """
    plan = plan_of(node)
    updates = [_located(plan.graphdef, each) for each in (state, *states)]
    plan.check_writable([number for spots, _, _ in updates for number, _ in spots], "update")
    for spots, kinds, values in updates:
        _write(plan, spots, kinds, values)


def _located(
    graphdef: GraphDef[Any], source: Any
) -> tuple[list[Spot], Sequence[Leaf], Sequence[Any]]:
    """Returns spots, kinds and values of the leaves of a State or of nested dicts."""
    if isinstance(source, State):
        if FOREIGN_READS.recorders:
            record_foreign_read(source)
        statedef, values = source._meta, source._value
        found = graphdef.cache.get(("update", statedef))
        if found is None:
            found = _spots_of(graphdef, statedef.paths)
            remember(graphdef, ("update", statedef), found)
        return found, statedef.leaves, values
    known = {path: spot for path, _, spot in leaf_entries(graphdef)}
    items = list(_items(source, known))
    spots = _spots_of(graphdef, [path for path, _, _ in items])
    return spots, [kind for _, kind, _ in items], [value for _, _, value in items]


def _spots_of(graphdef: GraphDef[Any], paths: Sequence[Path]) -> list[Spot]:
    by_path = {path: spot for path, _, spot in leaf_entries(graphdef)}
    surplus = [path for path in paths if path not in by_path]
    if surplus:
        raise StructureError(
            f"{len(surplus)} leaves of the State are not part of the object: "
            f"{_some_paths(surplus)}. Nothing was updated." + _digit_hint(surplus, by_path)
        )
    return [by_path[path] for path in paths]


def _write(plan: Plan, spots: Sequence[Spot], kinds: Sequence[Leaf], values: Sequence[Any]) -> None:
    insides: dict[int, tuple[StateDef, list[Any]]] = {}
    handles = plan.handles
    for (number, inner), kind, value in zip(spots, kinds, values, strict=True):
        leaf = handles[number]()
        if inner is not None:
            if number not in insides:
                insides[number] = leaf._flat()
            statedef, leaves = insides[number]
            if not isinstance(leaves[inner], Variable):
                leaf._write(statedef.paths[inner], leaves[inner], own(value))
                continue
            leaf = leaves[inner]
        if not isinstance(leaf, Variable):
            leaf._value = own(value)
        elif kind is ARRAY_LEAF:
            leaf._value = normalized(value)
        else:
            leaf._value = value
            if leaf._meta is not kind[1]:
                leaf._meta = kind[1]
                structure_changed(leaf)

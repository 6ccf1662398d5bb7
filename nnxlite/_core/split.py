"""split, state and graphdef: from an object to its GraphDef and States.

They work through the plan of the object, so that on an unchanged one they cost about as much as
copying a list. The way back is in `merge.py`.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

from nnxlite._core import filters as filterlib
from nnxlite._core.errors import Path, StructureError
from nnxlite._core.filters import Filter, filters_to_predicates
from nnxlite._core.graphdef import ARRAY_LEAF, GraphDef, Leaf
from nnxlite._core.modes import graph_flag
from nnxlite._core.plan import Plan, plan_of
from nnxlite._core.state import State
from nnxlite._core.state_forms import select, unmatched_error
from nnxlite._core.statedef import StateDef
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Variable

A = TypeVar("A")

# Where a leaf of a State is in an object: its leaf number and, for the leaves of a State that is
# itself an attribute, the position inside it (else None).
Spot = tuple[int, int | None]

MAX_CACHED = 64


def split(node: Any, /, *filters: Filter, graph: bool | None = None) -> Any:
    """Splits an object into its `GraphDef` and one State per filter.

    Args:
      node: An object, or a container of objects. Not changed.
      *filters: Each leaf goes to the first filter that matches; without filters all go to one
        State.
      graph: Ignored; there is only one mode.

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
    return plan.graphdef, *states_of(plan, filters or (...,), partial=False)


def graphdef(node: A, /, *, graph: bool | None = None) -> GraphDef[A]:
    """Returns the static half of an object; equal for objects of equal structure.

    Args:
      node: An object, or a container of objects.
      graph: Ignored; there is only one mode.

    Example:
      >>> nnx.graphdef(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))  # doctest: +ELLIPSIS
      <GraphDef of Linear: 1 nodes, 2 leaves, ...>
    """
    return plan_of(node).graphdef


def state(node: Any, /, *filters: Filter, graph: bool | None = None) -> Any:
    """Returns the State of an object, or one State per filter; what matches none is left out.

    The States hold Variables of their own: writing them does not change `node`; see `update`.

    Args:
      node: An object, or a container of objects.
      *filters: As for `split`.
      graph: Ignored; there is only one mode.

    Example:
      >>> nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)["kernel"].shape
      (2, 3)
    """
    states = states_of(plan_of(node), filters or (...,), partial=True)
    return states if len(filters) > 1 else states[0]


@graph_flag
def variables(node: Any, /, *filters: Filter) -> Any:
    """Returns the State of the Variables of an object, as `state` does, without bare arrays.

    Example:
      >>> list(nnx.variables({"a": nnx.Param(jnp.ones(2)), "b": jnp.ones(2)}))
      ['a']
    """
    predicates = filters_to_predicates(filters or (...,))
    only = [filterlib.All(filterlib.OfType(Variable), predicate) for predicate in predicates]
    return state(node, *only)


def states_of(plan: Plan, filters: tuple[Filter, ...], *, partial: bool) -> tuple[State, ...]:
    """Returns one State per filter.

    Raises:
      StructureError: Not `partial`, and a leaf matches no filter.
    """
    values = plan.gather()
    level = current_level()
    states = []
    for statedef, spots in selections(plan, filters, partial=partial):
        picked = [
            values[number] if inner is None else values[number][inner] for number, inner in spots
        ]
        states.append(State._make(picked, statedef, level))
    return tuple(states)


def selections(
    plan: Plan, filters: tuple[Filter, ...], *, partial: bool
) -> list[tuple[StateDef, list[Spot]]]:
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
    pairs = list(zip([path for path, *_ in entries], _leaves_of(plan, entries), strict=True))
    groups, rest = select(pairs, predicates)
    if rest and not partial:
        raise unmatched_error(pairs, rest)
    result = []
    for group in groups:
        chosen = [entries[n] for n in group]
        statedef = StateDef.of(
            tuple([path for path, *_ in chosen]), tuple([kind for _, kind, _ in chosen])
        )
        result.append((statedef, [spot for _, _, spot in chosen]))
    # Of a bare array, whether it is one of JAX or NumPy is not in the structure.
    if (
        key is not None
        and all(map(filterlib.is_structural, predicates))
        and not any(kind is ARRAY_LEAF for _, kind, _ in entries)
    ):
        remember(plan.graphdef, key, result)
    return result


def remember(graphdef: GraphDef[Any], key: Any, value: Any) -> None:
    """Keeps something on a GraphDef, which then has room for some more."""
    if len(graphdef.cache) >= MAX_CACHED:
        graphdef.cache.clear()
    graphdef.cache[key] = value


Entry = tuple[Path, Leaf, Spot]


def leaf_entries(graphdef: GraphDef[Any]) -> list[Entry]:
    """Lists the leaves in the order of a State: path, kind, spot.

    Raises:
      StructureError: A leaf is a root itself, and has no path.
    """
    found = graphdef.cache.get("entries")
    if found is not None:
        return found
    entries: list[Entry] = []
    for number, (path, kind) in enumerate(zip(graphdef.paths, graphdef.leaves, strict=True)):
        if kind[0] is State:
            entries.extend(
                ((*path, *inner_path), inner_kind, (number, inner))
                for inner, (inner_path, inner_kind) in enumerate(
                    zip(kind[1].paths, kind[1].leaves, strict=True)
                )
            )
        elif path == ():
            raise StructureError(
                f"A bare {kind[0].__name__} has no path, so it cannot be split into a State. Put "
                "it into an object or a dict, or use its value."
            )
        else:
            entries.append((path, kind, (number, None)))
    remember(graphdef, "entries", entries)
    return entries


def _leaves_of(plan: Plan, entries: Sequence[Entry]) -> list[Any]:
    """Returns the Variables, or bare values, of the entries."""
    insides: dict[int, list[Any]] = {}
    leaves = []
    for _, kind, (number, inner) in entries:
        handle = plan.handles[number]()
        if inner is not None:
            if number not in insides:
                insides[number] = handle._flat()[1]
            leaves.append(insides[number][inner])
        else:
            leaves.append(handle._value if kind is ARRAY_LEAF else handle)
    return leaves

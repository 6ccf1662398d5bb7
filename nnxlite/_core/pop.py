"""pop: taking Variables out of an object."""

from typing import Any

from nnxlite._core.errors import StructureError, format_path
from nnxlite._core.filters import Filter
from nnxlite._core.graph import Flat
from nnxlite._core.graphdef import FILL_LEAF, FILL_VALUE, Slot, thaw_key
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.plan import make_plan
from nnxlite._core.sowing import DROPPED
from nnxlite._core.split import selections, states_of
from nnxlite._core.state import State
from nnxlite._core.statedef import StateDef
from nnxlite._core.trace import check_writable


def pop(node: Any, first: Filter, /, *filters: Filter) -> Any:
    """Takes the leaves that match out of an object, and returns their State, one per filter.

    Raises:
      StructureError: A leaf that matches is part of a tuple or another value. Nothing is changed.
      TraceLevelError: The object belongs to another trace level. Nothing is changed.

    Example:
      >>> model = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
      >>> sorted(nnx.pop(model, nnx.BatchStat)), hasattr(model, "mean")
      (['mean', 'var'], False)
    """
    plan, flat = make_plan((node,))
    given = (first, *filters)
    spots = [s for _, chosen in selections(plan, given, partial=True) for s in chosen]
    states: Any = states_of(plan, given, partial=True)
    drops = _drops(flat, {number for number, inner in spots if inner is None})
    plan.check_writable([number for number, _ in spots], "pop")
    for number in drops:
        if kind_of(flat.nodes[number]) == OBJECT:
            holder = flat.nodes[number]
            check_writable(holder, f"pop from {type(holder).__name__}")
    for number, keys in drops.items():
        _remove(flat.nodes[number], keys)
    inside: dict[int, set[int]] = {}
    for number, inner in spots:
        if inner is not None:
            inside.setdefault(number, set()).add(inner)
    for number, positions in inside.items():
        _remove_inside(flat.leaves[number], positions)
    if not spots:
        DROPPED.warn((type(node) for node in flat.nodes), given)
    return states if len(states) > 1 else states[0]


def _drops(flat: Flat, leaves: set[int]) -> dict[int, set[Any]]:
    """Returns per node number the keys at which these leaves are.

    Raises:
      StructureError: One of them is part of a value.
    """
    skeleton = flat.graphdef.skeleton
    drops: dict[int, set[Any]] = {}
    for number, record in enumerate(skeleton.records):
        for key, how, payload in record.slots:
            if how == FILL_LEAF and payload in leaves:
                drops.setdefault(number, set()).add(thaw_key(key))
    every_slot = [*skeleton.roots, *(slot for record in skeleton.records for slot in record.slots)]
    for slot in every_slot:
        if slot[1] == FILL_VALUE:
            part = next((leaf for leaf in _leaves_in(slot) if leaf in leaves), None)
            if part is not None:
                raise StructureError(
                    f"pop cannot take out {format_path(flat.graphdef.paths[part])}: it is part of "
                    "a tuple or another value, not of an object, list or dict. Assign a new value "
                    "to the attribute that holds it, or leave it out with a filter."
                )
    return drops


def _leaves_in(slot: Slot) -> list[int]:
    _, how, payload = slot
    if how == FILL_LEAF:
        return [payload]
    if how == FILL_VALUE:
        return [leaf for inner in payload[1] for leaf in _leaves_in(inner)]
    return []


def _remove(holder: Any, keys: set[Any]) -> None:
    if type(holder) is list:
        holder[:] = [x for index, x in enumerate(holder) if index not in keys]
    elif type(holder) is dict:
        for key in keys:
            del holder[key]
    else:
        holder._node_remove(keys)


def _remove_inside(state: State, positions: set[int]) -> None:
    statedef, values = state._meta, state._value
    kept = [n for n in range(len(values)) if n not in positions]
    state._restructure(
        [values[n] for n in kept],
        StateDef.of(
            tuple([statedef.paths[n] for n in kept]), tuple([statedef.leaves[n] for n in kept])
        ),
    )

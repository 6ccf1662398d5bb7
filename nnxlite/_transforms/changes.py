"""Changes: what a function did to the objects it was given, value by value, and in words.

`Out.changed` has one value per changed leaf. A transform that treats the Variables of a State
differently takes it apart into *emissions* on the way out of the traced function, and puts it
together again around the caller's values of what did not change.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from nnxlite._core.errors import format_path
from nnxlite._core.graphdef import (
    FILL_LEAF,
    FILL_METHOD,
    FILL_NODE,
    FILL_STATIC,
    FILL_VALUE,
    GraphDef,
    Slot,
    thaw_key,
)
from nnxlite._core.oneline import Bare, types_line
from nnxlite._core.state import State
from nnxlite._core.statics import short_text
from nnxlite._transforms.axes import Entry
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.packing import Out, OutDef, Update, same_value


class Emission(NamedTuple):
    """One value that leaves the mapped function beside its result.

    Attributes:
      position: Which of `Out.changed` it belongs to.
      inner: Its place there, in a State.
      old: The entry of the arguments whose value it replaces; None for something new.
      new: If the structure changed, its entry in the new graph.
    """

    position: int
    inner: int | None
    old: Entry | None
    new: Entry | None


class Frame(NamedTuple):
    """How one of `Out.changed` is put together.

    Attributes:
      number: For a State the number of its leaf before the call; -1 if it is new.
      parts: For a State, per Variable of it, where an unchanged value was before; else None.
    """

    number: int
    parts: tuple[int | None, ...] | None


def emissions(
    graphdef: GraphDef[Any], out: Out, values: Sequence[Any]
) -> tuple[tuple[Frame, ...], tuple[Emission, ...], list[Any]]:
    """Takes `out.changed` apart into entries, and leaves out what did not change.

    Args:
      graphdef: Of the arguments.
      out: What the pure function returned.
      values: What it was given.

    Returns:
      How to put it together again, what leaves, and the values of that.
    """
    update = out.definition.update
    if update is None:
        kinds = [graphdef.leaves[number] for number in out.definition.changed]
        origins: list[tuple[int, int | None]] = [(n, None) for n in out.definition.changed]
    else:
        news = [new for new, kept in enumerate(update.kept) if not kept]
        kinds = [update.graphdef.leaves[new] for new in news]
        origins = [(update.leaves[new], new) for new in news]
    frames: list[Frame] = []
    found: list[Emission] = []
    emitted: list[Any] = []
    for position, ((number, new), kind, value) in enumerate(
        zip(origins, kinds, out.changed, strict=True)
    ):
        if kind[0] is not State:
            old = (number, None) if number >= 0 else None
            found.append(Emission(position, None, old, None if new is None else (new, None)))
            emitted.append(value)
            frames.append(Frame(-1, None))
            continue
        places = _old_places(graphdef, number)
        parts: list[int | None] = []
        for inner, (path, part) in enumerate(zip(kind[1].paths, value, strict=True)):
            before = places.get(path)
            if before is not None and same_value(part, values[number][before]):
                parts.append(before)
                continue
            old = None if before is None else (number, before)
            found.append(Emission(position, inner, old, None if new is None else (new, inner)))
            emitted.append(part)
            parts.append(None)
        frames.append(Frame(number, tuple(parts)))
    return tuple(frames), tuple(found), emitted


def _old_places(graphdef: GraphDef[Any], number: int) -> dict[Any, int]:
    if number < 0:
        return {}
    return {path: inner for inner, path in enumerate(graphdef.leaves[number][1].paths)}


def changed_values(
    frames: Sequence[Frame],
    given: Sequence[Emission],
    parts: Sequence[Any],
    originals: Sequence[Any],
) -> list[Any]:
    """Puts `Out.changed` together again, around the caller's values of what did not change."""
    changed: list[Any] = [
        None
        if frame.parts is None
        else [None if n is None else originals[frame.number][n] for n in frame.parts]
        for frame in frames
    ]
    for emission, part in zip(given, parts, strict=True):
        if emission.inner is None:
            changed[emission.position] = part
        else:
            changed[emission.position][emission.inner] = part
    return changed


def result_text(crossing: Crossing, out: Out) -> str:
    """Writes a result: its containers, the classes of its objects, the types of its arrays."""
    definition = out.definition
    spec = definition.spec or (None,) * definition.tree.num_leaves
    arrays = iter(out.arrays)
    leaves = [
        next(arrays) if entry is None else _class_at(crossing, definition, entry) for entry in spec
    ]
    return tree_text(definition.tree, leaves)


def tree_text(tree: Any, leaves: Sequence[Any]) -> str:
    """Writes a tree on one line, with types of arrays in it, and names of classes."""
    texts = [Bare(x.__name__ if isinstance(x, type) else types_line(x)) for x in leaves]
    lines = repr(jax.tree_util.tree_unflatten(tree, texts)).splitlines()
    text = " ".join(line.split("  # ")[0].strip() for line in lines)  # without counts of a State
    return text if len(text) <= MOST_TEXT else text[: MOST_TEXT - 3] + "..."


MOST_TEXT = 400


def _class_at(crossing: Crossing, definition: OutDef, entry: Any) -> type:
    update, graphdef = definition.update, crossing.graphdef
    if update is not None:
        graphdef = update.graphdef
        _, how, number = graphdef.skeleton.roots[update.first_output + entry]
        entry = (how == FILL_NODE, number)
    is_node, number = entry
    return graphdef.skeleton.records[number].cls if is_node else graphdef.leaves[number][0]


def structure_change(crossing: Crossing, update: Update) -> str | None:
    """Names the first change of structure to what was there before; None if things were only made.

    Used by transforms that let values change, and nothing else.
    """
    before, after = crossing.graphdef, update.graphdef
    for new, number in enumerate(update.nodes):
        if number < 0:
            continue
        old_slots = {s[0]: s for s in before.skeleton.records[number].slots}
        new_slots = {s[0]: s for s in after.skeleton.records[new].slots}
        for key in sorted({*old_slots, *new_slots}, key=str):
            a, b = old_slots.get(key), new_slots.get(key)
            if a is None or b is None or _translated(b, update) != (a[1], a[2]):
                where = format_path((thaw_key(key),), crossing.node_path(number))
                was = None if a is None else _content(a, before)
                now = None if b is None else _content(b, after)
                return f"{where} {_verb(was, now)}"
    for new, number in enumerate(update.leaves):
        if number >= 0 and after.leaves[new] != before.leaves[number]:
            (cls, was), (_, now) = before.leaves[number], after.leaves[new]
            if cls is State:
                return f"{crossing.leaf_path(number)} (State) got other entries"
            return f"the metadata of {crossing.leaf_path(number)} was changed from {was} to {now}"
    return None


def _verb(was: str | None, now: str | None) -> str:
    if was is None:
        return f"({now}) was added"
    if now is None:
        return f"({was}) was removed"
    return f"was changed from {was} to {'another' if was == now else now}"


def _content(slot: Slot, graphdef: GraphDef[Any]) -> str:
    _, how, payload = slot
    if how == FILL_STATIC:
        return short_text(payload.value)
    if how == FILL_LEAF:
        kind = graphdef.leaves[payload][0]
        return "array" if graphdef.leaves[payload][1] is None else kind.__name__
    if how == FILL_NODE:
        return graphdef.skeleton.records[payload].cls.__name__
    return "a method" if how == FILL_METHOD else "a tuple or other pytree"


def _translated(slot: Slot, update: Update) -> tuple[int, Any]:
    """Returns how a slot is filled, in the numbers from before the call; -1 for what is new."""
    _, how, payload = slot
    if how == FILL_LEAF:
        return how, update.leaves[payload]
    if how == FILL_NODE:
        return how, update.nodes[payload]
    if how == FILL_METHOD:
        return how, (update.nodes[payload[0]], payload[1])
    if how == FILL_VALUE:
        slots = tuple((s[0], *_translated(s, update)) for s in payload[1])
        return how, (payload[0], slots)
    return how, payload

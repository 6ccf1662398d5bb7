"""Bindings: a crossing for certain objects of the caller.

A `Binding` reads the values of the caller's objects, and puts what a pure function changed back
into them. It holds them weakly, through their plan.
"""

import weakref
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from nnxlite._core.build import assemble, build
from nnxlite._core.errors import TraceLevelError
from nnxlite._core.extras import MAPPED, TRAVELLING, Nodes, Use
from nnxlite._core.graph import Flat, flatten
from nnxlite._core.graphdef import ARRAY_LEAF
from nnxlite._core.kinds import STATE, kind_of
from nnxlite._core.placement import sharding_of
from nnxlite._core.plan import Plan
from nnxlite._core.trace import (
    EAGER,
    FOREIGN_READS,
    Level,
    Opaque,
    current_level,
)
from nnxlite._core.variable import Variable
from nnxlite._core.versions import structure_changed
from nnxlite._transforms.crossing import Crossing, Lifted
from nnxlite._transforms.packing import Out, OutDef


class Binding:
    """A crossing for certain objects of the caller, which are held weakly."""

    def __init__(self, crossing: Crossing, plan: Plan, roots: Sequence[Any], lift: Lifted) -> None:
        self.crossing, self.plan, self.lift = crossing, plan, lift
        self.treedef = crossing.treedef
        self.roots = [
            (position, weakref.ref(root))
            for position, root in zip(crossing.roots, roots, strict=True)
        ]
        self.plain = False
        self.simple: list[type] | None = None
        self._writers: tuple[OutDef | None, list[Any]] = (None, [])

    def holds_for_arguments(self, args: tuple[Any, ...]) -> bool:
        """As `holds_for`, for positional arguments that are an object or an array each."""
        for position, ref in self.roots:
            if ref() is not args[position]:
                return False
        return self.plan.is_current()

    def holds_for(self, leaves: list[Any]) -> bool:
        """Tells whether the objects among the leaves are the bound ones, unchanged in structure."""
        for position, ref in self.roots:
            if ref() is not leaves[position].node:
                return False
        return self.plan.is_current()

    def deliver(self, out: Out, level: Level) -> Any:
        """Puts what changed into the caller's objects and returns the result."""
        definition = out.definition
        if FOREIGN_READS.recorders:  # a trace around this call reads what this one has read
            for recorder in FOREIGN_READS.recorders:
                recorder.update(self.crossing.foreign)
        if definition.update is not None:
            outputs = self._restructure(out, level)
        else:
            outputs = None
            if out.changed:
                if not (self.plan.eager and level is EAGER):
                    self.check_writable(definition.changed, level)
                for handle, value in zip(self._handles(definition), out.changed, strict=True):
                    handle()._value = value
        if out.extras:
            self._deliver_extras(out)
        if definition.spec is None:
            return jax.tree_util.tree_unflatten(definition.tree, out.arrays)
        return self._result(out, outputs)

    def _deliver_extras(self, out: Out) -> None:
        for extra, given in zip(TRAVELLING.active, out.extras, strict=True):
            extra.deliver(given, self.live_nodes())

    def live_nodes(self) -> Nodes:
        """Gives the caller's objects by node number; None for lists and dicts."""
        return [_nothing if ref is None else ref for ref in self.plan.nodes]

    def extra_inputs(self, use: Use = MAPPED) -> tuple[Any, ...]:
        """Returns what the travelling extras hand in."""
        active = TRAVELLING.active
        if not active:
            return ()
        nodes = self.live_nodes()
        return tuple(extra.inputs(nodes, use) for extra in active)

    def _handles(self, definition: OutDef) -> list[Any]:
        known, handles = self._writers
        if known is not definition:
            handles = [self.plan.handles[n] for n in definition.changed]
            self._writers = (definition, handles)
        return handles

    def _result(self, out: Out, outputs: list[Any] | None) -> Any:
        arrays = iter(out.arrays)
        leaves = []
        for entry in out.definition.spec or ():
            if entry is None:
                leaves.append(next(arrays))
            elif outputs is not None:
                leaves.append(outputs[entry])
            else:
                is_node, number = entry
                source = self.plan.nodes if is_node else self.plan.handles
                leaves.append(source[number]())
        return jax.tree_util.tree_unflatten(out.definition.tree, leaves)

    def _restructure(self, out: Out, level: Level) -> list[Any]:
        """Brings the caller's objects into their new structure, and returns the output objects."""
        update = out.definition.update
        assert update is not None
        before = flatten(tuple(ref() for _, ref in self.roots))
        old_kinds = before.graphdef.leaves
        changing = [
            number
            for number, kept, kind in zip(
                update.leaves, update.kept, update.graphdef.leaves, strict=True
            )
            if number >= 0 and not (kept and kind == old_kinds[number])
        ]
        self.check_writable(changing, level)
        new_values = iter(out.changed)
        leaves, writes = [], []
        for number, kept, (cls, meta) in zip(
            update.leaves, update.kept, update.graphdef.leaves, strict=True
        ):
            value = None if kept else next(new_values)
            if meta is None:  # an array
                leaves.append(before.leaves[number] if kept else value)
            elif number < 0:
                leaves.append(cls._make(value, meta, level))
            else:
                leaves.append(before.leaves[number])
                writes.append((before.leaves[number], kept, value, meta))
        nodes = [None if n < 0 else before.nodes[n] for n in update.nodes]
        roots = assemble(
            update.graphdef.skeleton,
            nodes,
            leaves,
            level,
            lambda number: self._check_node(update.nodes[number], before, level),
        )
        for leaf, kept, value, meta in writes:
            _write_leaf(leaf, kept, value, meta)
        return roots[update.first_output :]

    def abstract_result(self, out: Out) -> Any:
        """Returns the result of an abstract evaluation around fresh objects; writes nothing."""
        self._deliver_extras(out)
        definition, level = out.definition, current_level()
        values = _abstract(self.plan.gather())
        update = definition.update
        outputs: list[Any] = []
        if update is None:
            for number, value in zip(definition.changed, out.changed, strict=True):
                values[number] = value
            _, nodes, leaves = build(self.crossing.graphdef, values, level)
        else:
            new_values = iter(out.changed)
            values = [
                values[number] if kept else next(new_values)
                for number, kept in zip(update.leaves, update.kept, strict=True)
            ]
            outputs, nodes, leaves = build(update.graphdef, values, level)
        _place_shapes(leaves)
        arrays = iter(out.arrays)
        results = []
        for entry in definition.spec or (None,) * definition.tree.num_leaves:
            if entry is None:
                results.append(next(arrays))
            elif update is not None:
                results.append(outputs[update.first_output + entry])
            else:
                results.append(nodes[entry[1]] if entry[0] else leaves[entry[1]])
        return jax.tree_util.tree_unflatten(definition.tree, results)

    def check_writable(self, numbers: Sequence[int], level: Level) -> None:
        """Raises `TraceLevelError` if one of these leaves belongs to another trace level."""
        for number in numbers:
            leaf = self.plan.handles[number]()
            if leaf._level is None:
                leaf._level = level
            elif leaf._level != level:
                kind = self.crossing.graphdef.leaves[number]
                name = "array" if kind is ARRAY_LEAF else kind[0].__name__
                raise self._level_error(f"{self.leaf_path(number)} ({name})")

    def _check_node(self, number: int, before: Flat, level: Level) -> None:
        owner = before.nodes[self.crossing.owner(number)]
        if owner._level is not None and owner._level != level:
            kind = type(before.nodes[number]).__name__
            raise self._level_error(f"{self.crossing.node_path(number)} ({kind})")

    def _level_error(self, what: str) -> TraceLevelError:
        return TraceLevelError(
            f"{self.lift.title} changed {what}, which was created at another trace level than "
            "the one that runs now: the new value would leak a tracer or be lost. Pass the object "
            "as an argument of every transform in between (use nnxlite's, such as nnx.vmap), or "
            "merge a copy inside the function and return it."
        )

    def leaf_path(self, number: int) -> str:
        """Writes where a leaf is, starting with the name of the argument."""
        return self.crossing.leaf_path(number)

    def leaf_at(self, number: int) -> Any:
        """Returns a leaf of the caller: a Variable, a State or an array."""
        handle = self.plan.handles[number]()
        return handle._value if self.crossing.graphdef.leaves[number] is ARRAY_LEAF else handle


def simple_types(leaves: list[Any], treedef: Any) -> list[type] | None:
    """Returns the types of the arguments if all are positional, and an object or an array each."""
    args, kwargs = treedef.children()
    if kwargs.num_leaves or any(arg.num_leaves != 1 for arg in args.children()):
        return None
    types = []
    for leaf, arg in zip(leaves, args.children(), strict=True):
        if type(leaf) is Opaque:
            if arg.num_nodes != 2:  # the object is inside of a container
                return None
            types.append(type(leaf.node))
        elif jax.tree_util.treedef_is_leaf(arg):
            types.append(type(leaf))
        else:
            return None
    return types


def _abstract(values: list[Any]) -> list[Any]:
    """Returns values with shapes for arrays, all in one call, as JAX keeps something of each."""
    leaves, treedef = jax.tree.flatten(values)
    arrays = [n for n, x in enumerate(leaves) if isinstance(x, jax.Array | np.ndarray)]
    shapes = jax.eval_shape(_it, [leaves[n] for n in arrays])
    for n, shape in zip(arrays, shapes, strict=True):
        leaves[n] = shape
    return jax.tree.unflatten(treedef, leaves)


def _it(value: Any) -> Any:
    return value


def _place_shapes(leaves: Sequence[Any]) -> None:
    """Gives the shapes in Variables the sharding that an array in their place would have."""
    for leaf in leaves:
        for variable in leaf._flat()[1] if kind_of(leaf) == STATE else (leaf,):
            if not isinstance(variable, Variable):
                continue
            value = variable._value
            if isinstance(value, jax.ShapeDtypeStruct) and value.sharding is None:
                where = sharding_of(value.shape, variable._meta.mapping)
                if where is not None:
                    variable._value = value.update(sharding=where)


def _write_leaf(leaf: Any, kept: bool, value: Any, meta: Any) -> None:
    if kind_of(leaf) == STATE:
        if leaf._meta is not meta:
            leaf._restructure(value, meta)
        elif not kept:
            leaf._value = value
        return
    if not kept:
        leaf._value = value
    if leaf._meta is not meta:
        leaf._meta = meta
        structure_changed(leaf)


def _nothing() -> None:
    return None

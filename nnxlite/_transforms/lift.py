"""The lift: how a function of objects crosses a JAX transform. Every transform goes this way.

On the way in, the arguments are flattened with each object as one opaque leaf, and the graph of
all those objects together gives a `GraphDef` and the values of its leaves. The *pure function*
takes values and plain arguments, builds fresh clones, runs the user's function, and packs an
`Out`: the result and whatever changed. On the way out, what changed is put into the caller's own
objects, and objects in the result that are arguments become the caller's again.

    Crossing   what a pure function depends on: GraphDef, argument tree, statics. Knows no object.
    Binding    a Crossing for certain objects of the caller, held weakly, with their plan.
    Lift       one user function with its caches of both.

What changed rides in the auxiliary data of `Out`, so it is right for whichever of JAX's cached
executables ran. Clones, not the caller's objects, are filled with tracers: a function may reach the
caller's objects by another road, and an exception must leave them as they were.
"""

import contextlib
import functools
import inspect
import os
import sys
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, Protocol, Self

import jax

from nnxlite._core import scope
from nnxlite._core.build import assemble, build
from nnxlite._core.errors import Path, TraceLevelError, format_path
from nnxlite._core.extras import TRAVELLING, Nodes
from nnxlite._core.graph import Flat, flatten
from nnxlite._core.graphdef import ARRAY_LEAF, GraphDef, containers_of, leaf_paths, node_paths
from nnxlite._core.kinds import OBJECT, STATE, kind_of
from nnxlite._core.plan import Plan, make_plan
from nnxlite._core.trace import (
    EAGER,
    FLATTENING,
    FOREIGN_READS,
    SPECIAL,
    ForeignRead,
    Level,
    Opaque,
    current_level,
    recording,
)
from nnxlite._core.versions import structure_changed
from nnxlite._transforms.arguments import Chosen, Statics, parameters, paths_in_closure

MAX_BINDINGS = 64
MAX_CROSSINGS = 128


class Update(NamedTuple):
    """How the structure changed: the new graph, and which of its parts existed before.

    Attributes:
      graphdef: Of all nodes and leaves there were, followed by the objects of the result.
      nodes: Per node of it, its number before, or -1.
      leaves: Per leaf of it, its number before, or -1.
      kept: Per leaf, whether its value is the one it had before.
      first_output: The number of roots that stand before the objects of the result.
    """

    graphdef: GraphDef[Any]
    nodes: tuple[int, ...]
    leaves: tuple[int, ...]
    kept: tuple[bool, ...]
    first_output: int


class OutDef(NamedTuple):
    """The static half of what a pure function returns.

    Attributes:
      tree: The result, with each object one leaf.
      spec: Per leaf of it None for an array, else (True, node number) or (False, leaf number);
        without any object, None.
      changed: The numbers of the leaves with a new value.
      update: How the structure changed, if it did; then `spec` counts its output roots.
    """

    tree: Any
    spec: tuple[Any, ...] | None
    changed: tuple[int, ...]
    update: Update | None


class Out:
    """What a pure function returns: the arrays of the result, and the values that changed."""

    __slots__ = ("arrays", "changed", "definition", "extras")

    def __init__(
        self, arrays: list[Any], changed: list[Any], extras: Any, definition: OutDef
    ) -> None:
        self.arrays, self.changed, self.extras = arrays, changed, extras
        self.definition = definition


jax.tree_util.register_pytree_node(
    Out,
    lambda out: ((out.arrays, out.changed, out.extras), out.definition),
    lambda definition, children: Out(*children, definition),
)


def opaque_flatten(tree: Any, mode: Any = True) -> tuple[list[Any], Any]:
    """Flattens a tree with each object, State and Variable as one `Opaque` leaf.

    With `mode=OPEN_STATES` a State is flattened to its values.
    """
    before = FLATTENING.opaque
    FLATTENING.opaque = mode
    SPECIAL.append(None)
    try:
        return jax.tree_util.tree_flatten(tree)
    finally:
        SPECIAL.pop()
        FLATTENING.opaque = before


class Around(Protocol):
    """What a transform does to the clones before and after the user's function."""

    def before(self, leaves: list[Any]) -> None: ...
    def after(self, nodes: list[Any], leaves: list[Any], result: Any) -> None: ...


class Crossing:
    """All that a pure function depends on; it refers to no object of the caller.

    Attributes:
      graphdef: Of all objects among the arguments.
      treedef: Of the arguments, each object one leaf.
      roots: Where objects stand among the leaves of `treedef`.
      rest: Where the other arguments stand.
      pure: `pure(values, rest, extras) -> Out`; a transform may add an `Around`.
      kept: For whoever uses the crossing: what it made of `pure`.
      foreign: What the traces in `kept` read of objects that the function closes over.
    """

    def __init__(
        self,
        lift: "Lift",
        graphdef: GraphDef[Any],
        treedef: Any,
        roots: tuple[int, ...],
        statics: Statics | None,
        nested: bool,
    ) -> None:
        self.graphdef, self.treedef, self.roots = graphdef, treedef, roots
        self.statics = statics
        self.rest = tuple(n for n in range(treedef.num_leaves) if n not in set(roots))
        self.kept: dict[Any, Any] = {}
        self.foreign: dict[int, ForeignRead] = {}
        self._fn, self._method, self._nested = lift.fn, lift.method, nested
        self._title, self.mode = lift.title, lift.mode
        self.pure = self._make_pure()

    def _make_pure(self) -> Callable[..., Out]:
        graphdef, treedef, positions = self.graphdef, self.treedef, self.roots
        rest_positions, statics = self.rest, self.statics
        fn, method, nested = self._fn, self._method, self._nested
        title, mode = self._title, self.mode

        def run(level: Level, args: Any, kwargs: Any) -> Any:
            if level is EAGER:  # under jax.disable_jit
                return fn(*args, **kwargs)
            found: dict[int, ForeignRead] = {}
            with recording(found):
                result = fn(*args, **kwargs)
            if self.kept:  # else each call traces anew
                self.foreign.update(found)
            return result

        def pure(
            values: list[Any],
            rest: list[Any],
            extras: Sequence[Any],
            around: "Around | None" = None,
        ) -> Out:
            level = current_level()
            roots, nodes, leaves = build(graphdef, values, level)
            arguments: list[Any] = [None] * treedef.num_leaves
            for position, value in zip(rest_positions, rest, strict=True):
                arguments[position] = value
            for position, root in zip(positions, roots, strict=True):
                arguments[position] = root
            args, kwargs = jax.tree_util.tree_unflatten(treedef, arguments)
            if statics is not None:
                args, kwargs = statics.joined(args, kwargs)
            receiver = next((root for root in roots if kind_of(root) == OBJECT), None)
            if around is not None:
                around.before(leaves)
            try:
                with (
                    _extras_inside(extras, nodes) as outputs,
                    scope.inside_transform(receiver if nested else None, method),
                ):
                    result = run(level, args, kwargs)
                    given_out = [output() for output in outputs]
                if around is not None:
                    around.after(nodes, leaves, result)
                outputs_tree = opaque_flatten(result, mode)
                return pack(graphdef, tuple(roots), nodes, leaves, values, outputs_tree, given_out)
            except TraceLevelError as error:
                _say_where(error, fn, title)
                raise

        return pure

    def refresh(self) -> None:
        """Lets everything be traced anew."""
        self.kept.clear()
        self.foreign = {}
        self.pure = self._make_pure()

    def is_like(self, other: "Crossing") -> bool:
        """Tells whether one and the same pure function serves both."""
        return (
            self.graphdef is other.graphdef
            and self.treedef == other.treedef
            and _key_of(self.statics) == _key_of(other.statics)
        )

    def summary(self) -> str:
        """Describes the arguments in one line, for messages."""
        named = [] if self.statics is None else self.statics.named.items()
        static = [] if self.statics is None else self.statics.positional.items()
        fixed = "".join(f", {name}={value!r}" for name, value in [*static, *named])
        return f"{self.graphdef!r}, {len(self.rest)} other values{fixed}"

    def argument_positions(self, chosen: Chosen) -> list[int]:
        """Returns the positions, among the leaves of `treedef`, of the chosen arguments."""
        size = self.treedef.num_leaves
        args, kwargs = jax.tree_util.tree_unflatten(self.treedef, range(size))
        taken = set() if self.statics is None else set(self.statics.positional)
        numbers = [n for n in range(len(args) + len(taken)) if n not in taken]
        found = [arg for n, arg in zip(numbers, args, strict=True) if n in chosen.positions]
        found += [arg for name, arg in kwargs.items() if name in chosen.names]
        return jax.tree_util.tree_leaves(found)

    def leaf_path(self, number: int) -> str:
        """Writes where a leaf is, starting with the name of the argument."""
        path = self.graphdef.paths[number]
        if len(self.roots) == 1:
            return format_path(path, self.argument_name(0))
        return format_path(path[1:], self.argument_name(path[0]))

    def argument_name(self, root: int) -> str:
        """Returns the name of the parameter that the root object with this number came in by."""
        return self.place(self.roots[root])

    def place(self, position: int) -> str:
        """Writes where a leaf of the arguments is: the name of the parameter, and the way there."""
        args, kwargs = jax.tree_util.tree_unflatten(self.treedef, range(self.treedef.num_leaves))
        if self.statics is not None:
            args, _ = self.statics.joined(args, {})
        known = parameters(self._fn)
        named = [
            (known[n] if n < len(known) else f"args[{n}]", arg)
            for n, arg in enumerate(args)
            if self.statics is None or n not in self.statics.positional
        ]
        for name, value in [*named, *kwargs.items()]:
            for path, number in jax.tree_util.tree_leaves_with_path(value):
                if number == position:
                    return name + jax.tree_util.keystr(path)
        return "argument"

    def node_path(self, number: int) -> str:
        """Writes where a node is first met, starting with the name of the argument."""
        skeleton = self.graphdef.skeleton
        for root, slot in enumerate(skeleton.roots):
            path = node_paths(skeleton, [((), slot)]).get(number)
            if path is not None:
                return format_path(path, self.argument_name(root))
        return "an argument"

    def owner(self, number: int) -> int:
        """Returns the number of the object that a list or dict belongs to, or its own."""
        records = self.graphdef.skeleton.records
        if records[number].cls not in (list, dict):
            return number
        objects = [n for n, record in enumerate(records) if record.cls not in (list, dict)]
        return next(n for n in objects if number in containers_of(records, records[n].slots))

    def root_entries(self, root: int) -> dict[int, Path]:
        """Returns, per leaf number reached from one root, the path from there."""
        return leaf_paths(self.graphdef.skeleton, [((), self.graphdef.skeleton.roots[root])])


def _say_where(error: TraceLevelError, fn: Callable[..., Any], title: str) -> None:
    """Puts into the message by which name the function reaches what it tried to write."""
    if error.node is None:
        return
    paths = paths_in_closure(fn, [error.node])
    if paths:
        error.node = None
        error.args = (f"{title} closes over {paths[0]}. {error.args[0]}",)


@contextmanager
def _extras_inside(inputs: Sequence[Any], clones: list[Any]) -> Iterator[list[Callable[[], Any]]]:
    if not inputs:
        yield []
        return
    nodes = [functools.partial(_itself, clone) for clone in clones]
    active = TRAVELLING.active
    TRAVELLING.active = ()
    try:
        with ExitStack() as stack:
            yield [
                stack.enter_context(extra.inside(given, nodes))
                for extra, given in zip(active, inputs, strict=True)
            ]
    finally:
        TRAVELLING.active = active


def _key_of(statics: Statics | None) -> Any:
    return None if statics is None else statics.key


def _itself(value: Any) -> Any:
    return value


def _nothing() -> None:
    return None


def pack(
    graphdef: GraphDef[Any],
    roots: tuple[Any, ...],
    nodes: list[Any],
    leaves: list[Any],
    values: Sequence[Any],
    result: tuple[list[Any], Any],
    extras: Any,
) -> Out:
    """Packs the flattened result of a function and what it changed on the clones it was given."""
    outputs, tree = result
    objects = [output.node for output in outputs if type(output) is Opaque]
    numbers = {id(node): (True, n) for n, node in enumerate(nodes)}
    numbers |= {
        id(leaf): (False, n)
        for n, (leaf, kind) in enumerate(zip(leaves, graphdef.leaves, strict=True))
        if kind is not ARRAY_LEAF
    }
    arrays = [output for output in outputs if type(output) is not Opaque]
    after = flatten(roots)
    if _same_structure(graphdef, nodes, leaves, after) and all(id(x) in numbers for x in objects):
        now = after.leaves
        changed = tuple(
            n
            for n, (leaf, kind, value) in enumerate(zip(now, graphdef.leaves, values, strict=True))
            if not same_value(leaf if kind is ARRAY_LEAF else leaf._value, value)
        )
        spec = None
        if objects:
            spec = tuple(numbers[id(x.node)] if type(x) is Opaque else None for x in outputs)
        new_values = [
            now[n] if graphdef.leaves[n] is ARRAY_LEAF else now[n]._value for n in changed
        ]
        return Out(arrays, new_values, extras, OutDef(tree, spec, changed, None))
    update, new_values = _pack_update(graphdef, nodes, leaves, values, objects)
    spec = None
    if objects:
        order = iter(range(len(objects)))
        spec = tuple(next(order) if type(x) is Opaque else None for x in outputs)
    return Out(arrays, new_values, extras, OutDef(tree, spec, (), update))


def _same_structure(
    graphdef: GraphDef[Any], nodes: list[Any], leaves: list[Any], after: Flat
) -> bool:
    return (
        after.graphdef is graphdef
        and all(a is b for a, b in zip(nodes, after.nodes, strict=True))
        and all(
            a is b
            for a, b, kind in zip(leaves, after.leaves, graphdef.leaves, strict=True)
            if kind is not ARRAY_LEAF
        )
    )


def same_value(new: Any, old: Any) -> bool:
    """Tells whether a leaf still has its value: the very same arrays."""
    if new is old:
        return True
    if isinstance(new, jax.Array) or isinstance(old, jax.Array):
        return False
    new_leaves, new_tree = jax.tree_util.tree_flatten(new)
    old_leaves, old_tree = jax.tree_util.tree_flatten(old)
    return new_tree == old_tree and all(a is b for a, b in zip(new_leaves, old_leaves, strict=True))


def _pack_update(
    graphdef: GraphDef[Any],
    nodes: list[Any],
    leaves: list[Any],
    values: Sequence[Any],
    objects: list[Any],
) -> tuple[Update, list[Any]]:
    # Everything there was is a root, so that changes to what was detached arrive as well.
    owned = [x for x, kind in zip(leaves, graphdef.leaves, strict=True) if kind is not ARRAY_LEAF]
    after = flatten((*nodes, *owned, *objects))
    _check_own(nodes, owned, after)
    node_numbers = {id(node): n for n, node in enumerate(nodes)}
    leaf_numbers = {id(leaf): n for n, leaf in enumerate(leaves)}
    kept, new_values, numbers = [], [], []
    for leaf, kind in zip(after.leaves, after.graphdef.leaves, strict=True):
        number = leaf_numbers.get(id(leaf), -1)
        if number >= 0 and (graphdef.leaves[number] is ARRAY_LEAF) != (kind is ARRAY_LEAF):
            number = -1
        value = leaf if kind is ARRAY_LEAF else leaf._value
        unchanged = number >= 0 and same_value(value, values[number])
        if not unchanged:
            new_values.append(value)
        kept.append(unchanged)
        numbers.append(number)
    update = Update(
        after.graphdef,
        tuple(node_numbers.get(id(node), -1) for node in after.nodes),
        tuple(numbers),
        tuple(kept),
        len(nodes) + len(owned),
    )
    return update, new_values


def _check_own(nodes: list[Any], owned: list[Any], after: Flat) -> None:
    """Raises if an object that the function closed over became part of the result."""
    level = current_level()
    known = {id(x) for x in (*nodes, *owned)}
    variables = [x for x, place in zip(after.leaves, after.places, strict=True) if place is None]
    for node in (*after.nodes, *variables):
        if id(node) in known or type(node) in (list, dict):
            continue
        if node._level is not None and node._level != level:
            error = TraceLevelError(
                f"The function returns, or makes part of an argument, a {type(node).__name__} that "
                "it closes over: the caller would get a copy, not the object itself. Pass the "
                "object as an argument, or return nnx.clone(...) of it."
            )
            error.node = node
            raise error


class Binding:
    """A crossing for certain objects of the caller, which are held weakly."""

    def __init__(self, crossing: Crossing, plan: Plan, roots: Sequence[Any], lift: "Lift") -> None:
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

    def extra_inputs(self) -> tuple[Any, ...]:
        """Returns what the travelling extras hand in."""
        active = TRAVELLING.active
        if not active:
            return ()
        nodes = self.live_nodes()
        return tuple(extra.inputs(nodes) for extra in active)

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
                leaves.append(source[number]())  # type: ignore[misc]
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
        values = [_abstract(value) for value in self.plan.gather()]
        update = definition.update
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


def _simple_types(leaves: list[Any], treedef: Any) -> list[type] | None:
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


def _abstract(value: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else x, value
    )


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


class Lift:
    """One user function, ready to cross a transform, with its caches.

    Args:
      fn: The function.
      transform: The name of the transform in messages, such as `nnx.jit`.
      method: The name of the method, if `fn` is one that was decorated in a class body.
      mode: How arguments and results are flattened; `OPEN_STATES` where a State is a value.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        transform: str,
        method: str | None = None,
        mode: Any = True,
    ) -> None:
        self.fn, self.transform, self.method, self.mode = fn, transform, method, mode
        self._last: Binding | None = None
        self._bindings: OrderedDict[Any, Binding] = OrderedDict()
        self._crossings: OrderedDict[Any, Crossing] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False

    @property
    def title(self) -> str:
        """How messages call the lifted function."""
        return f"{self.transform}({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], statics: Statics | None, nested: bool
    ) -> tuple[Binding, list[Any]]:
        """Returns the binding for these arguments, and their leaves with objects opaque."""
        leaves, treedef = opaque_flatten((args, kwargs), self.mode)
        last = self._last
        if (
            last is not None
            and last.treedef == treedef
            and statics is None
            and not nested
            and not TRAVELLING.active
            and last.plain
            and last.holds_for(leaves)
        ):
            binding = last
        else:
            binding = self._find_binding(leaves, treedef, statics, nested)
        if binding.crossing.foreign:
            self._check_foreign(binding.crossing)
        return binding, leaves

    def bound_as_before(self, args: tuple[Any, ...]) -> Binding | None:
        """Returns the last binding if it holds for these arguments, without flattening them."""
        last = self._last
        if (
            last is None
            or last.simple is None
            or not last.plain
            or TRAVELLING.active
            or [type(arg) for arg in args] != last.simple
            or not last.holds_for_arguments(args)
        ):
            return None
        if last.crossing.foreign:
            self._check_foreign(last.crossing)
        return last

    def _check_foreign(self, crossing: Crossing) -> None:
        """Drops the traces of a crossing if they baked in a value that has changed since."""
        changed = [read.leaf() for read in crossing.foreign.values() if not read.is_current()]
        if not changed:
            return
        crossing.refresh()
        if self._warned:
            return
        self._warned = True
        found = paths_in_closure(self.fn, [leaf for leaf in changed if leaf is not None])
        warnings.warn(
            f"{self.title} is traced again: it reads {', '.join(found) or 'a Variable'} of an "
            "object that it closes over, whose value has changed since. Pass the object as an "
            "argument: then its values are inputs, and one trace serves them all.",
            stacklevel=_frames_below_the_caller(),
        )

    def _find_binding(
        self, leaves: list[Any], treedef: Any, statics: Statics | None, nested: bool
    ) -> Binding:
        roots = [leaf.node for leaf in leaves if type(leaf) is Opaque]
        context: Any = (
            None if statics is None else statics.key,
            nested,
            tuple(extra.key() for extra in TRAVELLING.active),
        )
        key = (treedef, tuple(map(id, roots)), context)
        with self._lock:
            binding = self._bindings.get(key)
            if binding is not None:
                self._bindings.move_to_end(key)
        if binding is None or not binding.holds_for(leaves):
            plan, _ = make_plan(tuple(roots))
            crossing = self._find_crossing(plan.graphdef, treedef, leaves, statics, context)
            binding = Binding(crossing, plan, roots, self)
            binding.simple = _simple_types(leaves, treedef)
            with self._lock:
                self._bindings[key] = binding
                self._bindings.move_to_end(key)
                while len(self._bindings) > MAX_BINDINGS:
                    self._bindings.popitem(last=False)
        binding.plain = context == (None, False, ())
        self._last = binding
        return binding

    def _find_crossing(
        self,
        graphdef: GraphDef[Any],
        treedef: Any,
        leaves: list[Any],
        statics: Statics | None,
        context: Any,
    ) -> Crossing:
        key = (graphdef, treedef, context)
        with self._lock:
            found = self._crossings.get(key)
            if found is not None:
                self._crossings.move_to_end(key)
                return found
            roots = tuple(n for n, leaf in enumerate(leaves) if type(leaf) is Opaque)
            found = Crossing(self, graphdef, treedef, roots, statics, context[1])
            self._crossings[key] = found
            while len(self._crossings) > MAX_CROSSINGS:
                self._crossings.popitem(last=False)
            return found

    def clear(self) -> None:
        """Forgets all bindings and crossings."""
        with self._lock:
            self._last = None
            self._bindings.clear()
            self._crossings.clear()

    def sizes(self) -> tuple[int, int]:
        """Returns the number of crossings and of bindings."""
        return len(self._crossings), len(self._bindings)


def _frames_below_the_caller() -> int:
    """Returns the `stacklevel` of the line outside of this package that runs now."""
    level, frame = 1, inspect.currentframe()
    while frame is not None:
        frame, level = frame.f_back, level + 1
        name = "" if frame is None else frame.f_code.co_filename
        if not name.startswith(_PACKAGE) and name != contextlib.__file__:
            break
    return level - 1


_PACKAGE = os.path.dirname(os.path.dirname(__file__))


class LiftedFunction:
    """What the functions made by transforms have in common: a lift, and how they act as methods."""

    __qualname__: str
    __call__: Callable[..., Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = object.__new__(cls)
        self._made_of = args, kwargs
        return self

    def __init__(self, fn: Callable[..., Any], transform: str) -> None:
        made_of = self._made_of
        # The attributes of a function are copied, as decorators do; those of a class are not.
        is_plain = type(fn) is types.FunctionType
        functools.update_wrapper(self, fn, updated=("__dict__",) if is_plain else ())
        self._made_of = made_of
        self._lift = Lift(fn, transform)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # as for functions

    def __reduce__(self) -> Any:
        found = sys.modules.get(self.__module__)
        for name in self.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__  # by reference, as functions are
        args, kwargs = self._made_of
        return functools.partial(type(self), *args, **kwargs), ()

    def __set_name__(self, owner: type, name: str) -> None:
        self._lift.method = name
        self._lift.fn = scope.scoped_method(name, self._lift.fn)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else functools.partial(self, instance)

    @contextmanager
    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], statics: Statics | None = None
    ) -> Iterator[tuple[Binding, list[Any], Level]]:
        """Binds the arguments, with the name of the receiver around what follows if nested."""
        level = current_level()
        receiver = None if level is EAGER else first_object(args, kwargs)
        with scope.enter_transform(receiver, self._lift.method) as nested:
            binding, leaves = self._lift.bind(args, kwargs, statics, nested)
            yield binding, leaves, level

    def __repr__(self) -> str:
        return f"<{self._lift.title}>"


def first_object(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the first object among the arguments, the receiver of scopes; None without any."""
    leaves, _ = opaque_flatten((args, kwargs))
    found = (x.node for x in leaves if type(x) is Opaque and kind_of(x.node) == OBJECT)
    return next(found, None)

"""Branches and loops: `cond`, `switch`, `while_loop` and `fori_loop` over objects.

The functions are given anew at each call, so their lifts are kept here, by the typed key of each
function: equal lambdas share one. Each branch and body is traced once per structure, by an inner
`jax.jit` that says what changes before the loop or the branch is built, and is used inside it.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from nnxlite._core.errors import StaticValueError, StructureError
from nnxlite._core.graphdef import FILL_NODE
from nnxlite._core.statics import static
from nnxlite._core.trace import OPEN_STATES, current_level
from nnxlite._transforms.arguments import resolve
from nnxlite._transforms.changes import structure_change
from nnxlite._transforms.lift import Lift
from nnxlite._transforms.packing import Out, OutDef, Update

MAX_LIFTS = 256

_LIFTS: "OrderedDict[Any, Lift]" = OrderedDict()
_LOCK = threading.Lock()


def _function_and_receivers(
    fn: Callable[..., Any],
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    function, first, named = resolve(fn)
    return (fn, ()) if named else (function, first)


def _lift_of(function: Callable[..., Any], transform: str, mode: Any = True) -> Lift:
    """Returns the lift of a function; the same one for equal functions."""
    try:
        key = (transform, static(function))
    except StaticValueError:  # it closes over objects: what it reads differs from call to call
        return Lift(function, transform, mode=mode)
    with _LOCK:
        found = _LIFTS.get(key)
        if found is None:
            found = _LIFTS[key] = Lift(function, transform, mode=mode)
        _LIFTS.move_to_end(key)
        while len(_LIFTS) > MAX_LIFTS:
            _LIFTS.popitem(last=False)
        return found


class _Traced:
    """One function at one crossing, traced by JAX's own cache, and what it says of itself."""

    def __init__(self, lift: Lift, args: tuple[Any, ...]) -> None:
        self.binding, self.leaves = lift.bind(args, {}, None, False)
        crossing = self.binding.crossing
        jitted = crossing.kept.get("control")
        if jitted is None:
            jitted = crossing.kept["control"] = jax.jit(crossing.pure, inline=True)
        self.pure, self.crossing, self.title = jitted, crossing, lift.title
        self.values = self.binding.plan.gather()
        self.rest = [self.leaves[n] for n in crossing.rest]
        self.extras = self.binding.extra_inputs()
        self.shape: Out = jitted.eval_shape(self.values, self.rest, self.extras)
        self.definition: OutDef = self.shape.definition


def cond(
    pred: Any, true_fun: Callable[..., Any], false_fun: Callable[..., Any], /, *operands: Any
) -> Any:
    """Calls one of two functions of objects, by a traced boolean.

    What the taken branch changes is changed on the caller's objects. Values may be changed by one
    branch alone; statics and structure only if both agree.

    Args:
      pred: A boolean scalar.
      true_fun: Called if `pred` is true.
      false_fun: Called if it is not. Both return the same structure, shapes and dtypes.
      *operands: Arguments of both.

    Raises:
      StructureError: The branches differ in what they return or in structural changes.

    Example:
      >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
      >>> def reset(m):
      ...     m.bias[...] = jnp.ones(2)
      >>> nnx.cond(jnp.array(True), reset, lambda m: None, model)
      >>> model.bias[...]
      Array([1., 1.], dtype=float32)
    """
    return _branch("nnx.cond", jnp.asarray(pred, bool).astype(int), (false_fun, true_fun), operands)


def switch(index: Any, branches: Sequence[Callable[..., Any]], /, *operands: Any) -> Any:
    """Calls one of several functions of objects, by a traced index.

    Args:
      index: An int scalar; clamped to the range of `branches`.
      branches: The functions; as for `cond`.
      *operands: Arguments of all.

    Example:
      >>> nnx.switch(jnp.array(1), [lambda x: x, lambda x: 2 * x], jnp.ones(2))
      Array([2., 2.], dtype=float32)
    """
    return _branch("nnx.switch", index, tuple(branches), operands)


def _branch(
    transform: str, index: Any, branches: tuple[Callable[..., Any], ...], operands: tuple[Any, ...]
) -> Any:
    if not branches:
        raise ValueError(f"{transform} needs at least one branch.")
    level = current_level()
    lifts, operands = _with_receivers(transform, branches, operands)
    traced = [_Traced(lift, operands) for lift in lifts]
    joined = _join(transform, traced)
    first = traced[0]
    key = ("branches", joined, tuple(each.crossing for each in traced[1:]))
    functions = first.crossing.kept.get(key)
    if functions is None:
        functions = [_emitting(each.pure, joined) for each in traced]
        first.crossing.kept[key] = functions
    arrays, changed, extras = jax.lax.switch(
        index, functions, first.values, first.rest, first.extras
    )
    return first.binding.deliver(Out(arrays, changed, extras, joined.definition), level)


@dataclasses.dataclass(frozen=True)
class _Picked:
    """A branch that takes its own receivers out of those of all branches."""

    function: Callable[..., Any]
    start: int
    stop: int
    total: int

    def __call__(self, *args: Any) -> Any:
        return self.function(*args[self.start : self.stop], *args[self.total :])


def _with_receivers(
    transform: str, branches: tuple[Callable[..., Any], ...], operands: tuple[Any, ...]
) -> tuple[list[Lift], tuple[Any, ...]]:
    """Returns the lifts, with the objects of bound methods as operands of every branch."""
    parts = [_function_and_receivers(branch) for branch in branches]
    receivers = [receiver for _, first in parts for receiver in first]
    if not receivers:
        return [_lift_of(function, transform) for function, _ in parts], operands
    lifts, start = [], 0
    for function, first in parts:
        picked = _Picked(function, start, start + len(first), len(receivers))
        lifts.append(_lift_of(picked, transform))
        start += len(first)
    return lifts, (*receivers, *operands)


class _Joined(NamedTuple):
    """What all branches agree on.

    Attributes:
      definition: Of the result and of all that any branch changes.
      emitted: What each branch hands out beside its result: leaf numbers, or, if the structure
        changes, numbers of leaves of the structure after it.
    """

    definition: OutDef
    emitted: tuple[int, ...]


def _join(transform: str, traced: list[_Traced]) -> _Joined:
    first = traced[0].definition
    for each in traced[1:]:
        other = each.definition
        if other.tree != first.tree or (other.update is None and other.spec != first.spec):
            raise StructureError(
                f"{transform}: branches have to return the same. {traced[0].title} returns "
                f"{_shown(first)}, {each.title} returns {_shown(other)}."
            )
        if _structure(other.update) != _structure(first.update):
            changed = each if other.update is not None else traced[0]
            what = changed.definition.update and structure_change(
                changed.crossing, changed.definition.update
            )
            raise StructureError(
                f"{transform}: in {changed.title}, {what or 'an object was made'}, and not in the "
                "other branch. Structure and static values may only change alike in all branches; "
                "values may change in one alone."
            )
        mine, theirs = traced[0].shape.extras, each.shape.extras
        if jax.tree.structure(mine) != jax.tree.structure(theirs):
            raise StructureError(
                f"{transform}: branches have to record alike under a capture. "
                f"{traced[0].title} records {_records(mine)}, {each.title} records "
                f"{_records(theirs)}. Sow the same names, with the same structure, in each."
            )
    if first.update is None:
        emitted = tuple(sorted({n for each in traced for n in each.definition.changed}))
        joined = _Joined(first._replace(changed=emitted), emitted)
    else:
        updates = [each.definition.update for each in traced]
        kept = tuple(all(flags) for flags in zip(*[u.kept for u in updates if u], strict=True))
        emitted = tuple(n for n, stays in enumerate(kept) if not stays)
        joined = _Joined(first._replace(update=first.update._replace(kept=kept)), emitted)
    _check_types(transform, traced, joined)
    return joined


def _structure(update: Update | None) -> Any:
    return None if update is None else update._replace(kept=())


def _shown(definition: OutDef) -> str:
    numbers = range(definition.tree.num_leaves)
    return str(jax.tree.structure(jax.tree_util.tree_unflatten(definition.tree, numbers)))


def _records(extras: Any) -> str:
    names = [name for bundle in extras if hasattr(bundle, "names") for name in bundle.names()]
    return ", ".join(names) or "nothing"


def _check_types(transform: str, traced: list[_Traced], joined: _Joined) -> None:
    """Raises unless a leaf has one type after all branches."""
    for number in joined.emitted:
        found: dict[str, str] = {}
        for each in traced:
            value = _emitted_value(each.shape, each.values, number)
            found.setdefault(_type_text(value), each.title)
        if len(found) > 1:
            (a, first), (b, second) = list(found.items())[:2]
            where = traced[0].crossing.leaf_path(number) if joined.definition.update is None else ""
            raise StructureError(
                f"{transform}: {where or 'a Variable'} is {a} after {first} and {b} after "
                f"{second}. It needs one shape and dtype after all branches: convert it in one."
            )


def _type_text(value: Any) -> str:
    shapes = jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(jnp.shape(x))}", value)
    return str(shapes)


def _emitted_value(out: Out, values: list[Any], number: int) -> Any:
    """Returns the value of one emitted leaf after a branch that may not have changed it."""
    update = out.definition.update
    if update is None:
        changed = dict(zip(out.definition.changed, out.changed, strict=True))
        return changed.get(number, values[number])
    if update.kept[number]:
        return values[update.leaves[number]]
    return out.changed[sum(not stays for stays in update.kept[:number])]


def _emitting(pure: Callable[..., Out], joined: _Joined) -> Callable[..., Any]:
    """Makes a branch that hands out the same leaves as the others."""

    def branch(values: list[Any], rest: list[Any], extras: Any) -> Any:
        out = pure(values, rest, extras)
        emitted = [_emitted_value(out, values, number) for number in joined.emitted]
        return out.arrays, emitted, out.extras

    return branch


def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any, /
) -> Any:
    """Calls `body_fun` on a value that may hold objects, while `cond_fun` of it is true.

    Objects keep their identity: the body returns those that it got, and may change their values,
    not their structure.

    Args:
      cond_fun: Returns a boolean scalar. It may not change anything.
      body_fun: Returns a value of the same structure, shapes and dtypes as it got.
      init_val: The first value.

    Raises:
      StructureError: The value, or an object in it, changed its structure, a shape or a dtype;
        with the path, before and after.

    Example:
      >>> class Counter(nnx.Pytree):
      ...     def __init__(self):
      ...         self.n = nnx.Variable(0)
      >>> def step(c):
      ...     c.n[...] += 2
      ...     return c
      >>> counter = Counter()
      >>> nnx.while_loop(lambda c: c.n < 5, step, counter) is counter, int(counter.n[...])
      (True, 6)
    """
    level = current_level()
    body = _Loop(_lift_of(body_fun, "nnx.while_loop", OPEN_STATES), (init_val,))
    condition = _Traced(_lift_of(cond_fun, "nnx.while_loop", OPEN_STATES), (init_val,))
    if condition.definition.changed or condition.definition.update is not None:
        raise StructureError(
            f"{condition.title}: the condition changed an object. It is asked before each step and "
            "once more at the end: change things in the body."
        )
    kept = body.crossing.kept
    key = ("while", condition.crossing)
    functions = kept.get(key)
    if functions is None:
        ask = condition.pure

        def test(carry: Any) -> Any:
            return ask(*carry).arrays[0]

        functions = kept[key] = (test, body.step())
    test, step = functions
    carry = jax.lax.while_loop(test, step, body.carry())
    return body.finish(carry, level)


def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    /,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Calls `body_fun(i, value)` for `i` from `lower` to `upper`, on a value that may hold objects.

    Args:
      lower: The first index.
      upper: The index after the last.
      body_fun: Returns a value of the same structure, shapes and dtypes as it got.
      init_val: The first value.
      unroll: As for `jax.lax.fori_loop`.

    Raises:
      StructureError: As for `while_loop`.

    Example:
      >>> nnx.fori_loop(0, 3, lambda i, x: x + i, jnp.array(0))
      Array(3, dtype=int32, weak_type=True)
    """
    level = current_level()
    lift = _lift_of(body_fun, "nnx.fori_loop", OPEN_STATES)
    body = _Loop(lift, (jnp.asarray(lower), init_val))
    kept = body.crossing.kept
    if "fori" not in kept:
        kept["fori"] = _indexed(body.step())
    values, rest, extras = body.carry()
    carry = (values, rest[1:], extras)
    carry = jax.lax.fori_loop(lower, upper, kept["fori"], carry, unroll=unroll)
    return body.finish(carry, level)


def _indexed(step: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Makes a step that takes the index beside the carry."""

    def indexed(index: Any, carry: Any) -> Any:
        values, rest, extras = carry
        return step((values, [index, *rest], extras))

    return indexed


def check_same_type(title: str, place: str, before: Any, after: Any) -> None:
    """Raises unless a carried value keeps its structure, shape and dtype."""
    before_leaves, before_tree = jax.tree_util.tree_flatten(before)
    after_leaves, after_tree = jax.tree_util.tree_flatten(after)
    if before_tree != after_tree:
        raise StructureError(
            f"{title}: the value of {place} has structure {before_tree} before the step and "
            f"{after_tree} after it. A carried value keeps its structure."
        )
    for a, b in zip(before_leaves, after_leaves, strict=True):
        weak = getattr(a, "weak_type", not hasattr(a, "dtype"))
        if jnp.shape(a) != jnp.shape(b) or (jnp.result_type(a) != jnp.result_type(b) and not weak):
            raise StructureError(
                f"{title}: {place} is {jnp.result_type(a)}{list(jnp.shape(a))} before the step and "
                f"{jnp.result_type(b)}{list(jnp.shape(b))} after it. A carried value keeps its "
                "shape and dtype: convert it in the body."
            )


class _Loop(_Traced):
    """A loop body, whose result has to be like its last argument.

    Args:
      lift: Of the body.
      args: Its arguments; the last one is what it carries.
    """

    def __init__(self, lift: Lift, args: tuple[Any, ...]) -> None:
        super().__init__(lift, args)
        definition = self.definition
        if definition.update is not None:
            change = structure_change(self.crossing, definition.update)
            raise StructureError(
                f"{self.title}: {change or 'the step returns a new object'} in the loop, which is "
                "compiled once for all steps: only values may change. Make the structure before "
                "the loop, and return the objects that came in."
            )
        if any(jax.tree.leaves(self.shape.extras)):
            raise StructureError(
                f"{self.title}: {_records(self.shape.extras)} is sown inside a loop whose number "
                "of steps is not known, so there is no room for all values. Use nnx.scan, which "
                "stacks them, or capture inside the body and carry what you need."
            )
        self._check_carry(args[-1])

    def _check_carry(self, before: Any) -> None:
        crossing, definition = self.crossing, self.definition
        size = crossing.treedef.num_leaves
        args, _ = jax.tree_util.tree_unflatten(crossing.treedef, list(range(size)))
        positions, before_tree = jax.tree_util.tree_flatten(args[-1])
        numbers = jax.tree_util.tree_unflatten(
            definition.tree, list(range(definition.tree.num_leaves))
        )
        after, after_tree = jax.tree_util.tree_flatten(numbers)
        if before_tree != after_tree:
            raise StructureError(
                f"{self.title}: the value has to keep its structure. Before the step it is "
                f"{before_tree}, after it {after_tree}."
            )
        spec = definition.spec or (None,) * len(after)
        arrays = iter(self.shape.arrays)
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(numbers)]
        for path, position, entry in zip(paths, positions, spec, strict=True):
            place = "the value" + jax.tree_util.keystr(path)
            if entry is not None:
                self._check_same_object(place, position, entry)
                continue
            if position in crossing.roots:
                raise StructureError(f"{self.title}: {place} was an object and is an array now.")
            check_same_type(self.title, place, self.leaves[position], next(arrays))
        changed = zip(definition.changed, self.shape.changed, strict=True)
        for number, value in changed:
            place = crossing.leaf_path(number)
            check_same_type(self.title, place, self.values[number], value)

    def _check_same_object(self, place: str, position: int, entry: Any) -> None:
        crossing = self.crossing
        if position in crossing.roots:
            _, how, payload = crossing.graphdef.skeleton.roots[crossing.roots.index(position)]
            if (how == FILL_NODE, payload) == entry:
                return
        raise StructureError(
            f"{self.title}: {place} is another object after the step than before it. Return the "
            "same object, and write its Variables."
        )

    def carry(self) -> tuple[Any, ...]:
        """Returns what the first step takes."""
        strong = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in self.rest]
        return self.values, strong, self.extras

    def step(self) -> Callable[[Any], Any]:
        """Makes the step, from carry to carry; values that do not change are handed through."""
        pure = self.pure

        def step(carry: Any) -> Any:
            values, rest, extras = carry
            out = pure(values, rest, extras)
            new = list(values)
            for number, value in zip(out.definition.changed, out.changed, strict=True):
                new[number] = value
            return new, out.arrays, extras

        return step

    def finish(self, carry: Any, level: Any) -> Any:
        """Writes back what changed, and returns the value after the loop."""
        values, arrays, _ = carry
        changed = [values[number] for number in self.definition.changed]
        return self.binding.deliver(Out(arrays, changed, (), self.definition), level)

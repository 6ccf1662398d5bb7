"""Loops: `while_loop` and `fori_loop` over objects.

The body is traced once, by an inner `jax.jit`, to learn what it changes; that is what JAX carries
from step to step, with the arrays of the value. All else is a constant of the loop, so a reverse
pass keeps one copy of the parameters, not one per step. What a loop may not do is told before it
runs (see `carries.py`).
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer

from nnxlite._core.errors import StructureError
from nnxlite._core.extras import TRAVELLING, Use
from nnxlite._core.modes import mode_flags
from nnxlite._core.records import Bundle
from nnxlite._core.trace import OPEN_STATES
from nnxlite._transforms.carries import argument_at, check_carry
from nnxlite._transforms.changes import result_text
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.family import (
    Compiled,
    Family,
    Members,
    family_of,
    jitted,
    kept_of,
    value_of,
)
from nnxlite._transforms.packing import Out


@mode_flags()
def while_loop(
    cond_fun: Callable[[Any], Any], body_fun: Callable[[Any], Any], init_val: Any
) -> Any:
    """Calls `body_fun` on a value that may hold objects, while `cond_fun` of it is true.

    Objects keep their identity: the body returns those that it got, and may change their values,
    not their structure. A State is a value, as arrays are. What the body writes on an object whose
    method it is, is written too.

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
    functions = (body_fun, cond_fun)
    members = Members.of("nnx.while_loop", ("body_fun", "cond_fun"), functions)
    family = family_of(members, 1, OPEN_STATES)
    title, question = family.titles
    with family.bound((*members.arguments, init_val)) as (binding, leaves, level):
        crossing = binding.crossing
        run = kept_of(crossing, "run", lambda: _while(family, crossing))
        out = run(
            level,
            binding.plan.gather(),
            family.rest(crossing, leaves),
            binding.extra_inputs(Use(loop=title)),
            binding.extra_inputs(Use(condition=question)),
        )
        return binding.deliver(out, level)


def _while(family: Family, crossing: Crossing) -> Compiled:
    """Makes the loop; it holds no object of the caller."""
    body, asked = family.crossings(crossing)
    pure, ask = (jitted(*of) for of in zip(family.members, (body, asked), strict=True))
    title, question = family.titles

    def run(values: list[Any], rest: list[Any], extras: Any, asking: Any) -> Out:
        step = _Step(title, body, pure, values, rest, extras)
        out = ask.eval_shape(values, rest, asking)
        answer = _answer(question, asked, out)

        def test(carry: Any) -> Any:
            values, rest, _ = step.filled(carry)
            return answer(ask(values, rest, asking), values)

        return step.after(jax.lax.while_loop(test, step, step.first), out.extras)

    return Compiled("while_loop", run)


def _answer(title: str, crossing: Crossing, out: Out) -> Callable[[Out, list[Any]], Any]:
    """Returns how to find the boolean in what the condition returned."""
    definition = out.definition
    if definition.changed or definition.update is not None:
        raise StructureError(
            f"{title}: the condition changed an object. It is asked before each step and once more "
            "at the end: change things in the body."
        )
    (is_node, number) = definition.spec[0] if definition.spec else (False, None)
    if type(definition.numbered()) is not int or is_node:
        raise TypeError(
            f"{title}: the condition has to return a boolean scalar, found "
            f"{result_text(crossing, out)}."
        )
    if number is None:
        return lambda out, values: out.arrays[0]
    return lambda out, values: values[number]  # of a Variable


@mode_flags()
def fori_loop(
    lower: Any,
    upper: Any,
    body_fun: Callable[[Any, Any], Any],
    init_val: Any,
    *,
    unroll: int | bool | None = None,
) -> Any:
    """Calls `body_fun(i, value)` for `i` from `lower` to `upper`, on a value that may hold objects.

    With bounds that are known when it is traced it has a reverse-mode derivative.

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
    lower, upper = value_of(lower), value_of(upper)
    members = Members.of("nnx.fori_loop", ("body_fun",), (body_fun,))
    family = family_of(members, 2, OPEN_STATES)
    fixed = _fixed(lower, upper)
    with family.bound((*members.arguments, lower, init_val)) as (binding, leaves, level):
        crossing = binding.crossing
        run = kept_of(crossing, (fixed, unroll), lambda: _fori(family, crossing, fixed, unroll))
        out = run(
            level,
            () if fixed else (lower, upper),
            binding.plan.gather(),
            family.rest(crossing, leaves),
            binding.extra_inputs(Use(loop=family.titles[0])),
        )
        return binding.deliver(out, level)


def _fixed(*bounds: Any) -> tuple[int, ...]:
    """Returns bounds that are known, as JAX unrolls or differentiates the loop by them."""
    if any(isinstance(bound, Tracer) for bound in bounds):
        return ()
    try:
        return tuple(map(operator.index, bounds))
    except TypeError:  # JAX says what is wrong
        return ()


def _fori(
    family: Family, crossing: Crossing, fixed: tuple[int, ...], unroll: int | bool | None
) -> Compiled:
    """Makes the loop; it holds no object of the caller."""
    (body,) = family.crossings(crossing)
    pure = jitted(family.members[0], body)

    def run(bounds: tuple[Any, ...], values: list[Any], rest: list[Any], extras: Any) -> Out:
        lower, upper = fixed or bounds
        index = _first_index(lower, upper)
        step = _Step(family.titles[0], body, pure, values, rest, extras, index)
        carry = jax.lax.fori_loop(
            lower, upper, lambda index, carry: step(carry, index), step.first, unroll=unroll
        )
        return step.after(carry, (None,) * len(extras))

    return Compiled("fori_loop", run)


def _first_index(lower: Any, upper: Any) -> Any:
    """Returns the first index with the type that JAX gives to all of them."""
    first, wanted = jnp.asarray(lower), jnp.result_type(upper)
    if first.dtype != wanted and first.weak_type:
        return jax.lax.convert_element_type(first, wanted)
    return first


class _Step:
    """One step of a loop, from carry to carry.

    Args:
      title: How messages call the body.
      crossing: Of its arguments.
      pure: Its pure function, jitted.
      values: Of the leaves of objects before the loop.
      rest: The other arguments before the loop.
      extras: What the extras hand in.
      index: The first index, which is the argument before the last; the last is what is carried.
    """

    def __init__(
        self,
        title: str,
        crossing: Crossing,
        pure: Callable[..., Out],
        values: list[Any],
        rest: list[Any],
        extras: tuple[Any, ...],
        index: Any = None,
    ) -> None:
        self._pure, self._values, self._rest = pure, values, list(rest)
        if index is not None:
            positions = jax.tree_util.tree_leaves(argument_at(crossing, -2))
            self._index = crossing.rest.index(positions[0])
            self._rest[self._index] = index
        self._extras, self._out = _settled(title, pure, values, self._rest, extras)
        carried = check_carry(title, crossing, self._out, values, self._rest)
        self._places = [crossing.rest.index(position) for position in carried]
        self._changed = self._out.definition.changed

    @property
    def first(self) -> Any:
        """What the first step takes."""
        totals = [
            extra.totals(given)
            for extra, given in zip(TRAVELLING.active, self._extras, strict=True)
        ]
        arrays = [self._rest[place] for place in self._places]
        strong = [x if hasattr(x, "dtype") else jnp.asarray(x) for x in arrays]
        return [self._values[number] for number in self._changed], strong, totals

    def filled(self, carry: Any, index: Any = None) -> tuple[list[Any], list[Any], list[Any]]:
        """Returns what the functions take: what is carried, among all that is constant."""
        changed, arrays, totals = carry
        values, rest = list(self._values), list(self._rest)
        for number, value in zip(self._changed, changed, strict=True):
            values[number] = value
        for place, array in zip(self._places, arrays, strict=True):
            rest[place] = array
        if index is not None:
            rest[self._index] = index
        extras = [
            extra.with_totals(given, now)
            for extra, given, now in zip(TRAVELLING.active, self._extras, totals, strict=True)
        ]
        return values, rest, extras

    def __call__(self, carry: Any, index: Any = None) -> Any:
        values, rest, extras = self.filled(carry, index)
        out = self._pure(values, rest, tuple(extras))
        new = dict(zip(out.definition.changed, out.changed, strict=True))
        totals = [
            extra.totals_after(given, handed)
            for extra, given, handed in zip(TRAVELLING.active, extras, out.extras, strict=True)
        ]
        return [new.get(n, values[n]) for n in self._changed], out.arrays, totals

    def after(self, carry: Any, asked: Sequence[Any]) -> Out:
        """Returns what the loop as a whole hands out; `asked` is what the condition does."""
        changed, arrays, totals = carry
        handed = zip(self._extras, totals, self._out.extras, asked, strict=True)
        extras = tuple(
            extra.after_loop(*of) for extra, of in zip(TRAVELLING.active, handed, strict=True)
        )
        return Out(arrays, changed, extras, self._out.definition)


_MOST_RUNS = 4


def _settled(
    title: str, pure: Any, values: list[Any], rest: list[Any], extras: tuple[Any, ...]
) -> tuple[tuple[Any, ...], Out]:
    """Returns what the extras hand to each step, and abstractly what a step returns.

    What they accumulate has the types that it has after a step; so the body may be traced again.
    """
    out = pure.eval_shape(values, rest, extras)
    for _ in range(_MOST_RUNS):
        ready = tuple(
            extra.for_steps(given, handed)
            for extra, given, handed in zip(TRAVELLING.active, extras, out.extras, strict=True)
        )
        if all(a is b for a, b in zip(ready, extras, strict=True)):
            return extras, out
        extras = ready
        out = pure.eval_shape(values, rest, extras)
    names = [name for handed in out.extras if isinstance(handed, Bundle) for name in handed.names()]
    raise StructureError(
        f"{title}: {', '.join(names)} has another dtype after each step, by its reduce_fn. Inside "
        "of a loop it has to keep one: convert it in reduce_fn."
    )

"""Random programs that read and change object graphs, and give something back.

A program is a list of steps that name what they touch by number: the k-th Variable, list or slot of
the graph *as it then is*, modulo how many there are. So any program runs on any graph, a
step without a target does nothing, and what it does depends on the structure alone, never on the
value of an array: it may be traced.

Each step belongs to an effect. A law about a transform that forbids some draws programs without
them, or expects the error.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp

import nnxlite as nnx
from tests.isomorphism import has_identity, is_array, is_object, items_of, reachable
from tests.strategies import CONTAINERS, STATICS, VARIABLES, Block, Net, put, sum_of


class Step(NamedTuple):
    """One step: the name of its action, and three numbers for it to use."""

    action: str
    i: int = 0
    j: int = 0
    c: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps to take. Its result is a sum of what it read and a tuple of what it gives back."""

    steps: tuple[Step, ...]

    def __call__(self, *roots: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        run = _Run(roots)
        for step in self.steps:
            ACTIONS[step.action][1](run, step.i, step.j, step.c)
        return run.sum, tuple(run.given)

    @property
    def effects(self) -> set[str]:
        """The effects that the program may have."""
        return {ACTIONS[step.action][0] for step in self.steps}


class _Run:
    """A running program: its roots, the sum of what was read, and what is given back."""

    def __init__(self, roots: tuple[Any, ...]) -> None:
        self.roots = roots
        self.sum = jnp.float32(0)
        self.given: list[Any] = []
        self.made = 0

    def nodes(self, keep: Callable[[Any], bool]) -> list[Any]:
        return [node for node in reachable(self.roots) if keep(node)]

    def variables(self) -> list[nnx.Variable]:
        return self.nodes(lambda node: isinstance(node, nnx.Variable))

    def holders(self) -> list[Any]:
        """All that has slots to write: objects and containers."""
        return self.nodes(lambda node: not isinstance(node, nnx.Variable))

    def slots(self, keep: Callable[[Any], bool]) -> list[tuple[Any, Any, Any]]:
        return [
            (holder, key, child)
            for holder in self.holders()
            for key, child in items_of(holder) or ()
            if keep(child)
        ]

    def name(self) -> str:
        self.made += 1
        return f"made{self.made}"


Action = Callable[[_Run, int, int, int], None]
ACTIONS: dict[str, tuple[str, Action]] = {}


def action(effect: str) -> Callable[[Action], Action]:
    """Registers an action under the name of its function, with the effect that it has."""

    def register(function: Action) -> Action:
        ACTIONS[function.__name__] = effect, function
        return function

    return register


def pick(choices: list[Any], number: int) -> Any:
    return choices[number % len(choices)] if choices else None


def bounded(x: jax.Array) -> jax.Array:
    """Keeps what goes back into the graph small, so that products of it stay exact."""
    return jnp.clip(x, -8.0, 8.0)


@action("read")
def read(run: _Run, i: int, j: int, c: int) -> None:
    left, right = pick(run.variables(), i), pick(run.variables(), j)
    if left is not None:
        run.sum = run.sum + sum_of(left) * sum_of(right) + float(c)


@action("read")
def read_array(run: _Run, i: int, j: int, c: int) -> None:
    slot = pick(run.slots(is_array), i)
    if slot is not None:
        run.sum = run.sum + jnp.sum(slot[2]) * float(c)


@action("read")
def call(run: _Run, i: int, j: int, c: int) -> None:
    node = pick(run.nodes(lambda node: isinstance(node, Net)), i)
    if node is not None:
        run.sum = run.sum + node.double(node.total())


@action("read")
def call_stored(run: _Run, i: int, j: int, c: int) -> None:
    slot = pick(run.slots(_is_method), i)
    if slot is not None:
        run.sum = run.sum + slot[2](jnp.float32(c))


def _is_method(value: Any) -> bool:
    function = getattr(value, "func", value)
    return is_object(getattr(function, "__self__", None))


@action("value")
def write(run: _Run, i: int, j: int, c: int) -> None:
    target, source = pick(run.variables(), i), pick(run.variables(), j)
    if target is not None:
        amount = bounded(sum_of(source)) + float(c)
        target.value = jax.tree.map(lambda x: x + amount, target.value)


@action("value")
def overwrite(run: _Run, i: int, j: int, c: int) -> None:
    target = pick(run.variables(), i)
    if target is not None:
        target.value = jax.tree.map(lambda x: jnp.full_like(x, c), target.value)


@action("value")
def write_nothing_new(run: _Run, i: int, j: int, c: int) -> None:
    target = pick(run.variables(), i)
    if target is not None:
        target.value = target.get_value()


@action("value")
def write_array(run: _Run, i: int, j: int, c: int) -> None:
    slot = pick(run.slots(is_array), i)
    if slot is not None:
        holder, key, array = slot
        put(holder, key, jnp.asarray(array) + float(c))


@action("shape")
def reshape(run: _Run, i: int, j: int, c: int) -> None:
    target = pick(run.variables(), i)
    if target is not None:
        target.value = {"u": bounded(sum_of(target)), "v": jnp.zeros((2,), jnp.float32)}


@action("attribute")
def new_variable(run: _Run, i: int, j: int, c: int) -> None:
    _attach(run, i, VARIABLES[j % len(VARIABLES)](jnp.float32(c)))


@action("attribute")
def new_array(run: _Run, i: int, j: int, c: int) -> None:
    _attach(run, i, bounded(run.sum) + float(c))


@action("attribute")
def new_object(run: _Run, i: int, j: int, c: int) -> None:
    block = Block()
    block.kernel = nnx.Param(jnp.float32(c))
    block.inner = [nnx.BatchStat(bounded(run.sum)), c]
    _attach(run, i, block)


def _attach(run: _Run, i: int, value: Any) -> None:
    node = pick(run.nodes(is_object), i)
    if node is None:
        return
    if isinstance(node, nnx.List):
        node.append(value)
    else:
        put(node, run.name(), value)


@action("structure")
def delete(run: _Run, i: int, j: int, c: int) -> None:
    node = pick(run.nodes(is_object), i)
    key = pick([key for key, _ in items_of(node) or ()], j)
    if isinstance(node, CONTAINERS) and key is not None:
        del node[key]
    elif key is not None:
        delattr(node, key)


@action("structure")
def link(run: _Run, i: int, j: int, c: int) -> None:
    _attach(run, i, pick(run.nodes(has_identity), j))


@action("structure")
def swap(run: _Run, i: int, j: int, c: int) -> None:
    slots = run.slots(lambda child: True)
    left, right = pick(slots, i), pick(slots, j)
    if left is not None:
        put(left[0], left[1], right[2])
        put(right[0], right[1], left[2])


@action("structure")
def append(run: _Run, i: int, j: int, c: int) -> None:
    target = pick(run.nodes(lambda node: isinstance(node, list)), i)
    if target is not None:
        choices = [c, jnp.float32(c), nnx.Param(jnp.float32(c)), (c,), run.roots[0]]
        target.append(choices[j % len(choices)])


@action("structure")
def pop_last(run: _Run, i: int, j: int, c: int) -> None:
    target = pick(run.nodes(lambda node: isinstance(node, list) and len(node) > 0), i)
    if target is not None:
        target.pop()


@action("structure")
def set_item(run: _Run, i: int, j: int, c: int) -> None:
    target = pick(run.nodes(lambda node: isinstance(node, dict)), i)
    if target is not None:
        key = 1000 + c if any(isinstance(key, int) for key in target) else run.name()
        choices = [c, jnp.float32(c), nnx.Param(jnp.float32(c)), {"deep": bounded(run.sum)}]
        target[key] = choices[j % len(choices)]


@action("structure")
def replace_variable(run: _Run, i: int, j: int, c: int) -> None:
    slot = pick(run.slots(lambda child: isinstance(child, nnx.Variable)), i)
    if slot is not None:
        holder, key, old = slot
        put(holder, key, VARIABLES[j % len(VARIABLES)](old.get_value()))


@action("static")
def set_static(run: _Run, i: int, j: int, c: int) -> None:
    slot = pick(run.slots(lambda child: isinstance(child, int | float | str)), i)
    if slot is not None:
        put(slot[0], slot[1], STATICS[j % len(STATICS)]())


@action("metadata")
def set_metadata(run: _Run, i: int, j: int, c: int) -> None:
    target = pick(run.variables(), i)
    if target is not None:
        target.set_metadata("tag", ("x", c))


@action("output")
def give_node(run: _Run, i: int, j: int, c: int) -> None:
    # A plain list or dict given back is JAX's own pytree: the caller gets another one.
    run.given.append(pick(run.nodes(lambda node: not isinstance(node, list | dict)), i))


@action("output")
def give_value(run: _Run, i: int, j: int, c: int) -> None:
    variable = pick(run.variables(), i)
    if variable is not None:
        run.given.append({"value": variable.get_value(), "sum": run.sum})


@action("output")
def give_new_object(run: _Run, i: int, j: int, c: int) -> None:
    block = Block()
    block.old = pick(run.nodes(has_identity), i)
    block.kernel = nnx.Param(run.sum)
    run.given.append(block if c % 2 else (block, [block.kernel]))


ALL_EFFECTS = frozenset(effect for effect, _ in ACTIONS.values())


def programs(
    effects: Iterable[str] = ALL_EFFECTS, *, without: Iterable[str] = (), max_steps: int = 6
) -> st.SearchStrategy[Program]:
    """Draws programs whose steps have only the given effects, without some actions."""
    wanted, unwanted = set(effects), set(without)
    names = [n for n, (effect, _) in ACTIONS.items() if effect in wanted and n not in unwanted]
    number = st.integers(0, 5)
    steps = st.builds(Step, st.sampled_from(names), number, number, st.integers(-2, 3))
    # Of a fixed length each: lists as Hypothesis draws them are mostly short.
    lengths = [st.builds(Program, st.tuples(*[steps] * n)) for n in range(1, max_steps + 1)]
    return st.one_of(lengths)

"""Random programs that read and change object graphs, and give something back.

A program is a list of steps that name what they touch by number: the k-th Variable, list or slot of
the graph *as it then is*, modulo how many there are. So any program runs on any graph, a
step without a target does nothing, and what it does depends on the structure alone, never on the
value of an array: it may be traced.

Each step belongs to an effect. A law about a transform that forbids some draws programs without
them, or expects the error; `watching` tells which effects had something to act on.
"""

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp

import nnxlite as nnx
from tests import tape
from tests.isomorphism import has_identity, is_array, is_object, items_of, reachable, rebuilt
from tests.strategies import CONTAINERS, STATICS, VARIABLES, Block, Net, put, sum_of


class Step(NamedTuple):
    """One step: the name of its action, and three numbers for it to use."""

    action: str
    i: int = 0
    j: int = 0
    c: int = 0


@dataclasses.dataclass(frozen=True)
class Program:
    """Steps to take. Its result is a sum of what it read and a tuple of what it gives back.

    The name is part of those that it perturbs: one name has one shape.
    """

    steps: tuple[Step, ...]
    name: str = ""

    def __call__(self, *roots: Any) -> tuple[jax.Array, tuple[Any, ...]]:
        run = _Run(roots, self.name)
        for step in self.steps:
            action = ACTIONS[step.action]
            target = pick(action.targets(run), step.i)
            if target is not None:
                action.act(run, target, step.j, step.c)
                if _WATCH.seen is not None:
                    _WATCH.seen.append((self, action.effect))
        return run.sum, tuple(run.given)

    @property
    def effects(self) -> set[str]:
        """The effects that the program may have."""
        return {ACTIONS[step.action].effect for step in self.steps}


class _Watch(threading.local):
    seen: list[tuple[Program, str]] | None = None


_WATCH = _Watch()


@contextmanager
def watching() -> Iterator[list[tuple[Program, str]]]:
    """Yields a list of the effects of each step that acts in the body, with its program."""
    before, _WATCH.seen = _WATCH.seen, []
    try:
        yield _WATCH.seen
    finally:
        _WATCH.seen = before


class _Run:
    """A running program: its roots, the sum of what was read, and what is given back."""

    def __init__(self, roots: tuple[Any, ...], program: str) -> None:
        self.roots, self.program = roots, program
        self.sum = jnp.float32(0)
        self.given: list[Any] = []
        self.made = 0

    def nodes(self, keep: Callable[[Any], bool]) -> list[Any]:
        return [node for node in reachable(self.roots) if keep(node)]

    def slots(self, keep: Callable[[Any], bool]) -> list[tuple[Any, Any, Any]]:
        """All that may be written in objects and containers: holder, key and content."""
        return [
            (holder, key, child)
            for holder in self.nodes(lambda node: not isinstance(node, nnx.Variable))
            for key, child in items_of(holder) or ()
            if keep(child)
        ]

    def name(self) -> str:
        self.made += 1
        return f"made{self.made}"


Targets = Callable[[_Run], list[Any]]
Act = Callable[[_Run, Any, int, int], None]


class Action(NamedTuple):
    """One kind of step: its effect, what it may act on, and what it does to one of these."""

    effect: str
    targets: Targets
    act: Act


ACTIONS: dict[str, Action] = {}


def action(effect: str, targets: Targets) -> Callable[[Act], Act]:
    """Registers an action under the name of its function, with its effect and its targets."""

    def register(function: Act) -> Act:
        ACTIONS[function.__name__] = Action(effect, targets, function)
        return function

    return register


def pick(choices: list[Any], number: int) -> Any:
    return choices[number % len(choices)] if choices else None


def bounded(x: jax.Array) -> jax.Array:
    """Keeps what goes back into the graph small, so that products of it stay exact."""
    return jnp.clip(x, -8.0, 8.0)


def variables(run: _Run) -> list[nnx.Variable]:
    return run.nodes(lambda node: isinstance(node, nnx.Variable))


def objects(run: _Run) -> list[Any]:
    return run.nodes(is_object)


def filled_objects(run: _Run) -> list[Any]:
    return run.nodes(lambda node: is_object(node) and bool(items_of(node)))


def nets(run: _Run) -> list[Net]:
    return run.nodes(lambda node: isinstance(node, Net))


def plain_lists(run: _Run) -> list[Any]:
    return run.nodes(lambda node: isinstance(node, list))


def filled_lists(run: _Run) -> list[Any]:
    return run.nodes(lambda node: isinstance(node, list) and len(node) > 0)


def dicts(run: _Run) -> list[Any]:
    return run.nodes(lambda node: isinstance(node, dict))


def with_identity(run: _Run) -> list[Any]:
    return run.nodes(has_identity)


def returnable(run: _Run) -> list[Any]:
    # A plain list or dict given back is JAX's own pytree: the caller gets another one.
    return run.nodes(lambda node: not isinstance(node, list | dict))


def slots(run: _Run) -> list[Any]:
    return run.slots(lambda child: True)


def array_slots(run: _Run) -> list[Any]:
    return run.slots(is_array)


def value_slots(run: _Run) -> list[Any]:
    """Slots with a tuple or registered pytree that holds an array."""
    return run.slots(lambda child: _is_value(child) and any(is_array(x) for _, x in _items(child)))


def variable_slots(run: _Run) -> list[Any]:
    return run.slots(lambda child: isinstance(child, nnx.Variable))


def static_slots(run: _Run) -> list[Any]:
    return run.slots(lambda child: isinstance(child, int | float | str))


def method_slots(run: _Run) -> list[Any]:
    return run.slots(_is_method)


def _is_method(value: Any) -> bool:
    function = getattr(value, "func", value)
    return is_object(getattr(function, "__self__", None))


def _is_value(value: Any) -> bool:
    return not has_identity(value) and not _is_method(value) and items_of(value) is not None


def _items(value: Any) -> list[tuple[Any, Any]]:
    return items_of(value) or []


@action("read", variables)
def read(run: _Run, left: nnx.Variable, j: int, c: int) -> None:
    right = pick(variables(run), j)
    run.sum = run.sum + sum_of(left) * sum_of(right) + float(c)


@action("read", array_slots)
def read_array(run: _Run, slot: Any, j: int, c: int) -> None:
    run.sum = run.sum + jnp.sum(slot[2]) * float(c)


@action("read", nets)
def call(run: _Run, node: Net, j: int, c: int) -> None:
    run.sum = run.sum + node.double(node.total())


@action("read", method_slots)
def call_stored(run: _Run, slot: Any, j: int, c: int) -> None:
    run.sum = run.sum + slot[2](jnp.float32(c))


@action("value", variables)
def write(run: _Run, target: nnx.Variable, j: int, c: int) -> None:
    amount = bounded(sum_of(pick(variables(run), j))) + float(c)
    target.value = jax.tree.map(lambda x: x + amount, target.value)


@action("value", variables)
def overwrite(run: _Run, target: nnx.Variable, j: int, c: int) -> None:
    target.value = jax.tree.map(lambda x: jnp.full_like(x, c), target.value)


@action("value", variables)
def write_nothing_new(run: _Run, target: nnx.Variable, j: int, c: int) -> None:
    target.value = target.get_value()


@action("value", array_slots)
def write_array(run: _Run, slot: Any, j: int, c: int) -> None:
    holder, key, array = slot
    put(holder, key, jnp.asarray(array) + float(c))


@action("value", value_slots)
def write_inside(run: _Run, slot: Any, j: int, c: int) -> None:
    holder, key, value = slot
    children = [jnp.asarray(x) + float(c) if is_array(x) else x for _, x in _items(value)]
    put(holder, key, rebuilt(value, children))


@action("shape", variables)
def reshape(run: _Run, target: nnx.Variable, j: int, c: int) -> None:
    target.value = {"u": bounded(sum_of(target)), "v": jnp.zeros((2,), jnp.float32)}


@action("attribute", objects)
def new_variable(run: _Run, node: Any, j: int, c: int) -> None:
    _attach(run, node, VARIABLES[j % len(VARIABLES)](jnp.float32(c)))


@action("attribute", objects)
def new_array(run: _Run, node: Any, j: int, c: int) -> None:
    _attach(run, node, bounded(run.sum) + float(c))


@action("attribute", objects)
def new_object(run: _Run, node: Any, j: int, c: int) -> None:
    block = Block()
    block.kernel = nnx.Param(jnp.float32(c))
    block.inner = [nnx.BatchStat(bounded(run.sum)), c]
    _attach(run, node, block)


def _attach(run: _Run, node: Any, value: Any) -> None:
    if isinstance(node, nnx.List):
        node.append(value)
    else:
        put(node, run.name(), value)


@action("structure", filled_objects)
def delete(run: _Run, node: Any, j: int, c: int) -> None:
    key = pick([key for key, _ in _items(node)], j)
    if isinstance(node, CONTAINERS):
        del node[key]
    else:
        delattr(node, key)


@action("structure", objects)
def link(run: _Run, node: Any, j: int, c: int) -> None:
    _attach(run, node, pick(with_identity(run), j))


@action("structure", slots)
def swap(run: _Run, left: Any, j: int, c: int) -> None:
    right = pick(slots(run), j)
    put(left[0], left[1], right[2])
    put(right[0], right[1], left[2])


@action("structure", plain_lists)
def append(run: _Run, target: list[Any], j: int, c: int) -> None:
    choices = [c, jnp.float32(c), nnx.Param(jnp.float32(c)), (c,), run.roots[0]]
    target.append(pick(choices, j))


@action("structure", filled_lists)
def pop_last(run: _Run, target: list[Any], j: int, c: int) -> None:
    target.pop()


@action("structure", dicts)
def set_item(run: _Run, target: dict[Any, Any], j: int, c: int) -> None:
    key = 1000 + c if any(isinstance(key, int) for key in target) else run.name()
    choices = [c, jnp.float32(c), nnx.Param(jnp.float32(c)), {"deep": bounded(run.sum)}]
    target[key] = pick(choices, j)


@action("structure", variable_slots)
def replace_variable(run: _Run, slot: Any, j: int, c: int) -> None:
    holder, key, old = slot
    put(holder, key, VARIABLES[j % len(VARIABLES)](old.get_value()))


@action("static", static_slots)
def set_static(run: _Run, slot: Any, j: int, c: int) -> None:
    put(slot[0], slot[1], STATICS[j % len(STATICS)]())


@action("metadata", variables)
def set_metadata(run: _Run, target: nnx.Variable, j: int, c: int) -> None:
    target.set_metadata("tag", ("x", c))


@action("output", returnable)
def give_node(run: _Run, node: Any, j: int, c: int) -> None:
    run.given.append(node)


@action("output", variables)
def give_value(run: _Run, variable: nnx.Variable, j: int, c: int) -> None:
    run.given.append({"value": variable.get_value(), "sum": run.sum})


@action("output", with_identity)
def give_new_object(run: _Run, old: Any, j: int, c: int) -> None:
    block = Block()
    block.old = old
    block.kernel = nnx.Param(run.sum)
    run.given.append(block if c % 2 else (block, [block.kernel]))


@action("record", nets)
def sow(run: _Run, node: Net, j: int, c: int) -> None:
    tape.sow(node, f"sown{j % 2}", bounded(run.sum) + float(c))


@action("record", nets)
def perturb(run: _Run, node: Net, j: int, c: int) -> None:
    name = f"perturbed{j % 2}{run.program}"
    run.sum = run.sum + tape.perturb(node, name, bounded(run.sum) + float(c))


@action("record", nets)
def sow_in_something_new(run: _Run, node: Net, j: int, c: int) -> None:
    tape.sow(Block(), "sown", bounded(run.sum) + float(c))


ALL_EFFECTS = frozenset(action.effect for action in ACTIONS.values())


def programs(
    effects: Iterable[str] = ALL_EFFECTS, *, without: Iterable[str] = (), max_steps: int = 6
) -> st.SearchStrategy[Program]:
    """Draws programs whose steps have only the given effects, without some actions."""
    steps = st.one_of([_steps(effect, frozenset(without)) for effect in sorted(effects)])
    # Of a fixed length each: lists as Hypothesis draws them are mostly short.
    lengths = [st.builds(Program, st.tuples(*[steps] * n)) for n in range(1, max_steps + 1)]
    return st.one_of(lengths)


def _steps(effect: str, without: frozenset[str]) -> st.SearchStrategy[Step]:
    names = [name for name, action in ACTIONS.items() if action.effect == effect]
    names = [name for name in names if name not in without]
    number = st.integers(0, 5)
    return st.builds(Step, st.sampled_from(names), number, number, st.integers(-2, 3))

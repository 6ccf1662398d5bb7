"""Hypothesis strategies for random object graphs.

A graph is drawn as a `Blueprint`, plain data that builds equal but separate graphs as often as
a law needs them: one for the eager run, one for the transform, one with its attributes assigned in
another order. All array values are small integers in float32, so that results compare exactly.
"""

import dataclasses
import enum
import functools
import math
import random
from collections.abc import Callable
from typing import Any, NamedTuple

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

import nnxlite as nnx


def examples(factor: float) -> hypothesis.settings:
    """Settings for a law: `factor` times the number of examples that the profile asks for."""
    default = hypothesis.settings.default
    assert default is not None
    return hypothesis.settings(max_examples=max(1, int(factor * default.max_examples)))


class Count(nnx.Variable):
    """A kind of Variable that the library does not know."""


class Net(nnx.Module):
    def double(self, x):
        return x + x

    def total(self):
        """The sum of this object's own Variables: a read through a method."""
        own = [v for v in vars(self).values() if isinstance(v, nnx.Variable)]
        return sum((sum_of(v) for v in own), jnp.float32(0))


class Block(Net):
    """Another class with the same attributes."""


class Bag(nnx.Pytree):
    """An object that is no Module."""


class Pair(NamedTuple):
    left: Any
    right: Any


@jax.tree_util.register_pytree_with_keys_class
class Box:
    """A registered pytree: a value with one static and two dynamic fields."""

    def __init__(self, first: Any, second: Any, tag: str = "box") -> None:
        self.first, self.second, self.tag = first, second, tag

    def tree_flatten_with_keys(self):
        key = jax.tree_util.GetAttrKey
        return [(key("first"), self.first), (key("second"), self.second)], self.tag

    @classmethod
    def tree_unflatten(cls, tag, children):
        return cls(*children, tag)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclasses.dataclass(frozen=True)
class Config:
    width: int
    names: tuple[str, ...] = ("a",)


def halve(x, by=2.0):
    return x / by


def closure(n: Any) -> Callable[[Any], Any]:
    return lambda x: x + n


# Each makes a value that equals what it made before, and is another object where that can be.
STATICS: tuple[Callable[[], Any], ...] = (
    lambda: 1,
    lambda: 1.0,
    lambda: True,
    lambda: None,
    lambda: "relu",
    lambda: 0.0,
    lambda: -0.0,
    lambda: math.nan,
    lambda: (1, ("a", 2.0)),
    lambda: (1.0, ("a", 2.0)),
    lambda: frozenset({1, "a"}),
    lambda: {1, 2},
    lambda: halve,
    lambda: functools.partial(halve, by=4.0),
    lambda: Color.RED,
    lambda: Config(3),
    lambda: jnp.float32,
    lambda: np.dtype("int8"),
    lambda: b"bytes",
    lambda: 1j,
    lambda: Net,
    lambda: closure(1),
    lambda: closure(1.0),
    lambda: closure("a"),
)
CLOSURES = 3  # the last ones, which the standard `pickle` cannot do

VARIABLES = (nnx.Param, nnx.Param, nnx.BatchStat, Count)
OBJECTS = (Net, Block, Bag)
CONTAINERS = (list, dict, nnx.List, nnx.Dict)


class Ref(NamedTuple):
    """The node of that number: sharing, and cycles."""

    node: int


class Array(NamedTuple):
    """An array; `host` makes it numpy's."""

    value: int
    shape: tuple[int, ...] = ()
    host: bool = False

    def make(self) -> Any:
        array = np.full(self.shape, self.value, np.float32)
        return array if self.host else jnp.asarray(array)


class Constant(NamedTuple):
    """A static value by its number in `STATICS`."""

    number: int


class Value(NamedTuple):
    """A tuple, named tuple or registered pytree of two contents."""

    type: type
    first: Any
    second: Any


class Method(NamedTuple):
    """A bound method of a node, or a partial of one."""

    node: int
    partial: bool


class Marked(NamedTuple):
    """What the user says of an attribute: `nnx.data` or `nnx.static`."""

    mark: Callable[[Any], Any]
    content: Any


class NodeSpec(NamedTuple):
    """One node: its class, and what hangs at which key."""

    type: type
    items: tuple[tuple[Any, Any], ...]


class VariableSpec(NamedTuple):
    """One Variable: kind, value (an `Array`, or a dict of them) and metadata."""

    type: type
    value: Any
    metadata: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True)
class Blueprint:
    """A drawn graph. Node 0 is the first root."""

    nodes: tuple[NodeSpec | VariableSpec, ...]
    roots: tuple[int, ...] = (0,)

    def build(self, order: int | None = None) -> tuple[Any, ...]:
        """Returns the roots of a new graph.

        Args:
          order: The seed of another order in which attributes and dict entries are assigned.
        """
        made = [_shell(spec) for spec in self.nodes]
        for node, spec in zip(made, self.nodes, strict=True):
            if isinstance(spec, VariableSpec):
                continue
            items = list(spec.items)
            if order is not None and spec.type not in (list, nnx.List):
                random.Random(order).shuffle(items)
            for key, content in items:
                put(node, key, _content(content, made))
        return tuple(made[number] for number in self.roots)

    @property
    def root(self) -> Any:
        """The first root of a new graph."""
        return self.build()[0]


def _shell(spec: NodeSpec | VariableSpec) -> Any:
    if isinstance(spec, NodeSpec):
        return spec.type()
    value = spec.value
    made = {k: v.make() for k, v in value.items()} if isinstance(value, dict) else value.make()
    return spec.type(made, **dict(spec.metadata))


def _content(content: Any, made: list[Any]) -> Any:
    match content:
        case Ref(number):
            return made[number]
        case Array():
            return content.make()
        case Constant(number):
            return STATICS[number]()
        case Method(number, partial):
            method = made[number].double
            return functools.partial(method) if partial else method
        case Marked(mark, inner):
            return mark(_content(inner, made))
        case Value(type, first, second):
            children = _content(first, made), _content(second, made)
            return children if type is tuple else type(*children)
    raise AssertionError(content)


def put(node: Any, key: Any, value: Any) -> None:
    """Sets an attribute or item; a list grows by the key that is its length."""
    if isinstance(node, list | nnx.List) and key == len(node):
        node.append(value)
    elif isinstance(node, CONTAINERS):
        node[key] = value
    else:
        setattr(node, key, value)


def sum_of(variable: nnx.Variable) -> jax.Array:
    """Returns the sum over a Variable's value, whatever pytree that is."""
    sums = [jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(variable.get_value())]
    return functools.reduce(jnp.add, sums, jnp.float32(0))


# Strategies are made once, here: making them anew in each draw would double its cost. So a drawn
# node number may be too large; it is taken modulo the number of nodes.
flags = st.booleans()
numbers = st.integers(0, 11)
shapes = st.sampled_from([(), (2,)])
arrays = st.builds(Array, st.integers(-3, 3), shapes, flags)
device_arrays = st.builds(Array, st.integers(-3, 3), shapes)
metadata = st.sampled_from([(), (("tag", "x"),), (("tag", "y"), ("rate", 0.5))])
variable_values = arrays | st.fixed_dictionaries({"u": device_arrays, "v": device_arrays})
variables = st.builds(VariableSpec, st.sampled_from(VARIABLES), variable_values, metadata)
constants = st.builds(Constant, st.integers(0, len(STATICS) - 1))
refs = st.builds(Ref, numbers)
plain = refs | arrays | constants
values = st.builds(Value, st.sampled_from([tuple, Pair, Box]), plain, plain)
methods = st.builds(Method, numbers, flags)
marked = st.builds(Marked, st.just(nnx.data), refs | values) | st.builds(
    Marked, st.just(nnx.static), constants
)
extras = st.one_of(refs, arrays, constants, values, methods)
classes_below = st.sampled_from(OBJECTS + CONTAINERS)
wrappings = st.sampled_from([None, None, tuple, Pair, Box])
few = st.integers(0, 2)


@st.composite
def blueprints(
    draw: st.DrawFn,
    *,
    roots: int = 1,
    max_nodes: int = 4,
    closures: bool = True,
    marks: bool = False,
) -> Blueprint:
    """Draws graphs with sharing, cycles, containers, arrays, methods and statics of all kinds.

    Args:
      draw: Given by Hypothesis.
      roots: How many roots; the first is a Net, all may share nodes.
      max_nodes: How many objects and containers there may be, next to up to three Variables.
      closures: Whether some static values are closures.
      marks: Whether some attributes are assigned as `nnx.data(...)` or `nnx.static(...)`, which
        limits what they may be set to later.
    """
    size = 1 + draw(numbers) % max_nodes
    classes = [Net, *(draw(classes_below) for _ in range(size - 1))]
    leaves = [draw(variables) for _ in range(1 + draw(few))]
    fit = _Fit(classes, size + len(leaves), len(STATICS) - (0 if closures else CLOSURES))
    contents: list[list[Any]] = [[] for _ in classes]
    for number in range(1, size + len(leaves)):
        # Each node hangs at an earlier one, so that all of them are part of the graph.
        parent = draw(numbers) % min(number, size)
        wrapping = draw(wrappings)
        child = Ref(number)
        contents[parent].append(Value(wrapping, child, fit(draw(plain))) if wrapping else child)
    for cls, items in zip(classes, contents, strict=True):
        # Only objects take marks.
        more = extras if not marks or cls in (list, dict) or draw(flags) else marked
        items += [fit(draw(more)) for _ in range(draw(few))]
    nodes = [
        NodeSpec(cls, tuple(zip(_keys(cls, len(items), size), items, strict=True)))
        for cls, items in zip(classes, contents, strict=True)
    ]
    # A plain list or dict as an argument is JAX's own pytree: copied, and not to hold itself.
    objects = [n for n, cls in enumerate(classes) if issubclass(cls, nnx.Pytree)]
    others = (objects[draw(numbers) % len(objects)] for _ in range(roots - 1))
    return Blueprint((*nodes, *leaves), (0, *others))


class _Fit:
    """Brings drawn numbers into the range that one blueprint has."""

    def __init__(self, classes: list[type], nodes: int, statics: int) -> None:
        self.nets = [n for n, cls in enumerate(classes) if issubclass(cls, Net)]
        self.nodes, self.statics = nodes, statics

    def __call__(self, content: Any) -> Any:
        match content:
            case Ref(number):
                return Ref(number % self.nodes)
            case Constant(number):
                return Constant(number % self.statics)
            case Method(number, partial):
                return Method(self.nets[number % len(self.nets)], partial)
            case Value(type, first, second):
                return Value(type, self(first), self(second))
            case Marked(mark, inner):
                return Marked(mark, self(inner))
        return content


def _keys(cls: type, count: int, size: int) -> list[Any]:
    if cls in (list, nnx.List):
        return list(range(count))
    if cls is dict and size % 2:
        return [10 * n for n in range(count)]
    return [f"{letter}{n}" for n, letter in zip(range(count), "badcfehgjilk", strict=False)]

"""Typed keys: equal exactly for values that are equal and of the same types."""

import collections
import copy
import dataclasses
import enum
import functools
import math
import types
from collections import OrderedDict, defaultdict
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import nnxlite as nnx
from nnxlite._core.errors import StaticValueError
from nnxlite._core.keys import typed_key


class Node:
    """Stands for an object of the graph."""

    __nnx_node__ = True

    def method(self) -> None: ...


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Level(enum.IntEnum):
    LOW = 1


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass(frozen=True)
class Config:
    size: Any
    note: Any = dataclasses.field(default=None, compare=False)


# Few values, many of which `==` confuses, so that examples often meet.
scalars = st.sampled_from(
    [
        *(None, True, False, 0, 1, 0.0, -0.0, 1.0, math.nan, math.inf, 0j, complex(0, -0.0), 1j),
        *("", "1", "a", b"a", Ellipsis, int, bool, Color.RED, Level.LOW, Color.BLUE),
        *(np.float32(1), np.float64(1), np.int32(1), np.bool_(True), np.float32(-0.0)),
        *(np.float32(math.nan), np.dtype("int32"), jnp.int32, range(0), range(1, 1)),
    ]
)
hashable = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.builds(Point, inner, inner),
        st.builds(Config, inner),
        st.frozensets(inner, max_size=2),
    ),
    max_leaves=3,
)
values = st.recursive(
    hashable,
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.lists(inner, max_size=2).map(tuple),
        st.dictionaries(hashable, inner, max_size=2),
        st.sets(hashable, max_size=2),
        st.builds(Config, inner),
    ),
    max_leaves=4,
)


def typed_equal(a: Any, b: Any) -> bool:
    """The definition, written as a comparison of two values."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float | np.floating):
        same_sign = math.copysign(1, a) == math.copysign(1, b)
        return (a != a and b != b) or (bool(a == b) and same_sign)
    if isinstance(a, complex):
        return typed_equal(a.real, b.real) and typed_equal(a.imag, b.imag)
    if isinstance(a, range):
        return (a.start, a.stop, a.step) == (b.start, b.stop, b.step)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(typed_equal, a, b))
    if isinstance(a, set | frozenset):
        return len(a) == len(b) and all(any(typed_equal(x, y) for y in b) for x in a)
    if isinstance(a, dict):
        return len(a) == len(b) and all(
            any(typed_equal(x, y) and typed_equal(a[x], b[y]) for y in b) for x in a
        )
    if isinstance(a, Config):
        return typed_equal(a.size, b.size)
    return bool(a == b)


@given(values, values)
def test_keys_are_equal_exactly_for_typed_equal_values(a: Any, b: Any) -> None:
    assert (typed_key(a) == typed_key(b)) == typed_equal(a, b)


@given(values)
def test_a_copy_has_an_equal_key(value: Any) -> None:
    key = typed_key(copy.deepcopy(value))
    assert key == typed_key(value)
    assert hash(key) == hash(typed_key(value))


LOOK_ALIKES = [
    (1, 1.0, True, np.int32(1), np.float32(1), Level.LOW, complex(1)),
    (0.0, -0.0, 0, False, None),
    ("a", b"a"),
    ((1,), [1], {1}, frozenset({1}), {1: 1}),
    (Point(1, 2), (1, 2)),
    (Config(1), Config(1.0), Config(True)),
    (OrderedDict(a=1), {"a": 1}, defaultdict(None, a=1), types.MappingProxyType({"a": 1})),
    (slice(1), slice(1.0), slice(0, 1)),
    (jnp.float32, np.float32, np.dtype("float32"), "float32"),
    (range(0), range(1, 1)),
]
WRAPPERS = {
    "bare": lambda x: x,
    "tuple": lambda x: ((x,),),
    "list": lambda x: [[x]],
    "dict": lambda x: {"k": {"k": x}},
    "namedtuple": lambda x: Point(x, 0),
    "dataclass": lambda x: Config((x,)),
    "partial": lambda x: functools.partial(max, x),
    "default": lambda x: _function_with_default(x),
    "cell": lambda x: _closure_over(x),
}


def _function_with_default(default: Any) -> Any:
    def function(x: Any = default) -> Any: ...

    return function


def _closure_over(cell: Any) -> Any:
    return lambda: cell


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("group", LOOK_ALIKES, ids=str)
def test_look_alikes_have_different_keys_at_any_depth(group: tuple[Any, ...], wrapper: str) -> None:
    keys = [typed_key(WRAPPERS[wrapper](value)) for value in group]
    assert all(a != b for i, a in enumerate(keys) for b in keys[:i])


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("make", [float, lambda x: np.float32(float(x)), lambda x: complex(x)])
def test_nan_equals_itself_at_any_depth(make: Any, wrapper: str) -> None:
    wrap = WRAPPERS[wrapper]
    assert typed_key(wrap(make("nan"))) == typed_key(wrap(make("nan")))


def test_the_order_of_a_dict_does_not_matter() -> None:
    assert typed_key({"a": 1, "b": 2}) == typed_key({"b": 2, "a": 1})
    assert typed_key(OrderedDict(a=1, b=2)) != typed_key(OrderedDict(b=2, a=1))


def test_fields_that_do_not_compare_are_no_part_of_a_dataclass_key() -> None:
    assert typed_key(Config(1, note=[])) == typed_key(Config(1, note="x"))


def test_a_dataclass_with_its_own_eq_is_compared_by_it() -> None:
    @dataclasses.dataclass(frozen=True)
    class Unit:
        name: str

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Unit) and self.name.lower() == other.name.lower()

        def __hash__(self) -> int:
            return hash(self.name.lower())

    assert typed_key(Unit("M")) == typed_key(Unit("m"))


def test_a_hashable_object_is_compared_by_its_eq() -> None:
    from jax.sharding import PartitionSpec

    assert typed_key(PartitionSpec("a")) == typed_key(PartitionSpec("a"))
    assert typed_key(object()) != typed_key(object())


# Functions.


def test_equal_closures_have_equal_keys() -> None:
    assert typed_key(_closure_over((1, "a", None))) == typed_key(_closure_over((1, "a", None)))
    assert typed_key(_closure_over(int)) == typed_key(_closure_over(int))
    inner = _closure_over(_closure_over(2)), _closure_over(_closure_over(2))
    assert typed_key(inner[0]) == typed_key(inner[1])


def test_functions_of_other_code_globals_or_defaults_differ() -> None:
    def plain(x: Any) -> Any:
        return x

    elsewhere = types.FunctionType(plain.__code__, {}, plain.__name__)
    keyword = types.FunctionType(plain.__code__, plain.__globals__, plain.__name__)
    keyword.__kwdefaults__ = {"x": 1}
    keys = [typed_key(f) for f in (plain, elsewhere, keyword, lambda x: x)]
    assert len(set(keys)) == 4


def test_function_that_was_jitted_keeps_its_key() -> None:
    def plain(x: Any) -> Any:
        return x

    def with_attribute(x: Any) -> Any:
        return x

    with_attribute.note = "a"  # type: ignore[attr-defined]  # functions take any
    for function in (plain, with_attribute):
        before = typed_key(function)
        nnx.jit(function)
        assert typed_key(function) == before


def test_attributes_of_a_function_are_part_of_its_key() -> None:
    first, second = _closure_over(1), _closure_over(1)
    first.axis = 0
    assert typed_key(first) != typed_key(second)
    second.axis = 0
    assert typed_key(first) == typed_key(second)


@pytest.mark.parametrize("content", [[], {}, set(), ([],), OrderedDict(), Point([], 1)], ids=str)
def test_a_function_with_a_mutable_cell_is_its_own_key(content: Any) -> None:
    function = _closure_over(content)
    assert typed_key(function) == typed_key(function)
    assert typed_key(function) != typed_key(_closure_over(content))


def test_a_function_around_one_with_a_mutable_cell_is_keyed_by_it() -> None:
    inner = _closure_over([])
    assert typed_key(_closure_over(inner)) == typed_key(_closure_over(inner))
    assert typed_key(_closure_over(inner)) != typed_key(_closure_over(_closure_over([])))


def test_arrays_and_objects_in_cells_are_compared_by_identity() -> None:
    for content in (jnp.ones(2), np.ones(2), collections.Counter(), types.SimpleNamespace(a=1)):
        assert typed_key(_closure_over(content)) == typed_key(_closure_over(content))
    assert typed_key(_closure_over(np.ones(2))) != typed_key(_closure_over(np.ones(2)))


def test_a_closure_that_refers_to_itself_has_a_key() -> None:
    def make(step: int) -> Any:
        def loop(n: int) -> int:
            return n and loop(n - step)

        return loop

    assert typed_key(make(1)) == typed_key(make(1))
    assert typed_key(make(1)) != typed_key(make(2))


def test_closures_that_refer_to_each_other_have_keys() -> None:
    def make(step: int) -> Any:
        def even(n: int) -> bool:
            return n == 0 or odd(n - step)

        def odd(n: int) -> bool:
            return n != 0 and even(n - step)

        return even

    assert typed_key(make(1)) == typed_key(make(1)) != typed_key(make(2))


def test_an_empty_cell_has_a_key() -> None:
    def make() -> Any:
        def function() -> Any:
            return later

        key = typed_key(function)
        later = 1
        return key, typed_key(function)

    before, after = make()
    assert before != after


def test_partials_are_compared_by_function_and_arguments() -> None:
    def call(*args: Any, **kwargs: Any) -> None: ...

    key = typed_key(functools.partial(call, 1, a=2, b=3))
    assert key == typed_key(functools.partial(call, 1, b=3, a=2))
    assert key != typed_key(functools.partial(call, 1, a=2.0, b=3))
    assert key != typed_key(functools.partial(call, a=2, b=3))


def test_methods_are_compared_by_receiver_and_function() -> None:
    class Helper:
        def run(self) -> None: ...

        def other(self) -> None: ...

    helper = Helper()
    assert typed_key(helper.run) == typed_key(helper.run)
    assert typed_key(helper.run) != typed_key(helper.other)
    assert typed_key(helper.run) != typed_key(Helper().run)


def test_callables_written_in_c_are_their_own_keys() -> None:
    items: list[int] = []
    assert typed_key(len) == typed_key(len) != typed_key(sum)
    assert typed_key(items.append) == typed_key(items.append)
    assert typed_key(items.append) != typed_key([].append)
    assert typed_key(jnp.sin) == typed_key(jnp.sin) != typed_key(jnp.cos)


@pytest.mark.parametrize("make", [optax.adam, optax.adamw, optax.sgd, optax.lion, optax.rmsprop])
def test_an_optimizer_made_anew_has_the_same_key(make: Any) -> None:
    assert typed_key(make(1e-3)) == typed_key(make(1e-3)) != typed_key(make(1e-2))


def test_a_chain_with_a_schedule_made_anew_has_the_same_key() -> None:
    def make() -> Any:
        rate = optax.cosine_decay_schedule(1.0, 100)
        return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate))

    assert typed_key(make()) == typed_key(make())


# Errors.


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (jnp.ones(2), r"^the size is an array \(float32\[2\]\)\. .*Variable\.$"),
        ([1, {"a": (np.ones(3),)}], r"^the size\[1\]\['a'\]\[0\] is an array \(float64\[3\]\)"),
        (bytearray(), r"the size is of type builtins\.bytearray, which is not hashable"),
        (Config(bytearray()), r"the size\.size is of type builtins\.bytearray"),
        ({bytes: collections.Counter()}, r"the size\[<class 'bytes'>\] is of type collections"),
        ((Node(),), r"the size\[0\] is a Node\. Objects and Variables are data"),
    ],
    ids=["array", "nested array", "unhashable", "field", "counter", "node"],
)
def test_a_value_without_a_key_is_an_error_that_names_its_place(value: Any, message: str) -> None:
    with pytest.raises(StaticValueError, match=message):
        typed_key(value, "the size")


def test_a_traced_array_is_an_error() -> None:
    with pytest.raises(StaticValueError, match=r"value\[0\] is a traced array"):
        jax.jit(lambda x: typed_key([x]))(1.0)


@pytest.mark.parametrize("make", [list, dict, OrderedDict])
def test_a_container_that_contains_itself_is_an_error(make: Any) -> None:
    value = make()
    value.append(value) if make is list else value.setdefault("self", value)
    with pytest.raises(StaticValueError, match="that contains itself"):
        typed_key(value)


def _keyword_only(node: Any) -> Any:
    def function(*, block: Any = node) -> None: ...

    return function


@pytest.mark.parametrize(
    ("function", "place"),
    [
        (_closure_over(Node()), r"act \(cell 'cell'\) is a Node"),
        (_closure_over([Node()]), r"act \(cell 'cell'\)\[0\] is a Node"),
        (_closure_over({"a": (Node(),)}), r"act \(cell 'cell'\)\['a'\]\[0\] is a Node"),
        (_closure_over(_closure_over(Node())), r"\(cell 'cell'\) \(cell 'cell'\) is a Node"),
        (_closure_over(Node().method), r"\(cell 'cell'\) is a method of Node"),
        (_function_with_default(Node()), r"act \(default 0\) is a Node"),
        (_keyword_only(Node()), r"act \(default 'block'\) is a Node"),
        (functools.partial(max, Node()), r"act \(argument 0\) is a Node"),
        (functools.partial(max, key=Node()), r"act \(argument 'key'\) is a Node"),
        (Node().method, r"act is a method of Node"),
    ],
)
def test_a_function_that_holds_an_object_is_an_error(function: Any, place: str) -> None:
    way_out = "Make the function a method, or store the submodule"
    with pytest.raises(StaticValueError, match=f"{place}.*{way_out}"):
        typed_key(function, "act")


def test_a_class_of_objects_in_a_cell_is_no_object() -> None:
    assert typed_key(_closure_over(Node)) == typed_key(_closure_over(Node))

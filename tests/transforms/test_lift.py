"""What crosses a transform and comes back, the same for each of them.

Wherever it can be, the oracle is the plain call on a twin: same result, same final graph.
"""

from collections import namedtuple
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.extras import TRAVELLING, travelling
from nnxlite._core.trace import FOREIGN_READS
from tests.isomorphism import assert_isomorphic, reachable
from tests.strategies import Box
from tests.transforms.changes import (
    CHANGES,
    add_list,
    add_variable,
    append_to_a_list,
    call_methods,
    do_much,
    set_array_in_a_list,
    set_array_in_a_tuple,
    set_value,
)
from tests.transforms.samples import TRANSFORMS, Cell, Tree, counted

Pair = namedtuple("Pair", "first second")
through = pytest.mark.parametrize("through", TRANSFORMS.values(), ids=TRANSFORMS)


def places(nodes, known):
    """Per node its number among those that were known, -1 for a new one."""
    return [next((n for n, x in enumerate(known) if x is node), -1) for node in nodes]


@pytest.mark.parametrize("name", ["jit", "grad"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_change_arrives_at_the_same_objects(change, name):
    def run(m):
        try:
            change(m)
        except (AttributeError, KeyError, IndexError, TypeError):
            return  # the first call took away what the second needs

    eager, lifted, call = Tree(), Tree(), TRANSFORMS[name](run)
    for _ in range(2):
        eager_nodes, lifted_nodes = reachable(eager), reachable(lifted)
        run(eager)
        call(lifted)
        assert_isomorphic(eager, lifted)
        assert places(reachable(eager), eager_nodes) == places(reachable(lifted), lifted_nodes)


@through
def test_many_changes_arrive_at_the_same_objects(through):
    eager, lifted = Tree(), Tree()
    eager_nodes, lifted_nodes = reachable(eager), reachable(lifted)
    do_much(eager)
    through(do_much)(lifted)
    assert_isomorphic(eager, lifted)
    assert places(reachable(eager), eager_nodes) == places(reachable(lifted), lifted_nodes)


@through
def test_objects_keep_their_identity_through_a_structural_change(through):
    m = Tree()
    left, right, items, table, w = m.left, m.right, m.items, m.table, m.left.w
    through(do_much)(m)
    assert m.left is right and m.right is left and m.again is left
    assert m.items is items and m.table is table and left.w is w
    assert m.extra[0] is left


@through
def test_list_grown_inside_is_the_same_list(through):
    m = Tree()
    items = m.items
    through(append_to_a_list)(m)
    assert m.items is items and len(items) == 4 and float(items[3][...]) == 23


@through
def test_detached_child_still_gets_its_values(through):
    def f(m):
        child = m.left
        del m.left, m.again
        child.w[...] += jnp.float32(1)
        child.extra = nnx.Param(child.w[...])

    m = Tree()
    child = m.left
    through(f)(m)
    assert not hasattr(m, "left")
    assert float(child.w[...]) == 3 and float(child.extra[...]) == 3


@through
def test_tuple_is_rebuilt_only_if_its_leaves_change(through):
    m = Tree()
    pair = m.pair
    through(set_value)(m)
    assert m.pair is pair
    through(add_variable)(m)
    assert m.pair is pair
    through(set_array_in_a_tuple)(m)
    assert m.pair is not pair and m.pair[1] is pair[1]


@through
def test_array_of_numpy_stays_while_it_is_only_read(through):
    m = Tree()
    m.array = array = np.float32([1, 2])
    assert through(lambda m: m.array.sum())(m) == 3
    assert m.array is array
    array[0] = 5  # in place: seen at the next call
    assert through(lambda m: m.array.sum())(m) == 7


# Only what changed is written.


@through
def test_untouched_arrays_are_the_same_objects_after_a_call(through):
    m = Tree()
    before = jax.tree.leaves(m)
    through(lambda m: m.left.w[...] * m.array)(m)
    assert all(a is b for a, b in zip(before, jax.tree.leaves(m), strict=True))
    through(call_methods)(m)
    same = [a is b for a, b in zip(before, jax.tree.leaves(m), strict=True)]
    assert same.count(False) == 2  # the counters of `left` and of `items[0]`


@through
def test_untouched_arrays_survive_a_structural_change(through):
    m = Tree()
    before = jax.tree.leaves(m)
    through(add_list)(m)
    after = {id(x) for x in jax.tree.leaves(m)}
    assert all(id(x) in after for x in before)


def test_read_only_call_has_no_output_but_its_result():
    m = Tree()
    compiled = nnx.jit(lambda m: m.left.w[...] * m.array).lower(m).compile()
    assert compiled.memory_analysis().output_size_in_bytes == 4


# Results that are objects.


@through
def test_argument_in_the_result_is_the_argument(through):
    m = Tree()
    assert through(lambda m: m)(m) is m
    assert through(lambda m: m.left)(m) is m.left
    assert through(lambda m: m.left.w)(m) is m.left.w
    assert through(lambda m: m.pair[1])(m) is m.pair[1]


@through
def test_arguments_nested_in_the_result_are_the_arguments(through):
    m = Tree()

    def f(m):
        return {"a": [m, m.items[0], 2 * m.array], "b": (Pair(m.left, m.left.w), Box(m.right, m))}

    out = through(f)(m)
    assert out["a"][0] is m and out["a"][1] is m.items[0] and out["a"][2] == 46
    assert out["b"][0].first is m.left and out["b"][0].second is m.left.w
    assert out["b"][1].first is m.right and out["b"][1].second is m


@through
def test_arguments_come_back_while_the_structure_changes(through):
    m = Tree()

    def f(m):
        add_list(m)
        return m.extra[1], m.left, {"m": m}

    new, left, out = through(f)(m)
    assert new is m.extra[1] and left is m.left and out["m"] is m


@through
def test_new_object_in_the_result_holds_the_arguments(through):
    def f(m):
        new = Cell()
        new.child, new.list = m.left, [m.w2, m]
        return new

    m = Tree()
    m.w2 = nnx.Param(jnp.float32(1))
    new = through(f)(m)
    assert new.child is m.left and new.list[0] is m.w2 and new.list[1] is m
    assert float(new.w[...]) == 2
    new.w[...] += 1.0  # it belongs to the caller's level


@through
def test_new_object_given_back_and_stored_is_one_object(through):
    def f(m):
        m.extra = Cell()
        return m.extra, m.extra.w

    m = Tree()
    new, w = through(f)(m)
    assert m.extra is new and new.w is w


@through
def test_argument_that_is_swapped_comes_back_as_itself(through):
    a, b = Cell(), Cell()
    first, second = through(lambda a, b: (b, a))(a, b)
    assert first is b and second is a


@through
def test_variables_and_states_are_arguments_too(through):
    def f(v, state):
        v[...] += jnp.float32(1)
        state["w"][...] *= v[...]
        return v, state, state["w"]

    v, state = nnx.Param(jnp.float32(1)), nnx.state(Cell(), nnx.Param)
    out_v, out_state, w = through(f)(v, state)
    assert out_v is v and out_state is state
    assert float(v[...]) == 2 and float(state["w"][...]) == 4 and float(w[...]) == 4


@through
def test_structure_of_a_state_may_change(through):
    def f(state):
        state["new"] = nnx.BatchStat(state["w"][...] + jnp.float32(1))
        del state["n"]

    state = nnx.state(Cell())
    through(f)(state)
    assert list(state) == ["new", "w"]
    assert type(state["new"]) is nnx.BatchStat and float(state["new"][...]) == 3


@through
def test_objects_come_in_at_any_depth_and_by_name(through):
    def f(batch, *, model, flags):
        model(batch["x"])
        batch["inner"][0](batch["x"])
        return batch["inner"][0], flags["v"]

    model, inner, v = Cell(), Cell(), nnx.Variable(jnp.float32(0))
    out = through(f)({"x": jnp.float32(1), "inner": (inner, None)}, model=model, flags={"v": v})
    assert out[0] is inner and out[1] is v
    assert int(model.n[...]) == int(inner.n[...]) == 1


# Sharing across arguments.


@through
def test_object_given_twice_is_one_object_inside(through):
    def f(a, b):
        a.n[...] += jnp.int32(1)
        b.n[...] += jnp.int32(1)
        return jnp.int32(a is b)

    n, m = Cell(), Cell()
    assert through(f)(n, n) == 1 and int(n.n[...]) == 2
    assert through(f)(n, m) == 0 and int(n.n[...]) == 3 and int(m.n[...]) == 1


def test_shared_and_separate_arguments_are_two_traces():
    run, traces = counted(lambda a, b: a.w[...] + b.w[...])
    h, n, m = nnx.jit(run), Cell(), Cell()
    for _ in range(3):
        h(n, n)
        h(n, m)
        h(m, m)
        h(m, n)
    assert len(traces) == 2


@through
def test_variable_shared_by_two_arguments_is_one_inside(through):
    def f(a, b):
        a.w[...] += jnp.float32(1)
        return b.w[...] * jnp.float32(1)

    a, b = Cell(), Cell()
    b.w = a.w
    assert through(f)(a, b) == 3
    assert a.w is b.w


@through
def test_sharing_made_inside_between_two_arguments_lasts(through):
    def f(a, b):
        a.w = b.w
        b.child = a

    a, b = Cell(2.0), Cell(3.0)
    through(f)(a, b)
    assert a.w is b.w and b.child is a and float(a.w[...]) == 3


@through
def test_part_of_another_argument_is_the_same_inside(through):
    def f(whole, part):
        part.w[...] += jnp.float32(1)
        return whole.left.w[...] * jnp.float32(1)

    m = Tree()
    assert through(f)(m, m.left) == 3


# A failed call.


@through
@pytest.mark.parametrize("change", [do_much, append_to_a_list, set_array_in_a_list, add_variable])
def test_failed_call_changes_nothing(change, through):
    def f(m):
        change(m)
        raise ZeroDivisionError("after all changes")

    m = Tree()
    nodes, arrays = reachable(m), jax.tree.leaves(m)
    with pytest.raises(ZeroDivisionError, match="after all changes"):
        through(f)(m)
    assert_isomorphic(Tree(), m)
    assert all(a is b for a, b in zip(nodes, reachable(m), strict=True))
    assert all(a is b for a, b in zip(arrays, jax.tree.leaves(m), strict=True))
    assert FOREIGN_READS.recorders == []


@through
def test_result_that_jax_refuses_changes_nothing(through):
    def f(m):
        do_much(m)
        return jax.lax.cond(m.array > 0, lambda: 1, lambda: 1.0)

    m = Tree()
    with pytest.raises(TypeError, match="cond"):
        through(f)(m)
    assert_isomorphic(Tree(), m)


@through
def test_object_is_usable_after_a_failed_call(through):
    m, fail = Tree(), [True]

    def f(m):
        m.left(m.array)
        if fail:
            raise ZeroDivisionError("once")

    call = through(f)
    with pytest.raises(ZeroDivisionError, match="once"):
        call(m)
    fail.clear()
    call(m)
    assert int(m.left.n[...]) == 1


# Extra inputs and outputs.


class Total:
    """Travels with the objects: adds up what the bodies of transforms note."""

    noted: list[Any] = []  # noqa: RUF012  # one list for the innermost body that runs

    def __init__(self, start: Any) -> None:
        self.total = start
        self.delivered: list[Any] = []
        self.nodes: list[Any] = []

    def key(self):
        return "total"

    def inputs(self, nodes, use=None):
        return self.total

    @contextmanager
    def inside(self, inputs, nodes):
        inner = Total(inputs)
        before, Total.noted = Total.noted, []
        try:
            with travelling(inner):
                yield lambda: inner.total + sum(Total.noted, jnp.float32(0))
        finally:
            Total.noted = before

    def deliver(self, outputs, nodes):
        self.nodes = [node() for node in nodes]
        self.delivered.append(outputs)
        self.total = outputs


def note(x):
    Total.noted.append(x)


@through
def test_extras_travel_in_and_out(through):
    extra = Total(jnp.float32(100))
    m = Cell()
    call = through(lambda m, x: note(m.w[...] * x))
    with travelling(extra):
        call(m, jnp.float32(3))
    assert float(extra.total) == 106
    assert extra.nodes[0] is m
    assert len(extra.delivered) == 1


def test_extras_are_delivered_by_cached_calls_too():
    extra, m = Total(jnp.float32(0)), Cell()
    run, traces = counted(lambda m, x: note(m(x)))
    call = nnx.jit(run)
    call(m, jnp.float32(1))  # without extras: another trace
    with travelling(extra):
        for x in (1.0, 2.0, 3.0):
            call(m, jnp.float32(x))
    assert float(extra.total) == 12 and len(extra.delivered) == 3
    assert len(traces) == 2
    call(m, jnp.float32(1))
    assert len(traces) == 2 and int(m.n[...]) == 5


@through
def test_extras_travel_with_structural_changes_and_objects_in_results(through):
    extra, m = Total(jnp.float32(0)), Tree()

    def f(m):
        add_list(m)
        note(m.array)
        return m.left

    with travelling(extra):
        assert through(f)(m) is m.left
    assert float(extra.total) == 23


@through
def test_two_extras_do_not_mix(through):
    one, two = Total(jnp.float32(1)), Total(jnp.float32(2))
    with travelling(one):
        with travelling(two):
            through(lambda m: None)(Cell())
        through(lambda m: None)(Cell())
    assert float(one.total) == 1 and float(two.total) == 2
    assert len(one.delivered) == 2 and len(two.delivered) == 1


@through
def test_failed_call_delivers_no_extras(through):
    extra = Total(jnp.float32(1))

    def f(m):
        raise ZeroDivisionError("inside")

    with travelling(extra), pytest.raises(ZeroDivisionError, match="inside"):
        through(f)(Cell())
    assert extra.delivered == [] and TRAVELLING.active == ()

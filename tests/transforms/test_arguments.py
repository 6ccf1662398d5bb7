"""Callables taken apart, and arguments chosen by number or name."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.errors import StaticValueError
from nnxlite._transforms.arguments import (
    Bound,
    Chosen,
    Fixed,
    Statics,
    by_position,
    closed_over,
    names,
    numbers,
    parameters,
    paths_in_closure,
    resolve,
)
from tests.transforms.samples import Cell


def three(a, b=0, *rest, c, d=None, **more):
    return a, b, rest, c, d, more


def test_function_is_itself():
    assert resolve(three) == (three, (), {})


def test_bound_method_is_its_function_and_its_object():
    cell = Cell()
    assert resolve(cell.train) == (type(cell).train, (cell,), {})


def test_callable_object_is_its_call_and_itself():
    cell = Cell()
    function, args, kwargs = resolve(cell)
    assert function is type(cell).__call__ and args == (cell,) and kwargs == {}


def test_method_of_a_plain_object_stays_whole():
    method = [1].append
    assert resolve(method) == (method, (), {})


def test_partial_gives_its_objects_and_arrays():
    cell, x = Cell(), jnp.ones(2)
    function, args, kwargs = resolve(functools.partial(three, cell, c=x))
    assert function is three and args == (cell,) and kwargs == {"c": x}


def test_constants_of_a_partial_stay_with_the_function():
    cell = Cell()
    bound = functools.partial(three, 1, cell, "x", c={"k": 2}, d=cell)
    function, args, kwargs = resolve(bound)
    assert args == (cell,) and kwargs == {"d": cell}
    assert function(cell, 5, d=cell, e=6) == (1, cell, ("x", 5), {"k": 2}, cell, {"e": 6})
    assert function.__name__ == "three"


def test_partial_of_a_partial_of_a_method():
    cell = Cell()
    inner = functools.partial(cell.set_attributes, raise_if_not_found=False)
    function, args, kwargs = resolve(functools.partial(inner, mode="eval"))
    assert args == (cell,) and kwargs == {}
    function(cell)
    assert function == resolve(functools.partial(inner, mode="eval"))[0]


def test_keyword_of_a_partial_gives_way_to_that_of_the_call():
    function, _, _ = resolve(functools.partial(three, c=1))
    assert function(0, c=2)[3] == 2


def test_objects_inside_of_containers_are_no_constants():
    cell = Cell()
    assert resolve(functools.partial(three, [1, cell]))[1] == ([1, cell],)
    assert resolve(functools.partial(three, {"x": np.ones(2)}))[1][0].keys() == {"x"}


@pytest.mark.parametrize(
    ("left", "right", "same"),
    [(1, 1, True), (1, 1.0, False), ([1], [1], True), (jnp.sin, jnp.sin, True), ("a", "b", False)],
)
def test_functions_with_constants_compare_by_typed_value(left, right, same):
    pair = Fixed(three, {0: left}, {}), Fixed(three, {0: right}, {})
    assert (pair[0] == pair[1]) is same
    assert not same or hash(pair[0]) == hash(pair[1])
    named = Fixed(three, {}, {"c": left}), Fixed(three, {}, {"c": right})
    assert (named[0] == named[1]) is same


def test_constant_without_a_key_stands_for_itself():
    cell = Cell()
    hides = lambda: cell  # noqa: E731
    assert Fixed(three, {0: hides}, {}) == Fixed(three, {0: hides}, {})
    assert Fixed(three, {0: hides}, {}) != Fixed(three, {0: lambda: cell}, {})


def test_parameters_without_the_constants():
    def f(a, b, c, d):
        return a, b, c, d

    assert parameters(Fixed(f, {1: 0}, {})) == ["a", "c", "d"]
    assert parameters(Fixed(f, {}, {"c": 0})) == ["a", "b"]
    assert parameters(Fixed(f, {0: 0}, {"d": 0})) == ["b", "c"]
    assert parameters(Fixed(lambda a, *rest: a, {1: 0}, {})) == ["a"]
    Chosen(["a"], (3,), (), "f").check(Fixed(lambda a, *rest: a, {1: 0}, {}), "static")


def test_transformed_method_is_its_function_and_its_object():
    cell = Cell()
    bound = Bound(three, cell, c=cell)
    assert resolve(bound) == (three, (cell,), {"c": cell})
    assert bound(2) == (cell, 2, (), cell, None, {})
    assert bound.__self__ is cell and bound.__func__ is three and bound.__name__ == "three"


@pytest.mark.parametrize(("given", "expected"), [(None, ()), (2, (2,)), ([0, 1], (0, 1)), ((), ())])
def test_numbers(given, expected):
    assert numbers(given) == expected


@pytest.mark.parametrize(
    ("given", "expected"), [(None, ()), ("ab", ("ab",)), (["a", "b"], ("a", "b"))]
)
def test_names(given, expected):
    assert names(given) == expected


def test_parameters_are_those_that_may_be_given_by_position():
    assert parameters(three) == ["a", "b"]
    assert parameters(functools.partial(three, 1)) == ["b"]
    assert parameters(Cell) == ["w"]


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [
        ((1,), {}, ((1,), {})),
        ((), {"a": 1}, ((1,), {})),
        ((1,), {"b": 2, "c": 3}, ((1, 2), {"c": 3})),
        ((), {"b": 2}, ((), {"b": 2})),
        ((1, 2), {"c": 3}, ((1, 2), {"c": 3})),
    ],
)
def test_by_position_moves_what_follows(args, kwargs, expected):
    assert by_position(args, kwargs, ["a", "b"]) == expected


def test_chosen_by_number_is_chosen_by_name_too():
    assert Chosen(["a", "b"], (1,), (), "f").names == {"b"}
    assert Chosen(["a", "b"], (), ("b", "c"), "f").positions == {1}
    assert Chosen(["a", "b"], (-1,), (), "f").positions == {1}
    assert not Chosen(["a"], (), (), "f")


@pytest.mark.parametrize(
    ("given", "given_names", "found"),
    [((5,), (), "5"), ((), ("z",), "'z'"), ((0, 2), ("y", "z"), "'y', 'z', 2")],
)
def test_chosen_that_is_no_parameter_is_an_error(given, given_names, found):
    def f(a, b):
        pass

    chosen = Chosen(["a", "b"], given, given_names, "nnx.jit(f)")
    expected = rf"nnx\.jit\(f\): static has {found}, but the parameters .* are a, b"
    with pytest.raises(ValueError, match=expected):
        chosen.check(f, "static")


def test_anything_may_be_chosen_of_a_function_that_takes_anything():
    Chosen(["a", "b"], (7,), ("z",), "f").check(three, "static")


def test_negative_number_out_of_range_is_an_error():
    with pytest.raises(ValueError, match=r"argument number -3 is out of range.*2 positional"):
        Chosen(["a", "b"], (-3,), (), "f")


def test_statics_are_taken_out_and_joined_again():
    chosen = Chosen(["a", "b", "c"], (1,), ("k",), "f")
    args, kwargs, statics = Statics.take((1, "two", 3), {"k": "v", "x": 4}, chosen)
    assert (args, kwargs) == ((1, 3), {"x": 4})
    assert statics.joined(args, kwargs) == ([1, "two", 3], {"k": "v", "x": 4})


def test_no_statics_is_none():
    assert Statics.take((1,), {"x": 2}, Chosen(["a"], (), ("k",), "f")) == ((1,), {"x": 2}, None)


def test_statics_are_keyed_by_typed_value():
    def key(value):
        return Statics({0: value}, {}).key

    assert key((1,)) == key((1,)) and key([1, 2]) == key([1, 2])
    assert len({key(x) for x in ((1,), (1.0,), (True,))}) == 3


def test_static_that_changes_later_does_not_change_the_key():
    given = [1, 2]
    statics = Statics({0: given}, {"k": given})
    given.append(3)
    assert statics.joined((), {}) == ([[1, 2]], {"k": [1, 2]})


def test_static_without_a_key_names_its_place():
    with pytest.raises(StaticValueError, match="static argument 1"):
        Statics({1: Cell()}, {})
    with pytest.raises(StaticValueError, match="static argument 'k'"):
        Statics({}, {"k": jnp.ones(2)})


CELL = Cell()


def test_closed_over_are_cells_globals_defaults_and_what_functions_of_the_file_reach():
    inside, default = Cell(), Cell()

    def helper():
        return inside

    def f(x, y=default, *, z=3):
        return helper(), [CELL for _ in x]

    found = dict(closed_over(f))
    assert found["inside"] is inside and found["y"] is default and found["CELL"] is CELL
    assert found["z"] == 3


def test_closed_over_ends_for_functions_that_reach_each_other():
    def even(n):
        return n == 0 or odd(n - 1)

    def odd(n):
        return n != 0 and even(n - 1)

    assert {name for name, _ in closed_over(even)} == {"odd", "even"}


def test_closed_over_may_be_unset_yet():
    def f():
        return later

    assert closed_over(f) == []
    later = 1


def test_paths_in_a_closure():
    tree = {"a": [CELL, nnx.List([Cell()])]}

    def f():
        return tree

    assert paths_in_closure(f, [CELL.w]) == ["tree.a[0].w"]
    assert paths_in_closure(f, [tree["a"][1][0]]) == ["tree.a[1][0]"]
    assert paths_in_closure(len, [CELL]) == []

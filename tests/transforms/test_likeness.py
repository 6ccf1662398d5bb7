"""Which functions count as the same: by what they do and reach, if that cannot change in place."""

import enum
import functools
import gc
import math
import os
import sys
import types
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._transforms.arguments import Fixed
from nnxlite._transforms.likeness import Weakly, likeness_of


class Mode(enum.Enum):
    TRAIN = 1
    EVAL = 2


CONSTANT: Any = 2


def doubled(x: Any) -> Any:
    return CONSTANT * x


def closing_over(value: Any) -> Any:
    return lambda x: (x, value)


def calling(function: Any) -> Any:
    return lambda x: function(x)


SAME = {
    "numbers": lambda: closing_over(2),
    "text in a tuple": lambda: closing_over(("a", 1.0)),
    "enums": lambda: closing_over(Mode.EVAL),
    "classes": lambda: closing_over(nnx.Linear),
    "a function made anew": lambda: calling(closing_over(3)),
    "a function of jax": lambda: calling(jnp.sin),
    "a derivative rule of jax": lambda: calling(jax.nn.relu),
    "a ufunc": lambda: calling(jnp.add),
    "a builtin": lambda: calling(math.sin),
    "dtypes": lambda: closing_over(jnp.float32),
    "no cell at all": lambda: lambda x: x,
    "a default": lambda: lambda x, n=3: x + n,
    "a global": lambda: lambda x: CONSTANT * x,
    "a function that reads a global": lambda: calling(doubled),
    "a partial": lambda: functools.partial(doubled, 3),
    "constants": lambda: Fixed(doubled, {0: 3}, {}),
    "itself": lambda: recursive(),
}


def recursive() -> Any:
    def f(n: int) -> int:
        return n if n < 2 else f(n - 1)

    return f


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_functions_made_anew_of_the_same_are_alike(make: Any) -> None:
    one, two = likeness_of(make()), likeness_of(make())
    assert one.exact and one.key == two.key and hash(one.key) == hash(two.key)
    assert not one.holds_object


OTHER = {
    "values": (closing_over(2), closing_over(3)),
    "types": (closing_over(1), closing_over(True)),
    "enums": (closing_over(Mode.TRAIN), closing_over(Mode.EVAL)),
    "functions": (calling(jnp.sin), calling(jnp.cos)),
    "inner functions": (calling(closing_over(2)), calling(closing_over(3))),
    "code": (lambda x: x + 1, lambda x: x + 2),
    "partials": (functools.partial(doubled, 3), functools.partial(doubled, 4)),
}


@pytest.mark.parametrize(("one", "two"), OTHER.values(), ids=OTHER)
def test_functions_that_do_something_else_are_not_alike(one: Any, two: Any) -> None:
    assert likeness_of(one).key != likeness_of(two).key


def test_a_global_that_is_another_makes_another_function() -> None:
    global CONSTANT
    before = likeness_of(calling(doubled)).key
    try:
        CONSTANT = 3
        assert likeness_of(calling(doubled)).key != before
    finally:
        CONSTANT = 2
    assert likeness_of(calling(doubled)).key == before


class Plain:
    pass


CHANGEABLE = {
    "a list": [1],
    "a dict": {"a": 1},
    "an object": Plain(),
    "an array": jnp.ones(2),
    "an array of numpy": np.ones(2),
    "a method": "abc".upper,
    "a jitted function": jax.jit(lambda x: x),
    "a lifted function": nnx.jit(lambda x: x),
}


@pytest.mark.parametrize("value", CHANGEABLE.values(), ids=CHANGEABLE)
def test_what_may_change_is_compared_by_identity(value: Any) -> None:
    one, two = likeness_of(closing_over(value)), likeness_of(closing_over(value))
    assert not one.exact and one.key == two.key
    other = [1] if type(value) is list else Plain()
    assert likeness_of(closing_over(other)).key != one.key


def test_objects_are_noticed_where_they_are_closed_over() -> None:
    model = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    for held in (model, model.kernel, nnx.state(model), [model], {"a": (model,)}):
        assert likeness_of(closing_over(held)).holds_object
    assert likeness_of(functools.partial(doubled, model)).holds_object
    assert likeness_of(model.__call__).holds_object
    assert likeness_of(calling(closing_over(model))).holds_object


GLOBAL = nnx.Dropout(0.5)


def test_a_global_object_counts_with_its_structure() -> None:
    reading = lambda: lambda x: GLOBAL(x)  # noqa: E731
    training = likeness_of(reading())
    assert not training.exact and not training.holds_object
    assert likeness_of(reading()).key == training.key
    GLOBAL.eval()
    try:
        assert likeness_of(reading()).key != training.key
    finally:
        GLOBAL.train()


def test_keys_keep_no_object_and_no_array_alive() -> None:
    plain, array = Plain(), jnp.arange(3)
    keys = [likeness_of(closing_over(x)).key for x in (plain, array)]
    refs = [weakref.ref(plain), weakref.ref(array)]
    del plain, array
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
    assert keys[0] != likeness_of(closing_over(Plain())).key


def test_a_weakly_held_function_is_called_and_named_like_it() -> None:
    def f(x: int, *, by: int) -> int:
        return x * by

    held = Weakly(f)
    assert held(2, by=3) == 6 and held.__name__ == "f" and held.__wrapped__ is f
    ref = weakref.ref(f)
    del f
    gc.collect()
    assert ref() is None and held.__wrapped__ is None


def test_a_traced_array_in_a_cell_is_no_reason_for_equality() -> None:
    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        one, two = likeness_of(closing_over(x)), likeness_of(closing_over(x + 1))
        assert not one.exact and one.key != two.key
        return x

    run(jnp.ones(2))


class Settings:
    scale: Any = 2.0


def scaled(x: Any) -> Any:
    return x * Settings.scale


def marked(x: Any) -> Any:
    return x * marked.by  # type: ignore[attr-defined]


@pytest.fixture
def elsewhere() -> Any:
    """A module of the user, in a file that was not installed."""
    module = types.ModuleType("elsewhere")
    module.__file__ = "/home/user/elsewhere.py"
    exec("scale = 2.0\ndef scaled(x):\n    return x * scale\n", vars(module))
    sys.modules["elsewhere"] = module
    yield module
    del sys.modules["elsewhere"]


def test_what_is_read_of_a_class_counts(monkeypatch: Any) -> None:
    before = [likeness_of(make()) for make in (lambda: scaled, lambda: lambda x: scaled(x))]
    monkeypatch.setattr(Settings, "scale", 3.0)
    after = [likeness_of(make()) for make in (lambda: scaled, lambda: lambda x: scaled(x))]
    assert all(a.key != b.key for a, b in zip(before, after, strict=True))


def test_what_is_read_of_a_function_counts() -> None:
    marked.by = 2.0  # type: ignore[attr-defined]
    before = likeness_of(marked)
    marked.by = 3.0  # type: ignore[attr-defined]
    assert likeness_of(marked).key != before.key


@pytest.mark.parametrize("read", ["module.scale", "module.scaled(1.0)"])
def test_what_is_read_of_a_module_of_the_user_counts(elsewhere: Any, read: str) -> None:
    function = eval(f"lambda: {read}", {"module": elsewhere})
    before = likeness_of(function)
    elsewhere.scale = 3.0
    assert likeness_of(function).key != before.key


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * float(os.environ.get("SCALE", "1")),
        lambda x: x * globals()["CONSTANT"],
        lambda x: getattr(x, "T"),  # noqa: B009  # the name might be made at run time
    ],
)
def test_a_function_that_looks_things_up_is_like_itself_only(function: Any) -> None:
    assert not likeness_of(function).exact

"""One line about any value: bounded, free of addresses and control characters, never failing."""

import enum
import functools
import os
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite._core.oneline import array_line, is_array, line, printable


class Color(enum.Enum):
    RED = 1


class Plain:
    pass


class Failing:
    def __repr__(self) -> str:
        raise RuntimeError("no repr today")


class Controls:
    def __repr__(self) -> str:
        return "<first\n   second \x1b[31mred \u202eback>"


def helper(x):
    return x


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (1.5, "1.5"),
        ("tab\t", r"'tab\t'"),
        (b"\x00", r"b'\x00'"),
        ([1, (2,), {"a": {3}}], "[1, (2,), {'a': {3}}]"),
        ((), "()"),
        (set(), "set()"),
        (frozenset({2, 1}), "frozenset({1, 2})"),
        (Color.RED, "Color.RED"),
        (int, "int"),
        (jnp.float32, "float32"),
        (np.dtype("int8"), "int8"),
        (types, "<module types>"),
        (helper, "<function helper>"),
        (jax.nn.relu, "<function relu>"),
        (functools.partial(helper, 1, y=Color.RED), "partial(<function helper>, 1, y=Color.RED)"),
        ("".join, "<function str.join>"),
        (Plain(), "<tests.core.test_oneline.Plain object>"),
        (Failing(), "<Failing whose repr failed: RuntimeError>"),
        (Controls(), r"<first second \x1b[31mred \u202eback>"),
        (1 << 1000, "<int of 1,001 bits>"),
        ([jnp.ones((2, 3))], "[float32[2,3]]"),
    ],
)
def test_line_names_the_value(value, expected):
    assert line(value).replace("<test_oneline", "<tests.core.test_oneline") == expected


@pytest.mark.parametrize(
    ("value", "ending"),
    [
        ("a" * 10**7, "... (10,000,000 characters)"),
        (b"a" * 10**7, "... (10,000,000 characters)"),
        (list(range(10**6)), "... (1,000,000 items)"),
        ({str(i): i for i in range(5000)}, "... (5,000 items)"),
        (set(range(5000)), "5,000 items}"),
    ],
)
def test_line_is_bounded_and_says_how_much_there_is(value, ending):
    found = line(value)
    assert found.endswith(ending)
    assert len(found) < 140


def test_line_of_a_container_that_holds_itself_ends():
    loop: list[object] = []
    loop.append(loop)
    assert len(line(loop)) < 140


def test_line_of_a_set_is_the_same_in_every_process():
    code = "from nnxlite._core.oneline import line; print(line({'a', 'b', 'c', 1}))"
    lines = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert lines == {"{'a', 'b', 'c', 1}\n"}


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones((2, 3)), "float32[2,3]"),
        (np.zeros(2, np.int8), "np.int8[2]"),
        (jax.ShapeDtypeStruct((4,), jnp.bfloat16), "abstract bfloat16[4]"),
        (jax.random.key(0), "key<fry>[]"),
        (np.array([{}], object), "np.object[1]"),
    ],
)
def test_array_line_gives_dtype_and_shape(value, expected):
    assert is_array(value)
    assert array_line(value) == expected


def test_array_line_of_a_tracer_and_of_a_deleted_array():
    lines = []
    jax.jit(lambda x: lines.append(array_line(x, values=True)))(jnp.ones(3))
    gone = jnp.ones(3)
    gone.delete()
    lines.append(array_line(gone, values=True))
    assert lines == ["traced float32[3]", "deleted float32[3]"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.arange(4).reshape(2, 2), "int32[2,2] [[0, 1], [2, 3]]"),
        (jnp.float32(0.5), "float32[] 0.5"),
        (jnp.ones(65), "float32[65]"),
        (jax.random.key(0), "key<fry>[]"),
    ],
)
def test_array_line_shows_small_contents_only_when_asked(value, expected):
    assert array_line(value, values=True) == expected


def test_array_line_reads_no_contents_by_default():
    array = jnp.ones(3)
    with jax.transfer_guard("disallow"):
        assert array_line(array) == "float32[3]"


def test_printable_cuts_at_the_room_it_has():
    assert printable("x" * 1000, 10) == "x" * 10 + "..."

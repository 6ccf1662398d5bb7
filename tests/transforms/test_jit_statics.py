"""Static arguments of jit: how they are given, and which are told apart."""

import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.errors import StaticValueError
from tests.transforms.samples import Cell, counted

ONE = jnp.float32(1)
X = jnp.ones((2, 3), jnp.float32)


def test_static_argument_by_position_and_by_name_is_one_key():
    run, traces = counted(lambda x, k=1, mode="a": x * jnp.float32(k))

    def f(x, k=1, mode="a"):
        return run(x, k, mode)

    for jitted in (nnx.jit(f, static_argnums=1), nnx.jit(f, static_argnames="k")):
        traces.clear()
        assert jitted(ONE, 3) == jitted(ONE, k=3) == jitted(x=ONE, k=3) == 3
        assert len(traces) == 1


def test_static_arguments_are_told_apart_by_type_at_any_depth():
    run, traces = counted(lambda x, k: x)
    jitted = nnx.jit(run, static_argnums=1)
    values = [1, 1.0, True, (1,), (1.0,), (True,), {"a": [1]}, {"a": [1.0]}, -0.0, 0.0, "1"]
    for value in [*values, *values]:
        jitted(ONE, value)
    assert len(traces) == len(values)


def test_static_arguments_may_be_lists_functions_and_optimizers():
    optax = pytest.importorskip("optax")
    run, traces = counted(lambda x, k: x)
    jitted = nnx.jit(run, static_argnums=1)
    for _ in range(2):
        jitted(ONE, [1, {"a": 2}])
        jitted(ONE, lambda x: x + 1)
        jitted(ONE, optax.adam(1e-3))
    assert len(traces) == 3


def test_static_list_that_changes_later_is_a_new_key():
    seen = []

    @nnx.jit(static_argnums=1)
    def f(x, sizes):
        seen.append(list(sizes))
        return x

    sizes = [1, 2]
    f(ONE, sizes)
    sizes.append(3)
    f(ONE, sizes)
    f(X, [1, 2])
    assert seen == [[1, 2], [1, 2, 3], [1, 2]]


def test_static_argument_before_an_object():
    @nnx.jit(static_argnums=(0, -1))
    def f(k, m, x, mode):
        m.n[...] += jnp.int32(k)
        return x * jnp.float32(len(mode))

    m = Cell()
    assert f(2, m, ONE, "abc") == 3 and int(m.n[...]) == 2


def test_object_as_static_argument_is_an_error():
    with pytest.raises(StaticValueError, match="static argument 0"):
        nnx.jit(lambda m: None, static_argnums=0)(Cell())


def test_static_that_is_no_parameter_is_an_error_at_once():
    with pytest.raises(ValueError, match=r"static_argnames has 'typo', but the parameters .* m, x"):
        nnx.jit(forward_of_two, static_argnames="typo")
    with pytest.raises(ValueError, match=r"donate_argnums .* has 4, but the parameters"):
        nnx.jit(forward_of_two, donate_argnums=4)
    with pytest.raises(ValueError, match=r"x cannot be static and donated"):
        nnx.jit(forward_of_two, static_argnames="x", donate_argnums=1)


def forward_of_two(m, x):
    return m(x)


def test_argument_that_jax_cannot_take_names_it():
    with pytest.raises(
        TypeError, match=r"nnx\.jit\(forward_of_two\): x\['mode'\] is a str.*static"
    ):
        nnx.jit(forward_of_two)(Cell(), {"mode": "train", "y": ONE})
    m = Cell()
    m.w.value = {"a": ONE, "b": "text"}
    with pytest.raises(TypeError, match=r"nnx\.jit\(forward_of_two\): m\.w is a str"):
        nnx.jit(forward_of_two)(m, ONE)

"""nnx.checkify: failed checks as values, over objects."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import nnxlite as nnx
from nnxlite.errors import TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import Cell, Tree

f32 = jnp.float32


class Log(Cell):
    """The logarithm of `w * x`, with a check of its own."""

    def __call__(self, x):
        y = super().__call__(x)
        checkify.check(y > 0, "found {y}", y=y)
        self.sow(nnx.Intermediate, "y", y)
        return jnp.log(y)


def call(m, x):
    return m(x)


def test_error_and_result_are_those_of_jax():
    def by_hand(w, x):
        checkify.check(w * x > 0, "found {y}", y=w * x)
        return jnp.log(w * x)

    for x in (f32(1), f32(-1)):
        error, out = nnx.checkify(call)(Log(), x)
        expected_error, expected = checkify.checkify(by_hand)(f32(2), x)
        assert error.get() == expected_error.get()
        np.testing.assert_array_equal(out, expected)


def test_changes_arrive_whether_a_check_failed_or_not():
    model = Log()
    error, _ = nnx.checkify(call)(model, f32(1))
    assert error.get() is None and model.n[...] == 1
    error, _ = nnx.checkify(call)(model, f32(-1))
    assert model.n[...] == 2
    with pytest.raises(checkify.JaxRuntimeError, match=r"found -2\.0"):
        error.throw()


def test_structure_may_change_and_objects_are_results():
    def f(m, x):
        m.new, m.mode = nnx.Param(x), "seen"
        return m, Cell(3.0)

    tree = Tree()
    _, (found, made) = nnx.checkify(f)(tree, f32(1))
    assert found is tree and tree.new[...] == 1 and tree.mode == "seen" and made.w[...] == 3


def test_errors_are_chosen():
    f = lambda m, x: m.w[...] / x  # noqa: E731
    assert nnx.checkify(f)(Cell(), f32(0))[0].get() is None
    error, out = nnx.checkify(f, errors=checkify.float_checks)(Cell(), f32(0))
    assert "division by zero" in error.get() and np.isinf(out)
    error, _ = nnx.checkify(f, checkify.all_checks)(Cell(), f32(0))
    assert "division by zero" in error.get()


AROUND = {
    "jit around": lambda f: nnx.jit(nnx.checkify(f)),
    "jit inside": lambda f: nnx.checkify(nnx.jit(f)),
    "both": lambda f: nnx.jit(nnx.checkify(nnx.jit(f))),
    "plain jit around": lambda f: jax.jit(nnx.checkify(f)),
    "remat inside": lambda f: nnx.checkify(nnx.remat(f)),
}


@pytest.mark.parametrize("name", AROUND)
def test_it_composes(name):
    f, model = AROUND[name](call), Log()
    for x, text in ((f32(1), None), (f32(-1), "found -2.0 (`check` failed)")):
        error, out = f(model, x)
        assert error.get() == text
        np.testing.assert_array_equal(out, jnp.log(2 * x))
    assert model.n[...] == (0 if name == "plain jit around" else 2)


def test_gradients_inside_and_around():
    error, grads = nnx.checkify(nnx.grad(call))(Log(), f32(-1))
    assert grads["w"][...] == 0.5 and error.get() == "found -2.0 (`check` failed)"

    def loss(m, x):
        error, out = nnx.checkify(call)(m, x)
        return out, error

    model = Log()
    grads, error = nnx.grad(loss, has_aux=True)(model, f32(-1))
    assert grads["w"][...] == 0.5 and error.get() == "found -2.0 (`check` failed)"
    assert model.n[...] == 1


def test_checks_in_a_scan_and_in_a_branch():
    scanned = nnx.scan(call, in_axes=(nnx.StateAxes({...: nnx.Carry}), 0), out_axes=0)
    error, _ = nnx.checkify(scanned)(Log(), jnp.array([1.0, -1.0], f32))
    assert error.get() == "found -2.0 (`check` failed)"

    def branch(m, x):
        return nnx.cond(x > 0, call, lambda m, x: x, m, x)

    model = Log()
    assert nnx.checkify(branch)(model, f32(-1))[0].get() is None and model.n[...] == 0
    assert nnx.checkify(branch)(model, f32(1))[0].get() is None and model.n[...] == 1


def test_records_come_through():
    (_, out), found = nnx.capture(nnx.checkify(call), nnx.Intermediate)(Log(), f32(1))
    assert found["y"][...] == (2,) and out == jnp.log(f32(2))


def test_methods_partials_and_modules():
    model = Log()
    for f in (model, model.__call__, functools.partial(call, model)):
        assert nnx.checkify(f)(f32(-1))[0].get() == "found -2.0 (`check` failed)"
    assert model.n[...] == 3


def test_flags_stay_python_values():
    f = nnx.checkify(lambda m, x, up, *, mode: m(x) if up and mode == "a" else -x)
    assert f(Cell(), f32(3), True, mode="a")[1] == 6
    assert f(Cell(), f32(3), False, mode="a")[1] == -3


def test_function_that_fails_harms_nothing():
    def f(m):
        m.left.w.value = f32(0)
        raise ZeroDivisionError("inside")

    tree = Tree()
    with pytest.raises(ZeroDivisionError, match="inside"):
        nnx.checkify(f)(tree)
    assert_isomorphic(tree, Tree())


def test_object_closed_over_is_read_only():
    model = Cell()
    assert nnx.checkify(lambda x: model.w[...] * x)(f32(3))[1] == 6
    match = re.escape("nnx.checkify(<lambda>) closes over model.n. Cannot")
    with pytest.raises(TraceLevelError, match=match):
        nnx.checkify(lambda x: model(x))(f32(3))

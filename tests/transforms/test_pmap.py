"""nnx.pmap on one device; `pmap_on_four_devices.py` has what needs several."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import DonatedBufferError, StructureError, TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import Cell, Tree, counted

f32 = jnp.float32
X = np.arange(4, dtype=np.float32)[None]


def call(m, x):
    return m(x)


def mapped(f, in_axes=(None, 0), **options):
    return nnx.pmap(f, in_axes=in_axes, **options)


def bank():
    """A Cell with an axis of one in front."""
    cell = Cell()
    cell.w.value, cell.n.value = np.full(1, 2, np.float32), np.zeros(1, np.int32)
    return cell


def test_mapped_and_broadcast_variables_may_be_written():
    one, many = Cell(), bank()
    np.testing.assert_array_equal(mapped(call)(one, X), 2 * X)
    np.testing.assert_array_equal(nnx.pmap(call)(many, X), 2 * X)
    assert one.n.shape == () and one.n[...] == 1
    assert many.n.shape == (1,) and many.n[...] == 1


def test_arguments_in_the_result_are_the_callers_objects():
    tree = Tree()
    found = mapped(lambda m, x: (m, m.left, m.left.w))(tree, X)
    assert found[0] is tree and found[1] is tree.left and found[2] is tree.left.w


def test_methods_partials_and_modules_are_broadcast():
    model = Cell()
    for f in (model, model.__call__, functools.partial(call, model)):
        for in_axes in (0, (0,)):
            np.testing.assert_array_equal(mapped(f, in_axes)(X), 2 * X)
    assert model.n[...] == 6


def test_methods_are_decorated():
    class Model(nnx.Module):
        def __init__(self):
            self.cell = Cell()

        @nnx.pmap(in_axes=(None, 0))
        def __call__(self, x):
            return self.cell(x)

    model = Model()
    np.testing.assert_array_equal(nnx.jit(model)(X), 2 * X)
    assert model.cell.n[...] == 1


def test_structure_may_change_and_what_is_new_takes_axis_0():
    def f(m, x):
        m.new, m.left.mode = nnx.Param(x), "seen"
        del m.right

    tree = Tree()
    mapped(f)(tree, X)
    np.testing.assert_array_equal(tree.new[...], X)
    assert tree.left.mode == "seen" and not hasattr(tree, "right")


def test_static_arguments_by_position_and_by_name():
    @functools.partial(mapped, in_axes=(None, None, 0), static_broadcasted_argnums=0)
    def f(mode, m, x):
        return m(x) if mode == "up" else -m(x)

    np.testing.assert_array_equal(f("up", Cell(), X), 2 * X)
    np.testing.assert_array_equal(f(mode="down", m=Cell(), x=X), -2 * X)


def test_traced_twice_for_each_shape_and_then_no_more():
    f, runs = counted(call)
    f, many = mapped(f), np.ones((1, 2), np.float32)
    f(Cell(), X), f(Cell(3.0), X)
    assert len(runs) == 2  # once to learn what leaves
    f(Cell(), many), f(Cell(), X), f(Cell(), many)
    assert len(runs) == 4


def test_donated_buffers_are_replaced():
    model = Tree()
    model.left.w.value = before = jax.device_put(f32(2))
    mapped(lambda m, x: m.left(x), donate_argnums=0)(model, X)
    assert before.is_deleted()
    expected = Tree()
    expected.left.n.value = jnp.int32(1)
    assert_isomorphic(model, expected)


def test_a_state_inside_of_a_donated_object_is_kept():
    model = nnx.Module()
    model.state = nnx.state(Cell())

    def f(m, x):
        m.state["n"][...] += m.state["w"][...].astype(jnp.int32)

    mapped(f, donate_argnums=0)(model, X)
    assert model.state["n"][...] == 2 and model.state["w"][...] == 2


def test_one_buffer_cannot_be_donated_twice():
    model = Tree()
    model.left.w.value = model.right.w.value = jax.device_put(f32(2))
    with pytest.raises(DonatedBufferError, match=r"m\.right\.w and m\.\w+\.w hold the same buffer"):
        mapped(lambda m, x: None, donate_argnums=0)(model, X)
    assert model.left.w[...] == 2


def test_jit_and_grad_around():
    model = Cell()
    np.testing.assert_array_equal(nnx.jit(mapped(call))(model, X), 2 * X)
    assert nnx.grad(lambda m: mapped(call)(m, X).sum())(model)["w"][...] == 6
    assert model.n[...] == 2


def test_object_closed_over_is_read_anew_and_not_written():
    model = Cell()
    f = mapped(lambda x: model.w[...] * x, 0)
    np.testing.assert_array_equal(f(X), 2 * X)
    model.w.value = f32(3)
    with pytest.warns(UserWarning, match=r"is traced again: it reads model\.w"):
        np.testing.assert_array_equal(f(X), 3 * X)
    with pytest.raises(TraceLevelError, match=r"closes over model\.n"):
        mapped(lambda x: model(x), 0)(X)


def test_names_of_axes_are_kept_in_step():
    v = nnx.Param(np.ones((1, 2), np.float32), out_sharding=("d", "model"))

    def f(v):
        assert v.out_sharding == ("model",)
        v[...] += f32(1)
        return nnx.Param(v[...], out_sharding=("model",))

    made = nnx.pmap(f, out_axes=1, transform_metadata={nnx.PARTITION_NAME: "d"})(v)
    assert made.out_sharding == ("model", "d") and v.out_sharding == ("d", "model")


BAD = {
    "axis from the end": (call, {"in_axes": (None, -1)}, ValueError, r"with -1 in it\. JAX's pmap"),
    "carry": (call, {"in_axes": (nnx.Carry, 0)}, ValueError, r"in_axes is \(nnx\.Carry, 0\), with"),
    "axis by filter from the end": (
        call,
        {"out_axes": nnx.StateAxes({...: -1})},
        ValueError,
        r"out_axes is StateAxes\(",
    ),
    "no prefix": (call, {"in_axes": (0,)}, StructureError, "has 1 entries, but the call has 2"),
    "nothing mapped": (call, {"in_axes": None}, ValueError, "maps none of its arguments"),
    "too few devices": (
        lambda m, x: x,
        {"in_axes": (None, 1)},
        ValueError,
        r"maps axes of size 4 over \d device\(s\), one slice each",
    ),
    "axis that is not there": (
        call,
        {"in_axes": (0, 0)},
        ValueError,
        r"maps m\.again\.n \(Variable\) along axis 0, but its shape is \(\)",
    ),
    "axis of the result that is not there": (
        lambda m, x: x,
        {"out_axes": 2},
        ValueError,
        r"out_axes has 2 for the result, which is of shape \(4,\) on each device",
    ),
    "axes for an array of the result": (
        lambda m, x: x,
        {"out_axes": nnx.StateAxes({...: 0})},
        TypeError,
        r"out_axes has StateAxes for the result, which is an array",
    ),
    "filter that is missing": (
        call,
        {"in_axes": (nnx.StateAxes({nnx.Param: None}), 0)},
        StructureError,
        r"StateAxes has no filter for model\.again\.n",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_harms_nothing(name):
    f, options, error, match = BAD[name]
    model = Tree()
    with pytest.raises(error, match=match):
        mapped(f, **options)(model, X)
    assert_isomorphic(model, Tree())


def test_text_has_to_be_static():
    with pytest.raises(TypeError, match=r"an argument is a str, .* static_broadcasted_argnums"):
        mapped(lambda x, mode: x, (0, None))(X, "up")
    with pytest.raises(ValueError, match=r"static_broadcasted_argnums has 5, but the parameters"):
        mapped(call, static_broadcasted_argnums=5)


def test_function_that_fails_harms_nothing():
    def f(m, x):
        m.left(x)
        raise ZeroDivisionError("inside")

    model = Tree()
    with pytest.raises(ZeroDivisionError, match="inside"):
        mapped(f)(model, X)
    assert_isomorphic(model, Tree())

"""nnx.shard_map on one device; `shard_on_four_devices.py` has what needs several."""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nnxlite as nnx
from nnxlite.errors import StaticValueError, StructureError, TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import Cell, Tree, counted

f32 = jnp.float32
X = np.arange(4, dtype=np.float32)
MESH = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,))


X_SPEC = P("x")


def mapped(f, in_specs=(None, X_SPEC), out_specs=X_SPEC, **options):
    return nnx.shard_map(f, mesh=MESH, in_specs=in_specs, out_specs=out_specs, **options)


def call(m, x):
    return m(x)


# What it is called with.


def test_values_change_on_the_callers_objects():
    model = Cell()
    np.testing.assert_array_equal(mapped(call)(model, X), 2 * X)
    assert model.n[...] == 1 and model.w[...] == 2


def test_arguments_in_the_result_are_the_callers_objects():
    tree = Tree()
    found = mapped(lambda m: (m, m.left, [m.left.w]), (P(),), None)(tree)
    assert found[0] is tree and found[1] is tree.left and found[2][0] is tree.left.w


def test_one_spec_for_all_arguments_and_a_list_of_specs():
    f = lambda x, y: (x + y, y)  # noqa: E731
    np.testing.assert_array_equal(mapped(f, P("x"))(X, X)[0], X + X)
    np.testing.assert_array_equal(mapped(f, [P("x"), P()], [P("x"), P()])(X, X)[1], X)


def test_methods_partials_and_modules_bring_replicated_arguments():
    class Double(Cell):
        def double(self, x):
            return self(x) + self(x)

    model = Double()
    for in_specs in ((P("x"),), P("x")):
        np.testing.assert_array_equal(mapped(model, in_specs)(X), 2 * X)
        np.testing.assert_array_equal(mapped(model.double, in_specs)(X), 4 * X)
        np.testing.assert_array_equal(mapped(functools.partial(call, model), in_specs)(X), 2 * X)
    assert model.n[...] == 8


def test_methods_are_decorated():
    class Model(nnx.Module):
        def __init__(self):
            self.cell = Cell()

        @nnx.shard_map(mesh=MESH, in_specs=(P(), P("x")), out_specs=P("x"))
        def __call__(self, x):
            return self.cell(x)

    model = Model()
    np.testing.assert_array_equal(nnx.jit(model)(X), 2 * X)
    assert model.cell.n[...] == 1


def test_mesh_is_taken_from_the_context():
    f = nnx.shard_map(call, in_specs=(None, P("x")), out_specs=P("x"))
    with pytest.raises(ValueError, match=r"shard_map\(call\) has no mesh\. Give it one"):
        f(Cell(), X)
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(f(Cell(), X), 2 * X)
    other = jax.make_mesh((1, 1), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(other):
        np.testing.assert_array_equal(f(Cell(), X), 2 * X)


def test_keyword_arguments_are_replicated():
    model = Cell()
    found = mapped(lambda x, *, m, up: m(x) if up else -m(x), (P("x"),))(X, m=model, up=False)
    np.testing.assert_array_equal(found, -2 * X)
    assert model.n[...] == 1


def test_flags_under_none_stay_python_values():
    f, runs = counted(lambda x, mode, k: x * k if mode == "up" else -x)
    f = mapped(f, (P("x"), None, None))
    for _ in range(2):
        np.testing.assert_array_equal(f(X, "up", f32(3)), 3 * X)
        np.testing.assert_array_equal(f(X, "down", f32(3)), -X)
    assert len(runs) == 2
    with pytest.raises(StaticValueError, match=r"shard_map\(run\): args\[1\]"):
        f(X, [object.__new__(type("C", (), {"__hash__": None}))], f32(1))


def test_states_and_variables_are_arguments_and_results():
    state, v = nnx.state(Cell()), nnx.Variable(X)

    def f(state, v):
        v[...] += state["w"][...]
        state["n"][...] += jnp.int32(3)
        return nnx.Param(v[...]), nnx.state(Cell())

    new, made = mapped(f, (nnx.State({"w": P(), "n": None}), P("x")), (P("x"), None))(state, v)
    np.testing.assert_array_equal(v[...], X + 2)
    np.testing.assert_array_equal(new[...], X + 2)
    assert state["n"][...] == 3 and made["w"][...] == 2


# How often it is traced.


def test_equal_calls_share_a_trace():
    f, runs = counted(call)
    f = mapped(f)
    f(Cell(), X), f(Cell(3.0), X)
    assert len(runs) == 1
    f(Cell(), X[:2])
    assert len(runs) == 2


def test_jit_around_and_inside_and_disabled():
    for f in (nnx.jit(mapped(call)), mapped(nnx.jit(call)), jax.jit(mapped(call))):
        np.testing.assert_array_equal(f(Cell(), X), 2 * X)
    with jax.disable_jit():
        model = Cell()
        np.testing.assert_array_equal(mapped(call)(model, X), 2 * X)
    assert model.n[...] == 1


def test_object_closed_over_is_read_anew():
    model = Cell()
    f = mapped(lambda x: model.w[...] * x, (P("x"),))
    np.testing.assert_array_equal(f(X), 2 * X)
    model.w.value = f32(3)
    with pytest.warns(UserWarning, match=r"is traced again: it reads model\.w"):
        np.testing.assert_array_equal(f(X), 3 * X)
    with pytest.raises(TraceLevelError, match=r"closes over model\.n"):
        mapped(lambda x: model(x), (P("x"),))(X)


def test_gradient_of_a_replicated_variable():
    grads = nnx.grad(lambda m: mapped(call)(m, X).sum())(Cell())
    assert grads["w"][...] == 6


def test_program_is_named_after_the_function_and_scopes_are_in_it():
    jaxpr = nnx.make_jaxpr(mapped(call))(Cell(), X).jaxpr
    assert jaxpr.eqns[0].params["name"] == "call"
    assert "Cell" in jaxpr.pretty_print(name_stack=True)


def test_it_is_pickled_with_its_specs():
    f = pickle.loads(pickle.dumps(nnx.shard_map(call, in_specs=(None, P("x")), out_specs=P("x"))))
    with jax.set_mesh(MESH):
        np.testing.assert_array_equal(f(Cell(), X), 2 * X)


# What goes wrong, with the path and without harm.


def write_shard(m, x):
    m.w.value = x.sum()


def add(m, x):
    m.left.extra = nnx.Param(x)


def change_static(m, x):
    m.mode = "eval"


def remove(m, x):
    del m.right.w


BAD = {
    "replicated and written": (
        write_shard,
        {},
        ValueError,
        r"write_shard\) changed m\.w \(Param\), whose spec is P\(.*pmean",
    ),
    "result that differs": (
        lambda m, x: {"a": x},
        {"out_specs": P()},
        ValueError,
        r"out_specs for the result\['a'\] is P\(.* reduce it",
    ),
    "new variable that differs": (
        lambda m, x: nnx.Param(x),
        {"out_specs": None},
        ValueError,
        r"out_specs for the new Param result is P\(",
    ),
    "scalar to be joined": (
        lambda m, x: x.sum(),
        {},
        ValueError,
        r"out_specs has P\('x',?\) for the result, which is of shape \(\) on each shard",
    ),
    "added": (add, {}, StructureError, r"add\): m\.again\.extra \(Param\) was added, but only"),
    "removed": (remove, {}, StructureError, r"m\.right\.w \(Param\) was removed, but only"),
    "static": (change_static, {}, StructureError, r"m\.mode was changed from 'train' to 'eval'"),
    "no prefix": (call, {"in_specs": (P(),)}, StructureError, "has 1 entries, but the call has 2"),
    "no prefix of an argument": (
        call,
        {"in_specs": (None, {"a": P()})},
        StructureError,
        r"in_specs is \(None, {'a': P.*\), but the arguments are \(Tree, ",
    ),
    "no prefix of the result": (
        lambda m, x: x,
        {"out_specs": (P(), P())},
        StructureError,
        r"out_specs is \(P.*, but the function returned",
    ),
    "filter that is missing": (
        call,
        {"in_specs": (nnx.StateSharding({nnx.Param: P()}), P())},
        StructureError,
        r"StateSharding has no filter for model\.again\.n \(Variable\)",
    ),
    "path that is missing": (
        call,
        {"in_specs": (nnx.StateSharding(nnx.State({"array": P()})), P())},
        StructureError,
        r"StateSharding has no filter for model\.again\.n \(Variable\)",
    ),
    "axis that is not in the mesh": (
        call,
        {"in_specs": (P("y"), None)},
        ValueError,
        r"in_specs has P\('y',?\) for m\.again\.n \(Variable\), but 'y' is none of the mesh axes",
    ),
    "axis of the result that is not in the mesh": (
        lambda m, x: x,
        {"out_specs": P("y")},
        ValueError,
        r"out_specs has P\('y',?\) for the result, but 'y' is none",
    ),
    "axis name that is not in the mesh": (
        call,
        {"axis_names": {"y"}},
        ValueError,
        r"axis_names has 'y', but the axes of the mesh are 'x'",
    ),
    "too many axes": (
        call,
        {"in_specs": (None, P(None, "x"))},
        ValueError,
        r"in_specs has P\(None, 'x'\) for x, whose shape is \(4,\)",
    ),
    "no spec": (
        call,
        {"in_specs": (0, None)},
        TypeError,
        r"has 0 for m\.again\.n \(Variable\)\. Give a",
    ),
    "no spec of the result": (lambda m, x: x, {"out_specs": 0}, TypeError, "has 0 for the result"),
    "sharding for an array": (
        call,
        {"in_specs": (None, nnx.StateSharding({...: P()}))},
        TypeError,
        "in_specs has StateSharding for x, which is an array",
    ),
    "sharding for an array of the result": (
        lambda m, x: x,
        {"out_specs": nnx.StateSharding({...: P()})},
        TypeError,
        "out_specs has StateSharding for the result, which is an array",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named_and_harms_nothing(name):
    f, options, error, match = BAD[name]
    model = Tree()
    model.w = nnx.Param(f32(1))
    with pytest.raises(error, match=match):
        mapped(f, **options)(model, X)
    expected = Tree()
    expected.w = nnx.Param(f32(1))
    assert_isomorphic(model, expected)


def test_function_that_fails_harms_nothing():
    def f(m, x):
        m(x)
        raise ZeroDivisionError("inside")

    model = Cell()
    with pytest.raises(ZeroDivisionError, match="inside"):
        mapped(f)(model, X)
    assert_isomorphic(model, Cell())


def test_two_specs_for_one_variable_name_both_places():
    a, b = Cell(), Cell()
    a.v = b.v = nnx.Param(X)
    specs = nnx.StateSharding({nnx.PathContains("v"): P("x"), ...: P()})
    with pytest.raises(StructureError, match=r"a\.v and b\.v are the same leaf, but in_specs"):
        mapped(lambda a, b: a.v[...], (specs, None))(a, b)
    np.testing.assert_array_equal(mapped(lambda a, b: a.v[...], (specs, specs))(a, b), X)


def test_new_variable_twice_in_the_result():
    def f(x):
        made = nnx.Param(x)
        return made, made

    with pytest.raises(StructureError, match=r"in the result twice, and out_specs gives it P"):
        mapped(f, (P("x"),), (P("x"), P()))(X)


def test_unchecked_replication_is_trusted():
    model = Cell()
    mapped(write_shard, out_specs=None, check_vma=False)(model, X)
    assert model.w[...] == 6

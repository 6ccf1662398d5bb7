"""capture, sow, perturb and method outputs on plain calls; transforms have a file of their own."""

import os
import subprocess
import sys
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core import sowing
from nnxlite._core.context import START, current
from nnxlite._core.extras import TRAVELLING
from nnxlite._core.scope import OUTPUTS
from nnxlite.errors import StructureError, TraceLevelError

X = jnp.arange(3, dtype=jnp.float32)


class Leaf(nnx.Module):
    def __call__(self, x):
        self.sow(nnx.Intermediate, "x", x)
        return self.perturb("y", 2 * x)


class Net(nnx.Module):
    def __init__(self):
        self.leaf = Leaf()
        self.list = [Leaf()]

    def __call__(self, x):
        return self.list[0](self.leaf(x))


def paths(state):
    return [path for path, _ in state.flat_state()]


# sow.


def test_sow_without_a_capture_does_nothing():
    leaf = Leaf()
    assert leaf.sow(nnx.Intermediate, "x", object()) is False
    assert nnx.sow("x", 1) is False
    assert vars(leaf) == {}


def test_sow_tells_whether_a_capture_took_it():
    class Asking(nnx.Module):
        def __call__(self):
            return [self.sow(kind, "x", X) for kind in (nnx.Intermediate, nnx.Cache)]

    assert nnx.capture(Asking(), nnx.Intermediate)()[0] == [True, False]


def test_values_are_collected_in_order():
    class Thrice(nnx.Module):
        def __call__(self, x):
            for n in range(3):
                self.sow(nnx.Intermediate, "x", {"n": x + n})

    _, found = nnx.capture(Thrice(), nnx.Intermediate)(X)
    assert type(found["x"]) is nnx.Intermediate
    for n, value in enumerate(found["x"][...]):
        np.testing.assert_array_equal(value["n"], np.asarray(X) + n)


def test_reduce_fn_and_init_fn():
    class Total(nnx.Module):
        def __call__(self, x):
            for _ in range(3):
                self.sow(
                    nnx.Intermediate,
                    "total",
                    x,
                    reduce_fn=lambda total, x: total + x,
                    init_fn=lambda: jnp.float32(100),
                )

    _, found = nnx.capture(Total(), nnx.Intermediate)(X)
    np.testing.assert_array_equal(found["total"][...], 100 + 3 * np.asarray(X))


def test_each_kind_has_a_state_and_subclasses_go_with_their_base():
    class Norm(nnx.Intermediate):
        pass

    class Sowing(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "a", x)
            self.sow(Norm, "b", x)
            self.sow("cache", "c", x)
            return self.perturb("d", x)

    net = Sowing()
    _, cache, norms, rest = nnx.capture(net, nnx.Cache, Norm, nnx.Intermediate)(X)
    assert (paths(cache), paths(norms), paths(rest)) == ([("c",)], [("b",)], [("a",)])
    _, all_of_them = nnx.capture(net, nnx.Intermediate)(X)
    assert paths(all_of_them) == [("a",), ("b",)] and type(all_of_them["b"]) is Norm
    assert paths(nnx.capture(net, nnx.Perturbation)(X)[1]) == [("d",)]


def test_a_sown_variable_is_recorded_by_value():
    class Changing(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(jnp.float32(1))

        def __call__(self):
            self.sow(nnx.Intermediate, "n", (self.n, "text"))
            self.n[...] = jnp.float32(2)

    _, found = nnx.capture(Changing(), nnx.Intermediate)()
    assert found["n"][...][0] == (jnp.float32(1), "text")


def test_names_are_strings():
    class Wrong(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, 0, x)

    with pytest.raises(TypeError, match=r"sow expected a name \(str\), found 0 of int"):
        nnx.capture(Wrong(), nnx.Intermediate)(X)


def test_free_sow_records_under_the_running_module():
    def helper(x):
        return nnx.sow("seen", x), nnx.sow("seen", x, kind="cache")

    class Inner(nnx.Module):
        def method(self, x):
            return helper(x)

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = Inner()

        def __call__(self, x):
            helper(x)
            return self.inner.method(x + 1)

    for context in (nnx.override_named_call(True), nnx.override_named_call(False)):
        with context:
            taken, found = nnx.capture(Outer(), nnx.Intermediate)(X)
        assert taken == (True, False)
        np.testing.assert_array_equal(found["seen"][...][0], X)
        np.testing.assert_array_equal(found["inner"]["seen"][...][0], X + 1)


def test_free_sow_outside_of_methods_is_an_error():
    def f(net, x):
        nnx.sow("lost", x)

    with pytest.raises(StructureError, match=r"nnx.sow\('lost'\).*outside of every method"):
        nnx.capture(f, nnx.Intermediate)(Leaf(), X)


# perturb.


def test_perturb_is_the_identity_without_a_capture():
    value = object()
    assert Leaf().perturb("y", value) is value
    assert nnx.capture(lambda leaf: leaf.perturb("y", value), nnx.Intermediate)(Leaf())[0] is value


def test_perturbations_are_zeros_of_any_pytree_and_are_added():
    class Pair(nnx.Module):
        def __call__(self, x):
            return self.perturb("pair", {"a": x, "b": (x[:1].astype(jnp.bfloat16), 2.0)})

    net = Pair()
    _, zeros = nnx.capture(net, nnx.Perturbation)(X)
    value = zeros["pair"].get_value()
    assert type(zeros["pair"]) is nnx.Perturbation
    assert [(z.shape, z.dtype.name) for z in jax.tree.leaves(value)] == [
        ((3,), "float32"),
        ((1,), "bfloat16"),
        ((), "float32"),
    ]
    ones = jax.tree.map(lambda z: z + jnp.ones_like(z), zeros)
    out = nnx.capture(net, init=ones)(X)
    np.testing.assert_array_equal(out["a"], X + 1)
    assert float(out["b"][1]) == 3
    again, kept = nnx.capture(net, nnx.Perturbation, init=ones)(X)
    np.testing.assert_array_equal(again["a"], X + 1)
    np.testing.assert_array_equal(kept["pair"].get_value()["a"], np.ones(3))


def test_gradient_of_a_perturbation_is_that_of_the_value():
    def loss(net, p):
        return (nnx.capture(net, init=p)(X) ** 2).sum()

    net = Net()
    _, zeros = nnx.capture(net, nnx.Perturbation)(X)
    for grad in (jax.grad, nnx.grad):
        grads = grad(loss, argnums=1)(net, zeros)
        np.testing.assert_array_equal(grads["list"][0]["y"][...], 8 * np.asarray(X))
        np.testing.assert_array_equal(grads["leaf"]["y"][...], 16 * np.asarray(X))


def test_init_may_be_nested_dicts():
    out = nnx.capture(Leaf(), init={"y": jnp.ones(3)})(X)
    np.testing.assert_array_equal(out, 2 * np.asarray(X) + 1)


def test_a_perturbation_missing_from_init_is_an_error_with_names():
    init = {"leaf": {"z": jnp.ones(3), "y": jnp.ones(3)}, "list": {0: {"x": X}}}
    with pytest.raises(StructureError) as raised:
        nnx.capture(Net(), init=init)(X)
    text = str(raised.value)
    assert "model.list[0] (Leaf) perturbs 'y'" in text and "has 'x'" in text
    assert "capture Perturbation anew" in text
    nnx.capture(Net(), nnx.Perturbation, init=init)(X)  # zeros are made where they are asked for


@pytest.mark.parametrize(
    "path", [("leaf", "sub", "y"), ("nothing", "y"), ("list", 7, "y")], ids=lambda p: str(p[-2])
)
def test_init_for_an_object_that_is_not_there_is_an_error(path):
    _, zeros = nnx.capture(Net(), nnx.Perturbation)(X)
    wrong = nnx.State.from_flat_path({**dict(zeros.flat_state()), path: nnx.Perturbation(X)})
    with pytest.raises(StructureError, match=rf"init has .*{path[-2]}.*no object at model"):
        nnx.capture(Net(), init=wrong)(X)


def test_shapes_and_dtypes_of_init_have_to_agree():
    with pytest.raises(ValueError, match=r"model \(Leaf\) perturbs 'y' .*\(3,\).*init has.*\(4,\)"):
        nnx.capture(Leaf(), init={"y": jnp.ones(4)})(X)
    with pytest.raises(ValueError, match=r"'float32'.*init has.*'float16'"):
        nnx.capture(Leaf(), init={"y": jnp.ones(3, jnp.float16)})(X)


def test_one_name_with_two_shapes_is_an_error():
    class Twice(nnx.Module):
        def __call__(self, x):
            return self.perturb("h", x), self.perturb("h", x[:1])

    for f in (Twice(), nnx.jit(Twice())):
        with pytest.raises(ValueError, match=r"perturbed twice.*\(3,\).*\(1,\).*two names"):
            nnx.capture(f, nnx.Perturbation)(X)


# method_outputs.


class Base(nnx.Module):
    def inherited(self, x):
        return x + 1

    def __call__(self, x):
        return self.inherited(x)


class Child(Base):
    def __call__(self, x):
        return 2 * super().__call__(x)

    def _private(self, x):
        return x

    @nnx.nowrap
    def helper(self, x):
        return x

    def text(self):
        return "text", X

    def module(self):
        return self

    def variable(self):
        return nnx.Variable(X)

    def nothing(self):
        return None

    def number(self):
        return 3

    def numpy(self):
        return np.ones(2), np.float32(1)


def test_outputs_of_public_methods_are_recorded():
    def f(net, x):
        for name in ("_private", "helper"):
            getattr(net, name)(x)
        for name in ("text", "module", "variable", "nothing", "number", "numpy"):
            getattr(net, name)()
        return net(x)

    before = dict(vars(Child))
    _, found = nnx.capture(f, method_outputs=nnx.Intermediate)(Child(), X)
    assert paths(found) == [("__call__",), ("inherited",), ("number",), ("numpy",)]
    (output,) = found["__call__"][...]  # `super()` is part of the outermost call
    np.testing.assert_array_equal(output, 2 * (X + 1))
    assert dict(vars(Child)) == before


def test_method_outputs_join_sown_values_of_the_kind():
    _, found = nnx.capture(Net(), nnx.Intermediate, method_outputs=nnx.Intermediate)(X)
    assert set(found["leaf"]) == {"x", "__call__"}
    _, sown, outputs = nnx.capture(Net(), nnx.Intermediate, method_outputs=nnx.Cache)(X)
    assert set(sown["leaf"]) == {"x"} and set(outputs["leaf"]) == {"__call__"}


def test_filter_chooses_methods_by_path_and_module():
    seen = []

    def chosen(path, module):
        seen.append((path, type(module)))
        return path[-1] == "__call__" and isinstance(module, Leaf)

    _, found = nnx.capture(Net(), method_outputs=nnx.Cache, method_filter=chosen)(X)
    assert paths(found) == [("leaf", "__call__"), ("list", 0, "__call__")]
    assert seen == [
        (("leaf", "__call__"), Leaf),
        (("list", 0, "__call__"), Leaf),
        (("__call__",), Net),
    ]
    for given, expected in (
        (Leaf, [("leaf", "__call__"), ("list", 0, "__call__")]),
        (nnx.PathContains(0), [("list", 0, "__call__")]),
        (nnx.PathIn(("__call__",)), [("__call__",)]),
        (False, []),
    ):
        capture = nnx.capture(Net(), method_outputs=nnx.Cache, method_filter=given)
        assert paths(capture(X)[1]) == expected


def test_a_filter_without_method_outputs_is_an_error():
    with pytest.raises(TypeError, match="method_filter without method_outputs"):
        nnx.capture(Net(), nnx.Intermediate, method_filter=Leaf)


# What is captured, and how.


def test_forms_of_the_argument():
    net = Net()
    out = net(X)
    forms = [
        nnx.capture(net, nnx.Intermediate)(X),
        nnx.capture(net.__call__, nnx.Intermediate)(X),
        nnx.capture(lambda net, x: net(x), nnx.Intermediate)(net, X),
        nnx.capture(lambda net, x: net(x), nnx.Intermediate)(net=net, x=X),
        nnx.capture(nnx.Intermediate)(Net.__call__)(net, X),
        nnx.capture(nnx.jit(net), nnx.Intermediate)(X),
        nnx.capture(nnx.remat(net.__call__), nnx.Intermediate)(X),
    ]
    for result, found in forms:
        np.testing.assert_array_equal(result, out)
        assert paths(found) == [("leaf", "x"), ("list", 0, "x")]


def test_capture_as_a_decorator_of_a_method():
    class Watching(nnx.Module):
        def __init__(self):
            self.leaf = Leaf()

        @nnx.capture(nnx.Intermediate, nnx.Perturbation)
        def __call__(self, x):
            return self.leaf(x)

    _, found, zeros = Watching()(X)
    assert paths(found) == [("leaf", "x")] and paths(zeros) == [("leaf", "y")]
    assert Watching.__call__.__name__ == "__call__"


def test_roots_that_are_containers():
    def f(parts, x):
        return parts[0](x) + parts[1]["b"](x) + Leaf()(x)

    parts = (Leaf(), {"b": Leaf()})
    _, found, zeros = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(parts, X)
    assert paths(found) == [(0, "x"), (1, "b", "x"), (2, "Leaf", "x")]
    grads = jax.grad(lambda p: nnx.capture(f, init=p)(parts, X).sum())(zeros)
    np.testing.assert_array_equal(grads[2]["Leaf"]["y"][...], np.ones(3))


def test_shared_modules_record_under_their_first_path_and_cycles_end():
    net = nnx.Dict(a=Leaf())
    net["b"] = net["a"]
    net["self"] = net
    _, found = nnx.capture(lambda net: (net["a"](X), net["b"](X)), nnx.Intermediate)(net)
    assert paths(found) == [("a", "x")] and len(found["a"]["x"][...]) == 2


def test_strangers_are_numbered_and_do_not_take_keys_of_the_root():
    def f(net, x):
        return [Leaf()(x) for _ in range(2)], net(x)

    root = nnx.Dict(Leaf=Leaf())
    _, found = nnx.capture(lambda root, x: (Leaf()(x), root["Leaf"](x)), nnx.Intermediate)(root, X)
    assert len(paths(found)) == 2
    _, found = nnx.capture(f, nnx.Intermediate)(Net(), X)
    assert list(found) == ["Leaf", "Leaf#1", "leaf", "list"]


def test_an_object_replaced_while_the_capture_runs_keeps_its_records():
    def f(net, x):
        net.leaf(x)
        net.leaf = Leaf()
        net.leaf(x + 1)

    _, found = nnx.capture(f, nnx.Intermediate)(Net(), X)
    assert len(paths(found)) == 2
    np.testing.assert_array_equal(found["leaf"]["x"][...][0], X + 1)


def test_what_cannot_be_captured():
    def f(x):
        return x

    with pytest.raises(StructureError, match=r"capture\(f\) found no module.*which is a dict"):
        nnx.capture(f, nnx.Intermediate)({"x": X})
    with pytest.raises(StructureError, match="which is no argument"):
        nnx.capture(lambda: 1, nnx.Intermediate)()
    with pytest.raises(TypeError, match=r"expected a Module that can be called.*found int"):
        nnx.capture(3, nnx.Intermediate)
    with pytest.raises(TypeError, match=r"kinds of Variables.*found 'intermediate'"):
        nnx.capture(Net(), "intermediate")  # type: ignore[arg-type]


def test_a_name_that_is_also_an_object_is_an_error():
    class Clash(nnx.Module):
        def __init__(self):
            self.leaf = Leaf()

        def __call__(self, x):
            self.sow(nnx.Intermediate, "leaf", x)
            return self.leaf(x)

    with pytest.raises(StructureError, match=r"state.leaf cannot be both a leaf and"):
        nnx.capture(Clash(), nnx.Intermediate)(X)


def test_captures_nest():
    net = Net()

    def outer(net, x):
        (out, zeros), sown = nnx.capture(nnx.capture(net, nnx.Perturbation), nnx.Intermediate)(x)
        return out, zeros, sown

    (_, zeros, inner), found = nnx.capture(outer, nnx.Intermediate)(net, X)
    assert set(zeros) == {"leaf", "list"}
    for state in (inner, found):
        assert len(state["leaf"]["x"][...]) == 1


def test_a_captured_capture_finds_the_root_of_the_inner_one():
    _, found = nnx.capture(nnx.capture(Net()), nnx.Intermediate)(X)
    assert paths(found) == [("leaf", "x"), ("list", 0, "x")]


def test_an_exception_leaves_no_trace():
    class Fails(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)
            raise ZeroDivisionError("inside")

    net = Fails()
    with pytest.raises(ZeroDivisionError, match="inside"):
        nnx.capture(net, nnx.Intermediate, method_outputs=nnx.Intermediate)(X)
    assert vars(net) == {} and TRAVELLING.active == () and current() is START
    assert OUTPUTS.record is None and OUTPUTS.running == set()


def test_captured_states_merge():
    net = Net()
    _, sown, zeros = nnx.capture(net, nnx.Intermediate, nnx.Perturbation)(X)
    merged = nnx.merge_state(sown, zeros)
    assert paths(merged) == [
        ("leaf", "x"),
        ("leaf", "y"),
        ("list", 0, "x"),
        ("list", 0, "y"),
    ]


def test_nothing_is_stored_on_the_model():
    net = Net()
    before = nnx.graphdef(net)
    nnx.capture(net, nnx.Intermediate, nnx.Perturbation, method_outputs=nnx.Intermediate)(X)
    assert nnx.graphdef(net) is before


def test_plain_jit_traced_outside_of_captures_is_not_served_inside():
    net = Net()
    f = jax.jit(lambda x: net(x))
    f(X)
    with pytest.raises(TraceLevelError, match=r"sow\(Intermediate, 'x'\) in model.leaf \(Leaf\)"):
        nnx.capture(lambda net, x: f(x), nnx.Intermediate)(net, X)
    f(X)


# The storing mode, for older programs.


def test_stored_sow_collects_on_the_module_for_pop():
    net = Net()
    with nnx.use_stored_sow():
        net(X)
        nnx.jit(lambda net, x: net(x))(net, X)
        found = nnx.pop(net, nnx.Intermediate)
        assert len(found["leaf"]["x"][...]) == 2
        assert "x" not in vars(net.leaf)
        with nnx.use_stored_sow(False):
            net(X)
        assert "x" not in vars(net.leaf)
        _, captured = nnx.capture(net, nnx.Intermediate)(X)
        assert len(captured["leaf"]["x"][...]) == 1 and "x" not in vars(net.leaf)
        assert Leaf().sow(nnx.Intermediate, "x", X) is True


def test_stored_sow_finds_the_running_module_without_scopes():
    class Helped(nnx.Module):
        def __call__(self, x):
            return nnx.sow("x", x)

    net = Helped()
    with nnx.use_stored_sow(), nnx.override_named_call(False):
        assert net(X) is True
    assert set(nnx.pop(net, nnx.Intermediate)) == {"x"}


def test_stored_sow_does_not_overwrite_attributes():
    net = Net()
    with (
        nnx.use_stored_sow(),
        pytest.raises(StructureError, match=r"Net sows 'leaf', which is an attribute of type Leaf"),
    ):
        net.sow(nnx.Intermediate, "leaf", X)


def test_pop_that_finds_nothing_of_what_was_sown_warns_once():
    class Leaf(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "x", x)

    class Net(nnx.Module):
        def __init__(self):
            self.leaf = Leaf()

        def __call__(self, x):
            return self.leaf(x)

    net = Net()
    nnx.pop(net, nnx.Intermediate)  # nothing was sown: nothing to say
    nnx.jit(lambda net, x: net(x))(net, X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx.pop(net, nnx.Cache)
        nnx.pop(Child(), nnx.Intermediate)
    message = r"no Intermediate, but Leaf sowed.*nnx.capture\(model.*NNXLITE_SOW=store"
    with pytest.warns(UserWarning, match=message) as noted:
        nnx.pop(net, nnx.Intermediate)
    assert noted[0].filename == __file__
    nnx.pop(net, nnx.Intermediate)  # said once


def test_environment_variable_sets_the_mode():
    code = (
        "import nnxlite as nnx, jax.numpy as jnp\n"
        "class Net(nnx.Module):\n"
        "    def __call__(self, x): self.sow(nnx.Intermediate, 'x', x)\n"
        "net = Net(); net(jnp.ones(1)); print(list(nnx.pop(net, nnx.Intermediate)))"
    )
    environment = {**os.environ, "NNXLITE_SOW": "store"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.stdout == "['x']\n", done.stderr
    with pytest.raises(ValueError, match=r"NNXLITE_SOW is 'keep'.*'capture'.*'store'"):
        sowing.default_sow({"NNXLITE_SOW": "keep"})

"""Captures hold through every transform and in every nesting; the oracle is one line of NumPy."""

import gc
import re
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError, TraceLevelError
from tests.transforms.samples import Function, counted, through_grad

X = jnp.arange(6, dtype=jnp.float32).reshape(2, 3) + 1


class Block(nnx.Module):
    """Sows `w * x`, perturbs it and squares it."""

    def __init__(self, w: Any) -> None:
        self.w = nnx.Param(jnp.asarray(w, jnp.float32))

    def __call__(self, x):
        w = self.w[...]
        y = self.perturb("p", w.reshape(w.shape + (1,) * (x.ndim - w.ndim)) * x)
        self.sow(nnx.Intermediate, "y", y)
        return y * y


class Net(nnx.Module):
    def __init__(self, w: Any) -> None:
        self.blocks = [Block(w)]

    def __call__(self, x):
        return self.blocks[0](x)


def scan_carry(f: Function) -> Function:
    @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    def step(net, x):
        return net, f(net, x)

    return lambda net, x: step(net, x)[1]


UNMAPPED = {"jit": nnx.jit, "grad": through_grad, "remat": nnx.remat}
BROADCAST = {
    "vmap broadcast": lambda f: nnx.vmap(f, in_axes=(None, 0)),
    "scan broadcast": lambda f: nnx.scan(f, in_axes=(None, 0), out_axes=0),
    "scan carry": scan_carry,
}
MAPPED = {
    "vmap mapped": nnx.vmap,
    "scan sliced": lambda f: nnx.scan(f, in_axes=(0, 0), out_axes=0),
}
ALL = UNMAPPED | BROADCAST | MAPPED
PAIRS = [
    *(("jit", b) for b in BROADCAST | MAPPED),
    *(("grad", b) for b in MAPPED),
    *(("remat", b) for b in BROADCAST),
    *((a, "remat") for a in MAPPED),
    *(("vmap broadcast", b) for b in ("grad", "scan broadcast", "scan sliced", "vmap mapped")),
    *(("scan sliced", b) for b in ("vmap broadcast", "scan carry", "vmap mapped")),
    ("scan carry", "jit"),
    ("scan carry", "vmap broadcast"),
    ("vmap mapped", "scan sliced"),
    ("jit", "grad"),
    ("grad", "remat"),
    ("remat", "jit"),
]


def call(net, x):
    return net(x)


def expected(names: tuple[str, ...]) -> tuple[Any, Any]:
    """Returns w of each model array, and `w * x`."""
    roles = [name in MAPPED for name in names if name not in UNMAPPED]
    axes = [axis for axis, mapped in enumerate(roles) if mapped]
    shape = tuple(X.shape[axis] for axis in axes)
    w = np.arange(2, 2 + int(np.prod(shape)), dtype=np.float32).reshape(shape)
    spread = w.reshape([X.shape[a] if a in axes else 1 for a in range(X.ndim)])
    return w, spread * np.asarray(X)


def lifted(names: tuple[str, ...]) -> Function:
    f = call
    for name in reversed(names):
        f = ALL[name](f)
    return f


@pytest.mark.parametrize(
    "names", [*((name,) for name in ALL), *PAIRS], ids=lambda names: " of ".join(names)
)
def test_records_and_perturbation_gradients(names):
    w, y = expected(names)
    net, f = Net(w), lifted(names)
    out, found, zeros = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(net, X)
    np.testing.assert_array_equal(out, y * y)
    assert [path for path, _ in found.flat_state()] == [("blocks", 0, "y")]
    (recorded,) = found["blocks"][0]["y"][...]
    np.testing.assert_array_equal(recorded, y)
    np.testing.assert_array_equal(zeros["blocks"][0]["p"][...], np.zeros(X.shape))

    grads = jax.jit(jax.grad(lambda p: nnx.capture(f, init=p)(net, X).sum()))(zeros)
    np.testing.assert_array_equal(grads["blocks"][0]["p"][...], 2 * y)


@pytest.mark.parametrize("name", ALL)
def test_values_and_gradients_in_one_call(name):
    w, y = expected((name,))
    f = lifted((name,))
    run = nnx.jit(nnx.capture_gradients(lambda net, x: f(net, x).sum()))
    loss, values, gradients = run(Net(w), X)
    assert float(loss) == float((y * y).sum())
    assert jax.tree.structure(values) == jax.tree.structure(gradients)
    block = values["blocks"][0], gradients["blocks"][0]
    np.testing.assert_array_equal(block[0]["p"][...], y)
    np.testing.assert_array_equal(block[1]["p"][...], 2 * y)
    np.testing.assert_array_equal(block[0]["__call__"][...], y * y)
    np.testing.assert_array_equal(block[1]["__call__"][...], np.ones(X.shape))


@pytest.mark.parametrize("name", ALL)
def test_method_outputs_come_through(name):
    w, y = expected((name,))
    _, found = nnx.capture(lifted((name,)), method_outputs=nnx.Cache)(Net(w), X)
    assert [path for path, _ in found.flat_state()] == [("__call__",), ("blocks", 0, "__call__")]
    for _, leaf in found.flat_state():
        np.testing.assert_array_equal(leaf[...][0], y * y)


@pytest.mark.parametrize("name", [*UNMAPPED, *BROADCAST])
def test_closed_over_model_records_under_its_path(name):
    net = Net(2.0)
    _, y = expected((name,))

    def f(root, x):
        return ALL[name](lambda unused, x: net(x))(nnx.Pytree(), x)

    _, found = nnx.capture(f, nnx.Intermediate)(net, X)
    np.testing.assert_array_equal(found["blocks"][0]["y"][...][0], y)


@pytest.mark.parametrize("name", ["jit", "grad", "vmap broadcast", "scan carry"])
def test_temporary_modules_are_recorded_with_gradients(name):
    _, y = expected((name,))
    other = Block(3.0)

    def f(net, x):
        def body(net, x):
            return net(x) + Block(5.0)(x) + other(x) + Block(7.0)(x)

        return ALL[name](body)(net, x)

    net = Net(2.0)
    _, found, zeros = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(net, X)
    assert sorted(found) == ["Block", "Block#1", "Block#2", "blocks"]
    grads = jax.jit(jax.grad(lambda p: nnx.capture(f, init=p)(net, X).sum()))(zeros)
    for key, w in {"Block": 5, "Block#1": 3, "Block#2": 7}.items():
        np.testing.assert_array_equal(found[key]["y"][...][0], w * np.asarray(X))
        np.testing.assert_array_equal(grads[key]["p"][...], 2 * w * np.asarray(X))
    np.testing.assert_array_equal(grads["blocks"][0]["p"][...], 2 * y)
    _, _, one_call = nnx.jit(nnx.capture_gradients(lambda net, x: f(net, x).sum()))(net, X)
    np.testing.assert_array_equal(one_call["Block#1"]["p"][...], 6 * np.asarray(X))


@pytest.mark.parametrize("name", ["jit", "grad", "remat", "vmap broadcast"])
def test_submodule_attached_inside_records_under_its_path(name):
    class Lazy(nnx.Module):
        def __call__(self, x):
            if not hasattr(self, "made"):
                self.made = [Block(2.0)]
            return self.made[0](x)

    net = Lazy()
    _, found = nnx.capture(ALL[name](lambda net, x: net(x)), nnx.Intermediate)(net, X)
    np.testing.assert_array_equal(found["made"][0]["y"][...][0], 2 * np.asarray(X))
    _, _, grads = nnx.capture_gradients(
        lambda net, x: ALL[name](lambda net, x: net(x))(net, x).sum()
    )(Lazy(), X)
    np.testing.assert_array_equal(grads["made"][0]["p"][...], 4 * np.asarray(X))


def test_unrolled_loop_and_scan_give_the_same_gradients():
    class Layer(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(w)

        def __call__(self, x):
            return jnp.tanh(self.perturb("h", x @ self.w[...]))

    class Stack(nnx.Module):
        def __init__(self, w):
            self.layers = nnx.vmap(Layer)(w)

        def __call__(self, x):
            run = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return run(x, self.layers)

    class Unrolled(nnx.Module):
        def __init__(self, layers):
            self.layers = layers

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3, 3)), jnp.float32)
    stack, layers = Stack(w), [Layer(each) for each in w]
    ones = jnp.ones((2, 3))
    run = nnx.jit(nnx.capture_gradients(lambda m, x: (m(x) ** 2).sum()))
    loss, values, grads = run(stack, ones)
    want, want_values, want_grads = run(Unrolled(layers), ones)
    np.testing.assert_allclose(loss, want, rtol=1e-6)
    for n in range(4):
        for found, expected in ((values, want_values), (grads, want_grads)):
            np.testing.assert_allclose(
                found["layers"]["h"][...][n], expected["layers"][n]["h"][...], rtol=1e-5
            )


def test_perturbations_of_one_name_have_the_sum_of_gradients():
    class Twice(nnx.Module):
        def __call__(self, x):
            return 2 * self.perturb("h", x) + 5 * self.perturb("h", 3 * x)

    net = Twice()
    for f in (call, nnx.jit(call)):
        _, zeros = nnx.capture(f, nnx.Perturbation)(net, X)
        grads = jax.jit(jax.grad(lambda p, f=f: nnx.capture(f, init=p)(net, X).sum()))(zeros)
        np.testing.assert_array_equal(grads["h"][...], np.full(X.shape, 7))
        one_call = nnx.jit(nnx.capture_gradients(lambda net, x, f=f: f(net, x).sum()))
        _, values, grads = one_call(net, X)
        np.testing.assert_array_equal(values["h#1"][...], 3 * np.asarray(X))
        assert float(grads["h"][...][0, 0]) == 2 and float(grads["h#1"][...][0, 0]) == 5


def test_repeated_names_are_numbered_through_calls_of_one_jitted_function():
    block = Block(1.0)
    jitted, scanned = nnx.jit(call), BROADCAST["scan broadcast"](call)

    def loss(block, x):
        return (jitted(block, jitted(block, x)) + scanned(block, x) + block(x)).sum()

    _, values, grads = nnx.jit(nnx.capture_gradients(loss, method_filter=None))(block, X)
    assert list(values) == ["p", "p#1", "p#2", "p#3"]
    x = np.asarray(X)
    for name, want in {"p": 4 * x**3, "p#1": 2 * x**2, "p#2": 2 * x, "p#3": 2 * x}.items():
        np.testing.assert_array_equal(grads[name][...], want)


# Inside of plain JAX.


def test_capture_inside_plain_transforms():
    net = Net(2.0)

    def inside(x):
        return nnx.capture(net, nnx.Intermediate)(x)[1]

    def passed(net, x):
        return nnx.capture(net, nnx.Intermediate)(x)[1]

    want = 2 * np.asarray(X)
    for found in (
        jax.jit(inside)(X),
        jax.jit(passed)(net, X),
        jax.vmap(inside)(X),
        jax.vmap(passed, in_axes=(None, 0))(net, X),
        jax.lax.scan(lambda c, x: (c, inside(x)), 0, X)[1],
        jax.lax.map(inside, X),
        jax.grad(lambda x: (x.sum(), inside(x)), has_aux=True)(X)[1],
        jax.checkpoint(inside)(X),
    ):
        assert isinstance(found, nnx.State)
        np.testing.assert_array_equal(found["blocks"][0]["y"][...][0], want)


PLAIN = {
    "jit": jax.jit,
    "vmap": jax.vmap,
    "checkpoint": jax.checkpoint,
    "grad": lambda f: lambda x: jax.value_and_grad(lambda x: f(x).sum())(x)[0],
    "lax.map": lambda f: lambda x: jax.lax.map(f, x),
    "jit of nnx.jit": lambda f: jax.jit(lambda x: nnx.jit(f)(x)),
    "vmap of nnx.remat": lambda f: jax.vmap(lambda x: nnx.remat(f)(x)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_plain_transform_in_between_is_an_error(name):
    net = Net(2.0)
    between = PLAIN[name](lambda x: net(x))
    between(X)  # without a capture it is fine, and JAX may keep it
    for _ in range(2):
        with pytest.raises(TraceLevelError, match=r"'y'.*blocks\[0\].*nnx.jit.*capture\s+inside"):
            nnx.capture(lambda net, x: between(x), nnx.Intermediate)(net, X)
    _, zeros = nnx.capture(net, nnx.Perturbation)(X)
    with pytest.raises(TraceLevelError, match=r"'p'.*blocks\[0\]"):
        nnx.capture(lambda net, x: between(x), init=zeros)(net, X)
    with pytest.raises(TraceLevelError, match=r"'p'.*blocks\[0\]"):
        nnx.capture_gradients(lambda net, x: PLAIN[name](lambda x: net(x))(x).sum())(net, X)
    between(X)


class Silent(nnx.Module):
    def __init__(self) -> None:
        self.w = nnx.Param(jnp.float32(2))

    def __call__(self, x):
        return self.inner(x) * 2

    def inner(self, x):
        return self.w[...] * x


@pytest.mark.parametrize("name", ["jit", "lax.map", "vmap of nnx.remat"])
def test_outputs_under_a_plain_transform_are_left_out_with_one_warning(name):
    class Outer(nnx.Module):
        def __init__(self):
            self.silent = Silent()

        def __call__(self, x):
            return PLAIN[name](lambda x: self.silent(x))(x) + self.silent.inner(x)

    net = Outer()
    with pytest.warns(UserWarning, match=r"model.silent \(Silent\).__call__.*plain JAX") as noted:
        _, found = nnx.capture(net, method_outputs=nnx.Intermediate)(X)
    assert len(noted) == 1 and noted[0].filename == __file__
    assert [path for path, _ in found.flat_state()] == [("__call__",), ("silent", "inner")]
    with pytest.warns(UserWarning, match="plain JAX transform") as noted:
        _, values, _ = nnx.capture_gradients(lambda net, x: net(x).sum())(net, X)
    assert len(noted) == 1 and noted[0].filename == __file__
    assert ("silent", "inner") in [path for path, _ in values.flat_state()]


def test_failed_capture_through_transforms_leaves_no_trace():
    net = Net(2.0)
    before = nnx.state(net)
    for transform in (nnx.jit, nnx.remat, lambda f: nnx.vmap(f, in_axes=(None, 0))):

        @transform
        def fails(net, x):
            net(x)
            net.blocks[0].w[...] = net.blocks[0].w[...] * 2
            raise ZeroDivisionError("inside")

        with pytest.raises(ZeroDivisionError, match="inside"):
            nnx.capture(fails, nnx.Intermediate, method_outputs=nnx.Intermediate)(net, X)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), nnx.state(net), before))
    assert nnx.capture(net, nnx.Intermediate)(X)[1]["blocks"][0]["y"][...][0].shape == X.shape


# Caches.


def test_one_jitted_function_inside_and_outside_of_captures():
    run, traces = counted(call)
    f = nnx.jit(run)
    net = Net(2.0)
    for round in range(3):
        f(net, X)
        assert set(nnx.capture(f, nnx.Intermediate)(net, X)[1]["blocks"][0]) == {"y"}
        assert set(nnx.capture(f, nnx.Perturbation)(net, X)[1]["blocks"][0]) == {"p"}
        both = nnx.capture(f, nnx.Intermediate, nnx.Perturbation)(net, X)
        assert len(both) == 3
        outputs = nnx.capture(f, method_outputs=nnx.Intermediate)(net, X)[1]
        assert set(outputs) == {"__call__", "blocks"}
        if round == 0:
            first = len(traces)
    assert first == 5 and len(traces) == 5


def test_equal_models_share_traces_under_captures():
    run, traces = counted(call)
    f = nnx.jit(run)
    for w in (1.0, 2.0, 3.0):
        net = Net(w)
        _, found = nnx.capture(f, nnx.Intermediate)(net, X)
        np.testing.assert_array_equal(found["blocks"][0]["y"][...][0], w * np.asarray(X))
    assert len(traces) == 1


def test_equal_layers_share_a_trace_and_record_under_their_own_paths():
    run, traces = counted(call)
    f = nnx.jit(run)
    net = nnx.Dict(a=Block(2.0), b=Block(3.0))
    _, found = nnx.capture(lambda net, x: f(net["a"], x) + f(net["b"], x), nnx.Intermediate)(net, X)
    assert len(traces) == 1
    for key, w in (("a", 2), ("b", 3)):
        np.testing.assert_array_equal(found[key]["y"][...][0], w * np.asarray(X))


def test_new_values_of_init_do_not_retrace_and_new_names_do():
    run, traces = counted(call)
    f, net = nnx.jit(run), Net(2.0)
    _, zeros = nnx.capture(f, nnx.Perturbation)(net, X)
    traces.clear()
    for value in (0.0, 1.0, 2.0):
        init = jax.tree.map(lambda z, v=value: z + v, zeros)
        out = nnx.capture(f, init=init)(net, X)
        np.testing.assert_array_equal(out, (2 * np.asarray(X) + value) ** 2)
    assert len(traces) == 1
    with pytest.raises(ValueError, match=r"blocks\[0\].*'p'.*\(2, 3\).*init has.*\(2,\)"):
        nnx.capture(f, init=jax.tree.map(lambda z: z[:, 0], zeros))(net, X)
    np.testing.assert_array_equal(nnx.capture(f, init=zeros)(net, X), (2 * np.asarray(X)) ** 2)


def test_a_cached_trace_follows_the_path_of_the_root():
    block = Block(2.0)
    f = nnx.jit(lambda x: block(x))
    for key in ("first", "second"):
        root = nnx.Dict(**{key: block})
        _, found = nnx.capture(lambda root, x: f(x), nnx.Intermediate)(root, X)
        assert [path for path, _ in found.flat_state()] == [(key, "y")]
    _, found = nnx.capture(lambda root, x: f(x), nnx.Intermediate)(Net(1.0), X)
    assert [path for path, _ in found.flat_state()] == [("Block", "y")]


def test_filter_by_path_tells_equal_layers_apart_under_one_jit():
    f = nnx.jit(call)
    net = nnx.Dict(a=Block(2.0), b=Block(3.0))
    for key in ("a", "b", "a"):
        _, found = nnx.capture(
            lambda net, x: f(net["a"], x) + f(net["b"], x),
            method_outputs=nnx.Cache,
            method_filter=nnx.PathContains(key),
        )(net, X)
        assert [path for path, _ in found.flat_state()] == [(key, "__call__")]


def test_models_die_after_captures_through_cached_functions():
    f = nnx.jit(call)
    scanned = nnx.scan(call, in_axes=(None, 0), out_axes=0)
    dead = []
    for _ in range(2):
        net = Net(2.0)
        for g in (f, scanned, nnx.remat(call)):
            _, _, zeros = nnx.capture(g, nnx.Intermediate, nnx.Perturbation)(net, X)
            nnx.capture(g, init=zeros, method_outputs=nnx.Intermediate)(net, X)
        nnx.jit(nnx.capture_gradients(lambda net, x: f(net, x).sum()))(net, X)
        dead.append(weakref.ref(net.blocks[0]))
        del net
    gc.collect()
    assert [ref() for ref in dead] == [None] * 2


def test_threads_capture_side_by_side():
    f = nnx.jit(nnx.remat(call))
    failures: list[Any] = []

    def work(n: int) -> None:
        net = Net(float(n))
        try:
            for _ in range(5):
                _, found = nnx.capture(f, nnx.Intermediate, method_outputs=nnx.Intermediate)(net, X)
                assert set(found["blocks"][0]) == {"y", "__call__"}
                np.testing.assert_array_equal(found["blocks"][0]["y"][...][0], n * np.asarray(X))
        except Exception as error:  # noqa: BLE001  # handed to the main thread
            failures.append(error)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


def test_no_cost_when_off():
    class Plain(nnx.Module):
        def __call__(self, x):
            return jnp.sin(x) * x

    class Watched(nnx.Module):
        def __call__(self, x):
            y = self.perturb("y", jnp.sin(x))
            self.sow(nnx.Intermediate, "norm", jnp.linalg.norm)  # not even called
            nnx.sow("y", y)
            return y * x

    jaxprs = [
        jax.make_jaxpr(lambda net, x: nnx.jit(call)(net, x))(cls(), X) for cls in (Plain, Watched)
    ]
    assert str(jaxprs[0]) == str(jaxprs[1])


# Other ways to record, through transforms.


@pytest.mark.parametrize("name", ALL)
def test_reduce_fn_joins_what_transforms_hand_out(name):
    class Total(nnx.Module):
        def __init__(self, w):
            self.w = nnx.Param(jnp.asarray(w, jnp.float32))

        def __call__(self, x):
            for _ in range(2):
                self.sow(
                    nnx.Intermediate,
                    "total",
                    x,
                    reduce_fn=lambda total, x: total + 10 * x,
                    init_fn=lambda: jnp.ones_like(x),
                )
            return x

    w, _ = expected((name,))
    f = lifted((name,))
    _, found = nnx.capture(lambda net, x: f(net, f(net, x)), nnx.Intermediate)(Total(w), X)
    np.testing.assert_array_equal(found["total"][...], 1 + 40 * np.asarray(X))


@pytest.mark.parametrize("name", [*UNMAPPED, *BROADCAST])
def test_free_sow_finds_the_running_module(name):
    def helper(x):
        nnx.sow("seen", x)
        return x

    class Outer(nnx.Module):
        def __init__(self):
            self.inner = Inner()

        def __call__(self, x):
            x = ALL[name](lambda unused, x: helper(x))(nnx.Pytree(), x)
            return ALL[name](call)(self.inner, x)

    class Inner(nnx.Module):
        def __call__(self, x):
            return helper(2 * x)

    _, found = nnx.capture(Outer(), nnx.Intermediate)(X)
    np.testing.assert_array_equal(found["seen"][...][0], X)
    np.testing.assert_array_equal(found["inner"]["seen"][...][0], 2 * X)


@pytest.mark.parametrize("name", UNMAPPED)
def test_super_through_a_transform_is_recorded_once(name):
    class Base(nnx.Module):
        def __call__(self, x):
            return x

    class Child(Base):
        def __call__(self, x):
            return 2 * ALL[name](Base.__call__)(self, x)

    _, found = nnx.capture(Child(), method_outputs=nnx.Intermediate)(X)
    (output,) = found["__call__"][...]
    np.testing.assert_array_equal(output, 2 * X)


def test_nested_captures_each_get_what_they_asked_for():
    net = Net(2.0)

    @nnx.jit
    def outer(net, x):
        out, zeros = nnx.capture(net, nnx.Perturbation)(x)
        return out, zeros

    (_, zeros), found = nnx.capture(outer, nnx.Intermediate)(net, X)
    assert set(zeros["blocks"][0]) == {"p"} and set(found["blocks"][0]) == {"y"}

    def inner_gradients(net, x):
        return nnx.capture_gradients(lambda net, x: net(x).sum())(net, x)

    (_, values, _), found = nnx.capture(inner_gradients, nnx.Intermediate)(net, X)
    assert len(found["blocks"][0]["y"][...]) == 1
    assert set(values["blocks"][0]) == {"p", "__call__"}


def test_mapped_perturbation_of_another_size_is_an_error():
    net = Net(2.0)
    for f in (BROADCAST["vmap broadcast"](call), BROADCAST["scan broadcast"](call)):
        _, zeros = nnx.capture(f, nnx.Perturbation)(net, X)
        with pytest.raises(ValueError, match=r"blocks\[0\] perturbs 'p'.*mapped 1 times"):
            nnx.capture(f, init=zeros)(net, X[:1])


def test_eval_shape_records_shapes():
    _, found = nnx.capture(lambda net, x: nnx.eval_shape(call, net, x), nnx.Intermediate)(
        Net(2.0), X
    )
    (recorded,) = found["blocks"][0]["y"][...]
    assert isinstance(recorded, jax.ShapeDtypeStruct) and recorded.shape == X.shape


def test_missing_name_in_init_is_an_error_through_transforms():
    net = Net(2.0)
    _, zeros = nnx.capture(net, nnx.Perturbation)(X)
    wrong = nnx.State({"blocks": {0: {"q": zeros["blocks"][0]["p"]}}})
    message = r"blocks\[0\] \(Block\) perturbs 'p', which init lacks; it has 'q'"
    with pytest.raises(StructureError, match=message):
        nnx.capture(net, init=wrong)(X)
    with pytest.raises(StructureError, match=re.escape("'p', which init lacks; it has 'q'")):
        nnx.capture(nnx.jit(call), init=wrong)(net, X)


# The one call, further.


def test_state_changes_of_the_loss_happen_once():
    class Counting(nnx.Module):
        def __init__(self):
            self.n = nnx.Variable(0)
            self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.n[...] += jnp.int32(1)
            return self.dropout(x)

    net, twin = Counting(), Counting()
    run = nnx.capture_gradients(lambda net, x: (net(x).sum(), net), has_aux=True)
    (loss, aux), values, _ = nnx.jit(run)(net, X)
    assert int(net.n[...]) == 1 and aux is net
    np.testing.assert_array_equal(values["dropout"]["__call__"][...], nnx.jit(call)(twin, X))
    assert float(loss) == float(values["__call__"][...].sum())


def test_one_call_inside_jit_and_with_methods():
    class Model(nnx.Module):
        def __init__(self):
            self.block = Block(2.0)
            self.n = nnx.Variable(0)

        def loss(self, x):
            self.n[...] += jnp.int32(1)
            return self.block(x).sum()

    model = Model()
    want = nnx.capture_gradients(model.loss)(X)
    run, traces = counted(nnx.capture_gradients(Model.loss))
    step = nnx.jit(run)
    for _ in range(2):
        found = step(model, X)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(want), strict=True):
            np.testing.assert_array_equal(a, b)
    assert len(traces) == 1 and int(model.n[...]) == 3


def test_mixed_outputs_have_gradients_of_their_floats():
    class Pick(nnx.Module):
        def __call__(self, x):
            return {"best": jnp.argmax(x), "scores": 2 * x}

        def label(self, x):
            return jnp.argmax(x)

    def loss(net, x):
        out = net(x)
        net.label(x)
        return (out["scores"] ** 2).sum()

    _, values, grads = nnx.capture_gradients(loss)(Pick(), X)
    assert list(values) == ["__call__"]
    np.testing.assert_array_equal(values["__call__"].get_value()["best"], 5)
    assert int(grads["__call__"].get_value()["best"]) == 0
    np.testing.assert_array_equal(grads["__call__"].get_value()["scores"], 4 * X)


def test_values_may_hold_none_and_keys():
    class Pair(nnx.Module):
        def __call__(self, x):
            return self.perturb("pair", (x, None))[0]

        def key(self, x):
            return x, jax.random.key(0)

    _, values, grads = nnx.capture_gradients(lambda net, x: (net(x) * net.key(x)[0]).sum())(
        Pair(), X
    )
    assert values["pair"].get_value()[1] is None is grads["pair"].get_value()[1]
    np.testing.assert_array_equal(grads["pair"].get_value()[0], X)
    assert grads["key"].get_value()[1] is None


def test_sown_text_cannot_leave_a_transform():
    class Text(nnx.Module):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "text", ("a", x))

    assert nnx.capture(Text(), nnx.Intermediate)(X)[1]["text"][...][0][0] == "a"
    with pytest.raises(TypeError, match=r"model \(Text\) sows 'text' inside a transform.*a str"):
        nnx.capture(nnx.jit(call), nnx.Intermediate)(Text(), X)


def test_branches_have_to_record_alike():
    def branches(low, high):
        return lambda net, x: nnx.cond(x.sum() < 0, low, high, net, x)

    net = Block(2.0)
    _, found = nnx.capture(branches(call, lambda net, x: net(2 * x)), nnx.Intermediate)(net, X)
    np.testing.assert_array_equal(found["y"][...][0], 4 * X)
    with pytest.raises(StructureError, match=r"record alike.*nothing.*Intermediate 'y'"):
        nnx.capture(branches(lambda net, x: x, call), nnx.Intermediate)(net, X)


def test_one_call_refuses_what_is_no_loss():
    with pytest.raises(TypeError, match="expected a scalar loss"):
        nnx.capture_gradients(lambda net, x: (net(x).sum(), 1))(Net(2.0), X)
    with pytest.raises(TypeError, match=r"expected the function to return \(loss, aux\)"):
        nnx.capture_gradients(lambda net, x: net(x).sum(), has_aux=True)(Net(2.0), X)
    with pytest.raises(StructureError, match="found no module in the first argument"):
        nnx.capture_gradients(lambda x: x.sum())(X)

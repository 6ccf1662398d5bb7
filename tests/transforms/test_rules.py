"""What nnx.custom_vjp and nnx.custom_jvp share. Their rules here give ten times the derivative."""

import copy
import functools
import gc
import pickle
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError, TraceLevelError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import counted
from tests.transforms.test_mapped import Bank

f32 = jnp.float32
one, two, three = f32(1), f32(2), f32(3)


class Cell(nnx.Module):
    """A parameter, a counter, a statistic that has a derivative, and an array of its own."""

    def __init__(self, w=2.0):
        self.w = nnx.Param(f32(w))
        self.n = nnx.Variable(jnp.int32(0))
        self.seen = nnx.BatchStat(f32(0))
        self.array = f32(7)

    def __call__(self, x):
        self.n[...] += jnp.int32(1)
        self.seen[...] = x
        return self.w[...] * x


def by_vjp(fn, **options):
    f = nnx.custom_vjp(fn, **options)

    def bwd(residuals, g):
        m, x = residuals
        return {"w": 10 * g * x}, 10 * g * m.w[...]

    f.defvjp(lambda m, x: (fn(m, x), (m, x)), bwd)
    return f


def by_jvp(fn, **options):
    f = nnx.custom_jvp(fn, **options)

    @f.defjvp
    def rule(primals, tangents):
        (m, x), (dm, dx) = primals, tangents
        return fn(m, x), 10 * (dm["w"][...] * x + m.w[...] * dx)

    return f


def call(m, x):
    return m(x)


both = pytest.mark.parametrize("ruled", [by_vjp, by_jvp], ids=["vjp", "jvp"])

NESTINGS = {
    "grad": lambda g, f: g(f),
    "jit of grad": lambda g, f: nnx.jit(g(f)),
    "grad of jit": lambda g, f: g(nnx.jit(f)),
    "grad of remat": lambda g, f: g(nnx.remat(f)),
    "remat of grad": lambda g, f: nnx.remat(g(f)),
    "grad of jit of remat": lambda g, f: g(nnx.jit(nnx.remat(f))),
    "grad of cond": lambda g, f: g(lambda m, x: nnx.cond(x > 0, f, lambda m, x: x, m, x)),
    "plain jit of grad": lambda g, f: lambda m, x: jax.jit(lambda x: g(f)(Cell(), x))(x),
}

nested = pytest.mark.parametrize("nesting", NESTINGS)


# The rule is used, and effects arrive, whatever stands around.


@both
@nested
def test_rule_gives_the_derivative_and_effects_happen_once(ruled, nesting):
    grad = functools.partial(nnx.value_and_grad, argnums=(0, 1))
    cell = Cell()
    value, (dm, dx) = NESTINGS[nesting](grad, ruled(call))(cell, three)
    assert (float(value), float(dm["w"][...]), float(dx)) == (6, 30, 20)
    if nesting != "plain jit of grad":
        assert (int(cell.n[...]), float(cell.seen[...])) == (1, 3)


@both
def test_plain_calls_run_the_function_alone(ruled):
    fn, runs = counted(call)
    f, cell = ruled(fn), Cell()
    for around in (lambda f: f, nnx.jit, lambda f: nnx.vmap(f, in_axes=(None, None), axis_size=1)):
        around(lambda m, x: f(nnx.clone(m), x))(cell, three)
    assert float(f(cell, three)) == 6 and int(cell.n[...]) == 1
    assert len(runs) == 4


@both
def test_a_jitted_gradient_is_traced_once(ruled):
    fn, runs = counted(call)
    step = nnx.jit(nnx.grad(ruled(fn)))
    for cell in (Cell(), Cell(3.0), Cell(4.0)):
        step(cell, three)
    assert len(runs) == 1


@both
def test_mapped_and_scanned_models_are_as_a_loop(ruled):
    xs = jnp.array([1, 2, 3], f32)
    f = ruled(call)

    def run(mapped):
        bank = Bank()
        loss = lambda m, x: (mapped(m, x) * xs).sum()  # noqa: E731
        dm, dx = nnx.grad(loss, argnums=(0, 1))(bank, xs)
        return dm["w"][...], dx, bank.n[...]

    vmap = functools.partial(nnx.vmap, in_axes=(0, 0))
    scan = functools.partial(nnx.scan, in_axes=(0, 0), out_axes=0)
    expected = 10 * xs * xs, 10 * jnp.array([1, 2, 3], f32) * xs, [1, 1, 1]
    for mapped in (vmap(f), scan(f), scan(nnx.remat(f)), nnx.jit(vmap(f)), vmap(nnx.jit(f))):
        assert all(np.array_equal(a, b) for a, b in zip(run(mapped), expected, strict=True))


@both
def test_vmap_of_a_gradient(ruled):
    bank, xs = Bank(), jnp.array([1, 2, 3], f32)
    dm, dx = nnx.vmap(nnx.grad(ruled(call), argnums=(0, 1)), in_axes=(0, 0))(bank, xs)
    assert np.array_equal(dm["w"][...], 10 * xs) and np.array_equal(dx, 10 * bank.w[...])
    assert np.array_equal(bank.n[...], [1, 1, 1])


@both
def test_broadcast_parameter_gets_the_sum(ruled):
    f, xs = ruled(lambda m, x: m.w[...] * x), jnp.array([1, 2, 3], f32)
    loss = lambda m, x: nnx.vmap(f, in_axes=(None, 0))(m, x).sum()  # noqa: E731
    assert float(nnx.grad(loss)(Cell(), xs)["w"][...]) == 60


@both
def test_under_plain_jax_transforms(ruled):
    f, cell = ruled(lambda m, x: m.w[...] * x), Cell()
    graphdef, params, rest = nnx.split(cell, nnx.Param, ...)
    of_params = lambda params, x: f(nnx.merge(graphdef, params, rest), x)  # noqa: E731
    assert float(jax.grad(of_params)(params, three)["w"][...]) == 30
    assert float(jax.jit(jax.grad(of_params))(params, three)["w"][...]) == 30
    assert float(jax.grad(jax.jit(of_params))(params, three)["w"][...]) == 30
    assert float(jax.grad(f, allow_int=True)(cell, three).w[...]) == 30
    assert np.array_equal(jax.vmap(f, (None, 0))(cell, jnp.ones(2, f32)), [2, 2])


@both
def test_structure_may_change(ruled):
    def fn(m, x):
        m.new, m.tag = nnx.Cache(x), "done"
        del m.n
        return m.w[...] * x

    for around in (lambda f: f, nnx.grad, lambda f: nnx.grad(nnx.jit(f))):
        cell = Cell()
        around(ruled(fn))(cell, three)
        assert cell.tag == "done" and float(cell.new[...]) == 3 and not hasattr(cell, "n")


@both
def test_array_attributes_and_random_streams_are_written(ruled):
    class Noisy(Cell):
        def __init__(self):
            super().__init__()
            self.drop = nnx.Dropout(0.5, rngs=nnx.Rngs(0))

        def __call__(self, x):
            self.array = x
            return self.w[...] * self.drop(jnp.ones(8, f32)).sum() * x

    noisy, again = Noisy(), Noisy()
    value, _ = nnx.value_and_grad(nnx.jit(ruled(call)))(noisy, three)
    assert float(value) == float(again(three)) and float(noisy.array) == 3
    assert int(noisy.drop.rngs.count[...]) == 1


@both
def test_results_are_the_callers_objects(ruled):
    f = ruled(lambda m, x: {"m": m, "w": m.w, "y": x}) if ruled is by_jvp else None
    if f is None:
        f = nnx.custom_vjp(lambda m, x: {"m": m, "w": m.w, "y": x})
        f.defvjp(lambda m, x: (f(m, x), x), lambda x, g: (None, 10 * g["y"]))
    else:
        f.defjvp(lambda p, t: (f(*p), {"m": None, "w": None, "y": 10 * t[1]}))
    cell = Cell()
    dx, aux = nnx.grad(lambda m, x: (f(m, x)["y"], f(m, x)), argnums=1, has_aux=True)(cell, three)
    assert float(dx) == 10 and aux["m"] is cell and aux["w"] is cell.w


@both
def test_failing_rule_changes_nothing(ruled):
    def fn(m, x):
        m(x)
        m.tag = "done"
        raise ZeroDivisionError("after the write")

    for around in (lambda f: f, nnx.grad, lambda f: nnx.grad(nnx.jit(f))):
        cell = Cell()
        with pytest.raises(ZeroDivisionError, match="after the write"):
            around(ruled(fn))(cell, three)
        assert_isomorphic(cell, Cell())


@both
def test_no_tracer_leaks_and_nothing_is_kept_alive(ruled):
    f, cell = ruled(call), Cell()
    with jax.checking_leaks():
        nnx.grad(nnx.jit(f))(cell, three)
    assert float(cell.seen[...]) == 3
    ref = weakref.ref(cell)
    del cell
    gc.collect()
    assert ref() is None


# Where the function and its rule differ.


def differing(ruled, fn, rule):
    """A function with the effects of `fn`, and a rule with those of `rule`."""
    if ruled is by_vjp:
        f = nnx.custom_vjp(fn)
        f.defvjp(lambda m, x: (rule(m, x), x), lambda x, g: (None, 10 * g))
    else:
        f = nnx.custom_jvp(fn)
        f.defjvp(lambda primals, tangents: (rule(*primals), 10 * tangents[1]))
    return f


def quiet(m, x):
    return x


def writes(m, x):
    m.seen[...] = x
    return x


def adds(m, x):
    m.tag = "new"
    return x


def sows(m, x):
    m.sow(nnx.Intermediate, "h", x)
    return x


@both
def test_what_the_rule_changes_counts(ruled):
    cell = Cell()
    nnx.grad(differing(ruled, quiet, writes), argnums=1)(cell, three)
    assert float(cell.seen[...]) == 3
    nnx.jit(nnx.grad(differing(ruled, writes, quiet), argnums=1))(cell, two)
    assert float(cell.seen[...]) == 3
    nnx.grad(nnx.jit(differing(ruled, writes, quiet)), argnums=1)(cell, two)
    assert float(cell.seen[...]) == 3


DIFFERENT = {
    "a write": (quiet, writes, r"changes m\.seen \(BatchStat\), and the function does not"),
    "an attribute": (quiet, adds, r"m\.tag \('new'\) was added, and not in the function"),
    "no attribute": (adds, quiet, r"in the function, m\.tag \('new'\) was added, and not in "),
    "a result": (quiet, lambda m, x: (x, x), r"the function returns PyTreeDef\(\*\), and .* gives"),
    "an object": (
        lambda m, x: m.w,
        lambda m, x: m.seen,
        r"gives PyTreeDef\(\*\) as its result",
    ),
    "a shape": (quiet, lambda m, x: x[None], r"gives a float32\[\] where .* gives a float32\[1\]"),
}


@both
@pytest.mark.parametrize("what", DIFFERENT)
def test_rule_that_differs_after_the_function_ran_is_an_error(ruled, what):
    fn, rule, match = DIFFERENT[what]
    cell = Cell()
    loss = nnx.jit(differing(ruled, fn, rule))
    with pytest.raises(StructureError, match=match):
        nnx.grad(lambda m, x: jnp.sum(jax.tree.leaves(loss(m, x))[0]), argnums=1)(cell, three)
    assert_isomorphic(cell, Cell())


@both
def test_records_that_differ_are_an_error(ruled):
    f = differing(ruled, quiet, sows)
    run = lambda m, x: nnx.grad(nnx.jit(f), argnums=1)(m, x)  # noqa: E731
    with pytest.raises(StructureError, match=r"records nothing, and .* Intermediate 'h'"):
        nnx.capture(run, nnx.Intermediate)(Cell(), three)


# Which arguments have a derivative.


def scaled(ruled):
    """A function of a callable, an array, an object and a number, all but the array constant."""

    def fn(act, x, m, times):
        m.n[...] += jnp.int32(1)
        return act(m.w[...] * x) * f32(sum(range(times)))

    def slope(act, x, m, times):
        assert isinstance(times, int) and callable(act)
        return 10 * m.w[...] * f32(sum(range(times)))

    constant = (0, 2, 3)
    if ruled is by_vjp:
        f = nnx.custom_vjp(fn, nondiff_argnums=constant)
        f.defvjp(
            lambda act, x, m, times: (fn(act, x, m, times), x),
            lambda act, m, times, x, g: (g * slope(act, x, m, times),),
        )
    else:
        f = nnx.custom_jvp(fn, nondiff_argnums=constant)
        f.defjvp(
            lambda act, m, times, primals, tangents: (
                fn(act, primals[0], m, times),
                slope(act, primals[0], m, times) * tangents[0],
            )
        )
    return f


@both
@pytest.mark.parametrize("around", [lambda f: f, nnx.jit], ids=["grad", "jit"])
def test_constant_arguments_stay_what_they_are(ruled, around):
    f, cell = scaled(ruled), Cell()
    loss = lambda m, x: around(lambda m, x: f(jnp.negative, x, m, 3))(m, x)  # noqa: E731
    value, (dm, dx) = nnx.value_and_grad(loss, argnums=(0, 1))(cell, one)
    assert (float(value), float(dx), float(dm["w"][...])) == (-6, 60, 0)
    assert int(cell.n[...]) == 1


@both
def test_traced_constants_have_derivative_zero(ruled):
    if ruled is by_vjp:
        f = nnx.custom_vjp(lambda x, y: x * y, nondiff_argnums=1)
        f.defvjp(lambda x, y: (x * y, ()), lambda y, residuals, g: (10 * g * y,))
    else:
        f = nnx.custom_jvp(lambda x, y: x * y, nondiff_argnums=1)
        f.defjvp(lambda y, primals, tangents: (primals[0] * y, 10 * y * tangents[0]))
    for around in (lambda f: f, nnx.jit, jax.jit):
        assert [float(d) for d in jax.grad(around(f), (0, 1))(two, three)] == [30, 0]


@both
def test_filter_chooses_the_leaves_with_a_derivative(ruled):
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = nnx.Param(two), nnx.Param(three)

    only_a = nnx.DiffState(0, nnx.PathContains("a"))
    found = []
    if ruled is by_vjp:
        f = nnx.custom_vjp(lambda m: m.a[...] * m.b[...], nondiff_argnums=only_a)
        f.defvjp(lambda m: (f(m), m), lambda m, g: ({"a": 10 * g * m.b[...]},))
        found.append(["a"])
    else:
        f = nnx.custom_jvp(lambda m: m.a[...] * m.b[...], nondiff_argnums=(only_a,))

        @f.defjvp
        def rule(primals, tangents):
            found.append(list(tangents[0]))
            return f(*primals), 10 * tangents[0]["a"][...] * primals[0].b[...]

    grads = nnx.grad(f)(Pair())
    assert (float(grads["a"][...]), float(grads["b"][...])) == (30, 0) and found == [["a"]]


@both
def test_arguments_by_keyword_and_defaults(ruled):
    def fn(m, x=three):
        return m.w[...] * x

    f = ruled(fn)
    assert float(f(Cell())) == 6 and float(f(x=two, m=Cell())) == 4
    assert float(nnx.grad(lambda m: f(m))(Cell())["w"][...]) == 30
    with pytest.raises(TypeError, match="missing a required argument: 'm'"):
        f()
    star = ruled(lambda m, *, x: x)
    with pytest.raises(TypeError, match="x can only be given by keyword"):
        star(Cell(), x=one)


WRONG = {
    "out of range": ((2,), ValueError, "nondiff_argnums has 2, but .* parameters are m, x"),
    "negative": ((-3,), ValueError, "nondiff_argnums has -3"),
    "twice": ((1, nnx.DiffState(1, ...)), ValueError, "names argument 1 twice"),
}


@both
@pytest.mark.parametrize("wrong", WRONG)
def test_constants_that_cannot_be(ruled, wrong):
    given, error, match = WRONG[wrong]
    with pytest.raises(error, match=match):
        ruled(call, nondiff_argnums=given)


@both
def test_other_arguments_that_cannot_be(ruled):
    transform = nnx.custom_vjp if ruled is by_vjp else nnx.custom_jvp
    with pytest.raises(TypeError, match=r"\(call\): x\[0\] is a str, .* in nondiff_argnums"):
        ruled(call)(Cell(), ["text"])
    with pytest.raises(TypeError, match=r"such as a bound method.*net\.method"):
        transform(Cell().__call__)
    with pytest.raises(TypeError, match="such as a bound method"):
        transform(Cell())
    with pytest.raises(AttributeError, match=r"\(call\) has no rule: call its def"):
        transform(call)(Cell(), one)
    with pytest.raises(TypeError, match="is a NoneType, expected a function"):
        transform(call).defvjp(None, None) if ruled is by_vjp else transform(call).defjvp(None)


@both
def test_write_to_a_closed_over_object_names_it(ruled):
    cell = Cell()

    def fn(m, x):
        cell.seen[...] = x
        return x

    with pytest.raises(TraceLevelError, match=r"\(fn\) closes over cell\.seen.*BatchStat"):
        nnx.jit(ruled(fn))(Cell(), three)
    assert float(cell.seen[...]) == 0


# Methods, names and captures.


class Inner(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(two)

    def __call__(self, x):
        return self.w[...] * x


class VjpBlock(nnx.Module):
    def __init__(self):
        self.inner = Inner()

    @nnx.custom_vjp
    def __call__(self, x):
        y = self.inner(x)
        self.sow(nnx.Intermediate, "h", y)
        return jnp.sin(y)

    def _fwd(self, x):
        return self(x), (self, x)

    def _bwd(residuals, g):
        self, x = residuals
        g = 10 * g * jnp.cos(self.inner(x))
        return {"inner": {"w": g * x}}, g * self.inner.w[...]

    __call__.defvjp(_fwd, _bwd)


class JvpBlock(nnx.Module):
    def __init__(self):
        self.inner = Inner()

    @nnx.custom_jvp
    def __call__(self, x):
        y = self.inner(x)
        self.sow(nnx.Intermediate, "h", y)
        return jnp.sin(y)

    @__call__.defjvp
    def _rule(primals, tangents):
        (self, x), (dself, dx) = primals, tangents
        slope = 10 * jnp.cos(self.inner.w[...] * x)
        tangent = slope * (dself["inner"]["w"][...] * x + self.inner.w[...] * dx)
        return self(x), tangent


class Net(nnx.Module):
    def __init__(self, block):
        self.blocks = [block(), block()]

    def __call__(self, x):
        for block in self.blocks:
            x = block(x)
        return x


blocks = pytest.mark.parametrize("block", [VjpBlock, JvpBlock], ids=["vjp", "jvp"])


def loss(net, x):
    return net(x)


@blocks
def test_methods_have_the_module_as_first_argument(block):
    w, x = 2.0, 3.0
    y = np.sin(w * x)
    second = 10 * np.cos(w * y)
    expected = [second * w * 10 * np.cos(w * x) * x, second * y]
    for around in (lambda f: f, nnx.jit):
        grads = nnx.grad(around(loss))(Net(block), three)
        found = [float(grads["blocks"][n]["inner"]["w"][...]) for n in (0, 1)]
        assert np.allclose(found, expected, rtol=1e-4)


@blocks
def test_operations_carry_the_path_of_their_module(block):
    net = Net(block)

    def names(function, *args):
        text = jax.jit(lambda *args: function(*args)).lower(*args).as_text(debug_info=True)
        found = re.findall(r'loc\("jit\(<lambda>\)/([^"]*)"', text)
        return {name.rpartition("/")[0] for name in found} - {""}

    forward = {f"Net/blocks[{n}]{inner}" for n in (0, 1) for inner in ("", "/inner")}
    assert names(lambda x: net(x), three) == forward
    backward = names(lambda x: jax.grad(lambda x: net(x))(x), three)
    assert {"jvp(Net)/blocks[0]", "jvp(Net)/blocks[0]/inner"} <= backward
    if block is VjpBlock:  # what bwd calls on a residual
        assert {f"transpose(jvp(Net))/blocks[{n}]/inner" for n in (0, 1)} <= backward
    assert all(re.search(r"blocks\[[01]\](/inner)?$", name) for name in backward), backward


AROUND = {
    "plain": lambda f: f,
    "jit": nnx.jit,
    "grad": lambda f: lambda m, x: nnx.value_and_grad(f)(m, x)[0],
    "jit of grad": lambda f: nnx.jit(lambda m, x: nnx.value_and_grad(f)(m, x)[0]),
    "grad of jit": lambda f: lambda m, x: nnx.value_and_grad(nnx.jit(f))(m, x)[0],
}


@blocks
@pytest.mark.parametrize("around", AROUND)
def test_sown_values_and_outputs_arrive_once(block, around):
    run = nnx.capture(AROUND[around](loss), nnx.Intermediate, method_outputs=nnx.Intermediate)
    value, found = run(Net(block), three)
    expected = nnx.capture(loss, nnx.Intermediate, method_outputs=nnx.Intermediate)(
        Net(block), three
    )
    assert np.allclose(value, expected[0])
    paths = [path for path, _ in found.flat_state()]
    assert paths == [path for path, _ in expected[1].flat_state()] and len(paths) == 7
    for (_, a), (_, b) in zip(found.flat_state(), expected[1].flat_state(), strict=True):
        assert len(a.get_value()) == 1 and np.allclose(a.get_value(), b.get_value())


@blocks
def test_capture_inside_of_plain_jax(block):
    net = Net(block)
    run = lambda x: nnx.capture(net, nnx.Intermediate)(x)  # noqa: E731
    grad, found = jax.grad(jax.jit(run), has_aux=True)(three)
    assert np.allclose(grad, jax.grad(lambda x: net(x))(three))
    assert np.allclose(found["blocks"][0]["h"][...][0], 6)


def free_sow(self, x):
    nnx.sow("h", x)
    return self.w[...] * x


class Free(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(two)

    @nnx.custom_vjp
    def __call__(self, x):
        return free_sow(self, x)

    __call__.defvjp(lambda self, x: (free_sow(self, x), None), lambda _, g: (None, 10 * g))


@pytest.mark.parametrize("named", [True, False])
def test_sow_of_a_function_finds_its_module(named):
    run = nnx.capture(AROUND["grad"](loss), nnx.Intermediate)
    with nnx.override_named_call(named):
        _, found = run(Net(Free), three)
    assert [path for path, _ in found.flat_state()] == [("blocks", n, "h") for n in (0, 1)]


@blocks
def test_no_tracer_leaks_and_no_capture_is_kept_alive(block):
    net, step = Net(block), nnx.jit(loss)
    with jax.checking_leaks():
        nnx.capture(lambda net, x: step(net, x), nnx.Intermediate)(net, three)
    ref = weakref.ref(net)
    del net
    gc.collect()
    assert ref() is None


@blocks
def test_gradients_of_values_outside_of_the_rule(block):
    with pytest.warns(UserWarning, match=r"blocks\[0\]\.inner .*derivative rule of its own"):
        _, values, grads = nnx.capture_gradients(loss)(Net(block), three)
    paths = [path for path, _ in values.flat_state()]
    assert paths == [("__call__",), ("blocks", 0, "__call__"), ("blocks", 1, "__call__")]
    w, y = 2.0, np.sin(2.0 * 3.0)
    assert np.allclose(grads["blocks"][0]["__call__"][...], 10 * np.cos(w * y) * w, rtol=1e-4)


@both
def test_perturbation_inside_has_no_gradient_and_says_so(ruled):
    class Perturbed(Cell):
        def __call__(self, x):
            return self.perturb("h", self.w[...] * x)

    f, cell = ruled(call), Perturbed()
    run = lambda m, x: f(m, x)  # noqa: E731
    value, zeros = nnx.capture(run, nnx.Perturbation)(cell, three)
    assert float(value) == 6 and float(zeros["h"][...]) == 0
    ones = jax.tree.map(jnp.ones_like, zeros)
    assert float(nnx.capture(nnx.jit(run), init=ones)(cell, three)) == 7
    with pytest.raises(StructureError, match=r"perturb\('h'\) is called inside"):
        nnx.grad(lambda init: nnx.capture(run, init=init)(cell, three))(ones)
    with pytest.raises(TraceLevelError, match=r"perturb\('h'\).*inside of nnx\.custom_"):
        nnx.capture_gradients(run)(cell, three)


# As functions.


@nnx.custom_vjp
def module_level(x):
    return x * x


module_level.defvjp(lambda x: (x * x, x), lambda x, g: (10 * g,))


def square(x):
    return x * x


def square_fwd(x):
    return x * x, x


def square_bwd(x, g):
    return (10 * g,)


def square_rule(primals, tangents):
    return primals[0] * primals[0], 10 * tangents[0]


def test_pickled_with_their_rule():
    assert pickle.loads(pickle.dumps(module_level)) is module_level
    assert copy.deepcopy(module_level) is module_level
    vjp, jvp = nnx.custom_vjp(square), nnx.custom_jvp(square)
    vjp.defvjp(square_fwd, square_bwd)
    jvp.defjvp(square_rule)
    for f in (vjp, jvp):
        again = pickle.loads(pickle.dumps(f))
        assert again is not f and float(jax.grad(again)(three)) == 10


@both
def test_kept_as_an_attribute(ruled):
    class Holder(nnx.Module):
        def __init__(self):
            self.cell, self.f = Cell(), ruled(call)

        def __call__(self, x):
            return self.f(self.cell, x)

    holder = nnx.clone(Holder())
    assert float(nnx.jit(nnx.grad(loss))(holder, three)["cell"]["w"][...]) == 30
    assert int(holder.cell.n[...]) == 1

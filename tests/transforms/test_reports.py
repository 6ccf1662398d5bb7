"""What users of other libraries reported or wished for, as far as jit, grad and scopes go.

Each test names the public report that it comes from. Timing is left to `tests/bench`: here stands
the structure that makes a call fast.
"""

import dataclasses
import gc
import inspect
import re
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx
from nnxlite._core import plan
from tests.transforms.samples import counted

X = jnp.ones((2, 3))


def pointers(model):
    return [x.unsafe_buffer_pointer() for x in jax.tree.leaves(nnx.state(model))]


class Tick(nnx.Module):
    def __init__(self):
        self.n = nnx.Variable(jnp.array(0))

    def __call__(self, x):
        self.n[...] = self.n[...] + jnp.int32(1)
        return x * 2.0


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.drop(self.linear(x)))


def test_callable_module_keeps_its_state_through_jit():
    """google/flax#3997."""
    tick = Tick()
    jitted = nnx.jit(tick)
    assert (jitted(X) == 2).all()
    jitted(X)
    assert int(tick.n[...]) == 2


@pytest.mark.parametrize("copy", [False, True])
def test_dropout_and_batch_norm_in_a_merged_model_under_plain_grad(copy):
    """google/flax#5050."""
    net = Net(nnx.Rngs(0, dropout=1))
    before = jax.tree.leaves(nnx.state(net))
    graphdef, params, rest = nnx.split(net, nnx.Param, ...)

    def loss(params, rest):
        return nnx.merge(graphdef, params, rest, copy=copy)(X).sum()

    grads = jax.grad(loss)(params, rest)
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(grads))
    assert all(a is b for a, b in zip(before, jax.tree.leaves(nnx.state(net)), strict=True))


def test_write_in_a_custom_vjp_leaks_no_tracer():
    """google/flax#4847."""

    class Stat(nnx.Variable):
        pass

    class Recording(nnx.Module):
        def __init__(self):
            self.stat = Stat(jnp.zeros(()))

        def __call__(self, x):
            @jax.custom_vjp
            def same(x):
                return forward(x)[0]

            def forward(x):
                self.stat[...] = jnp.max(x)
                return x, ()

            same.defvjp(forward, lambda _, g: (g,))
            return same(x)

    model = Recording()
    with pytest.raises(nnx.errors.TraceLevelError, match="the value of Stat"):
        nnx.grad(lambda x, m: m(x).sum())(X, model)
    assert float(model.stat[...]) == 0


def test_digit_strings_are_never_ignored():
    """google/orbax#2561."""
    model = nnx.List([nnx.Param(jnp.zeros(2)), nnx.Param(jnp.zeros(2))])
    loaded = {"0": jnp.ones(2), "1": jnp.ones(2)}
    with pytest.raises(nnx.errors.StructureError, match=r"\['0'\].*restore_int_paths"):
        nnx.update(model, loaded)
    nnx.update(model, nnx.restore_int_paths(loaded))
    assert float(model[1][...].sum()) == 2


@pytest.mark.parametrize("layers", [0, 40])
def test_call_on_an_unchanged_model_walks_no_graph(layers, monkeypatch):
    """google/flax#4336, patrick-kidger/equinox#973."""

    class Deep(nnx.Module):
        def __init__(self):
            rngs = nnx.Rngs(0)
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(layers)])

        def __call__(self, x):
            for layer in self.layers:
                x = layer(x)
            return x

    run, traces = counted(lambda m, x: m(x))
    model, jitted = Deep(), nnx.jit(run)
    jitted(model, X)
    nnx.split(model)

    def walk(roots):
        raise AssertionError("the graph was walked again")

    monkeypatch.setattr(plan, "flatten", walk)
    for _ in range(3):
        jitted(model, X)
        nnx.split(model)
        nnx.update(model, nnx.state(model))
    assert len(traces) == 1


@pytest.mark.standard_promotion
@pytest.mark.parametrize("make_tx", [lambda: TX, lambda: optax.adam(1e-3)], ids=["kept", "anew"])
def test_model_and_optimizer_made_anew_are_no_new_trace(make_tx):
    """google/flax#5548."""

    def step(model, optimizer, x):
        grads = nnx.grad(lambda m: (m(x) ** 2).sum())(model)
        optimizer.update(model, grads)

    run, traces = counted(step)
    jitted = nnx.jit(run)
    for seed in range(3):
        model = Net(nnx.Rngs(seed))
        jitted(model, nnx.Optimizer(model, make_tx(), wrt=nnx.Param), X)
    assert len(traces) == 1


TX = optax.adam(1e-3)


def test_shape_of_a_call_leaves_batch_statistics_alone():
    """google/flax#4734."""
    net = Net(nnx.Rngs(0))
    x = jax.ShapeDtypeStruct((7, 3), jnp.float32)
    assert nnx.eval_shape(net, x).shape == (7, 3)
    assert nnx.eval_shape(lambda m, x: m(x), net, x).shape == (7, 3)
    assert not net.norm.mean[...].any() and int(net.drop.rngs.count[...]) == 0


def test_abstract_model_has_the_paths_of_the_concrete_one():
    """google/flax#5128."""

    class Holder(nnx.Module):
        def __init__(self):
            self.d = nnx.data({"a": jnp.ones((2, 3)), "b": jnp.zeros(4)})
            self.w = nnx.Param(jnp.ones(2))

    concrete, abstract = nnx.state(Holder()), nnx.state(nnx.eval_shape(Holder))
    assert concrete.flat_state().paths == abstract.flat_state().paths
    assert len(concrete.flat_state()) == 3


def test_static_fields_are_part_of_the_key():
    """google/flax#3863."""

    class Times(nnx.Module):
        def __init__(self, k):
            self.k, self.w = k, nnx.Param(jnp.ones(()))

    f = nnx.jit(lambda m, x: x * m.k * m.w[...])
    a, b = Times(2.0), Times(3.0)
    assert nnx.graphdef(a) != nnx.graphdef(b)
    assert nnx.graphdef(a) == nnx.graphdef(Times(2.0))
    assert hash(nnx.graphdef(a)) == hash(nnx.graphdef(Times(2.0)))
    assert f(a, 1.0) == 2 and f(b, 1.0) == 3
    a.k = 5.0
    assert f(a, 1.0) == 5


def test_clone_may_be_donated():
    """google/flax#5461."""
    a = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    b = nnx.clone(a)
    nnx.jit(lambda m: None, donate_argnums=0)(b)
    assert a(X).shape == (2, 2)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Range:
    lo: jax.Array
    hi: jax.Array


def test_registered_pytree_in_a_variable_and_as_an_attribute():
    """google/flax#4497."""

    class Clip(nnx.Module):
        def __init__(self):
            self.constant = Range(jnp.zeros(2), jnp.ones(2))
            self.p = nnx.Param(Range(jnp.ones(2), jnp.ones(2)))

        def __call__(self, x):
            return (self.p.get_value().lo * x + self.constant.hi).sum()

    m = Clip()
    copy = nnx.merge(*nnx.split(m))
    assert copy(3.0) == m(3.0) == nnx.jit(lambda m, x: m(x))(m, 3.0) == 8
    assert isinstance(copy.constant, Range)
    grads = nnx.grad(lambda m: m(3.0))(m)
    assert (grads["p"].get_value().lo == 3).all() and not grads["p"].get_value().hi.any()


def test_plain_lists_and_dicts_of_modules():
    """jax-ml/bonsai#47."""

    class Plain(nnx.Module):
        def __init__(self, rngs):
            self.blocks = [nnx.Linear(3, 3, rngs=rngs) for _ in range(3)]
            self.heads = {"a": nnx.Linear(3, 1, rngs=rngs)}

        def __call__(self, x):
            for block in self.blocks:
                x = block(x)
            return self.heads["a"](x)

    m, jitted = Plain(nnx.Rngs(0)), nnx.jit(lambda m, x: m(x))
    assert len(jax.tree.leaves(nnx.state(m, nnx.Param))) == 8
    jitted(m, X)
    m.blocks.append(nnx.Linear(3, 3, rngs=nnx.Rngs(1)))
    assert len(jax.tree.leaves(nnx.state(m, nnx.Param))) == 10
    assert np.allclose(jitted(m, X), m(X), rtol=1e-5)


SQUARE = jnp.array([[1.0, 2.0], [3.0, 4.0]])
USES = {
    "dot": lambda p: jnp.dot(jnp.ones((2, 2)), p),
    "broadcast_to": lambda p: jnp.broadcast_to(p, (3, 2, 2)),
    "einsum": lambda p: jnp.einsum("ij,jk->ik", jnp.ones((2, 2)), p),
    "softmax": jax.nn.softmax,
    "norm": jnp.linalg.norm,
    "concatenate": lambda p: jnp.concatenate([p, p]),
    "where": lambda p: jnp.where(jnp.ones((2, 2)) > 0, p, 0.0),
    "stop_gradient": lambda p: jax.lax.stop_gradient(p[...]),
    "matmul": lambda p: jnp.ones((2, 2)) @ p,
    "transpose": lambda p: -p.T,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_variable_is_taken_as_an_array(use):
    """jax-ml/jax#24460."""
    p, expected = nnx.Param(SQUARE), use(SQUARE)
    assert np.allclose(use(p), expected)
    assert np.allclose(nnx.jit(use)(p), expected)
    grads = nnx.grad(lambda p: use(p).sum())(p)
    assert np.allclose(grads[...], jax.grad(lambda p: use(p).sum())(SQUARE))


class Inner(nnx.Module):
    def __init__(self, rngs):
        self.proj = nnx.Linear(3, 3, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.proj(x))


class Outer(nnx.Module):
    def __init__(self, rngs):
        self.blk = Inner(rngs)

    def __call__(self, x):
        return self.blk(x)


def dots(text, pattern):
    return [name for name in re.findall(pattern, text) if "dot_general" in name]


def test_modules_are_named_in_compiled_code():
    """patrick-kidger/equinox#461."""
    graphdef, state = nnx.split(Outer(nnx.Rngs(0)))
    plain = jax.jit(lambda state, x: nnx.merge(graphdef, state)(x)).lower(state, X).compile()
    lifted = nnx.jit(lambda m, x: m(x)).lower(Outer(nnx.Rngs(0)), X).compile()
    for compiled in (plain, lifted):
        names = dots(compiled.as_text(), r'op_name="([^"]*)"')
        assert any("Outer/blk/proj" in name for name in names), names


def test_modules_are_named_in_the_backward_pass_and_under_vmap():
    """jax-ml/jax#7878."""
    graphdef, state = nnx.split(Inner(nnx.Rngs(0)))

    def names(f, *args):
        return dots(jax.jit(f).lower(*args).as_text(debug_info=True), r'loc\("([^"]*)"')

    backward = names(jax.grad(lambda s: (nnx.merge(graphdef, s)(X) ** 2).sum()), state)
    assert any("transpose(jvp(Inner))/proj" in name for name in backward), backward
    mapped = names(jax.vmap(lambda x: nnx.merge(graphdef, state)(x)), X)
    assert any("vmap(Inner)/proj" in name for name in mapped), mapped


def test_nothing_is_kept_of_a_model_that_was_dropped():
    """google/flax#2493."""
    jitted, refs, counts = nnx.jit(lambda m, x: m(x)), [], []
    for n in range(6):
        rngs = nnx.Rngs(n)
        m = nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), nnx.Linear(3, 3, rngs=rngs))
        del rngs
        jitted(m, X)
        nnx.grad(lambda m: m(X).sum())(m)
        nnx.split(m)
        refs.append(weakref.ref(m))
        del m
        counts.append(len(jax.live_arrays()))
    assert all(ref() is None for ref in refs)  # without the collector
    gc.collect()
    assert len(set(counts[1:])) == 1


def test_shared_modules_are_met_once_and_cycles_end():
    """google/flax#4943."""
    a = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    class Both(nnx.Module):
        def __init__(self):
            self.x = self.y = a
            self.me = self

    both = Both()
    found = [m for _, m in nnx.iter_modules(both)]
    assert sum(m is a for m in found) == sum(m is both for m in found) == 1
    other = nnx.Linear(2, 2, rngs=nnx.Rngs(1))
    assert len(list(nnx.iter_modules({"p": a, "q": [a, other]}))) == 2


def test_legacy_keys():
    """google/flax#4231."""
    old, new = nnx.Rngs(jax.random.PRNGKey(0)), nnx.Rngs(jax.random.key(0))
    assert nnx.jit(nnx.Dropout(0.5, rngs=old))(jnp.ones(4)).shape == (4,)
    assert (
        jax.random.key_data(nnx.Rngs(jax.random.PRNGKey(0)).params())
        == jax.random.key_data(new.params())
    ).all()


def test_metadata_lasts_through_jit_and_merge():
    """google/qwix#143."""
    m = Tick()
    m.n.set_metadata("tag", "x")
    m.n.set_metadata(other=3)
    nnx.jit(lambda m: None)(m)
    for found in (m, nnx.merge(*nnx.split(m)), nnx.jit(lambda m: nnx.clone(m))(m)):
        assert found.n.get_metadata()["tag"] == "x" and found.n.get_metadata()["other"] == 3


def test_lists_of_numbers_and_numpy_arrays_as_attributes():
    """google/flax#4870."""

    class Sized(nnx.Module):
        def __init__(self):
            self.sizes, self.arr = [1, 2], np.arange(3)
            self.w = nnx.Param(jnp.ones(2))

        def __call__(self, x):
            return x * float(self.sizes[1]) * self.w[...]

    m, jitted = Sized(), nnx.jit(lambda m, x: m(x))
    assert jitted(m, jnp.ones(2)).tolist() == [2, 2]
    m.sizes[1] = 3
    assert jitted(m, jnp.ones(2)).tolist() == [3, 3]


class Base(nnx.Module):
    def __call__(self, x):
        """Adds one."""
        return x + 1.0


class Helped(Base):
    def __init__(self, rngs):
        self.linear = self.make(rngs, 3)

    def make(self, rngs, n: int = 2):
        return nnx.Linear(n, n, rngs=rngs)

    @property
    def width(self):
        return self.linear.in_features

    @staticmethod
    def twice(x):
        return 2 * x

    @classmethod
    def build(cls):
        return cls(nnx.Rngs(0))

    def count(self):
        yield from range(3)

    def factorial(self, n):
        return 1 if n == 0 else n * self.factorial(n - 1)

    def __call__(self, x):
        return super().__call__(self.linear(x))


def test_scopes_let_any_method_be():
    """google/flax#1831."""
    m = Helped.build()
    assert isinstance(m.make(nnx.Rngs(1)), nnx.Linear) and m.width == 3
    assert Helped.twice(2) == 4 and list(m.count()) == [0, 1, 2] and m.factorial(5) == 120
    assert m(X).shape == (2, 3) and nnx.jit(m)(X).shape == (2, 3)
    assert list(inspect.signature(Helped.make).parameters) == ["self", "rngs", "n"]
    assert Base.__call__.__doc__ == "Adds one."


class Kernel(nnx.Module):
    def __call__(self, x):
        return self.step(x) * 2.0

    def step(self, x):
        return x + 1.0


def test_scopes_change_no_program():
    """jax-ml/jax#40720."""
    found = jax.make_jaxpr(lambda x: Kernel()(x))(1.0)
    assert str(found) == str(jax.make_jaxpr(lambda x: (x + 1.0) * 2.0)(1.0))


def test_modules_run_inside_of_a_pallas_kernel():
    """jax-ml/jax#40720."""
    pallas = pytest.importorskip("jax.experimental.pallas")
    module = Kernel()

    def kernel(x_ref, out_ref):
        out_ref[...] = module(x_ref[...])

    shape = jax.ShapeDtypeStruct((8,), jnp.float32)
    call = pallas.pallas_call(kernel, out_shape=shape, interpret=True)
    assert (call(jnp.ones(8)) == 4).all()


def test_counting_is_one_trace():
    """google/flax#5548."""

    class Counts(nnx.Module):
        def __init__(self):
            self.n, self.s = nnx.Variable(jnp.asarray(0)), nnx.Variable(jnp.asarray(1.0))

    def step(c):
        c.n[...] += 1
        c.s[...] = c.s[...] * jnp.float32(2)

    run, traces = counted(step)
    counts, jitted = Counts(), nnx.jit(run)
    for _ in range(3):
        jitted(counts)
    assert len(traces) == 1 and int(counts.n[...]) == 3 and float(counts.s[...]) == 8


def test_forward_pass_copies_no_parameter():
    """google/flax#5031."""
    model = nnx.Sequential(*[nnx.Linear(3, 3, rngs=nnx.Rngs(n)) for n in range(4)])
    jitted, before = nnx.jit(lambda m, x: m(x)), pointers(model)
    out = jitted(model, X)
    assert pointers(model) == before
    memory = jitted.lower(model, X).compile().memory_analysis()
    assert memory.output_size_in_bytes <= out.nbytes + 64

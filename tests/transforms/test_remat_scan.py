"""nnx.remat_scan: the steps are those of a loop, the memory is that of nested loops."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import counted
from tests.transforms.test_mapped import Cell

f32 = jnp.float32
all_lengths = pytest.mark.parametrize("lengths", [(6,), (2, 3), (3, 1, 2)], ids=str)


class Layers(nnx.Module):
    """Six layers of one parameter and one counter, along axis 0."""

    def __init__(self):
        self.w = nnx.Param(jnp.arange(1, 7, dtype=f32))
        self.n = nnx.Variable(jnp.zeros(6, jnp.int32))

    def __call__(self, x):
        self.n[...] += jnp.int32(1)
        return self.w[...] * x + f32(1)


def apply(layer, x):
    return layer(x)


def by_hand(w, x):
    for each in w:
        x = each * x + f32(1)
    return x


@all_lengths
@pytest.mark.parametrize("around", [lambda f: f, nnx.jit], ids=["eager", "jit"])
def test_steps_and_gradients_are_those_of_the_loop(lengths, around):
    model, x = Layers(), f32(2)
    run = around(nnx.remat_scan(apply, lengths=lengths))
    value, grads = nnx.value_and_grad(run)(model, x)
    expected = jax.value_and_grad(by_hand)(model.w[...], x)
    assert float(value) == float(expected[0]) and np.array_equal(grads["w"][...], expected[1])
    assert np.array_equal(model.n[...], jnp.ones(6))  # once each, however often it is computed


@all_lengths
@pytest.mark.parametrize("reverse", [False, True])
def test_slices_and_results_have_one_axis_in_order(lengths, reverse):
    def step(x, y):
        return x * f32(2) + y, (x, jnp.stack([y, y]))

    xs = jnp.arange(6, dtype=f32)
    options = {"in_axes": (nnx.Carry, 0), "out_axes": (nnx.Carry, 0), "reverse": reverse}
    found = nnx.remat_scan(step, lengths=lengths, **options)(f32(1), xs)
    expected = jax.lax.scan(step, f32(1), xs, reverse=reverse)
    assert all(map(np.array_equal, jax.tree.leaves(found), jax.tree.leaves(expected)))


def test_axes_by_filter_stack_carry_and_broadcast():
    class Mixed(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(jnp.ones((2, 6), f32))  # stacked along axis 1
            self.total = nnx.BatchStat(f32(0))  # carried
            self.scale = nnx.Cache(f32(3))  # the same for all

    def step(m, x):
        m.total[...] += x.sum()
        return m.w[...] * x + m.scale[...]

    model = Mixed()
    axes = nnx.StateAxes({nnx.Param: 1, nnx.BatchStat: nnx.Carry, ...: None})
    run = nnx.remat_scan(step, lengths=(2, 3), in_axes=(axes, nnx.Carry))
    assert np.array_equal(run(model, jnp.zeros(2, f32)), [18, 18])
    assert float(model.total[...]) == 2 * (0 + 3 + 6 + 9 + 12 + 15)


def test_random_streams_are_stacked_or_carried():
    def step(rngs, x):
        return x, rngs.uniform()

    run = functools.partial(nnx.remat_scan, step, lengths=(2, 3), out_axes=(nnx.Carry, 0))
    _, drawn = run()(nnx.Rngs(0).split(6), f32(0))
    keys = jax.random.split(nnx.Rngs(0)(), 6)
    assert np.array_equal(drawn, [nnx.Rngs(key).uniform() for key in keys])
    one, loop = nnx.Rngs(1), nnx.Rngs(1)
    _, drawn = run(in_axes=(nnx.StateAxes({...: nnx.Carry}), nnx.Carry))(one, f32(0))
    assert np.array_equal(drawn, [loop.uniform() for _ in range(6)])
    assert int(one.default.count[...]) == 6


class Recorder(nnx.Module):
    def __init__(self):
        self.w = nnx.Param(jnp.arange(1, 7, dtype=f32))

    def __call__(self, x):
        h = self.perturb("h", self.w[...] * x)
        self.sow(nnx.Intermediate, "h", h)
        return h + f32(1)


@pytest.mark.parametrize("lengths", [(6,), (2, 3)], ids=str)
def test_records_have_one_axis_and_perturbations_the_gradients_of_the_loop(lengths):
    model, x = Recorder(), f32(1)
    run = nnx.remat_scan(apply, lengths=lengths)
    _, sown, zeros = nnx.capture(run, nnx.Intermediate, nnx.Perturbation)(model, x)
    grads = jax.grad(lambda p: nnx.capture(run, init=p)(model, x))(zeros)

    def unrolled(perturbations):
        y, seen = x, []
        for w, p in zip(model.w[...], perturbations, strict=True):
            seen.append(w * y + p)
            y = seen[-1] + f32(1)
        return y, jnp.stack(seen)

    expected, seen = jax.grad(unrolled, has_aux=True)(jnp.zeros(6, f32))
    assert np.array_equal(sown["h"][...][0], seen) and np.array_equal(grads["h"][...], expected)


def test_name_of_the_layer_axis_is_taken_off_and_put_back():
    seen = []

    def step(layer, x):
        seen.append((layer.w.shape, layer.w.out_sharding))
        layer.w[...] *= f32(2)
        return x

    model = Layers()
    model.w = nnx.Param(jnp.ones((6, 4)), out_sharding=("layers", "data"))
    named = {nnx.PARTITION_NAME: "layers"}
    nnx.remat_scan(step, lengths=(2, 3), transform_metadata=named)(model, f32(1))
    assert seen == [((4,), ("data",))]
    assert model.w.out_sharding == ("layers", "data") and model.w.shape == (6, 4)


def test_methods_are_scanned_and_named():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.split_rngs(splits=4)(nnx.vmap(lambda r: nnx.Linear(2, 2, rngs=r)))(
                rngs
            )

        @nnx.remat_scan(lengths=(2, 2))
        def __call__(self, x):
            return jnp.tanh(self.layers(x))

    model, x = Net(nnx.Rngs(0)), jnp.ones((1, 2), f32)
    text = nnx.jit(lambda m, x: m(x)).lower(model, x).compile().as_text()
    (name,) = set(re.findall(r'op_name="([^"]*dot_general)"', text))
    assert re.fullmatch(r"jit\(<lambda>\)/Net/while/.*/while/.*/layers/dot_general", name)


def test_calls_of_equal_structure_share_a_trace():
    f, runs = counted(apply)
    run = nnx.remat_scan(f, lengths=(2, 3))
    gradient = nnx.grad(run)
    for model in (Layers(), Layers()):
        run(model, f32(1))
        gradient(model, f32(1))
    assert len(runs) == 2  # outside of traces, and inside of grad, where names are others


# Errors, each with an untouched caller.


@pytest.mark.parametrize(
    ("lengths", "kind", "match"),
    [
        ((), ValueError, r"one positive length per loop, found \(\)"),
        ((2, 0), ValueError, r"one positive length per loop, found \(2, 0\)"),
        (6, TypeError, r"lengths as a sequence of ints, .* found 6"),
        ((1.5, 4), TypeError, r"lengths as a sequence of ints"),
    ],
)
def test_lengths_that_are_none(lengths, kind, match):
    with pytest.raises(kind, match=match):
        nnx.remat_scan(apply, lengths=lengths)


def writes_shared(layer, x, shared):
    return layer(shared(x))


def changes_shape(layer, x, shared):
    return jnp.stack([layer(x)] * 2)


@pytest.mark.parametrize(
    ("body", "lengths", "kind", "match"),
    [
        (writes_shared, (2, 3), ValueError, r"nnx\.remat_scan\(writes_shared\) changed shared\.n"),
        (changes_shape, (2, 3), StructureError, r"carry is float32\[\] before .* float32\[2\] aft"),
        (writes_shared, (2, 2), ValueError, r"4 \(the size given\) and 6 \(layer\.n \(Variable\)"),
    ],
)
def test_bodies_that_do_not_fit(body, lengths, kind, match):
    model, shared = Layers(), Cell()
    run = nnx.remat_scan(body, lengths=lengths, in_axes=(0, nnx.Carry, None))
    with pytest.raises(kind, match=match):
        run(model, f32(1), shared)
    assert_isomorphic((model, shared), (Layers(), Cell()))


# Memory.

WIDTH, BATCH = 16, 256
CARRY = 4 * WIDTH * BATCH  # bytes


def wide(w, shared, x):
    for _ in range(2):  # so that a step keeps several times its carry
        x = jnp.sin(jnp.tanh(x @ w) @ shared)
    return x


class Wide(nnx.Module):
    def __init__(self, n):
        self.w = nnx.Param(jnp.ones((n, WIDTH, WIDTH), f32))
        self.shared = nnx.Param(jnp.ones((WIDTH, WIDTH), f32))


@functools.cache
def temp_bytes(n, lengths, policy=None):
    """Of a gradient through `n` layers; without lengths through a plain scan."""
    axes = nnx.StateAxes({nnx.PathContains("w"): 0, ...: None})

    def step(m, x):
        return wide(m.w[...], m.shared[...], x)

    if lengths is None:
        run = nnx.scan(step, in_axes=(axes, nnx.Carry), out_axes=nnx.Carry)
    else:
        run = nnx.remat_scan(step, lengths=lengths, policy=policy, in_axes=(axes, nnx.Carry))
    gradient = nnx.jit(nnx.grad(lambda m, x: run(m, x).sum()))
    compiled = gradient.lower(Wide(n), jnp.ones((BATCH, WIDTH), f32)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def temp_bytes_by_hand(n, lengths):
    def tower(ws, shared, x, lengths):
        def step(x, w):
            inner = lengths[1:]
            return (tower(w, shared, x, inner) if inner else wide(w, shared, x)), None

        return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), x, ws)[0]

    def loss(ws, shared, x):
        return tower(ws.reshape(*lengths, WIDTH, WIDTH), shared, x, lengths).sum()

    shapes = (n, WIDTH, WIDTH), (WIDTH, WIDTH), (BATCH, WIDTH)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    compiled = gradient.lower(*[jax.ShapeDtypeStruct(shape, f32) for shape in shapes]).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("lengths", [(64,), (8, 8), (4, 4, 4)], ids=str)
def test_memory_is_that_of_nested_loops_by_hand(lengths):
    assert temp_bytes(64, lengths) <= 1.05 * temp_bytes_by_hand(64, lengths)


def test_memory_grows_with_the_root_of_the_depth():
    single = [temp_bytes(n, (n,)) / CARRY for n in (16, 64)]
    nested = [temp_bytes(n * n, (n, n)) / CARRY for n in (4, 8)]
    assert 0.9 < (single[1] - single[0]) / 48 < 1.1  # one carry per layer
    assert 0.9 < (nested[1] - nested[0]) / 8 < 1.4  # one carry per step of each loop
    assert temp_bytes(64, None) / CARRY > 5 * 64  # all that each layer computed


def test_policy_stores_what_it_says():
    everything = jax.checkpoint_policies.everything_saveable
    assert temp_bytes(64, (8, 8), everything) > 4 * temp_bytes(64, (8, 8))

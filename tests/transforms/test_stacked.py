"""nnx.Stacked beside its oracle: a Python list of the same layers, in a loop."""

import functools
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError, TraceLevelError
from tests.transforms.samples import counted

f32 = jnp.float32
N, WIDTH = 4, 3
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, WIDTH)), f32)
FORMS = {"scan": {}, "remat": {"remat": True}, "nested": {"lengths": (2, 2)}}
all_forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
once_or_nested = pytest.mark.parametrize("form", [{}, FORMS["nested"]], ids=["scan", "nested"])


class Block(nnx.Module):
    """Parameters, batch statistics, a random stream and a counter."""

    def __init__(self, width, rngs):
        self.linear = nnx.Linear(width, width, rngs=rngs)
        self.norm = nnx.BatchNorm(width, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.calls = nnx.Variable(jnp.int32(0))

    def __call__(self, x, scale=None, *, double=False, counter=None, rngs=None):
        self.calls[...] += jnp.int32(1)
        if counter is not None:
            counter[...] = counter[...] * jnp.int32(2) + jnp.int32(1)
        y = self.dropout(self.norm(self.linear(x)), rngs=rngs) * f32(2 if double else 1)
        return x + (y if scale is None else scale * y)


def stacked(form=(), **options):
    return nnx.Stacked(Block, N, WIDTH, rngs=nnx.Rngs(0), **dict(form), **options)


def listed():
    """The layers one by one, each from one of the keys that the stack splits off."""
    keys = jax.random.split(nnx.Rngs(0)(), N)
    return [Block(WIDTH, nnx.Rngs(key)) for key in keys]


def loop(layers, x, *args, **kwargs):
    for layer in layers:
        x = layer(x, *args, **kwargs)
    return x


def linears(form=(), length=N, **options):
    """A small stack, for what does not depend on the layer."""
    return nnx.Stacked(nnx.Linear, length, WIDTH, WIDTH, rngs=nnx.Rngs(0), **dict(form), **options)


def numbers(value):
    is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
    return jax.random.key_data(value) if is_key else value


def close(found, expected):
    return np.allclose(numbers(found), numbers(expected), atol=1e-5)


def assert_same_layers(stack, layers):
    """Every Variable of each layer is what it is in the list, to rounding."""
    for number, (found, layer) in enumerate(zip(stack, layers, strict=True)):
        states = (nnx.to_flat_state(nnx.state(each)) for each in (found, layer))
        for (path, a), (same_path, b) in zip(*states, strict=True):
            assert path == same_path and close(a[...], b[...]), (number, path)


def test_layers_are_those_of_a_list():
    stack = stacked()
    assert_same_layers(stack, listed())
    assert len(stack) == N
    kernels, (first, second) = stack.block.linear.kernel[...], stack[1:3]
    assert np.array_equal(stack[-1].linear.kernel[...], kernels[-1])
    assert np.array_equal([first.linear.kernel[...], second.linear.kernel[...]], kernels[1:3])


def test_a_layer_taken_out_is_a_copy():
    stack = linears()
    stack[1].bias[...] += f32(1)
    assert np.array_equal(stack.block.bias[...], jnp.zeros((N, WIDTH)))
    stack.block.bias[1] = jnp.ones(WIDTH)
    assert np.array_equal(stack[1].bias[...], jnp.ones(WIDTH))


@functools.cache
def trained_in_a_loop():
    """The layers after a call in training, its value, and its gradients."""
    layers = listed()
    run = nnx.jit(nnx.value_and_grad(lambda m: (loop(m, X) ** 2).mean()))
    return layers, *run(layers)


@all_forms
def test_values_writes_and_gradients_are_those_of_the_loop(form):
    stack, (layers, expected, by_layer) = stacked(form), trained_in_a_loop()
    value, grads = nnx.jit(nnx.value_and_grad(lambda m: (m(X) ** 2).mean()))(stack)
    assert close(value, expected)
    for name in ("kernel", "bias"):
        each = [by_layer[n]["linear"][name][...] for n in range(N)]
        assert close(grads["block"]["linear"][name][...], jnp.stack(each))
    assert_same_layers(stack, layers)  # with statistics, counts of calls and of drawn keys


@all_forms
def test_further_arguments_are_those_of_the_loop(form):
    stack, layers = stacked(form), listed()
    counters, rngs = [nnx.Variable(jnp.int32(0)) for _ in range(2)], [nnx.Rngs(7), nnx.Rngs(7)]
    found = stack(X, f32(0.5), double=True, counter=counters[0], rngs=rngs[0])
    expected = loop(layers, X, f32(0.5), double=True, counter=counters[1], rngs=rngs[1])
    assert close(found, expected)
    assert int(counters[0][...]) == 2**N - 1  # each layer saw what those before it wrote
    assert int(rngs[0].default.count[...]) == int(rngs[1].default.count[...]) == N


class Recorder(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(rngs.normal(()))

    def __call__(self, x):
        h = self.perturb("h", self.w[...] * x)
        self.sow(nnx.Intermediate, "h", h)
        return jnp.sin(h)


@once_or_nested
def test_records_have_the_layers_in_front_and_gradients_are_those_of_the_loop(form):
    def unrolled(perturbations):
        x, seen = f32(1), []
        for w, p in zip(stack.block.w[...], perturbations, strict=True):
            seen.append(w * x + p)
            x = jnp.sin(seen[-1])
        return x, jnp.stack(seen)

    stack = nnx.Stacked(Recorder, N, rngs=nnx.Rngs(0), **form)
    _, sown, zeros = nnx.capture(stack, nnx.Intermediate, nnx.Perturbation)(f32(1))
    grads = jax.grad(lambda p: nnx.capture(stack, init=p)(f32(1)))(zeros)
    expected, seen = jax.grad(unrolled, has_aux=True)(jnp.zeros(N, f32))
    assert close(sown["block"]["h"][...][0], seen) and close(grads["block"]["h"][...], expected)


class Adding(nnx.Module):
    """Takes an argument of its own before the one that is handed on, and a cache."""

    def __init__(self):
        self.w = nnx.Param(f32(2))

    def __call__(self, own, x, cache):
        cache[...] += x
        return own + self.w[...] * x, x


@all_forms
def test_arguments_and_results_per_layer(form):
    axes = {"in_axes": (0, nnx.Carry, 0), "out_axes": (nnx.Carry, 0)}
    stack = nnx.Stacked(Adding, N, **axes, **form)
    own, cache = jnp.arange(N, dtype=f32), nnx.Cache(jnp.zeros(N, f32))
    last, seen = stack(own, f32(1), cache)
    expected = [f32(1)]
    for each in own:
        expected.append(each + f32(2) * expected[-1])
    assert float(last) == expected[-1] and np.array_equal(seen, jnp.stack(expected[:-1]))
    assert np.array_equal(cache[...], seen)


@once_or_nested
def test_repeated_and_equal_stacks_share_a_trace(form):
    class Scale(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(rngs.normal(()))

        def __call__(self, x, double=False):
            return call(self.w[...], x, double)

    call, runs = counted(lambda w, x, double: w * x * f32(2 if double else 1))
    first, second = (nnx.Stacked(Scale, N, rngs=nnx.Rngs(seed), **form) for seed in (0, 1))
    for stack in (first, second, first):
        for double in (False, True):
            stack(f32(1), double)
    assert len(runs) == 2  # one for each value of the flag
    jitted = nnx.jit(lambda m, x: m(x))
    for stack in (first, second, nnx.clone(first)):
        jitted(stack, f32(1))
    assert len(runs) == 3


def test_operations_are_named_by_the_parts_of_a_layer():
    class Net(nnx.Module):
        def __init__(self):
            make = lambda rngs: nnx.Sequential(nnx.Linear(3, 3, rngs=rngs), jnp.tanh)  # noqa: E731
            self.tower = nnx.Stacked(make, N, rngs=nnx.Rngs(0), lengths=(2, 2))

        def __call__(self, x):
            return self.tower(x)

    text = nnx.jit(lambda m, x: m(x)).lower(Net(), X).compile().as_text()
    (name,) = set(re.findall(r'op_name="([^"]*dot_general)"', text))
    inside = r"jit\(<lambda>\)/Net/tower/block/while/.*/while/.*/layers\[0\]/dot_general"
    assert re.fullmatch(inside, name)


def named(**options):
    init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
    return linears(kernel_init=init, **options)


def test_layer_axis_is_named_in_sharding_metadata():
    stack = named(partition_name="layers")
    spec = nnx.get_partition_spec(nnx.state(stack))["block"]["kernel"].get_value()
    assert spec == jax.P("layers", None, "model")
    stack(X)
    assert stack.block.kernel.out_sharding == ("layers", None, "model")
    assert stack[0].kernel.out_sharding == (None, "model")
    assert named().block.kernel.out_sharding == (None, None, "model")


def test_layer_axis_has_its_name_when_it_goes():
    class Hooked(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(
                f32(2), on_remove_axis=lambda v, axis, name: gone.append((axis, name))
            )

        def __call__(self, x):
            return self.w[...] * x

    gone = []
    assert float(nnx.Stacked(Hooked, 3, partition_name="layers")(f32(1))) == 8
    assert gone == [(0, "layers")]


def test_abstract_stack_has_shapes_and_names():
    stack = nnx.eval_shape(lambda: named(partition_name="layers"))
    kernel = stack.block.kernel
    assert kernel.get_value().shape == (N, WIDTH, WIDTH) and kernel.out_sharding[0] == "layers"
    assert nnx.eval_shape(lambda m, x: m(x), stack, X).shape == X.shape


COPIES = {
    "merge": lambda m: nnx.merge(*nnx.split(m)),
    "clone": nnx.clone,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "tree": lambda m: jax.tree.map(lambda x: x, m),
}


@pytest.mark.parametrize("copy", COPIES.values(), ids=COPIES)
def test_copies_are_equal_and_their_own(copy):
    stack = linears({"lengths": (2, 2)}, partition_name="layers")
    other = copy(stack)
    assert nnx.graphdef(other) == nnx.graphdef(stack) and close(other(X), stack(X))
    other.block.bias[...] += f32(1)
    assert not close(other.block.bias[...], stack.block.bias[...])


def test_train_and_eval_reach_all_layers():
    stack = stacked()
    stack.eval()
    assert np.array_equal(stack(X), stack(X)) and stack[0].dropout.deterministic
    stack.train()
    assert not np.array_equal(stack(X), stack(X))


def test_optimizer_trains_all_layers():
    optax = pytest.importorskip("optax")
    stack = linears({"remat": True})
    optimizer = nnx.Optimizer(stack, optax.sgd(0.1), wrt=nnx.Param)
    grads = nnx.grad(lambda m: m(X).mean())(stack)
    expected = jax.tree.map(lambda p, g: p - f32(0.1) * g, nnx.state(stack), grads)
    optimizer.update(stack, grads)
    assert all(map(close, jax.tree.leaves(nnx.state(stack)), jax.tree.leaves(expected)))


def test_ensembles_and_stacks_of_stacks():
    def make(rngs):
        return nnx.Stacked(nnx.Linear, 2, WIDTH, WIDTH, rngs=rngs)

    outer = nnx.Stacked(make, 3, rngs=nnx.Rngs(0))
    assert outer.block.block.kernel.shape == (3, 2, WIDTH, WIDTH)
    assert close(outer(X), loop(outer, X))
    models = nnx.split_rngs(splits=3)(nnx.vmap(make))(nnx.Rngs(0))
    found = nnx.vmap(lambda m, x: m(x), in_axes=(0, None))(models, X)
    assert close(found, jnp.stack([inner(X) for inner in outer]))


def test_streams_that_a_layer_keeps_are_its_own():
    class Keeping(nnx.Module):
        def __init__(self, rngs, again):
            assert rngs is again
            self.rngs = rngs

        def __call__(self, x):
            return x + self.rngs.normal(x.shape)

    rngs = nnx.Rngs(0)
    stack = nnx.Stacked(Keeping, N, rngs, again=rngs)
    assert stack.block.rngs is not rngs and int(rngs.default.count[...]) == 1
    keys = jax.random.split(nnx.Rngs(0)(), N)
    assert close(stack(X), X + sum(nnx.Rngs(key).normal(X.shape) for key in keys))


def test_layers_without_random_streams_are_equal():
    stack = nnx.Stacked(Adding, N, in_axes=(None, nnx.Carry, None), out_axes=(nnx.Carry, 0))
    last, _ = stack(f32(1), f32(1), nnx.Cache(f32(0)))
    assert np.array_equal(stack.block.w[...], [2] * N) and float(last) == 2 ** (N + 1) - 1


# Errors.


def test_constructor_that_fails_leaves_the_streams_as_they_were():
    def fails(rngs):
        rngs.params()
        raise RuntimeError("stop")

    rngs = nnx.Rngs(params=0, dropout=1)
    rngs.params()
    with pytest.raises(RuntimeError, match="stop"):
        nnx.Stacked(fails, 3, rngs)
    assert int(rngs.params.count[...]) == 1 and int(rngs.dropout.count[...]) == 0


class Holding(nnx.Module):
    def __init__(self, part):
        self.part = part

    def __call__(self, x):
        return self.part(x)


def one():
    return nnx.Linear(2, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: nnx.Stacked(one(), 3), TypeError, "was given a Linear. Give the class"),
        (lambda: nnx.Stacked(dict, 3), TypeError, "expected dict to make a Module .* found dict"),
        (lambda: nnx.Stacked(nnx.Pytree, 3), TypeError, "expected Pytree to make a Module that"),
        (lambda: nnx.Stacked(Holding, 0, 1), ValueError, "positive number of layers, found 0"),
        (lambda: nnx.Stacked(Holding, 3, one()), TraceLevelError, "shared? is given to each call"),
        (lambda: linears(lengths=(2, 3)), ValueError, r"4 layers, but lengths=\(2, 3\) are for 6"),
        (lambda: linears(lengths=4), TypeError, "nnx.Stacked expected lengths as a sequence of"),
        (lambda: linears(remat="dots"), TypeError, "True, False or one of jax.checkpoint_polic"),
        (lambda: linears(in_axes=(0,)), ValueError, r"in_axes is \(0,\)\. Give a tuple with nnx"),
        (lambda: linears(out_axes=0), ValueError, r"out_axes is 0\. Give a tuple with nnx\.Carry"),
        (lambda: linears()[4], IndexError, "Stacked of 4 layers has no layer 4"),
        (lambda: linears()(), TypeError, "without an argument"),
        (lambda: linears(in_axes=(nnx.Carry, 0))(X), TypeError, "the call has 1 positional"),
        (
            lambda: linears(in_axes=(nnx.Carry, 0))(X, X),
            ValueError,
            r"4 \(the size given\) and 5 \(per_layer\[0\]",
        ),
        (
            lambda: nnx.Stacked(nnx.Linear, 3, 3, 4, rngs=nnx.Rngs(0))(X),
            StructureError,
            r"carry is float32\[5,3\] before the step and float32\[5,4\] after",
        ),
    ],
)
def test_what_cannot_be(make, kind, match):
    with pytest.raises(kind, match=match):
        make()


# Memory.


@all_forms
def test_backward_pass_needs_the_memory_of_plain_jax(form):
    make = lambda rngs: nnx.Sequential(nnx.Linear(32, 32, rngs=rngs), jnp.tanh, jnp.sin)  # noqa: E731
    stack, x = nnx.Stacked(make, 9, rngs=nnx.Rngs(0), **_of_nine(form)), jnp.ones((64, 32), f32)

    def tower(weights, x, lengths):
        def step(x, w):
            if lengths[1:]:
                return tower(w, x, lengths[1:]), None
            return jnp.sin(jnp.tanh(x @ w[0] + w[1][None])), None

        step = jax.checkpoint(step, prevent_cse=False) if form else step
        return jax.lax.scan(step, x, weights)[0]

    def loss(weights, x):
        lengths = _of_nine(form).get("lengths", (9,))
        by_loop = jax.tree.map(lambda w: w.reshape(*lengths, *w.shape[1:]), weights)
        return tower(by_loop, x, lengths).sum()

    linear = stack.block.layers[0]
    ours = nnx.jit(nnx.value_and_grad(lambda m, x: m(x).sum())).lower(stack, x).compile()
    raw = jax.jit(jax.value_and_grad(loss))
    raw = raw.lower((linear.kernel[...], linear.bias[...]), x).compile()
    sizes = [each.memory_analysis().temp_size_in_bytes for each in (ours, raw)]
    assert sizes[0] <= 1.05 * sizes[1]


def _of_nine(form):
    return {"lengths": (3, 3)} if "lengths" in form else form

"""nnx.scan beside what it shares with vmap (test_mapped.py): carries, loops, names, memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.transforms.samples import counted
from tests.transforms.test_mapped import Bank, Cell

f32 = jnp.float32
one = jnp.float32(1)
xs = jnp.arange(3, dtype=f32)
over = functools.partial(nnx.scan, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)


def adding(carry, x):
    return carry + x, carry


@pytest.mark.parametrize(
    "options", [{}, {"reverse": True}, {"unroll": 2}, {"unroll": True}, {"length": 3}], ids=str
)
def test_equals_lax_scan(options):
    expected = jax.lax.scan(adding, f32(1), xs, **options)
    found = nnx.scan(adding, **options)(f32(1), xs)
    assert all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("carry", [nnx.Carry, nnx.Carry()], ids=["class", "instance"])
@pytest.mark.parametrize("sequence", [tuple, list])
def test_carry_in_any_position(carry, sequence):
    f = nnx.scan(
        lambda x, y, c: (c + x * y, c),
        in_axes=sequence((0, 0, carry)),
        out_axes=sequence((carry, 0)),
    )
    last, seen = f(xs, xs, f32(1))
    assert float(last) == 6 and np.array_equal(seen, [1, 1, 2])
    g = nnx.scan(lambda c, x: (x, c + x), in_axes=(carry, 0), out_axes=(0, carry))
    assert float(g(f32(1), xs)[1]) == 4


def test_carry_alone():
    double = nnx.scan(lambda c: c + c, in_axes=nnx.Carry, out_axes=nnx.Carry, length=4)
    assert float(double(one)) == 16
    with pytest.raises(ValueError, match=r"in_axes is nnx\.Carry, .* but the call has 2"):
        double(one, one)


def test_objects_are_carried_in_any_pytree():
    def f(carry, x):
        return {"m": carry["m"], "x": carry["m"](carry["x"])}, x

    cell = Cell()
    last, _ = nnx.scan(f)({"m": cell, "x": one}, xs)
    assert last["m"] is cell and float(last["x"]) == 8 and float(cell.n[...]) == 3


def test_carry_inside_of_state_axes():
    bank = Bank()
    bank.n[...] = jnp.zeros(3, f32)
    axes = nnx.StateAxes({nnx.Param: 0, ...: nnx.Carry})
    y = nnx.scan(lambda m, x: m(x), in_axes=(axes, 0), out_axes=0)(bank, xs)
    assert np.array_equal(y, [0, 2, 6]) and np.array_equal(bank.n[...], [3, 3, 3])


def test_variable_array_and_rngs_are_carried():
    def add(variable, x):
        variable[...] += x
        return variable, variable[...]

    variable = nnx.Variable(f32(0))
    last, seen = nnx.scan(add)(variable, xs)
    assert last is variable and float(variable[...]) == 3 and np.array_equal(seen, [0, 1, 3])
    rngs, loop = nnx.Rngs(0), nnx.Rngs(0)
    drawn = nnx.scan(lambda r, _: (r, jax.random.uniform(r())))(rngs, xs)[1]
    assert np.array_equal(drawn, jnp.stack([jax.random.uniform(loop()) for _ in xs]))
    assert int(rngs.default.count[...]) == int(loop.default.count[...]) == 3


def test_carried_state_may_be_the_same_or_a_new_one():
    def same(state, x):
        state["n"][...] += x
        return state, None

    state = nnx.state(Cell())
    assert nnx.scan(same)(state, xs)[0] is state and float(state["n"][...]) == 3

    def new(state, x):
        return jax.tree.map(lambda a: a + x, state), None

    last, _ = nnx.scan(new)(state, xs)
    assert last is not state and float(last["n"][...]) == 6 and float(state["n"][...]) == 3

    def more(state, x):
        return nnx.State({"n": state["n"], "other": nnx.Param(x)}), None

    with pytest.raises(nnx.errors.StructureError, match=r"with \.n, \.w before .* \.n, \.other"):
        nnx.scan(more)(state, xs)


@pytest.mark.parametrize("carry", [0, 0.0, np.float32(0), np.zeros((), np.float32)], ids=repr)
def test_scalars_are_carried_as_jax_does(carry):
    def f(c, x):
        return c + 1, x

    expected = jax.lax.scan(f, carry, xs)[0]
    found = nnx.scan(f)(carry, xs)[0]
    assert found == expected and found.dtype == expected.dtype
    assert nnx.scan(adding)(0.0, xs)[0].dtype == f32


def test_weakly_typed_variable_becomes_strong():
    variable = nnx.Variable(0.0)

    def f(v, x):
        v.value = v[...] + x
        return v, x

    nnx.scan(f)(variable, xs)
    assert float(variable[...]) == 3


def test_none_is_scanned_and_carried():
    last, out = nnx.scan(lambda c, x: ((c[0] + one, None), None), length=3)((f32(0), None), None)
    assert float(last[0]) == 3 and last[1] is None and out is None


def test_no_step_at_all():
    cell = Cell()
    last, seen = nnx.scan(lambda m, x: (m, m(x)))(cell, jnp.zeros(0, f32))
    assert last is cell and seen.shape == (0,) and float(cell.n[...]) == 0


def test_flags_stay_python_values():
    def f(c, up, mode, x):
        return (c + x if up else c - x), mode == "a"

    run = nnx.scan(f, in_axes=(nnx.Carry, None, None, 0))
    for up, mode, sign in ((True, "a", 1), (False, "b", -1), (True, "b", 1)):
        last, same = run(f32(0), up, mode, xs)
        assert float(last) == sign * 3 and same.all() == (mode == "a")


def test_methods_are_scanned():
    class Model(nnx.Module):
        def __init__(self):
            self.w, self.n = nnx.Param(f32(2)), nnx.Variable(f32(0))

        def step(self, carry, x):
            return carry + self.w[...] * x, carry

        @nnx.scan(in_axes=(nnx.StateAxes({nnx.Param: None, ...: nnx.Carry}), nnx.Carry, 0))
        def counting(self, carry, x):
            self.n[...] += one
            return carry + self.w[...] * x, carry

    model = Model()
    assert float(nnx.scan(model.step)(f32(0), xs)[0]) == 6
    assert float(model.counting(f32(0), xs)[0]) == 6 and float(model.n[...]) == 3


# Errors, each with an untouched caller.


def writes(value):
    def f(m, x):
        m.n.value = value(x)
        return m, x

    return f


def carries(make):
    return lambda m, x: (make(m, x), x)


def attribute(change):
    def f(m, x):
        change(m, x)
        return m, x

    return f


def set_static(m, x):
    m.kind = "b"


def add_attribute(m, x):
    m.new = nnx.Param(x)


def delete_attribute(m, x):
    del m.n


def replace_object(m, x):
    m.inner = Cell()


def set_metadata(m, x):
    m.n.set_metadata("tag", 1)


def append(m, x):
    m.items.append(nnx.Param(x))


@pytest.mark.parametrize(
    ("body", "match"),
    [
        (writes(lambda x: jnp.ones(2)), r"m\.n \(Variable\) is float32\[\] before .* float32\[2\]"),
        (writes(lambda x: jnp.int32(1)), r"m\.n \(Variable\) is float32\[\] before .* int32\[\]"),
        (writes(lambda x: (x, x)), r"m\.n \(Variable\) has structure \* before .* \(\*, \*\) af"),
        (carries(lambda m, x: (m, m)), r"keep its structure\. Before .* \*, after it \(\*, \*\)"),
        (carries(lambda m, x: Cell()), r"carry is another object after the step"),
        (carries(lambda m, x: m.inner), r"carry is another object after the step"),
        (carries(lambda m, x: x), r"carry is an object before the step and an array after"),
        (attribute(set_static), r"m\.kind was changed from 'a' to 'b' in the loop"),
        (attribute(add_attribute), r"m\.new \(Param\) was added"),
        (attribute(delete_attribute), r"m\.n \(Variable\) was removed"),
        (attribute(replace_object), r"m\.inner was changed from Cell to another"),
        (attribute(set_metadata), r"metadata of m\.n was changed from Meta\(\) to Meta\(tag=1\)"),
        (attribute(append), r"m\.items\[0\] \(Param\) was added"),
    ],
)  # fmt: skip
def test_what_may_not_change(body, match):
    def make():
        cell = Cell()
        cell.inner, cell.items, cell.kind = Cell(), [], "a"
        return cell

    cell = make()
    with pytest.raises(nnx.errors.StructureError, match=match):
        nnx.scan(body)(cell, xs)
    assert_isomorphic(cell, make())


@pytest.mark.parametrize(
    ("value", "match"),
    [
        (lambda c: jnp.int32(1), r"carry\['a'\]\[0\] is float32\[\] before .* int32\[\] after"),
        (lambda c: jnp.ones(2), r"carry\['a'\]\[0\] is float32\[\] before .* float32\[2\] after"),
        (lambda c: Cell(), r"carry\['a'\]\[0\] is an array before the step and an object after"),
    ],
)
def test_carried_array_that_changes(value, match):
    with pytest.raises(nnx.errors.StructureError, match=match):
        nnx.scan(lambda c, x: ({"a": (value(c),)}, x))({"a": (f32(0),)}, xs)


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        (((nnx.Carry, nnx.Carry), nnx.Carry), r"with 2 times nnx\.Carry"),
        (((nnx.Carry, 0), 0), r"in_axes is \(nnx\.Carry, 0\) and out_axes is 0; one has"),
        ((((nnx.Carry, 0), 0), nnx.Carry), r"inside of an entry"),
        ((0, nnx.StateAxes({...: nnx.Carry})), r"out_axes has nnx\.Carry inside of"),
    ],
)
def test_carries_that_do_not_fit(axes, match):
    with pytest.raises(ValueError, match=match):
        nnx.scan(lambda c, x: (c, x), in_axes=axes[0], out_axes=axes[1])


@pytest.mark.parametrize("make", [lambda x: x, nnx.Param], ids=["array", "object"])
def test_results_of_each_step_need_an_axis(make):
    with pytest.raises(ValueError, match=r"out_axes has no axis for .*the result"):
        nnx.scan(lambda c, x: (c, make(x)), out_axes=(nnx.Carry, None))(one, xs)


def test_carried_and_sliced_at_once():
    bank = Bank()
    with pytest.raises(
        nnx.errors.StructureError, match=r"nnx\.Carry in one place and 0 in the oth"
    ):
        nnx.scan(lambda c, m: (c, one))(bank, bank)


# Nestings.

AROUND = {
    "eager": lambda f: f,
    "jit": nnx.jit,
    "remat": nnx.remat,
    "jit of remat": lambda f: nnx.jit(nnx.remat(f)),
    "remat of jit": lambda f: nnx.remat(nnx.jit(f)),
}
around = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


class Stack(nnx.Module):
    """Layers that are scanned, and a counter that is carried."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(2, 2, rngs=rngs))
        self.layers = nnx.split_rngs(splits=3)(make)(rngs)
        self.count = nnx.Variable(f32(0))

    def __call__(self, x):
        def body(carry, layer):
            count, x = carry
            count[...] += one
            return (count, jnp.tanh(layer(x)))

        return over(body)((self.count, x), self.layers)[1]

    def by_hand(self, x):
        weights = self.layers.kernel[...], self.layers.bias[...]
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] + w[1][None]), None), x, weights)[0]


@around
def test_layers_of_a_model(around):
    model, x = Stack(nnx.Rngs(0)), jnp.ones((4, 2), f32)
    assert np.allclose(around(lambda m, x: m(x))(model, x), model.by_hand(x), atol=1e-6)
    assert float(model.count[...]) == 3


@around
def test_gradient_through_layers(around):
    model, x = Stack(nnx.Rngs(0)), jnp.ones((4, 2), f32)

    def by_hand(kernel, bias):
        step = lambda x, w: (jnp.tanh(x @ w[0] + w[1][None]), None)  # noqa: E731
        return jax.lax.scan(step, x, (kernel, bias))[0].sum()

    expected = jax.grad(by_hand)(model.layers.kernel[...], model.layers.bias[...])
    grads = around(lambda m, x: nnx.grad(lambda m: m(x).sum())(m))(model, x)
    assert np.allclose(grads["layers"]["kernel"][...], expected, atol=1e-5)
    assert float(model.count[...]) == 3


PLAIN = {
    "jax.jit": lambda f, x: jax.jit(f)(x),
    "jax.vmap": lambda f, x: jax.vmap(f)(x),
    "jax.lax.map": lambda f, x: jax.lax.map(f, x, batch_size=2),
    "jax.checkpoint": lambda f, x: jax.checkpoint(f)(x),
    "jax.linearize": lambda f, x: jax.linearize(f, x)[0],
}


@pytest.mark.parametrize("plain", PLAIN.values(), ids=PLAIN)
def test_plain_transforms_around_a_closed_over_model(plain):
    class Reader(Stack):
        def __call__(self, x):
            return over(lambda x, layer: jnp.tanh(layer(x)))(x, self.layers)

    model, x = Reader(nnx.Rngs(0)), jnp.ones((4, 2), f32)
    assert np.allclose(plain(model, x), model.by_hand(x), atol=1e-5)
    y, _ = jax.lax.scan(lambda x, _: (model(x), None), x, None, length=2)
    assert np.allclose(y, model.by_hand(model.by_hand(x)), atol=1e-5)


@around
def test_training_steps_are_the_loop(around):
    optax = pytest.importorskip("optax")

    def build():
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

    def step(carry, x):
        model, optimizer = carry
        loss, grads = nnx.value_and_grad(lambda m: ((m(x) - one) ** 2).mean())(model)
        optimizer.update(model, grads)
        return carry, loss

    batches = jnp.asarray(np.random.default_rng(0).normal(size=(4, 5, 2)), f32)
    looped, scanned = build(), build()
    losses = [step(looped, batch)[1] for batch in batches]
    last, found = around(nnx.scan(step))(scanned, batches)
    assert last[0] is scanned[0] and last[1] is scanned[1] and int(scanned[1].step[...]) == 4
    assert np.allclose(found, jnp.stack(losses), atol=1e-6)
    assert np.allclose(scanned[0].kernel[...], looped[0].kernel[...], atol=1e-6)


@around
def test_sown_values_are_stacked(around):
    class Block(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(2, 2, rngs=rngs)

        def __call__(self, x):
            y = self.linear(x)
            self.sow(nnx.Intermediate, "h", y)
            return y

    class Net(nnx.Module):
        def __init__(self, rngs):
            self.blocks = nnx.split_rngs(splits=3)(nnx.vmap(Block))(rngs)

        def __call__(self, x):
            return nnx.scan(lambda x, block: (block(x),) * 2)(x, self.blocks)

    model, x = Net(nnx.Rngs(0)), jnp.ones(2, f32)
    (y, ys), sown = nnx.capture(around(lambda m, x: m(x)), nnx.Intermediate)(model, x)
    (found,) = jax.tree.leaves(sown)
    assert np.array_equal(found, ys) and np.array_equal(found[-1], y)


def test_vmap_of_scan_of_vmap():
    variable = nnx.Param(jnp.arange(24, dtype=f32).reshape(2, 3, 4))

    def inner(x, p):
        p[...] += one
        return x + p[...]

    run = nnx.vmap(over(nnx.vmap(inner)), in_axes=(None, 0))
    expected = (variable[...] + one).sum(1)
    assert np.array_equal(run(jnp.zeros(4, f32), variable), expected)
    assert float(variable[...].sum()) == float(jnp.arange(24).sum()) + 24


# Traces, names, memory.


def test_eager_calls_of_equal_structure_share_a_trace():
    f, runs = counted(lambda x, m: m(x))
    run, bank = over(f), Bank()
    for each in (bank, bank, Bank(), bank):
        run(one, each)
    assert len(runs) == 1 and np.array_equal(bank.n[...], [3, 3, 3])


def test_each_value_of_a_flag_keeps_its_trace():
    f, runs = counted(lambda c, up, x: c + x if up else c - x)
    run = nnx.scan(f, in_axes=(nnx.Carry, None, 0), out_axes=nnx.Carry)
    assert [float(run(f32(0), up, xs)) for up in (True, False) * 2] == [3, -3, 3, -3]
    assert len(runs) == 2


def test_closed_over_objects_are_read_anew():
    run, found = nnx.scan(lambda c, x: (c + model.w[...], x)), []
    for model in (Cell(1.0), Cell(2.0), Cell(3.0)):  # noqa: B007 (the closure reads it)
        found.append(float(run(f32(0), xs)[0]))
    assert found == [3, 6, 9]


@pytest.mark.filterwarnings("ignore:.*is traced again")
def test_changed_value_of_a_closed_over_object_is_seen():
    cell, found = Cell(1.0), []
    run = nnx.scan(lambda c, x: (c + cell.w[...], x))
    for value in (1, 5):
        cell.w[...] = f32(value)
        found.append(float(run(f32(0), xs)[0]))
    assert found == [3, 15]


def test_closed_over_objects_of_a_running_trace_are_read_anew():
    @nnx.jit
    def f(m):
        run = nnx.scan(lambda c, x: (c + m.w[...], x))
        first = run(f32(0), xs)[0]
        m.w[...] += one
        return first, run(f32(0), xs)[0]

    assert [float(x) for x in f(Cell(1.0))] == [3, 6]


def test_names_of_scanned_layers():
    model, x = Stack(nnx.Rngs(0)), jnp.ones((1, 2), f32)
    text = nnx.jit(lambda m, x: m(x)).lower(model, x).compile().as_text()
    names = set(re.findall(r'op_name="([^"]*)/while/body/[^"]*dot_general"', text))
    assert {name.split("/")[1] for name in names} == {"Stack"}


def test_backward_pass_keeps_no_copies_of_parameters():
    def layer(x, w, shared):
        return jnp.tanh(x @ w @ shared)

    class Net(nnx.Module):
        def __init__(self):
            self.ws, self.shared = nnx.Param(jnp.ones((6, 64, 64))), nnx.Param(jnp.ones((64, 64)))

        def __call__(self, x):
            body = lambda x, w, shared: layer(x, w[...], shared[...])  # noqa: E731
            axes = (nnx.Carry, 0, None)
            return nnx.scan(body, in_axes=axes, out_axes=nnx.Carry)(x, self.ws, self.shared)

    def by_hand(parameters, x):
        ws, shared = parameters
        return jax.lax.scan(lambda x, w: (layer(x, w, shared), None), x, ws)[0].sum()

    model, x = Net(), jnp.ones((8, 64), f32)
    ours = nnx.jit(nnx.value_and_grad(lambda m, x: m(x).sum())).lower(model, x).compile()
    raw = jax.jit(jax.value_and_grad(by_hand))
    raw = raw.lower((model.ws[...], model.shared[...]), x).compile()
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (ours, raw)]
    assert sizes[0] <= 1.05 * sizes[1]

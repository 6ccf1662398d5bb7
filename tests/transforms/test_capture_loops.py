"""Captures through loops and branches; the oracle is the same program in Python."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite.errors import StructureError
from tests.transforms.samples import Function, counted, through_grad

X = jnp.array([1.0, 2.0], jnp.float32)
STEPS = 3


def add(total: Any, value: Any) -> Any:
    return total + value


class Cell(nnx.Module):
    """Sows what it gets, joined by `reduce`, perturbs and returns the double."""

    def __init__(self, reduce: Function = add, init: Callable[[], Any] = lambda: 0.0) -> None:
        self.w = nnx.Param(jnp.float32(2))
        self.reduce, self.init = reduce, init

    def __call__(self, x: jax.Array) -> jax.Array:
        self.sow(nnx.Intermediate, "total", x, reduce_fn=self.reduce, init_fn=self.init)
        return self.perturb("p", self.w[...] * x)


class Net(nnx.Module):
    def __init__(self, *args: Any) -> None:
        self.cells = [Cell(*args)]

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.cells[0](x)


def call(net: Any, x: jax.Array) -> jax.Array:
    return net(x)


# Each makes a function of (net, x) that runs another one STEPS times, x going through.


def fori(f: Function) -> Function:
    body = lambda i, value: (value[0], f(*value))  # noqa: E731
    return lambda net, x: nnx.fori_loop(0, STEPS, body, (net, x))[1]


def while_(f: Function) -> Function:
    def run(net: Any, x: jax.Array) -> jax.Array:
        body = lambda value: (value[0] + 1, value[1], f(*value[1:]))  # noqa: E731
        return nnx.while_loop(lambda value: value[0] < STEPS, body, (0, net, x))[2]

    return run


def unrolled(f: Function) -> Function:
    def run(net: Any, x: jax.Array) -> jax.Array:
        for _ in range(STEPS):
            x = f(net, x)
        return x

    return run


def in_cond(f: Function) -> Function:
    return lambda net, x: nnx.cond(x.sum() > 0, f, lambda net, x: f(net, x), net, x)


LOOPS = {"fori": fori, "while": while_}
AROUND: dict[str, Callable[[Function], Function]] = {
    "alone": lambda f: f,
    "jit": nnx.jit,
    "remat": nnx.remat,
    "grad": through_grad,
    "cond": in_cond,
}
loops = pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
around = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)
jit_around = pytest.mark.parametrize("around", [lambda f: f, nnx.jit], ids=["alone", "jit"])


def total_of(f: Function, net: Any, x: jax.Array = X) -> Any:
    return nnx.capture(f, nnx.Intermediate)(net, x)[1]["cells"][0]["total"].get_value()


# Totals.


@loops
@around
def test_a_total_is_that_of_the_unrolled_loop(loop: Any, around: Any) -> None:
    net = Net(lambda total, x: 2 * total + x, lambda: jnp.ones(()))
    expected = total_of(unrolled(call), net)
    np.testing.assert_array_equal(total_of(around(loop(call)), net), expected)
    np.testing.assert_array_equal(total_of(loop(around(call)), net), expected)


PAIRS = [
    *((a, "alone", b) for a in LOOPS for b in LOOPS),
    *(("fori", between, "while") for between in AROUND if between != "alone"),
]


@pytest.mark.parametrize(("outer", "between", "inner"), PAIRS)
def test_a_total_of_nested_loops_is_exact(outer: str, between: str, inner: str) -> None:
    net = Net(lambda total, x: 2 * total + x, lambda: jnp.ones(()))
    lifted = LOOPS[outer](AROUND[between](LOOPS[inner](call)))
    expected = total_of(unrolled(unrolled(call)), net)
    np.testing.assert_array_equal(total_of(lifted, net), expected)


@around
def test_a_total_goes_on_from_what_was_sown_before(around: Any) -> None:
    net = Net(lambda total, x: 2 * total + x, lambda: 1.0)

    def program(run: Function) -> Function:
        return lambda net, x: run(net, net(run(net, run(net, net(x)))))

    expected = total_of(program(unrolled(call)), net)
    lifted = around(fori(call))
    np.testing.assert_array_equal(total_of(program(lifted), net), expected)


def test_calls_of_one_jitted_loop_share_a_trace_once_there_is_a_total() -> None:
    f, traces = counted(fori(call))
    jitted, net = nnx.jit(f), Net()

    def program(net: Any, x: jax.Array) -> jax.Array:
        for _ in range(4):
            x = jitted(net, x)
        return x

    assert float(total_of(program, net)[0]) == 2.0**12 - 1
    assert float(total_of(program, net)[0]) == 2.0**12 - 1
    assert len(traces) == 2


def test_mapped_loops_have_a_total_each() -> None:
    net = Net()
    expected = total_of(unrolled(call), net)
    rows = jnp.stack([X, 2 * X])
    mapped = nnx.vmap(fori(call), in_axes=(None, 0))
    np.testing.assert_array_equal(total_of(mapped, net, rows), [expected, 2 * expected])
    scanned = nnx.scan(fori(call), in_axes=(None, 0), out_axes=0)
    np.testing.assert_array_equal(total_of(scanned, net, rows), [expected, 2 * expected])


@pytest.mark.parametrize("init", [lambda: 1.0, lambda: jnp.ones(2)], ids=["scalar", "array"])
def test_mapped_values_are_joined_to_a_start_of_any_rank(init: Any) -> None:
    mapped = nnx.vmap(call, in_axes=(None, 0))
    rows = jnp.stack([X, 2 * X, 3 * X])
    np.testing.assert_array_equal(total_of(mapped, Net(add, init), rows), 1 + rows)


@loops
def test_the_start_takes_the_shape_and_dtype_of_what_is_sown(loop: Any) -> None:
    mapped, net = nnx.vmap(call, in_axes=(None, 0)), Net()
    net.cells[0].w.set_value(jnp.bfloat16(2))
    found = total_of(loop(mapped), net, jnp.ones((2, 3), jnp.bfloat16))
    assert found.shape == (2, 3) and found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, np.full((2, 3), 7))


@loops
def test_a_loop_of_no_steps_gives_what_init_fn_gives(loop: Any) -> None:
    net = Net(jnp.maximum, lambda: -jnp.inf)
    none = lambda net, x: nnx.fori_loop(0, 0, lambda i, v: (v[0], call(*v)), (net, x))[1]  # noqa: E731
    found = total_of(none, net)
    np.testing.assert_array_equal(found, [-np.inf, -np.inf])
    np.testing.assert_array_equal(total_of(loop(call), net), [4, 8])


@loops
def test_a_total_may_be_a_tree(loop: Any) -> None:
    net = Net(
        lambda total, x: {"n": total["n"] + 1, "most": jnp.maximum(total["most"], x.sum())},
        lambda: {"n": 0, "most": -jnp.inf},
    )
    found = total_of(loop(call), net)
    assert (int(found["n"]), float(found["most"])) == (STEPS, 12)


@loops
def test_totals_of_several_modules_and_names(loop: Any) -> None:
    def step(net: Any, x: jax.Array) -> jax.Array:
        net["a"].sow(nnx.Intermediate, "n", 1, reduce_fn=add, init_fn=lambda: 0)
        net["a"].sow(nnx.Cache, "n", 10, reduce_fn=add, init_fn=lambda: 0)
        Cell()(x)  # is no part of the net
        return net["b"](net["a"](x))

    net = nnx.Dict(a=Cell(), b=Cell())
    _, found, cached = nnx.capture(loop(step), nnx.Intermediate, nnx.Cache)(net, X)
    _, expected, _ = nnx.capture(unrolled(step), nnx.Intermediate, nnx.Cache)(net, X)
    assert (int(found["a"]["n"][...]), int(cached["a"]["n"][...])) == (STEPS, 10 * STEPS)
    for name in "ab":
        np.testing.assert_array_equal(found[name]["total"][...], expected[name]["total"][...])
    np.testing.assert_array_equal(found["Cell"]["total"][...], expected["a"]["total"][...])


@loops
def test_gradients_flow_through_totals(loop: Any) -> None:
    net = Net()

    def of_total(w: jax.Array) -> jax.Array:
        twin = nnx.clone(net, share=True)
        twin.cells[0].w[...] = w
        return total_of(loop(call), twin).sum()

    _, tangent = jax.jvp(of_total, (jnp.float32(2),), (jnp.float32(1),))
    assert float(tangent) == 3 + 3 * 2 * 2  # of 3 * (1 + w + w ** 2)
    if loop is fori:
        assert float(jax.grad(of_total)(jnp.float32(2))) == float(tangent)


def test_a_body_is_traced_once_more_for_a_capture_and_no_more() -> None:
    f, traces = counted(call)
    run, net = fori(f), Net()
    run(net, X)
    assert len(traces) == 1
    for _ in range(3):
        total_of(run, net)
    assert len(traces) == 3
    run(net, X)
    assert len(traces) == 3


def test_sow_and_perturb_cost_nothing_without_a_capture() -> None:
    class Plain(nnx.Module):
        def __init__(self) -> None:
            self.w = nnx.Param(jnp.float32(2))

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.w[...] * x

    for loop in LOOPS.values():
        plain, watched = (jax.make_jaxpr(loop(call))(cls(), X) for cls in (Plain, Cell))
        assert str(plain) == str(watched)


# What has no room in a loop.


@loops
@jit_around
def test_growth_is_an_error_that_names_module_and_name(loop: Any, around: Any) -> None:
    class Growing(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow(nnx.Intermediate, "h", x)
            return x

    net = nnx.Dict(inner=Growing())
    message = r"model\.inner \(Growing\) sows 'h' inside a loop whose number of steps is not known"
    with pytest.raises(StructureError, match=message + ".*reduce_fn.*nnx.scan"):
        nnx.capture(loop(around(lambda net, x: net["inner"](x))), nnx.Intermediate)(net, X)


GROWING = {
    "tuple": (lambda kept, x: (*kept, x), tuple, r"makes \(float32\[2\],\) of \(\)"),
    "concatenation": (
        lambda kept, x: jnp.concatenate([kept, x]),
        lambda: jnp.zeros(2),
        r"makes float32\[4\] of float32\[2\]",
    ),
    "concatenation to one": (
        lambda kept, x: jnp.concatenate([kept, x]),
        lambda: jnp.zeros(1),
        r"makes float32\[5\] of float32\[3\]",
    ),
}


@loops
@pytest.mark.parametrize(("reduce", "init", "message"), GROWING.values(), ids=GROWING)
def test_a_reduce_fn_that_grows_is_an_error(
    loop: Any, reduce: Any, init: Any, message: str
) -> None:
    for run in (loop(call), loop(nnx.jit(call))):
        with pytest.raises(StructureError, match=r"cells\[0\] \(Cell\) sows 'total'.*" + message):
            total_of(run, Net(reduce, init))


def test_a_reduce_fn_of_changing_dtype_is_an_error() -> None:
    def flip(total: Any, x: jax.Array) -> jax.Array:
        narrow = getattr(total, "dtype", None) == jnp.float32
        return x.astype(jnp.bfloat16 if narrow else jnp.float32)

    with pytest.raises(StructureError, match=r"Intermediate 'total' has another dtype after each"):
        total_of(fori(call), Net(flip))


@loops
def test_an_init_fn_of_traced_values_is_an_error(loop: Any) -> None:
    class Late(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            self.sow(nnx.Intermediate, "h", x, reduce_fn=add, init_fn=lambda: 2 * x)
            self.sow(nnx.Intermediate, "shape", x, reduce_fn=add, init_fn=lambda: jnp.zeros_like(x))
            return x

    with pytest.raises(StructureError, match=r"\(Late\) sows 'h' with an init_fn that depends on"):
        nnx.capture(loop(call), nnx.Intermediate)(Late(), X)


def test_a_total_that_cannot_go_on_is_an_error() -> None:
    mapped = nnx.vmap(fori(call), in_axes=(None, 0))
    with pytest.raises(
        StructureError, match=r"cells\[0\] \(Cell\) sows 'total' in a loop, and did"
    ):
        total_of(lambda net, x: mapped(net, mapped(net, x)), Net(), X[None])


def test_a_name_sown_in_another_way_before_is_an_error() -> None:
    def program(net: Any, x: jax.Array) -> jax.Array:
        net.cells[0].sow(nnx.Intermediate, "total", x)
        return fori(call)(net, x)

    with pytest.raises(StructureError, match=r"sows 'total' in a loop, and did so before"):
        total_of(program, Net())


def test_a_condition_that_sows_is_an_error_and_one_that_perturbs_is_not() -> None:
    def asks(value: Any) -> jax.Array:
        return value[0](value[1]).sum() < 20

    body = lambda value: (value[0], 2 * value[1])  # noqa: E731
    run = lambda net, x: nnx.while_loop(asks, body, (net, x))[1]  # noqa: E731
    for f in (run, lambda net, x: nnx.while_loop(lambda v: nnx.jit(asks)(v), body, (net, x))[1]):
        with pytest.raises(StructureError, match=r"cond_fun=.*sows 'total' in the condition"):
            nnx.capture(f, nnx.Intermediate)(Net(), X)
        _, found = nnx.capture(f, nnx.Perturbation)(Net(), X)
        assert not found


# Perturbations.


@around
def test_a_perturbation_has_the_sum_of_gradients(around: Any) -> None:
    net = Net()
    runs = around(fori(call)), fori(around(call))
    _, zeros = nnx.capture(unrolled(call), nnx.Perturbation)(net, X)
    expected = jax.grad(lambda p: nnx.capture(unrolled(call), init=p)(net, X).sum())(zeros)
    assert float(expected["cells"][0]["p"][0]) == 4 + 2 + 1
    for run in runs:
        _, found = nnx.capture(run, nnx.Perturbation)(net, X)
        assert jax.tree.structure(found) == jax.tree.structure(zeros)
        np.testing.assert_array_equal(found["cells"][0]["p"][...], [0, 0])
        grads = jax.jit(jax.grad(lambda p, run=run: nnx.capture(run, init=p)(net, X).sum()))(found)
        np.testing.assert_array_equal(grads["cells"][0]["p"][...], [7, 7])


@loops
def test_perturbations_are_added_at_each_step_and_recorded(loop: Any) -> None:
    net, ones = Net(), nnx.State({"cells": {0: {"p": nnx.Perturbation(jnp.ones(2))}}})
    for run, steps in ((loop(call), 3), (loop(nnx.jit(call)), 3), (loop(loop(call)), 9)):
        out, found = nnx.capture(run, nnx.Perturbation, init=ones)(net, X)
        np.testing.assert_array_equal(out, 2**steps * X + 2**steps - 1)
        np.testing.assert_array_equal(found["cells"][0]["p"][...], [1, 1])


def test_a_perturbation_in_while_has_a_forward_derivative_only() -> None:
    net = Net()
    _, zeros = nnx.capture(while_(call), nnx.Perturbation)(net, X)
    loss = lambda p: nnx.capture(while_(call), init=p)(net, X).sum()  # noqa: E731
    _, tangent = jax.jvp(loss, (zeros,), (jax.tree.map(jnp.ones_like, zeros),))
    assert float(tangent) == 2 * 7
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(loss)(zeros)


def test_a_missing_perturbation_is_an_error_in_a_loop_too() -> None:
    wrong = nnx.State({"cells": {0: {"q": nnx.Perturbation(jnp.zeros(2))}}})
    with pytest.raises(StructureError, match=r"cells\[0\] \(Cell\) perturbs 'p', which init lacks"):
        nnx.capture(fori(call), init=wrong)(Net(), X)


def test_perturbations_of_one_name_have_one_shape_in_a_loop_too() -> None:
    class Two(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return self.perturb("p", x) + self.perturb("p", x.sum())

    with pytest.raises(ValueError, match="perturbed twice in one object"):
        nnx.capture(fori(call), nnx.Perturbation)(Two(), X)


# Outputs of methods, and values with gradients.


@contextmanager
def one_warning(text: str) -> Iterator[None]:
    with pytest.warns(UserWarning, match=text) as noted:
        yield
    assert len(noted) == 1 and noted[0].filename == __file__


@loops
@jit_around
def test_outputs_inside_a_loop_are_left_out_with_one_warning(loop: Any, around: Any) -> None:
    class Outer(nnx.Module):
        def __init__(self) -> None:
            self.inner, self.after = Plain(), Plain()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.after(loop(around(call))(self.inner, x))

    class Plain(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * x

    run = nnx.capture(Outer(), method_outputs=nnx.Intermediate)
    for _ in range(2):
        with one_warning(r"model\.inner \(Plain\)\.__call__ are not recorded: nnx.*no room for"):
            _, found = run(X)
        assert [path for path, _ in found.flat_state()] == [("__call__",), ("after", "__call__")]


def test_outputs_of_a_condition_are_left_out_with_one_warning() -> None:
    class Asker(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return x.sum()

    body = lambda value: (value[0], 2 * value[1])  # noqa: E731
    run = lambda net, x: nnx.while_loop(lambda v: v[0](v[1]) < 9, body, (net, x))[1]  # noqa: E731
    with one_warning(r"\(Asker\)\.__call__ are not recorded: nnx\.while_loop\(cond_fun=<lambda>\)"):
        _, found = nnx.capture(run, method_outputs=nnx.Intermediate)(Asker(), X)
    assert not found


def test_values_and_gradients_of_a_loss_with_a_loop() -> None:
    class Loss(nnx.Module):
        def __init__(self, looped: Any) -> None:
            self.looped, self.head = looped, Cell()

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.head(fori(call)(self.looped, x)).sum()

    class Double(nnx.Module):
        def __call__(self, x: jax.Array) -> jax.Array:
            return 2 * x

    with one_warning(r"model\.looped \(Double\)\.__call__ are not recorded"):
        _, values, grads = nnx.capture_gradients(lambda net, x: net(x))(Loss(Double()), X)
    np.testing.assert_array_equal(values["head"]["p"][...], 16 * X)
    np.testing.assert_array_equal(grads["head"]["p"][...], [1, 1])
    with pytest.raises(StructureError, match=r"looped \(Cell\) perturbs 'p' inside a loop.*scan"):
        nnx.capture_gradients(lambda net, x: net(x))(Loss(Cell()), X)


# Branches.


def branches(*fs: Function) -> Function:
    return lambda net, x: nnx.switch(jnp.int32(1), list(fs), net, x)


def test_branches_record_alike_with_functions_made_anew() -> None:
    def sowing(scale: float) -> Function:
        def branch(net: Any, x: jax.Array) -> jax.Array:
            net.sow(
                nnx.Intermediate, "h", scale * x, reduce_fn=lambda a, b: a + b, init_fn=lambda: 1.0
            )
            return x

        return branch

    _, found = nnx.capture(branches(sowing(2), sowing(3)), nnx.Intermediate)(Net(), X)
    np.testing.assert_array_equal(found["h"][...], 1 + 3 * X)


def test_branches_may_record_in_another_order() -> None:
    def sowing(*names: str) -> Function:
        def branch(net: Any, x: jax.Array) -> jax.Array:
            for n, name in enumerate(names):
                net.sow(nnx.Intermediate, name, (n + 1) * x)
            return x

        return branch

    run = nnx.capture(branches(sowing("a", "b"), sowing("b", "a")), nnx.Intermediate)
    _, found = run(Net(), X)
    np.testing.assert_array_equal(found["a"][...][0], 2 * X)
    np.testing.assert_array_equal(found["b"][...][0], X)
    with pytest.raises(
        StructureError, match=r"branches\[0\].* 'a' of net and Intermediate 'b' of net"
    ):
        nnx.capture(branches(sowing("a", "b"), sowing("a")), nnx.Intermediate)(Net(), X)


def test_branches_that_record_other_types_or_counts_are_an_error() -> None:
    def sowing(*values: Any) -> Function:
        def branch(net: Any, x: jax.Array) -> jax.Array:
            for value in values:
                net.cells[0].sow(nnx.Intermediate, "h", value)
            return x

        return branch

    message = (
        r"records float32\[\] as Intermediate 'h' of net\.cells\[0\], branches\[1\] .* records "
    )
    for other, text in (((X,), r"float32\[2\]"), ((1.0, 1.0), r"float32\[\] and float32\[\]")):
        with pytest.raises(StructureError, match=message + text):
            nnx.capture(branches(sowing(1.0), sowing(*other)), nnx.Intermediate)(Net(), X)


def test_temporary_modules_in_branches_record_under_their_class() -> None:
    def made(w: float) -> Function:
        def branch(net: Any, x: jax.Array) -> jax.Array:
            cell = Cell()
            cell.w[...] = jnp.float32(w)
            return cell(cell(x))

        return branch

    _, found, zeros = nnx.capture(branches(made(2), made(3)), nnx.Intermediate, nnx.Perturbation)(
        Net(), X
    )
    np.testing.assert_array_equal(found["Cell"]["total"][...], X + 3 * X)
    np.testing.assert_array_equal(zeros["Cell"]["p"][...], [0, 0])


def test_perturbations_in_branches_have_the_gradient_of_the_taken_one() -> None:
    run = branches(lambda net, x: net(x), lambda net, x: 5 * net(x))
    net = Net()
    _, zeros = nnx.capture(run, nnx.Perturbation)(net, X)
    grads = jax.grad(lambda p: nnx.capture(run, init=p)(net, X).sum())(zeros)
    np.testing.assert_array_equal(grads["cells"][0]["p"][...], [5, 5])


class Plain(nnx.Module):
    def __call__(self, x: jax.Array) -> jax.Array:
        return 2 * x


def test_outputs_of_all_branches_are_recorded_and_of_one_left_out() -> None:
    class Two(nnx.Module):
        def __init__(self) -> None:
            self.a, self.b, self.both = Plain(), Plain(), Plain()

        def __call__(self, x: jax.Array) -> jax.Array:
            one = lambda net, x: net.a(net.both(x))  # noqa: E731
            other = lambda net, x: net.b(net.both(3 * x))  # noqa: E731
            return nnx.cond(x.sum() < 0, one, other, self, x)

    text = r"self\.a\.__call__, self\.b\.__call__ are not recorded: only some branches of nnx\.cond"
    with one_warning(text.replace("self", "net")):
        _, found = nnx.capture(Two(), method_outputs=nnx.Intermediate)(X)
    assert [path for path, _ in found.flat_state()] == [("__call__",), ("both", "__call__")]
    np.testing.assert_array_equal(found["both"]["__call__"][...][0], 6 * X)
    with one_warning(text.replace("self", "net")):
        _, values, grads = nnx.capture_gradients(lambda net, x: net(x).sum())(Two(), X)
    np.testing.assert_array_equal(values["both"]["__call__"][...], 6 * X)
    np.testing.assert_array_equal(grads["both"]["__call__"][...], [2, 2])


def test_a_failed_capture_in_a_loop_leaves_no_trace() -> None:
    net = Net()

    def fails(net: Any, x: jax.Array) -> jax.Array:
        net(x)
        net.cells[0].w[...] = jnp.float32(7)
        raise ZeroDivisionError("inside")

    for loop in LOOPS.values():
        with pytest.raises(ZeroDivisionError, match="inside"):
            total_of(loop(fails), net)
    assert float(net.cells[0].w[...]) == 2
    np.testing.assert_array_equal(total_of(fori(call), net), 7 * X)

"""jit_partial and cached_partial: as in flax programs, and as the call with all arguments."""

import functools

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.transforms.samples import Cell, Tree, counted

ONE = jnp.float32(1)


def step(m, other, x, scale=1.0):
    m.n[...] += jnp.int32(1)
    other.last = nnx.Variable(x)
    return m.w[...] * other.w[...] * x * scale


MAKERS = {
    "jit_partial": nnx.jit_partial,
    "jit_partial, flags": functools.partial(nnx.jit_partial, graph=False, graph_updates=False),
    "cached_partial": lambda f, *args: nnx.cached_partial(nnx.jit(f), *args),
    "cached_partial, flags": lambda f, *args: nnx.cached_partial(nnx.jit(f), *args, graph=True),
}


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_call_is_that_with_all_arguments(make):
    run, runs = counted(step)
    m, other = Cell(2.0), Cell(3.0)
    partial = make(run, m, other)
    assert [float(partial(ONE)) for _ in range(3)] == [6, 6, 6]
    assert int(m.n[...]) == 3 and float(other.last[...]) == 1
    assert len(runs) == 2  # `last` is new at the first call
    m.w[...] = jnp.float32(5)
    assert partial(ONE, scale=2.0) == 30 and len(runs) == 3


@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
def test_objects_that_are_shared_stay_shared(make):
    m = Tree()
    out = make(lambda tree, cell: (cell, tree.left is cell), m)(m.left)
    assert out == (m.left, True)


def test_partial_has_the_methods_of_a_jitted_function():
    m = Cell()
    for partial in (nnx.jit_partial(step, m), nnx.cached_partial(nnx.jit(step), m)):
        assert "stablehlo" in partial.lower(Cell(), ONE).as_text()
        assert partial.eval_shape(Cell(), ONE).shape == ()
        assert partial.explain_retrace().traces == partial.cache_info().traces >= 1


def test_cached_partial_of_a_method_or_of_a_partial_adds_arguments():
    class Net(Cell):
        @nnx.jit
        def step(self, other, x):
            return self(x) * other(x)

    m, other = Net(2.0), Cell(3.0)
    one, two = nnx.cached_partial(m.step, other), nnx.cached_partial(Net.step, m)
    assert one(ONE) == nnx.cached_partial(two, other)(ONE) == 6
    assert int(m.n[...]) == int(other.n[...]) == 2
    assert one.explain_retrace().traces == 1


@pytest.mark.parametrize(
    ("f", "expected"),
    [(nnx.grad(lambda m, x: m.w[...] * x), 3), (nnx.remat(lambda m, x: m.w[...] * x), 6)],
    ids=["grad", "remat"],
)
def test_cached_partial_takes_any_transform(f, expected):
    partial = nnx.cached_partial(f, Cell(2.0))
    out = partial(jnp.float32(3))
    assert float(jax.tree.leaves(out)[0]) == expected
    assert partial.explain_retrace().traces == 1


def test_cached_partial_takes_a_plain_function():
    assert nnx.cached_partial(lambda a, b: a - b, 5)(2) == 3


def test_options_count_the_positions_of_the_function():
    def run(m, k, x):
        m.w[...] += x
        return x * jnp.float32(k)

    m, x = Cell(), jnp.ones(())
    w = m.w[...]
    partial = nnx.jit_partial(run, m, static_argnums=1, donate_argnames=("m", "x"))
    assert partial(7, x) == 7 and m.w[...] == 3
    assert w.is_deleted() and x.is_deleted()


def test_static_arguments_may_be_given_beforehand():
    partial = nnx.jit_partial(
        lambda m, mode, x: x * len(mode), Cell(), "abc", static_argnames="mode"
    )
    assert partial(2) == 6


def test_shardings_start_with_those_of_the_partial_arguments():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    partial = nnx.jit_partial(
        lambda m, x: m(x), Cell(), in_shardings=(here, here), out_shardings=here
    )
    assert partial(ONE) == 2


@pytest.mark.parametrize("option", [{"device": "cpu:0"}, {"backend": "cpu"}])
@pytest.mark.parametrize("make", [nnx.jit, nnx.jit_partial])
def test_device_and_backend_are_refused(option, make):
    with pytest.raises(TypeError, match=r"no device and no backend.*jax\.device_put"):
        make(step, **option)


@pytest.mark.parametrize("flag", [{"graph": False}, {"graph_updates": False}])
def test_cached_partial_refuses_the_modes_that_flax_refuses(flag):
    with pytest.raises(TypeError, match=r"nnx\.cached_partial has one mode and no graph"):
        nnx.cached_partial(step, Cell(), **flag)


def test_something_that_is_no_function_is_an_error():
    with pytest.raises(TypeError, match=r"nnx\.cached_partial expected a function, found int"):
        nnx.cached_partial(3, Cell())
    with pytest.raises(TypeError, match=r"nnx\.jit expected a function, found int"):
        nnx.jit_partial(3)

"""What vmap and scan share: roles of leaves, names of axes, and what belongs to no single step."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic

f32 = jnp.float32
xs = jnp.arange(3, dtype=f32)


class Bank(nnx.Module):
    """Three of a parameter and of a counter, along axis 0."""

    def __init__(self) -> None:
        self.w = nnx.Param(jnp.array([1.0, 2.0, 3.0], f32))
        self.n = nnx.Variable(jnp.zeros(3, f32))

    def __call__(self, x):
        self.n[...] += f32(1)
        return self.w[...] * x


class Cell(nnx.Module):
    """One of each."""

    def __init__(self, w=2.0) -> None:
        self.w = nnx.Param(f32(w))
        self.n = nnx.Variable(f32(0))

    def __call__(self, x):
        self.n[...] += f32(1)
        return self.w[...] * x


def each(f, in_axes=0, **options):
    """The function mapped by vmap."""
    return nnx.vmap(f, in_axes=in_axes, **options)


def loop(f, in_axes=0, **options):
    """The function scanned without a carry."""
    return nnx.scan(f, in_axes=in_axes, out_axes=options.pop("out_axes", 0), **options)


both = pytest.mark.parametrize("transform", [each, loop], ids=["vmap", "scan"])


@both
def test_mapped_variables_are_sliced_and_written(transform):
    bank = Bank()
    assert np.array_equal(transform(lambda m, x: m(x), (0, 0))(bank, xs), [0, 2, 6])
    assert np.array_equal(bank.n[...], [1, 1, 1])


@both
@pytest.mark.parametrize("in_axes", [0, (0, 0), [0, 0], (nnx.StateAxes({...: 0}), 0)], ids=str)
def test_in_axes_may_be_one_or_a_sequence(transform, in_axes):
    found = transform(lambda m, x: m(x), in_axes)(Bank(), xs)
    assert np.array_equal(found, [0, 2, 6])


@both
def test_filters_give_axes(transform):
    class Mixed(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(f32(2))
            self.n = nnx.Variable(jnp.zeros((2, 3), f32))

    model = Mixed()

    def f(m, x):
        m.n[...] += x
        return m.w[...] * x

    axes = nnx.StateAxes({nnx.Param: None, ...: -1})
    assert np.array_equal(transform(f, (axes, 0))(model, xs), [0, 2, 4])
    assert np.array_equal(model.n[...], [[0, 1, 2], [0, 1, 2]])


@both
@pytest.mark.parametrize("axis", [1, -1])
def test_results_are_stacked_along_out_axes(transform, axis):
    def f(x):
        return jnp.full((2,), x), nnx.Param(jnp.full((2, 4), x))

    array, param = transform(f, out_axes=axis)(xs)
    assert array.shape == (2, 3)
    assert param.shape == ((2, 3, 4) if axis == 1 else (2, 4, 3))


@both
def test_out_axes_of_new_objects_by_filter(transform):
    def make(x):
        bank = Bank()
        bank.w[...] += x
        return bank

    made = transform(make, out_axes=nnx.StateAxes({nnx.Param: 1, ...: 0}))(xs)
    assert np.array_equal(made.w[...], jnp.array([[1.0, 2, 3], [2, 3, 4], [3, 4, 5]]))
    assert made.n.shape == (3, 3)


@both
def test_keyword_arguments_are_mapped_along_axis_0(transform):
    bank = Bank()
    found = transform(lambda x, *, m: m(x))(xs, m=bank)
    assert np.array_equal(found, [0, 2, 6])
    assert np.array_equal(bank.n[...], [1, 1, 1])


@both
def test_arguments_that_come_with_a_partial_are_the_same_for_all(transform):
    cell, f = Cell(), lambda m, x, k: m.w[...] * x + k
    assert np.array_equal(transform(functools.partial(f, cell, k=f32(1)))(xs), [1, 3, 5])
    by_name = functools.partial(lambda x, m: m.w[...] * x, m=cell)
    assert np.array_equal(transform(by_name)(xs), [0, 2, 4])


@both
def test_bound_methods_and_callable_modules_broadcast_their_object(transform):
    class Scale(nnx.Module):
        def __init__(self):
            self.w = nnx.Param(f32(2))

        def __call__(self, x):
            return self.w[...] * x

        def double(self, x):
            return self(x) + self(x)

    scale = Scale()
    assert np.array_equal(transform(scale)(xs), [0, 2, 4])
    assert np.array_equal(transform(scale.double)(xs), [0, 4, 8])


@both
def test_methods_are_decorated(transform):
    class Model(nnx.Module):
        def __init__(self):
            self.bank = Bank()

        @functools.partial(transform, in_axes=(0, 0))
        def run(self, x):
            return self.bank(x)

    model = Model()
    assert np.array_equal(model.run(xs), [0, 2, 6])
    assert np.array_equal(model.bank.n[...], [1, 1, 1])


@both
def test_arguments_in_the_result_are_the_callers_objects(transform):
    bank = Bank()
    bank.inner = Cell()
    bank.inner.w, bank.inner.n = nnx.Param(xs), nnx.Variable(xs)
    found = transform(lambda m: (m, m.inner, m.w))(bank)
    assert found[0] is bank and found[1] is bank.inner and found[2] is bank.w
    assert bank.w.shape == (3,)


@both
def test_new_object_may_hold_variables_of_arguments(transform):
    def f(m):
        new = nnx.Module()
        new.old, new.new = m.w, nnx.Param(m.n[...])
        return new

    bank = Bank()
    made = transform(f)(bank)
    assert made.old is bank.w and made.new.shape == (3,)


@both
def test_pytree_values_arrays_and_states_are_mapped(transform):
    model = nnx.Module()
    model.pair = nnx.Variable({"a": xs, "b": (xs,)})
    model.array = nnx.data(xs)
    model.state = nnx.state(Bank())

    def f(m):
        m.pair.value = {"a": m.pair["a"] + f32(1), "b": m.pair["b"]}
        m.array = m.array * f32(2)
        m.state["n"][...] = m.state["w"][...] + f32(1)

    transform(f)(model)
    assert np.array_equal(model.pair["a"], xs + 1) and np.array_equal(model.pair["b"][0], xs)
    assert np.array_equal(model.array, 2 * xs)
    assert np.array_equal(model.state["n"][...], [2, 3, 4])
    assert np.array_equal(model.state["w"][...], [1, 2, 3])


@both
def test_empty_model(transform):
    model = nnx.Module()
    found, x = transform(lambda m, x: (m, x))(model, xs)
    assert found is model and np.array_equal(x, xs)


# What must not be written.


@both
def test_broadcast_variable_written(transform):
    cell = Cell()
    with pytest.raises(ValueError, match=r"changed m\.n \(Variable\), which is broadcast"):
        transform(lambda m, x: m(x), (None, 0))(cell, xs)
    assert_isomorphic(cell, Cell())


@both
def test_broadcast_array_and_entry_of_a_state_written(transform):
    model = nnx.Module()
    model.array, model.state = nnx.data(f32(1)), nnx.state(Cell())

    def write_array(m, x):
        m.array = m.array + x

    def write_entry(m, x):
        m.state["n"][...] += x

    with pytest.raises(ValueError, match=r"changed m\.array \(array\), which is broadcast"):
        transform(write_array, (None, 0))(model, xs)
    with pytest.raises(ValueError, match=r"changed m\.state\.n \(Variable\), which is broadcast"):
        transform(write_entry, (None, 0))(model, xs)
    assert float(model.array) == 1 and float(model.state["n"][...]) == 0


@both
@pytest.mark.parametrize("inner", [each, loop], ids=["in vmap", "in scan"])
def test_broadcast_at_an_outer_level_written(transform, inner):
    def outer(bank, x):
        return inner(lambda m, x: m(x), (0, None))(bank, x)

    bank = Bank()
    with pytest.raises(ValueError, match=r"\(outer\) changed bank\.n .* broadcast"):
        transform(outer, (None, 0))(bank, xs)
    assert_isomorphic(bank, Bank())


@both
def test_inconsistent_axes_of_a_shared_object(transform):
    bank, holder = Bank(), nnx.Module()
    holder.items = nnx.data([bank])
    with pytest.raises(
        nnx.errors.StructureError,
        match=r"a\.n and b\['k'\]\.items\[0\]\.n are the same leaf, .* 0 in one place and None",
    ):
        transform(lambda a, b: a.w[...], (0, None))(bank, {"k": holder})


@both
def test_consistent_axes_of_a_shared_object(transform):
    bank = Bank()
    transform(lambda a, b: (a(f32(1)), b(f32(1))))(bank, bank)
    assert np.array_equal(bank.n[...], [2, 2, 2])


@both
def test_inconsistent_axes_in_the_result(transform):
    def f(x):
        made = nnx.Param(x)
        return made, made

    with pytest.raises(nnx.errors.StructureError, match=r"twice, .* 0 in one place and 1 in the"):
        transform(f, out_axes=(0, 1))(xs)


@both
def test_sizes_differ(transform):
    match = r"sizes: 3 \(m\.n \(Variable\) of shape \(3,\) along axis 0\) and 2 \(x of shape"
    with pytest.raises(ValueError, match=match):
        transform(lambda m, x: m(x))(Bank(), xs[:2])


@both
def test_axis_that_is_not_there(transform):
    with pytest.raises(ValueError, match=r"maps m\.n \(Variable\) along axis 1, but its shape"):
        transform(lambda m: m.w[...], (1,))(Bank())
    with pytest.raises(ValueError, match=r"maps x along axis 0, but its shape is \(\)"):
        transform(lambda x: x)(2.0)


@both
def test_axes_that_are_no_prefix(transform):
    with pytest.raises(nnx.errors.StructureError, match="has 1 entries, but the call has 2"):
        transform(lambda m, x: x, (0,))(Bank(), xs)
    with pytest.raises(nnx.errors.StructureError, match=r"out_axes is \(0, 0\), but .* float32"):
        transform(lambda x: x, out_axes=(0, 0))(xs)
    with pytest.raises(
        nnx.errors.StructureError, match=r"in_axes is \({'a': 0},\), but .* \(float"
    ):
        transform(lambda x: x, ({"a": 0},))(xs)


@both
def test_roles_of_the_wrong_kind(transform):
    with pytest.raises(TypeError, match=r"in_axes has 'a' for m\.n. Give an int"):
        transform(lambda m: m.w[...], ("a",))(Bank())
    with pytest.raises(TypeError, match="StateAxes for x, which is an array"):
        transform(lambda x: x, (nnx.StateAxes({...: 0}),))(xs)
    with pytest.raises((TypeError, ValueError), match=r"out_axes has .*the result"):
        transform(lambda x: x, out_axes=nnx.StateAxes({...: 0}))(xs)


@both
def test_nothing_to_take_the_size_from(transform):
    with pytest.raises(ValueError, match=r"is not known\. Give"):
        transform(lambda m: m.w[...], (None,))(Cell())


@both
def test_closed_over_object_is_read_only(transform):
    cell = Cell()
    with pytest.raises(nnx.errors.TraceLevelError, match=r"closes over cell\.n"):
        transform(lambda x: cell(x))(xs)
    with pytest.raises(
        nnx.errors.TraceLevelError, match=r"closes over cell\. The function returns"
    ):
        transform(lambda x: cell)(xs)
    assert_isomorphic(cell, Cell())
    assert np.array_equal(transform(lambda x: cell.w[...] * x)(xs), [0, 2, 4])


@both
def test_failing_body_changes_nothing(transform):
    def f(m, x):
        m(x)
        raise ZeroDivisionError("after the write")

    bank = Bank()
    with pytest.raises(ZeroDivisionError, match="after the write"):
        transform(f)(bank, xs)
    assert_isomorphic(bank, Bank())


# Names of axes.


def partitioned(rngs):
    init = nnx.with_partitioning(nnx.initializers.normal(), ("t", None))
    return nnx.Linear(4, 4, use_bias=False, kernel_init=init, rngs=rngs)


@pytest.mark.parametrize(
    ("out_axes", "names", "shape"),
    [
        (0, ("layers", "t", None), (3, 4, 4)),
        (1, ("t", "layers", None), (4, 3, 4)),
        (-1, ("t", None, "layers"), (4, 4, 3)),
        (nnx.StateAxes({...: 2}), ("t", None, "layers"), (4, 4, 3)),
    ],
    ids=str,
)
def test_new_variable_gains_the_name_of_the_axis(out_axes, names, shape):
    told = {nnx.PARTITION_NAME: "layers"}
    make = nnx.vmap(partitioned, out_axes=out_axes, transform_metadata=told)
    made = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))
    assert made.kernel.out_sharding == names and made.kernel.shape == shape


def test_untold_axis_has_the_name_none():
    made = nnx.split_rngs(splits=3)(nnx.vmap(partitioned))(nnx.Rngs(0))
    assert made.kernel.out_sharding == (None, "t", None)


@both
@pytest.mark.parametrize("told", [{}, {nnx.PARTITION_NAME: "layers"}], ids=["untold", "told"])
def test_name_is_off_inside_and_back_outside(transform, told):
    seen = []

    def f(layer):
        seen.append(layer.kernel.out_sharding)
        layer.kernel[...] = layer.kernel[...] * f32(2)

    made = nnx.split_rngs(splits=3)(
        nnx.vmap(partitioned, transform_metadata={nnx.PARTITION_NAME: "layers"})
    )(nnx.Rngs(0))
    transform(f, transform_metadata=told)(made)
    assert set(seen) == {("t", None)}
    assert made.kernel.out_sharding == ("layers", "t", None)


@both
def test_another_name_than_the_axis_has(transform):
    made = nnx.split_rngs(splits=3)(
        nnx.vmap(partitioned, transform_metadata={nnx.PARTITION_NAME: "layers"})
    )(nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"Expected the name 'other' for axis 0 .* 'layers'"):
        transform(lambda m: None, transform_metadata={nnx.PARTITION_NAME: "other"})(made)


@both
def test_hooks_are_called(transform):
    log = []
    variable = nnx.Param(
        xs,
        on_add_axis=lambda v, axis, name: log.append(("add", axis, name)),
        on_remove_axis=lambda v, axis, name: log.append(("remove", axis, name)),
    )
    transform(lambda v: v[...], transform_metadata={nnx.PARTITION_NAME: "l"})(variable)
    assert log[:2] == [("remove", 0, "l"), ("add", 0, "l")]


def test_optimizer_follows_stacked_partitioned_parameters():
    optax = pytest.importorskip("optax")
    made = nnx.split_rngs(splits=3)(nnx.vmap(partitioned))(nnx.Rngs(0))
    optimizer = nnx.Optimizer(made, optax.adam(1e-3), wrt=nnx.Param)
    for variable in jax.tree.leaves(
        nnx.state(optimizer, nnx.OptState), is_leaf=lambda x: isinstance(x, nnx.Variable)
    ):
        if variable.shape:
            assert variable.out_sharding == (None, "t", None) and variable.shape == (3, 4, 4)


# Random numbers and statistics inside.


@both
def test_split_rngs_give_each_its_own_mask(transform):
    dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    run = nnx.split_rngs(splits=3)(transform(lambda d, x: d(x), (0, 0)))
    masks = np.asarray(run(dropout, jnp.ones((3, 16), f32)))
    assert len({tuple(row) for row in masks.tolist()}) == 3
    assert dropout.rngs.key.shape == () and int(dropout.rngs.count[...]) == 1


@both
def test_stacked_layers_have_the_axis_everywhere(transform):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(self.norm(self.linear(x)))

    layers = nnx.split_rngs(splits=3)(nnx.vmap(Layer))(nnx.Rngs(0))
    assert all(x.shape[:1] == (3,) for x in jax.tree.leaves(nnx.state(layers)))
    keys = jax.random.key_data(layers.dropout.rngs.key[...])
    assert len({tuple(row) for row in np.asarray(keys).tolist()}) == 3
    before = layers.norm.mean[...]
    y = transform(lambda layer, x: layer(x), (0, None))(layers, jnp.ones((2, 4), f32))
    assert y.shape == (3, 2, 4)
    assert not np.array_equal(before, layers.norm.mean[...])

"""Data or static: by type, by value, by annotation, by dataclass field."""

import dataclasses
import typing
from typing import Generic, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from tests.core import postponed_annotations as postponed
from tests.objects import Box, Net, param

T = TypeVar("T")


def data_names(value):
    return sorted(nnx.to_pure_dict(nnx.state(value)))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (jnp.ones(1), True),
        (np.ones(1), True),
        (param(1), True),
        (Net(), True),
        ([Net()], True),
        ({"a": (1, jnp.ones(1))}, True),
        (Box(jnp.ones(1)), True),
        (Net().double, True),
        (nnx.data(1), True),
        (nnx.static(jnp.ones(1)), False),
        (1, False),
        ([], False),
        ("a", False),
        (jnp.sin, False),
        ({1, 2}, False),
        (Box(1), False),
    ],
)
def test_is_data_tells_by_type(value, expected):
    assert nnx.is_data(value) is expected


def test_marked_value_is_stored_without_its_mark():
    net = Net(a=nnx.data(1), b=nnx.static("x"))
    assert (net.a, net.b) == (1, "x")
    assert sorted(vars(net)) == ["a", "b"]


def test_mark_stays_with_the_attribute():
    net = Net(a=nnx.data(1))
    net.a = 2
    assert data_names(net) == ["a"]
    del net.a
    net.a = 3
    assert data_names(net) == []


def test_mark_may_be_changed():
    net = Net(a=nnx.data(1))
    before = nnx.graphdef(net)
    net.a = nnx.static(1)
    assert data_names(net) == []
    assert nnx.graphdef(net) is not before
    net.a = nnx.data(1)
    assert nnx.graphdef(net) is before


@pytest.mark.parametrize("value", [param(1), Net(), [Net()], {"a": (param(1),)}], ids=str)
@pytest.mark.parametrize("is_known", [False, True])
def test_static_attribute_refuses_what_has_state_at_once(value, is_known):
    net = Net(a=nnx.static(1))
    if is_known:
        nnx.split(net)
    with pytest.raises(
        nnx.errors.StaticValueError, match=r"Cannot assign a .* to attribute 'a' of"
    ):
        net.a = value
    assert net.a == 1
    net.a = nnx.data(value)
    assert net.a is value
    assert len(nnx.to_flat_state(nnx.state(net))) == len(jax.tree.leaves(value))
    with pytest.raises(nnx.errors.StaticValueError, match="is marked static"):
        net.a = nnx.static(value)


def test_static_mark_goes_with_the_attribute():
    net = Net(a=nnx.static(np.ones(2)))
    net.a = np.zeros(2)
    assert data_names(net) == []
    del net.a
    net.a = param(1)
    assert data_names(net) == ["a"]


def test_static_items_refuse_what_has_state():
    items = nnx.List([nnx.static(1), 2])
    with pytest.raises(nnx.errors.StaticValueError, match="Param to item 0 of List"):
        items[0] = param(1)
    with pytest.raises(nnx.errors.StaticValueError, match="Param to item 'a' of Dict"):
        nnx.Dict(a=nnx.static(param(1)))
    items[1] = param(2)
    assert items[0] == 1


def test_annotated_static_attribute_refuses_what_has_state():
    with pytest.raises(nnx.errors.StaticValueError, match="Param to attribute 'mask' of Annotated"):
        Annotated().mask = param(1)


@pytest.mark.parametrize("value", [None, {}, [], (), "text"])
def test_data_of_nothing_yet_is_no_leaf(value):
    net = Net(cache=nnx.data(value))
    assert data_names(net) == []
    net.cache = {"k": jnp.ones(1)}
    assert data_names(net) == ["cache"]


def test_numbers_marked_data_are_traced():
    traces = []

    @nnx.jit
    def f(net):
        traces.append(1)
        net.n = net.n + 1
        return net.n * 2

    net = Net(n=nnx.data(1))
    assert [int(f(net)), int(f(net))] == [4, 6]
    assert int(net.n) == 3
    other = Net(n=nnx.data(jnp.int32(9)))
    f(other)
    assert len(traces) <= 2


def test_static_arrays_count_by_identity():
    mask = np.ones(2)
    a, b, c = Net(m=nnx.static(mask)), Net(m=nnx.static(mask)), Net(m=nnx.static(np.ones(2)))
    assert nnx.graphdef(a) is nnx.graphdef(b)
    assert nnx.graphdef(a) is not nnx.graphdef(c)
    assert nnx.clone(a).m is mask


def test_static_tracer_is_an_error_with_its_path():
    def f(x):
        nnx.split(Net(inner=Net(m=nnx.static(x))))

    with pytest.raises(nnx.errors.StaticValueError, match=r"model\.inner\.m is a traced array"):
        jax.jit(f)(jnp.ones(1))


def test_marks_survive_copies_pickling_and_jax():
    import copy
    import pickle

    net = Net(a=nnx.data(0.5), m=nnx.static([1]), inner=nnx.List([nnx.data(2)]))
    for made in (
        nnx.clone(net),
        copy.copy(net),
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        jax.tree.map(lambda x: x, net),
        nnx.merge(*nnx.split(net)),
    ):
        assert nnx.graphdef(made) is nnx.graphdef(net)
        made.a = 0.75
        assert data_names(made) == ["a", "inner"]


class Annotated(nnx.Module):
    rate: nnx.Data[float]
    mask: nnx.Static[np.ndarray]
    maybe: nnx.Data[int] | None
    other: typing.Optional[nnx.Data[int]]  # noqa: UP045
    plain: int
    of_data: list[nnx.Data[int]]

    def __init__(self):
        self.rate, self.mask, self.maybe, self.other = 0.5, np.ones(2), 1, 2
        self.plain, self.of_data = 3, [4]


class Inherited(Annotated):
    more: nnx.Data[int]

    def __init__(self):
        super().__init__()
        self.more = 5


def test_annotations_mark_attributes():
    assert data_names(Annotated()) == ["maybe", "other", "rate"]
    assert data_names(Inherited()) == ["maybe", "more", "other", "rate"]


def test_annotations_may_be_postponed():
    assert data_names(postponed.Annotated()) == ["quoted", "rate", "short"]
    assert data_names(postponed.make_local()) == ["rate"]


def test_generic_classes_may_be_annotated():
    class Holder(nnx.Module, Generic[T]):
        item: nnx.Data[T]

        def __init__(self, item):
            self.item = item

    assert data_names(Holder[int](1)) == ["item"]
    assert list(vars(Holder[int](1))) == ["item"]


@pytest.mark.parametrize("decorator", [nnx.dataclass, dataclasses.dataclass])
def test_fields_of_dataclasses_are_marked(decorator):
    @decorator
    class Layer(nnx.Module):
        w: nnx.Param
        rate: float = nnx.data(default=0.5)
        mask: np.ndarray = nnx.static(default=None)
        note: str = dataclasses.field(default="n", metadata={"own": 1})

        def __call__(self, x):
            return self.w * x * self.rate

    @decorator
    class More(Layer):
        extra: int = nnx.data(default=1, kw_only=True)

    layer = Layer(param(2), mask=np.ones(2))
    assert data_names(layer) == ["rate", "w"]
    assert nnx.jit(lambda m, x: m(x))(layer, jnp.ones(2)).tolist() == [0.5, 0.5]
    assert data_names(More(param(1))) == ["extra", "rate", "w"]
    assert dataclasses.fields(Layer)[3].metadata["own"] == 1


def test_dataclasses_of_ours_compare_by_identity():
    @nnx.dataclass
    class Layer(nnx.Module):
        w: nnx.Param

    w = param(2)
    a, b = Layer(w), Layer(w)
    assert a != b
    assert len({a, b}) == 2


def test_dataclass_that_compares_its_fields_crosses_everything():
    @dataclasses.dataclass
    class Layer(nnx.Module):
        w: nnx.Param
        k: int = 1

        def __call__(self, x):
            return self.w * x

    model = Net(layers=[Layer(param(2)), Layer(param(2))])
    model.tied = model.layers[0]
    nnx.clone(model)
    jax.jit(lambda m: m)(model)
    nnx.jit(lambda m, x: m.layers[0](m.tied(x)))(model, jnp.ones(2))
    nnx.grad(lambda m: m.tied(jnp.ones(2)).sum())(model)
    assert nnx.find_duplicates(model) == [[("layers", 0), ("tied",)]]


def test_frozen_dataclass_crosses_everything():
    @nnx.dataclass(frozen=True)
    class Layer(nnx.Module):
        w: nnx.Param

    layer = Layer(param(2))
    nnx.jit(lambda m: m.w.set_value(m.w * 2))(layer)
    assert nnx.clone(layer).w[...].tolist() == [2.0, 2.0]
    assert jax.tree.map(lambda x: x, layer).w[...].tolist() == [2.0, 2.0]
    with pytest.raises(dataclasses.FrozenInstanceError, match="cannot assign to field 'w'"):
        layer.w = 1


def test_dataclass_with_slots_is_an_error():
    with pytest.raises(TypeError, match="Layer has __slots__"):

        @nnx.dataclass(slots=True)
        class Layer(nnx.Module):
            w: nnx.Param


def test_value_and_field_options_exclude_each_other():
    with pytest.raises(TypeError, match=r"options \['default'\] exclude each other"):
        nnx.data(1, default=2)


def test_registered_data_type_is_one_leaf():
    @nnx.register_data_type
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Quantized:
        values: jax.Array
        scale: jax.Array

    net = Net(q=Quantized(jnp.ones(2), jnp.ones(1)), layers=[Quantized(jnp.ones(2), jnp.ones(1))])
    assert nnx.is_data(net.q)
    assert nnx.state(net).flat_state().paths == (("layers", 0), ("q",))
    out = nnx.jit(lambda n: n.q.values * n.layers[0].scale)(net)
    assert out.tolist() == [1.0, 1.0]
    assert len(jax.tree.leaves(net)) == 4


def test_has_data_looks_deeper_than_marks():
    assert nnx.has_data([Net()])
    assert not nnx.has_data([1])

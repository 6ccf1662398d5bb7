"""The text of an object."""

import types

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._core.describe import describe
from nnxlite._core.render import text, write
from tests.core.test_describe import Node, Param, Registered


class Net(Node):
    def __repr__(self):
        return text(self)


def test_text_of_a_model():
    kernel = Param(jnp.ones((2, 3)), sharding=("data", None))
    net = Net(
        layers=[Net(kernel=kernel, act=jax.nn.relu), Net(kernel=kernel, rate=0.5)],
        dropout=Net(rate=0.1, mode=None),
        scale=Param(jnp.float32(1)),
    )
    net.root = net
    assert text(net) == "\n".join(
        [
            "Net(  # Param: 7 (28 B)",
            "  layers=[  # Param: 6 (24 B)",
            "    Net(  # Param: 6 (24 B)",
            "      kernel=Param(float32[2,3], sharding=('data', None)),  # 6 (24 B)",
            "      act=<function relu>,",
            "    ),",
            "    Net(kernel=<Param shared with .layers[0].kernel>, rate=0.5),  # Param: 6 (24 B)",
            "  ],",
            "  dropout=Net(rate=0.1, mode=None),",
            "  scale=Param(float32[]),",
            "  root=<Net cycle to the root>,",
            ")",
        ]
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, "None"),
        (jnp.ones(3), "float32[3]"),
        ({}, "{}"),
        (Net(), "Net()"),
        ((jnp.ones(1),), "(float32[1],)"),
        ({"a": [jnp.ones(1), 2]}, "{'a': [float32[1], 2]}"),
        (Param({"mu": jnp.ones(1)}), "Param({'mu': float32[1]})"),
        (Param(None), "Param(None)"),
        (Param(jax.random.key(0)), "Param(key<fry>[])"),
        (Param(jax.ShapeDtypeStruct((2,), "float32")), "Param(abstract float32[2])  # 2 (8 B)"),
        (nnx.List([1, 2]), "List([1, 2])"),
        (nnx.List(), "List([])"),
        (nnx.Dict(a=1), "Dict({'a': 1})"),
        (nnx.Param(jnp.float32(1)), "Param(float32[])"),
        (Registered(jnp.ones(1)), "Registered(data=float32[1])"),
        (jax.tree_util.Partial(abs, jnp.ones(1)).args, "(float32[1],)"),
    ],
)
def test_text_is_one_line_where_that_says_all(value, expected):
    assert text(value) == expected


def test_text_names_attributes_that_are_no_identifiers_by_their_repr():
    node = Net()
    node.__dict__["two\nlines"] = 1
    assert text(node) == r"Net('two\nlines'=1)"


def test_text_says_how_many_items_are_left_out():
    found = text(Net(layers=[Net(w=Param(jnp.ones(2))) for _ in range(100)]), max_items=1)
    assert found.splitlines()[-3:] == ["    ...  # 99 more", "  ],", ")"]


def test_text_with_depth_keeps_the_counts():
    net = Net(a=Net(b=Net(w=Param(jnp.ones(1000)))))
    assert text(net, depth=0) == "Net(...)  # Param: 1,000 (4.0 KB)"
    assert text(net, depth=1).splitlines()[1] == "  a=Net(...),  # Param: 1,000 (4.0 KB)"


def test_text_adds_a_total_over_several_kinds():
    class BatchStat(Param):
        pass

    net = Net(a=Param(jnp.ones(3)), b=BatchStat(jnp.ones(2)))
    first = text(net).splitlines()[0]
    assert first == "Net(  # Param: 3 (12 B), BatchStat: 2 (8 B), Total: 5 (20 B)"


def test_text_inside_a_trace_reads_no_value():
    texts = []

    @jax.jit
    def f(x):
        texts.append(text(Net(w=Param(x)), values=True))
        return x

    f(jnp.ones(2))
    assert texts == ["Net(  # Param: 2 (8 B)\n  w=Param(traced float32[2]),  # 2 (8 B)\n)"]


def test_text_of_an_object_that_a_foreign_repr_prints_again_ends():
    class Wrapper:
        def __init__(self, inner):
            self.inner = inner

        def __repr__(self):
            return f"Wrapper({self.inner!r})"

    net = Net()
    net.wrapper = Wrapper(net)
    assert text(net) == "Net(wrapper=Wrapper(Net(...)))"


def test_text_of_a_bound_method_of_the_object_ends():
    net = Net()
    net.method = types.MethodType(lambda self: self, net)
    assert text(net).startswith("Net(method=<method Net.")


def test_text_shows_values_when_asked():
    assert text(Param(jnp.arange(3)), values=True) == "Param(int32[3] [0, 1, 2])  # 3 (12 B)"


def test_write_needs_only_the_description():
    node = Net(w=Param(jnp.ones(2)))
    assert write(describe(node)) == text(node)


def test_text_breaks_lines_at_the_width():
    value = [jnp.ones(1)] * 3
    assert text(value, width=20) == "[\n  float32[1],\n  float32[1],\n  float32[1],\n]"


@pytest.mark.parametrize(("size", "unit"), [(999, "999 B"), (10**6, "1.0 MB"), (999_960, "1.0 MB")])
def test_bytes_are_written_in_decimal_units(size, unit):
    abstract = jax.ShapeDtypeStruct((size,), "int8")
    assert text(Param(abstract)).endswith(f"({unit})")


def test_text_of_a_state_nests_plain_braces():
    class Outer(nnx.Module):
        def __init__(self):
            self.inner = nnx.Dict(w=nnx.Param(jnp.ones(2)))

    assert text(nnx.state(Outer())) == "\n".join(
        [
            "State({  # Param: 2 (8 B)",
            "  'inner': {  # Param: 2 (8 B)",
            "    'w': Param(float32[2]),  # 2 (8 B)",
            "  },",
            "})",
        ]
    )


def test_text_of_a_module_is_its_repr():
    class Tied(nnx.Module):
        def __init__(self):
            self.first = nnx.List([nnx.Param(jnp.float32(1))])
            self.second = self.first
            self.me = self

    assert repr(Tied()) == "\n".join(
        [
            "Tied(  # Param: 1 (4 B)",
            "  first=List([  # Param: 1 (4 B)",
            "    Param(float32[]),",
            "  ]),",
            "  second=<List shared with .first>,",
            "  me=<Tied cycle to the root>,",
            ")",
        ]
    )

"""Looking through object graphs: nodes, modules, children, duplicates, maps, metadata."""

import functools

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Box, Net, Other, Pair, param


def net():
    shared = Other(w=param(1))
    return Net(
        a=[shared, {"k": 2, "n": Net(v=param(1))}],
        b=(shared, Pair(Box(shared.w), "s")),
        c=nnx.List([shared]),
        x=jnp.ones(1),
    )


def test_graph_is_visited_once_with_contents_before_their_holder():
    found = [(path, type(value).__name__) for path, value in nnx.iter_graph(net())]
    assert found == [
        (("a", 0, "w"), "Param"),
        (("a", 0), "Other"),
        (("a", 1, "k"), "int"),
        (("a", 1, "n", "v"), "Param"),
        (("a", 1, "n"), "Net"),
        (("a", 1), "dict"),
        (("a",), "list"),
        (("b", 1, "left"), "Box"),
        (("b", 1, "right"), "str"),
        (("b", 1), "Pair"),
        (("b",), "tuple"),
        (("c",), "List"),
        (("x",), type(jnp.ones(1)).__name__),
        ((), "Net"),
    ]


def test_cycles_end():
    model = Net(items=[])
    model.me = model
    model.items.append(model.items)
    assert [path for path, _ in nnx.iter_graph(model)] == [("items",), ()]
    assert [path for path, _ in nnx.iter_modules(model)] == [()]


def test_list_order_is_numeric():
    model = Net(layers=[Net() for _ in range(12)])
    assert [path for path, _ in nnx.iter_modules(model)][:-1] == [("layers", n) for n in range(12)]


def test_object_of_a_bound_method_is_met_at_the_path_of_the_method():
    inner = Net(w=param(1))
    model = Net(f=inner.double, g=functools.partial(inner.triple, x=1))
    found = dict(nnx.iter_modules(model))
    assert found == {("f",): inner, (): model}
    assert ("f", "w") in [path for path, _ in nnx.iter_graph(model)]


def test_state_is_looked_into():
    model = Net(s=nnx.State({"a": {"w": param(1)}}))
    paths = [path for path, x in nnx.iter_graph(model) if isinstance(x, nnx.Variable)]
    assert paths == [("s", "a", "w")]


@jax.tree_util.register_pytree_node_class
class Fresh:
    """A registered pytree whose children are new objects at each flattening."""

    def __init__(self, *parts):
        self.parts = parts

    def tree_flatten(self):
        return [[part] for part in self.parts], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*[part for (part,) in children])


def test_temporary_containers_are_all_visited():
    model = Net(fresh=[Fresh(*range(50)) for _ in range(5)])
    assert sum(isinstance(x, int) for _, x in nnx.iter_graph(model)) == 250


def test_registered_pytree_that_holds_itself_ends():
    box = Box(None)
    box.inner = box
    assert [path for path, _ in nnx.iter_graph(Net(box=box))] == [("box",), ()]
    assert nnx.find_duplicates(Net(box=box)) == []


def test_deep_chains_are_visited():
    model = Net()
    for _ in range(5000):
        model = Net(below=model)
    assert sum(1 for _ in nnx.iter_modules(model)) == 5001


def test_modules_are_listed_once_each():
    found = [(path, type(m).__name__) for path, m in nnx.iter_modules(net())]
    assert found == [
        (("a", 0), "Other"),
        (("a", 1, "n"), "Net"),
        (("c",), "List"),
        ((), "Net"),
    ]
    assert [type(m) for _, m in net().iter_modules()] == [Other, Net, nnx.List, Net]


def test_children_are_objects_and_variables_directly_in_it():
    model = Net(b=Net(), a=param(1), layers=[Net()], r=nnx.Rngs(0), k=1, x=jnp.ones(1))
    assert [key for key, _ in nnx.iter_children(model)] == ["a", "b", "r"]
    assert [key for key, _ in model.iter_children()] == ["a", "b", "r"]
    assert [key for key, _ in nnx.iter_module_children(model)] == ["b"]
    assert [key for key, _ in nnx.iter_module_children(model.layers)] == [0]


def test_duplicates_are_listed_with_all_their_paths():
    w = param(1)
    inner = Net(w=w)
    model = Net(a=inner, b=[inner, w], s=nnx.State({}))
    model.t = model.s
    assert nnx.find_duplicates(model) == [
        [("a",), ("b", 0)],
        [("a", "w"), ("b", 1)],
        [("s",), ("t",)],
    ]
    assert nnx.find_duplicates(model, only=nnx.Param) == [[("a", "w"), ("b", 1)]]
    model.me = model
    assert [(), ("me",)] in nnx.find_duplicates(model)


def test_contents_of_a_shared_list_are_no_duplicates():
    shared = [param(1)]
    assert nnx.find_duplicates({"a": shared, "b": shared}) == []


def test_map_gives_paths_and_leaves_and_keeps_sharing():
    w = param(1)
    model = Net(a=w, b=[w, jnp.ones(2)], s=nnx.State({"v": param(3)}))
    seen = []
    mapped = nnx.map(lambda path, leaf: seen.append(path) or leaf.shape, model)
    assert seen == [("a",), ("b", 1), ("s", "v")]
    assert (mapped.a, mapped.b, mapped.s["v"]) == ((1,), [(1,), (2,)], (3,))
    assert model.a is w


def test_map_of_the_identity_shares_no_variable():
    model = net()
    mapped = nnx.map(lambda path, leaf: leaf, model)
    assert_isomorphic(mapped, model)
    assert mapped.a[0] is not model.a[0]
    mapped.a[0].w[...] = jnp.zeros(1)
    assert model.a[0].w[...].tolist() == [1.0]


def test_map_of_a_state_is_a_state():
    mapped = nnx.map(lambda path, leaf: path, nnx.State({"a": {"b": param(1)}}))
    assert nnx.to_pure_dict(mapped) == {"a": {"b": ("a", "b")}}


def test_recursive_map_works_bottom_up_on_copies():
    model = net()
    order = []

    def f(path, x):
        order.append(path)
        if isinstance(x, Other):
            x.seen = True
        return x

    made = nnx.recursive_map(f, model)
    assert order.index(("a", 0, "w")) < order.index(("a", 0)) < order.index(())
    assert made.a[0] is made.b[0] is made.c[0]
    assert made.a[0].seen
    assert not hasattr(model.a[0], "seen")
    assert made.a[0].w is model.a[0].w


def test_recursive_map_replaces_nodes_everywhere():
    new = Net(replaced=True)
    made = nnx.recursive_map(lambda path, x: new if type(x) is Other else x, net())
    assert made.a[0] is made.b[0] is made.c[0] is new


def test_recursive_map_replaces_variables_in_values():
    made = nnx.recursive_map(lambda path, x: x.shape if isinstance(x, nnx.Variable) else x, net())
    assert made.b[1].left.inner == (1,)
    assert made.a[1]["n"].v == (1,)


def test_recursive_map_rebinds_methods_of_replaced_objects():
    model = Net(inner=Other(k=1))
    model.f = model.inner.double
    made = nnx.recursive_map(lambda path, x: Net(k=2) if type(x) is Other else x, model)
    assert made.f.__self__ is made.inner
    assert made.f.__self__.k == 2


def test_recursive_map_changes_objects_in_cycles_but_does_not_replace_them():
    model = Net(inner=Other())
    model.inner.up = model.inner
    made = nnx.recursive_map(lambda path, x: setattr(x, "k", 1) or x, model)
    assert made.inner.up is made.inner
    assert made.inner.k == 1
    with pytest.raises(nnx.errors.StructureError, match=r"replace model\.inner \(Other\)"):
        nnx.recursive_map(lambda path, x: Net() if type(x) is Other else x, model)


def test_set_metadata_on_chosen_variables():
    model = Net(a=param(1), b=nnx.BatchStat(jnp.ones(1)), layers=[param(1)])
    before = nnx.graphdef(model)
    nnx.set_metadata(model, only=nnx.Param, frozen=True)
    assert model.a.frozen
    assert model.layers[0].frozen
    assert not model.b.has_metadata("frozen")
    assert nnx.graphdef(model) is not before


def test_set_metadata_that_fails_changes_nothing():
    model = Net(a=param(1), b=param(1))
    with pytest.raises(nnx.errors.StaticValueError, match="metadata 'x' of Param"):
        nnx.set_metadata(model, x=jnp.ones(1))

    def f(y):
        nnx.set_metadata(model, tag="t")
        return y

    with pytest.raises(nnx.errors.TraceLevelError, match="set metadata of Param"):
        jax.jit(f)(1.0)
    assert not model.a.has_metadata("tag")

"""Objects as JAX pytrees: key paths, sharing and cycles, placeholders, trace levels."""

import collections
import copy
import gc
import pickle
import threading
import weakref

import jax
import jax.numpy as jnp
import optax
import pytest

import nnxlite as nnx
from nnxlite._core.trace import Opaque, opaque_nodes
from tests.isomorphism import assert_isomorphic
from tests.objects import Box, Net, Pair, is_variable, key_paths, param


def tied_net():
    """Shares a Variable, an object and a list, and holds itself."""
    w = param(3)
    net = Net(a=w, layers=[Net(w=w, v=param(3)), {"w": w}], pair=(w, 1), k=1)
    net.again, net.me = net.layers, net
    return net


def with_all_containers():
    """What the flax model has whose key paths are the expected ones below."""
    return Net(
        layers=nnx.List([Net(bias=param(1), kernel=param(1)) for _ in range(2)]),
        heads=nnx.Dict(a=Net(bias=param(1), kernel=param(1))),
        plain=[param(1)],
        pd={"k": param(1)},
        pi={3: param(1)},
        arr=jnp.ones(1),
        tup=(jnp.ones(1), param(1)),
        od=collections.OrderedDict(b=jnp.ones(1)),
        p=nnx.Param({"x": jnp.ones(1)}),
    )


def test_key_paths_are_those_of_flax():
    assert key_paths(with_all_containers()) == [
        ".arr",
        ".heads.a.bias.value",
        ".heads.a.kernel.value",
        ".layers[0].bias.value",
        ".layers[0].kernel.value",
        ".layers[1].bias.value",
        ".layers[1].kernel.value",
        ".od['b']",
        ".p.value['x']",
        ".pd['k'].value",
        ".pi[3].value",
        ".plain[0].value",
        ".tup[0]",
        ".tup[1].value",
    ]


def test_key_entries_are_of_the_types_that_flax_gives():
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(with_all_containers())]
    types = {jax.tree_util.keystr(path): [type(entry).__name__ for entry in path] for path in paths}
    assert types[".heads.a.bias.value"] == ["GetAttrKey"] * 4
    assert types[".layers[0].bias.value"] == [
        "GetAttrKey",
        "SequenceKey",
        "GetAttrKey",
        "GetAttrKey",
    ]
    assert types[".od['b']"] == ["GetAttrKey", "DictKey"]
    assert types[".pi[3].value"] == ["GetAttrKey", "DictKey", "GetAttrKey"]
    assert types[".tup[0]"] == ["GetAttrKey", "SequenceKey"]


def test_int_keys_of_a_dict_object_are_dict_keys():
    assert key_paths(Net(d=nnx.Dict({3: param(1)}))) == [".d[3].value"]


def test_named_tuples_and_registered_pytrees_keep_their_entries():
    net = Net(p=Pair(param(1), Box(jnp.ones(1))))
    assert key_paths(net) == [".p.left.value", ".p.right.inner"]


def test_flattening_with_and_without_paths_agrees():
    for net in (tied_net(), with_all_containers(), Net(), Net(k=1, e=[], t=((), {}))):
        with_paths, treedef = jax.tree_util.tree_flatten_with_path(net)
        leaves, same = jax.tree.flatten(net)
        assert treedef == same == jax.tree.structure(net)
        assert [id(x) for _, x in with_paths] == [id(x) for x in leaves]


TRANSFORMED = {
    "map": lambda net: jax.tree.map(lambda x: x + 1, net),
    "map over Variables": lambda net: jax.tree.map(
        lambda v: v.replace(v + 1), net, is_leaf=is_variable
    ),
    "jit": jax.jit(lambda net: jax.tree.map(lambda x: x + 1, net)),
    "donated jit": jax.jit(lambda net: jax.tree.map(lambda x: x + 1, net), donate_argnums=0),
    "vmap": jax.vmap(lambda net: jax.tree.map(lambda x: x + 1, net)),
    "vmap with axes": jax.vmap(
        lambda net: jax.tree.map(lambda x: x + 1, net), in_axes=(0,), out_axes=0
    ),
    "scan carry": lambda net: jax.lax.scan(
        lambda n, _: (jax.tree.map(lambda x: x + 1, n), None), net, length=1
    )[0],
    "scan over": lambda net: jax.lax.scan(
        lambda c, n: (c, jax.tree.map(lambda x: x + 1, n)), 0, net
    )[1],
    "fori_loop": lambda net: jax.lax.fori_loop(
        0, 1, lambda i, n: jax.tree.map(lambda x: x + 1, n), net
    ),
    "cond": lambda net: jax.lax.cond(
        True, lambda n: jax.tree.map(lambda x: x + 1, n), lambda n: n, net
    ),
    "checkpoint": jax.checkpoint(lambda net: jax.tree.map(lambda x: x + 1, net)),
}


@pytest.mark.parametrize("transform", TRANSFORMED.values(), ids=TRANSFORMED.keys())
def test_sharing_and_cycles_survive_plain_jax(transform):
    expected = tied_net()
    for v in (expected.a, expected.layers[0].v):
        v[...] += 1
    assert_isomorphic(transform(tied_net()), expected)


def test_a_shared_variable_is_one_leaf():
    net = tied_net()
    assert len(jax.tree.leaves(net)) == 2
    assert key_paths(net) == [".a.value", ".again[0].v.value"]


def test_gradients_of_both_uses_of_a_shared_variable_add_up():
    grads = jax.grad(lambda net: (net.a * 2.0 + net.layers[0].w * 3.0).sum())(tied_net())
    assert grads.a is grads.layers[0].w
    assert grads.a[...].tolist() == [5.0, 5.0, 5.0]


def test_one_trace_for_fresh_equal_models():
    traces = []

    @jax.jit
    def f(net):
        traces.append(net)
        return net.a + net.layers[0].v

    for _ in range(3):
        f(tied_net())
    assert len(traces) == 1


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "k", True),
        lambda net: net.layers.append(2),
        lambda net: setattr(net, "a", param(3)),
        lambda net: net.a.set_metadata("tag", 1),
    ],
)
def test_another_structure_is_another_trace(change):
    traces = []
    f = jax.jit(lambda net: traces.append(1))
    net = tied_net()
    f(net)
    change(net)
    f(net)
    assert len(traces) == 2


def test_structure_changed_in_place_is_seen_by_flattening():
    net = Net(layers=[param(1)])
    assert len(jax.tree.leaves(net)) == 1
    net.layers.append(Net(x=jnp.ones(1)))
    assert key_paths(net) == [".layers[0].value", ".layers[1].x"]
    net.layers.reverse()
    assert key_paths(net) == [".layers[0].x", ".layers[1].value"]


def test_arrays_as_attributes_are_flattened_as_they_are_now():
    net = Net(x=jnp.zeros(1), w=param(1))
    jax.tree.leaves(net)
    net.x = jnp.ones(1)
    assert jax.tree.leaves(net)[1].tolist() == [1.0]


def test_is_leaf_sees_variables():
    kinds = [type(x) for x in jax.tree.leaves(tied_net(), is_leaf=is_variable)]
    assert kinds == [nnx.Param, nnx.Param]


def test_is_leaf_sees_an_object_in_a_container():
    net = tied_net()
    leaves = jax.tree.leaves([net, 1], is_leaf=lambda x: isinstance(x, Net))
    assert leaves[0] is net


def marked_net():
    return Net(n=nnx.data(1), numbers=nnx.data([0.5, {"x": 2}]), m=nnx.static([1]), w=param(1))


MARKS = {
    "None": lambda x: None,
    "object": lambda x: object(),
    "int": lambda x: 0,
    "str": lambda x: "label",
    "sharding": lambda x: jax.sharding.SingleDeviceSharding(jax.devices()[0]),
    "struct": lambda x: jax.ShapeDtypeStruct((2,), jnp.float32),
    "array": lambda x: jnp.zeros(2),
    "tuple": lambda x: (1, 2),
    "object of ours": lambda x: Net(w=param(1)),
}


@pytest.mark.parametrize("mark", MARKS.values(), ids=MARKS.keys())
@pytest.mark.parametrize("is_leaf", [None, is_variable], ids=["arrays", "Variables"])
@pytest.mark.parametrize("make", [tied_net, with_all_containers, marked_net])
def test_anything_may_stand_at_a_leaf_and_be_mapped_back(make, is_leaf, mark):
    net = make()
    marked = jax.tree.map(mark, net, is_leaf=is_leaf)
    # A tree of marks has the shape of the model: it is a prefix of it, and flattens to itself.
    jax.tree.map(lambda a, b: None, net, marked, is_leaf=is_leaf)
    leaves, treedef = jax.tree.flatten(marked)
    again = jax.tree.unflatten(treedef, leaves)
    assert jax.tree.structure(again) == treedef
    assert jax.tree_util.tree_flatten_with_path(marked)[1] == treedef
    nodes = jax.tree.structure(net, is_leaf=is_leaf)
    assert_isomorphic(jax.tree.unflatten(nodes, jax.tree.leaves(net, is_leaf=is_leaf)), net)


def test_marks_hold_for_parts_of_a_marked_model_too():
    axes = jax.tree.map(lambda _: 0, tied_net(), is_leaf=is_variable)
    part = axes.layers[0]
    jax.tree.map(lambda a, b: None, tied_net().layers[0], part, is_leaf=is_variable)
    axes.again = axes.me = None  # no longer the tree that JAX made
    assert jax.tree.leaves(axes) == [0, 0]


@pytest.mark.parametrize(
    "copied",
    [
        lambda tree: pickle.loads(pickle.dumps(tree)),
        copy.deepcopy,
        nnx.clone,
        lambda tree: nnx.merge(*nnx.split(tree)),
        lambda tree: jax.tree.map(lambda x: x, tree),
    ],
)
def test_marks_survive_copies(copied):
    axes = jax.tree.map(lambda _: 0, tied_net(), is_leaf=is_variable)
    assert jax.tree.structure(copied(axes)) == jax.tree.structure(axes)
    assert nnx.state(copied(axes)).flat_state() == nnx.state(axes).flat_state()


def test_what_the_user_assigns_replaces_a_mark():
    axes = jax.tree.map(lambda _: 0, Net(w=param(1), v=param(1)), is_leaf=is_variable)
    axes.w = "a static now"
    assert jax.tree.leaves(axes) == [0]


def test_vmap_takes_objects_of_axes():
    net = Net(w=nnx.Param(jnp.arange(6.0).reshape(2, 3)), b=param(3), k="static")
    axes = jax.tree.map(lambda _: 0, net)
    axes.b = nnx.Param.from_metadata(None, {})
    out = jax.vmap(lambda net: net.w + net.b, in_axes=(axes,))(net)
    assert out.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]


def test_vmap_takes_axes_at_variables_and_gives_objects_back():
    def at_variables(w, b):
        axes = jax.tree.map(lambda _: 0, Net(b=param(1), w=param(1)), is_leaf=is_variable)
        return jax.tree.unflatten(jax.tree.structure(axes), [b, w])

    net = Net(w=nnx.Param(jnp.arange(6.0).reshape(3, 2)), b=nnx.Param(jnp.ones((2, 3))))
    out = jax.vmap(lambda net: net, in_axes=(at_variables(1, 0),), out_axes=at_variables(0, 1))(net)
    assert (out.w.shape, out.b.shape) == ((2, 3), (3, 2))
    assert out.w[...].tolist() == [[0.0, 2.0, 4.0], [1.0, 3.0, 5.0]]


def test_jit_takes_shardings_at_variables_and_at_arrays():
    net = tied_net()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for is_leaf in (None, is_variable):
        shardings = jax.tree.map(lambda _: sharding, net, is_leaf=is_leaf)
        f = jax.jit(lambda n: n, in_shardings=(shardings,), out_shardings=shardings)
        assert_isomorphic(f(net), net)
    assert_isomorphic(jax.device_put(net, sharding), net)


def test_eval_shape_gives_abstract_objects_that_work():
    abstract = jax.eval_shape(tied_net)
    assert abstract.a is abstract.layers[0].w
    assert abstract.a.get_raw_value() == jax.ShapeDtypeStruct((3,), jnp.float32)
    assert nnx.graphdef(abstract) is nnx.graphdef(tied_net())
    assert key_paths(nnx.state(abstract)) == key_paths(nnx.state(tied_net()))


@pytest.mark.standard_promotion
def test_optax_trains_an_object():
    def loss(net):
        return ((net.a + net.layers[0].v - 3.0) ** 2).sum()

    net, tx = tied_net(), optax.adam(0.1)
    opt_state = tx.init(net)
    updates, opt_state = jax.jit(tx.update)(jax.grad(loss)(net), opt_state, net)
    stepped = optax.apply_updates(net, updates)
    assert stepped.a is stepped.layers[1]["w"]
    assert float(loss(stepped)) < float(loss(net))


def test_object_in_the_place_of_a_level_stands_for_all_below():
    net = Net(a=Net(w=param(1), v=param(1)), b=param(1))
    leaves = jax.tree.leaves(net, is_leaf=is_variable)
    is_level = lambda x: key_paths(x) == [".v.value", ".w.value"]  # noqa: E731
    axes = jax.tree.map(lambda _: 0, net, is_leaf=is_level)
    assert len(leaves) == 3
    assert (axes.a.v, axes.a.w) == (0, 0)


def test_unflattening_checks_nothing():
    class Strict(Net):
        def __init__(self, **attributes):
            super().__init__(**attributes)
            assert isinstance(self.w, nnx.Param)

    made = jax.tree.unflatten(jax.tree.structure(Strict(w=param(1))), ["anything"])
    assert made.w.get_raw_value() == "anything"


def test_under_the_opaque_flag_objects_are_single_leaves():
    net = tied_net()
    with opaque_nodes():
        leaves, treedef = jax.tree.flatten({"net": net, "x": 1})
        paths = key_paths({"net": net})
    assert type(leaves[0]) is Opaque
    assert leaves[0].node is net
    assert len(paths) == 1
    assert jax.tree.unflatten(treedef, leaves)["net"] is net


def test_objects_made_by_jax_may_be_written_where_jax_made_them():
    @jax.jit
    def f(net):
        net.a[...] = net.a * 2.0
        net.new = net.a + 1.0
        net.layers.append(param(1))
        net.state["x"][...] = net.state["x"] * 2.0
        return net

    net = Net(a=param(2), layers=[], state=nnx.State({"x": param(2)}))
    out = f(net)
    assert out.a[...].tolist() == out.state.x[...].tolist() == [2.0, 2.0]
    assert out.new.tolist() == [3.0, 3.0]
    assert not hasattr(net, "new")
    assert net.a[...].tolist() == net.state.x[...].tolist() == [1.0, 1.0]


WRITES = {
    "Variable": (lambda net, x: net.w.__setitem__(..., x), "the value of Param"),
    "attribute": (lambda net, x: setattr(net, "x", x), "attribute 'x' of Net"),
    "deletion": (lambda net, x: delattr(net, "w"), "delete attribute 'w' of Net"),
    "metadata": (lambda net, x: net.w.set_metadata("k", 1), "metadata of Param"),
    "List": (lambda net, x: net.items.append(x), "item 1 of List"),
    "List removal": (lambda net, x: net.items.clear(), "items of List"),
    "Dict": (lambda net, x: net.table.__setitem__("a", x), "item 'a' of Dict"),
    "State": (lambda net, x: net.state.w.__setitem__(..., x), "the value of Param"),
    "State entry": (lambda net, x: net.state.__setitem__("v", x), r"set state\.v"),
    "State entry below": (lambda net, x: net.state["d"].__delitem__("v"), r"delete state\.d\.v"),
}


def writable_net():
    state = nnx.State({"w": param(2), "d": {"v": param(2)}})
    return Net(w=param(2), items=nnx.List([1]), table=nnx.Dict(), state=state)


@pytest.mark.parametrize(("write", "what"), WRITES.values(), ids=WRITES.keys())
@pytest.mark.parametrize(
    "inner",
    [
        jax.jit,
        jax.grad,
        jax.vmap,
        jax.checkpoint,
        lambda f: lambda x: jax.lax.scan(lambda c, y: (c + f(y), None), 0.0, x[None])[0],
    ],
    ids=["jit", "grad", "vmap", "checkpoint", "scan"],
)
def test_writes_from_an_inner_trace_are_errors_that_name_what(inner, write, what):
    net = writable_net()
    before = nnx.split(net)

    def f(x):
        write(net, x)
        return x.sum()

    with pytest.raises(nnx.errors.TraceLevelError, match=what):
        inner(f)(jnp.ones(2))
    assert nnx.graphdef(net) is before[0]
    assert_isomorphic(nnx.state(net).flat_state(), before[1].flat_state())


@pytest.mark.parametrize(("write", "what"), WRITES.values(), ids=WRITES.keys())
def test_objects_made_by_jax_are_not_written_from_a_trace_further_in(write, what):
    @jax.jit
    def outer(net):
        def f(x):
            write(net, x)
            return x.sum()

        return jax.grad(f)(jnp.ones(2))

    with pytest.raises(nnx.errors.TraceLevelError, match=what):
        outer(writable_net())


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: jax.jit(f)(jnp.ones(2)),
        lambda f: jax.vmap(f)(jnp.ones((1, 2)))[0],
        lambda f: jax.lax.scan(lambda c, x: (c, f(x)), 0, jnp.ones((1, 2)))[1][0],
        lambda f: jax.lax.map(f, jnp.ones((1, 2)))[0],
        lambda f: jax.value_and_grad(lambda x: (f(x).sum(), f(x)), has_aux=True)(jnp.ones(2))[0][1],
        lambda f: jax.jacfwd(lambda x: f(x), has_aux=False)(jnp.ones(2)).diagonal() + 1,
    ],
)
def test_closed_over_objects_are_read_in_every_trace(transform):
    net = writable_net()
    net.x, net.layers = jnp.ones(2), [param(2)]

    def f(x):
        assert len(jax.tree.leaves(net)) == 5
        total = x * net.w + net.state["d"]["v"] - net.x
        return total + nnx.clone(net).w * nnx.state(net)["layers"][0]

    assert transform(f).tolist() == [2.0, 2.0]


def test_objects_made_in_a_trace_belong_to_the_caller_when_they_come_out():
    net = jax.jit(lambda: tied_net())()
    net.a[...] = jnp.zeros(3)
    net.new = 1
    assert net.layers[0].w[...].tolist() == [0.0, 0.0, 0.0]


def test_rebuilt_objects_die_at_once():
    net = Net(w=param(2), layers=[Net(w=param(2))], x=jnp.ones(2))
    mapped = jax.tree.map(lambda x: x, net)
    died = weakref.ref(mapped), weakref.ref(mapped.layers[0])
    gc.collect()
    gc.disable()
    try:
        del mapped
        assert [ref() for ref in died] == [None, None]
    finally:
        gc.enable()


def test_jit_caches_keep_no_model_alive():
    f = jax.jit(lambda net: net)
    net = tied_net()
    del net.me
    f(net)
    died = weakref.ref(net)
    gc.collect()
    del net
    assert died() is None


@pytest.mark.parametrize(
    "change",
    [
        lambda net: setattr(net, "x", jnp.zeros(1)),
        lambda net: setattr(net, "w", param(1)),
        lambda net: delattr(net, "w"),
        lambda net: nnx.pop(net, nnx.Param),
        lambda net: setattr(net, "sub", None),
    ],
)
def test_replaced_contents_are_let_go_of(change):
    net = Net(w=param(1), x=jnp.ones(1), sub=Net(w=param(1)))
    jax.tree.leaves(net)
    jax.jit(lambda n: n)(net)
    held = [weakref.ref(x) for x in (net.w, net.sub.w, net.x)]
    change(net)
    gc.collect()
    assert any(ref() is None for ref in held)


def test_threads_flatten_and_build_the_same():
    net, start, found = tied_net(), threading.Barrier(8), []
    net.me = net.again = None

    def work():
        start.wait()
        for _ in range(20):
            leaves, treedef = jax.tree.flatten(net)
            rebuilt = jax.tree.unflatten(treedef, leaves)
            found.append((treedef == jax.tree.structure(rebuilt), rebuilt.a is rebuilt.pair[0]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [(True, True)] * 160

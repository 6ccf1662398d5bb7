"""Plans: every change of structure is seen at the next use, and nothing is kept alive."""

import collections
import dataclasses
import functools
import gc
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx
from nnxlite._core.plan import make_plan, plan_of
from tests.objects import Box, Net, Pair, param


def test_unchanged_object_keeps_its_plan():
    net = Net(w=param(1), layers=[Net(w=param(1)), {"a": 1}], s={1}, box=Box(param(1)))
    plan = plan_of(net)
    net.w[...] = jnp.zeros(1)
    net.layers[0].w.value = jnp.zeros(3)
    Net(other=param(1))
    assert plan_of(net) is plan


def test_arrays_are_read_anew():
    net = Net(x=jnp.zeros(2), t=(jnp.zeros(2), [jnp.zeros(1)]))
    plan = plan_of(net)
    net.x = jnp.ones(2)
    net.t[1][0] = jnp.ones(1)
    assert plan_of(net) is plan
    assert [x.tolist() for x in plan.gather()] == [[0.0, 0.0], [1.0], [1.0, 1.0]]


class Wide:
    """Gives each change something to change."""

    def __init__(self):
        self.other = Net(w=param(1))
        self.net = Net(
            w=param(1, tag="a"),
            k=1,
            x=jnp.ones(2),
            below=Net(w=param(1), k=1),
            layers=[Net(w=param(1)), 2, [3]],
            heads={"a": Net(w=param(1)), "k": 1},
            pair=(1, [Net()]),
            boxes=[Box(param(1), "t"), (param(1), 2)],
            names={1, 2},
            config=Frozen([1]),
            ordered=collections.OrderedDict(a=1),
            methods=[self.other.double, functools.partial(self.other.double, 1)],
            partials=[functools.partial(max, 1)],
            items=nnx.List([param(1), 2]),
            table=nnx.Dict(a=param(1)),
            none=[Net(), None],
        )
        self.net.held = nnx.static([np.ones(1)])


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A static value that is keyed by value, and yet can be changed in place."""

    sizes: list


CHANGES = {
    "static": lambda w: setattr(w.net, "k", True),
    "nested static": lambda w: setattr(w.net.below, "k", 2),
    "new attribute": lambda w: setattr(w.net.below, "new", 1),
    "deleted attribute": lambda w: delattr(w.net.below, "w"),
    "another Variable": lambda w: setattr(w.net, "w", nnx.BatchStat(jnp.ones(1))),
    "array to Variable": lambda w: setattr(w.net, "x", param(2)),
    "Variable to array": lambda w: setattr(w.net, "w", jnp.ones(2)),
    "tied": lambda w: setattr(w.net, "w", w.net.below.w),
    "metadata": lambda w: w.net.w.set_metadata("tag", "b"),
    "metadata below": lambda w: w.net.layers[0].w.set_metadata("tag", "b"),
    "data mark": lambda w: setattr(w.net, "k", nnx.data(1)),
    "append": lambda w: w.net.layers.append(param(1)),
    "insert": lambda w: w.net.layers.insert(0, 9),
    "remove": lambda w: w.net.layers.pop(0),
    "reorder": lambda w: w.net.layers.reverse(),
    "static element": lambda w: w.net.layers.__setitem__(1, 2.0),
    "inner list": lambda w: w.net.layers[2].append(4),
    "object to None": lambda w: w.net.none.__setitem__(0, None),
    "None to object": lambda w: w.net.none.__setitem__(1, Net()),
    "dict entry": lambda w: w.net.heads.__setitem__("a", Net()),
    "new dict entry": lambda w: w.net.heads.__setitem__("b", 2),
    "deleted dict entry": lambda w: w.net.heads.pop("k"),
    "renamed dict entry": lambda w: w.net.heads.__setitem__("c", w.net.heads.pop("k")),
    "list in a tuple": lambda w: w.net.pair[1].append(1),
    "foreign child": lambda w: setattr(w.net.boxes[0], "inner", Net()),
    "foreign static": lambda w: setattr(w.net.boxes[0], "tag", "u"),
    "tuple in a list": lambda w: w.net.boxes.__setitem__(1, (param(1), 3)),
    "longer tuple in a list": lambda w: w.net.boxes.__setitem__(1, (param(1), 2, 3)),
    "set": lambda w: w.net.names.add(3),
    "set of equal values": lambda w: (w.net.names.remove(1), w.net.names.add(True)),
    "list in a static dataclass": lambda w: w.net.config.sizes.append(2),
    "ordered dict": lambda w: w.net.ordered.__setitem__("b", param(1)),
    "ordered dict moved": lambda w: (w.net.ordered.update(b=1), w.net.ordered.move_to_end("a")),
    "method in a list": lambda w: w.net.methods.__setitem__(0, w.other.triple),
    "method of another": lambda w: w.net.methods.__setitem__(0, w.net.double),
    "partial of a method": lambda w: w.net.methods.__setitem__(
        1, functools.partial(w.other.double, 2)
    ),
    "other function in a partial": lambda w: w.net.methods.__setitem__(
        1, functools.partial(w.other.triple, 1)
    ),
    "partial in a list": lambda w: w.net.partials.__setitem__(0, functools.partial(max, 2)),
    "static array in a list": lambda w: w.net.held.__setitem__(0, np.ones(1)),
    "List append": lambda w: w.net.items.append(1),
    "List item": lambda w: w.net.items.__setitem__(1, 3),
    "List removal": lambda w: w.net.items.pop(0),
    "Dict entry": lambda w: w.net.table.__setitem__("b", 1),
    "Dict attribute": lambda w: setattr(w.net.table, "a", 1),
    "Dict removal": lambda w: w.net.table.pop("a"),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_each_change_of_structure_is_seen(change):
    changed, expected = Wide(), Wide()
    plan = plan_of(changed.net)
    jax.tree.leaves(changed.net)
    change(changed)
    change(expected)
    assert not plan.is_current()
    assert nnx.graphdef(changed.net).leaves == nnx.graphdef(expected.net).leaves
    assert nnx.graphdef(changed.net).paths == nnx.graphdef(expected.net).paths
    assert len(jax.tree.leaves(changed.net)) == len(nnx.graphdef(expected.net).leaves)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_each_change_is_seen_by_plans_of_parts_and_wholes(change):
    wide = Wide()
    whole = Net(inner=[wide.net])
    nnx.split(whole)
    nnx.split(wide.net)
    change(wide)
    assert nnx.graphdef(whole).leaves == nnx.graphdef(wide.net).leaves


def test_new_array_under_a_static_mark_is_a_change():
    net = Net(mask=nnx.static(np.ones(2)))
    before = nnx.graphdef(net)
    net.mask = np.ones(2)
    assert nnx.graphdef(net) is not before


def test_number_and_array_under_a_data_mark_are_no_change():
    net = Net(rate=nnx.data(0.5))
    plan = plan_of(net)
    net.rate = jnp.float32(0.25)
    net.rate = 0.75
    assert plan_of(net) is plan
    assert plan.gather() == [0.75]


def test_state_as_attribute_is_seen_to_change():
    state = nnx.State({"a": param(1), "b": {"c": param(1)}})
    net = Net(state=state)
    seen = {nnx.graphdef(net)}
    for change in (
        lambda: state["a"].set_metadata("tag", 1),
        lambda: state["b"].__setitem__("d", param(1)),
        lambda: state.__delitem__("a"),
        lambda: state["b"]["d"].set_metadata("tag", 1),
        lambda: state.__setitem__("a", jnp.ones(1)),
    ):
        change()
        assert nnx.graphdef(net) not in seen
        seen.add(nnx.graphdef(net))


def test_view_of_a_state_as_attribute_is_seen_to_change():
    state = nnx.State({"a": {"w": param(1)}})
    net = Net(view=state["a"])
    before = nnx.graphdef(net)
    state["a"]["w"].set_metadata("tag", 1)
    between = nnx.graphdef(net)
    state["a"]["v"] = param(1)
    assert len({before, between, nnx.graphdef(net)}) == 3


def test_arrays_are_written_where_they_hang():
    net = Net(x=jnp.zeros(1), layers=[jnp.zeros(1)], t=(1, Box(jnp.zeros(1))))
    layers, box = net.layers, net.t[1]
    plan = plan_of(net)
    plan.write(range(3), [jnp.ones(1)] * 3)
    assert [x.tolist() for x in (net.x, net.layers[0], net.t[1].inner)] == [[1.0]] * 3
    assert net.layers is layers
    assert net.t[1] is not box
    assert plan_of(net) is plan


def test_plan_of_containers_keeps_them():
    plan, _ = make_plan(([jnp.ones(1)], {"a": jnp.ones(1)}))
    gc.collect()
    assert [x.tolist() for x in plan.gather()] == [[1.0], [1.0]]


@pytest.mark.parametrize("make", [lambda: Net(w=param(2)), lambda: Wide().net])
def test_dropped_object_dies_at_once(make):
    net = make()
    nnx.split(net)
    jax.tree.leaves(net)
    nnx.clone(net)
    died = weakref.ref(net)
    gc.collect()
    gc.disable()
    try:
        del net
        assert died() is None
    finally:
        gc.enable()


def test_dropped_cycle_dies_with_the_next_collection():
    net = Net(w=param(2))
    net.me = [net]
    nnx.split(net)
    jax.tree.leaves(net)
    died = weakref.ref(net)
    del net
    gc.collect()
    assert died() is None


def test_arrays_of_dropped_objects_are_freed():
    gc.collect()
    before = len(jax.live_arrays())
    for _ in range(3):
        net = Net(w=param(8), x=jnp.ones(8), layers=[param(8)])
        nnx.merge(*nnx.split(net))
        jax.tree.map(lambda x: x, net)
    del net
    gc.collect()
    assert len(jax.live_arrays()) == before


def test_writes_of_another_level_name_path_and_kind():
    net = Net(layers=[param(2)])

    def f(x):
        nnx.update(net, {"layers": {0: x}})
        return x

    with pytest.raises(nnx.errors.TraceLevelError, match=r"update model\.layers\[0\] \(Param\)"):
        jax.jit(f)(jnp.ones(2))
    assert net.layers[0][...].tolist() == [1.0, 1.0]


def test_containers_alone_belong_to_the_level_that_runs():
    def f(x):
        tree = {"w": jnp.zeros(2)}
        nnx.update(tree, {"w": x})
        return tree["w"]

    assert jax.jit(f)(jnp.ones(2)).tolist() == [1.0, 1.0]


def test_change_during_the_walk_is_found_at_the_next_use():
    class Late(Net):
        def _node_items(self):
            # What another thread might do between the visits of two objects.
            if not getattr(first, "late", None):
                first.late = 1
            return super()._node_items()

    first = Net()
    root = Net(a=first, b=Late())
    nnx.split(root)
    assert nnx.graphdef(root) is nnx.graphdef(nnx.clone(root))
    assert nnx.clone(root).a.late == 1


def test_threads_make_equal_plans():
    def model():
        return Net(layers=[Net(w=param(2), k=n) for n in range(5)], t=(param(1), {1, 2}))

    shared, results, start = model(), [], threading.Barrier(8)

    def work():
        start.wait()
        for _ in range(5):
            mine = model()
            leaves = jax.tree.leaves(shared)
            results.append((nnx.graphdef(mine), nnx.graphdef(shared), len(leaves)))
            mine.layers.append(Net())
            nnx.merge(*nnx.split(mine))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(results) == {(nnx.graphdef(shared), nnx.graphdef(shared), 6)}
    assert len(results) == 40


def test_method_type_of_plain_objects_is_static():
    text = "abc"
    assert isinstance(Net().double, types.MethodType)
    assert nnx.graphdef(Net(f=text.upper)).paths == ()
    assert Pair(1, 2)._replace(left=2) == (2, 2)

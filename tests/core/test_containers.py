"""List, Dict and Sequential: the behaviour of list and dict, as Modules."""

import copy
import pickle

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.isomorphism import assert_isomorphic
from tests.objects import Net, param

LIST_CHANGES = {
    "append": lambda x: x.append(9),
    "extend": lambda x: x.extend([8, 9]),
    "extend by itself": lambda x: x.extend(x),
    "insert": lambda x: x.insert(1, 9),
    "insert at the end": lambda x: x.insert(99, 9),
    "insert from the end": lambda x: x.insert(-1, 9),
    "insert far below": lambda x: x.insert(-99, 9),
    "set": lambda x: x.__setitem__(1, 9),
    "set from the end": lambda x: x.__setitem__(-1, 9),
    "set slice": lambda x: x.__setitem__(slice(1, 3), [7, 8, 9]),
    "set steps": lambda x: x.__setitem__(slice(None, None, 2), [8, 9]),
    "delete": lambda x: x.__delitem__(0),
    "delete from the end": lambda x: x.__delitem__(-1),
    "delete slice": lambda x: x.__delitem__(slice(1, None)),
    "delete steps": lambda x: x.__delitem__(slice(None, None, -2)),
    "pop": lambda x: x.pop(),
    "pop first": lambda x: x.pop(0),
    "remove": lambda x: x.remove(2),
    "reverse": lambda x: x.reverse(),
    "clear": lambda x: x.clear(),
    "iadd": lambda x: x.__iadd__([9]),
}


@pytest.mark.parametrize("change", LIST_CHANGES.values(), ids=LIST_CHANGES.keys())
def test_list_changes_as_a_list_does(change):
    ours, plain = nnx.List([1, 2, 3, 4]), [1, 2, 3, 4]
    nnx.split(ours)
    change(ours)
    change(plain)
    assert list(ours) == plain
    assert len(ours) == len(plain)
    assert nnx.graphdef(ours) is nnx.graphdef(nnx.List(plain))


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[0],
        lambda x: x[-2],
        lambda x: list(x[1:3]),
        lambda x: list(x[::-1]),
        lambda x: x.index(2),
        lambda x: x.index(2, 2),
        lambda x: x.index(2, -1),
        lambda x: x.count(2),
        lambda x: 2 in x,
        lambda x: 9 in x,
        lambda x: list(reversed(x)),
        lambda x: bool(x),
        lambda x: list(x + [5]),
        lambda x: x[4],
        lambda x: x[-5],
        lambda x: x.index(9),
        lambda x: x["a"],
        lambda x: x.remove(9),
    ],
)
def test_list_is_read_as_a_list_is(read):
    def outcome(x):
        try:
            return read(x)
        except (IndexError, ValueError, TypeError) as error:
            return type(error)

    assert outcome(nnx.List([1, 2, 3, 2])) == outcome([1, 2, 3, 2])


def test_list_may_grow_while_it_is_read():
    items = nnx.List([1, 2])
    seen = []
    for item in items:
        seen.append(item)
        if len(items) < 5:
            items.append(item)
    assert seen == list(items) == [1, 2, 1, 2, 1]


def test_empty_list_may_be_made_and_filled():
    assert len(nnx.List()) == len(nnx.List(None)) == len(nnx.List([])) == 0
    assert not nnx.List()
    with pytest.raises(IndexError, match="List of 0 items has no item 0"):
        nnx.List()[0]


def test_list_finds_variables_and_arrays_by_identity():
    v, w, x = param(2), param(2), jnp.ones(2)
    items = nnx.List([v, w, x, x + 0])
    assert [items.index(v), items.index(w), items.index(x)] == [0, 1, 2]
    assert param(2) not in items
    assert items.count(x) == 1
    items.remove(w)
    assert len(items) == 3


def test_list_order_is_numeric():
    model = Net(layers=nnx.List([param(n) for n in range(1, 12)]))
    sizes = [leaf.size for leaf in nnx.state(model).flat_state().leaves]
    assert sizes == list(range(1, 12))
    assert [x.size for x in jax.tree.leaves(model)] == list(range(1, 12))
    merged = nnx.merge(*nnx.split(model))
    assert [v.size for v in merged.layers] == list(range(1, 12))


def test_list_keeps_marks_with_their_items():
    items = nnx.List([1, nnx.data(2.0), 3])
    items.insert(0, "first")
    assert nnx.to_pure_dict(nnx.state(items)) == {2: 2.0}
    items[:1] = [nnx.data(0.5), 9]
    assert nnx.to_pure_dict(nnx.state(items)) == {0: 0.5, 3: 2.0}
    del items[0]
    assert nnx.to_pure_dict(nnx.state(items)) == {2: 2.0}


def test_list_holds_items_only():
    items = nnx.List([1])
    with pytest.raises(AttributeError, match="A List holds items only: 'name'"):
        items.name = "x"
    assert vars(items) == {0: 1}
    assert {"append", "train"} <= set(dir(items))
    assert "mro" not in dir(items)


def test_typed_constructors_add_nothing():
    assert vars(nnx.List[int]([1])) == {0: 1}
    assert vars(nnx.Dict[int](a=1)) == {"a": 1}


DICT_CHANGES = {
    "set": lambda x: x.__setitem__("c", 3),
    "replace": lambda x: x.__setitem__("a", 9),
    "delete": lambda x: x.__delitem__("a"),
    "pop": lambda x: x.pop("a"),
    "pop default": lambda x: x.pop("z", None),
    "popitem": lambda x: x.popitem(),
    "update": lambda x: x.update({"a": 5}, d=4),
    "setdefault": lambda x: x.setdefault("d", 4),
    "clear": lambda x: x.clear(),
}


@pytest.mark.parametrize("change", DICT_CHANGES.values(), ids=DICT_CHANGES.keys())
def test_dict_changes_as_a_dict_does(change):
    ours, plain = nnx.Dict(a=1, b=2), {"a": 1, "b": 2}
    nnx.split(ours)
    if change is not DICT_CHANGES["popitem"]:  # ours takes the first item, as MutableMapping does
        change(plain)
        change(ours)
    assert dict(ours) == plain
    assert list(ours.items()) == list(plain.items())
    assert nnx.graphdef(ours) is nnx.graphdef(nnx.Dict(plain))


def test_dict_is_read_by_key_and_by_attribute():
    heads = nnx.Dict({"a": 1}, b=2)
    assert (heads["a"], heads.b, heads.get("z"), "b" in heads, len(heads)) == (1, 2, None, True, 2)
    heads.c = 3
    assert heads["c"] == 3
    del heads.c
    assert list(heads) == ["a", "b"]
    assert {"a", "items"} <= set(dir(heads))
    for read in (lambda: heads["z"], lambda: heads.__delitem__("z")):
        with pytest.raises(KeyError, match="z"):
            read()
    with pytest.raises(AttributeError, match="z"):
        heads.z


def test_dict_with_int_keys():
    table = nnx.Dict({10: param(1), 9: param(2)})
    assert nnx.state(table).flat_state().paths == ((9,), (10,))
    assert nnx.clone(table)[9].shape == (2,)


@pytest.mark.parametrize("key", [1.5, None, (1,), True])
def test_dict_refuses_other_keys(key):
    with pytest.raises(nnx.errors.StructureError, match="must be str or int"):
        nnx.Dict({key: 1})


def test_dict_refuses_mixed_keys_and_stays_as_it_is():
    heads = nnx.Dict(a=1)
    with pytest.raises(nnx.errors.StructureError, match="must be all str or all int"):
        heads[0] = 2
    with pytest.raises(nnx.errors.StructureError, match="must be all str or all int"):
        nnx.Dict({0: 1}).a = 2
    assert dict(heads) == {"a": 1}


def test_containers_are_modules_with_identity():
    shared = nnx.List([param(1)])
    model = Net(a=shared, b=nnx.Dict(x=shared))
    made = nnx.clone(model)
    assert made.a is made.b["x"]
    assert isinstance(shared, nnx.Module)
    assert nnx.List([1]) != nnx.List([1])
    assert len({shared, shared}) == 1
    model.a.append(nnx.Dropout(0.5))
    model.a.eval()
    assert model.a[1].deterministic


def pickled(x):
    return pickle.loads(pickle.dumps(x))


@pytest.mark.parametrize("copied", [copy.deepcopy, copy.copy, pickled])
def test_containers_are_copied(copied):
    for made in (nnx.List([param(1), 2]), nnx.Dict(a=param(1), b=2)):
        other = copied(made)
        assert_isomorphic(other, made)
        other.pop(1 if isinstance(other, nnx.List) else "b")
        assert len(made) == 2


def test_changes_in_a_jitted_function_arrive():
    model = Net(items=nnx.List([param(1), 2]), table=nnx.Dict(a=param(1)))
    items, table = model.items, model.table

    @nnx.jit
    def f(model):
        model.items.append(nnx.Param(jnp.zeros(3)))
        del model.items[1]
        model.table["b"] = model.items[0]
        del model.table["a"]

    f(model)
    assert model.items is items
    assert [v.shape for v in items] == [(1,), (3,)]
    assert model.table is table
    assert table["b"] is items[0]
    assert list(table) == ["b"]


def test_subclass_of_a_container_may_have_methods():
    class Stack(nnx.List):
        def __call__(self, x):
            for layer in self:
                x = layer(x)
            return x

    stack = Stack([lambda x: x + 1, lambda x: x * 2])
    assert int(nnx.jit(lambda s, x: s(x))(stack, jnp.int32(1))) == 4
    assert type(nnx.clone(stack)) is Stack


def test_arrays_set_at_each_step_keep_the_plan():
    items = nnx.List([jnp.zeros(1)])
    nnx.split(items)
    plan = items._plan
    items[0] = jnp.ones(1)
    nnx.split(items)
    assert items._plan is plan


def test_sequential_applies_its_layers_in_order():
    model = nnx.Sequential(lambda x: x + 1, lambda x: x * 2)
    assert model(1) == 4
    assert len(list(model)) == 2
    assert len(model.layers) == 2


def test_sequential_spreads_tuples_and_dicts():
    model = nnx.Sequential(lambda x: (x, x + 1), lambda a, b: {"b": a, "a": b}, lambda a, b: a - b)
    assert model(5) == 1


def test_sequential_passes_keyword_arguments_to_layers_that_have_them():
    class Scale(nnx.Module):
        def __call__(self, x, *, by):
            return x * by

    model = nnx.Sequential(lambda x: x + 1, Scale(), lambda x, **named: x + named["by"])
    assert model(1, by=3) == 9
    assert nnx.Sequential(lambda x, by: x * by)(2, by=3) == 6
    assert nnx.Sequential(lambda x, by: x * by)(2, 5) == 10


@pytest.mark.parametrize(
    ("args", "kwargs", "expected"),
    [((1,), {}, 1), ((1, 2), {}, (1, 2)), ((), {"a": 1}, {"a": 1}), ((), {}, None)],
)
def test_sequential_without_layers_gives_its_arguments(args, kwargs, expected):
    assert nnx.Sequential()(*args, **kwargs) == expected


def test_layer_that_cannot_be_called_is_an_error():
    with pytest.raises(TypeError, match=r"layers\[1\] of Sequential is a int"):
        nnx.Sequential(lambda x: x, 3)(1)


def test_keyword_arguments_that_no_layer_takes_are_left_out():
    assert nnx.Sequential(lambda x: x + 1, lambda x: x * 2)(1, rngs=nnx.Rngs(0)) == 4

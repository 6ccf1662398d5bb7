"""The description tree: what there is, where it stands, how much it holds."""

import types
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nnxlite._core.describe import Count, Description, Parts, describe


class Variable:
    """Looks to `describe` as the library's own Variable does."""

    __nnx_node__ = True

    def __init__(self, value, **metadata):
        self._value = value
        self._meta = types.SimpleNamespace(mapping=metadata)


class Param(Variable):
    pass


class Count_(Variable):
    pass


class Node:
    """Looks to `describe` as the library's own objects do."""

    __nnx_node__ = True

    def __init__(self, **attributes):
        self.__dict__.update(attributes)

    def _node_items(self):
        return self.__dict__


class Pair(NamedTuple):
    left: object
    right: object


@jax.tree_util.register_pytree_with_keys_class
class Registered:
    def __init__(self, data):
        self.data = data

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("data"), self.data)], None

    @classmethod
    def tree_unflatten(cls, aux, children):
        return cls(*children)


def child(description: Description, *keys) -> Description:
    for key in keys:
        (description,) = [c for c in description.children if c.key == key]
    return description


def test_describe_gives_keys_paths_and_kinds():
    node = Node(kernel=Param(jnp.ones((2, 3))), blocks=[Node(rate=0.5, x=np.ones(2))])
    found = describe(node)
    assert (found.kind, found.access, found.path) == ("object", "root", ())
    kernel = child(found, "kernel")
    assert (kernel.kind, kernel.title, kernel.path) == ("variable", "Param", ("kernel",))
    assert child(found, "blocks", 0, "x").path == ("blocks", 0, "x")
    assert child(found, "blocks", 0, "x").kind == "array"
    assert child(found, "blocks", 0, "rate").summary == "0.5"


def test_counts_are_by_kind_and_per_subtree():
    node = Node(a=Param(jnp.ones((2, 3))), b=Node(c=Count_(jnp.ones(1, jnp.int8)), d=np.ones(2)))
    found = describe(node)
    assert found.counts == (Count("Param", 6, 24), Count("Array", 2, 16), Count("Count_", 1, 1))
    assert child(found, "b").counts == (Count("Array", 2, 16), Count("Count_", 1, 1))


def test_counts_of_a_variable_sum_over_its_pytree():
    found = describe(Node(v=Param({"a": jnp.ones(2), "b": [jnp.ones(3)]})))
    assert found.counts == (Count("Param", 5, 20),)


def test_shared_variable_counts_once_in_the_whole_and_in_each_subtree():
    shared = Param(jnp.ones(4))
    found = describe(Node(a=Node(w=shared), b=Node(w=shared)))
    assert found.counts == (Count("Param", 4, 16),)
    assert child(found, "b").counts == (Count("Param", 4, 16),)
    reference = child(found, "b", "w")
    assert (reference.kind, reference.target, reference.cycle) == ("reference", ("a", "w"), False)


def test_cycle_is_a_reference_to_an_open_part():
    node = Node(inner=Node(w=Param(jnp.ones(4))))
    node.inner.parent = node
    found = describe(node)
    reference = child(found, "inner", "parent")
    assert (reference.kind, reference.target, reference.cycle) == ("reference", (), True)
    assert child(found, "inner").counts == (Count("Param", 4, 16),)


@pytest.mark.parametrize("container", [list, lambda x: {"k": x}, lambda x: Pair(x, 0), Registered])
def test_cycle_through_a_container_ends(container):
    node = Node()
    node.items = container([node])
    assert "reference" in {part.kind for part in walk(describe(node))}


def walk(description):
    yield description
    for part in description.children:
        yield from walk(part)


def test_plain_containers_with_data_come_apart_and_others_are_static():
    found = describe(Node(a=[1, {"b": (2,)}], c=[jnp.ones(1)], d=Pair(1, 2), e=Pair(Param(1), 2)))
    assert [part.kind for part in found.children] == ["static", "container", "static", "container"]


def test_registered_pytrees_come_apart_by_their_key_entries():
    found = describe(Registered([jnp.ones(2)]))
    assert child(found, "data").path == ("data",)
    assert found.counts == (Count("Array", 2, 8),)


def test_shared_static_list_is_written_each_time():
    config = [1, 2]
    found = describe(Node(a=config, b=config))
    assert [part.kind for part in found.children] == ["static", "static"]


def test_depth_hides_children_but_not_counts():
    found = describe(Node(a=Node(w=Param(jnp.ones(4)))), depth=1)
    inner = child(found, "a")
    assert (inner.children, inner.hidden, inner.counts) == ((), 1, (Count("Param", 4, 16),))


def test_long_containers_are_elided_but_counted():
    found = describe([Param(jnp.ones(2)) for _ in range(100)], max_items=10)
    assert (len(found.children), found.hidden) == (10, 90)
    assert found.counts == (Count("Param", 200, 800),)


def test_nesting_beyond_the_limit_is_hidden_but_counted():
    shared = Param(jnp.ones(4))
    node = Node(w=shared)
    for _ in range(2000):
        node = Node(child=node, w=shared)
    found = describe(node)
    assert found.counts == (Count("Param", 4, 16),)


def test_a_class_may_describe_itself():
    class Mine:
        def _description_parts(self):
            return Parts("state", "mapping", [("a", "item", jnp.ones(2))], title="State")

    found = describe(Mine())
    assert (found.kind, found.title, found.counts) == ("state", "State", (Count("Array", 2, 8),))


def test_a_failing_property_or_flatten_is_shown_and_harms_nothing_else():
    class Broken(Node):
        def _node_items(self):
            raise RuntimeError("broken")

    found = describe(Node(bad=Broken(), good=Param(jnp.ones(2))))
    assert child(found, "bad").kind == "error"
    assert child(found, "bad").summary == "<Broken that cannot be shown: RuntimeError>"
    assert found.counts == (Count("Param", 2, 8),)


def test_describe_asks_no_attribute_of_foreign_objects():
    class Lazy:
        def __getattr__(self, name):
            raise AssertionError(f"asked for {name}")

        def __repr__(self):
            return "Lazy()"

    assert child(describe(Node(a=Lazy())), "a").summary == "Lazy()"


def test_describe_changes_nothing_and_is_deterministic():
    node = Node(a=[Param(jnp.ones(2))], b={"k": np.ones(1)})
    assert describe(node) == describe(node)
    assert list(vars(node)) == ["a", "b"]

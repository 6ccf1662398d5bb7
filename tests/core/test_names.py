from typing import Any

import pytest

from nnxlite._core.names import Descendants, clean_levels, replace_separators, root_name, spell


class Item:
    """An object of the graph, as far as names are concerned."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def _node_items(self) -> dict[str, Any]:
        return vars(self)


class Items(Item):
    """An object whose children are items, not attributes."""

    _node_by_item = True

    def __init__(self, items: dict[Any, Any]) -> None:
        vars(self).update(items)


LEAF = Item()


@pytest.mark.parametrize(
    ("root", "name"),
    [
        (Item(attn=LEAF), "attn"),
        (Item(layers=[Item(), LEAF]), "layers[1]"),
        (Item(heads={"a": LEAF}), "heads[a]"),
        (Item(pair=(LEAF,)), "pair[0]"),
        (Item(enc=Item(proj=LEAF)), "enc/proj"),
        (Item(blocks=[Item(mlp={"up": LEAF})]), "blocks[0]/mlp[up]"),
        (Item(grid=[[Item()], [LEAF]]), "grid[1][0]"),
        (Item(layers=Items({0: LEAF})), "layers[0]"),
        (Items({0: LEAF}), "[0]"),
        (Item(cond=LEAF), "cond~"),
        (Item(heads={"a/b": LEAF}), "heads[a_b]"),
    ],
)
def test_path_is_spelled(root: Item, name: str) -> None:
    assert Descendants(root).name_of(LEAF, "__call__") == name


def test_method_is_added() -> None:
    assert Descendants(Item(body=LEAF)).name_of(LEAF, "encode") == "body.encode"


def test_shortest_path_names_a_shared_object() -> None:
    shared = Item()
    root = Item(blocks=[Item(proj=shared)], proj=shared)
    assert Descendants(root).name_of(shared, "__call__") == "proj"


def test_order_of_assignment_does_not_change_a_name() -> None:
    shared = Item()
    names = {
        Descendants(root).name_of(shared, "__call__")
        for root in (Item(a=shared, b=shared), Item(b=shared, a=shared))
    }
    assert names == {"a"}


def test_keys_of_several_types_are_named() -> None:
    assert Descendants(Item(heads={1: Item(), "a": LEAF})).name_of(LEAF, "__call__") == "heads[a]"


def test_cycles_end() -> None:
    child = Item()
    root = Item(child=child)
    child.parent = root
    assert Descendants(root).name_of(Item(), "__call__") is None
    assert Descendants(child).name_of(root, "__call__") == "parent"


def test_stranger_has_no_name_here() -> None:
    assert Descendants(Item(layers=[LEAF])).name_of(Item(), "__call__") is None


def test_root_that_is_no_object_has_nothing_below() -> None:
    assert Descendants([LEAF]).name_of(LEAF, "__call__") is None


def test_child_that_moved_gets_its_new_name() -> None:
    first, second = Item(), Item()
    root = Item(layers=[first, second])
    below = Descendants(root)
    assert below.name_of(second, "__call__") == "layers[1]"
    del root.layers[0]
    assert below.name_of(second, "__call__") == "layers[0]"
    root.layers = {"last": second}
    assert below.name_of(second, "__call__") == "layers[last]"
    root.layers = (second,)
    assert below.name_of(second, "__call__") == "layers[0]"
    root.layers = Item(last=second)
    assert below.name_of(second, "__call__") == "layers/last"


def test_child_that_left_has_no_name() -> None:
    child = Item()
    root = Item(child=child)
    below = Descendants(root)
    assert below.name_of(child, "__call__") == "child"
    root.child = None
    assert below.name_of(child, "__call__") is None


def test_child_that_came_later_is_found() -> None:
    child = Item()
    root = Item(layers=[])
    below = Descendants(root)
    assert below.name_of(Item(), "__call__") is None
    root.layers.append(child)
    assert below.name_of(child, "__call__") == "layers[0]"


def test_stranger_that_becomes_an_attribute_is_found() -> None:
    child = Item()
    root = Item()
    below = Descendants(root)
    assert below.name_of(child, "__call__") is None
    root.child = child
    assert below.name_of(child, "__call__") == "child"


def test_direct_children_are_found_without_a_walk_below() -> None:
    class Unwalked(Item):
        def _node_items(self) -> dict[str, Any]:
            raise AssertionError("walked")

    root = Item(first=Unwalked(), second=LEAF)
    assert Descendants(root).name_of(LEAF, "__call__") == "second"


def test_class_attribute_stands_in_place_of_the_path() -> None:
    class Named(Item):
        scope_name = "attention"

    child = Named()
    assert Descendants(Item(attn=child)).name_of(child, "__call__") == "attention"
    assert root_name(child, "encode") == "attention.encode"


def test_instance_attributes_do_not_name_an_object() -> None:
    child = Item(name="mine", scope_name="mine")
    assert Descendants(Item(attn=child)).name_of(child, "__call__") == "attn"
    assert root_name(child, "__call__") == "Item"


def test_function_called_through_its_class_is_named_alone() -> None:
    assert root_name(1.0, "helper") == "helper"


@pytest.mark.parametrize("character", list("/:;()\"'\\@\n"))
def test_character_with_a_meaning_is_replaced(character: str) -> None:
    assert replace_separators(f"a{character}b") == "a_b"


@pytest.mark.parametrize(
    "word",
    [
        "while",
        "body",
        "cond",
        "branch_12_fun",
        "closed_call",
        "eval_jaxpr",
        "custom_vjp_call",
        "checkpoint",
        "rematted_computation",
        "remat2",
        "shard_map",
    ],
)
def test_structural_word_is_marked(word: str) -> None:
    assert clean_levels(f"enc/{word}/proj") == f"enc/{word}~/proj"


def test_words_that_contain_a_structural_word_are_left_alone() -> None:
    assert clean_levels("body_encoder/whiles/conditioner") == "body_encoder/whiles/conditioner"


def test_own_method_is_spelled_alone() -> None:
    assert (spell("", "encode"), spell("", "body"), spell("", "__call__")) == (
        "encode",
        "body~",
        "",
    )

"""The outline of a GraphDef: its nodes and leaves as parts that can be described.

A GraphDef holds numbered records. Views want a tree in which a shared node is one thing met twice,
so this room makes an object for each record, slot by slot, that says how it is described.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from nnxlite._core.describe import Access, Item, Parts, Style
from nnxlite._core.graphdef import (
    ARRAY_LEAF,
    FILL_LEAF,
    FILL_METHOD,
    FILL_NODE,
    FILL_STATIC,
    GraphDef,
    Slot,
    thaw_key,
)
from nnxlite._core.kinds import Foreign
from nnxlite._core.variable import Variable


class Outline:
    """What stands for one part of a GraphDef; its items are added as the records are read."""

    style: Style
    items: list[Item]

    def __init__(self, kind: str, title: str, style: Style = "attributes") -> None:
        self.kind, self.title, self.style, self.items = kind, title, style, []

    def add(self, key: Hashable, access: Access, child: Any) -> None:
        """Adds an item."""
        self.items.append((key, access, child))

    def _description_parts(self) -> Parts:
        return Parts(self.kind, self.style, self.items, identity=True, title=self.title)


def outline(graphdef: GraphDef[Any]) -> Outline:
    """Returns the outline of a GraphDef."""
    skeleton = graphdef.skeleton
    leaves = [_leaf(*leaf) for leaf in graphdef.leaves]
    nodes = [_node(record.cls) for record in skeleton.records]
    for node, record in zip(nodes, skeleton.records, strict=True):
        _fill(node, record.slots, nodes, leaves)
    whole = Outline("part", "GraphDef", "sequence")
    _fill(whole, skeleton.roots, nodes, leaves)
    if len(whole.items) != 1:
        return whole
    alone = Outline("part", "GraphDef")
    alone.add("root", "value", whole.items[0][-1])
    return alone


def _node(cls: type) -> Outline:
    kind = "part" if cls in (list, dict) else "object"
    if issubclass(cls, Mapping):
        return Outline(kind, cls.__name__, "mapping")
    if issubclass(cls, Sequence):
        return Outline(kind, cls.__name__, "sequence")
    return Outline(kind, cls.__name__)


def _leaf(cls: type, about: Any) -> Outline:
    """Returns the outline of a leaf from its class and its metadata, or a State's kinds."""
    if (cls, about) == ARRAY_LEAF:
        return Outline("leaf", "Array")
    leaf = Outline("leaf", cls.__name__)
    if issubclass(cls, Variable):
        for name, value in about.mapping.items():
            leaf.add(name, "attribute", value)
        return leaf
    leaf.style = "mapping"
    for path, below in zip(about.paths, about.leaves, strict=True):
        leaf.add(".".join(map(str, path)), "item", _leaf(*below))
    return leaf


_ACCESS: dict[Style, Access] = {"attributes": "attribute", "mapping": "item", "sequence": "index"}


def _fill(
    part: Outline, slots: tuple[Slot, ...], nodes: list[Outline], leaves: list[Outline]
) -> None:
    for key, how, payload in slots:
        part.add(thaw_key(key), _ACCESS[part.style], _filled(how, payload, nodes, leaves))


def _filled(how: int, payload: Any, nodes: list[Outline], leaves: list[Outline]) -> Any:
    """Returns what fills a slot."""
    if how == FILL_STATIC:
        return payload.value
    if how == FILL_LEAF:
        return leaves[payload]
    if how == FILL_NODE:
        return nodes[payload]
    if how == FILL_METHOD:
        number, function = payload
        method = Outline("part", "method")
        method.add("self", "attribute", nodes[number])
        method.add("function", "attribute", function.value)
        return method
    rebuild, slots = payload
    value = _value(rebuild)
    _fill(value, slots, nodes, leaves)
    return value


def _value(rebuild: Any) -> Outline:
    """Returns the outline of a tuple or registered pytree, still without items."""
    if rebuild is tuple:
        return Outline("part", "tuple", "sequence")
    if isinstance(rebuild, Foreign):
        node = rebuild.treedef.node_data()
        return Outline("part", node[0].__name__ if node else "pytree", "mapping")
    return Outline("part", rebuild.__name__)

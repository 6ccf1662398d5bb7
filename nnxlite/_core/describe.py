"""One description of an object, from which its text and its Treescope view are written.

`describe` walks an object once and returns a tree of small immutable `Description` nodes: what
each part is, how its parent reaches it, one line about it, and what its subtree holds, by kind of
Variable. A part met before becomes a *reference* to the place where it stands: shared if that place
is finished, a cycle if it is still open.

This room is below all others, so it knows classes by their shape: a class with `__nnx_node__` and
`_node_items()` is an object, one that is also a mapping a State, one with `__nnx_node__` alone a
Variable, and any class may answer with `_description_parts()`. Array contents are not read unless
`values` asks for it, so that describing waits for no device and minds no tracers or deleted arrays;
and nothing here raises, whatever a user's object does.
"""

import dataclasses
import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax

from nnxlite._core.errors import Path
from nnxlite._core.oneline import array_line, is_array, line, type_name

Access = Literal["root", "attribute", "item", "index", "value"]
Style = Literal["attributes", "mapping", "sequence"]

Item = tuple[Hashable, Access, Any]  # key, what the key is, child
_DEEPEST = 60  # levels of nesting that are described; the stack of Python ends near 300 of them
_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, type(Ellipsis)})


class Count(NamedTuple):
    """How many elements and bytes of one kind of Variable a subtree holds."""

    kind: str
    elements: int
    bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What there is to say about one part of an object.

    Attributes:
      kind: `"object"`, `"variable"`, `"container"`, `"array"`, `"static"`, `"reference"`,
        `"error"`, or what a class's own `_description_parts()` says, such as `"state"`.
      title: The name of the type.
      style: How children are written: as attributes, as a mapping or as a sequence.
      key: The name, key or index by which the parent reaches this part.
      access: What `key` is.
      path: All keys from the root.
      summary: One line that stands for the part where it has no children.
      children: The parts shown, in the order in which the object holds them.
      hidden: How many more children there are that are not shown.
      counts: What the subtree holds, each Variable once, the largest kind first.
      target: The path of the part that a reference stands for.
      cycle: Whether that part contains the reference.
      value: The part itself, for views that show more than text; not compared.
    """

    kind: str
    title: str
    style: Style = "attributes"
    key: Hashable = None
    access: Access = "root"
    path: Path = ()
    summary: str = ""
    children: tuple["Description", ...] = ()
    hidden: int = 0
    counts: tuple[Count, ...] = ()
    target: Path | None = None
    cycle: bool = False
    value: Any = dataclasses.field(default=None, compare=False, repr=False)


class Parts(NamedTuple):
    """What a class tells about its instances: the result of `_description_parts()`.

    Attributes:
      kind: The kind of the description.
      style: How the items are written.
      items: `(key, access, child)` in order.
      identity: Whether a second meeting of the same instance is a reference.
      title: Replaces the name of the type.
      summary: The one line of an instance without items.
    """

    kind: str
    style: Style
    items: Sequence[Item]
    identity: bool = False
    title: str | None = None
    summary: str = ""


def describe(
    value: Any, *, depth: int | None = None, max_items: int = 64, values: bool = False
) -> Description:
    """Returns the description of `value`, which may be anything.

    Args:
      value: An object, Variable, State, container, array or static value.
      depth: How many levels of children are kept; `None` keeps all. Counts cover the rest too.
      max_items: How many children of one part are kept.
      values: Whether small arrays show their contents. That waits for the device.

    Example:
      >>> [child.summary for child in describe([jnp.ones((2, 3)), "relu"]).children]
      ['float32[2,3]', "'relu'"]
    """
    description, _ = _Walk(depth, max_items, values).visit(value, None, "root", ())
    return description


Owned = dict[Hashable, Count]  # a Variable's id, or the path of a bare array -> what it holds


class _Walk:
    """One walk over an object: what is open above, and what is finished."""

    def __init__(self, depth: int | None, max_items: int, values: bool) -> None:
        self.depth = _DEEPEST if depth is None else min(depth, _DEEPEST)
        self.max_items = max_items
        self.values = values
        self.open: dict[int, Path] = {}
        # The value is kept, so that no other object takes its id during the walk.
        self.finished: dict[int, tuple[Any, Path, Owned]] = {}

    def visit(
        self, value: Any, key: Hashable, access: Access, path: Path
    ) -> tuple[Description, Owned]:
        place = {"key": key, "access": access, "path": path, "value": value}
        try:
            return self._visit(value, place, path)
        except Exception as error:  # noqa: BLE001 - users' properties may raise anything
            self.open.pop(id(value), None)
            summary = f"<{type_name(value)} that cannot be shown: {type(error).__name__}>"
            return Description(kind="error", title=type_name(value), summary=summary, **place), {}

    def _visit(self, value: Any, place: dict[str, Any], path: Path) -> tuple[Description, Owned]:
        title = type_name(value)
        if type(value) in _ATOMS:
            return Description(kind="static", title=title, summary=line(value), **place), {}
        if is_array(value):
            summary = array_line(value, values=self.values)
            count = _array_count(value)
            return (
                Description(kind="array", title=title, summary=summary, counts=(count,), **place),
                {path: count},
            )
        if id(value) in self.open:
            target = self.open[id(value)]
            title = _own_title(value) or title
            return Description(
                kind="reference", title=title, target=target, cycle=True, **place
            ), {}
        if id(value) in self.finished:
            _, target, owned = self.finished[id(value)]
            title = _own_title(value) or title
            return Description(kind="reference", title=title, target=target, **place), owned
        parts = _parts(value)
        if parts is None:
            return Description(kind="static", title=title, summary=line(value), **place), {}
        if len(path) >= _DEEPEST:
            children, hidden, plain = [], len(parts.items), False
            owned = _holdings(value)
        else:
            children, hidden, owned, plain = self._children(value, parts, path)
        title = parts.title or title
        if parts.kind == "container" and plain:
            return Description(kind="static", title=title, summary=line(value), **place), {}
        if parts.kind == "variable":
            variable: Owned = {id(value): total(title, owned.values())}
            owned = variable
        if parts.identity:
            self.finished[id(value)] = value, path, owned
        if len(path) >= self.depth and parts.kind != "variable":
            hidden, children = hidden + len(children), []
        description = Description(
            kind=parts.kind,
            title=title,
            style=parts.style,
            summary=parts.summary,
            children=tuple(children),
            hidden=hidden,
            counts=_by_kind(owned),
            **place,
        )
        return description, owned

    def _children(
        self, value: Any, parts: Parts, path: Path
    ) -> tuple[list[Description], int, Owned, bool]:
        """Returns the children shown, the number of others, what they hold, if all are static."""
        children: list[Description] = []
        owned: Owned = {}
        hidden, plain = 0, True
        self.open[id(value)] = path
        for key, access, child in parts.items:
            full = len(children) >= self.max_items
            hidden += full
            if full and type(child) in _ATOMS:
                continue
            below = path if access == "value" else (*path, key)
            description, holdings = self.visit(child, key, access, below)
            owned.update(holdings)
            plain = plain and description.kind == "static"
            if not full:
                children.append(description)
        del self.open[id(value)]
        return children, hidden, owned, plain


def _parts(value: Any) -> Parts | None:
    """Tells how `value` comes apart; `None` for what is written as one static value."""
    kind = type(value)
    own = getattr(kind, "_description_parts", None)
    if own is not None:
        return own(value)
    node = getattr(kind, "__nnx_node__", False)
    if node and hasattr(kind, "_node_items"):
        access, style = _object_style(value)
        return Parts("object", style, _reached(access, value._node_items().items()), identity=True)
    if node and isinstance(value, Mapping):
        items = _reached("item", value.raw_mapping.items())  # type: ignore[attr-defined]
        return Parts("state", "mapping", items, identity=True)
    if node:
        metadata = _reached("attribute", value._meta.mapping.items())
        items = [*_reached("value", [("value", value._value)]), *metadata]
        return Parts("variable", "attributes", items, identity=True)
    if isinstance(value, Mapping):
        items = _reached("item", value.items())
        return Parts("container", "mapping", items, identity=isinstance(value, dict))
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        pairs = zip(kind._fields, value, strict=True)
        return Parts("container", "attributes", _reached("attribute", pairs))
    if isinstance(value, list | tuple):
        items = _reached("index", enumerate(value))
        return Parts("container", "sequence", items, identity=isinstance(value, list))
    if isinstance(value, type | set | frozenset):
        return None
    if isinstance(value, jax.tree_util.Partial):
        pairs = [(name, getattr(value, name)) for name in ("func", "args", "keywords")]
        return Parts("container", "attributes", _reached("attribute", pairs))
    return _pytree_parts(value)


def _own_title(value: Any) -> str | None:
    own = getattr(type(value), "_description_parts", None)
    return own(value).title if own is not None else None


def _object_style(value: Any) -> tuple[Access, Style]:
    if isinstance(value, Mapping):
        return "item", "mapping"
    if isinstance(value, Sequence):
        return "index", "sequence"
    return "attribute", "attributes"


def _reached(access: Access, pairs: Iterable[tuple[Hashable, Any]]) -> list[Item]:
    # A list: the container may change while it is described, if another thread works on it.
    return [(key, access, child) for key, child in pairs]


def _pytree_parts(value: Any) -> Parts | None:
    """The children of a node of a type that somebody registered with JAX."""
    calls = itertools.count()
    # One level only: the first call is about `value` itself.
    leaves, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda _: next(calls) > 0)
    items: list[Item] = []
    for path, leaf in leaves:
        if not path:
            return None
        entry = path[0]
        if isinstance(entry, jax.tree_util.GetAttrKey):
            items.append((entry.name, "attribute", leaf))
        elif isinstance(entry, jax.tree_util.DictKey):
            items.append((entry.key, "item", leaf))
        else:
            items.append((getattr(entry, "idx", getattr(entry, "key", 0)), "index", leaf))
    if not items:
        return None
    style: dict[Access, Style] = {"attribute": "attributes", "item": "mapping"}
    return Parts("container", style.get(items[0][1], "sequence"), items)


def _holdings(value: Any) -> Owned:
    """What `value` holds, for nesting too deep to recurse into."""
    owned: Owned = {}
    kept: dict[int, Any] = {}  # visited, and kept alive so that ids stay theirs
    stack: list[tuple[Any, Hashable, str | None]] = [(value, None, None)]
    while stack:
        part, owner, kind = stack.pop()
        if type(part) in _ATOMS:
            continue
        if is_array(part):
            count = _array_count(part)
            slot = owner if owner is not None else ("array", len(owned), id(value))
            before = owned.get(slot, Count(kind or count.kind, 0, 0))
            owned[slot] = total(before.kind, (before, count))
            continue
        if id(part) in kept:
            continue
        kept[id(part)] = part
        parts = _parts(part)
        if parts is None:
            continue
        if parts.kind == "variable":
            owner, kind = id(part), type_name(part)
        stack.extend((child, owner, kind) for _, _, child in parts.items)
    return owned


def _array_count(value: Any) -> Count:
    known = all(isinstance(size, int) for size in value.shape)  # exported programs have symbols
    elements = math.prod(value.shape) if known else 0
    return Count("Array", elements, elements * getattr(value.dtype, "itemsize", 0))


def total(kind: str, counts: Iterable[Count]) -> Count:
    """Returns the sum of `counts`, under the name `kind`."""
    counts = list(counts)
    return Count(kind, sum(c.elements for c in counts), sum(c.bytes for c in counts))


def _by_kind(owned: Owned) -> tuple[Count, ...]:
    kinds: dict[str, list[Count]] = {}
    for count in owned.values():
        kinds.setdefault(count.kind, []).append(count)
    totals = [total(kind, counts) for kind, counts in kinds.items()]
    return tuple(sorted(totals, key=lambda c: (-c.elements, c.kind)))

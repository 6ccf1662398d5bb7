"""How a method call is spelled in a profile, and the search by identity behind it.

A name is the path of the called object relative to the object whose method is running: `attn`,
`layers[0]`, `heads[a]`, with levels between the two joined by a slash: `encoder/proj`. It becomes
part of the `op_name` of HLO instructions, where some characters separate names and some words stand
for JAX's own structure; no level of a name may contain the ones or be one of the others.
"""

import re
from collections import deque
from collections.abc import Hashable, Iterable
from functools import lru_cache
from operator import itemgetter
from typing import Any

from nnxlite._core.errors import Path

# Slash, colon, semicolon and parentheses separate names, quotes and the backslash are escaped, and
# XLA drops everything from an @ on.
_SEPARATORS = re.compile(r"""[/:;()"'\\@\x00-\x1f\x7f]""")

STRUCTURAL_WORDS = re.compile(
    r"while|body|cond|branch_\d+_fun|closed_call|core_call|eval_jaxpr|custom_\w+_call"
    r"|checkpoint|rematted_computation|remat2?|shard_map"
)
"""The words JAX writes between names; a level that equals one of them gets a tilde at its end."""


def replace_separators(text: str) -> str:
    """Returns `text` with each character that has a meaning in an op name as an underscore."""
    return _SEPARATORS.sub("_", text) or "_"


def clean_levels(text: str) -> str:
    """Returns `text`, whose slashes separate levels, fit to be pushed as a name.

    Example:
      >>> clean_levels("encoder/while"), clean_levels("a:b")
      ('encoder/while~', 'a_b')
    """
    return "/".join(_clean_level(level) for level in text.split("/"))


def _clean_level(level: str) -> str:
    level = replace_separators(level)
    return level + "~" if STRUCTURAL_WORDS.fullmatch(level) else level


@lru_cache(maxsize=4096)
def spell(base: str, method: str) -> str:
    """Returns the name of a call of `method` on the object called `base`; `base` may be empty.

    Example:
      >>> spell("layers[0]", "__call__"), spell("Net", "encode"), spell("", "encode")
      ('layers[0]', 'Net.encode', 'encode')
    """
    if method == "__call__":
        return clean_levels(base) if base else ""
    return clean_levels(f"{base}.{method}" if base else method)


def own_name(receiver: Any) -> str | None:
    """Returns the class attribute `scope_name`, if there is one.

    An instance attribute, whatever it is called, is the user's own.
    """
    name = getattr(type(receiver), "scope_name", None)
    return name if isinstance(name, str) else None


def root_name(receiver: Any, method: str) -> str:
    """Returns the name of a call on an object that is not below the running one."""
    if not is_object(receiver):  # a method called through its class, as a mere function
        return spell("", method)
    return spell(own_name(receiver) or type(receiver).__name__, method)


class Descendants:
    """The names of what is below one object, found by identity, nearest first.

    The search goes only as far as it is asked to and continues there, so that a call of a direct
    child costs the same in a small and in a large model. Each path is followed again before its
    name is used: objects may change while they are traced. An instance lives as long as the
    outermost call of its trace, and so do the objects it holds.
    """

    __slots__ = ("_items", "_names", "_paths", "_queue", "_root", "_seen", "_strangers")

    def __init__(self, root: Any) -> None:
        self._root = root
        self._items: dict[Any, Any] = root._node_items() if is_object(root) else {}
        self._names: dict[tuple[int, str], tuple[Hashable, Path, str]] = {}
        self._strangers: dict[int, Any] = {}
        self._start()

    def _start(self) -> None:
        self._paths: dict[int, tuple[Path, str]] = {}
        self._seen = {id(self._root)}
        self._queue: deque[tuple[Any, Path, str]] = deque()
        if is_object(self._root):
            self._queue.append((self._root, (), ""))

    def name_of(self, child: Any, method: str) -> str | None:
        """Returns the name of a call of `method` on `child`, None if it is nowhere below."""
        named = self._names.get((id(child), method))
        if named is not None:
            attribute, path, name = named
            value = self._items.get(attribute)
            if (_follow(value, path) if path else value) is child:
                return name
        found = self._find(child)
        if found is None:
            return None
        (attribute, *path), text = found
        name = spell(own_name(child) or text, method)
        self._names[id(child), method] = attribute, tuple(path), name
        return name

    def _find(self, child: Any) -> tuple[Path, str] | None:
        if self._strangers.get(id(child)) is child:
            return self._attribute(child)
        for fresh in (False, True):  # it may have moved, or have come after the search went by
            if fresh:
                self._start()
            found = self._search(child)
            if found is not None and _follow(self._root, found[0]) is child:
                return found
        self._strangers[id(child)] = child
        return None

    def _attribute(self, child: Any) -> tuple[Path, str] | None:
        # To look everywhere for a stranger, in each of its calls, would be slow.
        for key, value in self._items.items():
            if value is child:
                return (key,), _extend("", self._root, key)
        return None

    def _search(self, child: Any) -> tuple[Path, str] | None:
        while self._queue and id(child) not in self._paths:
            holder, path, text = self._queue.popleft()
            for key, value in _items(holder):
                if id(value) in self._seen or not (is_object(value) or _is_container(value)):
                    continue
                self._seen.add(id(value))
                found = (*path, key), _extend(text, holder, key)
                self._queue.append((value, *found))
                self._paths[id(value)] = found
        return self._paths.get(id(child))


def is_object(value: Any) -> bool:
    """Tells whether `value` is an object of the graph: these have `_node_items`."""
    return hasattr(type(value), "_node_items")


def _is_container(value: Any) -> bool:
    return isinstance(value, (list, tuple, dict))


def _items(holder: Any) -> Iterable[tuple[Hashable, Any]]:
    if isinstance(holder, (list, tuple)):
        return enumerate(holder)
    items = holder if isinstance(holder, dict) else holder._node_items()
    try:  # as in a GraphDef, so that the order of assignment never changes a name
        return sorted(items.items(), key=itemgetter(0))
    except TypeError:  # keys of several types
        return list(items.items())


def _follow(value: Any, path: Path) -> Any:
    for key in path:
        if isinstance(value, (list, tuple)):
            value = value[key] if isinstance(key, int) and key < len(value) else None
        elif isinstance(value, dict):
            value = value.get(key)
        else:
            value = value._node_items().get(key) if is_object(value) else None
    return value


def _extend(text: str, holder: Any, key: Hashable) -> str:
    spelled = replace_separators(str(key))
    if is_object(holder) and not getattr(type(holder), "_node_by_item", False):
        return f"{text}/{spelled}" if text else spelled
    return f"{text}[{spelled}]"

"""The text of an object, written from its description.

`text` is the `repr` of everything in the library: one line where it fits and says all, else a line
for each part, with a comment on what a subtree holds. `write` does the same from a `Description`
at hand.
"""

import threading
from typing import Any

from nnxlite._core.describe import Count, Description, describe, total
from nnxlite._core.errors import Path
from nnxlite._core.oneline import line, type_name


def text(
    value: Any,
    *,
    depth: int | None = None,
    max_items: int = 64,
    width: int = 88,
    values: bool = False,
) -> str:
    """Returns the text of `value`: the `repr` of everything in the library.

    Args:
      value: An object, Variable, State, container, array or static value.
      depth: How many levels of children are written; `None` writes all.
      max_items: How many children of one part are written.
      width: The longest line that is not broken into several.
      values: Whether small arrays show their contents. That waits for the device.

    Example:
      >>> print(text({"kernel": jnp.ones((2, 3)), "axis": -1}))
      {'kernel': float32[2,3], 'axis': -1}
    """
    # A user's object may hold a Module and print it in its own `__repr__`: that would never end.
    if id(value) in _RUNNING.ids:
        return f"{type_name(value)}(...)"
    _RUNNING.ids.add(id(value))
    try:
        description = describe(value, depth=depth, max_items=max_items, values=values)
        return write(description, width=width)
    finally:
        _RUNNING.ids.discard(id(value))


def write(description: Description, *, width: int = 88) -> str:
    """Returns the text of a description, on one line where it fits and says all."""
    return "\n".join(_lines(description, width, "", ""))


class _Running(threading.local):
    def __init__(self) -> None:
        self.ids: set[int] = set()


_RUNNING = _Running()


def _lines(part: Description, width: int, prefix: str, suffix: str) -> list[str]:
    """Writes a part; `prefix` and `suffix` stand before and behind it, a comment after that."""
    comment = holdings(part)
    single = _single(part)
    if single is not None:
        one = prefix + single + suffix + comment
        if len(one) <= width or not part.children:
            return [one]
    opening, closing = brackets(part)
    lines = [prefix + opening + comment]
    for child in part.children:
        lines += ["  " + text for text in _lines(child, width - 2, label(child), ",")]
    if part.hidden:
        lines.append(f"  ...  # {part.hidden:,} more")
    lines.append(closing + suffix)
    return lines


def _single(part: Description) -> str | None:
    """Writes a part on one line; `None` if that would leave a comment or too much structure out."""
    if part.kind == "reference":
        relation = "cycle to" if part.cycle else "shared with"
        return f"<{part.title} {relation} {expression(part.target or ())}>"
    opening, closing = brackets(part)
    if not part.children:
        return part.summary or f"{opening}{'...' if part.hidden else ''}{closing}"
    if part.hidden:
        return None
    texts = []
    for child in part.children:
        text = _single(child)
        if text is None or holdings(child):
            return None
        if part.kind == "object" and child.kind not in ("static", "reference"):
            return None
        texts.append(label(child) + text)
    return opening + ", ".join(texts) + closing


def holdings(part: Description) -> str:
    """Returns a comment on what the subtree holds; one scalar Variable is not worth saying."""
    if part.kind in ("array", "static", "reference", "error") or not part.counts:
        return ""
    if part.kind == "container" and all(count.kind == "Array" for count in part.counts):
        return ""
    if part.kind == "variable":
        (count,) = part.counts
        return f"  # {_amount(count)}" if count.elements > 1 else ""
    counts = [f"{count.kind}: {_amount(count)}" for count in part.counts]
    if len(counts) > 1:
        counts.append(f"Total: {_amount(total('', part.counts))}")
    return f"  # {', '.join(counts)}"


def _amount(count: Count) -> str:
    return f"{count.elements:,} ({_size(count.bytes)})"


def _size(count: int) -> str:
    """Writes a number of bytes in the units that sum up by thousands."""
    size, units = float(count), iter(("B", "KB", "MB", "GB", "TB", "PB"))
    unit = next(units)
    while size >= 999.95 and unit != "PB":
        size, unit = size / 1000, next(units)
    return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"


def brackets(part: Description) -> tuple[str, str]:
    """Returns the text before and behind the children."""
    inner = {"attributes": ("", ""), "mapping": ("{", "}"), "sequence": ("[", "]")}[part.style]
    if part.title == "tuple":
        return "(", ",)" if len(part.children) == 1 and not part.hidden else ")"
    if part.title in ("list", "dict"):
        return inner
    return f"{part.title}({inner[0]}", f"{inner[1]})"


def expression(path: Path) -> str:
    """Returns how to get from the root to a part; keys may be objects of the user."""
    keys = (
        f".{key}" if isinstance(key, str) and key.isidentifier() else f"[{line(key)}]"
        for key in path
    )
    return "".join(keys) or "the root"


def label(part: Description) -> str:
    """Returns how the parent names a child, with what follows the name."""
    if part.access == "attribute":
        key = part.key
        name = key if isinstance(key, str) and key.isidentifier() else line(key)
        return f"{name}="
    return f"{line(part.key)}: " if part.access == "item" else ""

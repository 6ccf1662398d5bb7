"""One line about any value that is not taken apart: static values, arrays, names of types.

A line is bounded in length and in the work it costs, the same in every process (no addresses,
sets in sorted order), holds no control characters, reads no array contents unless told to,
and is always found: an object whose own `__repr__` fails is written as such.
"""

import enum
import functools
import itertools
import re
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

LINE = 100  # characters of one static value
_LONG_INT = 256  # bits; Python refuses to print very long ones
_LARGE_SET = 1000  # elements; sorting more for one line is not worth it
_FEW = 64  # elements of an array whose contents may be shown
_CONTAINERS = {list: "[]", tuple: "()", set: "{}", frozenset: "{}", dict: "{}"}
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def line(value: Any, room: int = LINE) -> str:
    """Returns one line of at most about `room` characters that says what `value` is.

    Example:
      >>> line({"b", "a"}), line(jnp.float32), line(list(range(1000)), room=20)
      ("{'a', 'b'}", 'float32', '[0, 1, 2, 3, 4, 5, 6... (1,000 items)')
    """
    text = ""
    try:
        for piece in _pieces(value, room):
            text += piece
            if len(text) > room:
                break
        else:
            return text
        if isinstance(value, str | bytes):
            return f"{text[:room]}... ({len(value):,} characters)"
        if type(value) in _CONTAINERS:
            return f"{text[:room]}... ({len(value):,} items)"
        return f"{text[:room]}..."
    except Exception as error:  # noqa: BLE001 - the `__repr__` of a user's object may raise anything
        return f"<{type_name(value)} whose repr failed: {type(error).__name__}>"


def type_name(value: Any) -> str:
    """Returns the name of the type of `value`, fit for one line."""
    return printable(type(value).__name__)


def printable(text: str, room: int = LINE) -> str:
    """Returns `text` on one line of at most `room` characters, with control characters escaped."""
    cut = " ".join(text[: 2 * room].split())
    if not cut.isprintable():
        cut = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in cut)
    return cut if len(cut) <= room else cut[:room] + "..."


def is_array(value: Any) -> bool:
    """Tells whether `value` is one array: of JAX, traced, abstract, of numpy or another library."""
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return True
    kind = type(value)
    # Asked of the class, so that no `__getattr__` runs. Registered pytrees come apart instead.
    return (
        hasattr(kind, "shape")
        and hasattr(kind, "dtype")
        and not issubclass(kind, type | np.generic)
        and not getattr(kind, "__nnx_node__", False)
        and jax.tree_util.all_leaves([value])
    )


def array_line(value: Any, *, values: bool = False) -> str:
    """Returns `float32[2,3]`, preceded by a word where that is no array of JAX with a value.

    Args:
      value: What `is_array` is true of.
      values: Whether the contents of a small array follow. That waits for the device.
    """
    shape = f"{printable(str(value.dtype))}[{','.join(map(str, value.shape))}]"
    if isinstance(value, Tracer):
        return f"traced {shape}"
    if isinstance(value, jax.ShapeDtypeStruct):
        return f"abstract {shape}"
    if not isinstance(value, jax.Array | np.ndarray):
        return f"{type_name(value)} {shape}"
    if isinstance(value, jax.Array) and value.is_deleted():
        return f"deleted {shape}"
    prefix = "np." if isinstance(value, np.ndarray) else ""
    return f"{prefix}{shape}{_contents(value) if values else ''}"


class Bare(str):
    """Text that shows without quotes, to stand for the leaves of a tree."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def types_line(tree: Any) -> str:
    """Returns one line with the containers of a tree, and the type of each array or number in it.

    Example:
      >>> types_line({"a": jnp.ones((2, 3)), "b": (1,)})
      "{'a': float32[2,3], 'b': (int32[],)}"
    """
    leaves, treedef = jax.tree_util.tree_flatten(tree)
    texts = [Bare(f"{jnp.result_type(x)}[{','.join(map(str, jnp.shape(x)))}]") for x in leaves]
    return " ".join(repr(jax.tree_util.tree_unflatten(treedef, texts)).split())


def _contents(value: Any) -> str:
    if value.size > _FEW or not getattr(value, "is_fully_addressable", True):
        return ""
    if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return ""
    try:
        contents = np.array2string(np.asarray(value), separator=", ", precision=6)
    except Exception:  # noqa: BLE001 - a transfer guard, or an error that the computation reports late
        return ""
    return " " + printable(contents, room=16 * _FEW)


def _pieces(value: Any, room: int, level: int = 0) -> Iterator[str]:
    """Yields the line in pieces, so that its reader can stop early."""
    kind = type(value)
    if kind in (str, bytes):
        yield repr(value[: room + 1])
    elif kind is int and value.bit_length() > _LONG_INT:
        yield f"<int of {value.bit_length():,} bits>"
    elif kind in _CONTAINERS:
        yield from _container_pieces(value, room, level)
    elif isinstance(value, enum.Enum):
        yield f"{kind.__name__}.{value.name}"
    elif isinstance(value, type):
        yield printable(value.__qualname__)
    elif isinstance(value, np.dtype):
        yield str(value)
    elif isinstance(value, types.ModuleType):
        yield f"<module {value.__name__}>"
    elif getattr(kind, "__nnx_node__", False):
        yield f"{type_name(value)}(...)"
    elif is_array(value):
        yield array_line(value)
    elif isinstance(value, functools.partial):
        keywords = [_labelled(name, item, room, level) for name, item in value.keywords.items()]
        items = [_pieces(item, room, level + 1) for item in (value.func, *value.args)]
        yield from _joined(f"{kind.__name__}(", [*items, *keywords], ")")
    elif isinstance(value, types.MethodType):
        yield f"<method {type_name(value.__self__)}.{printable(value.__name__)}>"
    elif callable(value) and isinstance(name := _name(value), str):
        yield f"<function {printable(name)}>"
    else:
        yield printable(_ADDRESS.sub("", repr(value)), room + 1)


def _container_pieces(value: Any, room: int, level: int) -> Iterator[str]:
    kind = type(value)
    if level > 5:
        yield "..."
        return
    if kind is frozenset:
        yield "frozenset("
    if kind is dict:
        items: Iterable[Iterable[str]] = (
            itertools.chain(_pieces(k, room, level + 1), ": ", _pieces(v, room, level + 1))
            for k, v in value.items()
        )
    elif kind in (set, frozenset) and len(value) <= _LARGE_SET:
        items = ([text] for text in sorted(line(item, room) for item in value))
    elif kind in (set, frozenset):
        items = ([f"{len(value):,} items"],)
    else:
        items = (_pieces(item, room, level + 1) for item in value)
    opening, closing = _CONTAINERS[kind]
    if kind is tuple and len(value) == 1:
        closing = ",)"
    if kind is set and not value:
        opening, closing = "set(", ")"
    yield from _joined(opening, items, closing)
    if kind is frozenset:
        yield ")"


def _labelled(name: str, item: Any, room: int, level: int) -> Iterator[str]:
    yield f"{name}="
    yield from _pieces(item, room, level + 1)


def _joined(opening: str, items: Iterable[Iterable[str]], closing: str) -> Iterator[str]:
    yield opening
    for i, item in enumerate(items):
        if i:
            yield ", "
        yield from item
    yield closing


def _name(value: Any) -> Any:
    return getattr(value, "__qualname__", None) or getattr(value, "__name__", None)

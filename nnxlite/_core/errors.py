"""Named errors, and how a path is written in messages.

A path is a tuple of keys from a root object: attribute names, dictionary keys and list
indices. Messages write it as Python would: `model.layers[0].kernel`. A class stands here only if
somebody may want to catch it; everything else is a plain `TypeError` or `ValueError`.
"""

from collections.abc import Hashable
from typing import Any

Path = tuple[Hashable, ...]


class TraceLevelError(RuntimeError):
    """A write to an object or Variable that belongs to another trace level.

    Attributes:
      node: What was to be written, until a transform has put its path into the message.
    """

    node: Any = None

    def __reduce__(self) -> Any:  # without the node: a message may go where the model cannot
        return type(self), self.args


class StaticValueError(TypeError):
    """A static value that cannot be part of a cache key, or that hides an object or Variable."""


class StructureError(ValueError):
    """A state, filter or graph that does not fit the object it is used with."""


class DonatedBufferError(RuntimeError):
    """A donated call that cannot run, or that failed after its buffers were given away."""


class RetraceWarning(UserWarning):
    """A jitted function that is traced again and again for one object."""


def format_path(path: Path, root: str = "model") -> str:
    """Writes `path` as the Python expression that reaches it from `root`.

    Example:
      >>> format_path(("layers", 0, "kernel"))
      'model.layers[0].kernel'
    """
    text = root
    for key in path:
        if isinstance(key, str) and key.isidentifier():
            text += f".{key}"
        else:
            text += f"[{key!r}]"
    return text

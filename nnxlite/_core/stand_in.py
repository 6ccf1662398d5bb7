"""Other values in Variables for the time of a call, which nobody sees afterwards.

A layer that computes with a function of its weights (a normalized kernel, say) keeps the weights
themselves: the computed value only stands in for them while the layer runs. The Variables stay the
same objects in the same places, so scopes and captures find them as ever.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from nnxlite._core.errors import StructureError
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Variable

# Held from the reading of the weights to their return: another thread would take what stands in
# for what it has to put back.
_LOCK = threading.RLock()


@contextlib.contextmanager
def standing_in(
    compute: Callable[[], Sequence[tuple[Variable[Any], Any]]], title: str
) -> Iterator[None]:
    """Puts values into Variables, and puts back what was there at the end of the block.

    No hooks run. While a value stands in, its Variable belongs to the running trace: the Variable
    may be of an outer one, and a transform that watches what it closes over must not take a
    computed value for the eager value that it would compare in later calls. Blocks of several
    threads run one after the other.

    Args:
      compute: Returns Variables, each once, with what they shall hold.
      title: Who asks, for the message.

    Raises:
      StructureError: The block wrote one of the Variables, which would be lost.
    """
    with _LOCK:
        values = compute()
        before = [(variable, variable._value, variable._level) for variable, _ in values]
        level = current_level()
        try:
            for variable, value in values:
                variable._value, variable._level = value, level
            yield
            written = [variable for variable, value in values if variable._value is not value]
        finally:
            for variable, old_value, old_level in before:
                variable._value, variable._level = old_value, old_level
    if written:
        raise StructureError(
            f"{title}: the layer wrote its {type(written[0]).__name__} of shape "
            f"{written[0].shape} while a computed value stood in for it, so the write is lost. "
            "Write it outside of the call, or leave it out with variable_filter."
        )

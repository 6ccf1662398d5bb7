"""Other values in Variables for the time of a call, which nobody sees afterwards.

A layer that computes with a function of its weights (a normalized kernel, say) keeps the weights
themselves: the computed value only stands in for them while the layer runs. The Variables stay the
same objects in the same places, so scopes and captures find them as ever.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from nnxlite._core.trace import current_level
from nnxlite._core.variable import Variable


@contextlib.contextmanager
def standing_in(values: Sequence[tuple[Variable[Any], Any]]) -> Iterator[None]:
    """Puts values into Variables, and puts back what was there at the end of the block.

    No hooks run. While a value stands in, its Variable belongs to the running trace: the Variable
    may be of an outer one, and a transform that watches what it closes over must not take a
    computed value for the eager value that it would compare in later calls.

    Args:
      values: Variables, each once, with what they shall hold. What the block writes to them is
        lost.
    """
    before = [(variable, variable._value, variable._level) for variable, _ in values]
    level = current_level()
    try:
        for variable, value in values:
            variable._value, variable._level = value, level
        yield
    finally:
        for variable, value, old_level in before:
            variable._value, variable._level = value, old_level

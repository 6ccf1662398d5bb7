"""Classes whose annotations are strings, for `test_marks`."""

from __future__ import annotations

from typing import Generic, TypeVar

import nnxlite as nnx
from nnxlite import Data

A = TypeVar("A")


class Static(Generic[A]):
    """Another library's class of that name."""


class Annotated(nnx.Module):
    rate: nnx.Data[float]
    short: Data[int]
    quoted: nnx.Data[int]
    mine: Static[int]
    plain: int
    of_data: list[nnx.Data[int]]

    def __init__(self) -> None:
        self.rate, self.short, self.quoted = 0.5, 1, 2
        self.mine, self.plain, self.of_data = 3, 4, [5]


def make_local() -> nnx.Module:
    import nnxlite as here

    class Local(here.Module):
        rate: here.Data[float]

        def __init__(self) -> None:
            self.rate = 0.5

    return Local()

"""Named errors, for `except` clauses; everything else is a `TypeError` or `ValueError`."""

from nnxlite._core.errors import (
    DonatedBufferError,
    StaticValueError,
    StructureError,
    TraceLevelError,
)

__all__ = ["DonatedBufferError", "StaticValueError", "StructureError", "TraceLevelError"]

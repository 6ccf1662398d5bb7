"""Named errors and warnings, for `except` clauses and warning filters.

All other errors are a `TypeError` or `ValueError`.
"""

from nnxlite._core.errors import (
    DonatedBufferError,
    RetraceWarning,
    StaticValueError,
    StructureError,
    TraceLevelError,
)

__all__ = [
    "DonatedBufferError",
    "RetraceWarning",
    "StaticValueError",
    "StructureError",
    "TraceLevelError",
]

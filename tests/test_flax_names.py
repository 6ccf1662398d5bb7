"""Guide 08 tells the truth about this library; tests/peers/test_names.py asks flax itself."""

import pytest

import nnxlite as nnx
from tests.flax_names import Row, rows

ROWS = rows()
MISSING = ("not yet", "none")


def test_no_name_is_told_twice() -> None:
    names = [name for row in ROWS for name in row.names]
    assert sorted(names) == sorted(set(names))
    assert len(names) > 200


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.names[0])
def test_counterparts_exist(row: Row) -> None:
    absent = [name for name in row.counterparts if name not in nnx.__all__]
    assert absent == []
    assert row.counterparts or row.where in MISSING


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.where != "same"], ids=lambda row: row.names[0]
)
def test_what_is_said_to_be_missing_is(row: Row) -> None:
    built = [name for name in row.names if hasattr(nnx, name)]
    assert built == [], "these exist now: say `same` in the table of guide 08"
    assert row.remark, "say why, or what it waits for"

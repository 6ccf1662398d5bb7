"""Where names of flax.nnx are in nnxlite: the table of guide 08, and the module paths."""

import re
from pathlib import Path
from typing import NamedTuple

GUIDE = Path(__file__).parents[1] / "guides" / "08_coming_from_flax.md"

PATHS = (
    *("filterlib", "graph", "graphlib", "helpers", "module", "object", "pytreelib", "rnglib"),
    *("statelib", "traversals", "variablelib"),
)
"""Module paths of flax.nnx that are doors here, to what has other rooms."""


class Row(NamedTuple):
    names: list[str]
    where: str  # same, not yet, none, or the names to use
    remark: str

    @property
    def counterparts(self) -> list[str]:
        """What the row says to use, without `nnx.`."""
        if self.where == "same":
            return self.names
        return [name.removeprefix("nnx.") for name in quoted(self.where)]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]*)`", cell)


def rows() -> list[Row]:
    table = GUIDE.read_text().split("## Every name\n")[1]
    cells = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("| `")
    ]
    return [Row(quoted(names), where, remark) for names, where, remark in cells]

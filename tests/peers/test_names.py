"""Every public name of flax.nnx has a row in guide 08, every module path and flag of it a home."""

import inspect

import pytest
from flax import nnx as peer

import nnxlite as nnx
from tests.flax_names import PATHS, rows

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

TOLD = {name for row in rows() for name in row.names}
PUBLIC = {name for name in dir(peer) if not name.startswith("_")}


def test_every_public_name_has_a_row() -> None:
    assert sorted(PUBLIC - TOLD) == []


def test_every_row_is_about_flax() -> None:
    assert [name for name in sorted(TOLD) if not hasattr(peer, name)] == []


@pytest.mark.parametrize("path", PATHS)
def test_paths_hold_what_flax_has_there(path: str) -> None:
    names = {name for name in vars(getattr(nnx, path)) if not name.startswith("_")}
    assert [name for name in sorted(names) if not hasattr(getattr(peer, path), name)] == []


def flags_of(function: object) -> set[str]:
    """The flags for modes that a function takes, shown in its signature or not."""
    try:
        shown = inspect.signature(function, follow_wrapped=False)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return set()
    return {"graph", "graph_updates"} & set(shown.parameters)


FLAGGED = sorted(name for name in PUBLIC if flags_of(getattr(peer, name)))


@pytest.mark.parametrize("name", [name for name in FLAGGED if hasattr(nnx, name)])
def test_flags_of_flax_are_taken(name: str) -> None:
    if name not in {"view", "with_attributes"}:  # they hand `graph` on with other attributes
        assert flags_of(getattr(peer, name)) <= flags_of(getattr(nnx, name))

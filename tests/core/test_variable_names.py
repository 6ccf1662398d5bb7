"""Collection names of Variable kinds."""

from collections.abc import Iterator
from typing import Any

import pytest

from nnxlite._core import variable_names
from nnxlite._core.variable import BatchStat, Cache, Intermediate, Param, Perturbation, Variable
from nnxlite._core.variable_names import (
    register_variable_name,
    variable_name_from_type,
    variable_type_from_name,
)


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(variable_names, "_KINDS", dict(variable_names._KINDS))
    return


class Mask(Variable[Any]):
    pass


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("params", Param),
        ("batch_stats", BatchStat),
        ("cache", Cache),
        ("intermediates", Intermediate),
        ("perturbations", Perturbation),
    ],
)
def test_the_collections_of_linen_are_known(name: str, kind: Any) -> None:
    assert variable_type_from_name(name) is kind
    assert variable_name_from_type(kind) == name


def test_a_name_is_registered_by_call_or_decorator() -> None:
    assert register_variable_name("masks", Mask) is Mask
    assert variable_type_from_name("masks") is Mask

    @register_variable_name("others")
    class Other(Variable[Any]):
        pass

    assert variable_name_from_type(Other) == "others"


def test_a_name_can_be_taken_over_only_on_purpose() -> None:
    with pytest.raises(ValueError, match=r"'params' belongs to Param; .*overwrite=True"):
        register_variable_name("params", Mask)
    assert register_variable_name("params", Param) is Param
    register_variable_name("params", Mask, overwrite=True)
    assert variable_type_from_name("params") is Mask


def test_an_unknown_name_is_an_error_or_a_new_kind() -> None:
    with pytest.raises(ValueError, match="no kind of Variable is named 'masks', known are"):
        variable_type_from_name("masks")
    kind = variable_type_from_name("masks", base=Param, allow_register=True)
    assert issubclass(kind, Param)
    assert kind.__name__ == "masks"
    assert variable_type_from_name("masks") is kind
    assert variable_name_from_type(kind) == "masks"


def test_a_kind_without_a_name_is_an_error_or_named_as_its_class() -> None:
    with pytest.raises(ValueError, match="Mask has no collection name"):
        variable_name_from_type(Mask)
    assert variable_name_from_type(Mask, allow_register=True) == "Mask"
    assert variable_type_from_name("Mask") is Mask

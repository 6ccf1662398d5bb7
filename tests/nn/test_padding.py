"""Paddings and other options of convolutions, brought to one form."""

from typing import Any

import pytest

from nnxlite.nn.padding import canonicalize_padding, frozen, per_axis


@pytest.mark.parametrize(
    ("padding", "expected"),
    [
        ("SAME", "SAME"),
        ("circular", "CIRCULAR"),
        (2, ((2, 2), (2, 2))),
        ([1, (0, 2)], ((1, 1), (0, 2))),
        (((1, 2), [3, 4]), ((1, 2), (3, 4))),
    ],
    ids=str,
)
def test_a_padding_is_a_name_or_pairs(padding: Any, expected: Any) -> None:
    assert canonicalize_padding(padding, 2) == expected


@pytest.mark.parametrize("padding", [[1], [1, (1, 2, 3)], 1.5, [1, 2, 3]], ids=str)
def test_other_paddings_are_refused(padding: Any) -> None:
    with pytest.raises(ValueError, match=r"Box found padding .* for 2 spatial axes. Expected"):
        canonicalize_padding(padding, 2, "Box")


def test_an_option_is_one_number_for_each_axis() -> None:
    assert per_axis(None, 2, "strides", "Box") == (1, 1)
    assert per_axis(3, 2, "strides", "Box") == (3, 3)
    assert per_axis([1, 2], 2, "strides", "Box") == (1, 2)
    with pytest.raises(ValueError, match=r"Box found strides \(1,\) for 2 spatial axes"):
        per_axis([1], 2, "strides", "Box")


def test_nested_lists_freeze() -> None:
    assert frozen([1, [2, 3]]) == (1, (2, 3))
    assert frozen("SAME") == "SAME"

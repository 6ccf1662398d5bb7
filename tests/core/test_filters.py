"""Filters: what each form matches, and that equal filters are equal keys."""

import pickle
import re
from dataclasses import dataclass
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from hypothesis import given

from nnxlite._core import filters
from nnxlite._core.errors import StructureError
from nnxlite._core.filters import (
    All,
    Everything,
    Not,
    Nothing,
    OfType,
    PathContains,
    PathIn,
    WithTag,
    filters_to_predicates,
    is_structural,
    to_predicate,
)
from nnxlite._core.trace import FOREIGN_READS
from nnxlite._core.variable import BatchStat, LoRAParam, Param, RngKey, RngState, Variable

PATH = ("encoder", "layers", 0, "kernel")
KERNEL = Param(jnp.ones(2))
KEY = RngKey(jax.random.key(0), tag="dropout")


class Tagged(Variable[Any]):
    """A kind whose class has the tag."""

    tag = "noise"


@dataclass(frozen=True)
class PathEndsWith:
    """A filter as users write it."""

    name: str

    def __call__(self, path: tuple[Any, ...], value: Any) -> bool:
        return path[-1] == self.name


def name_of(case: Any) -> str:
    """Names a case of a parametrized test, the same in every process."""
    return getattr(case, "__name__", None) or re.sub(r" at 0x\w+", "", repr(case))


@pytest.mark.parametrize(
    ("filter", "value", "expected"),
    [
        (Param, KERNEL, True),
        (Param, LoRAParam(jnp.ones(2)), True),
        (LoRAParam, KERNEL, False),
        (Variable, KERNEL, True),
        (Variable, jnp.ones(2), False),
        (jax.Array, jnp.ones(2), True),
        (Param | BatchStat, BatchStat(jnp.ones(2)), True),
        (Param[jax.Array], KERNEL, True),
        (..., jnp.ones(2), True),
        (True, KERNEL, True),
        (None, KERNEL, False),
        (False, KERNEL, False),
        ("dropout", KEY, True),
        ("params", KEY, False),
        ("dropout", KERNEL, False),
        ("dropout", jnp.ones(2), False),
        ("noise", Tagged(jnp.ones(2)), True),
        ((BatchStat, Param), KERNEL, True),
        ([BatchStat, RngState], KERNEL, False),
        ((), KERNEL, False),
        (lambda path, value: value.ndim == 1, KERNEL, True),
        (PathEndsWith("kernel"), KERNEL, True),
        (PathEndsWith("bias"), KERNEL, False),
        (PathContains("encoder"), KERNEL, True),
        (PathContains("enc"), KERNEL, False),
        (PathContains("enc", exact=False), KERNEL, True),
        (PathContains(0), KERNEL, True),
        (PathContains("0"), KERNEL, False),
        (PathIn(PATH, ("bias",)), KERNEL, True),
        (PathIn(("kernel",)), KERNEL, False),
        (filters.Any(BatchStat, PathContains("encoder")), KERNEL, True),
        (filters.Any(), KERNEL, False),
        (All(Param, PathContains("decoder")), KERNEL, False),
        (All(), KERNEL, True),
        (Not(RngState), KERNEL, True),
        (All(RngState, Not(RngKey)), KEY, False),
    ],
    ids=name_of,
)
def test_a_filter_matches(filter: Any, value: Any, expected: bool) -> None:
    assert to_predicate(filter)(PATH, value) is expected


@pytest.mark.parametrize(
    "filter",
    [3, 1.5, {"a": 1}, KERNEL, jnp.ones(2)],
    ids=["int", "float", "dict", "Variable", "array"],
)
def test_what_is_no_filter_is_refused(filter: Any) -> None:
    with pytest.raises(
        TypeError, match=r"as a filter\. Expected a Variable type such as nnx\.Param"
    ):
        to_predicate(filter)


def test_a_filter_inside_a_filter_is_checked_when_it_is_made() -> None:
    with pytest.raises(TypeError, match="Cannot use 3 of type int as a filter"):
        All(Param, Not(3))


LEAF_FILTERS = st.sampled_from(
    [Param, BatchStat, RngState, ..., None, "dropout", PathContains("encoder"), PathIn(PATH)]
)
FILTERS = st.recursive(
    LEAF_FILTERS,
    lambda inner: st.one_of(
        inner.map(Not),
        st.lists(inner, max_size=3).map(lambda fs: All(*fs)),
        st.lists(inner, max_size=3).map(lambda fs: filters.Any(*fs)),
        st.lists(inner, max_size=3).map(tuple),
    ),
    max_leaves=6,
)
VALUES = st.sampled_from([KERNEL, KEY, BatchStat(jnp.ones(2)), jnp.ones(2)])


@given(FILTERS, FILTERS, VALUES)
def test_filters_obey_the_laws_of_logic(a: Any, b: Any, value: Any) -> None:
    def holds(filter: Any) -> bool:
        return to_predicate(filter)(PATH, value)

    assert holds(Not(Not(a))) == holds(a)
    assert holds(Not(All(a, b))) == holds(filters.Any(Not(a), Not(b)))
    assert holds((a, b)) == (holds(a) or holds(b))
    assert holds(All(a, b)) == (holds(a) and holds(b))


@given(FILTERS)
def test_a_filter_survives_pickling_as_the_same_key(filter: Any) -> None:
    predicate = to_predicate(filter)
    copy = pickle.loads(pickle.dumps(predicate))
    assert copy == predicate
    assert hash(copy) == hash(predicate)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (Param, OfType(Param)),
        ("dropout", WithTag("dropout")),
        (..., Everything()),
        (None, Nothing()),
        ([Param, ...], filters.Any(Param, True)),
        (Not((Param, "a")), Not(filters.Any(Param, WithTag("a")))),
        (PathIn(("a",), ("b", 0)), PathIn(("b", 0), ("a",))),
    ],
    ids=name_of,
)
def test_filters_that_say_the_same_are_one_key(one: Any, other: Any) -> None:
    assert to_predicate(one) == to_predicate(other)
    assert hash(to_predicate(one)) == hash(to_predicate(other))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (All(Param), filters.Any(Param)),
        (PathContains("a"), PathContains("a", exact=False)),
        (WithTag("a"), PathContains("a")),
        (Everything(), Nothing()),
    ],
    ids=name_of,
)
def test_filters_that_say_something_else_differ(one: Any, other: Any) -> None:
    assert one != other


def test_everything_may_come_last_more_than_once() -> None:
    assert filters_to_predicates((Param, ..., True)) == (OfType(Param), Everything(), Everything())


def test_a_filter_after_everything_is_refused() -> None:
    with pytest.raises(StructureError, match=r"Filter 1 of 3 takes everything.*OfType\(Param\)"):
        filters_to_predicates((BatchStat, ..., Param))


@pytest.mark.parametrize(
    ("filter", "expected"),
    [
        (Param, True),
        ((Param, "a", All(PathContains("x"), Not(PathIn(("a",))))), True),
        (..., True),
        (lambda path, value: True, False),
        (Not(lambda path, value: True), False),
        ((Param, PathEndsWith("a")), False),
    ],
    ids=name_of,
)
def test_only_our_own_filters_are_known_to_leave_values_alone(filter: Any, expected: bool) -> None:
    assert is_structural(to_predicate(filter)) is expected


def test_asking_for_a_tag_reads_no_value() -> None:
    class Unreadable(Param[Any]):
        def get_value(self, **kwargs: Any) -> Any:
            raise AssertionError("the value was read")

    assert not WithTag("dropout")(PATH, Unreadable(jnp.ones(2)))
    assert not FOREIGN_READS.recorders

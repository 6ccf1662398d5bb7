"""Statics: one object for all values with the same typed key."""

import copy
import dataclasses
import gc
import pickle
import types
import weakref
from collections import OrderedDict, defaultdict
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nnxlite._core.errors import StaticValueError
from nnxlite._core.statics import (
    copy_containers,
    is_mutable,
    static,
    static_by_identity,
    typed_key,
)


class Pair(NamedTuple):
    a: Any
    b: Any


@dataclasses.dataclass(frozen=True)
class Config:
    sizes: Any


values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary()),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.builds(Pair, inner, inner),
        st.builds(Config, inner),
        st.dictionaries(st.text(max_size=2), inner, max_size=3),
    ),
    max_leaves=5,
)


@given(values, values)
def test_statics_are_identical_exactly_when_their_keys_are_equal(a: Any, b: Any) -> None:
    assert (static(a) is static(b)) == (typed_key(a) == typed_key(b))


@given(values)
def test_the_value_of_a_static_has_the_key_of_the_original(value: Any) -> None:
    assert typed_key(static(value).value) == typed_key(value) == static(value).key


@given(values)
def test_pickling_and_copying_a_static_gives_itself(value: Any) -> None:
    it = static(value)
    assert pickle.loads(pickle.dumps(it)) is it
    assert copy.copy(it) is copy.deepcopy(it) is it


@given(values)
def test_a_static_is_written_on_one_short_line(value: Any) -> None:
    text = repr(static(value))
    assert "\n" not in text
    assert len(text) <= 70


def test_statics_compare_and_hash_by_identity() -> None:
    assert static(1) != static(1.0)
    assert len({static(1), static(True), static(1.0), static(1)}) == 3


MUTABLE = {
    "list": [[1]],
    "dict": {"a": [1]},
    "set": {1},
    "tuple": ([1],),
    "namedtuple": Pair([1], 2),
    "dataclass": Config([1]),
    "ordered": OrderedDict(a=[1]),
    "defaultdict": defaultdict(list, a=[1]),
    "proxy": types.MappingProxyType({"a": [1]}),
}


@pytest.mark.parametrize("name", MUTABLE)
def test_containers_are_copied_in_and_out(name: str) -> None:
    value = MUTABLE[name]
    it = static(value)
    assert is_mutable(value)
    assert type(it.value) is type(value)
    assert it.value is not value
    assert it.value is not it.value
    assert it.value == value


def test_changing_a_list_after_storing_it_changes_no_static() -> None:
    sizes = [1, 2]
    before = static(sizes)
    sizes.append(3)
    before.value.append(4)
    assert before.value == [1, 2]
    assert static(sizes) is not before
    assert static([1, 2]) is before


def test_a_copy_shares_what_is_no_container() -> None:
    shared = object()
    copied = copy_containers({"a": [shared, (shared,)]})
    assert copied["a"][0] is copied["a"][1][0] is shared


def test_a_value_without_containers_is_handed_out_as_it_is() -> None:
    value = (1, ("a", None))
    assert static(value).value is static(value).value


def _counter() -> Any:
    count = 0

    def step() -> int:
        nonlocal count
        count += 1
        return count

    return step


def test_a_function_that_rebound_its_cells_is_not_handed_out_for_a_fresh_one() -> None:
    used = _counter()
    before = static(used)
    used()
    fresh = static(_counter())
    assert fresh is not before
    assert fresh.value() == 1
    assert static(used) is not before


def test_a_function_made_anew_is_the_same_static() -> None:
    it = static(_counter())
    assert static(_counter()) is it


def test_an_array_can_be_static_by_identity() -> None:
    mask = np.ones(3)
    it = static_by_identity(mask)
    assert it is static_by_identity(mask)
    assert it is not static_by_identity(np.ones(3))
    assert it.value is mask


def test_a_traced_array_cannot_be_static_by_identity() -> None:
    with pytest.raises(StaticValueError, match=r"^the mask is a traced array"):
        jax.jit(lambda x: static_by_identity(x, "the mask"))(1.0)


def test_an_error_names_the_place() -> None:
    with pytest.raises(StaticValueError, match=r"^attribute 'sizes' of Block\[0\] is of type"):
        static([bytearray()], "attribute 'sizes' of Block")


def test_a_static_keeps_nothing_alive_that_leads_back_to_it() -> None:
    class Helper:
        it: Any

        def run(self) -> None: ...

    helper = Helper()
    helper.it = static(helper.run)
    alive = weakref.ref(helper)
    del helper
    gc.collect()
    assert alive() is None


def test_threads_get_the_same_statics() -> None:
    def work(_: int) -> list[Any]:
        return [static(("thread", n, [n])) for n in range(100)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(16)))
    assert all(map(lambda a, b: a is b, result, results[0]) for result in results)
    assert len({id(it) for result in results for it in result}) == 100

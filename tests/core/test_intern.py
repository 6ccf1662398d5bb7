"""Interning holds on to nothing."""

import dataclasses
import gc
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from nnxlite._core.intern import InternTable


@dataclasses.dataclass(eq=False)
class Entry:
    key: Any


def test_the_first_object_with_a_key_stays_the_one() -> None:
    table = InternTable[Entry]()
    first = table.add(Entry("a"))
    assert table.add(Entry("a")) is first
    assert table.get("a") is first
    assert table.get("b") is None


def test_equal_hashes_do_not_make_equal_keys() -> None:
    table = InternTable[Entry]()
    entries = [table.add(Entry(key)) for key in (-1, -2)]  # hash(-1) == hash(-2)
    assert [table.get(-1), table.get(-2)] == entries
    assert len(table) == 2


def test_an_object_replaced_is_no_longer_found() -> None:
    table = InternTable[Entry]()
    first, other = table.add(Entry(-1)), table.add(Entry(-2))
    second = table.replace(Entry(-1))
    assert table.get(-1) is second is not first
    assert table.get(-2) is other


def test_an_object_is_forgotten_when_nobody_holds_it() -> None:
    table = InternTable[Entry]()
    kept, dropped = table.add(Entry("a")), table.add(Entry("b"))
    del dropped
    gc.collect()
    assert len(table) == 1
    assert table.get("a") is kept


def test_a_key_that_leads_back_to_its_object_does_not_keep_it() -> None:
    class Link:
        entry: Entry

    table = InternTable[Entry]()
    link = Link()
    link.entry = table.add(Entry(link))
    del link
    gc.collect()
    assert len(table) == 0


def test_threads_that_add_at_once_get_the_same_objects() -> None:
    table = InternTable[Entry]()

    def work(_: int) -> list[Entry]:
        return [table.get(key) or table.add(Entry(key)) for key in range(200)]

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(work, range(16)))
    assert all(map(lambda a, b: a is b, result, results[0]) for result in results)
    assert len(table) == 200

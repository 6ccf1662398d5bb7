"""Interning: one object per key, found again for as long as somebody uses it.

A key may hold any object of the user's (a function's cell, the receiver of a method), and that
object may lead back to the interned one. So the table holds neither the interned object nor its
key: it finds weak references by the key's hash and compares with the keys that the live objects
hold themselves. Nothing is kept alive by having been interned.
"""

import threading
import weakref
from collections import deque
from collections.abc import Hashable
from typing import Generic, Protocol, TypeVar


class Keyed(Protocol):
    """Anything with the key that it is interned under."""

    @property
    def key(self) -> Hashable:
        """What makes the object equal to another one."""
        ...


K = TypeVar("K", bound=Keyed)


class _Entry(weakref.ref):  # a reference that knows the bucket it lies in
    __slots__ = ("hash_value",)


class InternTable(Generic[K]):
    """The live objects of one class, by key; safe to use from many threads.

    Looking up takes no lock: buckets are tuples that are replaced, never changed.
    """

    __slots__ = ("_buckets", "_dead", "_lock")

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[_Entry, ...]] = {}
        # References die at any moment, also inside of `add`: they are only noted here.
        self._dead: deque[int] = deque()
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> K | None:
        """Returns the live object with this key, if there is one."""
        for entry in self._buckets.get(hash(key), ()):
            found = entry()
            if found is not None and found.key == key:
                return found
        return None

    def add(self, new: K) -> K:
        """Returns the object for `new.key`: `new`, unless another one came first."""
        with self._lock:
            self._sweep()
            found = self.get(new.key)
            if found is None:
                self._append(new)
                return new
            return found

    def replace(self, new: K) -> K:
        """Puts `new` in the place of any other object with its key, and returns it."""
        with self._lock:
            self._sweep()
            found = self.get(new.key)
            if found is not None:
                code = hash(new.key)
                self._buckets[code] = tuple(e for e in self._buckets[code] if e() is not found)
            self._append(new)
            return new

    def __len__(self) -> int:
        with self._lock:
            self._sweep()
            return sum(len(bucket) for bucket in self._buckets.values())

    def _append(self, new: K) -> None:
        code = hash(new.key)
        entry = _Entry(new, self._bury)
        entry.hash_value = code
        self._buckets[code] = (*self._buckets.get(code, ()), entry)

    def _bury(self, entry: _Entry) -> None:
        self._dead.append(entry.hash_value)

    def _sweep(self) -> None:
        while self._dead:
            code = self._dead.popleft()
            bucket = tuple(e for e in self._buckets.get(code, ()) if e() is not None)
            if bucket:
                self._buckets[code] = bucket
            else:
                self._buckets.pop(code, None)

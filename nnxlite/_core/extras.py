"""Extras: what travels with the objects through every transform, in the one slot of the lift.

A capture is one: it hands perturbations in and recorded values out. Outside of captures nothing
travels, and the slot costs one look at a thread-local.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol, TypeAlias

# Objects by their number in the graph of a transform's arguments, each given by a callable, which
# returns None for lists, dicts and what is gone.
Nodes: TypeAlias = Sequence[Callable[[], Any]]


class Extras(Protocol):
    """Something that travels with the objects through every transform, such as a capture.

    Those active in a thread (see `travelling`) take part in each crossing. `nodes` gives objects
    by their number in the graph of the arguments: the caller's outside, the clones inside.
    """

    def key(self) -> Hashable:
        """Returns what is static about them: it joins the key of the pure function."""
        ...

    def inputs(self, nodes: Nodes) -> Any:
        """Returns a tree of arrays to hand in."""
        ...

    def inside(self, inputs: Any, nodes: Nodes) -> AbstractContextManager[Callable[[], Any]]:
        """Returns the context of the body; it yields a function giving arrays to hand out."""
        ...

    def deliver(self, outputs: Any, nodes: Nodes) -> None:
        """Takes what was handed out."""
        ...

    def learner(self) -> "Extras":
        """Returns an `Extras` that learns which inputs a mapped body uses; it records nothing."""
        ...

    def axes(self, inputs: Any, learner: "Extras", size: int | None) -> Any:
        """Returns the axis of each input under `vmap` and `scan`: 0, or None for all the same.

        Raises:
          ValueError: An input that is mapped does not have that size in front.
        """
        ...


class _Travelling(threading.local):
    active: tuple[Extras, ...] = ()


TRAVELLING = _Travelling()


def travelling(*extras: Extras) -> AbstractContextManager[None]:
    """Lets `extras` travel through the transforms called in the body, beside those that do."""
    return only_travelling(*TRAVELLING.active, *extras)


@contextmanager
def only_travelling(*extras: Extras) -> Iterator[None]:
    """Lets `extras` travel in the body, and nothing else."""
    before = TRAVELLING.active
    TRAVELLING.active = extras
    try:
        yield
    finally:
        TRAVELLING.active = before

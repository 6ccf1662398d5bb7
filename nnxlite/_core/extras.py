"""Extras: what travels with the objects through every transform, in the one slot of the lift.

A capture is one: it hands perturbations in and recorded values out. Outside of captures nothing
travels, and the slot costs one look at a thread-local.
"""

import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, Protocol, TypeAlias

# Objects by their number in the graph of a transform's arguments, each given by a callable, which
# returns None for lists, dicts and what is gone.
Nodes: TypeAlias = Sequence[Callable[[], Any]]


class Use(NamedTuple):
    """What a transform does with the function that extras travel into.

    Attributes:
      once: It runs once, on whole arrays, so that what was recorded before can go in and out.
      loop: How messages call it, if it is the body of a loop that JAX compiles once.
      condition: How they call it, if it is the condition of one.
    """

    once: bool = False
    loop: str = ""
    condition: str = ""


ONCE, MAPPED = Use(once=True), Use()


class Extras(Protocol):
    """Something that travels with the objects through every transform, such as a capture.

    Those active in a thread (see `travelling`) take part in each crossing. `nodes` gives objects
    by their number in the graph of the arguments: the caller's outside, the clones inside.
    """

    def key(self) -> Hashable:
        """Returns what is static about them: it joins the key of the pure function."""
        ...

    def inputs(self, nodes: Nodes, use: Use = MAPPED) -> Any:
        """Returns a tree of arrays to hand in."""
        ...

    def inside(self, inputs: Any, nodes: Nodes) -> AbstractContextManager[Callable[[], Any]]:
        """Returns the context of the body; it yields a function giving arrays to hand out."""
        ...

    def deliver(self, outputs: Any, nodes: Nodes) -> None:
        """Takes what was handed out."""
        ...

    def later(self) -> "Callable[[], Extras]":
        """Returns what makes one that stands in for this one in a body that JAX may run later.

        Neither this one nor an object is kept alive by it.
        """
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

    def agreed(
        self,
        transform: str,
        names: Sequence[str],
        outputs: Sequence[Any],
        where: Callable[[int], str],
    ) -> tuple[list[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Compares what several branches hand out, of which one runs.

        Args:
          transform: Its name, for messages.
          names: The names of the branches.
          outputs: Abstractly, what each hands out.
          where: Writes where the object of a number is.

        Returns:
          Per branch, what picks from its outputs what all of them hand out; and what makes outputs
          of the picked.

        Raises:
          StructureError: They differ.
        """
        ...

    def for_steps(self, given: Any, outputs: Any) -> Any:
        """Returns what to hand to each step of a loop, given abstractly what one handed out.

        If that is `given`, it is right; else the step is to be looked at again.
        """
        ...

    def totals(self, given: Any) -> Any:
        """Returns what changes from step to step, among what is handed in."""
        ...

    def with_totals(self, given: Any, totals: Any) -> Any:
        """Returns what is handed in, with that changed."""
        ...

    def totals_after(self, given: Any, outputs: Any) -> Any:
        """Returns what the next step gets of that."""
        ...

    def after_loop(self, given: Any, totals: Any, outputs: Any, asked: Any) -> Any:
        """Returns what the loop hands out, given abstractly what a step and the condition do."""
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

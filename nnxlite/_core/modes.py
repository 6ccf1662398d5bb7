"""Flags of flax.nnx that choose a mode: `graph=` and `graph_updates=`.

With `graph=False` flax treats objects as trees, where sharing is an error; with either flag False
its transforms hand back new values only, and drop what a function does to the structure of its
arguments. Here there is one mode: graphs, and everything that changed. A program that runs in flax
with False gets the same results here, unless it counts on something being dropped. So the flags are
taken and ignored, and False is refused by the few functions where that would matter: a jitted step
that calls `model.eval()`, or gradients of an object, which have another form. The functions
themselves know of no flag: the decorators keep them away.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def graph_flag(function: F) -> F:
    """Lets a function that looks at objects take `graph` as a keyword; both values mean the same.

    Example:
      >>> @graph_flag
      ... def count(node):
      ...     return len(node)
      >>> count([1, 2], graph=False)
      2
    """

    @functools.wraps(function)
    def wrapper(*args: Any, graph: bool | None = None, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return wrapper  # type: ignore[return-value]  # wraps keeps the signature


def mode_flags(instead: str | None = None) -> Callable[[F], F]:
    """Returns a decorator that lets a transform take `graph` and `graph_updates` as keywords.

    Args:
      instead: Why False is refused, and the way out. None where it is taken.

    Example:
      >>> @mode_flags("Changes of structure are kept here.")
      ... def run(f):
      ...     return f()
      >>> run(lambda: 1, graph=True)
      1
    """

    def decorate(function: F) -> F:
        @functools.wraps(function)
        def wrapper(
            *args: Any, graph: bool | None = None, graph_updates: bool | None = None, **kwargs: Any
        ) -> Any:
            if instead is not None and (graph is False or graph_updates is False):
                raise TypeError(refusal(function.__name__, graph, graph_updates, instead))
            return function(*args, **kwargs)

        return wrapper  # type: ignore[return-value]  # wraps keeps the signature

    return decorate


def refusal(name: str, graph: bool | None, graph_updates: bool | None, instead: str) -> str:
    """Writes what is wrong with a flag that is False."""
    flag = "graph=False" if graph is False else "graph_updates=False"
    return f"nnx.{name} has one mode and no {flag}. Leave the flag out. {instead}"


class _OneMode(contextlib.ContextDecorator):
    """What flax's switches return: a context, or a decorator, that does nothing."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        return None


def set_graph_mode(value: bool, /) -> contextlib.ContextDecorator:
    """Accepts the switch of flax for `graph=`; its one value here is True.

    Raises:
      ValueError: The value is False.

    Example:
      >>> with nnx.set_graph_mode(True):
      ...     graphdef, state = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    """
    _check_switch("set_graph_mode", value)
    return _OneMode()


def set_graph_updates(value: bool, /) -> contextlib.ContextDecorator:
    """Accepts the switch of flax for `graph_updates=`; its one value here is True.

    Raises:
      ValueError: The value is False.
    """
    _check_switch("set_graph_updates", value)
    return _OneMode()


def _check_switch(name: str, value: bool) -> None:
    if not value:
        raise ValueError(
            f"nnx.{name}(False) asks for flax's tree mode, which nnxlite does not have: objects "
            "are graphs, and what a function changes reaches the caller. Remove the call. What to "
            "look out for: States own their Variables, so return what a merged object changes; "
            "gradients of an object are a State of its Params; attributes that a function sets on "
            "an argument stay set."
        )

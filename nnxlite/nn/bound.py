"""Functions that a layer was given together with Modules, as `functools.partial` binds them."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import jax

from nnxlite._core.module import Module
from nnxlite._core.variable import Variable


class Bound(Module):
    """A function together with Modules or Variables that it gets by keyword.

    A plain function must not hold these: copies of the layer would go on reading the original.

    Attributes:
      func: The function, with its other arguments.
      keywords: The Modules and Variables by name.
    """

    def __init__(self, func: Callable[..., jax.Array], keywords: Mapping[str, Any]) -> None:
        self.func = func
        self.keywords = dict(keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns what the function returns."""
        return self.func(*args, **{**self.keywords, **kwargs})


def owning(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns the function; if it is a partial that holds Modules, a Module that owns them.

    Args:
      function: Any function or Module.

    Example:
      >>> layer = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> bound = owning(functools.partial(lambda x, layer: layer(x), layer=layer))
      >>> bound.keywords["layer"] is layer, bound(jnp.ones((4, 2))).shape
      (True, (4, 3))
    """
    if not isinstance(function, functools.partial):
        return function
    owned = {k: v for k, v in function.keywords.items() if isinstance(v, Module | Variable)}
    if not owned:
        return function
    others = {k: v for k, v in function.keywords.items() if k not in owned}
    plain = not others and not function.args
    func = function.func if plain else functools.partial(function.func, *function.args, **others)
    return Bound(func, owned)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Tells whether a function has a parameter of that name.

    Args:
      function: As `owning` returns it.
      name: The name.

    Example:
      >>> takes(lambda x, *, y: x, "y"), takes(lambda **kwargs: kwargs, "y")
      (True, False)
    """
    plain = function.func if isinstance(function, Bound) else function
    return name in inspect.signature(plain).parameters

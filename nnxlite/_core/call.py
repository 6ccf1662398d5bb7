"""Calling an object that is split: merge, call, split again."""

from typing import Any

from nnxlite._core.graphdef import GraphDef
from nnxlite._core.merge import merge
from nnxlite._core.split import split


class ApplyCaller:
    """Reaches into an object and calls it; see `call` and `GraphDef.apply`."""

    __slots__ = ("_root", "_target")

    def __init__(self, root: Any, target: Any) -> None:
        self._root, self._target = root, target

    def __getattr__(self, name: str) -> "ApplyCaller":
        return ApplyCaller(self._root, getattr(self._target, name))

    def __getitem__(self, key: Any) -> "ApplyCaller":
        return ApplyCaller(self._root, self._target[key])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._target(*args, **kwargs), split(self._root)


def apply_graphdef(graphdef: GraphDef[Any], state: Any, *states: Any) -> ApplyCaller:
    """Merges, and returns what calls the object and splits it again."""
    root = merge(graphdef, state, *states)
    return ApplyCaller(root, root)


def call(graphdef_state: tuple[GraphDef[Any], Any], /) -> ApplyCaller:
    """Returns a caller for a split object: calls give `(output, (graphdef, state))`.

    Example:
      >>> parts = nnx.split(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> out, parts = nnx.call(parts)(jnp.ones((1, 2)))
      >>> out.shape
      (1, 3)
    """
    return apply_graphdef(*graphdef_state)

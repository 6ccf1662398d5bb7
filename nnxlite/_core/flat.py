"""flatten and unflatten: `split` and `merge` with a flat list in place of nested States."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from nnxlite._core.errors import StructureError
from nnxlite._core.graphdef import GraphDef
from nnxlite._core.merge import merge
from nnxlite._core.modes import graph_flag
from nnxlite._core.nested import nest
from nnxlite._core.split import leaf_entries, split
from nnxlite._core.state_forms import FlatState, to_flat_state
from nnxlite._core.variable import Variable

A = TypeVar("A")


@graph_flag
def flatten(node: A, /, *, with_paths: bool = True) -> tuple[GraphDef[A], Any]:
    """Returns the `GraphDef` of an object, and its leaves as a flat sequence.

    Args:
      node: An object, or a container of objects. Not changed.
      with_paths: Whether to give a `FlatState`, the pairs of path and Variable of the State that
        `split` gives. Otherwise it is the list of the values, in the same order.

    Example:
      >>> graphdef, flat = nnx.flatten(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
      >>> flat.paths
      (('bias',), ('kernel',))
    """
    graphdef, state = split(node)
    flat = to_flat_state(state)
    return graphdef, flat if with_paths else [_value_of(leaf) for leaf in flat.leaves]


def unflatten(graphdef: GraphDef[A], flat: FlatState | Mapping[Any, Any] | Sequence[Any], /) -> A:
    """Makes a fresh object from what `flatten` gave; the inverse of it.

    Args:
      graphdef: From `flatten` or `split`.
      flat: A `FlatState`, a State or nested dicts, or the list of all values.

    Raises:
      StructureError: Leaves are missing or surplus.

    Example:
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> graphdef, values = nnx.flatten(model, with_paths=False)
      >>> nnx.unflatten(graphdef, values)(jnp.ones((1, 2))).shape
      (1, 3)
    """
    if isinstance(flat, Mapping):
        return merge(graphdef, flat)
    if isinstance(flat, FlatState):
        return merge(graphdef, nest(flat.paths, flat.leaves))
    paths = [path for path, *_ in leaf_entries(graphdef)]
    if len(flat) != len(paths):
        raise StructureError(
            f"{graphdef!r} needs {len(paths)} values, found {len(flat)}. Give all of them, in the "
            "order of nnx.flatten."
        )
    return merge(graphdef, nest(paths, flat))


def _value_of(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, Variable) else leaf

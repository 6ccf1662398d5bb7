"""transform_metadata: names of axes kept in step under JAX's own `vmap` and `scan`.

`nnx.vmap`, `nnx.scan` and `nnx.pmap` do it themselves, told by their `transform_metadata`. A plain
transform slices the values of Variables and knows nothing of the names of their axes; a function
that is decorated here takes the name off on the way in, and puts it on on the way out.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from nnxlite._core import sharding
from nnxlite._core.errors import StructureError, format_path
from nnxlite._core.graph import flatten
from nnxlite._core.graphdef import leaf_paths
from nnxlite._core.sharding import PARTITION_NAME
from nnxlite._core.trace import Opaque
from nnxlite._core.variable import Variable
from nnxlite._transforms.arguments import resolve
from nnxlite._transforms.axes import entry_roles
from nnxlite._transforms.packing import opaque_flatten
from nnxlite._transforms.roles import show, spread_over

_TITLE = "nnx.transform_metadata"


def transform_metadata(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_axes: Any = 0,
    out_axes: Any = 0,
    partition: str | None,
    graph: bool | None = None,
) -> Any:
    """Keeps the axis names of Variables in step in a function that `jax.vmap` or `jax.scan` maps.

    Right below `nnx.vmap`, `nnx.scan` or `nnx.pmap` it is the same as their `transform_metadata`:
    they take the name from here, and the axes that they have themselves.

    Args:
      fn: The function; without it, a decorator is returned.
      in_axes: The axes of the positional arguments, as they are given to the transform. For an
        object also `StateAxes`. Keyword arguments are mapped along axis 0.
      out_axes: The same for the result.
      partition: The name of the mapped axis, None if it has none.
      graph: Ignored; there is only one mode.

    Raises:
      ValueError: A Variable has another name for the axis than `partition`.

    Example:
      >>> @jax.vmap
      ... @nnx.transform_metadata(partition="layers")
      ... def make(key):
      ...     return nnx.Param(jax.random.normal(key, (4,)), out_sharding=("model",))
      >>> make(jax.random.split(jax.random.key(0), 3)).out_sharding
      ('layers', 'model')
    """
    make = functools.partial(
        _transform_metadata, in_axes=in_axes, out_axes=out_axes, partition=partition
    )
    return make if fn is None else make(fn)


def _transform_metadata(
    fn: Callable[..., Any], *, in_axes: Any, out_axes: Any, partition: str | None
) -> Callable[..., Any]:
    function, first, named = resolve(fn)
    metadata = {PARTITION_NAME: partition}

    @functools.wraps(function, updated=())
    def kept_in_step(*args: Any, **kwargs: Any) -> Any:
        axes = in_axes
        if isinstance(axes, tuple | list):  # what comes with the function is not mapped
            axes = (*[None] * len(first), *axes)
        elif first:
            axes = (*[None] * len(first), *[axes] * (len(args) - len(first)))
        of_named = {name: None if name in named else 0 for name in kwargs}
        mapped = _mapped_variables(args, axes, "in_axes")
        mapped |= _mapped_variables(kwargs, of_named, "in_axes")
        sliced: list[tuple[Variable, int]] = []
        try:
            for variable, axis in mapped.values():
                sharding.remove_axis(variable, axis, metadata)
                sliced.append((variable, axis))
            result = function(*args, **kwargs)
        finally:
            for variable, axis in sliced:
                sharding.add_axis(variable, axis, metadata)
        for number, (variable, axis) in _mapped_variables(result, out_axes, "out_axes").items():
            if number not in mapped:
                sharding.add_axis(variable, axis, metadata)
        return result

    kept_in_step.__partition_name__ = partition  # type: ignore[attr-defined]  # for `told_by`
    return functools.partial(kept_in_step, *first, **named) if first or named else kept_in_step


def told_by(
    function: Callable[..., Any], metadata: Mapping[str, Any]
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Returns the function inside of `transform_metadata`, and the name that it tells.

    Args:
      function: What a transform maps.
      metadata: What the transform itself was told.

    Raises:
      ValueError: Both tell a name.
    """
    if not hasattr(function, "__partition_name__"):
        return function, metadata
    if metadata:
        raise ValueError(
            f"{_TITLE} and the argument transform_metadata={dict(metadata)!r} both name the mapped "
            "axis. Leave out one of them."
        )
    told: Any = function
    return told.__wrapped__, {PARTITION_NAME: told.__partition_name__}


def _mapped_variables(tree: Any, axes: Any, option: str) -> dict[int, tuple[Variable, int]]:
    """Returns the Variables that have a mapped axis, by identity, each with that axis."""
    found: dict[int, tuple[Variable, int]] = {}
    leaves, _ = opaque_flatten(tree)
    for leaf, role in zip(leaves, spread_over(axes, tree, option, _TITLE), strict=True):
        if type(leaf) is not Opaque:
            continue
        flat = flatten((leaf.node,))
        skeleton = flat.graphdef.skeleton
        paths = leaf_paths(skeleton, [((), skeleton.roots[0])])
        for entry, path, axis in entry_roles(flat.graphdef, paths, flat.leaves.__getitem__, role):
            number, inner = entry
            variable = flat.leaves[number]
            if inner is not None:  # of a State
                variable = variable._flat()[1][inner]
            if not isinstance(axis, int) or not isinstance(variable, Variable):
                continue
            _, before = found.setdefault(id(variable), (variable, axis))
            if before != axis:
                raise StructureError(
                    f"{_TITLE}: {format_path(path)} ({type(variable).__name__}) is there twice, "
                    f"and {option} gives it {show(before)} in one place and {show(axis)} in the "
                    "other. Give both the same."
                )
    return found

"""Partition metadata: the axis names of Variables, read as `PartitionSpec` and kept in step.

Names are metadata (`out_sharding`, see `placement.py`), so they travel through split, merge and
every transform. A transform that adds an axis to an array (`vmap`, `scan`) adds an entry for it:
the name it was told by `transform_metadata`, or None.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from nnxlite._core.placement import AxisName, Sharding, axis_names, partition_spec
from nnxlite._core.variable import Variable, with_metadata

PARTITION_NAME = "partition_name"
"""The key of `transform_metadata` under which a transform finds the name of the axis it adds."""


def with_partitioning(
    initializer: Callable[..., Any],
    sharding: Sharding,
    mesh: Mesh | None = None,
    **metadata: Any,
) -> Callable[..., Any]:
    """Returns an initializer whose arrays, made into a Variable, name their axes.

    Args:
      initializer: Any function that returns an array.
      sharding: One entry per axis: a mesh axis, a tuple of them, a logical name or None.
      mesh: The mesh to place the Variable on, if it is not the one in force.
      **metadata: Further metadata for the Variable.

    Example:
      >>> init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "model"))
      >>> layer = nnx.Linear(4, 8, kernel_init=init, rngs=nnx.Rngs(0))
      >>> layer.kernel.out_sharding
      (None, 'model')
    """
    if mesh is not None:
        metadata["mesh"] = mesh
    return with_metadata(initializer, out_sharding=sharding, **metadata)


def get_var_pspec(variable: Variable) -> PartitionSpec | None:
    """Returns the mesh axes of one Variable; None if its value is no array."""
    if spec := _named_spec(variable._meta.mapping):
        return spec
    return PartitionSpec() if hasattr(variable._value, "shape") else None


def get_partition_spec(tree: Any) -> Any:
    """Returns the tree with each Variable holding its `PartitionSpec` in place of its value.

    Args:
      tree: An object, State, Variable, or any pytree of them; bare arrays become `PartitionSpec()`.

    Example:
      >>> kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("data", None))
      >>> nnx.get_partition_spec({"w": kernel})["w"].get_value() == jax.P("data", None)
      True
    """
    return _map_variables(get_var_pspec, tree, _array_spec)


def get_named_sharding(tree: Any, mesh: Mesh) -> Any:
    """Returns the tree with a `NamedSharding` on `mesh` for every array of it.

    Example:
      >>> mesh = jax.make_mesh((1,), ("data",))
      >>> kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("data", None))
      >>> nnx.get_named_sharding(kernel, mesh).get_value().spec == jax.P("data", None)
      True
    """
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), get_partition_spec(tree))


def as_abstract(tree: Any, graph: bool | None = None) -> Any:
    """Returns the tree with shardings set where a Variable holds a shape that has none.

    Useful after `nnx.eval_shape`, whose Variables hold `jax.ShapeDtypeStruct`. The mesh is that of
    the Variable's metadata, or else the one in force.

    Args:
      tree: An object, State, or any pytree of them.
      graph: Ignored; there is only one mode.
    """

    def sharded(variable: Variable) -> Any:
        value, metadata = variable._value, variable._meta.mapping
        spec = _named_spec(metadata)
        if spec is None or not isinstance(value, jax.ShapeDtypeStruct) or value.sharding:
            return value
        mesh = metadata.get("mesh") or jax.sharding.get_abstract_mesh()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)

    return _map_variables(sharded, tree, lambda value: value)


def abstract_with_sharding(tree: Any, graph: bool | None = None) -> Any:
    """Another name of `as_abstract`."""
    return as_abstract(tree, graph)


def add_axis(tree: Any, index: int, transform_metadata: Mapping[str, Any]) -> Any:
    """Adds an entry for a new axis to the names of every Variable of `tree`, in place.

    Args:
      tree: Variables, or a pytree of them. Their values do not have the axis.
      index: Where the axis will be; negative numbers count from the end of the longer shape.
      transform_metadata: Its entry `PARTITION_NAME` is the axis's name, None if there is none;
        every other entry is added to the metadata tuple of that name.

    Returns:
      `tree`.

    Example:
      >>> kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("data", None))
      >>> nnx.sharding.add_axis(kernel, 0, {nnx.PARTITION_NAME: "layers"}).out_sharding
      ('layers', 'data', None)
    """
    name = transform_metadata.get(PARTITION_NAME)
    for variable in _with_named_axes(tree, transform_metadata):
        at = _position(variable, index)
        for field, entry in _fields(transform_metadata).items():
            names = _names(variable, field)
            if names is not None:
                padded = (*names, *(None,) * (at - len(names)))
                changed = (*padded[:at], entry, *padded[at:])
                variable.set_metadata(field, _in_form_of(variable._meta.mapping[field], changed))
        variable.add_axis(at, name)
    return tree


def remove_axis(tree: Any, index: int, transform_metadata: Mapping[str, Any]) -> Any:
    """Removes the entry of an axis from the names of every Variable of `tree`, in place.

    Args:
      tree: Variables, or a pytree of them. Their values do not have the axis any more.
      index: Where the axis was; negative numbers count from the end of the longer shape.
      transform_metadata: As in `add_axis`. Without `PARTITION_NAME` any name is removed.

    Returns:
      `tree`.

    Raises:
      ValueError: The entry is another than the one `transform_metadata` tells.

    Example:
      >>> kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("layers", "data", None))
      >>> nnx.sharding.remove_axis(kernel, 0, {nnx.PARTITION_NAME: "layers"}).out_sharding
      ('data', None)
    """
    name = transform_metadata.get(PARTITION_NAME)
    for variable in _with_named_axes(tree, transform_metadata):
        at = _position(variable, index)
        for field, entry in _fields(transform_metadata).items():
            names = _names(variable, field)
            if names is None:
                continue
            found = names[at] if at < len(names) else None
            told = field != "out_sharding" or PARTITION_NAME in transform_metadata
            if told and found != entry:
                raise ValueError(
                    f"Expected the name {entry!r} for axis {at} of a {type(variable).__name__} "
                    f"whose {field} is {names}, found {found!r}. Give the transform "
                    "transform_metadata={nnx.PARTITION_NAME: "
                    f"{found!r}}}, as where the axis was added."
                )
            changed = (*names[:at], *names[at + 1 :])
            variable.set_metadata(field, _in_form_of(variable._meta.mapping[field], changed))
        variable.remove_axis(at, name)
    return tree


def _named_spec(metadata: Mapping[str, Any]) -> PartitionSpec | None:
    """Returns the mesh axes that metadata names; None if it names none."""
    if sharding := metadata.get("out_sharding"):
        return partition_spec(sharding, metadata.get("sharding_rules", ()))
    return None


def _fields(transform_metadata: Mapping[str, Any]) -> dict[str, AxisName]:
    """Returns the entry for the new axis of each metadata field that has one per axis."""
    fields = {"out_sharding": transform_metadata.get(PARTITION_NAME)}
    fields.update((k, v) for k, v in transform_metadata.items() if k != PARTITION_NAME)
    return fields


def _names(variable: Variable, field: str) -> tuple[AxisName, ...] | None:
    """Returns a metadata field with one entry per axis; None if it has none."""
    names = variable._meta.mapping.get(field)
    if field == "out_sharding":
        return axis_names(names) if names else None
    return names if names and isinstance(names, tuple) else None


def _in_form_of(old: Any, names: Sequence[AxisName]) -> Any:
    if isinstance(old, NamedSharding):
        return NamedSharding(old.mesh, PartitionSpec(*names))
    return PartitionSpec(*names) if isinstance(old, PartitionSpec) else tuple(names)


def _position(variable: Variable, index: int) -> int:
    if index >= 0:
        return index
    rank = getattr(variable._value, "ndim", None)
    if rank is None:
        raise ValueError(
            f"Axis {index} of a {type(variable).__name__} cannot be counted from the end: the "
            "value is no array. Use an index from the start."
        )
    return index + rank + 1


def _with_named_axes(tree: Any, transform_metadata: Mapping[str, Any]) -> list[Variable]:
    """Returns the Variables that have names of axes, or hooks that want to know of them."""
    hooks = ("on_add_axis", "on_remove_axis")
    return [
        variable
        for variable in _variables(tree)
        if any(_names(variable, field) is not None for field in _fields(transform_metadata))
        or any(name in variable._meta.mapping or name in variable._class_hooks for name in hooks)
    ]


def _variables(tree: Any) -> list[Variable]:
    leaves = jax.tree.leaves(tree, is_leaf=_is_variable)
    return [leaf for leaf in leaves if isinstance(leaf, Variable)]


def _map_variables(
    new_value: Callable[[Variable], Any], tree: Any, of_leaf: Callable[[Any], Any]
) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            return type(leaf)._make(new_value(leaf), leaf._meta, leaf._level)
        return of_leaf(leaf)

    return jax.tree.map(convert, tree, is_leaf=_is_variable)


def _is_variable(value: Any) -> bool:
    return isinstance(value, Variable)


def _array_spec(leaf: Any) -> PartitionSpec | None:
    return PartitionSpec() if hasattr(leaf, "shape") else None

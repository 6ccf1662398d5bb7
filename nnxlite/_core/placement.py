"""Where arrays live: names of their axes, rules that translate names, and placement on a mesh.

A Variable may name the axes of its array in its metadata `out_sharding`: one entry per axis, which
is an axis of the mesh, several of them, None (not split), or a logical name such as `"embed"` that
*axis rules* translate into one of these. Under a mesh (`jax.set_mesh`) a new value is placed at
once; without one the names are only kept, for `get_partition_spec` to read.

This file knows arrays and names only; `sharding.py` applies it to Variables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar, Token
from typing import Any, TypeAlias

import jax
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from nnxlite._core.trace import EAGER, current_level

AxisName: TypeAlias = str | tuple[str, ...] | None
AxisRules: TypeAlias = Sequence[tuple[str, AxisName]]
Sharding: TypeAlias = Sequence[AxisName] | PartitionSpec | NamedSharding | Format

_axis_rules: ContextVar[AxisRules] = ContextVar("axis_rules", default=())
_eager: ContextVar[bool | None] = ContextVar("eager_sharding", default=None)


@contextmanager
def logical_axis_rules(rules: AxisRules) -> Iterator[None]:
    """Translates logical axis names inside the `with` block.

    Args:
      rules: Pairs of a logical name and the mesh axis, axes, or None that it stands for.

    Example:
      >>> kernel = nnx.Param(jnp.ones((4, 8)), out_sharding=("embed", "mlp"))
      >>> with nnx.logical_axis_rules([("embed", None), ("mlp", "model")]):
      ...     nnx.get_partition_spec(kernel).get_value() == jax.P(None, "model")
      True
    """
    token = _axis_rules.set(tuple(rules))
    try:
        yield
    finally:
        _axis_rules.reset(token)


def get_logical_axis_rules() -> AxisRules:
    """Returns the rules in force."""
    return _axis_rules.get()


def set_logical_axis_rules(rules: AxisRules) -> None:
    """Puts `rules` in force for the rest of this thread."""
    _axis_rules.set(tuple(rules))


class use_eager_sharding:
    """Switches the placement of new Variables on or off, at once; as a context, until it ends.

    By default a Variable that names its axes is placed if there is a mesh. Switched on, a missing
    mesh is an error; switched off, names are only kept.

    Example:
      >>> with nnx.use_eager_sharding(False):
      ...     nnx.using_eager_sharding()
      False
      >>> nnx.using_eager_sharding()
      True
    """

    def __init__(self, value: bool, /) -> None:
        self._token: Token[bool | None] = _eager.set(value)

    def __enter__(self) -> None:
        return None

    def __exit__(self, *exception: object) -> None:
        _eager.reset(self._token)


def using_eager_sharding() -> bool:
    """Tells whether new Variables that name their axes are placed."""
    return _eager.get() is not False


def place(value: Any, metadata: Mapping[str, Any]) -> Any:
    """Returns `value` placed as its metadata says, or `value` itself if there is nothing to do.

    Args:
      value: An array; anything else is returned as it is.
      metadata: That of the Variable. Read are `out_sharding`, `sharding_rules` (further axis
        rules), `mesh` (in place of the one in force) and `eager_sharding` (in place of the switch).

    Raises:
      ValueError: A name is no axis of the mesh, there are more names than axes, or placement was
        asked for without a mesh.
    """
    eager = metadata.get("eager_sharding", _eager.get())
    sharding = metadata.get("out_sharding")
    if eager is False or not sharding or not isinstance(value, jax.Array | np.ndarray):
        return value
    if isinstance(sharding, Format):
        return jax.lax.with_sharding_constraint(value, sharding)
    mesh = getattr(sharding, "mesh", None) or metadata.get("mesh")
    known_mesh = mesh or jax.sharding.get_abstract_mesh()
    if known_mesh.empty:
        if eager:
            raise ValueError(
                f"Cannot place an array of shape {value.shape} by {sharding}: there is no mesh. "
                "Make the Variable inside `with jax.set_mesh(mesh):`, or pass "
                "eager_sharding=False to only keep the names."
            )
        return value
    spec = partition_spec(sharding, metadata.get("sharding_rules", ()))
    put = _placement(spec, value.shape, known_mesh)
    if put is None:
        return value
    if mesh is None and current_level() is EAGER:
        mesh = jax.sharding.get_mesh()
    return put(value, spec if mesh is None else NamedSharding(mesh, spec))


def sharding_of(shape: tuple[int, ...], metadata: Mapping[str, Any]) -> NamedSharding | None:
    """Returns where an array of this shape would be: as its metadata says, else replicated.

    Args:
      shape: Of the array.
      metadata: As for `place`.

    Returns:
      None where there is no mesh, or names are only kept.

    Raises:
      ValueError: As in `place`.
    """
    sharding = metadata.get("out_sharding")
    if metadata.get("eager_sharding", _eager.get()) is False or isinstance(sharding, Format):
        return None
    mesh = getattr(sharding, "mesh", None) or metadata.get("mesh")
    mesh = mesh or jax.sharding.get_abstract_mesh()
    if mesh.empty or AxisType.Manual in mesh.axis_types:
        return None
    spec = PartitionSpec()
    if sharding:
        spec = partition_spec(sharding, metadata.get("sharding_rules", ()))
        _placement(spec, shape, mesh)
    return NamedSharding(mesh, spec)


def _placement(spec: PartitionSpec, shape: tuple[int, ...], mesh: Any) -> Callable | None:
    """Returns the JAX function that places an array on axes of the kind that `spec` names."""
    if len(spec) > len(shape):
        raise ValueError(
            f"{spec} names {len(spec)} axes, but the array has shape {shape}. Name at most one "
            "per axis of the array."
        )
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if set(kinds.values()) == {AxisType.Manual}:  # inside shard_map the array is a part already
        return None
    used = [name for entry in spec for name in _members(entry)]
    for name in used:
        if name not in kinds:
            raise ValueError(
                f"{name!r} in {spec} is no axis of the mesh, which has {mesh.axis_names}. "
                "Translate it with nnx.logical_axis_rules or the metadata `sharding_rules`."
            )
    found = {kinds[name] for name in used} or set(kinds.values())
    if AxisType.Manual in found:
        return None
    if found == {AxisType.Auto}:
        return jax.lax.with_sharding_constraint
    if found == {AxisType.Explicit}:
        return jax.sharding.reshard
    raise ValueError(
        f"{spec} mixes mesh axes of the kinds Auto and Explicit: {kinds}. Use one kind per array."
    )


def partition_spec(sharding: Sharding, rules: AxisRules = ()) -> PartitionSpec:
    """Returns the mesh axes that `sharding` stands for under the rules in force and `rules`.

    Raises:
      ValueError: `rules` contradict those in force.
    """
    known = dict(_axis_rules.get())
    for name, axis in rules or ():
        if known.setdefault(name, axis) != axis:
            raise ValueError(
                f"The axis rules in force say {name!r} -> {known[name]!r}, those of the Variable "
                f"{axis!r}. Make them agree."
            )
    return PartitionSpec(*(_translate(entry, known) for entry in axis_names(sharding)))


def axis_names(sharding: Sharding) -> tuple[AxisName, ...]:
    """Returns the entries of any form of sharding."""
    inner: Any = sharding.sharding if isinstance(sharding, Format) else sharding
    return tuple(inner.spec if isinstance(inner, NamedSharding) else inner)


def _translate(entry: AxisName, rules: Mapping[str, AxisName]) -> AxisName:
    if not isinstance(entry, tuple):
        return rules.get(entry, entry) if entry else entry
    return tuple(name for member in entry for name in _members(rules.get(member, member))) or None


def _members(entry: AxisName) -> tuple[str, ...]:
    if entry is None:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)

"""How a Variable keeps its value.

Python numbers become arrays and weak types become strong ones, so that a value has one type from
the start, in eager and in jitted code, and setting it again does not retrace. Containers are
copied on the way in and out, so that changing a value always goes through its Variable. All else
is kept as it is: shapes, shardings, labels, whatever JAX programs put in the place of a value.

A NumPy array is kept too, and shared by Variables and States as arrays of JAX are; but it can be
changed in place, so what is handed out is a copy. Who gives one leaves it to the Variable.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from nnxlite._core.arithmetic import Arithmetic


def normalized(value: Any) -> Any:
    """Returns `value` as a Variable keeps it: Python numbers as arrays, no weak types.

    Containers are copied; anything that is neither a number nor an array is kept as it is.
    """
    role = _ROLES.get(type(value))
    if role is None:
        role = _ROLES[type(value)] = _role(value)
    return role(value)


def own(value: Any) -> Any:
    """Returns `value` for the caller to change: containers and NumPy arrays are copied."""
    role = _ROLES.get(type(value))
    if role is _tree:
        return jax.tree.map(own, value)
    return value.copy() if role is _numpy else value


def view_of(value: np.ndarray) -> np.ndarray:
    """Returns a view of an array that refuses to be changed."""
    view = value.view()
    view.flags.writeable = False
    return view


def _role(value: Any) -> Callable[[Any], Any]:
    if isinstance(value, Arithmetic):
        return _taken
    if isinstance(value, jax.Array):
        return _strong
    if isinstance(value, np.ndarray):
        return _numpy
    if value is None or jax.tree_util.all_leaves((value,)):
        return _itself
    return _tree


def _itself(value: Any) -> Any:
    return value


def _numpy(value: np.ndarray) -> np.ndarray:
    return value


def _taken(value: Arithmetic) -> Any:
    return normalized(value.get_value())


def _strong(value: jax.Array) -> jax.Array:
    # Typed PRNG keys have no `weak_type`.
    if getattr(value, "weak_type", False):
        return jax.lax.convert_element_type(value, value.dtype)
    return value


def _number(value: Any) -> jax.Array:
    return jnp.asarray(np.array(value, jnp.result_type(type(value))))


def _tree(value: Any) -> Any:
    return jax.tree.map(normalized, value)


_ROLES: dict[type, Callable[[Any], Any]] = {
    bool: _number,
    int: _number,
    float: _number,
    complex: _number,
    list: _tree,
    tuple: _tree,
    dict: _tree,
    np.ndarray: _numpy,
    str: _itself,
    jax.ShapeDtypeStruct: _itself,
}


def with_part(old: Any, index: Any, new: Any) -> Any:
    """Returns `old` with `new` at `index`; arrays keep their shape and dtype."""
    if isinstance(old, jax.Array):
        if index is ...:
            if isinstance(new, jax.Array) and new.shape == old.shape and new.dtype == old.dtype:
                return normalized(new)
            _check_fits(old.shape, np.shape(new))
        return old.at[index].set(new)
    if isinstance(old, np.ndarray):
        if isinstance(new, Tracer):
            return jnp.asarray(old).at[index].set(new)
        old = old.copy()
    elif index is ...:
        return normalized(new)
    else:
        old = jax.tree.map(_itself, old)
    old[index] = new
    return normalized(old)


def _check_fits(old: tuple[int, ...], new: tuple[int, ...]) -> None:
    trailing = old[len(old) - len(new) :]
    if len(new) > len(old) or any(n not in (1, o) for n, o in zip(new, trailing, strict=True)):
        raise ValueError(
            f"Cannot set all of an array of shape {old} to an array of shape {new}: "
            "`variable[...]` keeps the shape. Set `variable.value` to change it."
        )

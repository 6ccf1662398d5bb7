"""The dtype in which a layer computes: the one it was told, or what its arrays promote to."""

from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

T = TypeVar("T", bound=tuple[Any, ...])


class PromoteDtype(Protocol):
    """A function that brings arrays to one dtype, as `promote_dtype` does."""

    def __call__(self, args: T, /, *, dtype: DTypeLike | None = None, inexact: bool = True) -> T:
        """Returns the arrays in one dtype: `dtype` if it is given."""
        ...


def canonicalize_dtype(
    *args: Any, dtype: DTypeLike | None = None, inexact: bool = True
) -> DTypeLike:
    """Returns the dtype that `args` are computed in.

    Args:
      *args: Arrays, Variables, numbers, or None, which does not count.
      dtype: The answer, if it is given. Otherwise what the arrays promote to by JAX's standard
        rules, whatever `jax_numpy_dtype_promotion` says: promotion is the purpose here.
      inexact: Whether the dtype has to be floating or complex; integers promote to float32.

    Raises:
      ValueError: `dtype` is not inexact although it has to be.

    Example:
      >>> canonicalize_dtype(jnp.ones(2, jnp.int32), jnp.ones(2, jnp.bfloat16)) == jnp.bfloat16
      True
    """
    if dtype is None:
        dtype = _promoted([_as_array(arg) for arg in args if arg is not None], inexact)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        raise ValueError(
            f"Cannot compute in {jnp.dtype(dtype)}. Expected a floating or complex dtype."
        )
    return dtype


def promote_dtype(args: T, /, *, dtype: DTypeLike | None = None, inexact: bool = True) -> T:
    """Returns `args` as arrays of the dtype they are computed in; None stays None.

    Args:
      args: A tuple of arrays, Variables, numbers or None.
      dtype: See `canonicalize_dtype`.
      inexact: See `canonicalize_dtype`.

    Example:
      >>> x, kernel, bias = promote_dtype((jnp.ones(2, jnp.int32), jnp.ones(2), None))
      >>> x.dtype.name, bias
      ('float32', None)
    """
    dtype = canonicalize_dtype(*args, dtype=dtype, inexact=inexact)
    return tuple(_cast(arg, dtype) for arg in args)  # type: ignore[return-value]  # same length


def _promoted(arrays: list[jax.Array], inexact: bool) -> DTypeLike:
    dtype = arrays[0].dtype
    if any(array.dtype != dtype or array.aval.weak_type for array in arrays):
        with jax.numpy_dtype_promotion("standard"):
            dtype = jnp.result_type(*arrays)
    if inexact and not jnp.issubdtype(dtype, jnp.inexact):
        with jax.numpy_dtype_promotion("standard"):
            return jnp.promote_types(jnp.float32, dtype)
    return dtype


def _cast(arg: Any, dtype: DTypeLike) -> Any:
    if arg is None:
        return None
    if isinstance(arg, jax.Array) and arg.dtype == dtype and not arg.aval.weak_type:
        return arg  # asarray would cost 5 µs an eager call
    return jnp.asarray(arg, dtype)


def _as_array(arg: Any) -> jax.Array:
    return arg if isinstance(arg, jax.Array) else jnp.asarray(arg)

"""Options of convolutions that are given once or for each spatial axis, and the names of paddings.

Each function that may find a mistake takes the name of the layer, for the message.
"""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
from jax.typing import ArrayLike

PerAxis: TypeAlias = int | Sequence[int] | None  # one number for all spatial axes, or one for each
Padding: TypeAlias = str | int | Sequence[int | tuple[int, int]]
Pads: TypeAlias = tuple[tuple[int, int], ...]


def canonicalize_padding(padding: Padding, rank: int, layer: str = "The layer") -> str | Pads:
    """Returns the name of a padding in capitals, or what to add before and after each spatial axis.

    Args:
      padding: A name in any case, an int, or for each axis an int or a pair of them.
      rank: The number of spatial axes.
      layer: Who found it.

    Raises:
      ValueError: The padding is none of these, or of a kind that needs another rank.

    Example:
      >>> canonicalize_padding([1, (0, 2)], 2)
      ((1, 1), (0, 2))
    """
    if isinstance(padding, str):
        name = padding.upper()
        if name == "CAUSAL" and rank != 1:
            raise ValueError(
                f"{layer} found CAUSAL padding for {rank} spatial axes. It is defined for one."
            )
        return name
    if isinstance(padding, int):
        return ((padding, padding),) * rank
    if isinstance(padding, Sequence) and len(padding) == rank:
        pairs = tuple((pad, pad) if isinstance(pad, int) else tuple(pad) for pad in padding)
        if all(len(pair) == 2 for pair in pairs):
            return pairs  # type: ignore[return-value]  # of two
    raise ValueError(
        f"{layer} found padding {padding!r} for {rank} spatial axes. Expected a name, an int, or "
        "an int or a pair of ints for each axis."
    )


def check_padding_name(padding: Padding, known: Iterable[str], layer: str) -> None:
    """Checks that a padding given by name is one that the layer knows.

    Raises:
      ValueError: It is not.
    """
    if isinstance(padding, str) and padding.upper() not in known:
        raise ValueError(
            f"{layer} found an unknown padding {padding!r}. Expected one of {', '.join(known)}, or "
            "numbers."
        )


def check_mask(mask: ArrayLike | None, kernel_shape: tuple[int, ...], layer: str) -> None:
    """Checks that a mask of the kernel has its shape.

    Raises:
      ValueError: It has another one.
    """
    if mask is not None and jnp.shape(mask) != kernel_shape:
        raise ValueError(
            f"{layer} found a mask of shape {jnp.shape(mask)}. Expected the shape of the kernel: "
            f"{kernel_shape}."
        )


def per_axis(given: PerAxis, rank: int, name: str, layer: str) -> tuple[int, ...]:
    """Returns an option as one number for each spatial axis; None counts as 1.

    Raises:
      ValueError: There are numbers for another number of axes.
    """
    if given is None or isinstance(given, int):
        return (1 if given is None else given,) * rank
    if len(given) != rank:
        raise ValueError(
            f"{layer} found {name} {tuple(given)} for {rank} spatial axes. Expected an int, or one "
            "for each axis."
        )
    return tuple(given)


def frozen(given: Any) -> Any:
    """Returns nested sequences as tuples, and anything else as it is."""
    if isinstance(given, Sequence) and not isinstance(given, str):
        return tuple(frozen(item) for item in given)
    return given

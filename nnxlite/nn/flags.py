"""Flags of a layer that may be set when it is made, later on the instance, or at the call."""

from typing import TypeVar

T = TypeVar("T")


def first_from(*values: T | None, error_msg: str) -> T:
    """Returns the first of `values` that is not None.

    Raises:
      ValueError: All are None; the text is `error_msg`.

    Example:
      >>> first_from(None, False, True, error_msg="no flag")
      False
    """
    for value in values:
        if value is not None:
            return value
    raise ValueError(error_msg)


def missing_flag(layer: str, flag: str) -> str:
    """Returns the message for a flag that was given nowhere, with the ways to give it."""
    return (
        f"{layer} was told `{flag}` nowhere. Give it to the constructor, {layer}(..., "
        f"{flag}=True), or to the call, layer(x, {flag}=True), or to all layers of a model: "
        f"model.train(), model.eval() or nnx.view(model, {flag}=True)."
    )

"""Modes: setting the same attributes on many modules, on the spot or in a view.

`train` and `eval` set `deterministic` and `use_running_average` wherever these exist. A *view* is a
second object graph over the very same Variables: the model stays as it is, and both see each
other's values.
"""

from typing import Any, TypeVar

from nnxlite._core import iterate
from nnxlite._core.errors import StructureError
from nnxlite._core.filters import Filter, filters_to_predicates
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.trace import check_writable

A = TypeVar("A")


def set_attributes(
    node: Any, /, *filters: Filter, raise_if_not_found: bool = True, **attributes: Any
) -> None:
    """Sets attributes on every object of a graph that has them already.

    Args:
      node: The object to look through; changed in place.
      *filters: Only objects that match one of these; all by default.
      raise_if_not_found: Whether a name that no object has is an error.
      **attributes: Names and values.

    Raises:
      StructureError: No object has the attribute. Nothing is changed then.

    Example:
      >>> block = nnx.Sequential(nnx.Dropout(0.5), nnx.Dropout(0.1))
      >>> nnx.set_attributes(block, deterministic=True)
      >>> block.layers[1].deterministic
      True
    """
    predicates = filters_to_predicates(filters or (...,))
    writes = []
    missing = set(attributes)
    for path, value in iterate.iter_graph(node):
        if kind_of(value) != OBJECT or not any(p(path, value) for p in predicates):
            continue
        for name, new in attributes.items():
            # Not hasattr: objects such as Rngs make up attributes as they are asked for.
            if name in value._node_items() or hasattr(type(value), name):
                check_writable(value, f"set attribute {name!r} of {type(value).__name__}")
                missing.discard(name)
                writes.append((value, name, new))
    if missing and raise_if_not_found:
        raise StructureError(
            f"No object of {type(node).__name__} has the attribute "
            f"{', '.join(repr(name) for name in sorted(missing))}"
            f"{' among those the filters choose' if filters else ''}. Pass "
            "raise_if_not_found=False to set it only where it exists."
        )
    for value, name, new in writes:
        setattr(value, name, new)


def train(node: Any, /, **attributes: Any) -> None:
    """Puts all modules of a graph into training mode."""
    modes = {"deterministic": False, "use_running_average": False, **attributes}
    set_attributes(node, raise_if_not_found=False, **modes)


def eval(node: Any, /, **attributes: Any) -> None:
    """Puts all modules of a graph into evaluation mode."""
    modes = {"deterministic": True, "use_running_average": True, **attributes}
    set_attributes(node, raise_if_not_found=False, **modes)


def view(
    node: A,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    **attributes: Any,
) -> A:
    """Returns an object over the same Variables with other attributes; `node` stays as it is.

    Args:
      node: The object.
      only: Set the attributes only on objects that match.
      raise_if_not_found: Whether a name that no object has is an error.
      **attributes: Names and values.

    Raises:
      StructureError: No object has the attribute.

    Example:
      >>> model = nnx.Sequential(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), nnx.Dropout(0.5))
      >>> quiet = nnx.view(model, deterministic=True)
      >>> quiet.layers[0].kernel is model.layers[0].kernel, model.layers[1].deterministic
      (True, False)
    """
    made = iterate.around_same_leaves(node)
    set_attributes(made, only, raise_if_not_found=raise_if_not_found, **attributes)
    return made


def with_attributes(
    node: A,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    **attributes: Any,
) -> A:
    """Returns an object over the same Variables with other attributes; the same as `view`."""
    return view(node, only=only, raise_if_not_found=raise_if_not_found, **attributes)

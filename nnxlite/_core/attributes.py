"""Modes: setting the same attributes on many modules, on the spot or in a view.

`train` and `eval` set `deterministic` and `use_running_average` wherever these exist. A *view* is a
second object graph over the very same Variables: the model stays as it is, and both see each
other's values.
"""

import inspect
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from nnxlite._core import iterate
from nnxlite._core.errors import StructureError
from nnxlite._core.filters import Filter, filters_to_predicates, to_predicate
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.modes import graph_flag
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
    missing = _names_asked_for(attributes)
    for path, value in iterate.iter_graph(node):
        if kind_of(value) != OBJECT or not any(p(path, value) for p in predicates):
            continue
        for name, new in attributes.items():
            if _has(value, name):
                check_writable(value, f"set attribute {name!r} of {type(value).__name__}")
                missing.discard(name)
                writes.append((value, name, new))
    if missing and raise_if_not_found:
        raise _not_found(node, missing, bool(filters))
    for value, name, new in writes:
        setattr(value, name, new)


def _names_asked_for(attributes: Mapping[str, Any]) -> set[str]:
    """Returns the names that some object has to have."""
    names = set(attributes)
    if isinstance(attributes.get("graph"), bool | None):  # a flag of flax, unless an object has it
        names.discard("graph")
    return names


def _has(value: Any, name: str) -> bool:
    # Not hasattr: objects such as Rngs make up attributes as they are asked for.
    return name in value._node_items() or hasattr(type(value), name)


def _not_found(node: Any, missing: Iterable[str], filtered: bool) -> StructureError:
    return StructureError(
        f"No object of {type(node).__name__} has the attribute "
        f"{', '.join(repr(name) for name in sorted(missing))}"
        f"{' among those the filters choose' if filtered else ''}. Pass "
        "raise_if_not_found=False to set it only where it exists."
    )


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

    An object with a method `set_view` is given those of the values that the method has parameters
    for, and decides itself what they mean. All else is set on every object that has the attribute.

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
    predicate = to_predicate(only)
    missing = _names_asked_for(attributes)
    for path, value in list(iterate.iter_graph(made)):
        if kind_of(value) != OBJECT or not predicate(path, value):
            continue
        options = _view_options(type(value), attributes)
        if options:
            value.set_view(**options)
        others = [name for name in attributes if name not in options and _has(value, name)]
        for name in others:
            setattr(value, name, attributes[name])
        missing -= {*options, *others}
    if missing and raise_if_not_found:
        raise _not_found(node, missing, only is not ...)
    return made


def with_attributes(
    node: A,
    /,
    *,
    only: Filter = ...,
    raise_if_not_found: bool = True,
    **attributes: Any,
) -> A:
    """Returns an object over the same Variables with other attributes; asks no `set_view`.

    Arguments and errors as for `view`.
    """
    made = iterate.around_same_leaves(node)
    set_attributes(made, only, raise_if_not_found=raise_if_not_found, **attributes)
    return made


@graph_flag
def view_info(node: Any, /, *, only: Filter = ...) -> str:
    """Returns what `view` can set: for each class with a method `set_view`, its parameters.

    Args:
      node: The object to look through.
      only: A filter for the objects.

    Example:
      >>> print(nnx.view_info(nnx.Sequential(nnx.Dropout(0.5), nnx.Dropout(0.1))))
      Dropout:
        deterministic: bool | None = None
          Whether to return the input as it is; None changes nothing.
    """
    predicate = to_predicate(only)
    classes = {
        type(value)
        for path, value in iterate.iter_graph(node)
        if kind_of(value) == OBJECT and _view_parameters(type(value)) and predicate(path, value)
    }
    lines = []
    for cls in sorted(classes, key=lambda cls: cls.__qualname__):
        lines.append(f"{cls.__qualname__}:")
        told = _arguments_of(inspect.getdoc(cls.set_view) or "")
        for name, parameter in _view_parameters(cls).items():
            lines += [f"  {parameter}", *(f"    {line}" for line in told.get(name, ()))]
    return "\n".join(lines)


def _view_options(cls: type, attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the attributes that the method `set_view` of a class takes."""
    parameters = _view_parameters(cls)
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: x for name, x in attributes.items() if takes_all or name in parameters}


def _view_parameters(cls: type) -> dict[str, inspect.Parameter]:
    """Returns the parameters of the method `set_view` of a class; none without one."""
    method = getattr(cls, "set_view", None)
    if method is None:
        return {}
    parameters = list(inspect.signature(method).parameters.items())
    return dict(parameters[1:])


def _arguments_of(doc: str) -> dict[str, list[str]]:
    """Returns the lines about each argument of a docstring with Google sections."""
    found: dict[str, list[str]] = {}
    first = None
    for line in doc.partition("Args:\n")[2].splitlines():
        indent = len(line) - len(line.lstrip())
        if not indent:
            break
        first = first or indent
        if indent == first:
            name, _, text = line.partition(":")
            found[name.strip()] = [text.strip()]
        elif found:
            found[next(reversed(found))].append(line.strip())
    return found

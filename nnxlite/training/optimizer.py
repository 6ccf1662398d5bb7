"""Optimizers: a gradient transformation of Optax together with its state, as an object.

The transformation sees *pure* States, whose leaves are arrays: the parameters, their gradients and
its own state. Between calls its state is kept as Variables, so that filters and transforms
treat it like any other: `OptVariable` for what belongs to one parameter, with the metadata of that
parameter, and `OptArray` for the rest, such as a step count.
"""

from collections.abc import Callable, Mapping
from typing import Any, Generic, Protocol, TypeVar

import jax
import jax.numpy as jnp

from nnxlite._core.clone import pure
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.filters import Filter
from nnxlite._core.graphdef import ARRAY_LEAF
from nnxlite._core.merge import update
from nnxlite._core.module import Pytree
from nnxlite._core.placement import place
from nnxlite._core.split import state
from nnxlite._core.state import State
from nnxlite._core.statedef import StateDef
from nnxlite._core.trace import check_writable, current_level
from nnxlite._core.values import normalized
from nnxlite._core.variable import OptArray, OptState, OptVariable, Param, Variable

M = TypeVar("M")

_MISSING: Any = object()


class GradientTransformation(Protocol):
    """What an optimizer is made of: the `init` and `update` of any transformation of Optax."""

    init: Callable[..., Any]
    update: Callable[..., tuple[Any, Any]]


class Optimizer(Pytree, Generic[M]):
    """Updates the parameters of a model by a gradient transformation of Optax.

    Args:
      model: The object whose parameters are to be trained. It is not kept: each update is given it.
      tx: The transformation, such as `optax.adam(1e-3)`. Making an equal one anew does not retrace.
      wrt: A filter for the parameters. The gradients must have been taken with the same.
      graph: Ignored; there is only one mode.

    Attributes:
      step: How many updates were made: an `OptState`, `uint32`.
      opt_state: The state of `tx`, in its own containers; where these had a tree of parameters
        there is a State of `OptVariable`, where an array, an `OptArray`.

    Example:
      >>> import optax
      >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
      >>> optimizer = nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param)
      >>> before = model.bias[...]
      >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
      >>> updates = optimizer.update(model, grads)
      >>> (model.bias[...] - before).tolist(), int(optimizer.step[...])
      ([-0.5], 1)
    """

    def __init__(
        self,
        model: M,
        tx: GradientTransformation,
        *,
        wrt: Filter = Param,
        graph: bool | None = None,
    ) -> None:
        self.step = OptState(jnp.zeros((), jnp.uint32))
        self.tx = tx
        self.wrt = wrt
        params = state(model, wrt)
        self.opt_state = to_opt_state(tx.init(_as_arrays(params)), params)

    def update(self, model: M, grads: Any = _MISSING, **kwargs: Any) -> State:
        """Changes the parameters of `model` and the state of the optimizer, in place.

        Args:
          model: The object that the optimizer was made for, or one of the same structure.
          grads: Its gradients: a State, as `nnx.grad` gives it, or an object like `model`.
          **kwargs: For transformations that take more, such as `value`, `grad` and `value_fn` of
            a line search. Variables in them are replaced by their values.

        Returns:
          What was added to the parameters: a State of arrays.

        Raises:
          StructureError: A parameter has no gradient, or one of another shape. Nothing is changed.
          TraceLevelError: Model or optimizer belong to another trace level. Nothing is changed.
        """
        if grads is _MISSING:
            raise TypeError(
                "Optimizer.update takes the model and its gradients: update(model, grads). "
                "nnx.ModelAndOptimizer keeps the model, and takes the gradients alone."
            )
        params = state(model, self.wrt)
        param_arrays = _as_arrays(params)
        cells, treedef = jax.tree.flatten(self.opt_state, is_leaf=_is_cell)
        for cell in (self.step, *cells):
            check_writable(cell, "update the optimizer")
        updates, new_state = self.tx.update(
            _gradients(grads, params),
            jax.tree.unflatten(treedef, [_as_arrays(cell) for cell in cells]),
            param_arrays,
            **pure(kwargs),
        )
        new_params = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), param_arrays, updates)
        new_cells = _matched(treedef, cells, new_state)
        update(model, new_params)
        for cell, value in zip(cells, new_cells, strict=True):
            cell._value = value
        self.step[...] += 1
        return updates


class ModelAndOptimizer(Optimizer[M]):
    """An `Optimizer` that keeps its model, so that `update` takes the gradients alone.

    Args:
      model: The object whose parameters are to be trained; the attribute `model`.
      tx: The transformation of Optax.
      wrt: A filter for the parameters.

    Example:
      >>> import optax
      >>> optimizer = nnx.ModelAndOptimizer(nnx.Linear(2, 1, rngs=nnx.Rngs(0)), optax.adam(1e-3))
      >>> grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(optimizer.model)
      >>> sorted(optimizer.update(grads))
      ['bias', 'kernel']
    """

    def __init__(self, model: M, tx: GradientTransformation, *, wrt: Filter = Param) -> None:
        super().__init__(model, tx, wrt=wrt)
        self.model = model

    def update(self, grads: Any, **kwargs: Any) -> State:  # type: ignore[override]  # that is its point
        """Changes the parameters of the model and the state of the optimizer, in place.

        Args:
          grads: The gradients of the model; see `Optimizer.update`.
          **kwargs: See `Optimizer.update`.

        Returns:
          What was added to the parameters: a State of arrays.
        """
        return super().update(self.model, grads, **kwargs)


def to_opt_state(tree: Any, params: State | None = None) -> Any:
    """Returns the state of a gradient transformation with its arrays kept as Variables.

    Args:
      tree: What `tx.init` returned.
      params: The parameters that it was given. Their metadata goes to the `OptVariable` at the same
        path; `optimizer_sharding` among it becomes the `out_sharding`.
    """
    known = dict(params.flat_state()) if params is not None else {}
    shared = {id(leaf) for param in known.values() for leaf in jax.tree.leaves(_value_of(param))}

    def own(leaf: Any) -> Any:
        # An array that is also a parameter's own could not be donated with it.
        return jnp.copy(leaf) if id(leaf) in shared else leaf

    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Variable):
            return _opt_variable(leaf._value, leaf)
        if not isinstance(leaf, State):
            return OptArray(own(leaf))
        pairs = _matching(leaf.raw_mapping, known) or list(leaf.flat_state())
        variables = [
            _opt_variable(jax.tree.map(own, _value_of(value)), known.get(path, value))
            for path, value in pairs
        ]
        statedef = StateDef.of(
            tuple(path for path, _ in pairs), tuple((OptVariable, v._meta) for v in variables)
        )
        # Kept flat, so that a jitted step reads it as one list.
        return State._make([v._value for v in variables], statedef, current_level())

    return jax.tree.map(convert, tree, is_leaf=_is_cell)


def _opt_variable(value: Any, param: Any) -> OptVariable:
    metadata = dict(param._meta.mapping) if isinstance(param, Variable) else {}
    if "optimizer_sharding" in metadata:
        metadata["out_sharding"] = metadata.pop("optimizer_sharding")
        value = place(value, metadata)
    return OptVariable.from_metadata(value, metadata)


def _matching(tree: Mapping[Any, Any], known: Mapping[Path, Any]) -> list[tuple[Path, Any]]:
    """Returns the parts of nested dicts at the known paths; nothing if one is not there."""
    pairs = []
    for path in known:
        part: Any = tree
        for key in path:
            if not isinstance(part, Mapping) or key not in part:
                return []
            part = part[key]
        pairs.append((path, part))
    return pairs


def _gradients(grads: Any, params: State) -> State:
    """Returns the gradients of exactly these parameters, as a State of arrays."""
    found = grads if isinstance(grads, Mapping) else state(grads)
    tree = found.raw_mapping if isinstance(found, State) else found
    pairs = dict(params.flat_state())
    values = []
    for path, param in pairs.items():
        match = _matching(tree, {path: param})
        if not match:
            raise StructureError(
                f"There is no gradient for {format_path(path)}. Take the gradients with the filter "
                "of the optimizer, as in nnx.grad(loss, argnums=nnx.DiffState(0, wrt))."
            )
        value = _value_of(match[0][1])
        expected = getattr(_value_of(param), "shape", None)
        if getattr(value, "shape", None) != expected:
            raise StructureError(
                f"The gradient for {format_path(path)} has shape {getattr(value, 'shape', None)}, "
                f"expected {expected}."
            )
        values.append(value)
    return _state_of_arrays(tuple(pairs), values)


def _as_arrays(cell: Any) -> Any:
    """Returns the value of a Variable, or the State of the values of a State."""
    if isinstance(cell, State):
        return _state_of_arrays(cell._meta.paths, cell._value)
    return _value_of(cell)


def _state_of_arrays(paths: tuple[Path, ...], values: list[Any]) -> State:
    return State._make(values, StateDef.of(paths, (ARRAY_LEAF,) * len(paths)), current_level())


def _matched(treedef: Any, cells: list[Any], new_state: Any) -> list[Any]:
    """Returns the new value of each cell: an array, or the list of a State's values."""
    values = []
    for cell, new in zip(cells, treedef.flatten_up_to(new_state), strict=True):
        if isinstance(cell, State):
            pairs = _matching(new.raw_mapping, dict.fromkeys(cell._meta.paths))
            new = [value for _, value in pairs]
            assert len(new) == len(cell._meta.paths), "the transformation changed its structure"
        values.append(normalized(new))
    return values


def _value_of(leaf: Any) -> Any:
    return leaf._value if isinstance(leaf, Variable) else leaf


def _is_cell(value: Any) -> bool:
    return isinstance(value, State | Variable)

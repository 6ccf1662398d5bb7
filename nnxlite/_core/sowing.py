"""sow and perturb: what a module says to the captures that run; outside of captures, nothing.

`sow` hands a value to the captures that asked for its kind; without one it does nothing and costs
nothing. `perturb` is the identity, unless a capture gives it a perturbation to add: the gradient of
that is the gradient of the value. Nothing is stored on the model, except in the mode of
`use_stored_sow`, which older programs need.
"""

import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nnxlite._core import scope
from nnxlite._core.context import current, entered
from nnxlite._core.errors import StructureError
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.recording import Recorder, recorders
from nnxlite._core.records import (
    Reduce,
    append,
    append_output,
    only,
    only_output,
    same,
    shapes_of,
)
from nnxlite._core.trace import opaque_nodes
from nnxlite._core.variable import Intermediate, Perturbation, Variable
from nnxlite._core.variable_names import variable_type_from_name

SOW_VARIABLE = "NNXLITE_SOW"
_ARRAYS = (jax.Array, np.ndarray, np.generic, int, float, complex)


def sow(
    owner: Any,
    kind: type[Variable] | str,
    name: str,
    value: Any,
    reduce_fn: Reduce | None = None,
    init_fn: Callable[[], Any] | None = None,
) -> bool:
    """Hands a value of `owner` to the captures of its kind; see `Module.sow`."""
    kind = _kind(kind)
    reduce, init = reduce_fn or append, init_fn or tuple
    taken = False
    for recorder in recorders():
        if recorder.wants(kind):
            recorder.check_level(
                lambda: f"sow({kind.__name__}, {name!r}) in {recorder.describe(owner)}"  # noqa: B023
            )
            given = _values(value)
            if recorder.inner:
                _check_arrays(recorder, owner, name, given)
            recorder.add(owner, kind, _checked(name, "sow"), given, reduce, init)
            taken = True
    if taken:
        return True
    if sow_stores():
        _store(owner, kind, _checked(name, "sow"), _values(value), reduce, init)
        return True
    DROPPED.note(type(owner), kind)
    return False


def perturb(owner: Any, name: str, value: Any, kind: type[Variable] | str = Perturbation) -> Any:
    """Returns `value`, plus the perturbation that a capture gives it; see `Module.perturb`."""
    for recorder in recorders():
        kind = _kind(kind)
        wanted = recorder.wanted
        if not (wanted.has_init or wanted.each or recorder.wants(kind)):
            continue
        recorder.check_level(lambda: f"perturb({name!r}) in {recorder.describe(owner)}")  # noqa: B023
        if recorder.condition:  # a boolean has no gradient
            continue
        value = _values(value)
        if wanted.each:
            value = _perturb_each(recorder, owner, _checked(name, "perturb"), value)
        else:
            value = _perturb(recorder, owner, _checked(name, "perturb"), value, kind)
    return value


def _perturb(recorder: Recorder, owner: Any, name: str, value: Any, kind: type[Variable]) -> Any:
    recorder.meet(owner, name)
    if recorder.learning:
        return value
    named = recorder.init.get(recorder.label(owner), {})
    added = named.get(name)
    if name in named:
        _check_shapes(recorder, owner, name, added, value)
        value = jax.tree.map(jnp.add, value, added)
    elif recorder.wants(kind):
        added = jax.tree.map(jnp.zeros_like, value)
    else:
        found = ", ".join(map(repr, named)) or "nothing"
        raise StructureError(
            f"{recorder.describe(owner)} perturbs {name!r}, which init lacks; it has {found} for "
            "this object. A perturbation of zero would hide the gradient: capture "
            f"{kind.__name__} anew with the same inputs and pass that State as init, or ask for "
            f"{kind.__name__} in this capture too, which makes zeros."
        )
    if recorder.wants(kind):
        recorder.add(owner, kind, name, added, same, lambda: None)
    return value


def _perturb_each(
    recorder: Recorder, owner: Any, name: str, value: Any, reduce: Reduce = only
) -> Any:
    """Perturbs and records a value under a name of its own, if there is a float in it."""
    if not any(map(_is_float, jax.tree.leaves(value))):
        return value
    name = recorder.meet(owner, name)
    if recorder.learning:
        return value
    if recorder.wanted.has_init:
        named = recorder.init.get(recorder.label(owner), {})
        if name not in named:  # learned where a plain transform stood in between
            return value
        value = jax.tree.map(
            lambda added, x: x if added is None else x + added,
            named[name],
            value,
            is_leaf=lambda added: added is None,
        )
    recorder.add(owner, Intermediate, name, value, reduce, lambda: None)
    return value


def zeros_for(value: Any) -> Any:
    """Returns a perturbation for `value`: zeros for floats, None for what has no gradient."""
    return jax.tree.map(
        lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(x)) if _is_float(x) else None, value
    )


def _is_float(value: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(value), jnp.inexact)


def _check_shapes(recorder: Recorder, owner: Any, name: str, added: Any, value: Any) -> None:
    found, given = shapes_of(value), shapes_of(added)
    if found != given:
        raise ValueError(
            f"{recorder.describe(owner)} perturbs {name!r} of shape and dtype {found}, but init "
            f"has {given}. Capture the perturbations with inputs of the same shapes."
        )


def _kind(kind: type[Variable] | str) -> type[Variable]:
    if isinstance(kind, str):
        return variable_type_from_name(kind, allow_register=True)
    return kind


def _checked(name: Any, verb: str) -> str:
    if not isinstance(name, str):
        raise TypeError(f"{verb} expected a name (str), found {name!r} of {type(name).__name__}.")
    return name


def _check_arrays(recorder: Recorder, owner: Any, name: str, value: Any) -> None:
    """Raises for what cannot leave a transform."""
    for leaf in jax.tree.leaves(value):
        if not isinstance(leaf, _ARRAYS):
            raise TypeError(
                f"{recorder.describe(owner)} sows {name!r} inside a transform, and there is a "
                f"{type(leaf).__name__} in it. Only arrays and numbers can leave a transform: sow "
                "those alone."
            )


def _values(tree: Any) -> Any:
    """Returns a tree with the values of its Variables in their place, as they are now."""
    if isinstance(tree, jax.Array):
        return tree
    return jax.tree.map(
        lambda x: x.get_value() if isinstance(x, Variable) else x,
        tree,
        is_leaf=lambda x: isinstance(x, Variable),
    )


def record_output(owner: Any, method: str, output: Any) -> Any:
    """Records the output of a method; returns it, perturbed if a capture wants that."""
    if kind_of(owner) != OBJECT or not _is_recordable(output):
        return output
    for recorder in recorders():
        wanted = recorder.wanted
        if wanted.outputs is None:
            continue
        chosen: Any = wanted.filter
        if chosen is not None and not chosen((*recorder.path_of(owner), method), owner):
            continue
        if not recorder.takes_outputs:
            recorder.leave_out(f"{recorder.describe(owner)}.{method}")
        elif wanted.each:
            output = _perturb_each(recorder, owner, method, output, only_output)
        else:
            recorder.add(owner, wanted.outputs, method, output, append_output, tuple)
    return output


def _is_recordable(output: Any) -> bool:
    """Tells whether there are arrays or numbers in an output, and nothing else."""
    with opaque_nodes():
        leaves = jax.tree.leaves(output)
    return bool(leaves) and all(isinstance(x, _ARRAYS) for x in leaves)


def sow_here(name: str, value: Any, *, kind: type[Variable] | str = Intermediate) -> bool:
    """Hands a value to the captures that run, under the module whose method is running.

    For functions that have no module at hand. Returns whether a capture took it.

    Args:
      name: The name below that module.
      value: Any pytree of arrays.
      kind: The kind of Variable, or its registered name.

    Raises:
      StructureError: A capture runs, but no method of a module does.

    Example:
      >>> def squared(x):
      ...     nnx.sow("squares", x**2)
      ...     return x
      >>> class Net(nnx.Module):
      ...     def __call__(self, x):
      ...         return squared(x)
      >>> _, found = nnx.capture(Net(), nnx.Intermediate)(jnp.arange(3.0))
      >>> found["squares"][...][0]
      Array([0., 1., 4.], dtype=float32)
    """
    owner = scope.running_receiver()
    if kind_of(owner) == OBJECT:
        return sow(owner, kind, name, value)
    if not sow_stores() and not any(r.wants(_kind(kind)) for r in recorders()):
        return False
    raise StructureError(
        f"nnx.sow({name!r}) is called outside of every method of a Module, so there is no object "
        "to record under. Call it inside one, or use module.sow."
    )


# The storing mode.


def sow_stores() -> bool:
    """Tells whether `sow` without a capture stores on the module, as older programs expect."""
    return (current().sow or _DEFAULT_SOW) == "store"


def default_sow(environ: Mapping[str, str]) -> str:
    """Returns what `sow` does at the start, from the variable `NNXLITE_SOW`.

    Raises:
      ValueError: The variable holds something else than `capture` or `store`.

    Example:
      >>> default_sow({"NNXLITE_SOW": "store"}), default_sow({})
      ('store', 'capture')
    """
    text = environ.get(SOW_VARIABLE, "").strip().lower() or "capture"
    if text not in ("capture", "store"):
        raise ValueError(
            f"The environment variable {SOW_VARIABLE} is {environ[SOW_VARIABLE]!r}. Set it to "
            "'capture' (sown values go to nnx.capture only, the default) or 'store' (without a "
            "capture they are stored on the module, to be read with nnx.pop)."
        )
    return text


_DEFAULT_SOW = default_sow(os.environ)


class use_stored_sow:  # read as a verb: `with nnx.use_stored_sow():`
    """Lets `sow` without a capture store on the module, inside the block.

    Older flax programs sow outside of captures and read with `pop(model, nnx.Intermediate)`. The
    environment variable `NNXLITE_SOW=store` does the same for a whole process.

    Args:
      store: False lets `sow` hand values to captures only, in a process that stores.

    Example:
      >>> class Net(nnx.Module):
      ...     def __call__(self, x):
      ...         self.sow(nnx.Intermediate, "x", x)
      >>> net = Net()
      >>> with nnx.use_stored_sow():
      ...     net(jnp.ones(2))
      >>> list(nnx.pop(net, nnx.Intermediate))
      ['x']
    """

    def __init__(self, store: bool = True) -> None:
        self._mode = "store" if store else "capture"
        self._stack: list[ExitStack] = []

    def __enter__(self) -> None:
        stack = ExitStack()
        stack.enter_context(entered(current().but(sow=self._mode)))
        self._stack.append(stack)

    def __exit__(self, *error: Any) -> None:
        self._stack.pop().close()


def _store(
    owner: Any,
    kind: type[Variable],
    name: str,
    value: Any,
    reduce: Reduce,
    init: Callable[[], Any],
) -> None:
    held = getattr(owner, name, None)
    if held is not None and not isinstance(held, kind):
        raise StructureError(
            f"{type(owner).__name__} sows {name!r}, which is an attribute of type "
            f"{type(held).__name__} already. Sow under another name."
        )
    if held is None:
        setattr(owner, name, kind(reduce(init(), value)))
    else:
        held.set_value(reduce(held.get_value(), value))


class _Dropped:
    """What was sown in vain, by class; the first `pop` that finds none of it warns."""

    def __init__(self) -> None:
        # Per class the kinds, and whether it has been said.
        self.kinds: weakref.WeakKeyDictionary[type, dict[type[Variable], bool]] = (
            weakref.WeakKeyDictionary()
        )

    def note(self, cls: type, kind: type[Variable]) -> None:
        if kind not in self.kinds.get(cls, ()):
            self.kinds.setdefault(cls, {})[kind] = False

    def warn(self, classes: Iterable[type], filters: Iterable[Any]) -> None:
        """Warns if one of the classes sowed a kind that a filter asks for; once for both."""
        wanted = [f for f in filters if isinstance(f, type)]
        for cls in classes:
            kinds = self.kinds.get(cls, {})
            for kind, said in kinds.items():
                if not said and any(issubclass(kind, each) for each in wanted):
                    kinds[kind] = True
                    warnings.warn(
                        f"nnx.pop found no {kind.__name__}, but {cls.__name__} sowed some while no "
                        f"capture ran, so they were dropped. Use nnx.capture(model, "
                        f"nnx.{kind.__name__})(inputs), which returns them, or let sow store them "
                        f"on the module: with nnx.use_stored_sow(), or {SOW_VARIABLE}=store in the "
                        "environment.",
                        stacklevel=3,
                    )
                    return


DROPPED = _Dropped()

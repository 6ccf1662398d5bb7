"""capture: running a function, and collecting what modules sow and perturb inside.

A capture walks the *root*, the object that its function starts from, gives a `Recorder` the paths
of all objects in it, lets that travel while the function runs (see `recording.py`), and makes one
State of each kind from the records. Paths are those at the end; what is no part of the root goes
under its class name.
"""

import functools
import re
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from types import FunctionType
from typing import Any

from nnxlite._core import scope
from nnxlite._core.context import current, entered
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.extras import travelling
from nnxlite._core.filters import Everything, Filter, to_predicate
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.metadata import EMPTY
from nnxlite._core.owners import object_paths
from nnxlite._core.recording import Recorder
from nnxlite._core.records import Label, Stranger, Wanted
from nnxlite._core.sowing import record_output
from nnxlite._core.state import State
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Variable


def capture(
    fn: Any = None,
    /,
    *kinds: type[Variable],
    init: Mapping[Any, Any] | None = None,
    method_outputs: type[Variable] | None = None,
    method_filter: Filter = ...,
) -> Callable[..., Any]:
    """Returns a function that runs `fn` and collects what is sown and perturbed inside.

    It works through every transform of this library, inside and outside; nothing is stored on the
    model. Values recorded under `vmap` and `scan` have the mapped axis in front. Records have the
    paths of their modules in the root: the Module, the object of the method, or the first
    argument. A module that is no part of it records under its class name.

    Args:
      fn: A Module, a bound method, or a function whose first argument holds the modules. Without
        one (`@nnx.capture(nnx.Intermediate)`), a decorator is returned.
      *kinds: The kinds of Variables to collect, each with its subclasses. Perturbations come only
        if `nnx.Perturbation` is among them: they are no values of the model.
      init: Perturbations to add, as captured before; their gradients are those of the values.
      method_outputs: A kind, under which the output of every public method is recorded too, if it
        consists of arrays.
      method_filter: Chooses methods. A predicate gets the path of the method in the captured
        State, such as `("layers", 0, "__call__")`, and the module.

    Returns:
      A function that returns `(result, state, ...)`, one State per kind; the result alone without
      kinds. `method_outputs` counts as the last kind unless it is one of them.

    Raises:
      StructureError: There is no module to collect from, or `init` lacks a perturbation.
      TraceLevelError: A plain JAX transform stands between the capture and a module that sows.

    Example:
      >>> class Net(nnx.Module):
      ...     def __call__(self, x):
      ...         self.sow(nnx.Intermediate, "squares", x**2)
      ...         return x.sum()
      >>> total, found = nnx.capture(Net(), nnx.Intermediate)(jnp.arange(3.0))
      >>> found["squares"][...][0]
      Array([0., 1., 4.], dtype=float32)
    """
    if _is_kind(fn):
        fn, kinds = None, (fn, *kinds)
    for kind in (*kinds, *(() if method_outputs is None else (method_outputs,))):
        if not _is_kind(kind):
            raise TypeError(
                "nnx.capture expected kinds of Variables, such as nnx.Intermediate, found "
                f"{kind!r}."
            )
    chosen = None if method_filter is True else to_predicate(method_filter)
    if chosen == Everything():
        chosen = None
    if chosen is not None and method_outputs is None:
        raise TypeError(
            "nnx.capture got method_filter without method_outputs. Name the kind under which the "
            "outputs are recorded: method_outputs=nnx.Intermediate."
        )
    if method_outputs is not None and method_outputs not in kinds:
        kinds = (*kinds, method_outputs)
    wanted = Wanted(kinds, init is not None, method_outputs, chosen)
    if fn is None:
        return functools.partial(_captured, wanted=wanted, init=init)
    return _captured(fn, wanted, init)


def _is_kind(value: Any) -> bool:
    return isinstance(value, type) and issubclass(value, Variable)


def _captured(fn: Any, wanted: Wanted, init: Any) -> Callable[..., Any]:
    if not callable(fn):
        raise TypeError(
            f"nnx.capture expected a Module that can be called, a method or a function, found "
            f"{type(fn).__name__}."
        )
    # The attributes of a function go along, not those of a callable module.
    updated = functools.WRAPPER_UPDATES if isinstance(fn, FunctionType) else ()

    @functools.wraps(fn, updated=updated)
    def captured(*args: Any, **kwargs: Any) -> Any:
        root = root_of(fn, args, kwargs)
        recorder = recorder_for(root, wanted)
        _take_init(recorder, init)
        result = record(recorder, fn, args, kwargs)
        warn_of_skipped(recorder.skipped)
        _check_strangers(recorder)
        states = _states(recorder, root)
        return (result, *states) if states else result

    return captured


def recorder_for(
    root: Any, wanted: Wanted, init: Mapping[Label, Mapping[str, Any]] | None = None
) -> Recorder:
    """Returns a recorder that knows the objects of `root` by their paths."""
    recorder = Recorder(wanted, init)
    for path, owner in object_paths(root):
        recorder.know(owner, path)
    return recorder


def record(recorder: Recorder, fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a function while a recorder takes what is sown and perturbed inside."""
    before = current()
    with ExitStack() as stack:
        stack.enter_context(entered(before.but(captured=(*before.captured, recorder.wanted))))
        stack.enter_context(travelling(recorder))
        if recorder.wanted.outputs is not None:
            stack.enter_context(scope.recording_outputs(record_output))
        return fn(*args, **kwargs)


def warn_of_skipped(outputs: Mapping[str, str]) -> None:
    """Warns, on the line of the captured call, of outputs that could not be handed out.

    Args:
      outputs: Methods, and why theirs is left out.
    """
    reasons: dict[str, list[str]] = {}
    for output, why in outputs.items():
        reasons.setdefault(why, []).append(output)
    if reasons:
        texts = [
            f"The outputs of {', '.join(named)} are not recorded: {why}"
            for why, named in reasons.items()
        ]
        warnings.warn(" ".join(texts), stacklevel=3)


def root_of(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns what paths start from: the object that `fn` belongs to, or its first argument.

    Raises:
      StructureError: There is no object in it.
    """
    own = _own_root(fn)
    if own is not None:
        return own
    found = args[0] if args else next(iter(kwargs.values()), None)
    if kind_of(found) != OBJECT and not object_paths(found):
        what = f"a {type(found).__name__}" if args or kwargs else "no argument"
        raise StructureError(
            f"nnx.capture({getattr(fn, '__name__', type(fn).__name__)}) found no module in the "
            f"first argument, which is {what}. Expected a Module, a bound method of one, or a "
            "function whose first argument holds the modules."
        )
    return found


def _own_root(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        first = next((arg for arg in fn.args if kind_of(arg) == OBJECT), None)
        if first is not None and kind_of(fn.func) != OBJECT:
            return first
        fn = fn.func
    while isinstance(fn, FunctionType):  # a captured one, or otherwise decorated
        wrapped = getattr(fn, "__wrapped__", None)
        if wrapped is None:
            return None
        fn = wrapped
    owner = fn.__self__ if isinstance(fn, types.MethodType) else getattr(fn, "__self__", fn)
    return owner if kind_of(owner) == OBJECT else None


_STRANGER = re.compile(r"(\w+?)(?:#(\d+))?")


def _take_init(recorder: Recorder, init: Any) -> None:
    """Sorts initial perturbations by the objects that they are for."""
    if init is None:
        return
    known = {label for _, label in recorder.owners.values()}
    state = init if isinstance(init, State) else State(init)
    for path, leaf in state.flat_state():
        *holder, name = path
        label: Label = tuple(holder)
        if label not in known:
            stranger = _STRANGER.fullmatch(str(holder[-1])) if holder else None
            if stranger is None or (len(holder) > 1 and type(holder[0]) is not int):
                raise _no_object(path)
            label = Stranger(stranger[1], int(stranger[2] or 0))
        value = leaf.get_value() if isinstance(leaf, Variable) else leaf
        recorder.init.setdefault(label, {})[str(name)] = value


def _check_strangers(recorder: Recorder) -> None:
    """Raises for initial perturbations of objects that neither were there nor came."""
    for label, named in recorder.init.items():
        if type(label) is Stranger and label not in recorder.met:
            raise _no_object((stranger_name(label), next(iter(named))))


def _no_object(path: Path) -> StructureError:
    return StructureError(
        f"init has {format_path(path, 'init')}, but there is no object at "
        f"{format_path(path[:-1])}. Pass the State of perturbations that nnx.capture returned for "
        "this model."
    )


def stranger_name(label: Stranger) -> str:
    """Returns the key under which a stranger records: `Head`, `Head#1`, ..."""
    return label.class_name + (f"#{label.number}" if label.number else "")


def final_paths(recorder: Recorder, root: Any) -> dict[Label, Path]:
    """Returns the path of each label at the end: where its object is then, if it is there."""
    now = {id(owner): path for path, owner in object_paths(root)}
    found: dict[Label, Path] = {}
    for owner, label in recorder.owners.values():
        if id(owner) in now:
            found[label] = now[id(owner)]
    below = _below(root, found)
    keys = {path[len(below)] for path in found.values() if len(path) > len(below)}
    taken = set(found.values())
    for label in recorder.records:
        if label in found:
            continue
        if type(label) is tuple and label not in taken:
            found[label] = label  # it was taken out of the root
            continue
        stranger = label if type(label) is Stranger else recorder.as_stranger(label)
        name = stranger_name(stranger)
        found[label] = (*below, f"{name}#0" if name in keys else name)
    return found


def _below(root: Any, paths: Mapping[Label, Path]) -> Path:
    """Returns what paths of strangers start with: keys of one level are all str or all int."""
    if isinstance(root, list | tuple):
        return (len(root),)
    first = [path[0] for path in paths.values() if path and type(path[0]) is int]
    return (1 + max(first),) if first else ()


def _states(recorder: Recorder, root: Any) -> list[State]:
    """Makes a State of each kind from the records."""
    paths = final_paths(recorder, root)
    level = current_level()
    flat: dict[type[Variable], dict[Path, Any]] = {kind: {} for kind in recorder.wanted.kinds}
    for label, records in recorder.records.items():
        for key, kept in records.items():
            variable = kept.kind._make(kept.start, EMPTY, level)
            flat[key.place][(*paths[label], key.name)] = variable
    return [State.from_flat_path(flat[kind]) for kind in recorder.wanted.kinds]

"""capture, sow and perturb: collecting what happens inside a model.

`sow` hands a value to the captures that run and asked for its kind; without one it does nothing and
costs nothing. `perturb` is the identity, unless a capture gives it a perturbation to add: its
gradient is then the gradient of the value. Nothing is stored on the model.
"""

import functools
import os
import threading
import types
import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from typing import Any

import jax
import jax.numpy as jnp

from nnxlite._core import graph, scope
from nnxlite._core.context import current, entered
from nnxlite._core.errors import Path, StructureError, format_path
from nnxlite._core.extras import travelling
from nnxlite._core.filters import Filter, to_predicate
from nnxlite._core.graph import OBJECT, flatten, kind_of
from nnxlite._core.metadata import EMPTY
from nnxlite._core.recording import Key, Recorder, Stranger, Wanted, append, recorders, same
from nnxlite._core.state import State
from nnxlite._core.trace import current_level
from nnxlite._core.variable import Intermediate, Perturbation, Variable
from nnxlite._core.variable_names import variable_type_from_name

SOW_VARIABLE = "NNXLITE_SOW"


def sow(
    owner: Any,
    kind: type[Variable] | str,
    name: str,
    value: Any,
    reduce_fn: Callable[[Any, Any], Any] | None = None,
    init_fn: Callable[[], Any] | None = None,
) -> bool:
    """Hands a value of `owner` to the captures of its kind; see `Module.sow`."""
    kind = _kind(kind)
    taken = False
    for recorder in recorders():
        if recorder.wants(kind):
            recorder.check_level(lambda: f"sow({kind.__name__}, {name!r}) in {_name(owner)}")
            recorder.add(
                owner, Key(kind, name), value, reduce_fn or append, init_fn or (lambda: ())
            )
            taken = True
    if not taken and sow_stores():
        _store(owner, kind, name, value, reduce_fn or append, init_fn or (lambda: ()))
        return True
    if not taken:
        _DROPPED.kinds.add((type(owner), kind))
    return taken


def perturb(
    owner: Any, name: str, value: Any, kind: type[Variable] | str = Perturbation
) -> Any:
    """Returns `value`, plus the perturbation that a capture gives it; see `Module.perturb`."""
    kind = _kind(kind)
    for recorder in recorders():
        if recorder.wanted.has_init or recorder.wants(kind):
            recorder.check_level(lambda: f"perturb({name!r}) in {_name(owner)}")
            value = _perturb(recorder, owner, name, value, kind)
    return value


def _perturb(
    recorder: Recorder, owner: Any, name: Hashable, value: Any, kind: type[Variable]
) -> Any:
    wanted = recorder.wanted
    if wanted.each_perturbed:
        name = recorder.free_name(owner, name)
        if recorder.wants(Intermediate):
            recorder.add(owner, Key(Intermediate, name), value, _only, lambda: None)
    recorder.met[id(owner), name] = owner
    if recorder.learning:
        return value
    init = recorder.init.get(id(owner), (None, {}))[1]
    if name in init:
        added = init[name]
        _check_shapes(owner, name, added, value)
        if recorder.wants(kind):
            recorder.add(owner, Key(kind, name), added, same, lambda: None)
        return jax.tree.map(jnp.add, value, added)
    if recorder.wants(kind):
        zeros = jax.tree.map(jnp.zeros_like, value)
        recorder.add(owner, Key(kind, name), zeros, same, lambda: None)
    elif wanted.has_init:
        found = ", ".join(repr(n) for n in init) or "none"
        raise StructureError(
            f"{_name(owner)} perturbs {name!r}, which is missing from init; that has for this "
            f"object: {found}. A perturbation of zero would hide its gradient: capture "
            f"{kind.__name__} once more with the same inputs, and pass that State as init."
        )
    return value


def _only(_: Any, value: Any) -> Any:
    return value


def _check_shapes(owner: Any, name: Hashable, added: Any, value: Any) -> None:
    shapes = [jax.tree.map(jnp.shape, tree) for tree in (added, value)]
    if shapes[0] != shapes[1]:
        raise ValueError(
            f"{_name(owner)} perturbs {name!r} of shape {shapes[1]}, but init has {shapes[0]}. "
            "Capture the perturbations with inputs of the same shapes."
        )


def _kind(kind: type[Variable] | str) -> type[Variable]:
    if isinstance(kind, str):
        return variable_type_from_name(kind, allow_register=True)
    return kind


def _name(owner: Any) -> str:
    return owner.class_name if isinstance(owner, Stranger) else type(owner).__name__


def sow_stores() -> bool:
    """Tells whether `sow` without a capture stores on the module, as older programs expect."""
    return (current().sow or _DEFAULT_SOW) == "store"


def _default_sow(environ: Mapping[str, str]) -> str:
    text = environ.get(SOW_VARIABLE, "").strip().lower() or "capture"
    if text not in ("capture", "store"):
        raise ValueError(
            f"The environment variable {SOW_VARIABLE} is {environ[SOW_VARIABLE]!r}. Set it to "
            "'capture' (sown values go to nnx.capture only, the default) or 'store' (without a "
            "capture they are stored on the module, to be read with nnx.pop)."
        )
    return text


_DEFAULT_SOW = _default_sow(os.environ)


class use_stored_sow:
    """Lets `sow` without a capture store on the module, inside the block.

    Older flax programs sow outside of captures and read with `pop(model, nnx.Intermediate)`. The
    environment variable `NNXLITE_SOW=store` does the same for a whole process.

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
    reduce: Callable[[Any, Any], Any],
    init: Callable[[], Any],
) -> None:
    held = getattr(owner, name, None)
    if held is not None and not isinstance(held, kind):
        raise StructureError(
            f"{_name(owner)} sows {name!r}, which is an attribute of type {type(held).__name__} "
            "already. Sow under another name."
        )
    if held is None:
        setattr(owner, name, kind(reduce(init(), value)))
    else:
        held.set_value(reduce(held.get_value(), value))


class _Dropped(threading.local):
    def __init__(self) -> None:
        self.kinds: set[tuple[type, type[Variable]]] = set()
        self.warned = False


_DROPPED = _Dropped()


def warn_of_dropped(node: Any, kinds: tuple[Any, ...]) -> None:
    """Warns once if `pop` found nothing of a kind that a class in `node` has sown in vain."""
    if _DROPPED.warned or not _DROPPED.kinds:
        return
    classes = {type(x) for x in flatten((node,)).nodes}
    for cls, kind in _DROPPED.kinds:
        if cls in classes and any(isinstance(k, type) and issubclass(kind, k) for k in kinds):
            _DROPPED.warned = True
            warnings.warn(
                f"{cls.__name__} sowed {kind.__name__} values while no capture ran, so nothing was "
                "kept. Use nnx.capture(model, nnx." + kind.__name__ + ")(inputs), or set "
                f"{SOW_VARIABLE}=store (nnx.use_stored_sow) to store them on the module.",
                stacklevel=4,
            )
            return


def capture(
    fn: Any,
    /,
    *kinds: type[Variable],
    init: Mapping[Any, Any] | None = None,
    method_outputs: Any = None,
) -> Callable[..., Any]:
    """Returns a function that runs `fn` and collects what is sown and perturbed inside.

    It works through every transform of this library, inside and outside; nothing is stored on the
    model. Values recorded under `vmap` and `scan` have the mapped axis in front.

    Args:
      fn: A Module, a bound method, or a function whose first argument holds the modules. With only
        kinds (`@nnx.capture(nnx.Intermediate)`), a decorator is returned.
      *kinds: The kinds of Variables to collect.
      init: Perturbations to add, as captured before; their gradients are those of the values.
      method_outputs: A kind, under which the output of every public method is recorded too; or a
        pair of a kind and a filter of (path of the method, module).

    Returns:
      A function that returns `(result, state, ...)`, one State per kind; the result alone without
      kinds.

    Raises:
      StructureError: `fn` has no module to collect from, or `init` lacks a perturbation.
      TraceLevelError: A plain JAX transform stands between the capture and the module.

    Example:
      >>> class Net(nnx.Module):
      ...     def __call__(self, x):
      ...         self.sow(nnx.Intermediate, "squares", x**2)
      ...         return x.sum()
      >>> total, found = nnx.capture(Net(), nnx.Intermediate)(jnp.arange(3.0))
      >>> found["squares"][...][0]
      Array([0., 1., 4.], dtype=float32)
    """
    if isinstance(fn, type) and issubclass(fn, Variable):
        return functools.partial(
            _decorate, kinds=(fn, *kinds), init=init, method_outputs=method_outputs
        )
    return _decorate(fn, kinds=kinds, init=init, method_outputs=method_outputs)


def _decorate(
    fn: Any,
    *,
    kinds: tuple[type[Variable], ...],
    init: Any,
    method_outputs: Any,
    each_perturbed: bool = False,
) -> Callable[..., Any]:
    outputs, chosen = _outputs_wanted(method_outputs)
    all_kinds = kinds if outputs is None or outputs in kinds else (*kinds, outputs)
    wanted = Wanted(all_kinds, init is not None, outputs, chosen, each_perturbed)
    own_root = _own_root(fn)

    @functools.wraps(fn)
    def captured(*args: Any, **kwargs: Any) -> Any:
        root = own_root if own_root is not None else _root(fn, args, kwargs)
        recorder = Recorder(wanted, _init_by_object(root, init))
        before = current()
        with ExitStack() as stack:
            stack.enter_context(entered(before.but(captured=(*before.captured, wanted))))
            stack.enter_context(travelling(recorder))
            if outputs is not None:
                stack.enter_context(scope.recording_outputs(record_output))
            result = fn(*args, **kwargs)
        if recorder.skipped:
            warnings.warn(
                "method_outputs left out "
                + ", ".join(recorder.skipped)
                + ": a plain JAX transform stands between the capture and them. Use nnxlite's.",
                stacklevel=2,
            )
        states = _states(recorder, root, all_kinds)
        return (result, *states) if states else result

    return captured


def _outputs_wanted(given: Any) -> tuple[type[Variable] | None, Hashable]:
    if given is None or isinstance(given, type):
        return given, None
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], type):
        return given[0], to_predicate(given[1])
    raise TypeError(
        f"method_outputs expected a kind of Variable, or a pair of a kind and a filter, found "
        f"{given!r}."
    )


def _own_root(fn: Any) -> Any:
    while isinstance(fn, functools.partial):
        if kind_of(fn.func) == graph.STATIC and any(kind_of(a) == OBJECT for a in fn.args):
            return next(a for a in fn.args if kind_of(a) == OBJECT)
        fn = fn.func
    if isinstance(fn, types.MethodType) and kind_of(fn.__self__) == OBJECT:
        return fn.__self__
    if kind_of(fn) == OBJECT:
        return fn
    owner = getattr(fn, "__self__", None)  # such as a jitted method
    return owner if kind_of(owner) == OBJECT else None


def _root(fn: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    found = args[0] if args else next(iter(kwargs.values()), None)
    nodes = flatten((found,)).nodes if args or kwargs else []
    if not any(kind_of(node) == OBJECT for node in nodes):
        raise StructureError(
            f"nnx.capture({getattr(fn, '__name__', fn)!s}) found no module: expected a Module, a "
            "bound method of one, or a function whose first argument holds modules; that is a "
            f"{type(found).__name__} here."
        )
    return found


def _object_paths(root: Any) -> dict[int, Path]:
    """Returns the path of each object below the root, by identity."""
    flat = flatten((root,))
    found: dict[int, Path] = {}
    stack: list[tuple[Path, Any]] = [((), flat.graphdef.skeleton.roots[0])]
    while stack:
        path, (_, how, payload) = stack.pop()
        slots: Any = ()
        if how == graph.FILL_VALUE:
            slots = payload[1]
        elif how in (graph.FILL_NODE, graph.FILL_METHOD):
            number = payload if how == graph.FILL_NODE else payload[0]
            if id(flat.nodes[number]) not in found:
                found[id(flat.nodes[number])] = path
                slots = flat.graphdef.skeleton.records[number].slots
        stack.extend(((*path, graph.thaw_key(slot[0])), slot) for slot in reversed(slots))
    return found


def _init_by_object(root: Any, init: Any) -> dict[int, tuple[Any, dict[Hashable, Any]]]:
    if init is None:
        return {}
    flat = flatten((root,))
    by_path = {path: number for number, path in _object_paths(root).items()}
    owners = {id(node): node for node in flat.nodes}
    found: dict[int, tuple[Any, dict[Hashable, Any]]] = {}
    state = init if isinstance(init, State) else State(init)
    for path, leaf in state.flat_state():
        number = by_path.get(path[:-1])
        if number is None:
            raise StructureError(
                f"init has {format_path(path, 'init')}, but there is no object at "
                f"{format_path(path[:-1])}. Pass the State that nnx.capture returned for this model."
            )
        value = leaf._value if isinstance(leaf, Variable) else leaf
        found.setdefault(number, (owners[number], {}))[1][path[-1]] = value
    return found


def _states(recorder: Recorder, root: Any, kinds: tuple[type[Variable], ...]) -> list[State]:
    paths = _object_paths(root)
    level = current_level()
    flat: dict[type[Variable], dict[Path, Any]] = {kind: {} for kind in kinds}
    strangers: dict[str, int] = {}
    for number, (owner, records) in recorder.records.items():
        path = paths.get(number)
        if path is None:
            name = _name(owner)
            count = strangers[name] = strangers.get(name, -1) + 1
            path = (name if not count else f"{name}#{count}",)
        for key, record in records.items():
            kind = recorder.wanted.place_of(key.kind)
            assert kind is not None
            flat[kind][(*path, key.name)] = key.kind._make(record.value, EMPTY, level)
    return [State.from_flat_path(flat[kind]) for kind in kinds]


def record_output(owner: Any, method: str, output: Any) -> Any:
    """Records the output of a method; returns it, perturbed if the capture wants that."""
    leaves = jax.tree.leaves(output)
    if not leaves or not all(isinstance(x, jax.Array | int | float | complex) for x in leaves):
        return output
    for recorder in recorders():
        wanted = recorder.wanted
        if wanted.outputs is None:
            continue
        if wanted.filter is not None and not wanted.filter((method,), owner):  # type: ignore[operator]
            continue
        if recorder.level != current_level():
            recorder.skipped[f"{_name(owner)}.{method}"] = None
            continue
        if wanted.each_perturbed:
            output = _perturb(recorder, owner, method, output, Perturbation)
        else:
            recorder.add(owner, Key(wanted.outputs, method), output, append, tuple)
    return output


def sow_here(name: str, value: Any, *, kind: type[Variable] | str = Intermediate) -> bool:
    """Hands a value to the captures that run, under the module whose method is running.

    For functions that have no module at hand. Returns whether a capture took it.

    Raises:
      StructureError: No method of a module is running.

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
    if owner is None:
        raise StructureError(
            f"nnx.sow({name!r}) is called outside of every method of a Module, so there is no "
            "object to record under. Call it inside one, or use module.sow."
        )
    return sow(owner, kind, name, value)

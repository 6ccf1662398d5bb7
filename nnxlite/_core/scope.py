"""Names for profiles: while JAX traces a method, its operations carry the module's name.

`wrap_methods` wraps the public methods of a class once. A wrapped method notes that its receiver
is running (the innermost `Frame` of its thread) and, under a trace, pushes a `jax.named_scope`:
the path of the receiver from the object that was running, or its class name if it is not below
that one. Outside of a trace nothing is pushed, as no operation would keep it. Names are metadata:
the compiled code is the same with and without them.

Transforms that keep traced functions cross with `enter_transform` and `inside_transform`. What is
on and off, and how caches notice, stands in `context.py`; how names are spelled, in `names.py`.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import FunctionType
from typing import Any, TypeAlias, TypeVar, overload

import jax
from jax.extend.core import get_opaque_trace_state

from nnxlite._core.context import current
from nnxlite._core.names import Descendants, clean_levels, root_name, spell
from nnxlite._core.trace import EAGER

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

_RUNS_LATER = (
    inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ITERABLE_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
)


Frame: TypeAlias = tuple[Any, str, "Frame | None", dict[int, Descendants] | None]
"""One running method call of this thread, a plain tuple as a class costs 0.2 us more per call.

Its fields: the receiver, the method's name, the frame of the call it runs in, and the searches
made in this trace (from the `id` of each object that ran). The last is None for a call outside of
traces, whose name nobody has pushed.
"""


class _Running(threading.local):
    frame: Frame | None = None
    around: Any = None  # whose method calls the transform that runs, if any

    def __reduce__(self) -> str:  # for cloudpickle, which takes wrapped methods apart
        return "RUNNING"


RUNNING = _Running()


class _Outputs(threading.local):
    """Where outputs of methods go while a capture records them.

    Attributes:
      record: `record(receiver, method, output)`, which returns the output to use; or None.
      running: The calls under way whose output will be recorded: the outermost counts.
    """

    record: Callable[[Any, str, Any], Any] | None = None

    def __init__(self) -> None:
        self.running: set[tuple[int, str]] = set()

    def __reduce__(self) -> str:  # as for `RUNNING`
        return "OUTPUTS"

    def starts(self, receiver: Any, method: str) -> bool:
        return (id(receiver), method) not in self.running

    def recorded(
        self,
        call: Callable[..., Any],
        method: str,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        key = (id(args[0]), method)
        self.running.add(key)
        try:
            output = call(*args, **kwargs)
        finally:
            self.running.discard(key)
        return output if self.record is None else self.record(args[0], method, output)


OUTPUTS = _Outputs()


@contextmanager
def recording_outputs(record: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """Gives the output of every method that is named to `record`, inside the block."""
    before = OUTPUTS.record
    OUTPUTS.record = record
    try:
        yield
    finally:
        OUTPUTS.record = before


def running_receiver() -> Any:
    """Returns the object whose method runs in this thread, the innermost; None outside of all."""
    frame = RUNNING.frame
    return RUNNING.around if frame is None else frame[0]


def wrap_methods(cls: type) -> None:
    """Wraps the methods of `cls` that name what they stage, in place.

    These are the public ones, `__call__`, and those labelled with `named_call`, as far as they are
    plain functions: defined in `cls` itself, or inherited from a base that is no object class (a
    mixin) and then bound anew on `cls`. Left alone are annotated fields (a dataclass field's
    default function is the user's value), generator and async functions, what `nowrap` marks, and
    everything that is not a plain function: properties, static and class methods, C callables,
    transforms. Wrapping twice does nothing.
    """
    fields = _annotated(cls)
    for name, value in list(vars(cls).items()):
        if name not in fields:
            scoped = scoped_method(name, value)
            if scoped is not value:
                setattr(cls, name, scoped)
    for base in cls.__mro__[1:]:
        if base is not object and not getattr(base, "__nnx_node__", False):
            _bind_mixin(cls, base, fields)


def _annotated(cls: type) -> set[str]:
    return {name for base in cls.__mro__ for name in _annotations(base)}


if sys.version_info >= (3, 14):  # annotations are evaluated when they are asked for
    import annotationlib

    def _annotations(cls: type) -> dict[str, Any]:
        return annotationlib.get_annotations(cls, format=annotationlib.Format.FORWARDREF)

else:

    def _annotations(cls: type) -> dict[str, Any]:
        return vars(cls).get("__annotations__", {})


def _bind_mixin(cls: type, mixin: type, fields: set[str]) -> None:
    for name, value in list(vars(mixin).items()):
        owner = next(base for base in cls.__mro__ if name in vars(base))
        if owner is not mixin or name in fields or not _qualifies(name, value):
            continue
        if value.__code__ == _LABELLED_CODE or getattr(value, "__isabstractmethod__", False):
            continue  # the one labels itself, the other has to be overridden
        setattr(cls, name, scoped_method(name, _passed_on(cls, name, value)))


def _passed_on(cls: type, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    # `super`, so that a subclass may still put another mixin before `function` in its order.
    @functools.wraps(function)
    def inherited(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return getattr(super(cls, self), name)(*args, **kwargs)

    inherited.__module__ = cls.__module__  # where pickle finds it
    inherited.__qualname__ = f"{cls.__qualname__}.{name}"
    return inherited


def scoped_method(name: str, value: Any) -> Any:
    """Returns `value`, the attribute `name` of a class, wrapped if it is a method to be named.

    A transform that is used as a method calls this for the function inside it, in `__set_name__`.
    """
    if isinstance(value, functools.partialmethod):
        if not isinstance(value.func, FunctionType):
            return value
        function = scoped_method(value.func.__name__, value.func)
        return functools.partialmethod(function, *value.args, **value.keywords)
    if not _qualifies(name, value):
        return value
    if value.__code__ == _LABELLED_CODE:
        return _scoped(value.__wrapped__, name, *value.__nnx_named_call__)
    return _scoped(value, name, None, False)


def _qualifies(name: str, value: Any) -> bool:
    if type(value) is not FunctionType or value.__code__ == _SCOPED_CODE:
        return False
    if getattr(value, "__nnx_nowrap__", False) or value.__code__.co_flags & _RUNS_LATER:
        return False
    return name == "__call__" or not name.startswith("_") or value.__code__ == _LABELLED_CODE


def _scoped(function: F, name: str, label: str | None, force: bool) -> F:
    @functools.wraps(function)
    def method(*args: Any, **kwargs: Any) -> Any:
        if OUTPUTS.record is not None and args and OUTPUTS.starts(args[0], name):
            return OUTPUTS.recorded(method, name, args, kwargs)
        outer = RUNNING.frame
        scope = _enter(outer, args[0] if args else None, name, label, force)
        try:
            if not scope:
                return function(*args, **kwargs)
            with jax.named_scope(scope):
                return function(*args, **kwargs)
        finally:
            RUNNING.frame = outer

    return method  # pyright: ignore[reportReturnType]  # `wraps` keeps the signature


# `functools.wraps` copies attributes to the wrappers of others: only the code tells which are
# ours. It is compared by value, as cloudpickle makes it anew.
_SCOPED_CODE = _scoped(lambda self: None, "", None, False).__code__


def _enter(outer: Frame | None, receiver: Any, method: str, label: str | None, force: bool) -> str:
    """Starts a call inside `outer` and returns the name to push, empty for none."""
    ambient = current()
    if not (ambient.scopes or force):
        if ambient.captured or ambient.sow:  # `nnx.sow` asks whose method runs, without names too
            RUNNING.frame = (receiver, method, outer, None)
        return ""
    if outer is None or outer[3] is None:  # in a traced call, the trace is known to run still
        if get_opaque_trace_state(convention="nnxlite") == EAGER:
            RUNNING.frame = (receiver, method, outer, None)
            return ""
        searches: dict[int, Descendants] = {}
    elif outer[0] is receiver and outer[1] == method:  # super(), or recursion
        return ""
    else:
        searches = outer[3]
    scope = label or _name(receiver, method, outer, searches)
    RUNNING.frame = (receiver, method, outer, searches)
    return scope


def _name(receiver: Any, method: str, outer: Frame | None, searches: dict[int, Descendants]) -> str:
    if outer is None:
        return root_name(receiver, method)
    running, its_method, before, pushed = outer
    if running is receiver:
        name = "" if method == its_method else spell("", method)
    else:
        search = searches.get(id(running))
        if search is None:
            search = searches[id(running)] = Descendants(running)
        name = search.name_of(receiver, method)
        if name is None:
            return root_name(receiver, method)
    if pushed is not None:
        return name
    # The calls around this trace pushed nothing: their names come first.
    prefix = _name(running, its_method, before, searches)
    return f"{prefix}/{name}" if name else prefix


def nowrap(target: T) -> T:
    """Marks a method, or all methods that a class defines, as not to be named.

    What runs in it belongs to the method that called it, in profiles and in recorded method
    outputs. Use it for small helpers. A subclass that defines such a method again is not bound.

    Args:
      target: A function in a class body, or a class.

    Raises:
      TypeError: `target` is something else. A transform names its function itself: put `nowrap`
        below it. Properties, static and class methods are not named anyway.

    Example:
      >>> class Net(nnx.Module):
      ...     @nowrap
      ...     def halve(self, x):
      ...         return x / 2
      ...
      ...     def __call__(self, x):
      ...         return self.halve(x)
      >>> text = jax.jit(lambda x: Net()(x)).lower(1.0).as_text(debug_info=True)
      >>> "/Net/div" in text, "/halve" in text
      (True, False)
    """
    if isinstance(target, type):
        for name, value in list(vars(target).items()):
            if type(value) is FunctionType and value.__code__ == _SCOPED_CODE:
                setattr(target, name, nowrap(value))
        return target
    if type(target) is not FunctionType:
        raise TypeError(
            f"nowrap got a {type(target).__name__}, not a function or a class. Put it directly "
            "above `def`; what is not a plain function is not named anyway."
        )
    function: Any = target
    if function.__code__ == _SCOPED_CODE:
        function = function.__wrapped__
    function.__nnx_nowrap__ = True
    return function


@overload
def named_call(fn: F, *, name: str | None = None, force: bool = True) -> F: ...
@overload
def named_call(*, name: str | None = None, force: bool = True) -> Callable[[F], F]: ...
def named_call(
    fn: Callable[..., Any] | None = None, *, name: str | None = None, force: bool = True
) -> Any:
    """Returns `fn` with all that it stages named in profiles; also a decorator.

    In a class body it labels a method, private ones too: `name` then stands in place of path and
    method name.

    Args:
      fn: Any callable; without it, a decorator is returned.
      name: The name, `fn.__name__` by default (of the function inside a partial, of the class of a
        callable object). Slashes separate levels.
      force: True labels even where names are switched off; False follows the switch.

    Raises:
      TypeError: `fn` is a generator or async function: its body runs after the call returned.

    Example:
      >>> @named_call(name="loss")
      ... def squared_error(x, y):
      ...     return (x - y) ** 2
      >>> text = jax.jit(squared_error).lower(1.0, 2.0).as_text(debug_info=True)
      >>> "/loss/sub" in text
      True
    """
    if fn is None:
        return functools.partial(named_call, name=name, force=force)
    return _labelled(fn, name, force)


def _labelled(fn: Callable[..., Any], name: str | None, force: bool) -> Callable[..., Any]:
    label = clean_levels(name or _function_name(fn))
    if getattr(getattr(fn, "__code__", None), "co_flags", 0) & _RUNS_LATER:
        raise TypeError(
            f"named_call got {label!r}, a generator or async function: its body runs after the "
            "call has returned, when the name is gone. Label the functions that it calls."
        )

    # The attributes of a function go along, not those of a callable module.
    updated = functools.WRAPPER_UPDATES if isinstance(fn, FunctionType) else ()

    @functools.wraps(fn, updated=updated)
    def labelled(*args: Any, **kwargs: Any) -> Any:
        if not (force or current().scopes):
            return fn(*args, **kwargs)
        with jax.named_scope(label):
            return fn(*args, **kwargs)

    in_class = clean_levels(name) if name else None  # else it is named as other methods are
    labelled.__nnx_named_call__ = in_class, force  # pyright: ignore[reportAttributeAccessIssue]
    return labelled


def _function_name(fn: Any) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__name__", None) or type(fn).__name__


_LABELLED_CODE = _labelled(len, "", False).__code__


_AT_TOP: AbstractContextManager[bool] = nullcontext(False)


def enter_transform(receiver: Any, method: str | None = None) -> AbstractContextManager[bool]:
    """Returns the context in which a transform calls its cached function; it yields `nested`.

    A name pushed inside a cached function stays that of the first caller, and one pushed around a
    function called outside of every trace leaves no mark in it. So there are two cases, and the
    value of the context, `nested`, tells which:

    - False: called outside of every trace (or names are off, or there is no receiver). Nothing
      is pushed around the call; inside, the receiver is named by its class.
    - True: called while another trace runs. The receiver's name is pushed around the call, which
      JAX then puts before all names inside; inside, the receiver's own call pushes nothing.

    The traced function has to differ between the two, so `nested` belongs in the key of whatever
    keeps it, beside `signature()`. The function itself crosses with `inside_transform`:

        with scope.enter_transform(receiver, method) as nested:
            pure = kept_function(graphdef, treedef, roles, nested, signature())
            out = pure(leaves)

        def pure(leaves):
            ...  # rebuild clones; `clone` is that of the receiver
            with scope.inside_transform(clone if nested else None, method):
                return fn(...)

    Args:
      receiver: `self` of a transformed method, else the first object among the arguments, None
        without any.
      method: The name of the transformed method (`scoped_method` has wrapped it in the same way);
        None for a function that takes the receiver as an argument.
    """
    if receiver is None or not current().scopes:
        return _AT_TOP
    if get_opaque_trace_state(convention="nnxlite") == EAGER:
        return _AT_TOP
    return _around(receiver, method or "__call__")


@contextmanager
def _around(receiver: Any, method: str) -> Iterator[bool]:
    outer = RUNNING.frame
    searches = outer[3] if outer is not None else None
    name = _name(receiver, method, outer, {} if searches is None else searches)
    with jax.named_scope(name) if name else nullcontext():
        yield True


@contextmanager
def inside_transform(receiver: Any, method: str | None = None) -> Iterator[None]:
    """Starts the chain of running calls anew inside a function that a transform traces.

    Args:
      receiver: The clone of the receiver if `enter_transform` said that the call is nested: it is
        taken as running already, so its own call of `method` pushes nothing. Else None.
      method: As for `enter_transform`.
    """
    outer, around = RUNNING.frame, RUNNING.around
    RUNNING.around = running_receiver()
    RUNNING.frame = None if receiver is None else (receiver, method or "__call__", None, {})
    try:
        yield
    finally:
        RUNNING.frame, RUNNING.around = outer, around

"""jit: `jax.jit` over objects, at about its price.

Each structure of the arguments has one inner `jax.jit` over a flat list of arrays (`compiled.py`),
kept by the `Lift`. A call on known objects costs: flattening the arguments with objects opaque,
comparing versions, reading the values, the inner call, and writing back what changed.

What was traced is kept by the function, not by what `jit` returns: `nnx.jit(f)` made anew, for the
same function and options, goes on with the traces there are.
"""

import functools
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from nnxlite._core import scope
from nnxlite._core.context import BY_THREAD, signature
from nnxlite._core.function_keys import JITTED
from nnxlite._core.modes import mode_flags
from nnxlite._core.trace import EAGER, Level, current_level
from nnxlite._transforms.arguments import (
    Bound,
    Chosen,
    Fixed,
    Statics,
    by_position,
    names,
    numbers,
    parameters,
    resolve,
)
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.compiled import Inner, Options
from nnxlite._transforms.lift import LiftedFunction, first_object
from nnxlite._transforms.packing import Out
from nnxlite._transforms.stages import CacheInfo, Staged

MAX_KEPT = 64
_ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


@mode_flags(
    "It returns only what changed in any case; settings and attributes that the function changes "
    "stay changed."
)
def jit(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    in_shardings: Any = None,
    out_shardings: Any = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Iterable[str] | None = None,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Iterable[str] | None = None,
    keep_unused: bool = False,
    inline: bool = False,
    compiler_options: dict[str, Any] | None = None,
    device: None = None,
    backend: None = None,
) -> Any:
    """Compiles a function of objects; what it changes is changed on the caller's objects.

    Works on functions, methods, partials, bound methods and callable Modules (whose own state is
    threaded too), directly or as a decorator. Equal structures share one trace.

    Args:
      fn: The function; without it, a decorator is returned.
      in_shardings: A prefix of the positional arguments of shardings, or None. For an object: one
        sharding for all its leaves, a `StateSharding`, or a State of shardings.
      out_shardings: The same for the result.
      static_argnums: Positions of arguments that are compile-time constants; they are compared
        by value with their types.
      static_argnames: Names of such arguments. Giving one by position or by name is the same.
      donate_argnums: Positions of arguments whose buffers may be reused for results. Objects
        get new arrays; other arguments are gone after the call.
      donate_argnames: Names of such arguments.
      keep_unused: As for `jax.jit`.
      inline: As for `jax.jit`.
      compiler_options: As for `jax.jit`.
      device: None: `jax.jit` has it still, but it is deprecated there.
      backend: None, as `device`.

    Raises:
      TypeError: `device` or `backend` is given.
      TraceLevelError: At a call that changed an object of another trace level.
      DonatedBufferError: At a call that donates one buffer twice, or failed after donating.
      StaticValueError: A static argument or attribute cannot be keyed.

    Example:
      >>> @nnx.jit
      ... def count(model, x):
      ...     model.calls[...] += 1
      ...     return model(x)
      >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
      >>> model.calls = nnx.Variable(0)
      >>> count(model, jnp.ones((1, 2))).shape, int(model.calls[...])
      ((1, 3), 1)
    """
    if device is not None or backend is not None:
        raise TypeError(
            "nnx.jit has no device and no backend; in jax.jit they are deprecated. Place the "
            "arguments with jax.device_put, or give in_shardings and out_shardings."
        )
    options = Options(
        in_shardings,
        out_shardings,
        numbers(static_argnums),
        names(static_argnames),
        numbers(donate_argnums),
        names(donate_argnames),
        keep_unused,
        inline,
        compiler_options,
    )
    if fn is None:
        return functools.partial(_jit, options=options)
    return _jit(fn, options)


def _jit(fn: Callable[..., Any], options: Options) -> Any:
    if not callable(fn):
        raise TypeError(f"nnx.jit expected a function, found {type(fn).__name__}.")
    function, args, kwargs = resolve(fn)
    if args or kwargs:
        options = options.shifted(len(args))
        jitted = _shared(function, ("jit", options.key()), lambda: JitFunction(function, options))
        return BoundJit(jitted, *args, **kwargs)
    jitted = JitFunction(function, options)
    if type(function) is types.FunctionType:
        # Only the lift: in a class body each name makes a method of its own.
        make = lambda: (jitted._lift, options)  # noqa: E731  # the key is that of these options
        jitted._lift = _shared(function, ("lift", options.key()), make)[0]
    return jitted


class _Kept(OrderedDict[Any, Any]):
    """What was made of one function, kept on the function itself, so that it dies with it."""

    def __init__(self, owner: Any = None) -> None:
        self.owner = id(owner)  # `functools.wraps` copies attributes to other functions

    def __reduce__(self) -> Any:
        return _Kept, ()  # a function that is pickled by value takes none along


_LOCK = threading.Lock()


def _shared(function: Callable[..., Any], key: Any, make: Callable[[], Any]) -> Any:
    """Returns what was made of the function under this key, so that it is made once."""
    holder: Any = function.function if isinstance(function, Fixed) else function
    if isinstance(holder, type) or not hasattr(holder, "__dict__"):
        return make()
    key = (function, *key)
    with _LOCK:
        kept = vars(holder).get(JITTED)
        if kept is None or kept.owner != id(holder):
            kept = vars(holder)[JITTED] = _Kept(holder)
        found = kept.get(key)
        if found is None:
            found = kept[key] = make()
        kept.move_to_end(key)
        while len(kept) > MAX_KEPT:
            kept.popitem(last=False)
        return found


class JitFunction(LiftedFunction):
    """A jitted function of objects; made by `nnx.jit`."""

    def __init__(self, fn: Callable[..., Any], options: Options) -> None:
        super().__init__(fn, "nnx.jit")
        self._options = options
        self._lift.traces.lasting = True
        known = parameters(fn)
        title = self._lift.title
        self._known = known
        self._static = Chosen(known, options.static_argnums, options.static_argnames, title)
        self._donated = Chosen(known, options.donate_argnums, options.donate_argnames, title)
        self._has_statics = bool(self._static)
        self._static.check(fn, "static_argnums or static_argnames")
        self._donated.check(fn, "donate_argnums or donate_argnames")
        if both := self._static.names & self._donated.names:
            raise ValueError(f"{title}: {', '.join(sorted(both))} cannot be static and donated.")

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else BoundJit(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        level = current_level()
        if level is EAGER:
            if not kwargs and not self._has_statics:
                known = self._lift.bound_as_before(args)
                if known is not None:
                    return self._run(known, args, level)
            binding, leaves = self._bind(args, kwargs, False)
            return self._run(binding, leaves, level)
        # Under another trace the name of the receiver goes around the inner call.
        with scope.enter_transform(first_object(args, kwargs), self._lift.method) as nested:
            binding, leaves = self._bind(args, kwargs, nested)
            return self._run(binding, leaves, level)

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], nested: bool
    ) -> tuple[Binding, list[Any]]:
        statics = None
        if self._has_statics:
            args, kwargs = by_position(args, kwargs, self._known)
            args, kwargs, statics = Statics.take(args, kwargs, self._static)
        return self._lift.bind(args, kwargs, statics, nested)

    def _run(self, binding: Binding, leaves: Sequence[Any], level: Level) -> Any:
        inner = self._inner(binding, leaves)
        return self._run_with(inner.compiled, binding, inner, leaves, level)

    def _run_with(
        self,
        compiled: Callable[..., Out],
        binding: Binding,
        inner: Inner,
        leaves: Sequence[Any],
        level: Level,
    ) -> Any:
        operands = inner.operands(binding, leaves)
        try:
            if inner.gives:
                out = inner.donation.call(compiled, binding, operands)
            else:
                out = compiled(*operands)
        except TypeError as error:
            self._check_arguments(binding, leaves, error)
            raise
        return binding.deliver(out, level)

    def _check_arguments(self, binding: Binding, leaves: Sequence[Any], error: TypeError) -> None:
        """Raises an error in the caller's terms if JAX refused an argument."""
        crossing = binding.crossing
        found = [(crossing.place(n), leaves[n]) for n in crossing.rest]
        values = binding.plan.gather()
        found += [
            (binding.leaf_path(n), x)
            for n, value in enumerate(values)
            for x in jax.tree.leaves(value)
        ]
        for place, leaf in found:
            if not isinstance(leaf, _ARRAY_LIKE) and not hasattr(leaf, "__jax_array__"):
                raise TypeError(
                    f"{self._lift.title}: {place} is a {type(leaf).__name__}, which JAX cannot "
                    "trace. Pass an array or a number; name a constant in static_argnames."
                ) from error

    def _inner(self, binding: Binding, leaves: Sequence[Any]) -> Inner:
        if BY_THREAD:
            signature()
        crossing = binding.crossing
        inner = crossing.kept.get("jit")
        if inner is None:
            name = getattr(self, "__name__", type(self._lift.fn).__name__)
            inner = Inner(binding, leaves, self._options, self._donated, name)
            crossing.kept["jit"] = inner
        return inner

    def lower(self, *args: Any, **kwargs: Any) -> Staged:
        """Lowers for these arguments; arrays may be `jax.ShapeDtypeStruct`. Runs nothing."""
        return self._staged("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> Staged:
        """Traces for these arguments. Runs nothing, and changes no object."""
        return self._staged("trace", args, kwargs)

    def _staged(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Staged:
        binding, leaves = self._bind(args, kwargs, False)
        inner = self._inner(binding, leaves)
        staged = getattr(inner.compiled, stage)(*inner.operands(binding, leaves))
        return Staged(self, binding.crossing, inner, staged)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the result with `jax.ShapeDtypeStruct` in place of arrays. Changes no object."""
        binding, leaves = self._bind(args, kwargs, False)
        inner = self._inner(binding, leaves)
        out = inner.compiled.eval_shape(*inner.operands(binding, leaves))
        return binding.abstract_result(out)

    def clear_cache(self) -> None:
        """Forgets all traces and compiled code of this function."""
        self._lift.clear()

    def cache_info(self) -> CacheInfo:
        """Returns how often the function was traced, and for how many structures."""
        return CacheInfo(self._lift.traces.count, *self._lift.sizes())

    def __repr__(self) -> str:
        return f"<nnx.jit of {getattr(self._lift.fn, '__qualname__', self._lift.fn)}>"


class BoundJit(Bound):
    """A jitted function with its first arguments, such as a method of an object."""

    func: JitFunction  # type: ignore[assignment]  # narrower than that of a partial
    __doc__ = property(lambda self: self.func.__doc__)  # type: ignore[assignment]  # per object

    def lower(self, *args: Any, **kwargs: Any) -> Staged:
        """As `JitFunction.lower`."""
        return self.func.lower(*self.args, *args, **{**self.keywords, **kwargs})

    def trace(self, *args: Any, **kwargs: Any) -> Staged:
        """As `JitFunction.trace`."""
        return self.func.trace(*self.args, *args, **{**self.keywords, **kwargs})

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As `JitFunction.eval_shape`."""
        return self.func.eval_shape(*self.args, *args, **{**self.keywords, **kwargs})

    def clear_cache(self) -> None:
        """Forgets all traces and compiled code of the function."""
        self.func.clear_cache()

    def cache_info(self) -> CacheInfo:
        """As `JitFunction.cache_info`."""
        return self.func.cache_info()

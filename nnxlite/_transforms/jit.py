"""jit: `jax.jit` over objects, at about its price.

Each structure of the arguments has one inner `jax.jit` over a flat list of arrays, kept by the
`Lift`. A call on known objects costs: flattening the arguments with objects opaque, comparing
versions, reading the values, the inner call, and writing back what changed.
"""

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from nnxlite._core import scope
from nnxlite._core.context import BY_THREAD, signature
from nnxlite._core.errors import DonatedBufferError, StructureError
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
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.lift import LiftedFunction, first_object
from nnxlite._transforms.packing import Out
from nnxlite._transforms.shardings import JitShardings

MAX_KEPT = 64
_ARRAY_LIKE = (jax.Array, np.ndarray, np.generic, bool, int, float, complex)


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

    Raises:
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
    options = _Options(
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


def _jit(fn: Callable[..., Any], options: "_Options") -> Any:
    if not callable(fn):
        raise TypeError(f"nnx.jit expected a function, found {type(fn).__name__}.")
    function, args, kwargs = resolve(fn)
    if not args and not kwargs:
        return JitFunction(function, options)
    return BoundJit(_shared_jit(function, options.shifted(len(args))), *args, **kwargs)


class _Options:
    """The options of one jit."""

    def __init__(
        self,
        in_shardings: Any,
        out_shardings: Any,
        static_argnums: tuple[int, ...],
        static_argnames: tuple[str, ...],
        donate_argnums: tuple[int, ...],
        donate_argnames: tuple[str, ...],
        keep_unused: bool,
        inline: bool,
        compiler_options: dict[str, Any] | None,
    ) -> None:
        self.in_shardings, self.out_shardings = in_shardings, out_shardings
        self.static_argnums, self.static_argnames = static_argnums, static_argnames
        self.donate_argnums, self.donate_argnames = donate_argnums, donate_argnames
        self.jax = {"keep_unused": keep_unused, "inline": inline}
        if compiler_options is not None:
            self.jax["compiler_options"] = compiler_options  # type: ignore[assignment]

    def shifted(self, by: int) -> "_Options":
        """Returns the options for a function that takes `by` more arguments in front."""
        new = object.__new__(_Options)
        new.__dict__.update(self.__dict__)
        new.static_argnums = tuple(n + by if n >= 0 else n for n in self.static_argnums)
        new.donate_argnums = tuple(n + by if n >= 0 else n for n in self.donate_argnums)
        if self.in_shardings is not None and isinstance(self.in_shardings, tuple):
            new.in_shardings = (*[None] * by, *self.in_shardings)
        return new

    def key(self) -> Any:
        """Returns something hashable that tells options apart."""
        return (
            self.static_argnums,
            self.static_argnames,
            self.donate_argnums,
            self.donate_argnames,
            repr(sorted(self.jax.items())),
            _hashable(self.in_shardings),
            _hashable(self.out_shardings),
        )


def _hashable(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return id(value)  # the options that are kept keep it alive
    return value


class _Kept(OrderedDict[Any, "JitFunction"]):
    """The jitted forms of one function, kept on the function itself, so that they die with it."""

    def __reduce__(self) -> Any:
        return _Kept, ()  # a function that is pickled by value takes none along


_LOCK = threading.Lock()


def _shared_jit(function: Callable[..., Any], options: _Options) -> "JitFunction":
    """Returns one JitFunction per function and options: `nnx.jit(model.method)` is cheap then."""
    holder: Any = function.function if isinstance(function, Fixed) else function
    if isinstance(holder, type) or not hasattr(holder, "__dict__"):
        return JitFunction(function, options)
    key = (function, options.key())
    with _LOCK:
        kept = vars(holder).setdefault("__nnx_jits__", _Kept())
        found = kept.get(key)
        if found is None:
            found = kept[key] = JitFunction(function, options)
        kept.move_to_end(key)
        while len(kept) > MAX_KEPT:
            kept.popitem(last=False)
        return found


class JitFunction(LiftedFunction):
    """A jitted function of objects; made by `nnx.jit`."""

    def __init__(self, fn: Callable[..., Any], options: _Options) -> None:
        super().__init__(fn, "nnx.jit")
        self._options = options
        self._traces = 0
        known = parameters(fn)
        title = self._lift.title
        self._known = known
        self._static = Chosen(known, options.static_argnums, options.static_argnames, title)
        self._donated = Chosen(known, options.donate_argnums, options.donate_argnames, title)
        self._has_statics, self._donates = bool(self._static), bool(self._donated)
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
        inner: "_Inner",
        leaves: Sequence[Any],
        level: Level,
    ) -> Any:
        operands = inner.operands(binding, leaves)
        try:
            if self._donates:
                out = self._call_donating(compiled, binding, inner, operands)
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

    def _inner(self, binding: Binding, leaves: Sequence[Any]) -> "_Inner":
        if BY_THREAD:
            signature()
        crossing = binding.crossing
        inner = crossing.kept.get("jit")
        if inner is None:
            inner = crossing.kept["jit"] = _Inner(self, binding, leaves)
        return inner

    def _call_donating(
        self,
        compiled: Callable[..., Out],
        binding: Binding,
        inner: "_Inner",
        operands: tuple[Any, ...],
    ) -> Out:
        if len(set(map(id, operands[0]))) != len(operands[0]):  # the common mistake, found early
            inner.check_donation(binding, operands)
        try:
            return compiled(*operands)
        except Exception as error:
            lost = inner.lost(binding)
            if not lost:
                inner.check_donation(binding, operands)
            if lost:
                raise DonatedBufferError(
                    f"{self._lift.title} failed after its donated buffers were given away: "
                    f"{error}\nGone are the values of {', '.join(lost)}. Restore them from a "
                    "checkpoint, or call without donation to keep them."
                ) from error
            raise

    def lower(self, *args: Any, **kwargs: Any) -> "Staged":
        """Lowers for these arguments; arrays may be `jax.ShapeDtypeStruct`. Runs nothing."""
        return self._staged("lower", args, kwargs)

    def trace(self, *args: Any, **kwargs: Any) -> "Staged":
        """Traces for these arguments. Runs nothing, and changes no object."""
        return self._staged("trace", args, kwargs)

    def _staged(self, stage: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Staged":
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

    def cache_info(self) -> "CacheInfo":
        """Returns how often the function was traced, and for how many structures."""
        return CacheInfo(self._traces, *self._lift.sizes())

    def __repr__(self) -> str:
        return f"<nnx.jit of {getattr(self._lift.fn, '__qualname__', self._lift.fn)}>"


class CacheInfo(NamedTuple):
    """What a jitted function keeps.

    Attributes:
      traces: How often the function was traced in all.
      structures: The number of argument structures with compiled code.
      bindings: The number of argument objects it can call without a new look at their structure.
    """

    traces: int
    structures: int
    bindings: int


class _Inner:
    """One inner `jax.jit`: of a crossing, with its donation and shardings."""

    def __init__(self, function: JitFunction, binding: Binding, leaves: Sequence[Any]) -> None:
        crossing, options = binding.crossing, function._options
        self.donated, self.donated_rest = (), ()
        if function._donates:
            self.donated, self.donated_rest = _donated_leaves(crossing, function._donated)
        self.kept = tuple(
            n for n in range(len(crossing.graphdef.leaves)) if n not in set(self.donated)
        )
        self.kept_rest = tuple(n for n in crossing.rest if n not in set(self.donated_rest))
        self.all_kept = not self.donated and not self.donated_rest
        shardings = JitShardings(binding, leaves, options.in_shardings, options.out_shardings)
        arguments: dict[str, Any] = dict(options.jax)
        if not self.all_kept:
            arguments["donate_argnums"] = (0, 2)
        if options.in_shardings is not None:
            arguments["in_shardings"] = (
                [shardings.leaves.get(n) for n in self.donated] or None,
                [shardings.leaves.get(n) for n in self.kept],
                [shardings.rest.get(n) for n in self.donated_rest] or None,
                [shardings.rest.get(n) for n in self.kept_rest],
                None,
            )
        self.compiled = jax.jit(self._pure(function, crossing, shardings), **arguments)

    def operands(self, binding: Binding, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what the inner jit takes: values and arguments, donated and kept, and extras."""
        values = binding.plan.gather()
        extras = binding.extra_inputs()
        if self.all_kept:
            return (), values, (), [leaves[n] for n in self.kept_rest], extras
        return (
            [values[n] for n in self.donated],
            [values[n] for n in self.kept],
            [leaves[n] for n in self.donated_rest],
            [leaves[n] for n in self.kept_rest],
            extras,
        )

    def _pure(
        self, function: JitFunction, crossing: Crossing, shardings: JitShardings
    ) -> Callable[..., Out]:
        donated, kept, rest_order = self.donated, self.kept, (*self.donated_rest, *self.kept_rest)
        title = getattr(function, "__name__", type(function._lift.fn).__name__)

        def pure(
            donated_values: Any, kept_values: Any, donated_rest: Any, kept_rest: Any, extras: Any
        ) -> Out:
            function._traces += 1
            values: list[Any] = [None] * (len(donated) + len(kept))
            for number, value in zip(
                (*donated, *kept), (*donated_values, *kept_values), strict=True
            ):
                values[number] = value
            by_position = dict(zip(rest_order, (*donated_rest, *kept_rest), strict=True))
            out = crossing.pure(values, [by_position[n] for n in crossing.rest], extras)
            return shardings.constrain(with_all_changed(out, donated, values), values)

        pure.__name__ = pure.__qualname__ = title  # JAX names the program after it
        return pure

    def check_donation(self, binding: Binding, operands: tuple[Any, ...]) -> None:
        """Raises if one buffer would be given away twice, or given away and kept."""
        donated = [
            (n, leaf)
            for n, value in zip(self.donated, operands[0], strict=True)
            for leaf in jax.tree.leaves(value)
        ]
        ids = [id(leaf) for _, leaf in donated]
        others = set(map(id, jax.tree.leaves(operands[1:4])))
        if len(set(ids)) == len(ids) and others.isdisjoint(ids):
            return
        first: dict[int, int] = {}
        for number, leaf in donated:
            if id(leaf) in first:
                paths = binding.leaf_path(number), binding.leaf_path(first[id(leaf)])
                raise DonatedBufferError(
                    f"{' and '.join(paths)} hold the same buffer, which cannot be donated twice. "
                    "Nothing was called. Give one of them an array of its own (jnp.copy), or share "
                    "the Variable itself."
                )
            first[id(leaf)] = number
        clash = next((binding.leaf_path(n) for n, leaf in donated if id(leaf) in others), "a value")
        raise DonatedBufferError(
            f"{clash} is donated, and another argument holds the same buffer. Nothing was called. "
            "Give one of them an array of its own (jnp.copy), or donate neither."
        )

    def lost(self, binding: Binding) -> list[str]:
        """Names the donated leaves whose buffers are gone."""
        values = binding.plan.gather()
        return [
            binding.leaf_path(n)
            for n in self.donated
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(values[n]))
        ]


def _donated_leaves(crossing: Crossing, donated: Chosen) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the leaf numbers and the argument positions that are donated."""
    leaves: set[int] = set()
    rest: set[int] = set()
    for position in crossing.argument_positions(donated):
        if position in crossing.roots:
            leaves.update(crossing.root_entries(crossing.roots.index(position)))
        else:
            rest.add(position)
    return tuple(sorted(leaves)), tuple(sorted(rest))


def with_all_changed(out: Out, donated: Sequence[int], values: Sequence[Any]) -> Out:
    """Lets the donated leaves count as changed, as their buffers are gone in any case."""
    definition = out.definition
    if not donated:
        return out
    if definition.update is None:
        new = dict(zip(definition.changed, out.changed, strict=True))
        for number in donated:
            new.setdefault(number, values[number])
        changed = tuple(sorted(new))
        return Out(
            out.arrays,
            [new[n] for n in changed],
            out.extras,
            definition._replace(changed=changed),
        )
    update = definition.update
    new_values, kept, emitted = [], [], iter(out.changed)
    for number, stays in zip(update.leaves, update.kept, strict=True):
        force = stays and number in donated
        if not stays:
            new_values.append(next(emitted))
        elif force:
            new_values.append(values[number])
        kept.append(stays and not force)
    update = update._replace(kept=tuple(kept))
    return Out(out.arrays, new_values, out.extras, definition._replace(update=update))


class BoundJit(Bound):
    """A jitted function with its first arguments, such as a method of an object."""

    func: JitFunction  # type: ignore[assignment]  # narrower than that of a partial
    __doc__ = property(lambda self: self.func.__doc__)  # type: ignore[assignment]  # per object

    def lower(self, *args: Any, **kwargs: Any) -> "Staged":
        """As `JitFunction.lower`."""
        return self.func.lower(*self.args, *args, **{**self.keywords, **kwargs})

    def trace(self, *args: Any, **kwargs: Any) -> "Staged":
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


class Staged:
    """A stage of `jax.jit` (traced, lowered or compiled) whose calls take objects.

    Everything else (`as_text`, `cost_analysis`, `memory_analysis`, `jaxpr`, ...) is JAX's own.
    """

    def __init__(
        self, function: JitFunction, crossing: Crossing, inner: _Inner, stage: Any
    ) -> None:
        self._function, self._crossing, self._inner, self.stage = function, crossing, inner, stage

    def lower(self, *args: Any, **kwargs: Any) -> "Staged":
        """Lowers a traced stage."""
        return self._next(self.stage.lower(*args, **kwargs))

    def compile(self, *args: Any, **kwargs: Any) -> "Staged":
        """Compiles a lowered stage; the result can be called with objects."""
        return self._next(self.stage.compile(*args, **kwargs))

    def _next(self, stage: Any) -> "Staged":
        return Staged(self._function, self._crossing, self._inner, stage)

    def __getattr__(self, name: str) -> Any:
        if name == "stage":  # not there yet: a copy is being made
            raise AttributeError(name)
        return getattr(self.stage, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs a compiled stage.

        Raises:
          StructureError: The arguments are not of the structure that it was compiled for.
        """
        binding, leaves = self._function._bind(args, kwargs, False)
        if not self._crossing.is_like(binding.crossing):
            raise StructureError(
                f"{self._function._lift.title} was compiled for arguments of another structure: "
                f"{self._crossing.summary()}, found {binding.crossing.summary()}. Lower and "
                "compile it for these, or call the jitted function itself."
            )
        return self._function._run_with(self.stage, binding, self._inner, leaves, current_level())

"""The lift: how a function of objects crosses a JAX transform. Every transform goes this way.

On the way in, the arguments are flattened with each object as one opaque leaf, and the graph of
all those objects together gives a `GraphDef` and the values of its leaves. The *pure function*
takes values and plain arguments, builds fresh clones, runs the user's function, and packs an
`Out`: the result and whatever changed. On the way out, what changed is put into the caller's own
objects, and objects in the result that are arguments become the caller's again.

    Crossing   what a pure function depends on: GraphDef, argument tree, statics. Knows no object.
    Binding    a Crossing for certain objects of the caller, held weakly, with their plan.
    Lift       one user function with its caches of both.

What changed rides in the auxiliary data of `Out`, so it is right for whichever of JAX's cached
executables ran. Clones, not the caller's objects, are filled with tracers: a function may reach the
caller's objects by another road, and an exception must leave them as they were.
"""

import functools
import sys
import threading
import types
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Self

from nnxlite._core import scope
from nnxlite._core.extras import TRAVELLING
from nnxlite._core.graphdef import GraphDef
from nnxlite._core.kinds import OBJECT, kind_of
from nnxlite._core.plan import make_plan
from nnxlite._core.trace import (
    EAGER,
    Level,
    Opaque,
    current_level,
)
from nnxlite._transforms.arguments import Bound, Statics, paths_in_closure
from nnxlite._transforms.binding import Binding, simple_types
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.packing import opaque_flatten
from nnxlite._transforms.traces import RetraceReport, Traces, frames_below_the_caller

MAX_BINDINGS = 64
MAX_CROSSINGS = 128


class Lift:
    """One user function, ready to cross a transform, with its caches.

    Args:
      fn: The function.
      transform: The name of the transform in messages, such as `nnx.jit`.
      method: The name of the method, if `fn` is one that was decorated in a class body.
      mode: How arguments and results are flattened; `OPEN_STATES` where a State is a value.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        transform: str,
        method: str | None = None,
        mode: Any = True,
    ) -> None:
        self.fn, self.transform, self.method, self.mode = fn, transform, method, mode
        self._last: Binding | None = None
        self._bindings: OrderedDict[Any, Binding] = OrderedDict()
        self._crossings: OrderedDict[Any, Crossing] = OrderedDict()
        self._lock = threading.Lock()
        self._warned = False
        self.traces = Traces(self)

    @property
    def title(self) -> str:
        """How messages call the lifted function."""
        return f"{self.transform}({getattr(self.fn, '__name__', type(self.fn).__name__)})"

    @property
    def receiver(self) -> Any:
        """The first object among the arguments of the last call; None without any."""
        roots = () if self._last is None else self._last.roots
        found = (root for _, ref in roots if kind_of(root := ref()) == OBJECT)
        return next(found, None)

    def bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], statics: Statics | None, nested: bool
    ) -> tuple[Binding, list[Any]]:
        """Returns the binding for these arguments, and their leaves with objects opaque."""
        leaves, treedef = opaque_flatten((args, kwargs), self.mode)
        last = self._last
        if (
            last is not None
            and last.treedef == treedef
            and statics is None
            and not nested
            and not TRAVELLING.active
            and last.plain
            and last.holds_for(leaves)
        ):
            binding = last
        else:
            binding = self._find_binding(leaves, treedef, statics, nested)
        if binding.crossing.foreign and self._has_changed_outside(binding.crossing):
            binding = self._find_binding(leaves, treedef, statics, nested)
        return binding, leaves

    def bound_as_before(self, args: tuple[Any, ...]) -> Binding | None:
        """Returns the last binding if it holds for these arguments, without flattening them."""
        last = self._last
        if (
            last is None
            or last.simple is None
            or not last.plain
            or TRAVELLING.active
            or [type(arg) for arg in args] != last.simple
            or not last.holds_for_arguments(args)
        ):
            return None
        if last.crossing.foreign and self._has_changed_outside(last.crossing):
            return None
        return last

    def _has_changed_outside(self, crossing: Crossing) -> bool:
        """Forgets a crossing if its traces baked in a value that has changed since."""
        changed = [read.leaf() for read in crossing.foreign.values() if not read.is_current()]
        if not changed:
            return False
        self._forget(crossing)
        found = paths_in_closure(self.fn, [leaf for leaf in changed if leaf is not None])
        places = ", ".join(found) or "a Variable"
        self.traces.expect(f"{places}, which it closes over, has another value")
        if not self._warned:
            self._warned = True
            self._warn(places)
        return True

    def _forget(self, crossing: Crossing) -> None:
        # Not emptied: what others made of its traces, such as a branch beside it, has to go too.
        with self._lock:
            self._last = None
            for key in [key for key, x in self._crossings.items() if x is crossing]:
                del self._crossings[key]
            for key in [key for key, x in self._bindings.items() if x.crossing is crossing]:
                del self._bindings[key]

    def _warn(self, places: str) -> None:
        warnings.warn(
            f"{self.title} is traced again: it reads {places} of an object that it closes over, "
            "whose value has changed since. Pass the object as an argument: then its values are "
            "inputs, and one trace serves them all.",
            stacklevel=frames_below_the_caller(),
        )

    def _find_binding(
        self, leaves: list[Any], treedef: Any, statics: Statics | None, nested: bool
    ) -> Binding:
        roots = [leaf.node for leaf in leaves if type(leaf) is Opaque]
        context: Any = (
            None if statics is None else statics.key,
            nested,
            tuple(extra.key() for extra in TRAVELLING.active),
        )
        key = (treedef, tuple(map(id, roots)), context)
        with self._lock:
            binding = self._bindings.get(key)
            if binding is not None:
                self._bindings.move_to_end(key)
        if binding is None or not binding.holds_for(leaves):
            plan, _ = make_plan(tuple(roots))
            crossing = self._find_crossing(plan.graphdef, treedef, leaves, statics, context)
            binding = Binding(crossing, plan, roots, self)
            binding.simple = simple_types(leaves, treedef)
            with self._lock:
                self._bindings[key] = binding
                self._bindings.move_to_end(key)
                while len(self._bindings) > MAX_BINDINGS:
                    self._bindings.popitem(last=False)
        binding.plain = context == (None, False, ())
        self._last = binding
        return binding

    def _find_crossing(
        self,
        graphdef: GraphDef[Any],
        treedef: Any,
        leaves: list[Any],
        statics: Statics | None,
        context: Any,
    ) -> Crossing:
        key = (graphdef, treedef, context)
        with self._lock:
            found = self._crossings.get(key)
            if found is not None:
                self._crossings.move_to_end(key)
                return found
            roots = tuple(n for n, leaf in enumerate(leaves) if type(leaf) is Opaque)
            found = Crossing(self, graphdef, treedef, roots, statics, context[1])
            self._crossings[key] = found
            while len(self._crossings) > MAX_CROSSINGS:
                self._crossings.popitem(last=False)
            return found

    def clear(self) -> None:
        """Forgets all bindings and crossings."""
        if self._crossings:
            self.traces.expect("its cache was cleared")
        with self._lock:
            self._last = None
            self._bindings.clear()
            self._crossings.clear()

    def sizes(self) -> tuple[int, int]:
        """Returns the number of crossings and of bindings."""
        return len(self._crossings), len(self._bindings)


class LiftedFunction:
    """What the functions made by transforms have in common: a lift, and how they act as methods."""

    __qualname__: str
    __call__: Callable[..., Any]

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        self = object.__new__(cls)
        self._made_of = args, kwargs
        return self

    def __init__(self, fn: Callable[..., Any], transform: str) -> None:
        made_of = self._made_of
        # The attributes of a function are copied, as decorators do; those of a class are not.
        is_plain = type(fn) is types.FunctionType
        functools.update_wrapper(self, fn, updated=("__dict__",) if is_plain else ())
        self._made_of = made_of
        self._lift = Lift(fn, transform)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, memo: Any) -> Self:
        return self  # as for functions

    def __reduce__(self) -> Any:
        found = sys.modules.get(self.__module__)
        for name in self.__qualname__.split("."):
            found = getattr(found, name, None)
        if found is self:
            return self.__qualname__  # by reference, as functions are
        args, kwargs = self._made_of
        return functools.partial(type(self), *args, **kwargs), ()

    def __set_name__(self, owner: type, name: str) -> None:
        # A lift of its own: the one there is may serve the function under other names.
        known = self._lift
        fn = scope.scoped_method(name, known.fn)
        self._lift = Lift(fn, known.transform, name, known.mode)
        self._lift.traces.lasting = known.traces.lasting

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else Bound(self, instance)

    def explain_retrace(self) -> RetraceReport:
        """Says how often the function was traced, and why it was the last time.

        A trace is one run of the Python code to find out what it computes. Under `nnx.jit` one
        serves all calls with arguments of the same structure, static values, shapes and dtypes.
        Other transforms, outside of `nnx.jit`, may run the code at each call; those built on a
        loop of JAX run it once or twice per trace of their own. Of the last 16 traces, the report
        compares the last one with the one most like it.

        Example:
          >>> double = nnx.jit(lambda x: x + x)
          >>> _ = double(jnp.ones(2)), double(jnp.ones(3))
          >>> double.explain_retrace()
          nnx.jit(<lambda>) was traced 2 times. The last trace differs from trace 1:
            x: float32[2] -> float32[3]
        """
        return self._lift.traces.report()

    @contextmanager
    def _bound(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], statics: Statics | None = None
    ) -> Iterator[tuple[Binding, list[Any], Level]]:
        """Binds the arguments, with the name of the receiver around what follows if nested."""
        level = current_level()
        receiver = None if level is EAGER else first_object(args, kwargs)
        with scope.enter_transform(receiver, self._lift.method) as nested:
            binding, leaves = self._lift.bind(args, kwargs, statics, nested)
            yield binding, leaves, level

    def __repr__(self) -> str:
        return f"<{self._lift.title}>"


def first_object(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Returns the first object among the arguments, the receiver of scopes; None without any."""
    leaves, _ = opaque_flatten((args, kwargs))
    found = (x.node for x in leaves if type(x) is Opaque and kind_of(x.node) == OBJECT)
    return next(found, None)

"""Functions of objects with a derivative rule: what `custom_vjp` and `custom_jvp` share.

Which arguments have a derivative, how they are given, and how the function acts as a method. What
happens in a call stands in `ruled.py`.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from nnxlite._core.scope import OUTPUTS
from nnxlite._transforms.arguments import parameters, resolve
from nnxlite._transforms.axes import DiffState
from nnxlite._transforms.lift import LiftedFunction
from nnxlite._transforms.ruled import Call


class RuleFunction(LiftedFunction):
    """A function of objects with a rule for its derivative.

    Args:
      fn: The function.
      transform: The name of the transform, for messages.
      nondiff_argnums: Positions of arguments without a derivative, and `DiffState`s.
    """

    call_type: type[Call]
    setter: str  # how messages call what sets the rule

    def __init__(
        self,
        fn: Callable[..., Any],
        transform: str,
        nondiff_argnums: int | DiffState | Sequence[int | DiffState],
    ) -> None:
        function, args, kwargs = resolve(fn)
        if args or kwargs:
            raise TypeError(
                f"{transform} got a function that has arguments already, such as a bound method, "
                "and its rule would not see them. Decorate the method in its class, or give the "
                "plain function (Net.method, not net.method): the object is argument 0 of the "
                "function and of its rule."
            )
        super().__init__(function, transform)
        self._known = parameters(function)
        self._signature = _signature_of(function)
        is_one = isinstance(nondiff_argnums, int | DiffState)
        self.nondiff, self.filters = self._parse((nondiff_argnums,) if is_one else nondiff_argnums)
        self.is_named = False

    def __set_name__(self, owner: type, name: str) -> None:
        before = self._lift.fn
        super().__set_name__(owner, name)
        self.is_named = self._lift.fn is not before

    @property
    def method(self) -> str | None:
        """The name of the method that it is, if it was decorated in a class body."""
        return self._lift.method

    def __reduce__(self) -> Any:
        found = super().__reduce__()
        return found if isinstance(found, str) else (*found, self._rule())

    def _rule(self) -> dict[str, Any]:
        """Returns the attributes that hold the rule; None where there is none yet."""
        raise NotImplementedError

    def _parse(
        self, given: Sequence[int | DiffState]
    ) -> tuple[tuple[int, ...], dict[int, DiffState]]:
        found: dict[int, int | DiffState] = {}
        signature = self._signature
        kinds = {p.kind for p in signature.parameters.values()} if signature else set()
        is_open = signature is None or inspect.Parameter.VAR_POSITIONAL in kinds
        for each in given:
            number = each.argnum if isinstance(each, DiffState) else each
            place = number + len(self._known) if number < 0 else number
            if place < 0 or (place >= len(self._known) and not is_open):
                raise ValueError(
                    f"{self._lift.title}: nondiff_argnums has {number}, but the positional "
                    f"parameters are {', '.join(self._known) or 'none'}."
                )
            if place in found:
                raise ValueError(
                    f"{self._lift.title}: nondiff_argnums names argument {number} twice. Name it "
                    "once; a DiffState takes several filters as a tuple."
                )
            found[place] = each
        filters = {n: each for n, each in found.items() if isinstance(each, DiffState)}
        return tuple(sorted(found.keys() - filters)), filters

    def positional(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Returns all arguments by position, defaults too, as the rule has them."""
        if self._signature is None or (not kwargs and len(args) >= len(self._known)):
            if kwargs:
                raise TypeError(f"{self._lift.title} takes arguments by position only.")
            return args
        bound = self._signature.bind(*args, **kwargs)
        if bound.kwargs:
            raise TypeError(
                f"{self._lift.title}: {', '.join(bound.kwargs)} can only be given by keyword, but "
                "a rule has arguments by position. Make it a positional parameter."
            )
        bound.apply_defaults()
        return bound.args

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if None in self._rule().values():
            raise AttributeError(
                f"{self._lift.title} has no rule: call its {self.setter} before it is used."
            )
        args, method = self.positional(args, kwargs), self.method
        if method and self.is_named and OUTPUTS.record and OUTPUTS.starts(args[0], method):
            # Out here a capture can give the output a gradient.
            return OUTPUTS.recorded(self.run, method, args, {})
        return self.run(*args)

    def run(self, *args: Any) -> Any:
        """Calls the function, differentiable where a trace runs, and writes back what changed."""
        with self._bound(args, {}) as (binding, leaves, level):
            call = self.call_type(self, binding, leaves)
            return binding.deliver(call.run(call.inputs(binding, leaves), level), level)


def _signature_of(fn: Callable[..., Any]) -> inspect.Signature | None:
    try:
        return inspect.signature(fn)
    except (TypeError, ValueError):  # some callables of C have no signature
        return None

"""Stages of `jit`: traced, lowered and compiled functions that take objects.

A stage of JAX takes the flat operands of the inner `jax.jit`. A `Staged` around it takes what the
jitted function takes, and writes back what changed, as a call of that function does.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from nnxlite._core.errors import StructureError
from nnxlite._core.trace import Level, current_level
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.packing import Out


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


class Stageable(Protocol):
    """What a stage asks of the jitted function it was made of."""

    _lift: Any

    def _bind(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], nested: bool
    ) -> tuple[Binding, list[Any]]: ...

    def _run_with(
        self,
        compiled: Callable[..., Out],
        binding: Binding,
        inner: Any,
        leaves: Sequence[Any],
        level: Level,
    ) -> Any: ...


class Staged:
    """A stage of `jax.jit` (traced, lowered or compiled) whose calls take objects.

    Everything else (`as_text`, `cost_analysis`, `memory_analysis`, `jaxpr`, ...) is JAX's own.
    """

    def __init__(self, function: Stageable, crossing: Crossing, inner: Any, stage: Any) -> None:
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

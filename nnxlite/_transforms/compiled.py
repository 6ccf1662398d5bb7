"""The inner `jax.jit` of one crossing: what `jit` compiles, and how it is called.

It takes a flat list of arrays: donated and kept values of objects, donated and kept arguments, and
what captures hand in. `Options` are those of the user, for functions with arguments given before.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from nnxlite._core.extras import ONCE
from nnxlite._transforms.arguments import Chosen
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.donation import Donation, with_all_changed
from nnxlite._transforms.packing import Out
from nnxlite._transforms.shardings import JitShardings


class Options:
    """The options of one `jit`."""

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

    def shifted(self, by: int) -> "Options":
        """Returns the options for a function that takes `by` more arguments in front."""
        new = object.__new__(Options)
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


class Inner:
    """One inner `jax.jit`: of a crossing, with its donation and shardings.

    Args:
      binding: The arguments it is made for; it serves all bindings of the same crossing.
      leaves: The leaves of these arguments.
      options: Those of the jit.
      donated: The donated arguments.
      name: What JAX calls the program.
    """

    def __init__(
        self,
        binding: Binding,
        leaves: Sequence[Any],
        options: Options,
        donated: Chosen,
        name: str,
    ) -> None:
        crossing = binding.crossing
        self.donation = donation = Donation(crossing, donated)
        self.gives, self.rest = bool(donation), donation.kept_rest
        shardings = JitShardings(binding, leaves, options.in_shardings, options.out_shardings)
        arguments: dict[str, Any] = dict(options.jax)
        if self.gives:
            arguments["donate_argnums"] = (0, 2)
        if options.in_shardings is not None:
            arguments["in_shardings"] = (
                [shardings.leaves.get(n) for n in donation.leaves] or None,
                [shardings.leaves.get(n) for n in donation.kept],
                [shardings.rest.get(n) for n in donation.rest] or None,
                [shardings.rest.get(n) for n in donation.kept_rest],
                None,
            )
        pure = _pure(crossing, donation, shardings)
        pure.__name__ = pure.__qualname__ = name
        self.compiled = jax.jit(pure, **arguments)

    def operands(self, binding: Binding, leaves: Sequence[Any]) -> tuple[Any, ...]:
        """Returns what the inner jit takes: values and arguments, donated and kept, and extras."""
        values = binding.plan.gather()
        extras = binding.extra_inputs(ONCE)
        if not self.gives:
            return (), values, (), [leaves[n] for n in self.rest], extras
        donation = self.donation
        return (
            [values[n] for n in donation.leaves],
            [values[n] for n in donation.kept],
            [leaves[n] for n in donation.rest],
            [leaves[n] for n in donation.kept_rest],
            extras,
        )


def _pure(crossing: Crossing, donation: Donation, shardings: JitShardings) -> Callable[..., Out]:
    order, rest_order = (*donation.leaves, *donation.kept), (*donation.rest, *donation.kept_rest)

    def pure(
        donated_values: Any, kept_values: Any, donated_rest: Any, kept_rest: Any, extras: Any
    ) -> Out:
        values: list[Any] = [None] * len(order)
        for number, value in zip(order, (*donated_values, *kept_values), strict=True):
            values[number] = value
        by_position = dict(zip(rest_order, (*donated_rest, *kept_rest), strict=True))
        out = crossing.pure(values, [by_position[n] for n in crossing.rest], extras)
        return shardings.constrain(with_all_changed(out, donation.leaves, values), values)

    return pure

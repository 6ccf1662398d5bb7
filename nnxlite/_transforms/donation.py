"""Donation: which buffers a call of `jit` gives away, and what that means for objects.

JAX may use the buffers of donated arguments for results. What was donated is gone after the call,
so donated leaves of objects count as changed and get new arrays. Before and after a call that
fails, errors name the Variables concerned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax

from nnxlite._core.errors import DonatedBufferError
from nnxlite._transforms.arguments import Chosen
from nnxlite._transforms.binding import Binding
from nnxlite._transforms.crossing import Crossing
from nnxlite._transforms.packing import Out


class Donation:
    """What the calls through one crossing give away, and what they keep.

    Attributes:
      leaves: The numbers of the donated leaves of objects.
      rest: The positions of the donated plain arguments.
      kept: The numbers of the other leaves.
      kept_rest: The positions of the other arguments.
    """

    def __init__(self, crossing: Crossing, chosen: Chosen) -> None:
        self.leaves, self.rest = donated_leaves(crossing, chosen) if chosen else ((), ())
        given, given_rest = set(self.leaves), set(self.rest)
        self.kept = tuple(n for n in range(len(crossing.graphdef.leaves)) if n not in given)
        self.kept_rest = tuple(n for n in crossing.rest if n not in given_rest)

    def __bool__(self) -> bool:
        return bool(self.leaves or self.rest)

    def call(
        self, compiled: Callable[..., Out], binding: Binding, operands: tuple[Any, ...]
    ) -> Out:
        """Calls a compiled function with donated operands in front.

        Raises:
          DonatedBufferError: One buffer is given twice; or the call failed and donated values are
            gone.
        """
        if len(set(map(id, operands[0]))) != len(operands[0]):  # the common mistake, found early
            self.check(binding, operands)
        try:
            return compiled(*operands)
        except Exception as error:
            lost = self.lost(binding)
            if not lost:
                self.check(binding, operands)
                raise
            raise DonatedBufferError(
                f"{binding.lift.title} failed after its donated buffers were given away: "
                f"{error}\nGone are the values of {', '.join(lost)}. Restore them from a "
                "checkpoint, or call without donation to keep them."
            ) from error

    def check(self, binding: Binding, operands: tuple[Any, ...]) -> None:
        """Raises if one buffer would be given away twice, or given away and kept."""
        donated = [
            (n, leaf)
            for n, value in zip(self.leaves, operands[0], strict=True)
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
            for n in self.leaves
            if any(isinstance(x, jax.Array) and x.is_deleted() for x in jax.tree.leaves(values[n]))
        ]


def donated_leaves(crossing: Crossing, donated: Chosen) -> tuple[tuple[int, ...], tuple[int, ...]]:
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

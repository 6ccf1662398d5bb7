"""custom_jvp: `jax.custom_jvp` over objects."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
from jax.custom_derivatives import zero_from_primal

from nnxlite._core.trace import Level, current_level
from nnxlite._transforms.axes import DiffState
from nnxlite._transforms.derivatives import (
    Found,
    added,
    checked,
    differentiable,
    entries_of,
    expanded,
    folded,
    spread,
    state_at,
    types_of,
)
from nnxlite._transforms.packing import Out, opaque_flatten
from nnxlite._transforms.ruled import Call, Inputs, named_like
from nnxlite._transforms.rules import RuleFunction

Rule = TypeVar("Rule", bound=Callable[..., Any])


def custom_jvp(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    nondiff_argnums: int | DiffState | Sequence[int | DiffState] = (),
) -> Any:
    """Returns a function of objects whose forward-mode derivative is given by hand.

    As for `jax.custom_jvp`, `defjvp(rule)` gives it: `rule(*nondiff, primals, tangents)` returns
    the result and its tangent. The tangent of an object among the primals is a State of its float
    leaves. JAX derives reverse mode from the rule too, so its tangent has to be linear in the
    tangents it is given.

    The tangent of the result has its structure; None stands for zero. For an object in the result
    it is a State of leaves that were made or changed, an object of the same structure, or None.

    What the function or the rule changes on its arguments is changed on the caller's objects, and
    its tangent is zero, unless the object is in the result. Both should change the same: JAX runs
    the rule alone where the call is differentiated directly, and both if a transform such as `jit`
    stands in between.

    On a method the module is argument 0, of the rule too.

    Args:
      fn: The function; without it, a decorator is returned.
      nondiff_argnums: Positions of arguments without a tangent, which the rule gets first:
        functions, numbers and strings stay what they are, objects may be changed. Or
        `DiffState(position, filter)`: which leaves of that argument have a tangent; the others are
        constants.

    Raises:
      AttributeError: It is called before `defjvp`.
      StructureError: The rule gives a wrong path or structure, or it and the function differ.
      ValueError: The rule gives a wrong shape or dtype.

    Example:
      >>> @nnx.custom_jvp
      ... def wave(model, x):
      ...     return jnp.sin(model.w[...] * x)
      >>> @wave.defjvp
      ... def rule(primals, tangents):
      ...     (model, x), (dmodel, dx) = primals, tangents
      ...     slope = jnp.cos(model.w[...] * x)
      ...     return wave(model, x), slope * (dmodel["w"][...] * x + model.w[...] * dx)
      >>> class Model(nnx.Module):
      ...     def __init__(self):
      ...         self.w = nnx.Param(jnp.array(0.0))
      >>> float(nnx.grad(lambda m: wave(m, jnp.array(2.0)))(Model())["w"][...])
      2.0
    """
    make = functools.partial(CustomJvpFunction, nondiff_argnums=nondiff_argnums)
    return make if fn is None else make(fn)


class CustomJvpFunction(RuleFunction):
    """A function with a rule for its forward-mode derivative; made by `custom_jvp`."""

    setter = "defjvp(rule)"

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        nondiff_argnums: int | DiffState | Sequence[int | DiffState] = (),
    ) -> None:
        super().__init__(fn, "nnx.custom_jvp", nondiff_argnums)
        self.jvp: Callable[..., Any] | None = None

    def defjvp(self, jvp: Rule) -> Rule:
        """Sets the rule, and returns it, so that it can decorate.

        Args:
          jvp: `jvp(*nondiff, primals, tangents)` returns a pair: the result and its tangent.
        """
        if not callable(jvp):
            raise TypeError(
                f"{self._lift.title}: the rule is a {type(jvp).__name__}, expected a function."
            )
        self.jvp = jvp
        return jvp

    def defjvps(self, *jvps: Callable[..., Any] | None) -> None:
        """Sets a rule per argument; their tangents are added.

        Args:
          *jvps: One per argument, None where the derivative is zero: `jvp(tangent, result,
            *primals)` returns the tangent of the result. The primals are as the function left them.

        Raises:
          TypeError: There are `nondiff_argnums`.
          ValueError: Their number is not that of the arguments; raised by the call.

        Example:
          >>> @nnx.custom_jvp
          ... def times(x, y):
          ...     return x * y
          >>> times.defjvps(lambda dx, xy, x, y: dx * y, None)
          >>> [float(g) for g in jax.grad(times, argnums=(0, 1))(2.0, 3.0)]
          [3.0, 0.0]
        """
        if self.nondiff:
            raise TypeError(
                f"{self._lift.title}: defjvps cannot be used with nondiff_argnums. Use defjvp."
            )

        def jvp(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
            if len(jvps) != len(primals):
                raise ValueError(
                    f"{self._lift.title}: defjvps got {len(jvps)} rules for {len(primals)} "
                    "arguments. Give one each, or None."
                )
            result = self(*primals)
            _, tree = opaque_flatten(result)
            parts = [
                spread(each(tangent, result, *primals), tree, f"{self._lift.title}: the tangent")
                for each, tangent in zip(jvps, tangents, strict=True)
                if each is not None
            ]
            zero = [None] * tree.num_leaves
            leaves = [functools.reduce(added, each) for each in zip(zero, *parts, strict=True)]
            return result, jax.tree_util.tree_unflatten(tree, leaves)

        self.defjvp(jvp)

    def _rule(self) -> dict[str, Any]:
        return {"jvp": self.jvp}


class _JvpCall(Call):
    """One call of a function with a rule for its forward-mode derivative."""

    function: CustomJvpFunction

    def with_rule(self) -> Callable[..., Out]:
        made = jax.custom_jvp(named_like(self.function, self.primal))
        made.defjvp(named_like(self.function.jvp, self._both))
        return made

    def _both(self, primals: Inputs, tangents: Inputs) -> tuple[Out, Out]:
        """Returns what comes out, and its tangents."""
        rule, given = self.function.jvp, []
        assert rule is not None

        def body(args: tuple[Any, ...]) -> Any:
            nondiff = [args[n] for n in range(len(args)) if n not in self.diff]
            along = self._tangents(tangents, current_level())
            pair = rule(*nondiff, tuple(args[n] for n in self.diff), along)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    f"{self.title}: the rule has to return a pair, the result and its tangent. It "
                    f"returned a {type(pair).__name__}."
                )
            given.append(pair[1])
            return pair[0]

        out = self.run_rule("the rule", rule, body, primals)
        return out, self._tangent(given[0], out)

    def _tangents(self, tangents: Inputs, level: Level) -> tuple[Any, ...]:
        """Returns the tangents of the arguments that have one."""
        values, others, _ = tangents
        graphdef = self.crossing.graphdef
        by_entry = expanded(graphdef, enumerate(values))
        by_position = dict(zip(self.dynamic, others, strict=True))
        found = []
        for number in self.diff:
            leaves = []
            for position, root in self.roots_of(number):
                if root is None:
                    leaves.append(by_position[position])
                    continue
                known: Found = {entry: by_entry[entry] for entry in self.input_entries(root)}
                leaves.append(state_at(graphdef, self.input_slot(root), known, level))
            found.append(jax.tree_util.tree_unflatten(self.trees[number], leaves))
        return tuple(found)

    def _tangent(self, given: Any, out: Out) -> Out:
        """Returns the tangent of all that comes out; zero of what the rule does not speak of."""
        definition, what = out.definition, f"{self.title}: the tangent"
        leaves = spread(given, definition.tree, f"{what} of the result")
        spec = definition.spec or (None,) * len(leaves)
        arrays = [leaf for leaf, entry in zip(leaves, spec, strict=True) if entry is None]
        objects: list[tuple[Any, Any]] = [
            pair for pair in zip(leaves, spec, strict=True) if pair[1] is not None
        ]
        graphdef, changed = self.output_graph(definition), self.output_entries(out)
        avals = differentiable({entry: types_of(value) for entry, value in changed.items()})
        found: Found = {}
        for leaf, entry in objects:
            slot = self.result_slot(entry, definition)
            found |= entries_of(leaf, graphdef, slot, avals, what, "the result")
        given_arrays = [
            checked(leaf, types_of(primal), f"{what} of the result")
            for leaf, primal in zip(arrays, out.arrays, strict=True)
        ]
        return Out(
            _filled(given_arrays, out.arrays),
            _filled(folded(found, self.output_values(out)), out.changed),
            zero_from_primal(out.extras),
            definition,
        )


CustomJvpFunction.call_type = _JvpCall


def _filled(tangents: Any, primals: Any) -> Any:
    """Returns the tangents, with zeros in the place of None."""
    return jax.tree.map(
        lambda tangent, primal: zero_from_primal(primal) if tangent is None else tangent,
        tangents,
        primals,
        is_leaf=lambda x: x is None,
    )

"""custom_vjp: `jax.custom_vjp` over objects."""

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from nnxlite._core import scope
from nnxlite._core.build import build
from nnxlite._core.extras import only_travelling
from nnxlite._core.graphdef import GraphDef
from nnxlite._core.plan import make_plan
from nnxlite._core.trace import Level, Opaque, current_level
from nnxlite._transforms.axes import DiffState
from nnxlite._transforms.derivatives import (
    Found,
    added,
    checked,
    entries_at,
    entries_of,
    folded,
    spread,
    state_at,
)
from nnxlite._transforms.differentiated import is_number
from nnxlite._transforms.lift import first_object
from nnxlite._transforms.packing import Out, opaque_flatten
from nnxlite._transforms.ruled import Call, Inputs, named_like
from nnxlite._transforms.rules import RuleFunction


def custom_vjp(
    fn: Callable[..., Any] | None = None,
    /,
    *,
    nondiff_argnums: int | DiffState | Sequence[int | DiffState] = (),
    graph: bool | None = None,
    graph_updates: bool | None = None,
) -> Any:
    """Returns a function of objects whose reverse-mode derivative is given by hand.

    As for `jax.custom_vjp`, `defvjp(fwd, bwd)` gives the rule: `fwd(*args)` returns the result and
    residuals, which may hold objects, and `bwd(*nondiff, residuals, g)` a tuple with a cotangent
    for each other argument. `g` is the cotangent of the result. That of an object is a State with
    the paths of float leaves (those left out are zero), an object of the same structure all of
    whose float leaves are cotangents, or None for zero. A Variable that several arguments share
    gets the sum.

    What the function or `fwd` changes on its arguments is changed on the caller's objects. They
    should change the same: JAX runs `fwd` alone where the call is differentiated directly, and both
    if a transform such as `jit` stands in between. The cotangents of changed values go to `bwd` if
    it has a parameter `updates_g`: a tuple with, for each argument, a State of what was changed on
    its objects, None without any. Otherwise they are dropped, as are those of sown values. What
    `bwd` changes or sows goes nowhere: it works on copies.

    On a method the module is argument 0, of the rule too.

    Args:
      fn: The function; without it, a decorator is returned.
      nondiff_argnums: Positions of arguments without a cotangent, which `bwd` gets first:
        functions, numbers and strings stay what they are, objects may be changed. Or
        `DiffState(position, filter)`: which leaves of that argument have a cotangent; the others
        get zero.
      graph: A flag of flax; both values mean the same.
      graph_updates: A flag of flax: False or None.

    Raises:
      TypeError: `graph_updates` is True, with which flax gives `bwd` a pair in the place of `g`.
      AttributeError: It is called before `defvjp`.
      StructureError: `bwd` gives a wrong path or structure, or the rule and the function differ.
      ValueError: `bwd` gives a wrong shape or dtype.

    Example:
      >>> @nnx.custom_vjp
      ... def wave(model, x):
      ...     return jnp.sin(model.w[...] * x)
      >>> def fwd(model, x):
      ...     return wave(model, x), (model, x)
      >>> def bwd(residuals, g):
      ...     model, x = residuals
      ...     g = jnp.clip(g * jnp.cos(model.w[...] * x), -1, 1)
      ...     return nnx.State({"w": nnx.Param(g * x)}), g * model.w[...]
      >>> wave.defvjp(fwd, bwd)
      >>> class Model(nnx.Module):
      ...     def __init__(self):
      ...         self.w = nnx.Param(jnp.array(0.0))
      >>> float(nnx.grad(lambda m: 5 * wave(m, jnp.array(2.0)))(Model())["w"][...])
      2.0
    """
    if graph_updates:
        raise TypeError(
            "nnx.custom_vjp has no graph_updates=True: bwd gets the cotangent of the result alone. "
            "Leave the flag out, and give bwd a parameter updates_g if it needs the cotangents of "
            "changed values."
        )
    make = functools.partial(CustomVjpFunction, nondiff_argnums=nondiff_argnums)
    return make if fn is None else make(fn)


class CustomVjpFunction(RuleFunction):
    """A function with a rule for its reverse-mode derivative; made by `custom_vjp`."""

    setter = "defvjp(fwd, bwd)"

    def __init__(
        self,
        fn: Callable[..., Any],
        *,
        nondiff_argnums: int | DiffState | Sequence[int | DiffState] = (),
    ) -> None:
        super().__init__(fn, "nnx.custom_vjp", nondiff_argnums)
        self.fwd: Callable[..., Any] | None = None
        self.bwd: Callable[..., Any] | None = None
        self.wants_updates = False

    def defvjp(
        self,
        fwd: Callable[..., Any],
        bwd: Callable[..., Any],
        symbolic_zeros: bool = False,
        optimize_remat: bool = False,
    ) -> None:
        """Sets the rule.

        Args:
          fwd: Takes the arguments of the function, and returns a pair: the result, and residuals
            for `bwd`, which may hold arrays, States and objects.
          bwd: `bwd(*nondiff, residuals, g)` returns a tuple of cotangents.
          symbolic_zeros: Accepted if False, for programs of `jax.custom_vjp`.
          optimize_remat: The same.
        """
        for name, option in (
            ("symbolic_zeros", symbolic_zeros),
            ("optimize_remat", optimize_remat),
        ):
            if option:
                raise NotImplementedError(
                    f"{self._lift.title}: defvjp has {name}={option!r}, which rules over objects "
                    "cannot follow. Leave it out, or give a function of arrays to jax.custom_vjp."
                )
        for name, rule in (("fwd", fwd), ("bwd", bwd)):
            if not callable(rule):
                raise TypeError(
                    f"{self._lift.title}: {name} is a {type(rule).__name__}, expected a function."
                )
        self.fwd, self.bwd = fwd, bwd
        self.wants_updates = _has_parameter(bwd, "updates_g")

    def _rule(self) -> dict[str, Any]:
        return {"fwd": self.fwd, "bwd": self.bwd, "wants_updates": self.wants_updates}


def _has_parameter(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):  # some callables of C have no signature
        return False


class _VjpCall(Call):
    """One call of a function with a rule for its reverse-mode derivative."""

    function: CustomVjpFunction

    def with_rule(self) -> Callable[..., Out]:
        function = self.function
        made = jax.custom_vjp(named_like(function, self.primal))
        forward = named_like(function.fwd, self._forward)
        made.defvjp(forward, named_like(function.bwd, self._backward))
        return made

    def _forward(self, values: Any, others: Any, extras: Any) -> tuple[Out, "_Saved"]:
        inputs: Inputs = values, others, extras
        fwd, saved = self.function.fwd, []
        assert fwd is not None

        def body(args: tuple[Any, ...]) -> Any:
            nondiff = self._saved_arguments(args)
            pair = fwd(*args)
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                raise TypeError(
                    f"{self.title}: fwd has to return a pair, the result and residuals. It "
                    f"returned a {type(pair).__name__}."
                )
            saved.append(_Saved.of((nondiff, pair[1]), first_object(args, {}), self.title))
            return pair[0]

        return self.run_rule("fwd", fwd, body, inputs), saved[0]

    def _saved_arguments(self, args: tuple[Any, ...]) -> list[Any]:
        """Returns what `bwd` gets of the arguments without cotangent, but for what is fixed."""
        leaves, _ = opaque_flatten((args, {}))
        found = [leaves[position] for position in self._nondiff_positions()]
        return [leaf.node if type(leaf) is Opaque else leaf for leaf in found]

    def _nondiff_positions(self) -> list[int]:
        numbers = [n for n in range(len(self.trees)) if n not in self.diff]
        return [p for n in numbers for p in self.positions[n] if p not in self.fixed]

    def _nondiff_arguments(self, saved: list[Any]) -> list[Any]:
        leaves = self.fixed | dict(zip(self._nondiff_positions(), saved, strict=True))
        return [
            jax.tree_util.tree_unflatten(self.trees[n], [leaves[p] for p in self.positions[n]])
            for n in range(len(self.trees))
            if n not in self.diff
        ]

    def _backward(self, saved: "_Saved", out: Out) -> tuple[list[Any], list[Any], None]:
        bwd, level = self.function.bwd, current_level()
        assert bwd is not None
        (nondiff, residuals), receiver = saved.load(level)
        named = {"updates_g": self._updates(out, level)} if self.function.wants_updates else {}
        # The name around the call is around this too.
        running = receiver if self.crossing.nested else None
        with only_travelling(), scope.inside_transform(running, self.function.method):
            given = bwd(
                *self._nondiff_arguments(nondiff), residuals, self._result(out, level), **named
            )
        return self._cotangents(given)

    # What goes into `bwd`.

    def _result(self, out: Out, level: Level) -> Any:
        """Returns the cotangent of the result."""
        definition, arrays = out.definition, iter(out.arrays)
        spec = definition.spec or (None,) * definition.tree.num_leaves
        graphdef = self.output_graph(definition)
        changed = self.output_entries(out) if definition.spec else {}
        leaves = [
            next(arrays)
            if entry is None
            else state_at(graphdef, self.result_slot(entry, definition), changed, level)
            for entry in spec
        ]
        return jax.tree_util.tree_unflatten(definition.tree, leaves)

    def _updates(self, out: Out, level: Level) -> tuple[Any, ...]:
        """Returns per argument the cotangents of what was changed on its objects."""
        graphdef, changed = self.output_graph(out.definition), self.output_entries(out)
        updates = []
        for number, tree in enumerate(self.trees):
            leaves: list[Any] = []
            for _, root in self.roots_of(number):
                if root is None:
                    leaves.append(None)
                    continue
                slot = self.argument_slot(root, out.definition)
                leaves.append(state_at(graphdef, slot, changed, level))
                for *_, entry in entries_at(graphdef, slot):  # a shared one counts once
                    changed.pop(entry, None)
            has_object = any(root is not None for _, root in self.roots_of(number))
            updates.append(jax.tree_util.tree_unflatten(tree, leaves) if has_object else None)
        return tuple(updates)

    # What comes out of it.

    def _cotangents(self, given: Any) -> tuple[list[Any], list[Any], None]:
        known = self.function._known
        names = [known[n] if n < len(known) else f"args[{n}]" for n in self.diff]
        if not isinstance(given, tuple | list) or len(given) != len(names):
            what = f"{len(given)} of them" if isinstance(given, tuple | list) else "no tuple"
            raise TypeError(
                f"{self.title}: bwd has to return a tuple with one cotangent for each of "
                f"{', '.join(names) or 'no argument'}. It returned {what} "
                f"({type(given).__name__})."
            )
        crossing, (values, others) = self.crossing, self.input_types
        places = {position: place for place, position in crossing.argument_places()}
        types = dict(zip(self.dynamic, others, strict=True))
        what = f"{self.title}: the cotangent"
        found: Found = {}
        arrays: dict[int, Any] = dict.fromkeys(self.dynamic)
        for number, name, cotangent in zip(self.diff, names, given, strict=True):
            leaves = spread(cotangent, self.trees[number], f"{what} of {name}")
            for (position, root), leaf in zip(self.roots_of(number), leaves, strict=True):
                place = places[position]
                if root is None:
                    arrays[position] = checked(leaf, types[position], f"{what} of {place}")
                    continue
                avals, slot = self.input_entries(root), self.input_slot(root)
                part = entries_of(leaf, crossing.graphdef, slot, avals, what, place)
                found |= {entry: added(found.get(entry), x) for entry, x in part.items()}
        return folded(found, dict(enumerate(values))), list(arrays.values()), None


CustomVjpFunction.call_type = _VjpCall


class _SavedDef(NamedTuple):
    """The static half of residuals.

    Attributes:
      graphdef: Of the objects in them.
      tree: Their structure, objects being one leaf each.
      is_object: Per leaf, whether it is one.
      receiver: The node number of the first object among the arguments, if it is in them.
    """

    graphdef: GraphDef[Any]
    tree: Any
    is_object: tuple[bool, ...]
    receiver: int | None


class _Saved:
    """Residuals: the arrays of a tree, and the values of the objects in it, as they are now."""

    __slots__ = ("arrays", "definition", "values")

    def __init__(self, values: list[Any], arrays: list[Any], definition: _SavedDef) -> None:
        self.values, self.arrays, self.definition = values, arrays, definition

    @classmethod
    def of(cls, tree: Any, receiver: Any, title: str) -> "_Saved":
        leaves, treedef = opaque_flatten(tree)
        arrays = [leaf for leaf in leaves if type(leaf) is not Opaque]
        for leaf in arrays:
            if not is_number(leaf):
                raise TypeError(
                    f"{title}: fwd returns residuals with a {type(leaf).__name__} in them. "
                    "Expected arrays, States and objects; a constant of the call can be an "
                    "argument named in nondiff_argnums."
                )
        plan, _ = make_plan(tuple(leaf.node for leaf in leaves if type(leaf) is Opaque))
        nodes = [None if ref is None else ref() for ref in plan.nodes]
        number = next((n for n, x in enumerate(nodes) if x is receiver is not None), None)
        is_object = tuple(type(leaf) is Opaque for leaf in leaves)
        return cls(plan.gather(), arrays, _SavedDef(plan.graphdef, treedef, is_object, number))

    def load(self, level: Level) -> tuple[Any, Any]:
        """Returns the tree around fresh objects, and the receiver among these, or None."""
        graphdef, tree, is_object, receiver = self.definition
        roots, nodes, _ = build(graphdef, self.values, level)
        objects, arrays = iter(roots), iter(self.arrays)
        leaves = [next(objects if each else arrays) for each in is_object]
        found = None if receiver is None else nodes[receiver]
        return jax.tree_util.tree_unflatten(tree, leaves), found


jax.tree_util.register_pytree_node(
    _Saved,
    lambda saved: ((saved.values, saved.arrays), saved.definition),
    lambda definition, children: _Saved(*children, definition),
)

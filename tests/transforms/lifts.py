"""Functions of objects lifted through each transform, and what that is in plain Python.

Each `lift_...` takes a function and returns it lifted by the library. The `plain_...` beside it
does the same without: it calls the function once, in a loop over slices, in a loop over steps. All
of these functions take objects and return a number (an array) and anything else, so any two nest.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp

import nnxlite as nnx
from tests import tape
from tests.isomorphism import reachable
from tests.slices import SIZE, Known, arrays_of, cut, joined, map_arrays

Result = tuple[Any, Any]
Function = Callable[..., Result]

STEPS, LAST = 2, -1


def as_it_is(f: Function) -> Function:
    """The function itself: what a transform without an effect of its own means."""
    return f


def total(tree: Any) -> jax.Array:
    """Returns the sum over all arrays of a tree."""
    return sum((jnp.sum(x) for x in jax.tree.leaves(tree)), jnp.float32(0))


def copies(roots: tuple[Any, ...]) -> tuple[Any, ...]:
    return nnx.clone(roots, share=True)


# Gradients. The number is the loss plus all gradients, so that what is around sees these.


def _loss(f: Function) -> Callable[..., Any]:
    def loss(*roots: Any) -> Any:
        number, rest = f(*roots)
        return jnp.sum(number), (number, rest)

    return loss


def lift_grad(f: Function) -> Function:
    run = nnx.value_and_grad(_loss(f), has_aux=True)

    def lifted(*roots: Any) -> Result:
        (value, aux), grads = run(*roots)
        values = [leaf.get_value() for _, leaf in grads.flat_state()]
        return value + total(values), (aux, values)

    return lifted


def plain_grad(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        grads = _gradients(f, roots)
        number, rest = f(*roots)
        return jnp.sum(number) + total(grads), ((number, rest), grads)

    return run


def _gradients(f: Function, roots: tuple[Any, ...]) -> list[Any]:
    params, loss = _hand_split(f, roots)
    return [leaf.get_value() for _, leaf in jax.grad(loss)(params).flat_state()]


def _hand_split(f: Function, roots: tuple[Any, ...]) -> tuple[Any, Callable[[Any], Any]]:
    """Returns the Params of the first root, and the number as a function of them."""
    wanted = nnx.All(nnx.Param, lambda path, leaf: path[0] == 0)
    graphdef, params, rest = nnx.split(roots, wanted, ...)

    def loss(params: Any) -> Any:
        with tape.taped():  # the effects are those of the call beside it
            return jnp.sum(f(*nnx.merge(graphdef, params, rest))[0])

    return params, loss


def lift_vjp(f: Function) -> Function:
    def lifted(*roots: Any) -> Result:
        value, pull, aux = nnx.vjp(_loss(f), *roots, has_aux=True, argnums=0)
        (grads,) = pull(jnp.ones_like(value))
        values = [leaf.get_value() for _, leaf in grads.flat_state()]
        return value + total(values), (aux, values)

    return lifted


def lift_jvp(f: Function) -> Function:
    def lifted(*roots: Any) -> Result:
        along = jax.tree.map(jnp.ones_like, nnx.state(roots[0], nnx.Param))
        tangents = (along, *[None] * (len(roots) - 1))
        value, change, aux = nnx.jvp(_loss(f), roots, tangents, has_aux=True)
        return value + change, aux

    return lifted


def plain_jvp(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        change = _change_along_ones(f, roots)
        number, rest = f(*roots)
        return jnp.sum(number) + change, (number, rest)

    return run


def _change_along_ones(f: Function, roots: tuple[Any, ...]) -> jax.Array:
    params, loss = _hand_split(f, roots)
    return jax.jvp(loss, (params,), (jax.tree.map(jnp.ones_like, params),))[1]


def lift_custom_vjp(f: Function) -> Function:
    """Lifts with a rule that says that nothing depends on the objects."""
    ruled = nnx.custom_vjp(f)
    ruled.defvjp(lambda *roots: (f(*roots), len(roots)), lambda size, g: (None,) * size)
    return ruled


def lift_custom_jvp(f: Function) -> Function:
    """Lifts with a rule that says that nothing depends on the objects."""
    ruled = nnx.custom_jvp(f)
    ruled.defjvp(lambda primals, tangents: (f(*primals), None))
    return ruled


def plain_constant(f: Function) -> Function:
    """What is returned and what is changed does not depend on what was given."""

    def run(*roots: Any) -> Result:
        given: dict[int, tuple[Any, Any]] = {}

        def stopped(x: Any) -> Any:
            new = jax.lax.stop_gradient(jnp.array(x))
            given[id(new)] = x, new
            return new

        number, rest = f(*map_arrays(roots, stopped))
        map_arrays(roots, lambda x: given.get(id(x), (x,))[0])
        return number, rest

    return run


# Mapped functions, and loops over what is sliced.


def plain_slices(f: Function, axis: int = 0) -> Function:
    def run(*roots: Any) -> Result:
        slices, known = [roots, *(copies(roots) for _ in range(SIZE - 1))], Known(roots)
        for n, each in enumerate(slices):
            cut(each, n, axis)
        results = _each(f, slices)
        return joined(list(zip(slices, results, strict=True)), known, axis)[1]

    return run


def plain_last_slices(f: Function) -> Function:
    return plain_slices(f, LAST)


def plain_steps(f: Function) -> Function:
    return lambda *roots: joined(_each(f, [roots] * STEPS))


def plain_broadcast(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        number, rest = joined(_each(f, [roots] * SIZE))
        return number + _column(number), rest

    return run


def _column(number: Any) -> jax.Array:
    shape = (SIZE,) + (1,) * (jnp.ndim(number) - 1)
    return jnp.arange(SIZE, dtype=jnp.float32).reshape(shape)


def _each(f: Function, calls: Sequence[tuple[Any, ...]]) -> list[Result]:
    """Calls `f` again and again, and stacks what it notes on the tape."""
    results, tapes = [], []
    for roots in calls:
        with tape.taped() as entries:
            results.append(f(*roots))
        tapes.append(entries)
    for same in zip(*tapes, strict=True):
        tape.note(same[0]._replace(value=jnp.stack([entry.value for entry in same])))
    return results


def lift_vmap_of_broadcast(f: Function) -> Function:
    def add(x: jax.Array, *roots: Any) -> Result:
        number, rest = f(*roots)
        return number + x, rest

    def lifted(*roots: Any) -> Result:
        run = nnx.vmap(add, in_axes=(0, *[None] * len(roots)), out_axes=0)
        return run(jnp.arange(SIZE, dtype=jnp.float32), *roots)

    return lifted


def lift_scan_of_broadcast(f: Function) -> Function:
    def add(x: jax.Array, *roots: Any) -> Result:
        number, rest = f(*roots)
        return number + x, rest

    def lifted(*roots: Any) -> Result:
        run = nnx.scan(add, in_axes=(0, *[None] * len(roots)), out_axes=0)
        return run(jnp.arange(SIZE, dtype=jnp.float32), *roots)

    return lifted


def lift_scan_of_carried(f: Function) -> Function:
    def body(carry: Any, _: Any) -> Any:
        return carry, f(*carry)

    run = nnx.scan(body, length=STEPS)
    return lambda *roots: run(roots, None)[1]


def lift_scan_of_carried_axes(f: Function) -> Function:
    carried = nnx.StateAxes({...: nnx.Carry})

    def lifted(*roots: Any) -> Result:
        axes = (carried,) * len(roots)
        return nnx.scan(f, in_axes=axes, out_axes=0, length=STEPS)(*roots)

    return lifted


def lift_remat_scan(f: Function) -> Function:
    def body(carry: Any, _: Any) -> Any:
        return carry, f(*carry)

    run = nnx.remat_scan(body, lengths=(1, STEPS), in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
    return lambda *roots: run(roots, jnp.zeros(STEPS, jnp.float32))[1]


# Loops of unknown length: only the number comes out.


def lift_while_loop(f: Function) -> Function:
    def going_on(value: Any) -> Any:
        return value[1] < STEPS

    def body(value: Any) -> Any:
        roots, count, sum_ = value
        number, _ = f(*roots)
        return roots, count + 1, sum_ + jnp.sum(number)

    def lifted(*roots: Any) -> Result:
        value = nnx.while_loop(going_on, body, (roots, jnp.int32(0), jnp.float32(0)))
        return value[2], ()

    return lifted


def lift_fori_loop(f: Function) -> Function:
    def body(_: Any, value: Any) -> Any:
        roots, sum_ = value
        return roots, sum_ + jnp.sum(f(*roots)[0])

    return lambda *roots: (nnx.fori_loop(0, STEPS, body, (roots, jnp.float32(0)))[1], ())


def plain_sum_of_steps(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        return sum((jnp.sum(f(*roots)[0]) for _ in range(STEPS)), jnp.float32(0)), ()

    return run


# Branches.


def changing(f: Function) -> Function:
    """The function, with arrays alone for a result."""

    def run(*roots: Any) -> Result:
        number, rest = f(*roots)
        return number, arrays_of(rest)

    return run


def not_changing(f: Function) -> Function:
    """The same result, and no effect."""
    return lambda *roots: changing(f)(*copies(roots))


def lift_cond(taken: bool) -> Callable[[Function], Function]:
    def lift(f: Function) -> Function:
        one, other = changing(f), not_changing(f)
        return lambda *roots: nnx.cond(jnp.bool_(taken), one, other, *roots)

    return lift


def lift_switch(f: Function) -> Function:
    return lambda *roots: nnx.switch(jnp.int32(7), [f, f, f], *roots)


# What leaves the objects as they are.


def lift_eval_shape(f: Function) -> Function:
    return lambda *roots: map_arrays(nnx.eval_shape(f, *roots), zeros)


def plain_eval_shape(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        inside = copies(roots)
        owners = {id(a): b for a, b in zip(reachable(inside), reachable(roots), strict=True)}
        with tape.taped() as entries:
            result = f(*inside)
        for owner, kind, name, value in entries:
            tape.note(tape.Entry(owners.get(id(owner), owner), kind, name, zeros(value)))
        return map_arrays(result, zeros)

    return run


def zeros(x: Any) -> jax.Array:
    return jnp.zeros(x.shape, x.dtype)


def lift_make_jaxpr(f: Function) -> Function:
    def lifted(*roots: Any) -> Result:
        jaxpr = nnx.make_jaxpr(f)(*roots)
        inputs = jax.tree.leaves(nnx.state(roots))
        return jax.extend.core.jaxpr_as_fun(jaxpr)(*inputs)[0], ()

    return lifted


def plain_number(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        with tape.taped():
            return f(*copies(roots))[0], ()

    return run


# One device, whose shard is the whole.


def lift_shard_map(f: Function) -> Function:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    # Perturbations are those of each shard, so JAX cannot tell that results are alike.
    return nnx.shard_map(f, mesh=mesh, in_specs=jax.P(), out_specs=jax.P(), check_vma=False)


def plain_shard(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        with tape.taped() as entries:
            result = f(*roots)
        _pass_on([entry._replace(value=jnp.expand_dims(entry.value, 0)) for entry in entries])
        return result

    return run


# Captures.

KINDS = (nnx.Intermediate, nnx.Perturbation)


def lift_capture(f: Function) -> Function:
    def lifted(*roots: Any) -> Result:
        (number, rest), *states = nnx.capture(_of_tuple(f), *KINDS)(roots)
        return number, (rest, tape.of_states(states, roots))

    return lifted


def plain_capture(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        with tape.taped() as entries:
            number, rest = f(*roots)
        _pass_on(entries)
        return number, (rest, tape.by_path(entries, roots))

    return run


def lift_capture_with_init(f: Function) -> Function:
    def lifted(*roots: Any) -> Result:
        _, found = nnx.capture(_of_tuple(f), nnx.Perturbation)(copies(roots))
        ones = jax.tree.map(jnp.ones_like, found)
        run = nnx.capture(_of_tuple(f), nnx.Intermediate, init=ones)
        (number, rest), state = run(roots)
        return number, (rest, tape.of_states([state], roots))

    return lifted


def plain_capture_with_init(f: Function) -> Function:
    def run(*roots: Any) -> Result:
        with tape.taped(added=1.0) as entries:
            number, rest = f(*roots)
        _pass_on(entries)
        sown = [entry for entry in entries if entry.kind is nnx.Intermediate]
        return number, (rest, tape.by_path(sown, roots))

    return run


def _of_tuple(f: Function) -> Function:
    return lambda roots: f(*roots)


def _pass_on(entries: Sequence[tape.Entry]) -> None:
    for entry in entries:
        tape.note(entry)


# Plain JAX around a merge.


def lift_merge_in(transform: Callable[[Any], Any]) -> Callable[[Function], Function]:
    """Lifts by a transform of `state -> (state, result)`, with the rest done by hand."""

    def lift(f: Function) -> Function:
        def lifted(*roots: Any) -> Result:
            graphdef, state = nnx.split(roots)

            def step(state: Any) -> Any:
                models = nnx.merge(graphdef, state)
                result = changing(f)(*models)
                return nnx.state(models), result

            state, result = transform(step)(state)
            nnx.update(roots, state)
            return result

        return lifted

    return lift


def scanned(step: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda state: jax.lax.scan(lambda state, _: step(state), state, None, STEPS)


def plain_of_arrays(plain: Callable[[Function], Function]) -> Callable[[Function], Function]:
    return lambda f: plain(changing(f))

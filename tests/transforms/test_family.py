"""Families of functions: found again, bounded, and each member gets its own arguments."""

import functools
import gc
import threading
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from nnxlite._transforms import family
from nnxlite._transforms.arguments import parameters
from nnxlite._transforms.family import Members, family_of
from nnxlite.errors import StructureError


class Counter(nnx.Module):
    def __init__(self) -> None:
        self.n = nnx.Variable(jnp.int32(0))

    def add(self, by: jax.Array) -> jax.Array:
        self.n[...] += by
        return self.n[...]

    def narrow(self, by: jax.Array) -> jax.Array:
        self.n.set_value(self.n.astype(jnp.int8))
        return by


def identity(x: Any) -> Any:
    return x


def members(*functions: Any) -> Members:
    return Members.of("nnx.cond", [f"f{n}" for n in range(len(functions))], functions)


def adding(scale: int) -> Any:
    return lambda x: x + scale


def test_families_are_found_again_by_what_functions_do() -> None:
    first = family_of(members(adding(1), identity), 1)
    assert family_of(members(adding(1), identity), 1) is first
    assert family_of(members(adding(2), identity), 1) is not first
    assert family_of(members(identity, adding(1)), 1) is not first
    assert family_of(members(adding(1), identity), 2) is not first


def test_a_function_over_arrays_is_found_again_as_long_as_it_lives() -> None:
    x = jnp.ones(2)

    def over_array(y: jax.Array) -> jax.Array:
        return x + y

    first = family_of(members(identity, over_array), 1)
    assert family_of(members(identity, over_array), 1) is first
    assert family_of(members(over_array, over_array), 1) is not first
    ref = weakref.ref(first)
    del over_array, first
    gc.collect()
    assert ref() is None


def test_functions_over_objects_and_those_of_a_trace_are_not_kept() -> None:
    counter = Counter()
    over_object = lambda x: x + counter.n[...]  # noqa: E731
    assert family_of(members(over_object), 1) is not family_of(members(over_object), 1)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        over_tracer = lambda y: x + y  # noqa: E731
        assert family_of(members(over_tracer), 1) is not family_of(members(over_tracer), 1)
        assert family_of(members(adding(7)), 1) is family_of(members(adding(7)), 1)
        return x

    run(jnp.ones(2))


def test_the_number_of_families_is_bounded() -> None:
    kept = [adding(n) for n in range(family.MAX_FAMILIES + 40)]
    for function in kept:
        family_of(members(function), 1)
    assert len(family._EXACT) == family.MAX_FAMILIES
    arrays = [functools.partial(jnp.add, jnp.ones(1)) for _ in range(family.MAX_FAMILIES + 40)]
    functions = [lambda x, f=f: f(x) for f in arrays]
    for function in functions:
        family_of(members(function), 1)
    assert len(family._OWN) <= family.MAX_FAMILIES


def test_arguments_that_come_with_functions_have_names_of_their_own() -> None:
    a, b = Counter(), Counter()
    given = members(a.add, functools.partial(Counter.add, b))
    assert given.arguments == (a, b)
    first, second = (member.fn for member in family_of(given, 1).members)
    assert parameters(first) == parameters(second) == ["self", "self_2", "by"]
    assert parameters(family_of(members(a.add, jnp.sin), 2).members[0].fn) == [
        *("self", "by", "operand_1")
    ]


def test_errors_name_the_arguments_that_come_with_functions() -> None:
    a, b = Counter(), Counter()
    with pytest.raises(StructureError, match=r"self_2\.n is int32\[\] after true_fun \(add\)"):
        nnx.cond(jnp.array(True), a.add, b.narrow, jnp.int32(1))


def test_threads_share_a_family() -> None:
    results: list[int] = []

    def work() -> None:
        counter = Counter()
        for _ in range(20):
            nnx.cond(jnp.array(True), lambda c: c.add(jnp.int32(1)), lambda c: c.n[...], counter)
        results.append(int(counter.n[...]))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [20] * 8


def test_fresh_models_leave_nothing_behind() -> None:
    refs = []
    for _ in range(3):
        counter = Counter()
        nnx.cond(jnp.array(True), counter.add, lambda by: by, jnp.int32(1))
        nnx.fori_loop(0, 2, lambda i, c: (c.add(i), c)[1], counter)
        nnx.while_loop(lambda c: c.n < 3, lambda c: (c.add(jnp.int32(1)), c)[1], counter)
        refs.append(weakref.ref(counter))
        del counter
    gc.collect()
    assert [ref() for ref in refs] == [None] * 3

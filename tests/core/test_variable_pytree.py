"""Variables as JAX and its transforms see them: pytree nodes, each of one trace level."""

import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.tree_util import GetAttrKey

from nnxlite._core import trace
from nnxlite._core.errors import TraceLevelError
from nnxlite._core.variable import BatchStat, Cache, Param, Variable


class Custom(Variable[Any]):
    """A kind made by a user."""


def is_variable(x: Any) -> bool:
    return isinstance(x, Variable)


# As a pytree.


def test_a_variable_is_a_node_with_one_child_named_value() -> None:
    variable = Param(jnp.ones(2), a=1)
    paths, treedef = jax.tree_util.tree_flatten_with_path(variable)
    assert paths[0][0] == (GetAttrKey("value"),)
    assert paths[0][1] is variable.get_raw_value()
    assert treedef == jax.tree.structure(variable)
    assert jax.tree_util.keystr(paths[0][0]) == ".value"


def test_metadata_and_kind_are_part_of_the_tree_structure() -> None:
    def structure(make: Any, **metadata: Any) -> Any:
        return jax.tree.structure(make(jnp.ones(2), **metadata))

    assert structure(Param, a=1, b=2) == structure(Param, b=2, a=1)
    assert structure(Param, a=1) != structure(Param, a=1.0)
    assert structure(Param, a=1) != structure(Param, a=True)
    assert structure(Param) != structure(BatchStat)
    assert hash(structure(Param, a=1)) == hash(structure(Param, a=1))


@pytest.mark.parametrize(
    "leaf",
    [None, object(), True, 0, "label", jax.ShapeDtypeStruct((2,), jnp.float32), (1, 2)],
    ids=["none", "object", "bool", "axis", "label", "shape", "tuple"],
)
@pytest.mark.parametrize("cls", [Variable, Param, Custom])
def test_anything_may_stand_in_place_of_a_leaf(cls: Any, leaf: Any) -> None:
    def refuse(variable: Any, value: Any) -> Any:
        raise AssertionError("no hook runs")

    variable = cls(jnp.ones(2), a=1, on_set_value=refuse)
    other = jax.tree.map(lambda _: leaf, variable)
    assert type(other) is cls
    assert other._value is leaf
    assert other._meta is variable._meta
    assert other._level is None
    assert other._version == 0


def test_variables_can_be_leaves() -> None:
    tree = {"a": Param(jnp.ones(2)), "b": [Cache(jnp.ones(3)), 1]}
    leaves = jax.tree.leaves(tree, is_leaf=is_variable)
    assert [type(leaf) for leaf in leaves] == [Param, Cache, int]
    shapes = jax.tree.map(lambda v: v.shape if is_variable(v) else v, tree, is_leaf=is_variable)
    assert shapes == {"a": (2,), "b": [(3,), 1]}


@pytest.mark.parametrize("cls", [Variable, Param, Custom])
def test_plain_transforms_take_and_return_variables(cls: Any) -> None:
    variable = cls(jnp.arange(3.0), a=1)
    doubled = jax.jit(lambda v: v.replace(v * 2))(variable)
    assert type(doubled) is cls
    assert doubled.a == 1
    assert doubled[...].tolist() == [0, 2, 4]
    gradient = jax.grad(lambda v: (v**2).sum())(variable)
    assert type(gradient) is cls
    assert gradient[...].tolist() == [0, 2, 4]
    mapped = jax.vmap(lambda v: v + 1)(variable)
    assert mapped.tolist() == [1, 2, 3]
    carried, _ = jax.lax.scan(lambda v, _: (v.replace(v + 1), None), variable, None, length=2)
    assert carried[...].tolist() == [2, 3, 4]


def test_axes_can_be_given_at_the_variable() -> None:
    variable = Param(jnp.ones((2, 3)))
    axes = jax.tree.map(lambda _: 1, variable)
    assert jax.vmap(lambda v: v.sum(), in_axes=(axes,))(variable).tolist() == [2, 2, 2]


def test_variables_with_equal_metadata_share_one_trace() -> None:
    traces = []
    f = jax.jit(lambda v: traces.append(1))
    for note in ([1, 2], [1, 2], [1, 2.0]):
        f(Param(jnp.ones(2), note=note))
    assert len(traces) == 2


def test_opaque_flattening_gives_one_leaf_and_takes_it_back() -> None:
    variable = Param(jnp.ones(2), a=1)
    with trace.opaque_nodes():
        leaves, treedef = jax.tree.flatten([variable, 1])
        paths = jax.tree_util.tree_leaves_with_path(variable)
    assert isinstance(leaves[0], trace.Opaque)
    assert leaves[0].node is variable
    assert paths[0][1].node is variable
    assert jax.tree.unflatten(treedef, leaves)[0] is variable
    assert jax.tree.unflatten(treedef, ["other", 1]) == ["other", 1]
    assert jax.tree.leaves(variable)[0] is variable.get_raw_value()


def test_opaque_flattening_is_seen_by_its_own_thread_only() -> None:
    variable, found = Param(jnp.ones(2)), []
    with trace.opaque_nodes():
        thread = threading.Thread(target=lambda: found.extend(jax.tree.leaves(variable)))
        thread.start()
        thread.join()
    assert found == [variable.get_raw_value()] or found[0] is variable.get_raw_value()


# Trace levels.


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda v: v.set_value(0), "set the value of Param"),
        (lambda v: v.__setitem__(0, 5), "set the value of Param"),
        (lambda v: v.set_raw_value(0), "set the value of Param"),
        (lambda v: setattr(v, "value", 0), "set the value of Param"),
        (lambda v: v.set_metadata(a=2), "set the metadata of Param"),
        (lambda v: v.del_metadata("a"), "set the metadata of Param"),
        (lambda v: v.copy_from(Param(0)), "set the metadata of Param"),
    ],
)
@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad], ids=["jit", "vmap", "grad"])
def test_a_write_from_another_level_is_refused(transform: Any, write: Any, message: str) -> None:
    variable = Param(jnp.ones(2), a=1)

    def function(x: jax.Array) -> jax.Array:
        write(variable)
        return x.sum()

    with pytest.raises(TraceLevelError, match=f"Cannot {message}"):
        transform(function)(jnp.ones(2))
    assert variable[...].tolist() == [1, 1]
    assert variable.a == 1


def test_a_variable_can_be_read_anywhere() -> None:
    variable = Param(jnp.ones(2), a=1)
    f = jax.jit(jax.vmap(lambda x: x * variable.a + variable[0] + variable.shape[0]))
    assert f(jnp.arange(2.0)).tolist() == [3, 4]


def test_a_variable_made_inside_a_trace_can_be_written_there() -> None:
    @jax.jit
    def f(x: jax.Array) -> jax.Array:
        variable = Param(x)
        variable[0] = 5
        variable.set_metadata(a=1)
        return variable[...]

    assert f(jnp.ones(2)).tolist() == [5, 1]


def test_a_variable_that_jax_built_can_be_written_where_it_was_built() -> None:
    @jax.jit
    def f(variable: Param[jax.Array]) -> Any:
        variable[...] += 1
        return variable

    variable = f(Param(jnp.ones(2)))
    variable[...] += 1
    assert variable[...].tolist() == [3, 3]


def test_a_read_of_an_eager_variable_is_recorded_while_a_trace_asks_for_it() -> None:
    variable, records = Param(jnp.ones(2)), {}
    trace.FOREIGN_READS.recorders.append(records)
    try:
        for read in (lambda: variable[0], lambda: variable.value, lambda: variable.T):
            records.clear()
            read()
            assert records[id(variable)].leaf() is variable
    finally:
        trace.FOREIGN_READS.recorders.pop()

"""Shardings of jit. What needs several devices is in `shardings_on_four_devices.py`."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx
from nnxlite._core.errors import StructureError
from tests.transforms.samples import Cell


def replicated():
    return NamedSharding(jax.make_mesh((1,), ("x",)), PartitionSpec())


def test_in_shardings_that_are_no_prefix_are_an_error():
    with pytest.raises(StructureError, match=r"^in_shardings is not a prefix"):
        nnx.jit(lambda m, x: x, in_shardings=(None, None, None))(Cell(), jnp.ones(2))


def test_out_shardings_that_are_no_prefix_are_an_error():
    with pytest.raises(StructureError, match=r"^out_shardings is not a prefix"):
        nnx.jit(lambda m: (m, 1), out_shardings=(None, None, None))(Cell())


def test_filter_that_is_missing_is_an_error_with_the_path():
    only_parameters = nnx.StateSharding({nnx.Param: replicated()})
    with pytest.raises(StructureError, match=r"StateSharding has no filter for model\.n \(Var"):
        nnx.jit(lambda m: m.w[...], in_shardings=(only_parameters,))(Cell())


def test_two_shardings_for_one_variable_name_both_places():
    a, b = Cell(), Cell()
    b.tied = a.w
    other = NamedSharding(jax.make_mesh((1,), ("y",)), PartitionSpec())
    with pytest.raises(StructureError, match=r"a\.w and b\.tied are the same leaf, but in_shard"):
        nnx.jit(lambda a, b: None, in_shardings=(replicated(), other))(a, b)
    nnx.jit(lambda a, b: None, in_shardings=(replicated(), None))(a, b)
    nnx.jit(lambda a, b: None, in_shardings=(replicated(), replicated()))(a, b)

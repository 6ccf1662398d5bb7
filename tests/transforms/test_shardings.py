"""Shardings of jit. Those that need several devices run in a process that has four."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import nnxlite as nnx
from nnxlite._core.errors import StructureError
from tests.transforms.samples import Cell

ON_FOUR_DEVICES = Path(__file__).with_name("shardings_on_four_devices.py")


def test_on_four_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(ON_FOUR_DEVICES)],
        env={**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    # The file skips itself where there are fewer devices: here none of it may be skipped.
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]


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

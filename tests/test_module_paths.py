"""The module paths of flax.nnx that programs import from: doors to what has other rooms here."""

import importlib

import jax
import jax.numpy as jnp
import pytest

import nnxlite as nnx
from tests.flax_names import PATHS


def names_at(path: str) -> list[str]:
    door = importlib.import_module(f"nnxlite.{path}")
    return [name for name in vars(door) if not name.startswith("_")]


@pytest.mark.parametrize("path", PATHS)
def test_path_can_be_imported_and_is_an_attribute(path: str) -> None:
    assert importlib.import_module(f"nnxlite.{path}") is getattr(nnx, path)


@pytest.mark.parametrize("path", sorted({*PATHS} - {"graphlib", "object"}))
def test_door_exports_just_what_it_names(path: str) -> None:
    assert sorted(names_at(path)) == sorted(getattr(nnx, path).__all__)


@pytest.mark.parametrize(("path", "same"), [("graphlib", "graph"), ("object", "pytreelib")])
def test_two_paths_have_the_same_names(path: str, same: str) -> None:
    assert sorted(names_at(path)) == sorted(names_at(same))


@pytest.mark.parametrize("path", PATHS)
def test_what_is_public_is_the_same_object_at_both_places(path: str) -> None:
    door = getattr(nnx, path)
    for name in names_at(path):
        if name in nnx.__all__:
            assert getattr(door, name) is getattr(nnx, name)
        else:
            assert name in {
                *("Predicate", "to_predicate", "filters_to_predicates", "first_from", "NodeDef"),
                *("empty_node", "flatten_mapping", "flatten_to_sequence", "unflatten_mapping"),
            }


def test_names_of_layers_and_training_have_the_paths_of_flax() -> None:
    kernel = nnx.nn.linear.default_kernel_init(jax.random.key(0), (2, 3), jnp.float32)
    assert kernel.shape == (2, 3)
    assert nnx.nn.dtypes.promote_dtype((1.0,))[0].dtype == "float32"
    assert nnx.training.metrics is nnx.metrics
    assert nnx.training.optimizer.OptState is nnx.OptState
    assert nnx.spmd.get_abstract_model is nnx.get_abstract_model

"""Metrics give what those of flax.nnx give, over several batches."""

import inspect
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as peer

import nnxlite as nnx

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

RNG = np.random.default_rng(0)
BATCHES = [
    {
        "values": jnp.asarray(RNG.normal(size=(5, 2)), jnp.float32),
        "loss": 2.5,
        "logits": jnp.asarray(RNG.normal(size=(5, 3)), jnp.float32),
        "labels": jnp.asarray(RNG.integers(0, 3, 5), jnp.int32),
    }
    for _ in range(3)
]
SCORES = [
    {"logits": batch["values"][:, 0], "labels": (batch["labels"] > 0).astype(int)}
    for batch in BATCHES
]

METRICS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "Average": (lambda lib: lib.metrics.Average(), BATCHES),
    "Average of a number": (lambda lib: lib.metrics.Average("loss"), BATCHES),
    "Accuracy": (lambda lib: lib.metrics.Accuracy(), BATCHES),
    "Accuracy of two classes": (lambda lib: lib.metrics.Accuracy(threshold=0.5), SCORES),
    "Accuracy, masked": (
        lambda lib: lib.metrics.Accuracy(),
        [{**batch, "mask": jnp.arange(5) < 3} for batch in BATCHES],
    ),
    "Average, masked": (
        lambda lib: lib.metrics.Average(),
        [{**batch, "mask": jnp.arange(10).reshape(5, 2) < 7} for batch in BATCHES],
    ),
    "Welford": (lambda lib: lib.metrics.Welford(), BATCHES),
    "Welford of a number": (lambda lib: lib.metrics.Welford("loss"), BATCHES),
    "MultiMetric": (
        lambda lib: lib.MultiMetric(
            accuracy=lib.metrics.Accuracy(),
            loss=lib.metrics.Average("loss"),
            spread=lib.metrics.Welford(),
        ),
        BATCHES,
    ),
}


def numbers(result: Any) -> list[Any]:
    if isinstance(result, dict):
        return [number for name in sorted(result) for number in numbers(result[name])]
    fields = getattr(result, "__dataclass_fields__", None)
    return [getattr(result, name) for name in sorted(fields)] if fields else [result]


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_is_that_of_flax(name: str) -> None:
    make, batches = METRICS[name]
    ours, theirs = make(nnx), make(peer)
    for batch in [*batches, None]:
        found, expected = numbers(ours.compute()), numbers(theirs.compute())
        assert [x.dtype for x in found] == [x.dtype for x in expected]
        np.testing.assert_allclose(found, expected, 1e-6, 1e-6)
        if batch is not None:
            ours.update(**batch), theirs.update(**batch)
    ours.reset(), theirs.reset()
    np.testing.assert_array_equal(numbers(ours.compute()), numbers(theirs.compute()))


@pytest.mark.parametrize("name", ["Average", "Accuracy", "Welford"])
def test_state_has_the_names_and_dtypes_of_flax(name: str) -> None:
    def kinds(library: Any) -> list[Any]:
        state = library.state(getattr(library.metrics, name)(), library.metrics.MetricState)
        return [(path, v[...].dtype, v[...].shape) for path, v in library.to_flat_state(state)]

    assert kinds(nnx) == kinds(peer)


@pytest.mark.parametrize("name", ["Average", "Welford", "Metric", "MultiMetric"])
@pytest.mark.parametrize("method", ["reset", "update", "compute", "split"])
def test_methods_take_what_those_of_flax_take(name: str, method: str) -> None:
    ours, theirs = (
        list(inspect.signature(getattr(getattr(lib.metrics, name), method)).parameters)
        for lib in (nnx, peer)
    )
    assert ours == theirs

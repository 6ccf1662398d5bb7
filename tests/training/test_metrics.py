"""Metrics, against NumPy over all values at once."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nnxlite as nnx

VALUES = np.random.default_rng(0).normal(5.0, 2.0, (4, 3, 2)).astype(np.float32)


def test_average_is_the_mean_over_all_batches() -> None:
    average = nnx.metrics.Average()
    for batch in VALUES:
        average.update(values=batch)
    average.update(values=10)
    expected = (VALUES.sum() + 10) / (VALUES.size + 1)
    np.testing.assert_allclose(average.compute(), expected, rtol=1e-6)


@pytest.mark.parametrize("shape", [(3, 2), (2,), (3, 1), (1, 2), (1, 1), ()], ids=str)
@pytest.mark.parametrize("dtype", [bool, np.int32, np.float32])
def test_average_counts_exactly_what_a_mask_keeps(shape: tuple[int, ...], dtype: Any) -> None:
    mask = (np.arange(np.prod(shape, dtype=int)) % 2 == 0).reshape(shape)
    values = VALUES[0].copy()
    values[~np.broadcast_to(mask, (3, 2))] = np.nan
    average = nnx.metrics.Average()
    average.update(values=jnp.asarray(values), mask=jnp.asarray(mask.astype(dtype)))
    np.testing.assert_allclose(average.compute(), np.nanmean(values), rtol=1e-6)
    assert int(average.count[...]) == np.broadcast_to(mask, (3, 2)).sum()


def test_a_mask_that_is_larger_repeats_the_values() -> None:
    average = nnx.metrics.Average()
    average.update(values=jnp.array([1.0, 3.0]), mask=jnp.array([[True, False], [True, True]]))
    np.testing.assert_allclose(average.compute(), 5 / 3, rtol=1e-6)


def test_average_of_nothing_is_nan_and_reset_forgets() -> None:
    average = nnx.metrics.Average()
    assert jnp.isnan(average.compute())
    average.update(values=VALUES)
    average.reset()
    assert jnp.isnan(average.compute())
    average.update(values=jnp.zeros(0))
    assert int(average.count[...]) == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int32", "bool"])
def test_sums_are_taken_in_float32(dtype: str) -> None:
    average = nnx.metrics.Average()
    values = jnp.ones(70_000, dtype)
    average.update(values=values)
    average.update(values=values)
    assert float(average.total[...]) == 140_000
    assert average.total.dtype == jnp.float32


def test_average_takes_the_named_values() -> None:
    loss = nnx.metrics.Average("loss")
    loss.update(loss=2.0, values=100.0)
    assert float(loss.compute()) == 2
    message = r"Average\.update expected the keyword 'loss', found values"
    with pytest.raises(TypeError, match=message):
        loss.update(values=1.0)


def test_bad_masks_are_refused_and_change_nothing() -> None:
    average = nnx.metrics.Average()
    with pytest.raises(ValueError, match=r"a mask of shape \(2,\) for values of shape \(3,\)"):
        average.update(values=jnp.ones(3), mask=jnp.ones(2))
    with pytest.raises(ValueError, match=r"a mask for values=1\.0\. Expected an array"):
        average.update(values=1.0, mask=jnp.ones(2))
    assert int(average.count[...]) == 0


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_accuracy_is_the_share_of_right_classes(dtype: Any) -> None:
    logits = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
    labels = np.random.default_rng(1).integers(0, 3, (4, 5)).astype(dtype)
    accuracy = nnx.metrics.Accuracy()
    for batch in zip(logits, labels, strict=True):
        accuracy.update(logits=batch[0], labels=batch[1])
    np.testing.assert_allclose(accuracy.compute(), (logits.argmax(-1) == labels).mean(), rtol=1e-6)


def test_accuracy_of_two_classes_and_one_score() -> None:
    accuracy = nnx.metrics.Accuracy(threshold=0.5)
    logits = jnp.array([0.2, 0.5, 0.9, 0.1])
    accuracy.update(logits=logits, labels=jnp.array([0, 1, 0, 1]))
    assert float(accuracy.compute()) == 0.5


def test_accuracy_of_a_mask() -> None:
    accuracy = nnx.metrics.Accuracy()
    labels = jnp.array([0, 1, 1])
    accuracy.update(logits=jnp.eye(2)[jnp.array([0, 1, 0])], labels=labels, mask=labels > 0)
    assert float(accuracy.compute()) == 0.5


@pytest.mark.parametrize(
    ("threshold", "logits", "labels", "message"),
    [
        (None, np.ones(3), np.ones(3, np.int32), r"shape \(3,\) and .* Expected logits of 2 axes"),
        (
            0.5,
            np.ones((3, 2)),
            np.ones(3, np.int32),
            r"shape \(3, 2\) .* Expected logits of 1 axes",
        ),
        (None, np.ones((3, 2)), np.ones(3), "labels of float32. Expected integers"),
    ],
)
def test_accuracy_refuses_what_does_not_fit(
    threshold: Any, logits: Any, labels: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        nnx.metrics.Accuracy(threshold).update(logits=logits, labels=jnp.asarray(labels))


def test_accuracy_refuses_a_threshold_that_is_no_number() -> None:
    with pytest.raises(TypeError, match=r"threshold of type str\. Expected a float"):
        nnx.metrics.Accuracy("0.5")  # type: ignore[arg-type]


@pytest.mark.parametrize("offset", [0.0, 1000.0])
def test_welford_has_mean_and_spread_of_all_values(offset: float) -> None:
    values = VALUES + np.float32(offset)
    welford = nnx.metrics.Welford()
    for batch in values:
        welford.update(values=batch)
    welford.update(values=jnp.zeros(0))
    welford.update(values=float(offset))
    everything = np.append(values, offset).astype(np.float64)
    found = welford.compute()
    np.testing.assert_allclose(found.mean, everything.mean(), rtol=1e-6)
    np.testing.assert_allclose(found.standard_deviation, everything.std(), rtol=1e-4)
    error = everything.std() / np.sqrt(everything.size)
    np.testing.assert_allclose(found.standard_error_of_mean, error, rtol=1e-4)


def test_welford_of_nothing_and_reset() -> None:
    welford = nnx.metrics.Welford("loss")
    welford.update(loss=VALUES)
    welford.reset()
    found = welford.compute()
    assert float(found.mean) == 0
    assert jnp.isnan(found.standard_deviation)
    assert jax.tree.structure(found).num_leaves == 3


def make() -> nnx.MultiMetric:
    return nnx.MultiMetric(
        accuracy=nnx.metrics.Accuracy(),
        loss=nnx.metrics.Average("loss"),
        spread=nnx.metrics.Welford("loss"),
    )


LOGITS = np.random.default_rng(0).normal(size=(4, 5, 3)).astype(np.float32)
LABELS = np.random.default_rng(1).integers(0, 3, (4, 5)).astype(np.int32)
LOSS = np.random.default_rng(2).normal(size=(4, 5)).astype(np.float32)


def update(metrics: nnx.MultiMetric, logits: Any, labels: Any, loss: Any) -> None:
    metrics.update(logits=logits, labels=labels, loss=loss)


@pytest.mark.parametrize("way", ["eager", "jit", "scan"])
def test_multi_metric_gathers_several_under_transforms(way: str) -> None:
    metrics = make()
    if way == "scan":
        step = nnx.scan(
            lambda metrics, *batch: (metrics, update(metrics, *batch))[0],
            in_axes=(nnx.Carry, 0, 0, 0),
            out_axes=nnx.Carry,
        )
        step(metrics, jnp.asarray(LOGITS), jnp.asarray(LABELS), jnp.asarray(LOSS))
    else:
        step = nnx.jit(update) if way == "jit" else update
        for batch in zip(LOGITS, LABELS, LOSS, strict=True):
            step(metrics, *map(jnp.asarray, batch))
    found = metrics.compute()
    assert list(found) == ["accuracy", "loss", "spread"]
    np.testing.assert_allclose(found["accuracy"], (LOGITS.argmax(-1) == LABELS).mean(), rtol=1e-6)
    np.testing.assert_allclose(found["loss"], LOSS.mean(), rtol=1e-5)
    np.testing.assert_allclose(found["spread"].standard_deviation, LOSS.std(), rtol=1e-5)


def test_jit_of_an_update_traces_once() -> None:
    traces = []

    @nnx.jit
    def step(metrics: nnx.MultiMetric, *batch: jax.Array) -> None:
        traces.append(1)
        update(metrics, *batch)

    metrics = make()
    for batch in zip(LOGITS, LABELS, LOSS, strict=True):
        step(metrics, *map(jnp.asarray, batch))
    metrics.reset()
    step(metrics, LOGITS[0], LABELS[0], LOSS[0])
    assert len(traces) == 1


def test_state_is_of_the_kind_metric_state() -> None:
    metrics = make()
    graphdef, state, rest = metrics.split(nnx.metrics.MetricState, ...)
    assert len(list(state.flat_state())) == 7
    assert not list(rest.flat_state())
    copy = nnx.merge(graphdef, state)
    copy.update(logits=LOGITS[0], labels=LABELS[0], loss=LOSS[0])
    assert int(metrics.loss.count[...]) == 0
    assert int(copy.loss.count[...]) == 5


def test_names_of_methods_are_refused() -> None:
    with pytest.raises(ValueError, match="a metric named 'reset', which is a method"):
        nnx.MultiMetric(reset=nnx.metrics.Average())


@pytest.mark.parametrize("method", ["reset", "update", "compute"])
def test_a_metric_says_what_it_does_not_define(method: str) -> None:
    class Empty(nnx.Metric):
        pass

    with pytest.raises(NotImplementedError, match=rf"Empty defines no `{method}"):
        getattr(Empty(), method)()

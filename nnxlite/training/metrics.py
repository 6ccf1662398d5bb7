"""Metrics: numbers gathered over many batches, kept as Variables of an object.

A metric is updated in place, also under `nnx.jit` and `nnx.scan`: its state is of the kind
`MetricState`, and keeps its shape and dtype. `compute` gives the result so far, `reset` starts
anew.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from nnxlite._core.filters import Filter
from nnxlite._core.module import Pytree
from nnxlite._core.split import split
from nnxlite._core.variable import Variable

__all__ = [
    "Accuracy",
    "Average",
    "Metric",
    "MetricState",
    "MultiMetric",
    "Statistics",
    "Welford",
]


class MetricState(Variable[Any]):
    """The kind of the Variables in which metrics keep what they have gathered."""


class Metric(Pytree):
    """What a metric has to do: override `reset`, `update` and `compute`.

    Example:
      >>> class Largest(nnx.Metric):
      ...     def __init__(self):
      ...         self.value = nnx.metrics.MetricState(-jnp.inf)
      ...
      ...     def reset(self):
      ...         self.value[...] = -jnp.inf
      ...
      ...     def update(self, *, values, **_):
      ...         self.value[...] = jnp.maximum(self.value[...], values.max())
      ...
      ...     def compute(self):
      ...         return self.value[...]
      >>> largest = Largest()
      >>> largest.update(values=jnp.array([1.0, 5.0]))
      >>> largest.update(values=jnp.array([2.0, 3.0]))
      >>> float(largest.compute())
      5.0
    """

    def reset(self) -> None:
        """Forgets all updates, in place."""
        raise NotImplementedError(f"{type(self).__name__} defines no `reset()`.")

    def update(self, **kwargs: Any) -> None:
        """Takes in the values of one batch, in place."""
        raise NotImplementedError(f"{type(self).__name__} defines no `update(**kwargs)`.")

    def compute(self) -> Any:
        """Returns the metric of all updates since the last reset."""
        raise NotImplementedError(f"{type(self).__name__} defines no `compute()`.")

    def split(self, *filters: Filter) -> Any:
        """Returns what `nnx.split(metric, *filters)` does."""
        return split(self, *filters)


class Average(Metric):
    """The mean of all values.

    Args:
      argname: The keyword under which `update` is given the values.

    Attributes:
      total: `MetricState`, float32: the sum of the values.
      count: `MetricState`, int32: how many there were.

    Example:
      >>> loss = nnx.metrics.Average("loss")
      >>> loss.update(loss=jnp.array([1.0, 2.0]))
      >>> loss.update(loss=6.0)
      >>> float(loss.compute())
      3.0
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.total = MetricState(jnp.zeros((), jnp.float32))
        self.count = MetricState(jnp.zeros((), jnp.int32))

    def reset(self) -> None:
        """Forgets all values, in place."""
        self.total[...] = jnp.zeros((), jnp.float32)
        self.count[...] = jnp.zeros((), jnp.int32)

    def update(self, mask: ArrayLike | None = None, **kwargs: Any) -> None:
        """Takes in values, in place.

        Args:
          mask: Which of the values count: those where it is not zero. Broadcast against the values:
            a mask of shape `(batch, 1)` keeps or drops whole rows.
          **kwargs: The values under the name `argname`, a number or array. Others are ignored.

        Raises:
          TypeError: The values are missing.
          ValueError: The mask does not fit the values, or these are one number.
        """
        values = _values(self, kwargs)
        if mask is not None and isinstance(values, int | float):
            raise ValueError(
                f"{type(self).__name__} was given a mask for {self.argname}={values!r}. Expected "
                "an array that the mask chooses from."
            )
        self._add(jnp.asarray(values), None if mask is None else jnp.asarray(mask))

    def compute(self) -> jax.Array:
        """Returns the mean of all values, nan if there were none."""
        return self.total[...] / self.count[...].astype(jnp.float32)

    def _add(self, values: jax.Array, mask: jax.Array | None) -> None:
        values = values.astype(self.total.dtype)
        if mask is None:
            total, count = values.sum(), jnp.asarray(values.size, self.count.dtype)
        else:
            try:
                shape = jnp.broadcast_shapes(values.shape, mask.shape)
            except ValueError:
                raise ValueError(
                    f"{type(self).__name__} found a mask of shape {mask.shape} for values of shape "
                    f"{values.shape}. Expected shapes that broadcast."
                ) from None
            kept = jnp.broadcast_to(mask.astype(bool), shape)
            total = jnp.broadcast_to(values, shape).sum(where=kept)
            count = kept.sum(dtype=self.count.dtype)
        self.total[...] += total
        self.count[...] += count


class Accuracy(Average):
    """The share of predictions that are right.

    Args:
      threshold: From which score on a prediction is positive, if there are two classes and one
        score. By default the class with the highest of several scores is predicted.

    Example:
      >>> accuracy = nnx.metrics.Accuracy()
      >>> scores = jnp.array([[0.9, 0.1], [0.2, 0.8]])
      >>> accuracy.update(logits=scores, labels=jnp.array([0, 0]))
      >>> float(accuracy.compute())
      0.5
    """

    def __init__(self, threshold: float | None = None) -> None:
        if threshold is not None and not isinstance(threshold, int | float):
            raise TypeError(
                f"Accuracy found a threshold of type {type(threshold).__name__}. Expected a float."
            )
        super().__init__()
        self.threshold = threshold

    def update(  # type: ignore[override]  # these keywords are required
        self,
        *,
        logits: jax.Array,
        labels: jax.Array,
        mask: ArrayLike | None = None,
        **_: Any,
    ) -> None:
        """Takes in the predictions of one batch, in place.

        Args:
          logits: `(..., classes)`: the scores; with a threshold, of the shape of `labels`.
          labels: The right classes, integers; with a threshold, what is more than zero is positive.
          mask: Which of the labels count; see `Average.update`.

        Raises:
          ValueError: The shapes do not go together, or the labels are no integers.
        """
        logits, labels = jnp.asarray(logits), jnp.asarray(labels)
        expected = labels.ndim + (self.threshold is None)
        if logits.ndim != expected:
            raise ValueError(
                f"Accuracy(threshold={self.threshold}) found logits of shape {logits.shape} and "
                f"labels of shape {labels.shape}. Expected logits of {expected} axes: "
                + ("one more than the labels have." if self.threshold is None else "as labels.")
            )
        if not (jnp.issubdtype(labels.dtype, jnp.integer) or labels.dtype == jnp.bool_):
            raise ValueError(f"Accuracy found labels of {labels.dtype}. Expected integers.")
        if self.threshold is not None:
            right = (logits >= jnp.asarray(self.threshold, logits.dtype)) == (labels > 0)
        else:
            right = logits.argmax(axis=-1).astype(jnp.int32) == labels.astype(jnp.int32)
        self._add(right, None if mask is None else jnp.asarray(mask))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Statistics:
    """Mean and spread of a stream of values: the result of `Welford`.

    Attributes:
      mean: The mean.
      standard_error_of_mean: The standard deviation divided by the root of the number of values.
      standard_deviation: The root of the mean squared distance from the mean.
    """

    mean: jax.Array
    standard_error_of_mean: jax.Array
    standard_deviation: jax.Array


class Welford(Metric):
    """Mean and standard deviation of all values, without keeping them.

    It stays exact where the mean is large, for it never squares the values themselves.

    Args:
      argname: The keyword under which `update` is given the values.

    Attributes:
      count: `MetricState`, int32: how many values there were.
      mean: `MetricState`, float32: their mean.
      m2: `MetricState`, float32: the sum of their squared distances from it.

    Example:
      >>> loss = nnx.metrics.Welford()
      >>> loss.update(values=jnp.array([1.0, 3.0]))
      >>> found = loss.compute()
      >>> float(found.mean), float(found.standard_deviation)
      (2.0, 1.0)

    Source: Chan, Golub and LeVeque 1983, doi:10.1080/00031305.1983.10483115, for whole batches.
    """

    def __init__(self, argname: str = "values") -> None:
        self.argname = argname
        self.count = MetricState(jnp.zeros((), jnp.int32))
        self.mean = MetricState(jnp.zeros((), jnp.float32))
        self.m2 = MetricState(jnp.zeros((), jnp.float32))

    def reset(self) -> None:
        """Forgets all values, in place."""
        self.count[...] = jnp.zeros((), jnp.int32)
        self.mean[...] = jnp.zeros((), jnp.float32)
        self.m2[...] = jnp.zeros((), jnp.float32)

    def update(self, **kwargs: Any) -> None:
        """Takes in values, in place.

        Args:
          **kwargs: The values under the name `argname`, a number or array. Others are ignored.

        Raises:
          TypeError: The values are missing.
        """
        values = jnp.asarray(_values(self, kwargs)).astype(self.mean.dtype)
        if not values.size:
            return
        before = self.count[...].astype(self.mean.dtype)
        count = before + values.size
        delta = values.mean() - self.mean[...]
        self.count[...] += jnp.asarray(values.size, self.count.dtype)
        self.mean[...] += delta * values.size / count
        self.m2[...] += values.var() * values.size + delta**2 * values.size * before / count

    def compute(self) -> Statistics:
        """Returns mean and spread; what needs values is nan if there were none."""
        count = self.count[...].astype(self.mean.dtype)
        deviation = jnp.sqrt(self.m2[...] / count)
        return Statistics(self.mean[...], deviation / jnp.sqrt(count), deviation)


class MultiMetric(Metric):
    """Several metrics that are updated together.

    Args:
      **metrics: The metrics, which become attributes of these names.

    Raises:
      ValueError: A name is that of a method.

    Example:
      >>> metrics = nnx.MultiMetric(
      ...     accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss")
      ... )
      >>> metrics.update(logits=jnp.eye(2), labels=jnp.array([0, 1]), loss=jnp.ones(2))
      >>> {name: float(value) for name, value in metrics.compute().items()}
      {'accuracy': 1.0, 'loss': 1.0}
    """

    def __init__(self, **metrics: Any) -> None:
        taken = [name for name in metrics if hasattr(type(self), name)]
        if taken:
            raise ValueError(
                f"MultiMetric found a metric named {taken[0]!r}, which is a method. Choose another "
                "name."
            )
        self._metric_names = tuple(metrics)
        for name, metric in metrics.items():
            setattr(self, name, metric)

    def reset(self) -> None:
        """Forgets all updates of all metrics, in place."""
        for name in self._metric_names:
            getattr(self, name).reset()

    def update(self, **updates: Any) -> None:
        """Hands all values to each metric, which takes those that it knows.

        Args:
          **updates: The values of all metrics.
        """
        for name in self._metric_names:
            getattr(self, name).update(**updates)

    def compute(self) -> dict[str, Any]:
        """Returns the result of each metric by its name."""
        return {name: getattr(self, name).compute() for name in self._metric_names}


def _values(metric: Any, given: dict[str, Any]) -> Any:
    if metric.argname not in given:
        raise TypeError(
            f"{type(metric).__name__}.update expected the keyword {metric.argname!r}, found "
            f"{', '.join(given) or 'nothing'}."
        )
    return given[metric.argname]

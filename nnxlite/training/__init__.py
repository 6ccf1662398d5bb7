"""What training loops need beside a model."""

from nnxlite.training import metrics, optimizer
from nnxlite.training.metrics import Metric, MultiMetric
from nnxlite.training.optimizer import ModelAndOptimizer, Optimizer

__all__ = ["Metric", "ModelAndOptimizer", "MultiMetric", "Optimizer", "metrics", "optimizer"]

"""What training loops need beside a model."""

from nnxlite.training import optimizer
from nnxlite.training.optimizer import ModelAndOptimizer, Optimizer

__all__ = ["ModelAndOptimizer", "Optimizer", "optimizer"]

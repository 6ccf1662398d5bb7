"""An optimizer trains as that of flax.nnx."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx as peer

import nnxlite as nnx

pytestmark = [
    pytest.mark.standard_promotion,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

X = jnp.asarray(np.random.default_rng(0).normal(size=(16, 3)).astype(np.float32))
Y = (X.sum(1, keepdims=True) > 0).astype(jnp.float32)

TRANSFORMS: dict[str, Callable[[], Any]] = {
    "adam": lambda: optax.adam(1e-2),
    "adamw, clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2)),
    "momentum": lambda: optax.sgd(optax.linear_schedule(0.1, 0.0, 5), momentum=0.9, nesterov=True),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.lion)(learning_rate=1e-3),
}


def train(lib: Any, make_optimizer: Callable[[Any], Any], steps: int = 4) -> Any:
    """Trains a small network with all the layers there are; returns model, optimizer, losses."""

    class Net(lib.Module):
        def __init__(self, rngs: Any) -> None:
            self.hidden = lib.Linear(3, 8, rngs=rngs)
            self.norm = lib.BatchNorm(8, rngs=rngs)
            self.dropout = lib.Dropout(0.2, rngs=rngs)
            self.out = lib.Linear(8, 1, rngs=rngs)

        def __call__(self, x: jax.Array) -> jax.Array:
            return self.out(self.dropout(lib.relu(self.norm(self.hidden(x)))))

    model = Net(lib.Rngs(params=0, dropout=1))
    optimizer = make_optimizer(model)

    @lib.jit
    def step(model: Any, optimizer: Any) -> jax.Array:
        loss, grads = lib.value_and_grad(lambda model: ((model(X) - Y) ** 2).mean())(model)
        optimizer.update(model, grads)
        return loss

    losses = [float(step(model, optimizer)) for _ in range(steps)]
    return model, optimizer, losses


def leaves(lib: Any, tree: Any) -> dict[tuple[Any, ...], np.ndarray]:
    found = {}
    for path, variable in lib.to_flat_state(lib.state(tree, lib.Not(lib.RngKey))):
        found[tuple(path)] = np.asarray(variable.get_value())
    return found


@pytest.mark.parametrize("name", TRANSFORMS)
def test_training_is_that_of_flax(name: str) -> None:
    results = [
        train(lib, lambda model, lib=lib: lib.Optimizer(model, TRANSFORMS[name](), wrt=lib.Param))
        for lib in (nnx, peer)
    ]
    np.testing.assert_allclose(results[0][2], results[1][2], rtol=1e-4)
    for part in (0, 1):
        ours, theirs = leaves(nnx, results[0][part]), leaves(peer, results[1][part])
        assert ours.keys() == theirs.keys()
        for path, value in ours.items():
            assert value.dtype == theirs[path].dtype, path
            np.testing.assert_allclose(value, theirs[path], 2e-3, 1e-5, err_msg=str(path))

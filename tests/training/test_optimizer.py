"""Optimizer, against Optax run by hand on plain dicts of arrays."""

import gc
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import nnxlite as nnx

pytestmark = pytest.mark.standard_promotion

X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Net(nnx.Module):
    """Two layers in a list and a normalization: nested paths, several kinds."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        self.layers = [nnx.Linear(3, 4, rngs=rngs), nnx.Linear(4, 2, rngs=rngs)]
        self.norm = nnx.BatchNorm(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.layers[1](nnx.relu(self.norm(self.layers[0](x))))


def loss_of(model: Net) -> jax.Array:
    return (model(X) ** 2).mean()


def pull_to_one(params: Any) -> Any:
    """Returns the gradient of `((params - 1) ** 2).sum() / 2`."""
    return jax.tree.map(lambda x: x - 1.0, params)


def is_bias(tree: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "bias" in str(path), tree)


def labels(tree: Any) -> Any:
    return jax.tree.map(lambda bias: "bias" if bias else "other", is_bias(tree))


TRANSFORMS: dict[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adamw with a mask": lambda: optax.adamw(
        1e-2, mask=lambda p: jax.tree.map(lambda x: x.ndim > 1, p)
    ),
    "clip and schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.1), optax.adam(optax.linear_schedule(0.0, 1e-2, 3))
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "multi_transform": lambda: optax.multi_transform(
        {"bias": optax.sgd(0.1), "other": optax.adam(1e-2)}, labels
    ),
    "masked": lambda: optax.masked(optax.adam(1e-2), is_bias),
    "schedule-free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "factored": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=2),
    "flattened": lambda: optax.flatten(optax.adam(1e-2)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_training_is_that_of_optax(name: str) -> None:
    model, tx = Net(nnx.Rngs(0)), TRANSFORMS[name]()
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    arrays = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    opt_state = tx.init(arrays)
    for _ in range(3):
        optimizer.update(model, pull_to_one(nnx.state(model, nnx.Param)))
        updates, opt_state = tx.update(pull_to_one(arrays), opt_state, arrays)
        arrays = optax.apply_updates(arrays, updates)
    found = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), found, arrays)
    assert int(optimizer.step[...]) == 3


def test_a_line_search_is_given_value_and_value_fn() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=40)
    optimizer = nnx.Optimizer(model, optax.chain(optax.sgd(4.0), search), wrt=nnx.Param)

    def loss_of(model: nnx.Linear) -> jax.Array:
        return (model(jnp.ones((1, 2))) ** 2).sum()

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear]) -> jax.Array:
        graphdef, _ = nnx.split(model)
        loss, grads = nnx.value_and_grad(loss_of)(model)

        def value_fn(params: nnx.State) -> jax.Array:
            return loss_of(nnx.merge(graphdef, params))

        optimizer.update(model, grads, value=loss, grad=grads, value_fn=value_fn)
        return loss

    assert step(model, optimizer) > step(model, optimizer)


def test_the_state_is_kept_as_variables_of_two_kinds() -> None:
    optimizer = nnx.Optimizer(Net(nnx.Rngs(0)), optax.adam(1e-2), wrt=nnx.Param)
    adam = optimizer.opt_state[0]
    assert isinstance(adam.count, nnx.OptArray)
    assert isinstance(adam.mu, nnx.State)
    assert isinstance(adam.mu["layers"][0]["kernel"], nnx.OptVariable)
    paths = nnx.state(optimizer, nnx.OptState).flat_state().paths
    assert ("step",) in paths
    assert ("opt_state", 0, "nu", "norm", "scale") in paths


def test_state_of_a_parameter_has_its_metadata() -> None:
    class Layer(nnx.Module):
        def __init__(self) -> None:
            self.a = nnx.Param(jnp.ones((2, 4)), out_sharding=("data", None), note="a")
            self.b = nnx.Param(jnp.ones(2), out_sharding=("x",), optimizer_sharding=("y",))

    mu = nnx.Optimizer(Layer(), optax.adam(1e-2), wrt=nnx.Param).opt_state[0].mu
    assert mu["a"].get_metadata() == {"out_sharding": ("data", None), "note": "a"}
    assert mu["b"].get_metadata() == {"out_sharding": ("y",)}


def test_hyperparameters_can_be_set() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=1.0)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    optimizer.opt_state.hyperparams["learning_rate"][...] = 0.25
    updates = optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model)))
    assert updates["bias"].tolist() == [-0.25]


def test_wrt_chooses_what_is_trained() -> None:
    model = Net(nnx.Rngs(0))
    wrt = nnx.All(nnx.Param, nnx.PathContains("norm"))
    before = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=wrt)
    updates = optimizer.update(model, pull_to_one(nnx.state(model, nnx.Param)))
    assert [path[0] for path, _ in updates.flat_state()] == ["norm", "norm"]
    after = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    np.testing.assert_array_equal(after["layers"][0]["kernel"], before["layers"][0]["kernel"])
    assert (after["norm"]["bias"] != before["norm"]["bias"]).all()


def test_the_dtype_of_a_parameter_is_kept() -> None:
    model = nnx.Linear(2, 1, param_dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    grads = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), nnx.state(model))
    assert optimizer.update(model, grads)["kernel"].dtype == jnp.float32
    assert model.kernel.dtype == jnp.bfloat16


def test_equal_optimizers_do_not_retrace() -> None:
    traces = []

    @nnx.jit
    def step(model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear]) -> None:
        traces.append(1)
        grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
        optimizer.update(model, grads)

    for seed in range(3):
        model = nnx.Linear(2, 1, rngs=nnx.Rngs(seed))
        optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
        step(model, optimizer)
        step(model, optimizer)
    assert len(traces) == 1


def test_a_donated_step_works_whatever_the_state_starts_from() -> None:
    # schedule_free starts from the parameters themselves: donated twice if they were not copied.
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.contrib.schedule_free_sgd(0.1), wrt=nnx.Param)

    @nnx.jit(donate_argnums=(0, 1))
    def step(model: nnx.Linear, optimizer: nnx.Optimizer[nnx.Linear]) -> None:
        grads = nnx.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
        optimizer.update(model, grads)

    step(model, optimizer)
    step(model, optimizer)
    assert int(optimizer.step[...]) == 2


def test_gradients_may_be_an_object() -> None:
    model, other = (nnx.Linear(2, 1, rngs=nnx.Rngs(0)) for _ in range(2))
    grads = jax.grad(lambda model: model(jnp.ones((1, 2))).sum())(model)
    nnx.Optimizer(model, optax.sgd(0.5), wrt=nnx.Param).update(model, grads)
    nnx.Optimizer(other, optax.sgd(0.5), wrt=nnx.Param).update(other, nnx.state(grads))
    np.testing.assert_array_equal(model.kernel[...], other.kernel[...])
    assert model.bias[...].tolist() == [-0.5]


def refused(change: Callable[[Any], Any], error: type[Exception], text: str) -> None:
    """Asserts that an update with changed gradients raises and leaves model and state alone."""
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    grads = nnx.state(model, nnx.Param)
    before = nnx.to_pure_dict(nnx.state((model, optimizer)))
    with pytest.raises(error, match=text):
        optimizer.update(model, change(grads))
    after = nnx.to_pure_dict(nnx.state((model, optimizer)))
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_a_missing_gradient_is_named() -> None:
    text = r"no gradient for model\.layers\[0\]\.bias.*nnx\.DiffState\(0, wrt\)"
    refused(lambda g: g.filter(nnx.PathContains("norm")), nnx.errors.StructureError, text)


def test_a_gradient_of_another_shape_is_named() -> None:
    def transposed(grads: nnx.State) -> nnx.State:
        return jax.tree.map(jnp.transpose, grads)

    text = r"gradient for model\.layers\[0\]\.kernel has shape \(4, 3\), expected \(3, 4\)"
    refused(transposed, nnx.errors.StructureError, text)


def test_gradients_alone_need_an_optimizer_that_has_the_model() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(TypeError, match=r"update\(model, grads\).*nnx\.ModelAndOptimizer"):
        optimizer.update(nnx.state(model))


def test_an_optimizer_of_another_trace_level_is_refused() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(0.1), wrt=nnx.Param)

    def update(grads: nnx.State) -> None:
        optimizer.update(model, grads)

    with pytest.raises(nnx.errors.TraceLevelError, match="Cannot update the optimizer"):
        jax.jit(update)(nnx.state(model))
    assert int(optimizer.step[...]) == 0


def test_model_and_optimizer_trains_its_model() -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.ModelAndOptimizer(model, optax.adam(1e-2))

    @nnx.jit
    def step(optimizer: nnx.ModelAndOptimizer[Net]) -> jax.Array:
        loss, grads = nnx.value_and_grad(loss_of)(optimizer.model)
        optimizer.update(grads)
        return loss

    losses = [float(step(optimizer)) for _ in range(5)]
    assert optimizer.model is model
    assert losses[-1] < losses[0]


def test_split_and_merge_keep_an_optimizer_whole() -> None:
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    grads = nnx.grad(loss_of)(model)
    optimizer.update(model, grads)
    copied_model, copy = nnx.clone((model, optimizer))
    optimizer.update(model, grads)
    copy.update(copied_model, grads)
    ours, theirs = nnx.to_pure_dict(nnx.state(model)), nnx.to_pure_dict(nnx.state(copied_model))
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)
    assert int(copy.step[...]) == 2


def test_nothing_of_the_model_is_kept() -> None:
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    gc.collect()
    assert not any(x is model for x in gc.get_referents(optimizer.__dict__))
    assert "model" not in vars(optimizer)

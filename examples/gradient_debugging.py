"""Finds the layer that makes gradients explode, by the gradients that come back to each layer.

One layer of a deep net starts much too large. All one sees is that the loss becomes `nan`. One call
of `nnx.capture_gradients` tells which layer it is: the gradient at its input is much larger than
the one at its output, and that of all others is not. With the layer scaled back, the net learns.

    python examples/gradient_debugging.py              # a few seconds
    python examples/gradient_debugging.py --layer 3    # another layer
"""

import argparse

import jax
import jax.numpy as jnp

import nnxlite as nnx

WIDTH = 64
BATCH = 256
RIGHT, TOO_LARGE = 1.4, 20.0  # of kernels; relu halves the signal, so 1.4 keeps its size


class Layer(nnx.Module):
    """Half of the signal goes around, half of it through: on average it keeps its size."""

    def __init__(self, scale: float, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.linear.kernel[...] *= scale

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, WIDTH)
        return 0.7 * (x + self.linear(nnx.relu(x)))


class DeepNet(nnx.Module):
    """A stack of layers, one of them too large, and a linear head."""

    def __init__(self, depth: int, too_large: int, *, rngs: nnx.Rngs) -> None:
        self.layers = [
            Layer(TOO_LARGE if n == too_large else RIGHT, rngs=rngs) for n in range(depth)
        ]
        self.head = nnx.Linear(WIDTH, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, WIDTH)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)[:, 0]  # (batch,)


def loss_fn(model: DeepNet, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((model(x) - y) ** 2)


@nnx.jit
def train_step(model: DeepNet, x: jax.Array, y: jax.Array) -> jax.Array:
    loss, gradients = nnx.value_and_grad(loss_fn)(model, x, y)
    params = nnx.state(model, nnx.Param)
    nnx.update(model, jax.tree.map(lambda p, g: p - 0.002 * g, params, gradients))
    return loss


def train(model: DeepNet, x: jax.Array, y: jax.Array, steps: int) -> tuple[float, float]:
    """Returns the losses before and after the steps."""
    first = loss_fn(model, x, y)
    for _ in range(steps):
        train_step(model, x, y)
    return float(first), float(loss_fn(model, x, y))


def norms_of_gradients(model: DeepNet, x: jax.Array, y: jax.Array) -> list[float]:
    """Returns the norm of the gradient at the output of each layer."""
    observe = nnx.capture_gradients(loss_fn, method_filter=Layer)
    _, _, gradients = nnx.jit(observe)(model, x, y)
    return [
        float(jnp.linalg.norm(gradients["layers"][n]["__call__"][...]))  # of (batch, WIDTH)
        for n in range(len(model.layers))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="training steps (default: 200)")
    parser.add_argument("--depth", type=int, default=16, help="number of layers (default: 16)")
    parser.add_argument("--layer", type=int, default=11, help="the one too large (default: 11)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 1 <= options.layer < options.depth:
        parser.error(f"--layer is {options.layer}, expected 1 to {options.depth - 1}")
    if options.steps < 1:
        parser.error(f"--steps is {options.steps}, expected 1 or more")

    rngs = nnx.Rngs(options.seed)
    x = rngs.normal((BATCH, WIDTH))
    y = jnp.sin(x[:, 0]) + x[:, 1]  # (batch,)
    model = DeepNet(options.depth, options.layer, rngs=rngs)

    first, last = train(nnx.clone(model), x, y, options.steps)
    print(f"as it is: loss {first:.3g}, after {options.steps} steps {last:.3g}\n")

    norms = norms_of_gradients(model, x, y)
    print("layer   gradient at its output   at its input, times")
    growths = [0.0]
    for n in range(1, options.depth):
        growths.append(norms[n - 1] / norms[n])
        print(f"{n:5d}   {norms[n]:22.3g}   {growths[n]:6.2f}  {'#' * round(4 * growths[n])}")
    worst = max(range(options.depth), key=lambda n: growths[n])
    print(f"\nmodel.layers[{worst}] makes the gradient {growths[worst]:.1f} times as large")

    model.layers[worst].linear.kernel[...] *= RIGHT / TOO_LARGE
    first, last = train(model, x, y, options.steps)
    print(f"scaled back: loss {first:.3g}, after {options.steps} steps {last:.3g}")


if __name__ == "__main__":
    main()

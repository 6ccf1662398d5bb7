"""Trains a small classifier on scikit-learn's handwritten digits and shows what it learned.

The data are 1,797 grey images of 8 x 8 pixels that ship inside scikit-learn, so nothing is
downloaded. The model is a perceptron with batch normalization and dropout: the three kinds of
state that a training step moves (parameters, running statistics, random streams) are all there.

    python examples/digits.py                 # about 20 seconds on two cores
    python examples/digits.py --steps 2       # a quick look
"""

import argparse
import sys
import time
from collections.abc import Iterator

import jax
import numpy as np

import nnxlite as nnx

try:
    import optax
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ModuleNotFoundError as error:
    sys.exit(
        f"digits.py needs the package {error.name!r}, which is missing. "
        "Install the extra that has it: pip install 'nnxlite[examples]'"
    )

PIXELS = 64  # an 8 x 8 image, flat
CLASSES = 10
TEST_IMAGES = 360
SHADES = " .:-=+*#%@"


class Block(nnx.Module):
    """A linear layer, normalized over the batch, with some of its outputs dropped."""

    def __init__(self, features_in: int, features_out: int, *, rngs: nnx.Rngs) -> None:
        self.linear = nnx.Linear(features_in, features_out, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(features_out, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, features_in)
        return self.dropout(nnx.relu(self.norm(self.linear(x))))  # (batch, features_out)


class Classifier(nnx.Module):
    """Two blocks and a linear head that gives one score to each digit."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = Block(PIXELS, 256, rngs=rngs)
        self.second = Block(256, 128, rngs=rngs)
        self.head = nnx.Linear(128, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:  # (batch, 64)
        return self.head(self.second(self.first(images)))  # (batch, 10)


@nnx.jit
def train_step(
    model: Classifier, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array
) -> jax.Array:
    """Moves the model and the optimizer one step, in place; returns the loss before it."""

    def loss_of(model: Classifier) -> jax.Array:
        scores = model(images)  # (batch, 10)
        return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean()

    loss, grads = nnx.value_and_grad(loss_of)(model)
    optimizer.update(model, grads)
    return loss


@nnx.jit
def predict(model: Classifier, images: jax.Array) -> jax.Array:
    """Returns the digit with the highest score for each image."""
    return model(images).argmax(axis=-1)  # (batch,)


def batches(
    images: np.ndarray, labels: np.ndarray, size: int, *, seed: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields shuffled batches for ever, each image once per pass."""
    order = np.random.default_rng(seed)
    while True:
        shuffled = order.permutation(len(images))
        for start in range(0, len(images) - size + 1, size):
            chosen = shuffled[start : start + size]
            yield images[chosen], labels[chosen]


def show_what_it_learned(images: np.ndarray, labels: np.ndarray, predicted: np.ndarray) -> None:
    """Prints the accuracy of each digit, the weakest one's mistakes, and an image it got wrong."""
    confusion = np.zeros((CLASSES, CLASSES), int)  # (true digit, predicted digit)
    np.add.at(confusion, (labels, predicted), 1)
    accuracy = confusion.diagonal() / confusion.sum(axis=1)
    print("digit     " + "".join(f"{digit:6d}" for digit in range(CLASSES)))
    print("accuracy  " + "".join(f"{100 * share:5.0f}%" for share in accuracy))

    wrong = np.flatnonzero(predicted != labels)
    if not len(wrong):
        return
    weakest = int(accuracy.argmin())
    mistakes = [
        f"{count} x {digit}"
        for digit, count in enumerate(confusion[weakest])
        if count and digit != weakest
    ]
    print(f"hardest digit: {weakest}, taken for {', '.join(mistakes)}")

    first = next(i for i in wrong if labels[i] == weakest)
    print(f"for example this {weakest}, which it reads as {predicted[first]}:")
    for row in images[first].reshape(8, 8):
        print("  " + "".join(2 * SHADES[int(9 * shade)] for shade in row))


def read_arguments(train_images: int) -> argparse.Namespace:
    """Reads the command line; a bad value ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="digits.py", description="Train a classifier of handwritten digits."
    )
    parser.add_argument("--steps", type=int, default=600, help="training steps (default 600)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and order")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step (default 128)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="Adam's (default 0.002)")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error(f"--steps is {arguments.steps}, expected 1 or more")
    if not 0 <= arguments.seed < 2**32:
        parser.error(f"--seed is {arguments.seed}, expected 0 to {2**32 - 1}")
    if not 2 <= arguments.batch_size <= train_images:
        parser.error(
            f"--batch-size is {arguments.batch_size}, expected 2 to {train_images} "
            "(the images to train on)"
        )
    if not 0 < arguments.learning_rate < float("inf"):
        parser.error(f"--learning-rate is {arguments.learning_rate}, expected more than 0")
    return arguments


def main() -> None:
    digits = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        (digits.data / 16).astype(np.float32),  # (1797, 64), from 0 to 1
        digits.target.astype(np.int32),  # (1797,)
        test_size=TEST_IMAGES,
        stratify=digits.target,
        random_state=0,
    )
    arguments = read_arguments(len(train_images))

    model = Classifier(rngs=nnx.Rngs(arguments.seed))
    optimizer = nnx.Optimizer(model, optax.adam(arguments.learning_rate), wrt=nnx.Param)
    print(model)

    start = time.perf_counter()
    stream = batches(train_images, train_labels, arguments.batch_size, seed=arguments.seed)
    progress = tqdm(range(arguments.steps), desc="training", unit="step")
    for step in progress:
        loss = train_step(model, optimizer, *next(stream))
        if step % 20 == 0:
            progress.set_postfix(loss=f"{float(loss):.3f}", refresh=False)
    seconds = time.perf_counter() - start

    model.eval()  # running statistics instead of the batch's, nothing dropped
    predicted = np.asarray(predict(model, test_images))
    show_what_it_learned(test_images, test_labels, predicted)
    accuracy = (predicted == test_labels).mean()
    print(
        f"test accuracy: {100 * accuracy:.1f} % of {len(test_labels)} unseen images "
        f"after {arguments.steps} steps in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()

"""Trains a small conv net on scikit-learn's handwritten digits and shows what it learned.

The data are 1,797 grey images of 8 x 8 pixels that ship inside scikit-learn, so nothing is
downloaded. The model has batch normalization and dropout: the three kinds of state that a training
step moves (parameters, running statistics, random streams) are all there.

At the end, one batch runs again with its activations and their gradients captured. They go, with
the model, into `digits_report.html`: open it in a browser and unfold what you want to see.

    python examples/digits.py                 # less than a minute on two cores
    python examples/digits.py --steps 2       # a quick look
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
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

CLASSES = 10
TEST_IMAGES = 360
REPORTED_IMAGES = 8
SHADES = " .:-=+*#%@"


class Block(nnx.Module):
    """A convolution, normalized over the batch, of which every other row and column is kept."""

    def __init__(self, channels_in: int, channels_out: int, *, rngs: nnx.Rngs) -> None:
        self.conv = nnx.Conv(
            channels_in, channels_out, kernel_size=(3, 3), use_bias=False, rngs=rngs
        )
        self.norm = nnx.BatchNorm(channels_out, momentum=0.9, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, height, width, channels_in)
        x = nnx.relu(self.norm(self.conv(x)))  # (batch, height, width, channels_out)
        return nnx.max_pool(x, (2, 2), strides=(2, 2))  # (batch, height / 2, width / 2, ...)


class Classifier(nnx.Module):
    """Two blocks and a linear head that gives one score to each digit."""

    def __init__(self, *, rngs: nnx.Rngs) -> None:
        self.first = Block(1, 32, rngs=rngs)
        self.second = Block(32, 64, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)
        self.head = nnx.Linear(2 * 2 * 64, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:  # (batch, 8, 8, 1)
        features = self.second(self.first(images))  # (batch, 2, 2, 64)
        flat = features.reshape(len(features), -1)  # (batch, 256)
        return self.head(self.dropout(flat))  # (batch, 10)


def loss_of(model: Classifier, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the mean loss of a batch, and the scores."""
    scores = model(images)  # (batch, 10)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels).mean(), scores


@nnx.jit
def train_step(
    model: Classifier,
    optimizer: nnx.Optimizer,
    metrics: nnx.MultiMetric,
    images: jax.Array,
    labels: jax.Array,
) -> None:
    """Moves the model, the optimizer and the metrics one step, in place."""
    (loss, scores), grads = nnx.value_and_grad(loss_of, has_aux=True)(model, images, labels)
    optimizer.update(model, grads)
    metrics.update(loss=loss, logits=scores, labels=labels)


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
    for row in images[first, ..., 0]:
        print("  " + "".join(2 * SHADES[int(9 * shade)] for shade in row))


def write_report(path: Path, model: Classifier, images: np.ndarray, labels: np.ndarray) -> None:
    """Writes the model, the values inside it for a few images, and their gradients."""
    observe = nnx.jit(nnx.capture_gradients(loss_of, has_aux=True))
    (loss, scores), values, gradients = observe(model, images, labels)
    print("size of values and gradients inside the model, on average:")
    found = zip(values.flat_state(), gradients.flat_state(), strict=True)
    for (place, value), (_, gradient) in found:
        name = ".".join(map(str, place[:-1])) or "model"
        size, pull = (float(jnp.abs(x[...]).mean()) for x in (value, gradient))
        print(f"  {name:12s} {value.shape!s:16s} {size:9.2e}  {pull:9.2e}")
    nnx.save_html(
        path,
        f"The model after training. {len(images)} images have a mean loss of {loss:.2g}.",
        model,
        "These images",
        images[..., 0],  # (8, 8, 8)
        "What is inside the model for them: the output of each method",
        values,
        "The gradient of the mean loss with respect to each of these values",
        gradients,
        "The scores, a row for each image",
        scores,
    )
    print(f"report: {path}")


def read_arguments(train_images: int) -> argparse.Namespace:
    """Reads the command line; a bad value ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="digits.py", description="Train a classifier of handwritten digits."
    )
    parser.add_argument("--steps", type=int, default=400, help="training steps (default 400)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, dropout and order")
    parser.add_argument("--batch-size", type=int, default=128, help="images a step (default 128)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="Adam's (default 0.002)")
    parser.add_argument(
        "--report",
        type=Path,
        default=Path("digits_report.html"),
        metavar="PATH",
        help="where to write the report (default digits_report.html)",
    )
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
    if not arguments.report.absolute().parent.is_dir():
        parser.error(f"--report is {arguments.report}, but that folder is missing")
    if not 0 < arguments.learning_rate < float("inf"):
        parser.error(f"--learning-rate is {arguments.learning_rate}, expected more than 0")
    return arguments


def main() -> None:
    digits = load_digits()
    train_images, test_images, train_labels, test_labels = train_test_split(
        (digits.images[..., None] / 16).astype(np.float32),  # (1797, 8, 8, 1), from 0 to 1
        digits.target.astype(np.int32),  # (1797,)
        test_size=TEST_IMAGES,
        stratify=digits.target,
        random_state=0,
    )
    arguments = read_arguments(len(train_images))

    model = Classifier(rngs=nnx.Rngs(arguments.seed))
    optimizer = nnx.Optimizer(model, optax.adam(arguments.learning_rate), wrt=nnx.Param)
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"), accuracy=nnx.metrics.Accuracy())
    nnx.display(model)

    start = time.perf_counter()
    stream = batches(train_images, train_labels, arguments.batch_size, seed=arguments.seed)
    progress = tqdm(range(arguments.steps), desc="training", unit="step")
    for step in progress:
        train_step(model, optimizer, metrics, *next(stream))
        if step % 20 == 19:
            means = {name: f"{float(mean):.3f}" for name, mean in metrics.compute().items()}
            progress.set_postfix(means, refresh=False)
            metrics.reset()
    seconds = time.perf_counter() - start

    model.eval()  # running statistics instead of the batch's, nothing dropped
    predicted = np.asarray(predict(model, test_images))
    show_what_it_learned(test_images, test_labels, predicted)
    write_report(
        arguments.report, model, test_images[:REPORTED_IMAGES], test_labels[:REPORTED_IMAGES]
    )
    accuracy = (predicted == test_labels).mean()
    print(
        f"test accuracy: {100 * accuracy:.1f} % of {len(test_labels)} unseen images "
        f"after {arguments.steps} steps in {seconds:.1f} s"
    )


if __name__ == "__main__":
    main()

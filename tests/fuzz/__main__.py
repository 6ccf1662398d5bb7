"""The fuzzer: random programs through every nesting of transforms, for as long as wanted.

    python -m tests.fuzz --programs 20000 --seed 1 --resume

Each nesting (a transform alone, or with another one inside) gets a batch of programs per round, so
that all are walked evenly. A batch depends on the seed, the round and the nesting alone: it can be
run again with `--only`. What is done goes to a file, one line per batch; `--resume` goes on from
there. A failure is minimised, written down, and does not stop the run; the exit status tells.
"""

import argparse
import gc
import itertools
import random
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import jax

from tests.fuzz.batches import Batch, Outcome, run
from tests.fuzz.progress import Progress
from tests.transforms.cases import nestings
from tests.transforms.table import TRANSFORMS

CLEARED_EACH = 40  # batches; a few hundred compiled programs live in between
REPORTED_EACH = 10.0  # seconds


def main() -> int:
    options = parsed()
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    warnings.simplefilter("error")
    progress = Progress(options.file or default_file(options.seed), resume=options.resume)
    start, first, reported = time.monotonic(), progress.programs, 0.0
    for number, batch in enumerate(left(options, progress)):
        progress.add(batch, shown(run(batch, shrink=not progress.has_failed(batch.nesting))))
        if number % CLEARED_EACH == 0:
            jax.clear_caches()
            gc.collect()
        spent = time.monotonic() - start
        if spent - reported > REPORTED_EACH:
            reported = spent
            report(progress, (progress.programs - first) / spent)
        if progress.programs >= options.programs or spent > options.minutes * 60:
            break
    report(progress, (progress.programs - first) / (time.monotonic() - start))
    return 1 if progress.failures else 0


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=20_000, help="how many, all told")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after these")
    parser.add_argument("--seed", type=int, default=0, help="another one draws other programs")
    parser.add_argument("--batch", type=int, default=12, help="programs per nesting and round")
    parser.add_argument("--resume", action="store_true", help="go on from the progress file")
    parser.add_argument("--file", type=Path, help="the progress file")
    parser.add_argument("--only", help="one nesting, as in 'jit/vmap'")
    parser.add_argument("--round", type=int, default=0, help="the first round")
    return parser.parse_args()


def default_file(seed: int) -> Path:
    return Path(__file__).parent / "results" / f"seed-{seed}.jsonl"


def left(options: argparse.Namespace, progress: Progress) -> Iterator[Batch]:
    """Yields the batches that are not done yet, round after round."""
    every = [nesting for outer in TRANSFORMS for nesting in nestings(outer)]
    random.Random(options.seed).shuffle(every)  # a short run meets transforms of all kinds
    if options.only is not None:
        every = [tuple(options.only.split("/"))]
    for round_ in itertools.count(options.round):
        for nesting in every:
            batch = Batch(options.seed, round_, nesting, options.batch)
            if not progress.is_done(batch):
                yield batch


def shown(outcome: Outcome) -> Outcome:
    if outcome.failure is not None:
        print(outcome.failure, flush=True)
    return outcome


def report(progress: Progress, speed: float) -> None:
    print(
        f"{progress.programs} programs, {len(progress.nestings)} nestings, "
        f"{len(progress.failures)} failures, {speed:.1f} programs/s, {resident_mb():.0f} MB",
        flush=True,
    )


def resident_mb() -> float:
    """Returns the memory that this process holds now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return float("nan")


if __name__ == "__main__":
    sys.exit(main())

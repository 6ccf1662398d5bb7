"""Batches: some programs through one nesting of transforms, drawn from a seed."""

import traceback
import zlib
from typing import NamedTuple

import hypothesis
from hypothesis import HealthCheck, Phase, given, settings

from tests.transforms.cases import Case, cases, check


class Batch(NamedTuple):
    """What one batch depends on."""

    seed: int
    round: int
    nesting: tuple[str, ...]
    size: int

    @property
    def name(self) -> str:
        """The nesting as `--only` takes it."""
        return "/".join(self.nesting)


class Outcome(NamedTuple):
    """How many programs ran, and the minimal failure, if there was one."""

    programs: int
    failure: str | None


def run(batch: Batch, *, shrink: bool = True) -> Outcome:
    """Runs one batch; a failure is minimised unless `shrink` is False."""
    programs = 0

    @hypothesis.seed(zlib.crc32(repr(batch).encode()))
    @settings(
        max_examples=batch.size,
        deadline=None,
        database=None,
        phases=[Phase.generate, *([Phase.shrink] if shrink else [])],
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
    )
    @given(cases(batch.nesting))
    def law(case: Case) -> None:
        nonlocal programs
        programs += 1
        check(case)

    try:
        law()
    except Exception as error:  # noqa: BLE001  # written down; the run goes on
        return Outcome(programs, described(batch, error))
    return Outcome(programs, None)


def described(batch: Batch, error: BaseException) -> str:
    """Writes a failure: how to see it again, the drawn case, and where it came from."""
    again = (
        f"python -m tests.fuzz --seed {batch.seed} --batch {batch.size} --round {batch.round} "
        f"--programs 1 --only {batch.name!r}"
    )
    # The notes of the error are the minimal case as Hypothesis writes it.
    text = "".join(traceback.format_exception(error, limit=-6))
    return f"FAILED {batch.name}: {again}\n{text}"

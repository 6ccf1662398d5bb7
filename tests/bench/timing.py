"""How a call is timed.

Only ratios inside one process mean anything: the same program moves by half from one process to the
next. So all contenders of a row are timed in one process, in a new random order each round, in
bursts of back-to-back calls of which the first two are dropped, with Python's garbage collector
frozen. The first contender is timed twice under two names; when the two disagree by more than
5 % (the *A/A control*) the machine was too noisy for the row: its samples are thrown away and it is
measured again.

A burst gives one wall time and one CPU time per call (of the whole process, XLA's threads
included). A contender that is many times slower than the first takes part in every fourth round
only.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

BURST = 10
DROPPED = 2
CONTROL_TOLERANCE = 0.05
SLOW = 4.0
SLOW_STRIDE = 4
FEWEST_ROUNDS = 6
MIN_BURST_SECONDS = 100e-6


@dataclasses.dataclass(frozen=True)
class Contender:
    """One thing to time.

    Attributes:
      call: Takes one item and does the work.
      items: Makes the items of one burst, outside the timed part.
      times_itself: `call` returns its own `(wall, cpu)` seconds, as a subprocess must.
    """

    call: Callable[[Any], Any]
    items: Callable[[int], Iterable[Any]] = lambda count: itertools.repeat(None, count)
    times_itself: bool = False


@dataclasses.dataclass
class Samples:
    """Seconds per call, one entry a burst."""

    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)

    @property
    def wall_us(self) -> float:
        return 1e6 * statistics.median(self.wall)

    @property
    def cpu_us(self) -> float:
        return 1e6 * statistics.median(self.cpu)


@dataclasses.dataclass(frozen=True)
class Measurement:
    """Samples by contender, what the control says, and how often it took to say so."""

    samples: dict[str, Samples]
    control: float
    rounds: int
    attempts: int

    @property
    def accepted(self) -> bool:
        return abs(self.control - 1) <= CONTROL_TOLERANCE


def measure(
    contenders: dict[str, Contender],
    *,
    rounds: int,
    attempts: int,
    seconds: float,
    burst: int = BURST,
) -> Measurement:
    """Times all contenders against each other, again while the control fails.

    Args:
      contenders: By name; the first is the reference and the control.
      rounds: How often each contender has its turn.
      attempts: How often to start over when the control is off.
      seconds: What one attempt may take, about; slow rows have fewer rounds for it.
      burst: Calls a turn; 1 times single calls, for work that is never back to back.

    Returns:
      The first accepted measurement, else the one whose control was nearest to 1.
    """
    turns = {name: Turn.planned(contender, burst) for name, contender in contenders.items()}
    reference = next(iter(turns))
    for turn in turns.values():
        if turn.estimate > SLOW * turns[reference].estimate:
            turn.stride = SLOW_STRIDE
    a_round = turns[reference].seconds + sum(turn.seconds for turn in turns.values())
    rounds = min(rounds, max(FEWEST_ROUNDS, int(seconds / a_round)))
    best: Measurement | None = None
    for attempt in range(1, attempts + 1):
        samples, control = _measure_once(turns, reference, rounds)
        measured = Measurement(samples, control, rounds, attempt)
        if measured.accepted:
            return measured
        if best is None or abs(measured.control - 1) < abs(best.control - 1):
            best = measured
    assert best is not None
    return dataclasses.replace(best, attempts=attempts)


@dataclasses.dataclass
class Turn:
    """One contender's burst: how many calls, how many dropped, and in which rounds."""

    contender: Contender
    calls: int
    dropped: int
    estimate: float = 0.0
    stride: int = 1

    @classmethod
    def planned(cls, contender: Contender, burst: int) -> Turn:
        """Compiles and warms up, then makes the burst of a very short call long enough to time."""
        dropped = DROPPED if burst > DROPPED else 0
        turn = cls(contender, burst, dropped)
        warm_up = cls(contender, dropped + 1, dropped)
        turn.estimate = min(warm_up.run()[0] for _ in range(3 if dropped else 1))
        if dropped and turn.estimate * burst < MIN_BURST_SECONDS:
            turn.calls = dropped + int(MIN_BURST_SECONDS / max(turn.estimate, 100e-9))
        return turn

    @property
    def seconds(self) -> float:
        """What the turn adds to a round, on average."""
        return self.estimate * self.calls / self.stride

    def run(self) -> tuple[float, float]:
        """One burst: wall and CPU seconds per call."""
        call, items = self.contender.call, iter(self.contender.items(self.calls))
        if self.contender.times_itself:
            return call(next(items))
        for item in itertools.islice(items, self.dropped):
            call(item)
        cpu = time.process_time()
        wall = time.perf_counter()
        for item in items:
            call(item)
        wall = time.perf_counter() - wall
        cpu = time.process_time() - cpu
        counted = self.calls - self.dropped
        return wall / counted, cpu / counted


def _measure_once(
    turns: dict[str, Turn], reference: str, rounds: int
) -> tuple[dict[str, Samples], float]:
    samples = {name: Samples() for name in turns}
    control = Samples()
    order: list[tuple[Turn, Samples]] = [(turns[name], samples[name]) for name in turns]
    order.append((turns[reference], control))
    shuffled = random.Random(rounds)
    with gc_frozen():
        for number in range(rounds):
            shuffled.shuffle(order)
            for turn, into in order:
                if number % turn.stride == 0:
                    wall, cpu = turn.run()
                    into.wall.append(wall)
                    into.cpu.append(cpu)
    ratio = control.wall_us / samples[reference].wall_us
    samples[reference] = Samples(
        samples[reference].wall + control.wall, samples[reference].cpu + control.cpu
    )
    return samples, ratio


class gc_frozen:
    """Moves what is alive out of the collector's sight and stops it."""

    def __enter__(self) -> None:
        gc.collect()
        gc.freeze()
        gc.disable()

    def __exit__(self, *_) -> None:
        gc.enable()
        gc.unfreeze()

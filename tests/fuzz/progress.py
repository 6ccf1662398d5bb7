"""Progress: which batches are done, in a file with one line of JSON for each."""

import json
from pathlib import Path

from tests.fuzz.batches import Batch, Outcome


class Progress:
    """What was done so far, and the file that remembers it."""

    def __init__(self, file: Path, *, resume: bool) -> None:
        self.file = file
        self.programs = 0
        self.failures: list[str] = []
        self.nestings: set[str] = set()
        self._done: set[tuple[int, int, str]] = set()
        self._failed: set[str] = set()
        file.parent.mkdir(parents=True, exist_ok=True)
        if resume and file.exists():
            for line in file.read_text().splitlines():
                self._take(json.loads(line))
        else:
            file.write_text("")

    def is_done(self, batch: Batch) -> bool:
        """Tells whether a batch is done."""
        return (batch.seed, batch.round, batch.name) in self._done

    def has_failed(self, nesting: tuple[str, ...]) -> bool:
        """Tells whether a failure of a nesting is known."""
        return "/".join(nesting) in self._failed

    def add(self, batch: Batch, outcome: Outcome) -> None:
        """Writes down a batch that is done."""
        record = {
            "seed": batch.seed,
            "round": batch.round,
            "nesting": batch.name,
            "programs": outcome.programs,
            "failure": outcome.failure,
        }
        with self.file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        self._take(record)

    def _take(self, record: dict) -> None:
        self.programs += record["programs"]
        self.nestings.add(record["nesting"])
        self._done.add((record["seed"], record["round"], record["nesting"]))
        if record["failure"] is not None:
            self.failures.append(record["failure"])
            self._failed.add(record["nesting"])

"""`python -m tests.bench`: measures nnxlite against raw JAX, flax.nnx and equinox.

Each size is measured in a process of its own, one after the other. A full run writes its merged
table to `tests/bench/results/`; a part of it only prints, or writes where `--out` says. The exit
status is 1 if a gate failed.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

from tests.bench import gates, memory, models, report, rows, timing

SIZES = (72, 282, 702, 2802)
ONE_SIZE = 0
RESULTS = pathlib.Path(__file__).parent / "results"


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m tests.bench", description=__doc__)
    parser.add_argument("--sizes", help="leaves, by comma; 0 stands for the rows of one size")
    parser.add_argument("--rows", help="only rows whose name contains one of these, by comma")
    parser.add_argument("--libraries", default=",".join(models.LIBRARIES), help="columns, by comma")
    parser.add_argument("--rounds", type=int, default=24, help="turns of each contender in a row")
    parser.add_argument("--seconds", type=float, default=4.0, help="limit for one try of a row")
    parser.add_argument("--attempts", type=int, default=3, help="tries while the control is off")
    parser.add_argument("--out", type=pathlib.Path, help="folder for the table")
    parser.add_argument("--quick", action="store_true", help="smallest size, one short try a row")
    parser.add_argument("--worker", type=pathlib.Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.out is None and not (options.quick or options.sizes or options.rows):
        options.out = RESULTS
    if options.quick:
        options.sizes = options.sizes or f"{ONE_SIZE},{SIZES[0]}"
        options.rounds, options.seconds, options.attempts = 4, 0.5, 1
    sizes = options.sizes.split(",") if options.sizes else (ONE_SIZE, *SIZES)
    options.sizes = [int(size) for size in sizes]
    return options


def main() -> int:
    options = parsed()
    if options.worker:
        options.worker.write_text(json.dumps(measure_size(options)))
        return 0
    check_gates()
    lines = []
    for size in options.sizes:
        lines += measure_in_new_process(size)
        if options.out:
            report.write(options.out, lines)
    print(report.markdown(lines, report.environment()))
    return int(any(line["verdict"] == "FAIL" for line in lines))


def check_gates() -> None:
    """Raises if a gate stands on a row that does not exist, so would never be judged."""
    known = {row.name for row in (*rows.ROWS, *memory.ROWS)}
    unknown = {gate.row for gate in gates.GATES} - known
    if unknown:
        raise ValueError(f"gates.py has gates for rows that do not exist: {sorted(unknown)}.")


def measure_in_new_process(size: int) -> list[dict]:
    """The lines of one size, measured in a process that has compiled nothing else."""
    with tempfile.TemporaryDirectory() as folder:
        answer = pathlib.Path(folder) / "lines.json"
        command = [sys.executable, "-m", "tests.bench", *sys.argv[1:]]
        command += ["--sizes", str(size), "--worker", str(answer)]
        subprocess.run(command, check=True, env={"JAX_PLATFORMS": "cpu"} | os.environ)
        return json.loads(answer.read_text())


def measure_size(options: argparse.Namespace) -> list[dict]:
    """Measures every wanted row at one size."""
    (size,) = options.sizes
    libraries = {name: models.LIBRARIES[name]() for name in options.libraries.split(",")}
    models.check_agreement(libraries)
    lines = [
        measure_row(row, size, libraries, options)
        for row in rows.ROWS
        if is_of_size(row, size) and is_wanted(row.name, options.rows)
    ]
    if size == ONE_SIZE:
        lines += [
            measure_memory(row, libraries)
            for row in memory.ROWS
            if is_wanted(row.name, options.rows)
        ]
    return lines


def is_of_size(row: rows.Row, size: int) -> bool:
    return (row.leaves is None) == (size == ONE_SIZE) and size <= row.largest


def is_wanted(row: str, names: str | None) -> bool:
    return names is None or any(name in row for name in names.split(","))


def measure_memory(row: memory.Row, libraries: dict) -> dict:
    line = report.memory_line_of(row.name, row.measure(libraries))
    told = ", ".join(f"{name} {size:,}" for name, size in line["bytes"].items())
    print(f"     {row.name:45} {told} bytes", flush=True)
    return line


def measure_row(row: rows.Row, size: int, libraries: dict, options: argparse.Namespace) -> dict:
    started = time.perf_counter()
    contenders = {
        name: row.make(libraries[name], size)
        for name in row.libraries_at(size)
        if name in libraries
    }
    measured = timing.measure(
        contenders,
        rounds=options.rounds,
        attempts=options.attempts,
        seconds=options.seconds,
        burst=row.burst,
    )
    leaves = row.leaves(size) if row.leaves else None
    line = report.line_of(row.name, size or None, leaves, measured)
    told = ", ".join(f"{name} {us:,.1f}" for name, us in line["wall_us"].items())
    seconds = time.perf_counter() - started
    print(
        f"{size:4} {row.name:33} {told} us; A/A {measured.control:.2f}, {measured.attempts} tries,"
        f" {measured.rounds} rounds, {seconds:.0f} s",
        flush=True,
    )
    return line


if __name__ == "__main__":
    sys.exit(main())

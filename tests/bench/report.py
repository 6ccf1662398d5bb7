"""From measurements to a table: verdicts, Markdown, JSON."""

from __future__ import annotations

import importlib.metadata
import json
import pathlib
import platform
from typing import Any

from tests.bench import gates, timing

COLUMNS = ("raw", "nnxlite", "flax", "equinox")
PACKAGES = ("jax", "jaxlib", "flax", "equinox", "optax", "numpy")
HEADER = (
    "row",
    "leaves",
    "raw us",
    "nnxlite us",
    "ratio",
    "CPU ratio",
    "flax us",
    "flax/nnxlite",
    "eqx us",
    "eqx/nnxlite",
    "A/A",
    "gate",
    "verdict",
)
MEMORY_HEADER = ("row", "raw bytes", "nnxlite bytes", "ratio", "gate", "verdict")


def line_of(
    name: str, size: int | None, leaves: int | None, measured: timing.Measurement
) -> dict[str, Any]:
    """One line of the table, with its verdict, ready for JSON.

    Args:
      name: The row's.
      size: The wanted number of leaves, which the gates know; `None` for rows of one size.
      leaves: The real number.
      measured: Samples of each library.
    """
    wall_us = {name: samples.wall_us for name, samples in measured.samples.items()}
    cpu_us = {name: samples.cpu_us for name, samples in measured.samples.items()}
    judged = [judgement for gate in gates.GATES if (judgement := judge(gate, name, size, wall_us))]
    passes = all(judgement["passes"] for judgement in judged)
    if not judged:
        verdict = "-"
    elif not measured.accepted:
        verdict = "noisy"
    else:
        verdict = "pass" if passes else "FAIL"
    return {
        "row": name,
        "size": size,
        "leaves": leaves,
        "wall_us": wall_us,
        "cpu_us": cpu_us,
        "control": measured.control,
        "rounds": measured.rounds,
        "attempts": measured.attempts,
        "gates": judged,
        "verdict": verdict,
    }


def memory_line_of(name: str, sizes: dict[str, int]) -> dict[str, Any]:
    """One line about memory, with its verdict; `sizes` are bytes by library."""
    judged = [judgement for gate in gates.GATES if (judgement := judge(gate, name, None, sizes))]
    passes = all(judgement["passes"] for judgement in judged)
    verdict = "-" if not judged else "pass" if passes else "FAIL"
    return {"row": name, "size": None, "bytes": sizes, "gates": judged, "verdict": verdict}


def judge(gate: gates.Gate, row: str, size: int | None, columns: dict) -> dict[str, Any] | None:
    """How the gate fared on a line, or `None` if it does not apply to it."""
    limit = gate.limit_at(size) if gate.row == row else None
    measured = gates.ratio_of(gate.ratio, columns)
    if limit is None or measured is None:
        return None
    return {
        "ratio": gate.ratio,
        "limit": limit,
        "measured": measured,
        "passes": gate.passes(measured, limit),
        "text": gate.described(size),
    }


def environment() -> dict[str, str]:
    """Versions and the kind of processor; nothing that names a machine or a person."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = importlib.metadata.version(package)
    versions["CPU"] = _cpu_model()
    return versions


def _cpu_model() -> str:
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} logical cores" if names else platform.machine()


def markdown(lines: list[dict[str, Any]], versions: dict[str, str]) -> str:
    """The table for people: one section per size."""
    told = ", ".join(f"{name} {version}" for name, version in versions.items())
    counts = {kind: sum(line["verdict"] == kind for line in lines) for kind in VERDICTS}
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.items())
    parts = [
        "# Benchmark",
        "",
        f"{told}.",
        "",
        f"{summary}. Medians in microseconds per call; `ratio` is nnxlite / raw `jax.jit` on the",
        "same flat leaves (wall and CPU time); A/A is the row's first column against itself.",
    ]
    timed = [line for line in lines if "bytes" not in line]
    for size in dict.fromkeys(line["size"] for line in timed):
        title = "Rows of one size" if size is None else f"About {size} leaves"
        rows = [_row(line) for line in timed if line["size"] == size]
        parts += _section(title, HEADER, rows)
    of_memory = [_memory_row(line) for line in lines if "bytes" in line]
    if of_memory:
        parts += _section("Memory of compiled programs", MEMORY_HEADER, of_memory)
    return "\n".join(parts) + "\n"


def _section(title: str, header: tuple[str, ...], rows: list[list[str]]) -> list[str]:
    return ["", f"## {title}", "", *map(_cells, (header, ["---"] * len(header), *rows))]


VERDICTS = ("pass", "FAIL", "noisy")


def _row(line: dict[str, Any]) -> list[str]:
    wall, cpu = line["wall_us"], line["cpu_us"]
    return [
        line["row"],
        str(line["leaves"] or ""),
        _us(wall.get("raw")),
        _us(wall.get("nnxlite")),
        _times(gates.ratio_of(gates.OVER_RAW, wall)),
        _times(gates.ratio_of(gates.OVER_RAW, cpu)),
        _us(wall.get("flax")),
        _times(gates.ratio_of(gates.OF_FLAX, wall)),
        _us(wall.get("equinox")),
        _times(gates.ratio_of(gates.OF_EQUINOX, wall)),
        f"{line['control']:.2f}",
        "; ".join(_gate(judged) for judged in line["gates"]),
        line["verdict"],
    ]


def _memory_row(line: dict[str, Any]) -> list[str]:
    sizes = line["bytes"]
    told = [f"{sizes[name]:,}" if name in sizes else "" for name in ("raw", "nnxlite")]
    ratio = _times(gates.ratio_of(gates.OVER_RAW, sizes))
    return [line["row"], *told, ratio, "; ".join(map(_gate, line["gates"])), line["verdict"]]


def _gate(judged: dict[str, Any]) -> str:
    if judged["passes"]:
        return judged["text"]
    return f"**{judged['text']}, is {judged['measured']:.2f}**"


def _cells(values) -> str:
    return "| " + " | ".join(values) + " |"


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _times(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.0f}x" if value >= 20 else f"{value:.2f}x"


def write(folder: pathlib.Path, lines: list[dict[str, Any]]) -> None:
    """Writes `table.md` and `table.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    versions = environment()
    document = {"environment": versions, "lines": lines}
    (folder / "table.json").write_text(json.dumps(document, indent=1) + "\n")
    (folder / "table.md").write_text(markdown(lines, versions))

"""Each example runs from the command line, and says clearly what is wrong with its arguments."""

import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run_example(name: str, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs an example in a folder of its own, for some write files."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    paths = [str(EXAMPLES.parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def load_example(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("example", EXAMPLES / name)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", sorted(path.name for path in EXAMPLES.glob("*.py")))
def test_example_runs_two_steps(name: str, tmp_path: Path) -> None:
    done = run_example(name, "--steps", "2", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "after 2 steps" in done.stdout


def test_digits_learns_and_shows_what(tmp_path: Path) -> None:
    done = run_example("digits.py", "--steps", "250", "--report", "report.html", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    found = re.search(r"test accuracy: ([\d.]+) %", done.stdout)
    assert found and float(found[1]) >= 97, done.stdout
    assert "250/250" in done.stderr  # the progress bar
    assert re.search(r"second\.norm +\(8, 4, 4, 64\)", done.stdout)  # captured
    report = (tmp_path / "report.html").read_text()
    assert report.count("<treescope-container") == 5
    assert "Classifier" in done.stdout
    assert "hardest digit" in done.stdout


def test_gradient_debugging_finds_the_layer_that_explodes(tmp_path: Path) -> None:
    options = ("--steps", "2", "--layer", "5", "--seed", "3")
    done = run_example("gradient_debugging.py", *options, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "model.layers[5] makes the gradient" in done.stdout
    refused = run_example("gradient_debugging.py", "--layer", "16", folder=tmp_path)
    assert refused.returncode == 2 and "--layer is 16, expected 1 to 15" in refused.stderr


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("--steps", "0", "expected 1 or more"),
        ("--steps", "many", "invalid int value"),
        ("--seed", "-1", "expected 0 to"),
        ("--batch-size", "1", "expected 2 to"),
        ("--batch-size", "5000", "expected 2 to"),
        ("--learning-rate", "-0.1", "expected more than 0"),
        ("--learning-rate", "nan", "expected more than 0"),
        ("--report", "no/such/folder/report.html", "that folder is missing"),
        ("--colour", "red", "unrecognized arguments"),
    ],
)
def test_digits_refuses_bad_arguments(
    option: str,
    value: str,
    expected: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    digits = load_example("digits.py")
    monkeypatch.setattr(sys, "argv", ["digits.py", f"{option}={value}"])
    with pytest.raises(SystemExit, match="2"):
        digits.main()
    complaint = capsys.readouterr().err.splitlines()[-1]
    assert option in complaint
    assert expected in complaint


def test_digits_names_the_missing_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(SystemExit, match=r"'tqdm'.*pip install 'nnxlite\[examples\]'"):
        load_example("digits.py")

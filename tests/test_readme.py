"""The README keeps its promises: two commands, a short first model, extras that exist."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def code_blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


def words(command: str) -> str:
    return " ".join(command.replace("\\\n", " ").split())


def test_there_are_two_commands_and_each_sets_itself_up() -> None:
    example, tests = map(words, code_blocks("bash"))
    assert example.startswith("python3 -m venv .venv && ")
    assert example.endswith(" && .venv/bin/python examples/digits.py")
    assert tests.startswith("python3 -m venv .venv && ")
    assert tests.endswith(" && .venv/bin/python -m pytest -n 2")


def test_ci_runs_the_test_command_as_written() -> None:
    _, tests = map(words, code_blocks("bash"))
    assert f"( {tests} )" in words((ROOT / ".ci" / "run").read_text())


def test_first_model_is_short() -> None:
    (first,) = code_blocks("python")
    assert len([line for line in first.splitlines() if line.strip()]) <= 30


def test_extras_and_what_they_add_are_true() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| `(\w+)` \|.*\| (.*) \|$", README, re.MULTILINE)
    named = {extra: packages.split(", ") for extra, packages in rows}
    assert named == {
        extra: [re.split(r"[<>=]", requirement)[0] for requirement in requirements]
        for extra, requirements in project["optional-dependencies"].items()
    }


def test_all_guides_are_listed() -> None:
    listed = re.findall(r"\]\((guides/.*?)\)", README)
    assert listed == sorted(f"guides/{path.name}" for path in ROOT.glob("guides/*.md"))

"""The project's checks, each in an environment of its own: `nox -l` lists them.

`nox` alone runs what a change should pass before it is handed in. Arguments after `--` replace
those of pytest: `nox -s tests-3.13 -- tests/core -k split`.
"""

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2025.2"
nox.options.sessions = ["lint", "tests-3.13"]
nox.options.reuse_existing_virtualenvs = True

OLDEST, NEWEST = "3.11", "3.13"
FLOORS = ["jax==0.10.0", "jaxlib==0.10.0", "numpy==2.0.0", "treescope==0.1.10"]


SMOKE_TEST = """
import importlib.resources
import jax.numpy as jnp
import nnxlite as nnx
assert importlib.resources.files("nnxlite").joinpath("py.typed").is_file()
model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
assert nnx.jit(lambda model, x: model(x))(model, jnp.ones((1, 2))).shape == (1, 3)
print("imported and ran", nnx.__file__)
"""


def install(session: nox.Session, group: str, *requirements: str) -> None:
    """Installs the project, a dependency group and what else is named, all resolved together."""
    session.install("--editable", ".", "--group", group, *requirements)


def suite(session: nox.Session, *arguments: str) -> None:
    """Runs pytest with `arguments`, or with the user's own instead."""
    session.run("python", "-m", "pytest", *(session.posargs or arguments))


@nox.session(python=["3.11", "3.12", "3.13"])
def tests(session: nox.Session) -> None:
    """The suite, on the newest JAX that this Python has."""
    install(session, "test")
    suite(session, "-n", "2")


@nox.session(python=OLDEST)
def minimums(session: nox.Session) -> None:
    """The suite on exactly the oldest versions that pyproject.toml allows."""
    install(session, "test", *FLOORS)
    suite(session, "-n", "2")


@nox.session(python=NEWEST)
def lint(session: nox.Session) -> None:
    """Format, lint rules and types."""
    install(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("pyright")


@nox.session(python=NEWEST)
def peers(session: nox.Session) -> None:
    """Behaviour against flax.nnx: equal seeds give equal parameters and outputs."""
    install(session, "peers")
    suite(session, "tests/peers")


@nox.session(python=NEWEST)
def fuzz(session: nox.Session) -> None:
    """Random programs through every pair of transforms; goes on where the last run stopped."""
    install(session, "test")
    arguments = session.posargs or ("--programs", "20000", "--resume")
    session.run("python", "-m", "tests.fuzz", *arguments)


@nox.session(python=NEWEST)
def bench(session: nox.Session) -> None:
    """Time against raw JAX, flax.nnx and equinox in one run; writes tests/bench/results."""
    install(session, "bench")
    session.run("python", "-m", "tests.bench", *session.posargs)


@nox.session(python=NEWEST)
def examples(session: nox.Session) -> None:
    """Every example, at its full length."""
    session.install(".[examples]")
    for example in sorted(Path("examples").glob("*.py")):
        session.run("python", str(example), *session.posargs)


@nox.session(python=NEWEST)
def docs(session: nox.Session) -> None:
    """Runs every docstring example and every block of README, CONTRIBUTING and the guides."""
    install(session, "docs")
    suite(session, "tests/test_docs.py")


@nox.session(python=[OLDEST, NEWEST])
def build(session: nox.Session) -> None:
    """Builds sdist and wheel, then imports the wheel where nothing else is installed."""
    session.install("build", "twine")
    scratch = Path(session.create_tmp()).resolve()
    dist = scratch / "dist"
    shutil.rmtree(dist, ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", str(dist), ".")
    session.run("twine", "check", "--strict", *map(str, dist.iterdir()))
    (wheel,) = dist.glob("*.whl")

    session.run("python", "-m", "venv", "--clear", str(scratch / "clean"))
    python = str(scratch / "clean" / "bin" / "python")
    session.run(python, "-m", "pip", "install", "--quiet", str(wheel), external=True)
    with session.chdir(scratch):  # away from the checkout, so that only the wheel can be imported
        session.run(python, "-c", SMOKE_TEST, external=True)

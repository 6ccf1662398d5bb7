"""What `import nnxlite` costs: no device, and none of the packages that only some users need."""

import subprocess
import sys


def run_python(code: str) -> str:
    """Runs `code` in a fresh interpreter and returns what it printed."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_starts_no_backend() -> None:
    # A platform that does not exist: whatever starts a backend fails.
    code = (
        "import os; os.environ['JAX_PLATFORMS'] = 'no_such_platform'\n"
        "import nnxlite, jax\n"
        "try: jax.devices()\n"
        "except RuntimeError: print('started by hand only')"
    )
    assert run_python(code) == "started by hand only\n"


def test_import_loads_no_more_than_jax_does() -> None:
    # Other packages are for users who ask for them; treescope is imported by what renders.
    code = (
        "import sys, jax, jax.numpy\n"
        "before = {name.split('.')[0] for name in sys.modules}\n"
        "import nnxlite\n"
        "after = {name.split('.')[0] for name in sys.modules}\n"
        "print(*sorted(after - before - sys.stdlib_module_names))"
    )
    assert run_python(code) == "nnxlite\n"


def test_import_traces_and_compiles_nothing() -> None:
    code = (
        "import jax\n"
        "events = []\n"
        "listen = jax.monitoring.register_event_duration_secs_listener\n"
        "listen(lambda name, *_, **__: events.append(name))\n"
        "import nnxlite\n"
        "print([name for name in events if 'trace' in name or 'compile' in name])"
    )
    assert run_python(code) == "[]\n"

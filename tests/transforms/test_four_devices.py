"""What needs several devices runs in one process that has four: see `*_on_four_devices.py`."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "tests").rglob("*_on_four_devices.py"))


def test_on_four_devices():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    settings = {
        "XLA_FLAGS": flags,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling takes most of the time
    }
    # Without conftest.py and the plugin, for Hypothesis takes as long to start as JAX does.
    options = ["-q", "--noconftest", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, FILES)],
        env={**os.environ, **settings},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    # The files skip themselves where there are fewer devices: here none of it may be skipped.
    assert "passed" in done.stdout and "skipped" not in done.stdout, done.stdout[-500:]

import asyncio
import gc
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from nnxlite._core import context
from nnxlite._core.context import (
    START,
    Ambient,
    current,
    disable_named_call,
    enable_named_call,
    entered,
    named_call_default,
    override_named_call,
    signature,
)


@pytest.fixture(autouse=True)
def start_again() -> Iterator[None]:
    yield
    context.set_process_default(START)


class CountedJit:
    """A plain `jax.jit` that counts its traces."""

    def __init__(self) -> None:
        self.traces: list[bool] = []
        self.jitted = jax.jit(self.traced)

    def traced(self, x: jax.Array) -> jax.Array:
        self.traces.append(current().scopes)
        return x + 1

    def __call__(self) -> None:
        self.jitted(jnp.zeros(()))


def in_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    assert results, "the thread failed"
    return results[0]


def test_equal_records_are_one_object() -> None:
    assert START.but(sow="store") is START.but(scopes=True).but(sow="store")


def test_record_of_the_start_is_no_key() -> None:
    assert START.scopes
    assert signature() is None
    with override_named_call(True):
        assert signature() is None


def test_override_is_in_force_inside_only() -> None:
    with override_named_call(False):
        assert not current().scopes
        assert signature() is START.but(scopes=False)
    assert current() is START


def test_overrides_nest() -> None:
    with override_named_call(False):
        with override_named_call(True):
            assert current().scopes
        assert not current().scopes


def test_override_ends_with_an_exception() -> None:
    with pytest.raises(KeyError, match="inside"), override_named_call(False):
        raise KeyError("inside")
    assert current() is START
    assert context.USER_CONTEXT.value is None


def test_override_keeps_the_other_fields() -> None:
    with entered(START.but(captured=(int,))), override_named_call(False):
        assert current() == START.but(captured=(int,), scopes=False)


def test_override_decorates_a_function() -> None:
    @override_named_call(False)
    def scopes() -> bool:
        return current().scopes

    assert (scopes(), current().scopes) == (False, True)


def test_override_leaves_other_threads_alone() -> None:
    with override_named_call(False):
        assert in_thread(lambda: current().scopes)


def test_wrappers_and_jax_agree_in_a_thread_that_copies_the_context() -> None:
    async def switched_off() -> bool:
        with override_named_call(False):
            return await asyncio.to_thread(agree)

    def agree() -> bool:
        return signature() is context.USER_CONTEXT.value

    assert asyncio.run(switched_off())


def test_override_retraces_plain_jit_once_for_each_state() -> None:
    f = CountedJit()
    for enable in (True, False, True, False):
        with override_named_call(enable):
            f()
        f()
        gc.collect()
    assert f.traces == [True, False]


def test_process_default_retraces_plain_jit() -> None:
    f = CountedJit()
    f()
    disable_named_call()
    f()
    enable_named_call()
    f()
    assert f.traces == [True, False]


def test_override_wins_over_the_process_default() -> None:
    with override_named_call(False):
        enable_named_call()
        assert not current().scopes
    disable_named_call()
    with override_named_call(True):
        assert current().scopes


def test_process_default_reaches_running_threads() -> None:
    if context.DEFAULTS is context.LOCAL:
        pytest.skip("this JAX has no process-wide user context")
    f = CountedJit()
    f()
    disable_named_call()
    in_thread(f)
    assert f.traces == [True, False]
    assert not in_thread(lambda: current().scopes)


@pytest.fixture
def without_set_global(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on JAX 0.10, where the user context has a value per thread only; test in a new one."""
    monkeypatch.setattr(context, "DEFAULTS", context.LOCAL)


@pytest.mark.usefixtures("without_set_global")
def test_without_set_global_the_calling_thread_switches() -> None:
    f = CountedJit()

    def toggle() -> None:
        f()
        disable_named_call()
        f()
        enable_named_call()
        f()

    in_thread(lambda: toggle() or True)
    assert f.traces == [True, False]


@pytest.mark.usefixtures("without_set_global")
def test_without_set_global_a_thread_follows_when_asked_for_its_signature() -> None:
    in_thread(lambda: disable_named_call() or True)

    def follow() -> tuple[bool, Ambient | None, bool]:
        before = current().scopes
        return before, signature(), current().scopes

    before, key, after = in_thread(follow)
    assert (before, after) == (True, False)
    assert key is START.but(scopes=False)


@pytest.mark.usefixtures("without_set_global")
def test_without_set_global_wrappers_and_jax_always_agree() -> None:
    def values() -> list[bool]:
        agreed = []

        def note() -> None:
            key = None if current() is START else current()
            agreed.append(key is context.USER_CONTEXT.value)

        with override_named_call(True):
            disable_named_call()
            note()
        note()
        with override_named_call(True):
            note()
        enable_named_call()
        note()
        return agreed

    assert in_thread(values) == [True] * 4


@pytest.mark.usefixtures("without_set_global")
def test_without_set_global_a_switch_inside_an_override_counts_after_it() -> None:
    def after() -> bool:
        with override_named_call(True):
            disable_named_call()
        return current().scopes

    assert not in_thread(after)


@pytest.mark.parametrize("text", ["1", "true", "On", " yes ", ""])
def test_variable_switches_on(text: str) -> None:
    assert named_call_default({"NNXLITE_NAMED_CALL": text})


@pytest.mark.parametrize("text", ["0", "False", "off", "no"])
def test_variable_switches_off(text: str) -> None:
    assert not named_call_default({"NNXLITE_NAMED_CALL": text})


def test_variable_with_another_text_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"NNXLITE_NAMED_CALL is 'maybe', .* Set it to 1"):
        named_call_default({"NNXLITE_NAMED_CALL": "maybe"})


def test_variable_sets_how_a_process_starts() -> None:
    code = (
        "from nnxlite._core.context import current, enable_named_call, signature\n"
        "print(current().scopes, signature())\n"
        "enable_named_call()\n"
        "print(current().scopes, signature() is None)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "NNXLITE_NAMED_CALL": "0", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["False", "None", "True", "False"]

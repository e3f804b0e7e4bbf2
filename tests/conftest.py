"""What every test shares."""

from __future__ import annotations

import faulthandler
import gc
import os
import re
import signal
from collections.abc import Generator
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# A shell that runs this in the background has SIGINT ignored, and children inherit that: the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A report takes seconds at the end of every run; its own tests ask for it.
os.environ.setdefault("RLINF_REPORT", "0")

# The commit run is short and repeatable; `make nightly` picks the long one with --hypothesis-profile=nightly.
settings.register_profile(
    "commit", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("commit")


# Seconds beyond a test's time limit after which its process is ended.
_GRACE_SECONDS = 180
_STACKS = pytest.StashKey[int]()
_THERE_ONCE = ("tests/cluster/", "tests/gpu/")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]+")


def pytest_configure(config: pytest.Config) -> None:
    """Keep where stacks go: no output is captured yet."""
    config.stash[_STACKS] = os.dup(2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give tests of hosts and of accelerators, which are there once, to one process, beside those that take files."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "hosts" if nodeid.startswith(_THERE_ONCE) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name bytes by their kind: a name of their content differs between workers where it holds a time."""
    return type(val).__name__ if isinstance(val, bytes | bytearray) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse names with an address, which differ between the workers of a run."""
    changing = [item.nodeid for item in items if _ADDRESS.search(item.nodeid)]
    if changing:
        raise pytest.UsageError(f"give the parameters of {changing[0]} names without an address")


def pytest_collection_finish() -> None:
    """Exclude what was imported from later garbage collections: a test that collects would walk all of it."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the process of a test that outlasts its time limit, after its stacks: the limit itself is a signal.

    A signal cannot interrupt C code that holds the interpreter's lock, nor a clean-up that waits for a thread.
    """
    marker = item.get_closest_marker("timeout")
    general = item.config.getoption("timeout") or item.config.getini("timeout")
    limit = float((marker.args[0] if marker and marker.args else general) or 0)
    if not limit:
        return (yield)
    faulthandler.dump_traceback_later(limit + _GRACE_SECONDS, exit=True, file=item.config.stash[_STACKS])
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.fixture(autouse=True)
def _no_secrets_of_other_tests() -> Generator[None, None, None]:
    """Values that a test's job calls secret are masked in its own texts alone."""
    yield
    from rlinf_core.process.known_secrets import forget

    forget()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Fail a security test that is skipped where CI runs: what it needs is installed there by `.ci/run`."""
    report = yield
    excused = hasattr(report, "wasxfail") or item.get_closest_marker("security") is None
    if report.skipped and not excused and os.environ.get("CI") == "true":
        why = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"a security test must not be skipped in CI: {why}"
    return report

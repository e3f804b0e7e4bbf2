"""How this process ends at a signal while Ray is at work."""

from __future__ import annotations

import ctypes
import signal
import threading
from collections.abc import Iterator

import pytest

from rlinf_core.cluster.ray_process import kept_handler, own_signals
from tests.waiting import until


@pytest.fixture
def came() -> Iterator[threading.Event]:
    """Set by a SIGTERM."""
    event = threading.Event()
    earlier = signal.signal(signal.SIGTERM, lambda number, frame: event.set())
    yield event
    signal.signal(signal.SIGTERM, earlier)


def reset_in_c() -> None:
    """Have SIGTERM end the process, as Ray's C++ code does, past Python."""
    ctypes.CDLL(None).signal(signal.SIGTERM, signal.SIG_DFL)


def is_default_in_c() -> bool:
    """Return whether SIGTERM would end the process, whatever Python knows of it."""
    with open("/proc/self/status") as file:
        caught = next(int(line.split()[1], 16) for line in file if line.startswith("SigCgt"))
    return not caught >> (signal.SIGTERM - 1) & 1


def test_a_handler_that_c_code_takes_away_is_back_at_once(came: threading.Event) -> None:
    with kept_handler():
        reset_in_c()
        until(lambda: not is_default_in_c(), "the handler's return")
        signal.raise_signal(signal.SIGTERM)
        assert came.is_set()
        reset_in_c()
    assert not is_default_in_c()


def test_ray_sets_no_handler_of_its_own_while_it_starts(came: threading.Event) -> None:
    import ray._private.utils as utils

    def end(number: int, frame: object) -> None:
        raise SystemExit(number)

    before = utils.set_sigterm_handler
    with own_signals():
        utils.set_sigterm_handler(end)
        signal.raise_signal(signal.SIGTERM)
    assert came.is_set()
    assert utils.set_sigterm_handler is before


def test_a_signal_waits_while_native_code_connects(came: threading.Event, monkeypatch: pytest.MonkeyPatch) -> None:
    import ray._private.worker as worker

    def connect(mode: str, *, node: str) -> str:
        reset_in_c()
        # It comes before any thread could set a handler again.
        signal.raise_signal(signal.SIGTERM)
        assert not came.is_set()
        return f"{mode} {node}"

    monkeypatch.setattr(worker, "connect", connect)
    with own_signals():
        assert worker.connect("driver", node="head") == "driver head"
        assert came.wait(30)
    assert worker.connect is connect

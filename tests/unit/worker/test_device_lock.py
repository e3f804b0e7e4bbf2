"""Device locks: of threads and of processes, by the names of their devices."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rlinf_core.collective.work import WaitTable
from rlinf_core.errors import CancelledOperationError, CommunicationTimeoutError, RuntimeFailure
from rlinf_core.waiting import OperationKind
from rlinf_core.worker.device_lock import DeviceLock
from tests.waiting import until

SECRET = os.urandom(32)
HOLDER = """
import sys
from rlinf_core.collective.work import WaitTable
from rlinf_core.worker.device_lock import DeviceLock

lock = DeviceLock(bytes.fromhex(sys.argv[1]), ["NVIDIA 0"], WaitTable())
lock.acquire()
print("held", flush=True)
sys.stdin.read()
"""

MakeLock = Callable[..., DeviceLock]


@pytest.fixture
def waits() -> WaitTable:
    table = WaitTable()
    table.patience = 60.0
    return table


@pytest.fixture
def make_lock(waits: WaitTable) -> MakeLock:
    def make(*devices: str, secret: bytes = SECRET) -> DeviceLock:
        return DeviceLock(secret, devices, waits)

    return make


@pytest.fixture
def holder() -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock of the first device."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, SECRET.hex()], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_one_at_a_time(make_lock: MakeLock) -> None:
    inside, most = 0, 0

    def work(_: int) -> None:
        nonlocal inside, most
        lock = make_lock("NVIDIA 0")
        for _round in range(50):
            with lock:
                inside += 1
                most = max(most, inside)
                inside -= 1

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert (inside, most) == (0, 1)


def test_what_shares_nothing_waits_for_nobody(make_lock: MakeLock) -> None:
    others = [make_lock("NVIDIA 0", secret=b"another job"), make_lock("NVIDIA 1"), make_lock(), make_lock()]
    with make_lock("NVIDIA 0"):
        for other in others:
            other.acquire(timeout=0)
            assert other.held
        for other in others:
            other.release()


def test_all_devices_or_none(make_lock: MakeLock) -> None:
    both, last = make_lock("NVIDIA 1", "NVIDIA 0"), make_lock("NVIDIA 1")
    with last:
        with pytest.raises(CommunicationTimeoutError):
            both.acquire(timeout=0.01)
        assert not both.held
        make_lock("NVIDIA 0").acquire(timeout=0)
    with both, pytest.raises(CommunicationTimeoutError, match="device_lock of NVIDIA 1"):
        make_lock("NVIDIA 1").acquire(timeout=0)


def test_a_thread_does_not_wait_for_itself(make_lock: MakeLock) -> None:
    lock = make_lock("NVIDIA 0")
    with lock, pytest.raises(RuntimeFailure, match="already"):
        lock.acquire()
    assert not lock.held
    with pytest.raises(RuntimeFailure, match="does not hold"):
        lock.release()


def test_another_process_is_named_at_the_deadline(make_lock: MakeLock, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(CommunicationTimeoutError) as caught:
        make_lock("NVIDIA 0").acquire(timeout=0.05)
    assert f"process {holder.pid} of this machine holds the lock of NVIDIA 0" in str(caught.value.picture)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_lock_ends_with_its_process(
    make_lock: MakeLock, waits: WaitTable, holder: subprocess.Popen[str], number: int
) -> None:
    lock = make_lock("NVIDIA 0")
    with ThreadPoolExecutor(1) as thread:
        taken = thread.submit(lock.acquire)
        until(waits.waiting)
        (work,) = waits.waiting()
        assert (work.kind, work.target) == (OperationKind.DEVICE_LOCK, "NVIDIA 0")
        os.kill(holder.pid, number)
        taken.result(timeout=60)
    assert not waits.waiting()


def test_a_wait_can_be_cancelled(make_lock: MakeLock, waits: WaitTable) -> None:
    with make_lock("NVIDIA 0"), ThreadPoolExecutor(1) as thread:
        taken = thread.submit(make_lock("NVIDIA 0").acquire)
        until(waits.waiting)
        (work,) = waits.waiting()
        work.fail(CancelledOperationError("the call was cancelled"))
        assert isinstance(taken.exception(timeout=60), CancelledOperationError)

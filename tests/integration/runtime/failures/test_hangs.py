"""A worker that holds up its job is named with its frame, and ended, whatever state it is in."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from typing import Any

import pytest

from rlinf_core.cluster.cluster import Cluster
from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.supervision.client import current_client
from rlinf_core.supervision.verdicts import held_up
from rlinf_core.worker.group.worker_group import WorkerGroup, end_worker
from rlinf_core.worker.worker import Worker
from tests.integration.cli.planted.planted_faults import hold_a_lock
from tests.waiting import until


class Holder(Worker):
    def pid(self) -> int:
        return os.getpid()

    def hold(self, how: str) -> None:
        if how == "stopped":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif how == "zombie":
            ctypes.CDLL(None).pthread_exit(None)
        elif how == "locked":
            hold_a_lock()
        threading.Event().wait()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("stopped", "is stopped, as by SIGSTOP"),
        pytest.param("zombie", "is a zombie", marks=pytest.mark.nightly),
        pytest.param("locked", "holds the interpreter's lock", marks=pytest.mark.nightly),
        pytest.param("hangs", "runs `hold`", marks=pytest.mark.nightly),
    ],
)
def test_holder_is_named_and_ended(cluster: Cluster, how: str, words: str) -> None:
    group: WorkerGroup[Any] = Holder.create_group().launch(cluster, name=f"Holder-{how}")
    client = current_client()
    assert client is not None
    with group:
        held = group.hold(how)
        until(lambda: held_up(client), "a holder", 20)
        (standing,) = held_up(client)
        assert (standing.name, words in standing.how) == (f"Holder-{how}:0", True), standing.how
        end_worker(group, 0, f"given up: {standing.how}")
        with pytest.raises(WorkerGroupError) as raised:
            held.wait(timeout=30)
    (error,) = raised.value.exceptions
    assert isinstance(error, WorkerDiedError)
    assert error.cause == f"given up: {standing.how}"

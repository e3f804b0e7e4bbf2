"""Why the manager of a job did not start."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import pytest

from rlinf_core.cluster import job
from rlinf_core.cluster.job import cause_of
from rlinf_core.context import Session

RAISED = """\
The actor died because of an error raised in its creation task, ray::manager.__init__() (pid=17, ip=127.0.0.1)
  File "actor.py", line 32, in __init__
    self._endpoint = Endpoint(ClusterSecret(secret), ip=ip, directory=folder)
rlinf_core.errors.EnvironmentVariableError: environment: `RLINF_NET_IF` is `eth7`, expected an interface
  help: The network interface by which other nodes reach this one.
"""
KILLED = """\
The actor died unexpectedly before finishing this task.
\tclass_name: ManagerProcess
\tpid: 17
The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR
"""


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (
            RuntimeError(RAISED),
            "rlinf_core.errors.EnvironmentVariableError: environment: `RLINF_NET_IF` is `eth7`, expected an interface",
        ),
        (
            RuntimeError(KILLED),
            "The actor is dead because its worker process has died. Worker exit type: SYSTEM_ERROR",
        ),
        (TimeoutError("Get timed out"), "Get timed out"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_its_true_cause_is_below_the_traceback(error: Exception, cause: str) -> None:
    assert cause_of(error) == cause


def test_simultaneous_threads_share_one_manager_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    together = threading.Barrier(2)

    def connect(*_: object) -> object:
        # A second thread, if it is let in, comes before the first one is done.
        with suppress(threading.BrokenBarrierError):
            together.wait(0.2)
        made.append(object())
        return made[-1]

    monkeypatch.setattr(job, "current_client", lambda: made[-1] if made else None)
    monkeypatch.setattr(job, "_connect", connect)
    with ThreadPoolExecutor(2) as pool:
        lines = [pool.submit(job.connect_driver, Session("job", b"secret"), "127.0.0.1", "node 0", 0) for _ in range(2)]
        assert {id(line.result()) for line in lines} == {id(made[0])}
    assert len(made) == 1

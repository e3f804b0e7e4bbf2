"""Why the manager of a job did not start."""

from __future__ import annotations

import pytest

from rlinf_core.cluster.job import cause_of

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

"""A run whose workers die goes back to its last checkpoint by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from rlinf_core.errors import WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners import events
from rlinf_core.runners.record import RunRecord

T = TypeVar("T")


def with_recovery(attempt: Callable[[], T], record: RunRecord, max_restarts: int) -> T:
    """Return what `attempt` returns. It is called again where a worker had died, after the record has gone back.

    An exception that a worker raised is not a death: it would come again.

    Args:
        attempt: launches all workers and runs to the end, from `record.step` on. It ends its workers before it raises.
        record: of the run.
        max_restarts: how often it is called again at most.

    Raises:
        WorkerGroupError: what was raised, or the death of a worker after the last restart.
    """
    restart = 0
    while True:
        try:
            return attempt()
        except WorkerGroupError as error:
            cause = death(error)
            if cause is None or restart >= max_restarts:
                raise
            restart += 1
            step = record.go_back()
            record.tell(events.RunRestarted(step, restart, max_restarts, str(cause).splitlines()[0]))


def death(error: WorkerGroupError) -> WorkerDiedError | None:
    """Return the death that is the first cause of a failure, or None when it has another one."""
    first: BaseException = error.__cause__ if isinstance(error.__cause__, WorkerGroupError) else error
    while isinstance(first, BaseExceptionGroup):
        first = first.exceptions[0]
    return first if isinstance(first, WorkerDiedError) else None

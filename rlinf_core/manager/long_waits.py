"""Slow-wait warnings, rate-limited."""

from __future__ import annotations

from rlinf_core.waiting import FIRST_WORD_AFTER, RUNNING, Operation, OperationKind, Publication

# Group calls and peer lookups have their own messages.
_SILENT = frozenset({*RUNNING, OperationKind.IDLE, OperationKind.CALL, OperationKind.LAUNCH, OperationKind.CONNECT})


class LongWaits:
    """The record of logged waits: a wait is logged when it lasts twice as long as any similar one before.

    So a long wait is logged at growing intervals, and regular waits of equal length, as in training steps, only once.
    """

    def __init__(self, first_word_after: float = FIRST_WORD_AFTER) -> None:
        self._first_word_after = first_word_after
        # By operation and target: the duration from which the next wait is logged.
        self._silence: dict[tuple[OperationKind, str], float] = {}
        # By serial: the age of an operation when a wait for it was first seen; before, its process may have done other
        # work.
        self._since: dict[int, float] = {}

    def due(self, publication: Publication) -> list[Operation]:
        """Return the operations to log now; called about every second with the current operations of the process."""
        waited_for = [
            operation
            for operation in publication.operations
            if not (operation.operation.detached or operation.operation.kind in _SILENT)
        ]
        self._since = {
            operation.operation.serial: self._since.get(operation.operation.serial, operation.age)
            for operation in waited_for
        }
        due: list[Operation] = []
        for wait in waited_for:
            operation = wait.operation
            waited, like_it = wait.age - self._since[operation.serial], (operation.kind, operation.target)
            if waited >= self._silence.get(like_it, self._first_word_after):
                self._silence[like_it] = 2 * waited
                due.append(operation)
        return due

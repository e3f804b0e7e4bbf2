"""Waits of a process that have lasted so long that it says a word about them."""

from __future__ import annotations

from rlinf_core.waiting import FIRST_WORD_AFTER, Operation, OperationKind, Publication

# A call on a group speaks for itself, and so does a look-up of a peer.
_SILENT = frozenset(
    {OperationKind.IDLE, OperationKind.METHOD, OperationKind.CALL, OperationKind.LAUNCH, OperationKind.CONNECT}
)


class LongWaits:
    """The memory of what has been told: a wait is worth a word when it lasts twice as long as any like it before.

    So one that lasts is told of at growing intervals, and workers that wait as long in each step, as trainers do, fall
    silent after the first.
    """

    def __init__(self, first_word_after: float = FIRST_WORD_AFTER) -> None:
        self._first_word_after = first_word_after
        # By what is waited in and for whom: how long the next wait may last in silence.
        self._silence: dict[tuple[OperationKind, str], float] = {}
        # By serial: the age at which an operation was first seen waited for. Its process may have gone on before.
        self._since: dict[int, float] = {}

    def due(self, publication: Publication) -> list[Operation]:
        """Return what to say a word about now; to be asked every second or so, with all that the process is in."""
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

"""Calls that run tasks on agent processes, with reassignment of the tasks of dead processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from recipes.agent.loop.protocols import AgentGroup
from recipes.language.loop.prompts import GenerationReport, Prompt
from rlinf_core import WorkerDiedError, WorkerGroupError, WorkerGroupHandle

# Maximum reassignments of a task: one that kills its process must not kill all of them.
_MOST_MOVES: Final = 3
LOGGER = logging.getLogger("rlinf")


class _Call(NamedTuple):
    """A call that has not returned: the ranks that it was made on, and the tasks that it is for."""

    ranks: tuple[int, ...]
    tasks: tuple[Prompt, ...]
    handle: WorkerGroupHandle[GenerationReport]


class TaskCalls:
    """Runs tasks on agent processes, and reassigns those of a process that dies to the others.

    Args:
        agents: the group.
        processes: how many it has.

    Attributes:
        lost: processes that have died.
        moved: tasks that were given to another process, since `take_moved`.
    """

    def __init__(self, agents: AgentGroup, processes: int) -> None:
        self._agents = agents
        self._alive = list(range(processes))
        self._calls: list[_Call] = []
        self._moves: Counter[int] = Counter()
        self.lost = self.moved = 0

    def begin(self, tasks: Sequence[Prompt]) -> None:
        """Have tasks done, by the processes that they name as far as these live."""
        self._moves.clear()
        self._call(tuple(self._alive), self._dealt(tasks))

    def done(self) -> bool:
        """Return whether all tasks are done, or `wait` would raise. Reassigns the tasks of processes that died."""
        for call in [call for call in self._calls if call.handle.done()]:
            self._calls.remove(call)
            try:
                call.handle.wait()
            except WorkerGroupError as error:
                self._after(error, call)
        return not self._calls

    def wait(self) -> list[GenerationReport]:
        """Return without waiting, after `done`; generated tokens are counted by the engines."""
        return []

    def take_moved(self) -> int:
        """Return how many tasks were reassigned since the last call."""
        moved, self.moved = self.moved, 0
        return moved

    def _call(self, ranks: tuple[int, ...], tasks: tuple[Prompt, ...]) -> None:
        self._calls.append(_Call(ranks, tasks, self._agents.execute_on(*ranks).generate(tasks)))

    def _dealt(self, tasks: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Return tasks with those of dead processes distributed over the others."""
        alive, count = set(self._alive), len(self._alive)
        return tuple(
            task if task.worker in alive else task._replace(worker=self._alive[task.slot % count]) for task in tasks
        )

    def _after(self, error: WorkerGroupError, call: _Call) -> None:
        """Continue without the processes that died.

        Raises:
            WorkerGroupError: another failure, no process is left, or a task was reassigned too often.
        """
        dead = {rank for rank, failure in error.by_rank.items() if _died(failure, f"{error.group}:{rank}")}
        if len(dead) < len(error.ranks):
            raise error
        self.lost += len(dead & set(self._alive))
        self._alive = [worker for worker in self._alive if worker not in dead]
        orphans = [task for task in call.tasks if task.worker in dead]
        self._moves.update(orphan.slot for orphan in orphans)
        if not self._alive or any(self._moves[orphan.slot] > _MOST_MOVES for orphan in orphans):
            raise error
        living: list[tuple[int, Any]] = [
            pending for pending in zip(call.ranks, call.handle.references, strict=True) if pending[0] not in dead
        ]
        if living:
            ranks = tuple(rank for rank, _ in living)
            handle = self._agents.execute_on(*ranks).handle("generate", [reference for _, reference in living])
            self._calls.append(_Call(ranks, tuple(task for task in call.tasks if task.worker not in dead), handle))
        if orphans:
            tasks = self._dealt(orphans)
            self._call(tuple(sorted({task.worker for task in tasks})), tasks)
        self.moved += len(orphans)
        reason = str(error.exceptions[0]).partition("\n")[0]
        LOGGER.warning(
            "%s: reassigned its %d tasks to the %d remaining agent processes", reason, len(orphans), len(self._alive)
        )


def _died(failure: Exception, address: str) -> bool:
    """Return whether a failure is the death of the worker itself, rather than of one that it depends on."""
    return isinstance(failure, WorkerDiedError) and failure.address == address

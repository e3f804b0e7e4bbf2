"""The calls by which agent processes do tasks, and what becomes of those of a process that dies."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from recipes.agent.loop.protocols import AgentGroup
from recipes.language.loop.prompts import GenerationReport, Prompt
from rlinf_core import WorkerDiedError, WorkerGroupError, WorkerGroupHandle

# How often a task is given to another process: one that ends its process by itself must not end all of them.
_MOST_MOVES: Final = 3
LOGGER = logging.getLogger("rlinf")


class _Call(NamedTuple):
    """A call that has not returned: the ranks that it was made on, and the tasks that it is for."""

    ranks: tuple[int, ...]
    tasks: tuple[Prompt, ...]
    handle: WorkerGroupHandle[GenerationReport]


class TaskCalls:
    """Has agent processes do tasks. Those of a process that dies are given to the others, after their own.

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
        """Return whether all tasks are done, or `wait` raises. Tasks of processes that died meanwhile are moved."""
        for call in [each for each in self._calls if each.handle.done()]:
            self._calls.remove(call)
            try:
                call.handle.wait()
            except WorkerGroupError as error:
                self._after(error, call)
        return not self._calls

    def wait(self) -> list[GenerationReport]:
        """Return at once, after `done`; what agents drew is counted where it was drawn."""
        return []

    def take_moved(self) -> int:
        """Return how many tasks were given to another process since this was asked last."""
        moved, self.moved = self.moved, 0
        return moved

    def _call(self, ranks: tuple[int, ...], tasks: tuple[Prompt, ...]) -> None:
        self._calls.append(_Call(ranks, tasks, self._agents.execute_on(*ranks).generate(tasks)))

    def _dealt(self, tasks: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Return tasks, those of dead processes shared out among the others."""
        alive, count = set(self._alive), len(self._alive)
        return tuple(
            each if each.worker in alive else each._replace(worker=self._alive[each.slot % count]) for each in tasks
        )

    def _after(self, error: WorkerGroupError, call: _Call) -> None:
        """Go on without the processes that have died.

        Raises:
            WorkerGroupError: something else has happened, nobody is left, or a task was moved too often.
        """
        dead = {rank for rank, failure in error.by_rank.items() if _died(failure, f"{error.group}:{rank}")}
        if len(dead) < len(error.ranks):
            raise error
        self.lost += len(dead & set(self._alive))
        self._alive = [each for each in self._alive if each not in dead]
        orphans = [each for each in call.tasks if each.worker in dead]
        self._moves.update(each.slot for each in orphans)
        if not self._alive or any(self._moves[each.slot] > _MOST_MOVES for each in orphans):
            raise error
        living: list[tuple[int, Any]] = [
            each for each in zip(call.ranks, call.handle.references, strict=True) if each[0] not in dead
        ]
        if living:
            ranks = tuple(rank for rank, _ in living)
            handle = self._agents.execute_on(*ranks).handle("generate", [reference for _, reference in living])
            self._calls.append(_Call(ranks, tuple(each for each in call.tasks if each.worker not in dead), handle))
        if orphans:
            tasks = self._dealt(orphans)
            self._call(tuple(sorted({each.worker for each in tasks})), tasks)
        self.moved += len(orphans)
        reason = str(error.exceptions[0]).partition("\n")[0]
        LOGGER.warning(
            "%s: its %d tasks are given to the %d agent processes that are left", reason, len(orphans), len(self._alive)
        )


def _died(failure: Exception, address: str) -> bool:
    """Return whether a failure is the death of a worker itself, and not of one that it needs."""
    return isinstance(failure, WorkerDiedError) and failure.address == address

"""Calls that run tasks on agent processes; those of a dead one are begun again by its successor, or by others."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

from recipes.agent.loop.protocols import AgentGroup
from recipes.language.prompts.prompt_messages import GenerationReport, Prompt
from rlinf_core import WorkerDiedError, WorkerGroupError, WorkerGroupHandle

# Deaths of processes that a task was given to, after which it is run with no other task beside it, and after which it
# is not run again.
_SUSPECTED: Final = 2
_SET_ASIDE: Final = 3
LOGGER = logging.getLogger("rlinf")


class _Call(NamedTuple):
    """A call that has not returned: the ranks that it was made on, and the tasks that it is for."""

    ranks: tuple[int, ...]
    tasks: tuple[Prompt, ...]
    handle: WorkerGroupHandle[GenerationReport]


class TaskCalls:
    """Runs tasks on agent processes.

    Those of a process that dies are begun again: by a new one in its place, or by the others. One that was there when
    processes died is run alone then, so that it is known which task they die of. A task that does it once more is set
    aside: it is no longer run, and its answers count as failed.

    Args:
        agents: the group.
        processes: the number of agent processes.
        relaunch: starts the processes again of whose deaths an error tells; returns False where that cannot be.
        note: is told of a task that is set aside, and how its processes died.

    Attributes:
        lost: processes that have died.
        moved: tasks that were given to another process, since `take_moved`.
        set_aside: tasks so far.
    """

    def __init__(
        self,
        agents: AgentGroup,
        processes: int,
        relaunch: Callable[[WorkerGroupError], bool] = lambda error: False,
        note: Callable[[Prompt, Sequence[str]], None] = lambda task, deaths: None,
    ) -> None:
        self._agents = agents
        self._relaunch = relaunch
        self._note = note
        self._alive = list(range(processes))
        self._calls: list[_Call] = []
        # How the processes of each task died, by slot; and tasks that wait to be run alone.
        self._deaths: dict[int, list[str]] = {}
        self._suspects: deque[Prompt] = deque()
        self.lost = self.moved = self.set_aside = 0

    def begin(self, tasks: Sequence[Prompt]) -> None:
        """Have tasks done, by the processes that they name as far as these live."""
        self._deaths.clear()
        self._suspects.clear()
        self._call(tuple(self._alive), self._dealt(tasks))

    def done(self) -> bool:
        """Return whether all tasks are done, or `wait` would raise. Reassigns the tasks of processes that died."""
        for call in [call for call in self._calls if call.handle.done()]:
            self._calls.remove(call)
            try:
                call.handle.wait()
            except WorkerGroupError as error:
                self._after(error, call)
        idle = [rank for rank in self._alive if all(rank not in call.ranks for call in self._calls)]
        if self._suspects and idle:
            self._call(idle[:1], (self._suspects.popleft()._replace(worker=idle[0]),))
        return not self._calls

    def wait(self) -> list[GenerationReport]:
        """Return without waiting, after `done`; generated tokens are counted by the engines."""
        return []

    def take_moved(self) -> int:
        """Return how many tasks were reassigned since the last call."""
        moved, self.moved = self.moved, 0
        return moved

    def _call(self, ranks: Sequence[int], tasks: tuple[Prompt, ...]) -> None:
        self._calls.append(_Call(tuple(ranks), tasks, self._agents.execute_on(*ranks).generate(tasks)))

    def _dealt(self, tasks: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Return tasks with those of dead processes distributed over the others."""
        alive, count = set(self._alive), len(self._alive)
        return tuple(
            task if task.worker in alive else task._replace(worker=self._alive[task.slot % count]) for task in tasks
        )

    def _after(self, error: WorkerGroupError, call: _Call) -> None:
        """Continue without the processes that died.

        Raises:
            WorkerGroupError: another failure, or no process is left.
        """
        dead = {rank for rank, failure in error.by_rank.items() if _died(failure, f"{error.group}:{rank}")}
        if len(dead) < len(error.ranks):
            raise error
        self.lost += len(dead & set(self._alive))
        orphans = [task for task in call.tasks if task.worker in dead]
        if not self._relaunch(error):
            self._alive = [worker for worker in self._alive if worker not in dead]
        if not self._alive:
            raise error
        living: list[tuple[int, Any]] = [
            pending for pending in zip(call.ranks, call.handle.references, strict=True) if pending[0] not in dead
        ]
        if living:
            ranks = tuple(rank for rank, _ in living)
            handle = self._agents.execute_on(*ranks).handle("generate", [reference for _, reference in living])
            self._calls.append(_Call(ranks, tuple(task for task in call.tasks if task.worker not in dead), handle))
        self.moved += len(orphans)
        reason = str(error.exceptions[0]).partition("\n")[0]
        tasks = self._dealt([orphan for orphan in orphans if not self._is_suspected(orphan, reason)])
        if tasks:
            self._call(sorted({task.worker for task in tasks}), tasks)
        takers = "its successor" if dead <= set(self._alive) else f"the {len(self._alive)} remaining agent processes"
        LOGGER.warning("%s: gave its %d tasks to %s", reason, len(orphans), takers)

    def _is_suspected(self, task: Prompt, reason: str) -> bool:
        """Count a death for a task; return whether it waits to be run alone, or for its failure to be told."""
        deaths = self._deaths.setdefault(task.slot, [])
        if not task.set_aside:
            deaths.append(reason)
        if len(deaths) < _SUSPECTED:
            return False
        if len(deaths) >= _SET_ASIDE and not task.set_aside:
            task = task._replace(set_aside=True)
            self.set_aside += 1
            self._note(task, deaths)
        self._suspects.append(task)
        return True


def _died(failure: Exception, address: str) -> bool:
    """Return whether a failure is the death of the worker itself, rather than of one that it depends on."""
    return isinstance(failure, WorkerDiedError) and failure.address == address

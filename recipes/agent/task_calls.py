"""Calls that run tasks on a group of agent processes.

Tasks of a dead process are restarted by its successor, or by others.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

from recipes.language.answers.prompt_messages import GenerationReport, Prompt
from recipes.language.loop.worker_groups import AnsweringGroup, EngineGroup, Nothing
from rlinf_core import WorkerDiedError, WorkerGroupError, WorkerGroupHandle
from rlinf_core.runners.recovery import Suspects


class TurnGroup(EngineGroup, Protocol):
    """The workers that generate turns."""

    def serve(self) -> WorkerGroupHandle[GenerationReport]: ...
    def serve_forever(self) -> Nothing: ...


class AgentCalls(AnsweringGroup, Protocol):
    """The workers that run agents."""

    def generate_forever(self) -> Nothing: ...


class AgentView(Protocol):
    """Calls on some of the workers that run agents."""

    def generate(self, prompts: tuple[Prompt, ...], /) -> WorkerGroupHandle[GenerationReport]: ...
    def handle(self, method: str, references: list[Any], /) -> WorkerGroupHandle[Any]: ...


class AgentGroup(AgentCalls, Protocol):
    """The workers that run agents, called all together or by rank."""

    def execute_on(self, *ranks: int) -> AgentView: ...


class IndexGroup(Protocol):
    """The workers that hold the index of `search`."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def search(self, queries: list[str], /) -> WorkerGroupHandle[list[str | None]]: ...


LOGGER = logging.getLogger("rlinf")


class _Call(NamedTuple):
    """A call that has not returned.

    Attributes:
        ranks: the called ranks.
        tasks: its tasks; none if it only checks that a process is alive.
        handle: the handle of the call.
        lives: the number of restarts of each rank at the time of the call.
        alone: whether its process may get no other task.
    """

    ranks: tuple[int, ...]
    tasks: tuple[Prompt, ...]
    handle: WorkerGroupHandle[GenerationReport]
    lives: tuple[int, ...]
    alone: bool = False


class TaskCalls:
    """Runs tasks on agent processes.

    Tasks of a dead process are restarted by its successor, or by the other processes. A task that repeatedly had its
    process die is then run alone, to find out which task kills processes. If it does so again, it is quarantined: it is
    no longer run, and its answers count as failed.

    Args:
        agents: the worker group.
        processes: the number of agent processes.
        relaunch: restarts the processes whose deaths an error reports; returns False where that is impossible.
        note: receives each quarantined task, and how its processes died.

    Attributes:
        lost: the number of processes that have died.
        moved: the number of tasks reassigned since `take_moved`.
        set_aside: the number of quarantined tasks.
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
        # How the processes of each task died, by slot; and the tasks waiting to run alone.
        self._deaths: Suspects[Prompt] = Suspects()
        self._suspects: deque[Prompt] = deque()
        # Tasks of dead processes, waiting for a process that runs no suspect.
        self._orphans: list[Prompt] = []
        self._lives = [0] * processes
        # A process that has just answered an empty call.
        self._answering: int | None = None
        self.lost = self.moved = self.set_aside = 0

    def begin(self, tasks: Sequence[Prompt]) -> None:
        """Start tasks on the processes that they name, or on others if those are dead."""
        self._deaths = Suspects()
        self._suspects.clear()
        self._orphans.clear()
        self._call(tuple(self._alive), _dealt(tasks, self._alive))

    def done(self) -> bool:
        """Return whether all tasks are done, or `wait` would raise. Reassigns the tasks of processes that died."""
        for call in [call for call in self._calls if call.handle.done()]:
            self._calls.remove(call)
            try:
                call.handle.wait()
            except WorkerGroupError as error:
                self._after(error, call)
            else:
                if not call.tasks:
                    self._answering = call.ranks[0]
        alone = {call.ranks[0] for call in self._calls if call.alone}
        takers = [rank for rank in self._alive if rank not in alone]
        if self._orphans and takers:
            tasks, self._orphans = _dealt(self._orphans, takers), []
            self._call(sorted({task.worker for task in tasks}), tasks)
        idle = [rank for rank in self._alive if all(rank not in call.ranks for call in self._calls)]
        if self._suspects and idle:
            # A process that died while it was idle must not be counted as killed by the task.
            answering, self._answering = self._answering, None
            if answering in idle:
                self._call((answering,), (self._suspects.popleft()._replace(worker=answering),), alone=True)
            else:
                self._call(idle[:1], ())
        return not self._calls

    def wait(self) -> list[GenerationReport]:
        """Return without waiting, after `done`; generated tokens are counted by the engines."""
        return []

    def take_moved(self) -> int:
        """Return how many tasks were reassigned since the last call."""
        moved, self.moved = self.moved, 0
        return moved

    def _call(self, ranks: Sequence[int], tasks: tuple[Prompt, ...], *, alone: bool = False) -> None:
        handle = self._agents.execute_on(*ranks).generate(tasks)
        self._calls.append(_Call(tuple(ranks), tasks, handle, tuple(self._lives[rank] for rank in ranks), alone))

    def _after(self, error: WorkerGroupError, call: _Call) -> None:
        """Continue without the processes that died.

        Raises:
            WorkerGroupError: another failure, or no process is left.
        """
        dead = {rank for rank, failure in error.by_rank.items() if _died(failure, f"{error.group}:{rank}")}
        if len(dead) < len(error.ranks):
            raise error
        # Two calls on one process both report its death, the second one possibly after its successor has started.
        lives = dict(zip(call.ranks, call.lives, strict=True))
        last = {rank for rank in dead & set(self._alive) if lives[rank] == self._lives[rank]}
        self.lost += len(last)
        orphans = [task for task in call.tasks if task.worker in dead]
        if last:
            failures = {rank: error.by_rank[rank] for rank in last}
            if self._relaunch(WorkerGroupError(error.group, error.method, failures, len(self._lives))):
                for rank in last:
                    self._lives[rank] += 1
            else:
                self._alive = [worker for worker in self._alive if worker not in last]
        if not self._alive:
            raise error
        living: list[tuple[int, Any]] = [
            pending for pending in zip(call.ranks, call.handle.references, strict=True) if pending[0] not in dead
        ]
        if living:
            ranks = tuple(rank for rank, _ in living)
            handle = self._agents.execute_on(*ranks).handle("generate", [reference for _, reference in living])
            tasks = tuple(task for task in call.tasks if task.worker not in dead)
            self._calls.append(_Call(ranks, tasks, handle, tuple(lives[rank] for rank in ranks), call.alone))
        self.moved += len(orphans)
        reason = str(error.exceptions[0]).partition("\n")[0]
        self._orphans += [orphan for orphan in orphans if not self._is_suspected(orphan, reason)]
        takers = "its successor" if dead <= set(self._alive) else f"the {len(self._alive)} remaining agent processes"
        LOGGER.warning("%s: gave its %d tasks to %s", reason, len(orphans), takers)

    def _is_suspected(self, task: Prompt, reason: str) -> bool:
        """Count a death for a task; return whether it waits to run alone, or to be reported as failed."""
        name = str(task.slot)
        if name in self._deaths.due():
            # The task was running alone.
            task = task._replace(set_aside=True)
            self.set_aside += 1
            self._note(task, self._deaths.killed(name, reason))
        elif not task.set_aside:
            self._deaths.died_of({name: task}, reason)
            if name not in self._deaths.due():
                return False
        self._suspects.append(task)
        return True


def _dealt(tasks: Sequence[Prompt], takers: Sequence[int]) -> tuple[Prompt, ...]:
    """Return tasks, reassigned to `takers` where they name none of them."""
    ranks = set(takers)
    return tuple(
        task if task.worker in ranks else task._replace(worker=takers[task.slot % len(takers)]) for task in tasks
    )


def _died(failure: Exception, address: str) -> bool:
    """Return whether a failure is the death of the worker itself rather than of a worker it depends on."""
    return isinstance(failure, WorkerDiedError) and failure.address == address

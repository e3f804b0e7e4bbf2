"""Tasks of agents in a simulated world: the real `TaskCalls`, and processes that die by chance, or of a task.

Judged is that every task counts once, that a task which kills its processes is set aside after three deaths, and that
none is set aside that was not alone with the last process that died of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from recipes.agent.task_calls import TaskCalls
from recipes.language.answers.prompt_messages import Prompt
from rlinf_core import WorkerDiedError, WorkerGroupError
from tests.unit.simulation.world import World

_NAME = "agents"
_LOOK = 0.05


class RankCall:
    """A call on one process, which does its tasks at the same time."""

    def __init__(self, run: TaskRun, rank: int, tasks: tuple[Prompt, ...]) -> None:
        self.run, self.rank, self.life = run, rank, run.lives[rank]
        self.tasks = [task for task in tasks if task.worker == rank]
        self.over = False
        self.error: Exception | None = None
        self._left = len(self.tasks)
        world = run.world
        if self.life is None:
            self.die()
            return
        if not self.tasks:
            world.soon(self._end)
        for task in self.tasks:
            end = self._kill if task.slot in run.deadly and not task.set_aside else self._one
            world.after(world.random.random() * 2, end, task)

    @property
    def slots(self) -> list[int]:
        return [task.slot for task in self.tasks]

    @property
    def active(self) -> bool:
        return not self.over and self.error is None

    def die(self) -> None:
        self.error = WorkerDiedError(f"{_NAME}:{self.rank}")

    def _one(self, task: Prompt) -> None:
        if self.active:
            self._left -= 1
            if not self._left:
                self.run.world.soon(self._end)

    def _kill(self, task: Prompt) -> None:
        if self.active:
            self.run.world.note("task", task.slot, "kills", self.rank, self.slots)
            self.run.kills[task.slot] += 1
            self.run.world.check(self.run.kills[task.slot] <= 3, "kills more than thrice:", task.slot)
            self.run.kill(self.rank)

    def _end(self) -> None:
        if self.active:
            self.over = True
            self.run.done.update(self.slots)


class GroupCall:
    """Stands for the handle of calls on several processes."""

    def __init__(self, calls: Sequence[RankCall]) -> None:
        self.references = tuple(calls)

    def done(self) -> bool:
        return any(call.error for call in self.references) or all(call.over for call in self.references)

    def wait(self) -> list[None]:
        failures = {call.rank: call.error for call in self.references if call.error is not None}
        if failures:
            raise WorkerGroupError(_NAME, "generate", failures, 8)
        return [None for _ in self.references]


class AgentView:
    """Stands for some processes of the group."""

    def __init__(self, run: TaskRun, ranks: tuple[int, ...]) -> None:
        self._run, self._ranks = run, ranks

    def generate(self, tasks: tuple[Prompt, ...]) -> GroupCall:
        calls = [RankCall(self._run, rank, tasks) for rank in self._ranks]
        self._run.calls += calls
        self._run.check_company()
        return GroupCall(calls)

    def handle(self, _method: str, references: list[RankCall]) -> GroupCall:
        return GroupCall(references)


class TaskRun:
    """The tasks of one step, until each of them counts."""

    def __init__(self, world: World) -> None:
        self.world = world
        draw = world.random
        self.processes = draw.randint(1, 4)
        # The life of each process; None: it is dead.
        self.lives: list[int | None] = [1] * self.processes
        self.restarts = draw.randint(0, 12)
        count = draw.randint(1, 12)
        self.tasks = [Prompt(slot, slot, 1, slot % self.processes, 4, 1.0) for slot in range(count)]
        self.deadly = set(draw.sample(range(count), draw.choice((0, 0, 1, min(2, count)))))
        self.calls: list[RankCall] = []
        self.done: Counter[int] = Counter()
        self.deaths: list[list[int]] = []
        self.kills: Counter[int] = Counter()
        self.aside: dict[int, int] = {}
        # The last death by chance.
        self._chance, self._killed = -1.0, 0
        self.lost = False
        group: Any = self
        self.task_calls = TaskCalls(group, self.processes, self._relaunch, self._set_aside)

    def execute_on(self, *ranks: int) -> AgentView:
        return AgentView(self, ranks)

    def kill(self, rank: int) -> None:
        if self.lives[rank] is None:
            return
        self.lives[rank] = None
        active = [call for call in self.calls if call.rank == rank and call.active]
        self.deaths.append([slot for call in active for slot in call.slots])
        for call in active:
            call.die()

    def check_company(self) -> None:
        """Check that a task which was there at two deaths has its process for itself."""
        there = Counter(slot for death in self.deaths for slot in death)
        for rank in range(self.processes):
            slots = [slot for call in self.calls if call.rank == rank and call.active for slot in call.slots]
            suspected = [slot for slot in slots if there[slot] >= 2]
            self.world.check(not suspected or len(slots) == 1, "suspects in company:", slots, suspected)

    def play(self) -> None:
        self.world.note("begins", self.processes, len(self.tasks), *sorted(self.deadly))
        for _ in range(self.world.random.randint(0, 2)):
            self.world.after(self.world.random.random() * 3, self._kill_any)
        self.task_calls.begin(self.tasks)
        self.world.soon(self._look)
        self.world.run(200.0)
        self._judge()

    def _kill_any(self) -> None:
        rank = self.world.random.randrange(self.processes)
        self.world.note("kills", rank)
        self._chance, self._killed = self.world.now, self._killed + 1
        self.kill(rank)

    def _look(self) -> None:
        """Look as the loop does, until all is done or the failure is raised."""
        try:
            if self.task_calls.done():
                return
        except WorkerGroupError:
            self.lost = True
            return
        self.world.after(_LOOK, self._look)

    def _relaunch(self, error: WorkerGroupError) -> bool:
        # A limit within a time refuses now and then.
        if not self.restarts or self.world.chance(0.1):
            return False
        self.restarts -= 1
        for rank in error.by_rank:
            self.world.check(self.lives[rank] is None, "a living process is started again:", rank)
            self.lives[rank] = 1
        self.world.note("starts again", *error.by_rank)
        return True

    def _set_aside(self, task: Prompt, deaths: Sequence[str]) -> None:
        check = self.world.check
        check(task.slot not in self.aside, "set aside twice:", task.slot)
        # A death by chance between two looks cannot be told from one of the task that came then.
        if self.world.now - self._chance > 2 * _LOOK:
            check([task.slot] in self.deaths, "set aside in company:", task.slot, self.deaths)
        self.aside[task.slot] = len(deaths)
        self.world.note("set aside", task.slot, *deaths)

    def _judge(self) -> None:
        check = self.world.check
        if self.lost:
            check(not any(self.lives), "a failure is raised although a process lives:", self.lives)
            return
        once = {task.slot: 1 for task in self.tasks}
        check(dict(self.done) == once, "tasks do not count once each:", dict(self.done))
        check(self.deadly <= set(self.aside), "it kills, and is not set aside:", self.deadly, self.aside)
        check(all(count == 3 for count in self.aside.values()), "set aside after", self.aside)
        innocent = set(self.aside) - self.deadly
        check(len(innocent) <= self._killed, "set aside without a fault:", innocent)

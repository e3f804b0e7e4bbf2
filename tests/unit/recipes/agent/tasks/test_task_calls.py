"""What becomes of the tasks of agent processes that die, with processes that are values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest

from recipes.agent.loop.task_calls import AgentGroup, TaskCalls
from recipes.language.prompts.prompt_messages import Prompt
from rlinf_core import WorkerDiedError, WorkerGroupError

NAME = "agents"


class Task:
    """A call on one rank: the tasks that are the rank's own, and how it ended."""

    def __init__(self, rank: int, tasks: tuple[Prompt, ...]) -> None:
        self.rank = rank
        self.slots = [task.slot for task in tasks if task.worker == rank]
        self.set_aside = any(task.set_aside for task in tasks)
        self.over = False
        self.error: Exception | None = None

    @property
    def going(self) -> bool:
        return not self.over and self.error is None


class Call:
    """A handle of calls on several ranks."""

    def __init__(self, calls: list[Task]) -> None:
        self.references = tuple(calls)

    def failures(self) -> dict[int, Exception]:
        return {reference.rank: reference.error for reference in self.references if reference.error is not None}

    def done(self) -> bool:
        return bool(self.failures()) or all(reference.over for reference in self.references)

    def wait(self) -> list[None]:
        if self.failures():
            raise WorkerGroupError(NAME, "generate", self.failures(), 4)
        return [None for _ in self.references]


class Group:
    """Agent processes; a dead one fails every call."""

    def __init__(self) -> None:
        self.calls: list[Task] = []
        self.dead: set[int] = set()

    def execute_on(self, *ranks: int) -> Any:
        group = self

        class View:
            def generate(self, tasks: tuple[Prompt, ...]) -> Call:
                made = [Task(rank, tasks) for rank in ranks]
                group.calls += made
                group.kill(*group.dead)
                return Call(made)

            def handle(self, method: str, references: list[Task]) -> Call:
                assert [reference.rank for reference in references] == list(ranks)
                return Call(references)

        return View()

    def kill(self, *ranks: int) -> None:
        self.dead.update(ranks)
        for call in self.calls:
            if call.rank in ranks and not call.over:
                call.error = WorkerDiedError(f"{NAME}:{call.rank}")

    def finish(self) -> list[int]:
        """End all calls that go on, and return the tasks that were done by that."""
        going = [call for call in self.calls if not call.over and call.error is None]
        for entry in going:
            entry.over = True
        return sorted(slot for item in going for slot in item.slots)


def tasks(count: int, workers: int) -> list[Prompt]:
    return [Prompt(slot, slot, 1, slot % workers, 4, 1.0) for slot in range(count)]


def begun(count: int = 12, workers: int = 4) -> tuple[Group, TaskCalls]:
    group = Group()
    calls = TaskCalls(cast("AgentGroup", group), workers)
    calls.begin(tasks(count, workers))
    return group, calls


def test_tasks_of_a_dead_process_are_each_done_once() -> None:
    group, calls = begun()

    group.kill(1, 3)
    assert not calls.done()
    done = group.finish()

    assert calls.done()
    assert done == list(range(12))
    assert (calls.lost, calls.take_moved(), calls.take_moved()) == (2, 6, 0)


def test_a_process_that_was_given_tasks_may_die_too() -> None:
    group, calls = begun()

    group.kill(1)
    assert not calls.done()
    group.kill(0)
    done: list[int] = []
    while not calls.done():
        done += group.finish()

    assert sorted(done) == list(range(12))
    assert calls.lost == 2


def test_later_tasks_go_to_the_living_alone() -> None:
    group, calls = begun()
    group.kill(2)
    calls.done()
    group.finish()
    assert calls.done()

    group.calls.clear()
    calls.begin(tasks(12, 4))

    assert {call.rank for call in group.calls} == {0, 1, 3}
    assert group.finish() == list(range(12))
    assert calls.done()
    assert calls.lost == 1


def test_the_death_of_the_last_process_is_raised() -> None:
    group, calls = begun(workers=2)
    group.kill(0, 1)

    with pytest.raises(WorkerGroupError, match="`agents:0` died"):
        calls.done()


def test_task_that_kills_its_processes_is_set_aside_alone() -> None:
    group = Group()
    output: list[tuple[int, int]] = []
    calls = TaskCalls(
        cast("AgentGroup", group), 3, revived(group), lambda task, deaths: output.append((task.slot, len(deaths)))
    )
    calls.begin(tasks(12, 3))
    done: list[int] = []

    while not calls.done():
        group.kill(*{call.rank for call in group.calls if 5 in call.slots and not call.set_aside and call.going})
        done += group.finish()

    assert output == [(5, 3)]
    assert calls.set_aside == 1
    # Those that shared a process with it twice were run alone, and each counts once.
    assert sorted(done) == list(range(12))


def test_task_that_was_near_two_deaths_is_done() -> None:
    group = Group()
    calls = TaskCalls(cast("AgentGroup", group), 1, revived(group))
    calls.begin(tasks(3, 1))

    for _ in range(2):
        group.kill(0)
        calls.done()
    done = []
    while not calls.done():
        assert len([call for call in group.calls if call.going]) == 1
        done += group.finish()

    assert done == [0, 1, 2]
    assert calls.set_aside == 0


def revived(group: Group) -> Callable[[WorkerGroupError], bool]:
    def relaunch(error: WorkerGroupError) -> bool:
        group.dead.clear()
        return True

    return relaunch


@pytest.mark.parametrize("error", [ValueError("of an agent"), WorkerDiedError("engines:0")])
def test_what_is_no_death_of_an_agent_is_raised(error: Exception) -> None:
    group, calls = begun()
    group.calls[1].error = error

    with pytest.raises(WorkerGroupError):
        calls.done()

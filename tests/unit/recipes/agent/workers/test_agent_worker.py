"""Agent workers: what fails by machinery is run once more, and is no sample where it fails again."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.workers.agent_worker import AgentWorker
from recipes.language.answers.answer_group import Rollout
from recipes.language.answers.exits import Score
from recipes.language.prompts.prompt_messages import Prompt


class Attempts(AgentWorker):
    """An agent worker whose attempts end as given."""

    def __init__(self, *failures: str) -> None:
        self.ended = list(failures)
        self.left: list[Any] = []
        client: Any = self
        self._client = client

    def leave(self, route: Any) -> None:
        self.left.append(route)

    async def _attempt(self, prompt: Any, problem: Any, sample: int, route: Any) -> Any:
        score = Score(0.0, "", failure=self.ended.pop(0))
        return Rollout((), f"{len(self.ended)} left", score=score, figures={"agent/turns": 1.0})


@pytest.mark.parametrize(
    ("failures", "failure", "retries"),
    [(("",), "", 0), (("error", ""), "", 1), (("tool", "tool"), "tool", 1), (("killed",), "killed", 0)],
)
def test_a_failed_run_begins_once_more(failures: tuple[str, ...], failure: str, retries: int) -> None:
    worker, nothing = Attempts(*failures), object()
    run = asyncio.run(worker._run(nothing, nothing, 0, nothing))  # pyright: ignore
    assert run.failure == failure
    assert run.figures == {"agent/turns": 1.0, "agent/retries": retries}
    assert worker.ended == []
    assert worker.left == [nothing]


def test_task_that_is_set_aside_is_no_sample_and_not_run() -> None:
    config: Any = SimpleNamespace(reward=SimpleNamespace(incorrect_reward=0.0))
    worker: Any = object.__new__(AgentWorker)
    worker._config = config
    nothing: Any = object()
    prompt = Prompt(0, 7, 1, 0, 2, 1.0, set_aside=True)

    run = asyncio.run(worker._attempt(prompt, nothing, 1, nothing))

    assert (run.text, run.failure) == ("", "killed")
    assert [segment.sample for segment in run.segments] == [1]

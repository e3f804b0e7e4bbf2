"""Environments of verifiers.

`RLINF_VERIFIERS_PYTHON` names an interpreter with that library and rlinf: `pip install "rlinf-cli[verifiers]"`
in an environment of its own.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.config.tool_config import VerifiersKeys
from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.environments.verifiers_agent import VerifiersAgent, VerifiersError
from recipes.agent.tools.toolbox import Toolbox
from recipes.language.config.problem_config import MOST_GENERATED
from rlinf_core import ConfigError
from tests.unit.recipes.agent.test_llm import SETTINGS, Script

PYTHON = os.environ.get("RLINF_VERIFIERS_PYTHON", "")
PROGRAM = "tests.unit.recipes.agent.environments.verifiers_episode"
ROOT = Path(__file__).parents[5]
CALL = '<tool_call>{"name": "backwards", "arguments": {"word": "%s"}}</tool_call>'

with_verifiers = [
    pytest.mark.nightly,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PYTHON, reason="RLINF_VERIFIERS_PYTHON names no interpreter with verifiers"),
]


def played(*turns: str, seed: int, options: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what the program of `verifiers_episode.py` printed."""
    asked = json.dumps({"options": options or {}, "seed": seed, "turns": turns})
    env = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{Path(__file__).parent}"}
    done = subprocess.run(
        [PYTHON, "-m", PROGRAM, asked], capture_output=True, text=True, check=True, env=env, cwd=ROOT, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


class TestRealOnes:
    """With the library, as it is installed."""

    pytestmark = with_verifiers

    def test_its_reward_is_that_of_the_run(self) -> None:
        right, wrong = played("enots", seed=0), played("stone", seed=0)
        assert (right["reward"], wrong["reward"]) == (2.0, 0.0)
        assert right["parts"] == {"spelled": 2.0}
        assert right["told"] == [["system", "Answer by one word."], ["user", "Spell stone backwards."]]
        assert right["drawn"] == ["enots\0"]

    def test_its_tools_are_called_and_not_learned(self) -> None:
        episode = played(CALL % "river", "revir", seed=MOST_GENERATED, options={"with_tool": True})
        assert episode["reward"] == 2.0
        # A task of evaluation: the first, which no seed of training leads to.
        assert episode["told"][1:] == [["user", "Spell river backwards."], ["tool", "revir"]]
        assert episode["drawn"] == [f"{CALL % 'river'}\0revir\0"]

    def test_a_run_without_further_turns_is_scored_as_it_is(self) -> None:
        episode = played(*[CALL % "stone"] * 4, seed=0, options={"with_tool": True})
        assert episode["reward"] == 0.0


class Stub:
    """An environment as verifiers has them, of which an episode is one question."""

    def __init__(self, tasks: int) -> None:
        self.taskset = list(range(tasks))
        self.asked: list[int] = []
        self.served = 0

    @asynccontextmanager
    async def serving(self) -> AsyncGenerator[None]:
        self.served += 1
        yield

    async def run_episode(self, task: int, context: Any) -> Any:
        self.asked.append(task)
        request = urllib.request.Request(
            f"{context.client.base_url}/chat/completions",
            json.dumps({"messages": [{"role": "user", "content": f"task {task}"}]}).encode(),
            {"Authorization": f"Bearer {os.environ[context.client.api_key_var]}"},
        )
        answer = json.load(await asyncio.to_thread(urllib.request.urlopen, request))
        said = answer["choices"][0]["message"]["content"]
        rewards = {"length": SimpleNamespace(value=float(len(said))), "judge": None}
        errors = [SimpleNamespace(type="TaskError", message="no score")] if said == "bad" else []
        seats = [SimpleNamespace(trainable=True), SimpleNamespace(trainable=False)]
        traces = [SimpleNamespace(agent=seat, rewards=rewards, reward=float(len(said)), errors=[]) for seat in seats]
        return SimpleNamespace(ok=not errors, errors=errors, traces=traces)


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub(tasks=5)
    library = SimpleNamespace(EvalClientConfig=SimpleNamespace, ModelContext=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "verifiers.v1", library)
    module = "recipes.agent.environments.verifiers_agent"
    monkeypatch.setattr(f"{module}.missing_modules", lambda names: [])
    monkeypatch.setattr(f"{module}._loaded", lambda settings: made)
    return made


async def outcomes(agent: VerifiersAgent, *seeds: int, says: str = "hello") -> list[AgentOutcome]:
    models = [LanguageModel(Script(says), SETTINGS._replace(max_tokens=400)) for _ in seeds]
    tasks = [AgentTask("", (), "", {"seed": seed}) for seed in seeds]
    return await asyncio.gather(
        *(agent(task, model, Toolbox((), 30.0)) for task, model in zip(tasks, models, strict=True))
    )


def test_episodes_share_a_server_with_tokens_of_their_own(stub: Stub) -> None:
    result = asyncio.run(outcomes(VerifiersAgent(VerifiersKeys(name="words"), 2), 0, 1, 2))
    assert result == [AgentOutcome(reward=5.0, parts={"length": 5.0})] * 3
    assert stub.served == 1
    assert not any(name.startswith("VERIFIERS_API_KEY") for name in os.environ)


def test_tasks_of_evaluation_are_never_trained_on(stub: Stub) -> None:
    agent = VerifiersAgent(VerifiersKeys(name="words"), 200)
    asyncio.run(outcomes(agent, *range(6)))
    trained = set(stub.asked)
    stub.asked.clear()
    asyncio.run(outcomes(agent, *range(MOST_GENERATED, MOST_GENERATED + 6)))
    assert (trained, set(stub.asked)) == ({2, 3, 4}, {0, 1})


def test_a_failed_episode_is_a_failure_of_the_run(stub: Stub) -> None:
    agent = VerifiersAgent(VerifiersKeys(name="words"), 2)
    with pytest.raises(VerifiersError, match="TaskError: no score"):
        asyncio.run(outcomes(agent, 0, says="bad"))


def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("recipes.agent.environments.verifiers_agent.missing_modules", list)
    with pytest.raises(ConfigError) as error:
        VerifiersAgent(VerifiersKeys(name="words"), 1)
    assert "verifiers>=0.4,<0.5" in str(error.value.help)

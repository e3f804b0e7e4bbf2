"""The agent that does tasks with images: what it may use, and what its runs are worth."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.boxes.box import BoxError, LiveBox
from recipes.agent.config.tool_config import HarborKeys
from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.environments import harbor_agent
from recipes.agent.environments.harbor_agent import TaskAgent
from recipes.agent.harbor.checking import load_checked, write_checks
from recipes.agent.harbor.task_folder import find_tasks, read_task
from recipes.agent.images.store import Image
from recipes.agent.tools.bash import Bash
from recipes.agent.tools.tool import ToolError, ToolUnavailable
from recipes.agent.tools.toolbox import Observation, Toolbox, ToolCall
from rlinf_core import ConfigError
from tests.unit.recipes.agent.harbor.made_tasks import double_task, fit, greeting_task
from tests.unit.recipes.agent.test_llm import SETTINGS, Script

pytestmark = pytest.mark.security

SOLVED = "<bash>echo 'good morning' > greeting</bash>"


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks, of which the one named `greeting` is trained on."""
    for folder in (greeting_task(tmp_path), double_task(tmp_path)):
        folder.rename(tmp_path / f"{'b' if folder.name == 'greeting' else 'a'}-{folder.name}")
    write_checks(tmp_path, [fit(read_task(folder)) for folder in find_tasks(tmp_path)])
    return tmp_path


def config_of(path: Path, folder: Path, **agent: float) -> Any:
    environment = HarborKeys(path=str(path), box_folder=str(folder), box_memory_mib=1024)
    settings = {"tool_timeout": 10.0, "timeout": 60.0, **agent, "environment": environment}
    return SimpleNamespace(
        agent=SimpleNamespace(**settings),
        data=SimpleNamespace(val_size=1, apply_chat_template=True, system_prompt=""),
        runner=SimpleNamespace(seq_length=2000),
    )


def played(
    config: Any, *turns: str, tokens: int = 2000
) -> tuple[AgentOutcome, dict[str, float], list[tuple[ToolCall, Observation]], Script]:
    seen: list[tuple[ToolCall, Observation]] = []
    tools = Toolbox((), 30.0, lambda call, observation: seen.append((call, observation)))
    script = Script(*turns)
    task = AgentTask("episode 0", (ChatMessage("user", "episode 0"),), "", {"seed": 0})

    async def run() -> AgentOutcome:
        agent = TaskAgent(config, config.agent.environment)
        try:
            return await agent(task, LanguageModel(script, SETTINGS._replace(max_tokens=tokens)), tools)
        finally:
            if agent._store is not None:
                agent._store.close()
                await agent._store.boxes.close()

    return asyncio.run(run()), tools.figures, seen, script


def test_a_task_is_done_by_commands_and_graded(tasks: Path, box_folder: Path) -> None:
    outcome, figures, seen, script = played(config_of(tasks, box_folder), "<bash>pwd; false</bash>", SOLVED, "done")
    assert outcome.reward == 1.0
    assert outcome.parts == {"time_up": 0.0, "box_ended": 0.0}
    assert [(call.name, observation.text) for call, observation in seen[:2]] == [
        ("bash", "/app\n[exit status 1]"),
        ("bash", ""),
    ]
    assert (seen[2][0].name, seen[2][1].text) == ("tests", "reward 1")
    assert figures["agent/tool_calls"] == 2
    assert all(figures[f"agent/box_seconds/{part}"] > 0 for part in ("start", "commands", "tests"))
    assert (figures["agent/grades/again"], figures["agent/grades/tampered"]) == (0.0, 0.0)
    first = script.requests[0].messages
    assert first[-1] == ChatMessage("user", "Write `good morning` into `/app/greeting`.")
    assert "<bash>...</bash>" in first[0].text


def test_a_run_that_used_up_its_turns_is_graded_as_it_stands(tasks: Path, box_folder: Path) -> None:
    outcome, *_ = played(config_of(tasks, box_folder), SOLVED, *["<bash>true</bash>"] * 10)
    assert outcome.reward == 1.0


def test_a_run_whose_time_is_up_is_graded_as_it_stands(tasks: Path, box_folder: Path) -> None:
    config = config_of(tasks, box_folder, timeout=1.0)
    outcome, *_ = played(config, SOLVED, "<bash>sleep 600</bash>")
    assert (outcome.reward, outcome.parts["time_up"]) == (1.0, 1.0)


def test_a_slow_command_is_an_observation(tasks: Path, box_folder: Path) -> None:
    config = config_of(tasks, box_folder, tool_timeout=1.5)
    outcome, figures, seen, _ = played(config, "<bash>echo a; sleep 600</bash>", "sorry")
    assert outcome.reward == 0.0
    assert seen[0][1].text == "error: the command was ended after 1.5 s; it had printed: a"
    assert figures["agent/tool_errors"] == 1


def test_a_broken_box_is_an_observation(tasks: Path, box_folder: Path) -> None:
    turns = ("<bash>rm -rf /usr/bin /bin</bash>", "<bash>true</bash>", "sorry")
    outcome, figures, seen, _ = played(config_of(tasks, box_folder), *turns)
    assert outcome.reward == 0.0
    assert seen[1][1].text == "bash: No such file or directory\n[exit status 126]"
    assert figures["agent/tool_errors"] == 0


def test_a_box_over_its_disk_is_graded_as_it_stands(tasks: Path, box_folder: Path) -> None:
    fill = "<bash>for n in 1 2 3; do head -c 40000000 /dev/zero > /tmp/$n; done; sleep 600</bash>"
    outcome, _, seen, _ = played(config_of(tasks, box_folder), SOLVED, fill, "<bash>true</bash>", "done")
    assert (outcome.reward, outcome.parts["box_ended"]) == (1.0, 1.0)
    assert "it wrote more than 64 MiB" in seen[1][1].text
    assert seen[2][1].text.startswith("error: the box has ended")


def test_a_holder_that_was_killed_is_no_sample(tasks: Path, box_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(box: LiveBox, *args: Any, **kwargs: Any) -> None:
        raise BoxError("the holder of the box has ended")

    monkeypatch.setattr(LiveBox, "run", broken)
    with pytest.raises(ToolUnavailable, match="the holder of the box has ended"):
        played(config_of(tasks, box_folder), SOLVED, "done")


def test_an_image_that_cannot_be_made_is_tried_again(
    tasks: Path, box_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [OSError(errno.ENOSPC, "No space left on device")]
    made = harbor_agent.image_of

    async def once(*args: Any, **settings: Any) -> Image:
        if faults:
            raise faults.pop()
        return await made(*args, **settings)

    monkeypatch.setattr(harbor_agent, "image_of", once)

    async def act() -> AgentOutcome:
        config = config_of(tasks, box_folder)
        agent, settings = TaskAgent(config, config.agent.environment), SETTINGS._replace(max_tokens=2000)
        task = AgentTask("episode 0", (ChatMessage("user", "episode 0"),), "", {"seed": 0})
        try:
            with pytest.raises(ToolUnavailable, match="No space left on device"):
                await agent(task, LanguageModel(Script("done"), settings), Toolbox((), 30.0))
            return await agent(task, LanguageModel(Script(SOLVED, "done"), settings), Toolbox((), 30.0))
        finally:
            assert agent._store is not None
            agent._store.close()
            await agent._store.boxes.close()

    assert asyncio.run(act()).reward == 1.0


def test_tasks_that_are_not_checked_as_they_are_are_refused(tasks: Path) -> None:
    assert [task.name for task, _ in load_checked(tasks)] == ["made/double", "made/greeting"]
    (tasks / "b-greeting/tests/more").write_text("")
    with pytest.raises(ConfigError) as error:
        load_checked(tasks)
    assert error.value.why == "made/greeting: was not checked"
    assert f"rlinf tasks check {tasks}" in (error.value.help or "")


def test_one_task_is_too_few(tasks: Path, box_folder: Path) -> None:
    one = tasks / "a-double"
    write_checks(one, [fit(read_task(one))])
    with pytest.raises(ConfigError, match="only 1 task"):
        TaskAgent(config := config_of(one, box_folder), config.agent.environment)


@pytest.mark.parametrize("arguments", [{}, {"command": 3}, {"command": "a", "more": 1}])
def test_arguments_of_bash_are_one_command(arguments: dict[str, Any]) -> None:
    tool: Any = Bash(SimpleNamespace(), 1.0)  # type: ignore[arg-type]
    with pytest.raises(ToolError, match="command"):
        tool.argument(arguments)
    assert tool.argument({"command": "ls"}) == "ls"

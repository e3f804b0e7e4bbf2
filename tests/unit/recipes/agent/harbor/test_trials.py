"""Harbor's tasks, done by our agent and by agents of Harbor, and the plug-in of `harbor run`.

`RLINF_HARBOR_PYTHON` names an interpreter with Harbor, pytest and rlinf for the tests with the library itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import gzip
import io
import json
import logging
import os
import subprocess
import sys
import tarfile
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from recipes.agent import agent_config
from recipes.agent.agent_config import AgentConfig
from recipes.agent.boxes.box import BoxError, LiveBox
from recipes.agent.boxes.boxes import BoxHost
from recipes.agent.boxes.image_store import Image
from recipes.agent.conversation.agents import AgentOutcome, AgentTask
from recipes.agent.conversation.chat_model import LanguageModel
from recipes.agent.conversation.turn_messages import ChatMessage
from recipes.agent.harbor import harbor_agent, trials
from recipes.agent.harbor.grading import load_checked, write_checks
from recipes.agent.harbor.harbor_agent import Bash, TaskAgent
from recipes.agent.harbor.task_folder import find_tasks, read_task
from recipes.agent.harbor.trials import HarnessError, check_harness
from recipes.agent.tool_config import HarborOptions
from recipes.agent.tools.tool import Observation, Toolbox, ToolCall, ToolError, ToolUnavailable
from rlinf_core import ConfigError
from rlinf_core.job.load import load_job
from tests.unit.recipes.agent.boxes.running import archive_of
from tests.unit.recipes.agent.harbor.fake_harbor import install
from tests.unit.recipes.agent.harbor.made_tasks import double_task, fit, greeting_task
from tests.unit.recipes.agent.scripted import Script, model

pytestmark = pytest.mark.security

SOLVED = "<bash>echo 'good morning' > greeting</bash>"
TASK = AgentTask("episode 0", (ChatMessage("user", "episode 0"),), "", {"seed": 0})


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks, of which the one named `greeting` is trained on."""
    for folder in (greeting_task(tmp_path), double_task(tmp_path)):
        folder.rename(tmp_path / f"{'b' if folder.name == 'greeting' else 'a'}-{folder.name}")
    write_checks(tmp_path, [fit(read_task(folder)) for folder in find_tasks(tmp_path)])
    return tmp_path


def config_of(path: Path, folder: Path, **agent: float) -> Any:
    environment = HarborOptions(path=str(path), box_folder=str(folder), box_memory_mib=1024)
    settings = {"tool_timeout": 10.0, "timeout": 60.0, **agent, "environment": environment}
    return SimpleNamespace(
        agent=SimpleNamespace(**settings),
        data=SimpleNamespace(val_size=1, apply_chat_template=True, system_prompt=""),
        runner=SimpleNamespace(seq_length=2000),
    )


async def closed(agent: TaskAgent) -> None:
    if agent._store is not None:
        agent._store.close()
        await agent._store.boxes.close()


def played(
    config: Any, *turns: str, llm: LanguageModel | None = None
) -> tuple[AgentOutcome, dict[str, float], list[tuple[ToolCall, Observation]], Script]:
    """Do the first task with a model that says some turns, or with one of the test."""
    seen: list[tuple[ToolCall, Observation]] = []
    tools = Toolbox((), 30.0, lambda call, observation: seen.append((call, observation)))
    speaker = llm or model(*turns, max_tokens=2000, max_new_tokens=10)

    async def run() -> AgentOutcome:
        agent = TaskAgent(config, config.agent.environment)
        try:
            return await agent(TASK, speaker, tools)
        finally:
            await closed(agent)

    script: Any = speaker._engines
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


async def test_an_image_that_cannot_be_made_is_tried_again(
    tasks: Path, box_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = [OSError(errno.ENOSPC, "No space left on device")]
    made = harbor_agent.image_of

    async def once(*args: Any, **settings: Any) -> Image:
        if faults:
            raise faults.pop()
        return await made(*args, **settings)

    monkeypatch.setattr(harbor_agent, "image_of", once)
    config = config_of(tasks, box_folder)
    agent = TaskAgent(config, config.agent.environment)
    try:
        with pytest.raises(ToolUnavailable, match="No space left on device"):
            await agent(TASK, model("done", max_tokens=2000), Toolbox((), 30.0))
        outcome = await agent(TASK, model(SOLVED, "done", max_tokens=2000), Toolbox((), 30.0))
    finally:
        await closed(agent)
    assert outcome.reward == 1.0


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


PYTHON = os.environ.get("RLINF_HARBOR_PYTHON", "")
ROOT = Path(__file__).parents[5]
SOLVE = "echo 'good morning' > /app/greeting"
Act = Callable[[Any, Any], Awaitable[None]]


def harnessed(path: Path, folder: Path, *, harness: str = "outside", **options: Any) -> Any:
    config = config_of(path, folder)
    written = config.agent.environment.model_dump() | {"harness": harness, **options}
    config.agent.environment = HarborOptions.model_validate(written)
    return config


async def ask(config: Any) -> str:
    """Ask the model behind the endpoint of a trial, as an agent of Harbor does."""
    token = os.environ[config.agent.model_api_key_name]
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "what now?"}]}).encode()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    request = urllib.request.Request(f"{config.agent.base_url}/chat/completions", body, headers)
    answer = await asyncio.to_thread(lambda: json.load(urllib.request.urlopen(request, timeout=30)))
    return answer["choices"][0]["message"]["content"]


def test_an_agent_of_harbor_is_graded_as_our_own(tasks: Path, box_folder: Path, monkeypatch: Any) -> None:
    async def agent(environment: Any, config: Any) -> None:
        done = await environment.exec(await ask(config), env={"A": "b"}, timeout_sec=20)
        assert (done.return_code, done.stdout) == (0, "")
        assert (await environment.exec("exit 3; true")).return_code == 3
        assert (await environment.exec("sleep 600", timeout_sec=0.2)).return_code == 124

    configs = install(monkeypatch, agent)
    outcome, figures, seen, _ = played(harnessed(tasks, box_folder, turns=3), SOLVE)
    parts = {"time_up": 0.0, "harness_error": 0.0, "box_ended": 0.0}
    assert (outcome.reward, outcome.parts) == (1.0, parts)
    assert [call.argument for call, _ in seen] == [SOLVE, "exit 3; true", "sleep 600", "bash /tests/test.sh"]
    assert [observation.failure for _, observation in seen] == ["", "", "timeout", ""]
    assert figures["agent/box_seconds/commands"] > 0
    assert (configs[0].agent.name, configs[0].agent.kwargs) == ("outside", {"turns": 3})
    # No token of it lies about.
    assert configs[0].agent.model_api_key_name not in os.environ


async def _breaks(environment: Any, config: Any) -> None:
    await environment.exec("true")
    raise ValueError("no such model")


async def _breaks_late(environment: Any, config: Any) -> None:
    await environment.exec(await ask(config))
    raise ValueError("the answer makes no sense")


class AgentTimeoutError(Exception):
    """What Harbor raises when an agent's time is up."""


async def _is_slow(environment: Any, config: Any) -> None:
    raise AgentTimeoutError("timed out after 30 seconds")


async def _hangs(environment: Any, config: Any) -> None:
    await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("agent", "why"),
    [
        (_breaks, "ValueError: no such model"),
        (_is_slow, "AgentTimeoutError: timed out after 30 seconds"),
        (_hangs, "TrialHung: it had not ended after 0.1 s"),
    ],
)
def test_what_ends_before_the_model_speaks_is_no_sample(
    agent: Act, why: str, tasks: Path, box_folder: Path, monkeypatch: Any
) -> None:
    if agent is _hangs:
        monkeypatch.setattr(trials, "REST_SECONDS", 0.1 - 30.0)
    install(monkeypatch, agent)
    with pytest.raises(HarnessError, match=f"`outside` of Harbor: {why}"):
        played(harnessed(tasks, box_folder))


def test_what_breaks_on_the_models_words_is_graded_and_shown(
    tasks: Path, box_folder: Path, monkeypatch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    install(monkeypatch, _breaks_late)
    with caplog.at_level(logging.WARNING, "rlinf"):
        outcome, _, seen, _ = played(harnessed(tasks, box_folder), SOLVE)
    assert (outcome.reward, outcome.parts["harness_error"]) == (1.0, 1.0)
    assert [(call.name, observation.text) for call, observation in seen if observation.failure == "error"] == [
        ("harness", "ValueError: the answer makes no sense")
    ]
    (message,) = [record.message for record in caplog.records]
    assert message.startswith("`outside` of Harbor broke at `made/greeting`, and is graded: ValueError: the answer")


def test_a_trial_that_does_not_end_holds_nobody_up(tasks: Path, box_folder: Path, monkeypatch: Any) -> None:
    ended: list[int] = []

    async def agent(environment: Any, config: Any) -> None:
        for _ in range(5):
            with contextlib.suppress(urllib.error.HTTPError):
                await ask(config)
        while not ended:
            with contextlib.suppress(asyncio.CancelledError):
                ended.append((await environment.exec("sleep 600")).return_code)

    monkeypatch.setattr(trials, "_END_SECONDS", 0.1)
    install(monkeypatch, agent)
    config = harnessed(tasks, box_folder)
    assert played(config, *["again"] * 4)[0].reward == 0.0
    # The end of its box was the end of the trial.
    assert ended == [-9]


def test_a_sample_shows_the_first_and_the_last_commands(tasks: Path, box_folder: Path, monkeypatch: Any) -> None:
    async def agent(environment: Any, config: Any) -> None:
        for number in range(9):
            await environment.exec(f"true {number}")

    monkeypatch.setattr(harbor_agent, "_FIRST", 2)
    monkeypatch.setattr(harbor_agent, "_LAST", 3)
    install(monkeypatch, agent)
    *seen, _ = played(harnessed(tasks, box_folder))[2]
    assert [call.argument for call, _ in seen] == ["true 0", "true 1", "...", "true 6", "true 7", "true 8"]
    assert seen[2][1].text == "4 commands are not shown; these are the last"


def test_terminus_knows_how_long_a_conversation_may_be(tasks: Path, box_folder: Path, monkeypatch: Any) -> None:
    async def agent(environment: Any, config: Any) -> None:
        await environment.exec("true")

    configs = install(monkeypatch, agent)
    played(harnessed(tasks, box_folder, harness="terminus-2", parser_name="xml"))
    assert configs[0].agent.kwargs == {
        "record_terminal_session": False,
        "model_info": {"max_input_tokens": 2000},
        "proactive_summarization_threshold": 500,
        "parser_name": "xml",
    }


def test_the_token_of_a_run_goes_to_no_proxy(monkeypatch: Any) -> None:
    monkeypatch.setenv("http_proxy", "http://proxy.example:3128")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "")
    install(monkeypatch, _breaks)
    check_harness("outside", {}, 2000)
    check_harness("outside", {}, 2000)
    assert (os.environ["NO_PROXY"], os.environ["no_proxy"]) == ("example.org,127.0.0.1",) * 2
    assert urllib.request.proxy_bypass("127.0.0.1")


def test_a_trial_ends_when_the_model_may_say_no_more(tasks: Path, box_folder: Path, monkeypatch: Any) -> None:
    async def agent(environment: Any, config: Any) -> None:
        await environment.exec(SOLVE)
        for _ in range(4):
            await ask(config)
        with pytest.raises(urllib.error.HTTPError, match="429"):
            await ask(config)
        await asyncio.sleep(600)

    install(monkeypatch, agent)
    assert played(harnessed(tasks, box_folder), *["again"] * 4)[0].reward == 1.0


def test_a_holder_that_is_killed_is_no_fault_of_the_policy(tasks: Path, box_folder: Path, monkeypatch: Any) -> None:
    async def agent(environment: Any, config: Any) -> None:
        await environment._box.box.close()
        await environment.exec("true")

    install(monkeypatch, agent)
    with pytest.raises(ToolUnavailable, match="the box of `made/greeting`"):
        played(harnessed(tasks, box_folder))


def test_agents_that_boxes_cannot_hold_are_named(monkeypatch: Any) -> None:
    with pytest.raises(ConfigError, match="needs the package harbor"):
        check_harness("outside", {}, 2000)
    install(monkeypatch, _breaks)
    check_harness("outside", {}, 2000)
    with pytest.raises(ConfigError, match="is installed in the container"):
        check_harness("installed", {}, 2000)
    with pytest.raises(ConfigError, match="Harbor has no agent `outsite`"):
        check_harness("outsite", {}, 2000)
    with pytest.raises(ConfigError, match="`outside` cannot be made") as error:
        check_harness("outside", {"parser_nam": "xml"}, 2000)
    assert error.value.why == "ValueError: Unknown option 'parser_nam'."


def test_doctor_makes_an_agent_of_harbor(monkeypatch: Any) -> None:
    text = (
        "recipe: agent\ncluster: {num_nodes: 1, component_placement: {'actor,rollout,reward,agent': {node_group: node,"
        " placement: 0}}}\ndata: {type: episodes}\nagent: {run: env_agent, environment: {type: harbor, options: {"
        "path: no/such, harness: outside, parser_nam: xml}}}\n"
    )
    boxes, harness = agent_config.trials(cast("AgentConfig", load_job("-", stdin=text.encode()).config))
    assert (boxes.what, harness.what, harness.component) == ("boxes", "harness", "agent")
    install(monkeypatch, _breaks)
    probe = import_module(harness.module)
    name, options, context = harness.arguments
    said = probe.look(name, json.loads(options), int(context))
    assert (said["verdict"], "Unknown option 'parser_nam'" in said["what"]) == ("fault", True)
    assert probe.look(name, {}, int(context))["verdict"] == "ok"


def _alone(folder: Path, task: Path, act: Act, tmp_path: Path) -> tuple[float, dict[str, Any]]:
    """Do what `harbor run` does with both halves of the plug-in; return the reward, and what is written of it."""
    plugin = import_module("recipes.agent.harbor.plugin")

    async def run() -> float:
        environment = plugin.BoxEnvironment(environment_dir=task / "environment", boxes=str(folder), memory=1024)
        await environment.start(force_build=False)
        try:
            await act(environment, None)
            paths = SimpleNamespace(verifier_dir=tmp_path / "verifier")
            result = await plugin.FreshVerifier(environment=environment, trial_paths=paths).verify()
        finally:
            await environment.stop(delete=True)
            for store in plugin._stores.values():
                store.close()
                await store.boxes.close()
            plugin._stores.clear()
        return result.rewards["reward"]

    return asyncio.run(run()), json.loads((tmp_path / "verifier/grading.json").read_text(encoding="utf-8"))


def test_harbor_alone_runs_and_grades_in_boxes(box_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    install(monkeypatch, _breaks)
    (tmp_path / "up/a").mkdir(parents=True)
    (tmp_path / "up/a/text").write_text("good morning\n", encoding="utf-8")

    async def act(environment: Any, config: Any) -> None:
        await environment.upload_dir(tmp_path / "up", "/app/up")
        await environment.upload_file(tmp_path / "up/a/text", "/app/one")
        await environment.exec("mv up/a/text greeting; ln -s /etc/passwd up/link; touch /etc/x; ls > up/list")
        await environment.download_file("/app/one", tmp_path / "down/one")
        await environment.download_dir("/app/up", tmp_path / "down/up")
        with pytest.raises(FileNotFoundError, match="No such file"):
            await environment.download_file("/app/none", tmp_path / "down/none")
        monkeypatch.setattr("recipes.agent.harbor.plugin._MOST_BYTES", 100)
        with pytest.raises(OSError, match="/usr/bin/bash has more than"):
            await environment.download_file("/usr/bin/bash", tmp_path / "down/bash")

    reward, record = _alone(box_folder, greeting_task(tmp_path), act, tmp_path)
    assert (reward, record["why"], record["dropped"]) == (1.0, "", ["/etc/x"])
    assert (tmp_path / "down/one").read_text(encoding="utf-8") == "good morning\n"
    assert sorted(os.listdir(tmp_path / "down/up")) == ["a", "list"]
    assert BoxHost(box_folder, 1024).admission.free() == 1024


@pytest.mark.parametrize("up", [0, 1, 2, 3])
def test_what_a_check_saw_is_looked_for_above_the_task(
    up: int, box_folder: Path, tmp_path: Path, monkeypatch: Any
) -> None:
    install(monkeypatch, _breaks)
    task = greeting_task(tmp_path / "b/c")
    checked = fit(read_task(task)).model_copy(update={"mode": "files"})
    write_checks([task, *task.parents][up], [checked])

    async def act(environment: Any, config: Any) -> None:
        await environment.exec("mkdir /data; touch /data/x")

    _, record = _alone(box_folder, task, act, tmp_path)
    # The mode that a task needs is in the record; further up, no command looks for tasks.
    assert (record["checked"], record["dropped"]) == ((True, []) if up < 3 else (False, ["/data/x"]))


def test_tests_that_hang_are_0_before_harbor_gives_up(box_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    install(monkeypatch, _breaks)

    async def act(environment: Any, config: Any) -> None:
        await environment.exec("true")

    task = greeting_task(tmp_path, seconds=1.0, **{"tests/test.sh": "sleep 600\n"})
    reward, record = _alone(box_folder, task, act, tmp_path)
    assert (reward, record["tries"], record["why"]) == (0.0, 2, "the tests took longer than 0.45 s")


class _Out:
    """An environment whose box answers with an archive that a policy has made."""

    def __init__(self, archive: bytes) -> None:
        self._archive = archive

    async def _taken(self, command: str, path: str) -> bytes:
        return self._archive


def test_an_archive_of_a_policy_writes_nowhere_else(tmp_path: Path, monkeypatch: Any) -> None:
    install(monkeypatch, _breaks)
    take = import_module("recipes.agent.harbor.plugin").BoxEnvironment.download_dir
    sparse = io.BytesIO()
    with tarfile.open(fileobj=sparse, mode="w", format=tarfile.PAX_FORMAT) as packed:
        info = tarfile.TarInfo("hole")
        info.pax_headers = {f"GNU.sparse.{key}": str(1 << 40) for key in ("realsize", "size")}
        info.pax_headers["GNU.sparse.map"] = "0,0"
        packed.addfile(info)
        packed.addfile(tarfile.TarInfo("plain"))
    links = archive_of(("link", "link", "/etc"), ("fine", "file", "text"), ("twin", "hard", "fine"))
    for name, archive in (("sparse", sparse.getvalue()), ("links", links)):
        asyncio.run(take(_Out(archive), "/app", tmp_path / name))
    assert (os.listdir(tmp_path / "sparse"), os.listdir(tmp_path / "links")) == (["plain"], ["fine"])
    packed = gzip.compress(archive_of(("zeros", "file", "0" * (1 << 20))))
    with pytest.raises(tarfile.ReadError):
        asyncio.run(take(_Out(packed), "/app", tmp_path / "packed"))
    assert os.listdir(tmp_path / "packed") == []
    monkeypatch.setattr("recipes.agent.harbor.plugin._MOST_FILES", 10)
    with pytest.raises(OSError, match="more than 10 files and folders"):
        asyncio.run(take(_Out(archive_of(("a/" * 20, "file", ""))), "/app", tmp_path / "many"))
    assert os.listdir(tmp_path / "many") == []
    with pytest.raises(tarfile.OutsideDestinationError):
        asyncio.run(take(_Out(archive_of(("../out", "file", "text"))), "/app", tmp_path / "out/in"))
    assert os.listdir(tmp_path / "out") == ["in"]


def test_a_box_that_no_agent_was_in_is_not_graded(box_folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    install(monkeypatch, _breaks)
    plugin = import_module("recipes.agent.harbor.plugin")
    paths = SimpleNamespace(verifier_dir=tmp_path)
    with pytest.raises(ConfigError, match="what a box of rlinf has left"):
        asyncio.run(plugin.FreshVerifier(environment=object(), trial_paths=paths).verify())
    environment = plugin.BoxEnvironment(environment_dir=greeting_task(tmp_path) / "environment")
    with pytest.raises(ConfigError, match="this is none"):
        asyncio.run(plugin.FreshVerifier(environment=environment, trial_paths=paths).verify())


def _turn(keys: str, *, done: bool = False) -> str:
    commands = [{"keystrokes": keys, "duration": 0.5}] if keys else []
    return json.dumps({"analysis": "", "plan": "", "commands": commands, "task_complete": done})


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.skipif(not PYTHON, reason="RLINF_HARBOR_PYTHON names no interpreter with harbor")
def test_tokens_of_terminus_2_are_those_that_were_drawn(tasks: Path, box_folder: Path) -> None:
    turns = [_turn(f"{SOLVE}\n"), _turn("", done=True), _turn("", done=True)]
    asked = json.dumps({"tasks": str(tasks), "boxes": str(box_folder), "turns": turns})
    command, env = (
        [PYTHON, "-m", "tests.unit.recipes.agent.harbor.test_trials", asked],
        {**os.environ, "PYTHONPATH": str(ROOT)},
    )
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["reward"], result["limit"]) == (1.0, "")
    (segment,) = result["segments"]
    assert segment["drawn"] == [token for turn in turns for token in (*map(ord, turn), 0)]
    # Each request continues the tokens before it, and none of them was made anew.
    for context in result["contexts"]:
        assert segment["whole"][: len(context)] == context


def _terminus(asked: dict[str, Any]) -> dict[str, Any]:
    """Do a trial of Terminus-2 in the interpreter that has Harbor."""
    llm = model(*asked["turns"], max_tokens=60_000, max_new_tokens=4000, max_turns=len(asked["turns"]))
    config = harnessed(Path(asked["tasks"]), Path(asked["boxes"]), harness="terminus-2")
    config.runner.seq_length, config.agent.timeout = 60_000, 120.0
    outcome, _, _, script = played(config, llm=llm)
    segments = [
        {
            "drawn": [token for token, mine in zip(segment.tokens, segment.trained, strict=True) if mine],
            "whole": [*segment.prompt, *segment.tokens],
        }
        for segment in llm.segments()
    ]
    contexts = [list(request.context) for request in script.requests]
    return {"reward": outcome.reward, "limit": llm.limit, "segments": segments, "contexts": contexts}


if __name__ == "__main__":
    print(json.dumps(_terminus(json.loads(sys.argv[1]))))

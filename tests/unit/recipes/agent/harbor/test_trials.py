"""Agents of Harbor in boxes of rlinf: their trials, and the plug-in of `harbor run`.

`RLINF_HARBOR_PYTHON` names an interpreter with Harbor, pytest and rlinf for the tests with the library itself.
"""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import subprocess
import tarfile
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipes.agent.boxes.boxes import BoxHost
from recipes.agent.config.tool_config import TextEnvironmentConfig
from recipes.agent.harbor.checking import write_checks
from recipes.agent.harbor.task_folder import find_tasks, read_task
from recipes.agent.harbor.trials import HarnessError, check_harness
from recipes.agent.tools.tool import ToolUnavailable
from rlinf_core import ConfigError
from tests.unit.recipes.agent.boxes.running import archive_of
from tests.unit.recipes.agent.environments.test_harbor_agent import config_of, played
from tests.unit.recipes.agent.harbor.fake_harbor import install
from tests.unit.recipes.agent.harbor.made_tasks import double_task, fit, greeting_task

pytestmark = pytest.mark.security

PYTHON = os.environ.get("RLINF_HARBOR_PYTHON", "")
ROOT = Path(__file__).parents[5]
SOLVE = "echo 'good morning' > /app/greeting"
Act = Callable[[Any, Any], Awaitable[None]]


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """Two tasks, of which the one named `greeting` is trained on."""
    for folder in (greeting_task(tmp_path), double_task(tmp_path)):
        folder.rename(tmp_path / f"{'b' if folder.name == 'greeting' else 'a'}-{folder.name}")
    write_checks(tmp_path, [fit(read_task(folder)) for folder in find_tasks(tmp_path)])
    return tmp_path


def harnessed(path: Path, folder: Path, **options: Any) -> Any:
    config = config_of(path, folder)
    environment = config.agent.environment.model_copy(update={"harness": "outside", "options": options})
    config.agent.environment = TextEnvironmentConfig.model_validate(environment.model_dump())
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
    assert (outcome.reward, outcome.parts) == (1.0, {"time_up": 0.0, "box_ended": 0.0})
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


def test_what_fails_before_the_model_speaks_is_no_sample(tasks: Path, box_folder: Path, monkeypatch: Any) -> None:
    install(monkeypatch, _breaks)
    with pytest.raises(HarnessError, match="`outside` of Harbor: ValueError: no such model"):
        played(harnessed(tasks, box_folder))
    # What it makes of the model's words is graded.
    install(monkeypatch, _breaks_late)
    assert played(harnessed(tasks, box_folder), SOLVE)[0].reward == 1.0


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
        check_harness("outside")
    install(monkeypatch, _breaks)
    check_harness("outside")
    with pytest.raises(ConfigError, match="is installed in the container"):
        check_harness("installed")
    with pytest.raises(ConfigError, match="Harbor has no agent `outsite`"):
        check_harness("outsite")


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
    asked = {"harness": "terminus-2", "tasks": str(tasks), "boxes": str(box_folder), "turns": turns}
    program = "tests.unit.recipes.agent.environments.harbor_trial"
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [PYTHON, "-m", program, json.dumps(asked)], capture_output=True, text=True, check=True, env=env, cwd=ROOT
    )
    result = json.loads(done.stdout.splitlines()[-1])
    assert (result["reward"], result["limit"]) == (1.0, "")
    (segment,) = result["segments"]
    assert segment["drawn"] == [token for turn in turns for token in (*map(ord, turn), 0)]
    # Each request continues the tokens before it, and none of them was made anew.
    for context in result["contexts"]:
        assert segment["whole"][: len(context)] == context

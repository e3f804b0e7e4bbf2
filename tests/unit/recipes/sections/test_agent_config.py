"""The agent recipe's file: what does not fit together is found before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from recipes.agent.harbor.checking import write_checks
from recipes.agent.harbor.task_folder import read_task
from rlinf_cli.job.job_file import load_with_lint
from rlinf_core.job.find_recipe import find_recipe
from rlinf_core.job.load import load_job
from tests.unit.recipes.agent.harbor.made_tasks import double_task, fit, greeting_task

FILE = (
    "recipe: agent\ncluster:\n  num_nodes: 1\n  component_placement:\n"
    "    actor,rollout,reward,agent: {node_group: node, placement: 0}\n"
)


def test_mcp_servers(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FILE + "agent:\n  mcp:\n    files: {command: [python3, server.py], env: {ROOT: /data}}\n"
    monkeypatch.setattr("recipes.agent.config.agent_rules.missing_modules", lambda names: [])
    assert findings(servers) == []
    assert findings(servers.replace("[python3, server.py]", "python3")) == []
    diagnostics = findings(servers.replace("python3", "no-such-program"), messages=True)
    assert [(diagnostic[0], diagnostic[2]) for diagnostic in diagnostics] == [
        ("unusable-path", "the command `no-such-program` does not exist on this machine")
    ]
    assert [diagnostic[0] for diagnostic in findings(servers.replace("command: [python3, server.py], ", ""))] == [
        "missing-key"
    ]
    assert [diagnostic[0] for diagnostic in findings(servers.replace("[python3, server.py]", "[]"))] == ["bad-value"]
    monkeypatch.setattr("recipes.agent.config.agent_rules.missing_modules", list)
    assert findings(servers)[0][0] == "missing-extra"


def test_environments_are_played_from_seeds(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    played = FILE + "agent:\n  run: env_agent\n  environment: {}\ndata:\n  type: episodes\n"
    assert findings(played) == []
    assert [diagnostic[0] for diagnostic in findings(FILE + "data:\n  type: episodes\n")] == ["conflicting-settings"]
    assert [diagnostic[0] for diagnostic in findings(FILE + "agent:\n  run: env_agent\n")] == ["conflicting-settings"]
    remote = played.replace("{}", "{type: openenv}")
    assert [diagnostic[:2] for diagnostic in findings(remote)] == [("missing-key", "environment")]
    assert findings(remote.replace("openenv", "openenv, url: 'http://127.0.0.1:8000'")) == []
    monkeypatch.setattr("recipes.agent.config.agent_rules.missing_modules", lambda names: [])
    library = played.replace("{}", "{type: verifiers}")
    assert [diagnostic[:2] for diagnostic in findings(library)] == [("missing-key", "environment")]
    assert findings(library.replace("verifiers", "verifiers, name: textarena, options: {game: Wordle-v0}")) == []
    monkeypatch.setattr("recipes.agent.config.agent_rules.missing_modules", list)
    assert [diagnostic[0] for diagnostic in findings(library.replace("verifiers", "verifiers, name: words"))] == [
        "missing-extra"
    ]
    assert [diagnostic[0] for diagnostic in findings(played.replace("{}", "{type: chess}"))] == ["unknown-choice"]
    assert [diagnostic[0] for diagnostic in findings(played.replace("{}", "{type: 'no.such:Game'}"))] == [
        "missing-extra"
    ]


def test_a_time_limit_of_commands_counts_in_boxes(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    text = FILE + "agent: {tools: [], tool_timeout: 30, run: env_agent, environment: %s}\ndata: {type: episodes}\n"
    tasks = "{type: harbor, path: no/such/folder%s}"

    def without_effect(environment: str) -> list[str]:
        findings = load_with_lint("-", stdin=(text % environment).encode()).diagnostics
        return [one.message.partition(" ")[0] for one in findings if one.code == "no-effect"]

    assert without_effect("{type: treasure}") == ["`tools`", "`tool_timeout`"]
    assert without_effect(tasks % "") == ["`tools`"]
    harness = text % (tasks % ", harness: terminus-2, options: {max_turns: 3}")
    monkeypatch.setattr("recipes.agent.config.agent_rules.missing_modules", list)
    assert [row[0] for row in findings(harness)] == ["unusable-path", "missing-extra"]
    assert without_effect(tasks % ", harness: terminus-2, options: {max_turns: 3}") == ["`tools`", "`tool_timeout`"]
    assert without_effect(tasks % ", options: {max_turns: 3}") == ["`tools`", "`max_turns`"]


def test_keys_that_agents_of_harbor_do_not_read_are_named() -> None:
    text = (
        FILE + "agent: {tool_timeout: 30, tool_format: plain, run: env_agent,"
        " environment: {type: harbor, path: no/such%s}}\n"
        "data: {type: episodes, apply_chat_template: true, system_prompt: Be brief.}\n"
    )

    def without_effect(harness: str) -> list[str]:
        findings = load_with_lint("-", stdin=(text % harness).encode()).diagnostics
        return sorted(one.message.partition(" ")[0] for one in findings if one.code == "no-effect")

    assert without_effect("") == []
    assert without_effect(", harness: terminus-2") == ["`system_prompt`", "`tool_format`", "`tool_timeout`"]


def test_a_task_that_no_box_may_hold_is_named(findings: Any, tmp_path: Path) -> None:
    folders = (greeting_task(tmp_path), double_task(tmp_path))
    write_checks(tmp_path, [fit(read_task(folder)) for folder in folders])
    environment = "{type: harbor, path: %s, box_memory_mib: %d}"
    text = FILE + f"agent: {{run: env_agent, environment: {environment}}}\ndata: {{type: episodes}}\n"
    assert findings(text % (tmp_path, 256)) == []
    ((code, _, message, help),) = findings(text % (tmp_path, 255), messages=True)
    assert code == "conflicting-settings"
    assert message.endswith("needs 256 MiB, and all boxes of a node may have 255 MiB")
    assert help.startswith("raise it to 256 at least")


def test_python_needs_bubblewrap(findings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = FILE + "agent:\n  tools: [calculator, python]\n"
    monkeypatch.setattr("recipes.agent.config.agent_rules.shutil.which", lambda name: f"/usr/bin/{name}")
    assert findings(programs) == []
    monkeypatch.setattr("recipes.agent.config.agent_rules.shutil.which", lambda name: None)
    diagnostics = findings(programs, messages=True)
    assert [(diagnostic[0], diagnostic[1], diagnostic[3]) for diagnostic in diagnostics] == [
        ("missing-extra", "python", "run `apt install bubblewrap`")
    ]


def test_doctor_tries_the_sandbox_where_programs_are_run() -> None:
    def tried(tools: str) -> list[Any]:
        trials = (recipe := find_recipe("agent")).load(recipe.trials)
        assert trials is not None
        return trials(load_job("-", stdin=f"{FILE}agent:\n  tools: [{tools}]\n".encode()).config)

    assert tried("calculator") == []
    (result,) = tried("calculator, python")
    assert result[:3] == ("agent", "sandbox", "recipes.language.sandbox.sandbox_probe")

"""What the shell completes, asked as the shell asks, and once in a real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.codes import code_names
from rlinf_core.config.shipped import shipped_configs

Complete = Callable[..., list[str]]
RLINF = Path(sys.executable).with_name("rlinf")


@pytest.fixture
def complete(cli: Callable[..., Any], tmp_path: Path, mixed: Path, monkeypatch: pytest.MonkeyPatch) -> Complete:
    """The candidates for the last word, in a folder that holds `mixed.yaml`, `notes.txt` and `jobs/one.yaml`."""
    (tmp_path / "notes.txt").touch()
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "one.yaml").write_text("cluster: {num_nodes: 1}\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("_RLINF_COMPLETE", "complete_bash")

    def run(*words: str) -> list[str]:
        monkeypatch.setenv("COMP_WORDS", "\n".join(["rlinf", *words]))
        monkeypatch.setenv("COMP_CWORD", str(len(words)))
        ended = cli()
        assert ended.err == ""
        return ended.out.split()

    return run


def test_commands(complete: Complete) -> None:
    assert complete("va") == ["validate"]
    assert complete("inspect", "") == ["placement", "config", "env", "hardware", "memory"]


def test_codes_and_fields(complete: Complete) -> None:
    assert complete("explain", "unknown-k") == ["unknown-key"]
    assert set(code_names()) < set(complete("explain", ""))
    assert "cluster.node_groups.label" in complete("explain", "cluster.node_groups.")
    assert complete("explain", "cluster.num") == ["cluster.num_nodes"]
    assert complete("explain", "env.enable") == []


def test_recipes(complete: Complete) -> None:
    assert complete("explain", "--recipe", "") == ["agent", "embodied", "math", "serve", "sft", "sft_chat"]


def test_shipped_configs_and_yaml_files(complete: Complete) -> None:
    completions = complete("validate", "")
    assert set(shipped_configs()) < set(completions)
    assert "mixed.yaml" in completions
    assert "jobs/" in completions
    assert "notes.txt" not in completions
    # The only folder comes with what is in it: the shell would put a space behind it alone.
    assert complete("inspect", "placement", "jo") == ["jobs/", "jobs/one.yaml"]


def test_override_keys_a_section_at_a_time(complete: Complete) -> None:
    assert complete("inspect", "config", "mixed.yaml", "cluster.n") == ["cluster.num_nodes=", "cluster.node_groups"]
    groups = complete("inspect", "config", "mixed.yaml", "cluster.component_placement.a")
    assert groups == ["cluster.component_placement.actor.", "cluster.component_placement.agent."]
    assert complete("inspect", "config", "embodied", "actor.optim.l") == complete(
        "validate", "embodied", "actor.optim.l"
    )


def test_the_only_key_comes_with_a_value(complete: Complete) -> None:
    """Alone, the shell would put a space behind it."""
    assert complete("validate", "mixed.yaml", "cluster.num") == ["cluster.num_nodes=", "cluster.num_nodes=4"]
    completions = complete("validate", "mixed.yaml", "cluster.node_groups[0].ignore")
    prefix = "cluster.node_groups[0].ignore_hardware="
    assert completions == [prefix, f"{prefix}true", f"{prefix}false"]


def test_values_that_bash_would_take_for_a_word_are_quoted(complete: Complete) -> None:
    key = "cluster.node_groups[0].ignore_hardware"
    assert complete("validate", "mixed.yaml", key, "=") == ["true", "false"]
    assert complete("validate", "mixed.yaml", key, "=", "f") == ["false"]


def test_deletions(complete: Complete) -> None:
    assert "~cluster.node_groups" in complete("validate", "mixed.yaml", "~cluster.n")


def test_components_and_groups_of_the_file(complete: Complete) -> None:
    assert complete("inspect", "env", "mixed.yaml", "--component", "a") == ["actor", "agent"]
    assert complete("inspect", "placement", "mixed.yaml", "--assume", "si") == ["sim=4", "sim=8"]


class TestOfTrain:
    def test_recipes_and_files_come_first(self, complete: Complete) -> None:
        assert complete("train", "recipe=e") == ["recipe=embodied"]
        completions = complete("train", "")
        assert {"embodied", "recipe=math", "mixed.yaml", "laptop"} <= set(completions)

    def test_a_recipe_whose_name_bash_parts(self, complete: Complete) -> None:
        assert complete("train", "recipe", "=", "em") == ["embodied"]
        assert complete("train", "recipe", "=", "embodied", "runner.max_s") == [
            "runner.max_steps=",
            "runner.max_staleness=",
        ]

    def test_keys_behind_a_recipe_and_behind_a_file(self, complete: Complete) -> None:
        completions = complete("train", "recipe=embodied", "env.train.")
        assert "env.train.total_num_envs=" in completions
        assert complete("train", "laptop", "env.train.") == completions
        assert complete("train", "recipe=math", "data.prom") == complete("train", "math_laptop", "data.prom") != []

    def test_runs_and_their_components(self, complete: Complete) -> None:
        from rlinf_core.config.sections.runner import RunnerConfig
        from rlinf_core.runners.storage.run_folder import RunFolder

        run = RunFolder.create(RunnerConfig(), "embodied")
        for component in ("actor", "env"):
            (run.logs / component).mkdir()
            run.log_file(component, 0).touch()
        assert complete("logs", "emb") == [run.path.name]
        assert complete("stop", "") == [run.path.name]
        assert complete("logs", "") == [run.path.name, "actor", "env"]
        assert complete("logs", run.path.name, "a") == ["actor"]


@pytest.mark.parametrize(
    "words",
    [
        ("train", "recipe=nothing", "runner."),
        ("logs", "a"),
        ("inspect", "env", "no-such-file.yaml", "--component", ""),
        ("validate", "mixed.yaml", "a..b["),
        ("validate", "/no/such/folder/"),
        ("explain", "no.such.field."),
    ],
    ids=" ".join,
)
def test_what_cannot_be_completed_is_silent(complete: Complete, words: tuple[str, ...]) -> None:
    assert complete(*words) == []


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_install_completion(tmp_path: Path) -> None:
    environment = dict(os.environ, HOME=str(tmp_path), PATH=f"{RLINF.parent}{os.pathsep}{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "--norc", "-c", "rlinf --install-completion; true"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "bash completion installed in" in done.stdout
    assert (tmp_path / ".bashrc").read_text().strip().startswith("source ")

    pexpect = pytest.importorskip("pexpect")
    shell = pexpect.spawn("bash", ["--noprofile", "--norc"], env=dict(environment, PS1="$ ", TERM="dumb"), timeout=30)
    shell.setwinsize(24, 200)
    shell.sendline(f"source {tmp_path}/.bashrc; echo re''ady")
    shell.expect("ready")
    shell.send("rlinf explain unknown-k\t")
    shell.expect("rlinf explain unknown-key ")
    shell.sendline()
    shell.expect(r"error\[unknown-key\]")
    shell.sendline("exit")
    shell.expect(pexpect.EOF)

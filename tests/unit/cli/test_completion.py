"""What the shell completes, asked as the shell asks, and once in a real shell."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlinf_cli.codes import code_names
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.config.shipped import shipped_configs
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.cli.typed import Cli

Complete = Callable[..., list[str]]
RLINF = Path(sys.executable).with_name("rlinf")
IGNORE = "cluster.node_groups[0].ignore_hardware"


@pytest.fixture
def complete(cli: Cli, tmp_path: Path, mixed: Path, monkeypatch: pytest.MonkeyPatch) -> Complete:
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


@pytest.mark.parametrize(
    ("words", "candidates"),
    [
        ("va", "validate"),
        ("inspect ", "placement config env hardware memory"),
        ("explain unknown-k", "unknown-key"),
        ("explain cluster.num", "cluster.num_nodes"),
        ("explain env.enable", ""),
        ("explain --recipe ", "agent embodied math serve sft sft_chat"),
        # The only folder comes with what is in it, and the only key with a value: the shell would add a space.
        ("inspect placement jo", "jobs/ jobs/one.yaml"),
        ("validate mixed.yaml cluster.num", "cluster.num_nodes= cluster.num_nodes=4"),
        ("validate mixed.yaml cluster.node_groups[0].ignore", f"{IGNORE}= {IGNORE}=true {IGNORE}=false"),
        # Bash takes `=` for a word.
        (f"validate mixed.yaml {IGNORE} = ", "true false"),
        (f"validate mixed.yaml {IGNORE} = f", "false"),
        ("train recipe=e", "recipe=embodied"),
        ("train recipe = em", "embodied"),
        ("train recipe = embodied runner.max_s", "runner.max_steps= runner.max_staleness="),
        ("inspect config mixed.yaml cluster.n", "cluster.num_nodes= cluster.node_groups"),
        ("inspect config mixed.yaml cluster.component_placement.a",
         "cluster.component_placement.actor. cluster.component_placement.agent."),
        ("inspect env mixed.yaml --component a", "actor agent"),
        ("inspect placement mixed.yaml --assume si", "sim=4 sim=8"),
        # What cannot be completed is silent.
        ("train recipe=nothing runner.", ""),
        ("logs a", ""),
        ("inspect env no-such-file.yaml --component ", ""),
        ("validate mixed.yaml a..b[", ""),
        ("validate /no/such/folder/", ""),
        ("explain no.such.field.", ""),
    ],
)  # fmt: skip
def test_candidates(complete: Complete, words: str, candidates: str) -> None:
    assert complete(*words.split(" ")) == candidates.split()


def test_codes_fields_and_keys(complete: Complete) -> None:
    assert set(code_names()) < set(complete("explain", ""))
    assert "cluster.node_groups.label" in complete("explain", "cluster.node_groups.")
    assert {"embodied", "recipe=math", "mixed.yaml", "embodied/pick-laptop"} <= set(complete("train", ""))
    # Behind a recipe as behind its file.
    keys = complete("train", "recipe=embodied", "env.train.")
    assert "env.train.total_num_envs=" in keys
    assert complete("train", "embodied/pick-laptop", "env.train.") == keys
    assert complete("validate", "embodied", "env.train.") == keys
    assert complete("train", "recipe=math", "data.prom") == complete("train", "math/sums-laptop", "data.prom") != []
    optimizer = complete("validate", "embodied/pick-laptop", "actor.optim.l")
    assert complete("inspect", "config", "embodied/pick-laptop", "actor.optim.l") == optimizer != []
    assert "~cluster.node_groups" in complete("validate", "mixed.yaml", "~cluster.n")


def test_runs_and_their_components(complete: Complete) -> None:
    run = RunFolder.create(RunnerConfig(), "embodied")
    for component in ("actor", "env"):
        (run.logs / component).mkdir()
        run.log_file(component, 0).touch()
    assert complete("logs", "emb") == [run.path.name]
    assert complete("stop", "") == [run.path.name]
    assert complete("logs", "") == [run.path.name, "actor", "env"]
    assert complete("logs", run.path.name, "a") == ["actor"]


def test_shipped_configs_and_yaml_files(complete: Complete) -> None:
    completions = complete("validate", "")
    assert set(shipped_configs()) < set(completions)
    assert {"mixed.yaml", "jobs/"} < set(completions)
    assert "notes.txt" not in completions


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

"""rlinf up and down of this machine alone; rlinf init; names on a hub."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.cluster import identity
from rlinf_cli.projects import ProjectKind
from rlinf_core import load_run
from rlinf_core.process import proc
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.hub_stand_in import Hub, served
from tests.rlinf_command import output_of, rlinf
from tests.waiting import until

Run = Callable[..., Any]


def free_ports() -> range:
    """Return a range whose first ports nobody listens on; below those that Linux hands out."""
    for first in range(24000, 32000, 200):
        try:
            for port in range(first, first + 16):
                with socket.socket() as item:
                    item.bind(("", port))
        except OSError:
            continue
        return range(first, first + 200)
    pytest.skip("no free ports")


JOIN = """\
from rlinf_core import Cluster
from rlinf_core.cluster import engine
from tests.waiting import until
with Cluster(num_nodes=1):
    running = engine.current()
    print(running.embedded, running.address)
"""


@pytest.fixture
def base() -> Iterator[str]:
    """A short folder for temporary files of the test alone: no driver beside it sees the cluster."""
    with tempfile.TemporaryDirectory(prefix="up", dir="/tmp") as folder:
        yield folder


@pytest.fixture
def env(tmp_path: Path, base: str) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if not name.startswith(("RLINF_", "RAY_"))}
    return {**own, "XDG_STATE_HOME": str(tmp_path / "state"), "TMPDIR": base}


def joined(env: dict[str, str], **extra: str) -> list[str]:
    """Return what a driver on this machine says of its Ray: whether it is embedded, and its address."""
    return output_of(sys.executable, "-c", JOIN, env={**env, **extra}, timeout=200).split()


@pytest.fixture
def run(tmp_path: Path, base: str, env: dict[str, str]) -> Iterator[Run]:
    """Runs `rlinf`: `run("up", "--quiet")`; the cluster is down at the end."""
    ports = free_ports()
    name = f"here-{os.getpid()}"
    file = tmp_path / f"{name}.yaml"
    file.write_text(f"cluster: {{num_nodes: 1, ports: {ports.start}-{ports.stop - 1}}}\n")

    def call(command: str, *arguments: str) -> Any:
        return json.loads(rlinf(tmp_path, command, str(file), "--json", *arguments, env=env, timeout=200))

    yield call
    call("down", "--force")
    cluster = identity.cluster_id(name)
    assert not proc.processes_of(cluster, f"{base}/rlinf-{os.getuid()}/up-{cluster}")


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_a_driver_joins_it(run: Run, env: dict[str, str]) -> None:
    address = run("up", "--timeout", "120")["address"]
    assert joined(env) == ["False", address]
    assert joined(env, RLINF_ADDRESS=address) == ["False", address]
    assert joined(env, RLINF_ADDRESS="local")[0] == "True"
    assert run("down")["ok"]


@pytest.mark.timeout(300)
@pytest.mark.nightly
def test_up_again_repaired_and_down(run: Run, tmp_path: Path) -> None:
    first = run("up", "--timeout", "120")
    assert [(node["up"], node["changed"]) for node in first["nodes"]] == [(True, True)]
    assert [node["changed"] for node in run("up")["nodes"]] == [False]
    [record] = (tmp_path / "state" / "rlinf" / "clusters").glob("*.json")
    written = json.loads(record.read_text())
    process = written["nodes"][0]["process"]
    folder = Path(written["nodes"][0]["folder"])
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    os.kill(int(process.split(":")[0]), signal.SIGKILL)
    until(lambda: not proc.alive(process), "the death of the node's process", 60)
    assert [node["changed"] for node in run("up", "--timeout", "120")["nodes"]] == [True]
    ended = run("down")
    assert [(node["found"], node["left"]) for node in ended["nodes"]] == [(True, [])]
    assert not folder.exists()
    assert not record.exists()


def work(folder: Path, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    output_of(sys.executable, "-m", *words, cwd=folder, env=environment)


def expect_two_steps(folder: Path, job: Path) -> None:
    work(folder, "rlinf_cli", "train", str(job), "runner.max_steps=2", f"runner.logger.log_path={job.stem}-runs")
    newest = RunFolder.latest(folder / f"{job.stem}-runs")
    assert newest is not None
    run = load_run(newest.path)
    assert (run.status, run.step) == ("finished", 2)
    assert [record["step"] for record in run.metrics][-2:] == [1, 2]


@pytest.mark.timeout(900)
def test_recipe_of_one_s_own_trains_two_steps(tmp_path: Path) -> None:
    work(tmp_path, "rlinf_cli", "init", "recipe", "--name", "bandits")
    expect_two_steps(tmp_path, Path("bandits.yaml"))


@pytest.mark.timeout(900)
@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "options"), [*((kind, ()) for kind in ProjectKind), ("env", ("--gymnasium",))])
def test_project_passes_its_tests_and_trains(kind: str, options: tuple[str, ...], tmp_path: Path) -> None:
    work(tmp_path, "rlinf_cli", "init", kind, *options, "--name", "project")
    work(tmp_path, "pytest", "-q", "-p", "no:cacheprovider")
    jobs = sorted(path.relative_to(tmp_path) for path in tmp_path.rglob("*.yaml"))
    assert len(jobs) == (5 if kind == ProjectKind.LAB else 1)
    for job in jobs:
        expect_two_steps(tmp_path, job)


pytest.importorskip("transformers")

RLINF = Path(sys.executable).with_name("rlinf")
OLD, NEW = "a" * 40, "b" * 40
JOB = """recipe: sft_chat
cluster:
  num_nodes: 1
  component_placement:
    actor: {node_group: node, placement: 0}
actor: {global_batch_size: 4, model: {model_path: acme/tiny}}
data: {type: chat, train_data_paths: acme/chats, val_data_paths: acme/chats}
runner: {seq_length: 64, max_steps: 1, save_interval: 1, val_check_interval: -1}
"""
CHATS = "".join(json.dumps({"prompt": f"{n}+1=", "completion": str(n + 1)}) + "\n" for n in range(8))


def with_hub(hub: Hub, folder: Path, *arguments: str, code: int = 0) -> str:
    """Run a command in a folder, with a cache of its own and no network but the stand-in."""
    own = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "RLINF_ADDRESS": "local"}
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")} | own
    return output_of(RLINF, *arguments, cwd=folder, env=environment, timeout=300, code=code, errors=True)


def repositories(folder: Path, commit: str) -> dict[str, tuple[str, Mapping[str, bytes]]]:
    """Return a small model and conversations, at a commit."""
    from recipes.language.models.load_model import built_model, built_tokenizer

    if not folder.is_dir():
        tokenizer: Any = built_tokenizer()
        built_model(tokenizer, hidden_dim=32).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    model = {file.name: file.read_bytes() for file in folder.iterdir()}
    chats = {"data/train.jsonl": CHATS.encode(), "data/test.jsonl": CHATS.encode(), "README.md": b"Chats"}
    return {"models/acme/tiny": (commit, model), "datasets/acme/chats": (commit, chats)}


@pytest.mark.ray
@pytest.mark.timeout(600)
@pytest.mark.nightly
def test_run_resume_and_evaluation_have_the_commit_of_the_start(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with served(repositories(tmp_path / "built", OLD)) as hub:
        assert "valid" in with_hub(hub, tmp_path, "validate", "job.yaml")
        assert not any("resolve" in asked for asked in hub.asked)
        said = with_hub(hub, tmp_path, "train", "job.yaml")
        assert "fetching `acme/tiny`, a model of the HuggingFace Hub" in said
        (run,) = (tmp_path / "runs").iterdir()
        config = (run / "config.yaml").read_text()
        assert f"acme/tiny@{OLD}" in config
        assert config.count(f"acme/chats@{OLD}") == 2
        # The author pushes; somebody fetches that.
        hub.repositories = repositories(tmp_path / "built", NEW)
        (tmp_path / "hub/hub/models--acme--tiny/refs/main").write_text(NEW)
        hub.asked.clear()
        with_hub(hub, tmp_path, "train", "job.yaml", f"runner.resume_dir={run}", "runner.max_steps=2")
        assert (run / "config.yaml").read_text().count(OLD) == 3
        assert NEW not in (run / "config.yaml").read_text()
        with_hub(hub, tmp_path, "eval", str(run))
        assert not any(NEW in asked for asked in hub.asked)


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_without_cache_and_network_nothing_starts(tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text(JOB)
    with served({}) as hub:
        said = with_hub(hub, tmp_path, "train", "job.yaml", code=2)
    assert "`acme/tiny` is not in the cache of huggingface_hub" in said
    assert "hf download acme/tiny" in said
    assert not (tmp_path / "runs").exists()

"""The entry program and the training loop of the overview of the programming flow, typed as they stand there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.loop.embodied_runner import EmbodiedRunner
from recipes.embodied.workers.actor_worker import EmbodiedFSDPActor
from recipes.embodied.workers.env_worker import EnvWorker
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from rlinf_core import Cluster, HybridComponentPlacement, load_job

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def cfg(tmp_path: Path) -> Any:
    job = load_job(
        "laptop",
        (
            "env.train.task=reach",
            "env.train.total_num_envs=8",
            "env.train.max_episode_steps=10",
            "env.train.max_steps_per_rollout_epoch=10",
            "actor.global_batch_size=40",
            "actor.model.hidden_dim=16",
            "actor.group_name=TheActors",
            "runner.val_check_interval=-1",
            "runner.max_steps=2",
            f"runner.logger.log_path={tmp_path / 'runs'}",
        ),
        environ={},
    )
    job.raise_if_bad()
    return job.config


SEEDS = Path(__file__).with_name("seeds")
ENTRY = (SEEDS / "training_flow.txt").read_text()
LOOP = (SEEDS / "training_loop.txt").read_text()
GROUPS = ("actor_group", "rollout_group", "env_group")


class Handles:
    """A group that keeps the handles of its calls, which the loop drops."""

    def __init__(self, group: Any) -> None:
        self.group = group
        self.handles: dict[str, list[Any]] = {}

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            handle = getattr(self.group, name)(*args)
            self.handles.setdefault(name, []).append(handle)
            return handle

        return call


def names_of(cfg: Any) -> dict[str, Any]:
    """Return what the programs find there before their first line."""
    classes = (Cluster, HybridComponentPlacement, EmbodiedFSDPActor, MultiStepRolloutWorker, EnvWorker, EmbodiedRunner)
    return {"cfg": cfg, "num_nodes": 1, **{item.__name__: item for item in classes}}


def run(text: str, names: dict[str, Any]) -> None:
    exec(text, names)  # noqa: S102


@pytest.fixture
def entry(cluster: Cluster, cfg: Any) -> Iterator[Callable[[str], dict[str, Any]]]:
    """Runs the entry program, or what a test makes of it, and returns its variables."""
    ran: list[dict[str, Any]] = []

    def enter(text: str) -> dict[str, Any]:
        names = names_of(cfg)
        ran.append(names)
        run(text, names)
        return names

    yield enter
    for names in ran:
        for group in GROUPS:
            names[group].shutdown()


def state_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_the_entry_program(
    entry: Callable[[str], dict[str, Any]], cfg: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names = entry(ENTRY)
    assert names["actor_group"].worker_group_name == "TheActors"
    folder = names["runner"].record.folder
    state = state_of(folder.path)
    assert (state["status"], state["step"], state["recipe"]) == ("finished", 2, "embodied")
    assert len(folder.metrics_file.read_text().splitlines()) == 2
    assert folder.checkpoints.latest() is not None
    config = load_job(str(folder.config_file), environ={})
    assert config.ok, [diagnostic.message for diagnostic in config.diagnostics]
    assert config.config is not None
    assert config.config.model_dump() == cfg.model_dump()
    assert str(folder.path) in capsys.readouterr().err


@pytest.mark.nightly
def test_a_training_loop_by_hand(entry: Callable[[str], dict[str, Any]]) -> None:
    last_line = "runner.run()\n"
    assert ENTRY.endswith(last_line)
    names = entry(ENTRY.removesuffix(last_line))
    runner = names["runner"]
    groups = {name: names[name] for name in GROUPS}
    actor = names["actor_group"] = Handles(groups["actor_group"])
    # It is a method there, and is called without an object.
    definitions, loop = LOOP.split("\n\n\nfor step in", maxsplit=1)
    run(definitions, names)
    names |= {"training_step": 2, "generate_rollouts": partial(names["generate_rollouts"], None)}
    run(f"for step in{loop}", names)
    trained = [metrics for handle in actor.handles["run_training"] for metrics in handle.wait()]
    for handle in actor.handles["compute_advantages_and_returns"]:
        handle.wait()
    by_hand = runner.record.folder.path
    runner.shutdown()
    for name, group in groups.items():
        names[name] = group
        group.shutdown()
    assert state_of(by_hand)["status"] == "finished"

    runner = entry(ENTRY)["runner"]
    metrics = [json.loads(line)["metrics"] for line in runner.record.folder.metrics_file.read_text().splitlines()]
    assert runner.record.folder.path != by_hand
    for mine, theirs in zip(trained, metrics, strict=True):
        # Speed and memory differ from run to run.
        mine = {name: value for name, value in mine.items() if not name.startswith(("speed/", "memory/"))}
        assert mine == {name: theirs[name] for name in mine}, "the steps that nobody numbered are those of the runner"


@pytest.mark.nightly
def test_a_run_that_fails_says_so_in_its_folder(entry: Callable[[str], dict[str, Any]]) -> None:
    names = entry(ENTRY.partition("runner.init_workers()")[0])
    names["env_group"].shutdown()
    with pytest.raises(Exception, match="not running"):
        names["runner"].init_workers()
    state = state_of(names["runner"].record.folder.path)
    assert state["status"] == "failed"
    assert "not running" in state["reason"]

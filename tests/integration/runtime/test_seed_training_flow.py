"""The entry program and the training loop of the overview of the programming flow, as they are written there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from recipes.embodied.actor_worker import EmbodiedFSDPActor
from recipes.embodied.env_worker import EnvWorker
from recipes.embodied.rollout_worker import MultiStepRolloutWorker
from rlinf_core import Cluster, EmbodiedRunner, HybridComponentPlacement, WorkerGroup, load_job

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


Groups = tuple[WorkerGroup[EmbodiedFSDPActor], WorkerGroup[MultiStepRolloutWorker], WorkerGroup[EnvWorker]]


def launch(cfg: Any, cluster: Cluster) -> Groups:
    component_placement = HybridComponentPlacement(cfg, cluster)

    actor_placement = component_placement.get_strategy("actor")
    actor_group = EmbodiedFSDPActor.create_group(cfg).launch(cluster, placement_strategy=actor_placement)

    rollout_placement = component_placement.get_strategy("rollout")
    rollout_group = MultiStepRolloutWorker.create_group(cfg).launch(cluster, placement_strategy=rollout_placement)

    env_placement = component_placement.get_strategy("env")
    env_group = EnvWorker.create_group(cfg).launch(cluster, placement_strategy=env_placement)
    return actor_group, rollout_group, env_group


def state_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "run.json").read_text())


def test_the_entry_program(cluster: Cluster, cfg: Any, capsys: pytest.CaptureFixture[str]) -> None:
    actor_group, rollout_group, env_group = launch(cfg, cluster)
    assert actor_group.worker_group_name == "TheActors"
    with actor_group, rollout_group, env_group:
        runner = EmbodiedRunner(
            cfg=cfg,
            actor=actor_group,
            rollout=rollout_group,
            env=env_group,
        )
        runner.init_workers()
        folder = runner.record.folder
        assert state_of(folder.path)["status"] == "running"
        runner.run()
    state = state_of(folder.path)
    assert (state["status"], state["step"], state["recipe"]) == ("finished", 2, "embodied")
    assert len(folder.metrics_file.read_text().splitlines()) == 2
    assert folder.checkpoints.latest() is not None
    config = load_job(str(folder.config_file), environ={})
    assert config.ok, [each.message for each in config.diagnostics]
    assert config.config is not None
    assert config.config.model_dump() == cfg.model_dump()
    assert str(folder.path) in capsys.readouterr().err


def test_a_training_loop_by_hand(cluster: Cluster, cfg: Any) -> None:
    actor_group, rollout_group, env_group = launch(cfg, cluster)
    training_step = 2

    def update_rollout_weights() -> None:
        rollout_futures = rollout_group.sync_model_from_actor()
        actor_futures = actor_group.sync_model_to_rollout()
        actor_futures.wait()
        rollout_futures.wait()

    def generate_rollouts() -> None:
        env_futures = env_group.interact()
        rollout_futures = rollout_group.generate()
        actor_futures = actor_group.recv_rollout_batch()
        env_futures.wait()
        actor_futures.wait()
        rollout_futures.wait()

    with actor_group, rollout_group, env_group:
        runner = EmbodiedRunner(cfg=cfg, actor=actor_group, rollout=rollout_group, env=env_group)
        runner.init_workers()
        trained: list[dict[str, float]] = []
        for _step in range(training_step):
            update_rollout_weights()
            generate_rollouts()

            actor_group.compute_advantages_and_returns().wait()

            trained += actor_group.run_training().wait()
        by_hand = runner.record.folder.path
        runner.shutdown()
    assert state_of(by_hand)["status"] == "finished"

    actor_group, rollout_group, env_group = launch(cfg, cluster)
    with actor_group, rollout_group, env_group:
        runner = EmbodiedRunner(cfg=cfg, actor=actor_group, rollout=rollout_group, env=env_group)
        runner.init_workers()
        runner.run()
    metrics = [json.loads(line)["metrics"] for line in runner.record.folder.metrics_file.read_text().splitlines()]
    assert runner.record.folder.path != by_hand
    for mine, theirs in zip(trained, metrics, strict=True):
        # Speed and memory differ from run to run.
        mine = {name: value for name, value in mine.items() if not name.startswith(("speed/", "memory/"))}
        assert mine == {name: theirs[name] for name in mine}, "the steps that nobody numbered are those of the runner"


def test_a_run_that_fails_says_so_in_its_folder(cluster: Cluster, cfg: Any) -> None:
    actor_group, rollout_group, env_group = launch(cfg, cluster)
    with actor_group, rollout_group:
        runner = EmbodiedRunner(cfg=cfg, actor=actor_group, rollout=rollout_group, env=env_group)
        env_group.shutdown()
        with pytest.raises(Exception, match="not running"):
            runner.init_workers()
    state = state_of(runner.record.folder.path)
    assert state["status"] == "failed"
    assert "not running" in state["reason"]

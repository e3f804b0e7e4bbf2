"""Several workers of each kind make of the same samples what one makes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ruamel import yaml

from rlinf_core.runners.events import RunStarted
from tests.integration.recipes.conftest import Run, Train

# Every run launches workers anew, on a machine that may be slow.
pytestmark = pytest.mark.timeout(600)

# One batch a step, all samples: the order of samples, which each rank draws for itself, then makes no difference.
WHOLE = ("actor.global_batch_size=80", "algorithm.update_epoch=1", "runner.max_steps=2")
PLACES = "cluster.component_placement"


def place(**counts: int) -> tuple[str, ...]:
    """Overrides that give components so many processes, all on this machine."""
    named = [f"{PLACES}.{name}={{node_group: node, placement: '0:0-{count - 1}'}}" for name, count in counts.items()]
    return (f"~{PLACES}", *named)


def close(one: Run, other: Run) -> None:
    mine, theirs = one.weights(), other.weights()
    assert mine.keys() == theirs.keys()
    for name, weight in mine.items():
        torch.testing.assert_close(theirs[name], weight, rtol=0, atol=1e-5, msg=name)


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("no_shard", marks=pytest.mark.nightly)])
def test_two_actors_learn_what_one_learns(train: Train, strategy: str) -> None:
    one = train(*WHOLE)
    two = train(*WHOLE, *place(actor=2, rollout=1, env=1), f"actor.fsdp_config.sharding_strategy={strategy}")
    # Each learned, and with as many as it should.
    assert [run.of(RunStarted)[-1].components["actor"] for run in (one, two)] == [1, 2]
    assert all(run.metrics[-1].metrics["train/actor/grad_norm"] > 0 for run in (one, two))
    close(one, two)


@pytest.mark.nightly
def test_several_of_each_kind(train: Train) -> None:
    run = train(*place(actor=2, rollout=2, env=2), "rollout.pipeline_stage_num=2", "runner.val_check_interval=3")
    assert [record.step for record in run.metrics] == [1, 2, 3]
    assert "eval/return" in run.metrics[-1].metrics


@pytest.mark.nightly
def test_actors_share_the_steps_of_one_environment(train: Train) -> None:
    alone = ("env.train.total_num_envs=1", "actor.global_batch_size=10")
    one = train(*WHOLE, *alone)
    two = train(*WHOLE, *alone, *place(actor=2, rollout=1, env=1))
    assert two.metrics[-1].metrics["train/actor/grad_norm"] > 0
    assert two.metrics[-1].metrics["rollout/reward"] == pytest.approx(one.metrics[-1].metrics["rollout/reward"])
    close(one, two)


@pytest.mark.nightly
def test_documented_file_trains_without_its_gpus(train: Train) -> None:
    page = (Path(__file__).parents[4] / "docs" / "config.md").read_text(encoding="utf-8")
    described = yaml.YAML(typ="safe").load(page.split("```yaml\n")[1].split("```")[0])
    assert list(described["cluster"]["component_placement"]) == ["actor", "rollout", "env"]
    # 8 processes that train, 4 that act, one arm.
    run = train(*place(actor=8, rollout=4, env=1), "env.train.total_num_envs=1", "actor.global_batch_size=null")
    assert run.of(RunStarted)[-1].components == {"actor": 8, "rollout": 4, "env": 1}
    assert [record.step for record in run.metrics][-1] == 3
    assert run.metrics[-1].metrics["train/actor/grad_norm"] > 0

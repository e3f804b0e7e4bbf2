"""`recipe: math`: a small model is trained, kept, shown, resumed, and outlives its workers."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

from rlinf_core.runners import events
from rlinf_core.runners.runner import Runner
from tests.integration.recipes.conftest import RECOVERIES, Killer, Run, Train

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def whole(train_math: Train) -> Run:
    """A run of four steps that nothing disturbs."""
    # Rewards differ by length: a model so small has few right answers, and only what has a gradient is compared.
    checked = ("rollout.check_logprobs=warn", "reward.soft_overlong=6")
    return train_math("runner.save_format=both", "runner.save_interval=2", *checked)


def test_a_model_built_on_the_spot_is_trained_kept_and_shown(whole: Run) -> None:
    steps = [record.metrics for record in whole.metrics]
    assert len(steps) == 4
    # Engine and trainer are the same model: what they say of the drawn tokens differs by rounding.
    gaps = [step["train/logprob_gap/max"] for step in steps if "train/logprob_gap/max" in step]
    assert gaps
    assert max(gaps) < 1e-4
    assert all(-1 <= step["rollout/reward"] <= 1 for step in steps)
    assert all(step["rollout/staleness_max"] == 0 for step in steps)
    shown = subprocess.run(
        [sys.executable, "-m", "rlinf_cli", "report", "--samples", str(whole.folder.path), "-n", "2", "--json"],
        capture_output=True,
        text=True,
        check=True,
    )
    record = json.loads(shown.stdout)
    assert record["schema"] == "rlinf.samples/1"
    assert len(record["samples"]) == 2
    # A model that has learned little draws tokens that have no text.
    first = record["samples"][0]
    assert "".join(piece for piece in first["pieces"] if piece != "<unk>").startswith(first["text"])

    from transformers import AutoModelForCausalLM, AutoTokenizer

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    folder = whole.folder.path / "model"
    model, tokenizer = (kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer))
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.nightly
def test_killed_workers_alone_are_started_again(train_math: Train, whole: Run) -> None:
    """A reward worker's answers are scored again, a rollout worker's are drawn again."""
    killers = Killer("reward", 2, events.GENERATE_ROLLOUTS), Killer("rollout", 3, events.GENERATE_ROLLOUTS)

    def kill(event: events.Event, runner: Runner | None) -> None:
        for killer in killers:
            killer(event, runner)

    run = train_math("runner.save_interval=2", "reward.soft_overlong=6", during=kill)

    assert [type(event) for event in run.events if isinstance(event, RECOVERIES)] == [events.WorkersRelaunched] * 2
    repeated = [item.repeated for item in run.of(events.WorkersRelaunched)]
    assert repeated == ["the scores of rank 0", "the answers of rank 0"]
    assert [item.step for item in run.of(events.StepFinished)] == [1, 2, 3, 4]
    mine, theirs = whole.weights(), run.weights()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.nightly
def test_a_resumed_run_ends_with_the_weights_of_one_that_went_on(train_math: Train, whole: Run) -> None:
    stopped = train_math.folder / "stopped"
    shutil.copytree(whole.folder.path, stopped)
    shutil.rmtree(stopped / "checkpoints" / "global_step_4")

    checkpoint = stopped / "checkpoints" / "global_step_2"
    resumed = train_math(f"runner.resume_dir={checkpoint}", "runner.save_interval=2", "reward.soft_overlong=6")

    assert [item.step for item in resumed.of(events.StepFinished)] == [3, 4]
    mine, theirs = whole.weights(), resumed.weights()
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.mark.nightly
def test_async_generation_loses_no_prompt_when_a_worker_dies(train_math: Train, learned: dict[int, list[int]]) -> None:
    run = train_math(
        "algorithm.filter_groups=true",
        # Rewards differ by length: a model so small has few right answers.
        "reward.soft_overlong=6",
        "runner.max_staleness=1",
        "runner.save_interval=1",
        during=Killer("rollout", 3, events.GENERATE_ROLLOUTS),
    )

    (restart,) = run.of(events.RunRestarted)
    assert restart.step == 2
    assert [record.step for record in run.metrics] == [1, 2, 3, 4]
    assert all(record.metrics["rollout/staleness_max"] <= 1 for record in run.metrics)
    # Of a step that was repeated the last time counts. No problem was learned from twice.
    counts = Counter(problem for problems in learned.values() for problem in problems)
    assert set(counts.values()) == {1}
    assert len(counts) >= 24


@pytest.mark.nightly
@pytest.mark.parametrize("bound", [0, 1])
def test_a_teacher_and_a_judge_take_part(train_math: Train, whole: Run, bound: int) -> None:
    """The judge calls every reply right that is not empty."""
    run = train_math(
        "~cluster.component_placement",
        "cluster.component_placement={'actor,rollout,reward,teacher,judge': {node_group: node, placement: 0}}",
        *("algorithm.adv_type=distillation", "teacher.warm_start.steps=20", "reward.reward_type=judge"),
        *(f"judge.model_path={whole.folder.path / 'model'}", "judge.verdict=builtins:bool", "judge.template='{text}'"),
        *("judge.apply_chat_template=false", "judge.max_new_tokens=4", f"runner.max_staleness={bound}"),
    )
    steps = [record.metrics for record in run.metrics]
    assert len(steps) == 4
    assert all(step["train/teacher_kl"] > 0 for step in steps)
    assert any(step["rollout/correct"] > 0 for step in steps)


@pytest.mark.nightly
@pytest.mark.parametrize("bound", [0, 2])
def test_several_of_each_share_the_work(train_math: Train, bound: int) -> None:
    """Three prompts for four rollout workers, so that one gets none."""
    run = train_math(
        "~cluster.component_placement",
        *(
            f"cluster.component_placement.{name}={{node_group: node, placement: '0:0-{count - 1}'}}"
            for name, count in {"actor": 2, "rollout": 4, "reward": 2}.items()
        ),
        "data.rollout_batch_size=3",
        f"runner.max_staleness={bound}",
        "runner.val_check_interval=2",
    )
    assert [record.step for record in run.metrics] == [1, 2, 3, 4]

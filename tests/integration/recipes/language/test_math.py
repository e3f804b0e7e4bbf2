"""Recipe math: a small model is trained, kept, shown, resumed, and outlives its workers."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from pathlib import Path

import pytest

from recipes.language.answers.prompt_messages import GroupReport
from recipes.language.loop.prompt_plan import PromptPlan
from recipes.language.loop.worker_groups import GenerationGroup
from rlinf_core.runners import events
from rlinf_core.runners.storage.run_events import read_quarantine
from rlinf_core.worker.worker import WorkerReference
from tests.integration.cli.planted.planted_workers import DEADLY
from tests.integration.recipes.conftest import Killer, Run, Train
from tests.rlinf_command import rlinf

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def whole(train_math: Train) -> Run:
    """A run of four steps that nothing disturbs."""
    # Rewards differ by length: a model so small has few right answers, and only what has a gradient is compared.
    checked = ("rollout.check_logprobs=warn", "reward.soft_overlong=6")
    return train_math("runner.save_format=both", "runner.save_interval=2", *checked)


# By day `tests/golden` trains and keeps this job, `agent/test_agent.py` holds engine and trainer to be the same model
# and shows samples, and `test_written_model.py` loads what was kept.
def test_a_model_built_on_the_spot_is_trained_kept_and_shown(whole: Run) -> None:
    steps = [record.metrics for record in whole.metrics]
    assert len(steps) == 4
    # Engine and trainer are the same model: what they say of the drawn tokens differs by rounding.
    gaps = [step["train/logprob_gap/max"] for step in steps if "train/logprob_gap/max" in step]
    assert gaps
    assert max(gaps) < 1e-4
    assert all(-1 <= step["rollout/reward"] <= 1 for step in steps)
    assert all(step["rollout/staleness_max"] == 0 for step in steps)
    record = json.loads(rlinf(Path.cwd(), "report", "--samples", str(whole.folder.path), "-n", "2", "--json"))
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


def test_a_resumed_run_ends_with_the_weights_of_one_that_went_on(train_math: Train, whole: Run) -> None:
    stopped = train_math.folder / "stopped"
    shutil.copytree(whole.folder.path, stopped)
    shutil.rmtree(stopped / "checkpoints" / "global_step_4")

    checkpoint = stopped / "checkpoints" / "global_step_2"
    resumed = train_math(f"runner.resume_dir={checkpoint}", "runner.save_interval=2", "reward.soft_overlong=6")

    assert [item.step for item in resumed.of(events.StepFinished)] == [3, 4]
    assert resumed.ends_like(whole)


@pytest.mark.parametrize("bound", [0, 1])
def test_a_teacher_and_a_judge_take_part(train_math: Train, whole: Run, bound: int) -> None:
    """The judge calls every reply right that is not empty."""
    run = train_math(
        "~cluster.component_placement",
        "cluster.component_placement={'actor,rollout,reward,teacher,judge': {node_group: node, placement: 0}}",
        *("algorithm.adv_type=distillation", "reward.reward_type=judge"),
        "reward.options={verdict: 'builtins:bool', template: '{text}', apply_chat_template: false, max_new_tokens: 4}",
        *(f"judge.model_path={whole.folder.path / 'model'}", f"runner.max_staleness={bound}"),
    )
    steps = [record.metrics for record in run.metrics]
    assert len(steps) == 4
    assert all(step["train/teacher_kl"] > 0 for step in steps)
    assert any(step["rollout/correct"] > 0 for step in steps)


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


# Worker, step and phase; a checkpoint is written after every second step.
MOMENTS = [
    ("actor", 1, events.ACTOR_TRAINING),
    ("rollout", 2, events.GENERATE_ROLLOUTS),
    ("reward", 3, events.GENERATE_ROLLOUTS),
    ("actor", 3, events.SYNC_WEIGHTS),
    ("rollout", 4, events.SAVE_CHECKPOINT),
    ("reward", 4, events.ADVANTAGES),
]
# Rewards differ by length: a model so small has few right answers, and only what has a gradient is compared.
SAVED = ("runner.save_interval=2", "runner.max_steps=5", "reward.soft_overlong=6")


@pytest.fixture(scope="module")
def whole_of_five(train_math: Train) -> Run:
    """A run that nothing disturbs."""
    return train_math(*SAVED)


@pytest.mark.parametrize(("component", "step", "phase"), MOMENTS)
def test_a_death_changes_no_weight(
    train_math: Train, whole_of_five: Run, component: str, step: int, phase: str
) -> None:
    run = train_math(*SAVED, during=Killer(component, step, phase))

    kind = events.RunRestarted if component == "actor" else events.WorkersRelaunched
    assert run.recoveries() == [kind]
    if kind is events.WorkersRelaunched:
        if phase == events.GENERATE_ROLLOUTS:
            (again,) = run.of(kind)
            assert again.repeated == {"reward": "the scores of rank 0", "rollout": "the answers of rank 0"}[component]
        assert [item.step for item in run.of(events.StepFinished)] == [1, 2, 3, 4, 5]
    assert [record.step for record in run.metrics] == [1, 2, 3, 4, 5]
    assert run.ends_like(whole_of_five)


@pytest.mark.parametrize("partial", [True, False])
@pytest.mark.parametrize(("component", "step", "phase"), MOMENTS)
def test_async_generation_learns_from_every_prompt_once(
    train_math: Train, monkeypatch: pytest.MonkeyPatch, component: str, step: int, phase: str, partial: bool
) -> None:
    learned: dict[int, list[GroupReport]] = {}
    plans: list[PromptPlan] = []
    take = PromptPlan.take

    def noted(plan: PromptPlan, step: int) -> list[GroupReport]:
        plans.append(plan)
        learned[step] = take(plan, step)
        return learned[step]

    monkeypatch.setattr(PromptPlan, "take", noted)

    run = train_math(
        *SAVED,
        "runner.max_staleness=2",
        f"runner.partial_rollout={str(partial).lower()}",
        "algorithm.filter_groups=true",
        "algorithm.max_refills=2",
        during=Killer(component, step, phase),
    )

    assert len(run.of(events.RunRestarted)) == 1
    assert [record.step for record in run.metrics] == [1, 2, 3, 4, 5]
    assert all(record.metrics["rollout/staleness_max"] <= 2 for record in run.metrics)
    # Every prompt that was set aside was learned from once, or dropped as its metrics say.
    counts = Counter(group.problem for groups in learned.values() for group in groups)
    assert set(counts.values()) == {1}
    assert sum(counts.values()) == plans[-1].taken
    for item in run.metrics:
        groups = learned[item.step]
        assert item.metrics["rollout/groups_kept"] == sum(group.kept for group in groups) / len(groups)


@pytest.mark.parametrize("staleness", [0, 1])
def test_prompt_that_workers_die_of_is_set_aside(
    train_math: Train, monkeypatch: pytest.MonkeyPatch, staleness: int
) -> None:
    workers = WorkerReference[GenerationGroup](
        "tests.integration.cli.planted.planted_workers:DyingRolloutWorker", GenerationGroup, "rollout"
    )
    monkeypatch.setattr("recipes.math.program.ROLLOUT", workers)

    run = train_math(
        "runner.save_interval=1",
        "runner.max_steps=4",
        f"runner.max_staleness={staleness}",
        "runner.max_failed_fraction=0.5",
        "data.shuffle=false",
    )

    assert [line.step for line in run.metrics] == [1, 2, 3, 4]
    (item,) = read_quarantine(run.folder.path).values()
    assert (item.kind, item.item, item.step, len(item.deaths)) == ("prompt", str(DEADLY), 2, 3)
    assert run.metrics[-1].metrics["rollout/prompts_set_aside"] == 1
    # Two deaths of its share, and one of it alone.
    restarted, relaunched = events.RunRestarted, events.WorkersRelaunched
    assert run.recoveries() == ([restarted, restarted, relaunched] if staleness else [relaunched] * 3)

"""Workers of the math recipe that are killed with -9 at any moment: nothing is lost, and nothing is learned twice."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

pytest.importorskip("transformers")

from recipes.language.loop.protocols import GenerationGroup
from recipes.language.prompts.prompt_messages import GroupReport
from recipes.language.prompts.prompt_plan import PromptPlan
from rlinf_core.failures import WorkerGroupError
from rlinf_core.runners import events
from rlinf_core.runners.storage.evidence import read_quarantine
from rlinf_core.worker.worker_reference import WorkerReference
from tests.integration.recipes.agent.deadly_prompt import DEADLY
from tests.integration.recipes.conftest import RECOVERIES, Killer, Run, Train

pytestmark = [pytest.mark.ray, pytest.mark.nightly, pytest.mark.timeout(1200)]

# Worker, step and phase; a checkpoint is written after every second step.
MOMENTS = [
    ("actor", 1, events.ACTOR_TRAINING),
    ("rollout", 2, events.GENERATE_ROLLOUTS),
    ("reward", 3, events.GENERATE_ROLLOUTS),
    ("actor", 3, events.SYNC_WEIGHTS),
    ("rollout", 4, events.SAVE_CHECKPOINT),
    ("reward", 4, events.ADVANTAGES),
]
SAVED = ("runner.save_interval=2", "runner.max_steps=5")


@pytest.fixture(scope="module")
def whole(train_math: Train) -> Run:
    """A run that nothing disturbs."""
    return train_math(*SAVED)


@pytest.mark.parametrize(("component", "step", "phase"), MOMENTS)
def test_a_death_changes_no_weight(train_math: Train, whole: Run, component: str, step: int, phase: str) -> None:
    run = train_math(*SAVED, during=Killer(component, step, phase))

    kind = events.RunRestarted if component == "actor" else events.WorkersRelaunched
    recovered = [type(event) for event in run.events if isinstance(event, RECOVERIES)]
    assert recovered == [kind]
    if kind is events.WorkersRelaunched:
        assert [item.step for item in run.of(events.StepFinished)] == [1, 2, 3, 4, 5]
    assert [record.step for record in run.metrics] == [1, 2, 3, 4, 5]
    mine, theirs = whole.weights(), run.weights()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


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
        # Rewards differ by length: a model so small has few right answers.
        "reward.soft_overlong=6",
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
        "tests.integration.recipes.agent.deadly_prompt:DyingRolloutWorker", GenerationGroup, "rollout"
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
    kinds = [type(event) for event in run.events if isinstance(event, RECOVERIES)]
    restarted, relaunched = events.RunRestarted, events.WorkersRelaunched
    assert kinds == ([restarted, restarted, relaunched] if staleness else [relaunched] * 3)


def test_there_is_an_end_of_restarts(train_math: Train) -> None:
    with pytest.raises(WorkerGroupError, match="died"):
        train_math("runner.max_restarts=1", during=Killer("actor", 1, events.GENERATE_ROLLOUTS, times=2))

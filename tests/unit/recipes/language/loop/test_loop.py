"""The loop of language models with its real workers, in threads: resumed, killed, failing, and as a rehearsal."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, tensor

from recipes.language.answers.answer_batch import RolloutBatch, ScoredAnswers, load_unfinished
from recipes.language.answers.prompt_messages import GroupReport
from recipes.language.answers.sequences import Request, Sequence
from recipes.language.engines.registry import StandInEngine
from recipes.language.engines.torch_engine import TorchEngine
from recipes.language.language_flow import ANSWER, STEP, LanguageFlow
from recipes.language.loop.prompt_plan import PromptPlan
from recipes.language.models.load_model import make_model, make_tokenizer
from recipes.language.models.policy import LanguagePolicy, StandInLanguagePolicy
from rlinf_core.errors import RunError
from rlinf_core.process import pacing
from rlinf_core.process.pacing import Pace, PacedCalls, Pacing
from rlinf_core.runners import events
from rlinf_core.runners.storage.first_contact import read_comparisons
from tests.unit.recipes.language.in_threads import LocalRun, LocalTrain
from tests.unit.recipes.language.tiny import job_config

# Answers that are under way for a while, in a model that knows no end of them.
LONG = (
    "runner.max_staleness=2",
    "rollout.sampling_params.max_new_tokens=60",
    "runner.seq_length=96",
    "runner.sample_interval=1",
)
# Rewards that differ by the length of answers, so that some groups are dropped and others are not.
FILTERED = ("algorithm.filter_groups=true", "algorithm.max_refills=3", "reward.soft_overlong=3")


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[GroupReport]]:
    """The groups of each step, those as well that nobody learned from."""
    result: dict[int, list[GroupReport]] = {}
    take = PromptPlan.take

    def noted(plan: PromptPlan, step: int) -> list[GroupReport]:
        result[step] = take(plan, step)
        return result[step]

    monkeypatch.setattr(PromptPlan, "take", noted)
    return result


def same_weights(one: LocalRun, other: LocalRun) -> bool:
    mine, theirs = one.weights(), other.weights()
    return all(torch.equal(mine[name], theirs[name]) for name in mine)


def resume_at(run: LocalRun, step: int, folder: Path) -> str:
    """Return the override that continues a copy of a run at one of its checkpoints."""
    shutil.copytree(run.folder.path, folder)
    return f"runner.resume_dir={folder / 'checkpoints' / f'global_step_{step}'}"


def test_a_resumed_run_ends_with_the_weights_of_one_that_went_on(train: LocalTrain, tmp_path: Path) -> None:
    whole = train("runner.save_interval=2", "runner.val_check_interval=4")
    resumed = train(resume_at(whole, 2, tmp_path / "copy"))
    assert (whole.steps, resumed.steps) == ([1, 2, 3, 4], [3, 4])
    assert same_weights(whole, resumed)
    assert any(isinstance(event, events.Evaluated) for event in whole.events)


GROUPS = "cluster.component_placement={'actor,rollout,reward,critic,reference': {node_group: node, placement: 0}}"
# Rewards that are never all equal, and a policy that is kept near its start.
PPO = (GROUPS, "algorithm.kl_beta=0.1", "reward.soft_overlong=3", "data.rollout_batch_size=6")


@pytest.mark.parametrize("staleness", [0, 1])
def test_critic_and_reference_take_part_and_resume(train: LocalTrain, tmp_path: Path, staleness: int) -> None:
    ppo = (*PPO, f"runner.max_staleness={staleness}", "runner.max_steps=3", "runner.save_interval=2")
    whole = train(*ppo, config="math/sums-ppo-laptop")
    for metrics in whole.metrics:
        named = {"train/critic/value_loss", "train/critic/explained_variance", "train/actor/kl_ref"}
        assert named <= set(metrics.metrics)
    if staleness == 0:
        resumed = train(*ppo, resume_at(whole, 2, tmp_path / "copy"), config="math/sums-ppo-laptop")
        assert resumed.steps == [3]
        assert same_weights(whole, resumed)
        assert any(name.startswith("critic.") for name in whole.weights())


def test_the_death_of_a_critic_changes_no_weight(train: LocalTrain) -> None:
    ppo = (*PPO, "runner.max_steps=3", "runner.save_interval=1")
    whole = train(*ppo, config="math/sums-ppo-laptop")
    for death in (("critic", 2, events.ADVANTAGES), ("critic", 3, events.ACTOR_TRAINING)):
        assert same_weights(whole, train(*ppo, death=death, config="math/sums-ppo-laptop"))


# A component, and the step and phase in which a worker of it dies; a checkpoint is written after the second step.
DEATHS = [
    ("actor", 1, events.ACTOR_TRAINING),
    ("rollout", 2, events.GENERATE_ROLLOUTS),
    ("reward", 3, events.GENERATE_ROLLOUTS),
    ("actor", 3, events.SYNC_WEIGHTS),
    ("rollout", 2, events.SAVE_CHECKPOINT),
    ("reward", 3, events.ADVANTAGES),
]


def test_deaths_change_no_weight(train: LocalTrain) -> None:
    often = ("runner.save_interval=2", "runner.max_steps=4")
    whole = train(*often)
    for death in DEATHS:
        run = train(*often, death=death)
        assert [type(event) for event in run.events].count(events.RunRestarted) == 1, death
        assert [record.step for record in run.metrics] == [1, 2, 3, 4], death
        assert same_weights(whole, run), death


@pytest.mark.parametrize("death", DEATHS)
def test_async_generation_loses_and_doubles_nothing_on_deaths(
    train: LocalTrain, learned: dict[int, list[GroupReport]], death: tuple[str, int, str]
) -> None:
    run = train(
        "runner.save_interval=2", "runner.max_steps=4", "runner.max_staleness=2", *FILTERED, rollouts=2, death=death
    )
    assert [type(event) for event in run.events].count(events.RunRestarted) == 1
    assert [record.step for record in run.metrics] == [1, 2, 3, 4]
    # Of a step that was repeated the last time counts: every prompt set aside was learned from once, or dropped.
    counts = Counter(group.problem for groups in learned.values() for group in groups)
    assert set(counts.values()) == {1}
    assert sum(counts.values()) == run.runner._plan.taken


def test_how_many_workers_answer_changes_no_answer(train: LocalTrain, learned: dict[int, list[GroupReport]]) -> None:
    """Three rollout workers for five prompts, so that they have unlike shares, and more reward workers than groups."""
    result: list[list[GroupReport]] = []
    for rollouts, rewards in ((1, 1), (3, 6)):
        train("runner.max_steps=1", rollouts=rollouts, rewards=rewards)
        result.append(learned[1])
    assert result[0] == result[1]


def test_an_engine_that_gives_up_its_memory_learns_the_same(train: LocalTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    levels: list[int] = []
    sleep = TorchEngine.sleep

    def noted(engine: TorchEngine, level: int = 1) -> None:
        levels.append(level)
        sleep(engine, level)

    monkeypatch.setattr(TorchEngine, "sleep", noted)
    inputs = ("runner.max_steps=2", "runner.val_check_interval=1", "reward.soft_overlong=4")
    plain, resting = train(*inputs).weights(), train(*inputs, "rollout.enable_offload=true").weights()
    # Before training nothing but an evaluation comes, whose weights are needed again.
    assert levels == [1, 2, 1, 2, 1]
    assert all(torch.equal(plain[name], resting[name]) for name in plain)


def test_workers_without_a_prompt_are_no_hindrance(train: LocalTrain) -> None:
    run = train("data.rollout_batch_size=1", "algorithm.n_minibatches=1", "runner.max_steps=2", rollouts=3, rewards=2)
    assert run.steps == [1, 2]


def test_groups_that_are_dropped_are_never_learned_from(
    train: LocalTrain, learned: dict[int, list[GroupReport]], batches: dict[int, RolloutBatch]
) -> None:
    """Neither in their own step nor in a later one, whose groups have the same slots."""
    run = train(*FILTERED)
    assert sum(group.dropped for groups in learned.values() for group in groups) > 0
    for step, groups in learned.items():
        kept = [item for item in groups if item.kept]
        rewards = Counter(round(reward, 3) for reward in batches[step].rewards.tolist())
        assert rewards == Counter(round(reward, 3) for item in kept for reward in item.rewards)
        assert run.metrics[step - 1].metrics["rollout/groups_kept"] == len(kept) / len(groups)


@pytest.mark.parametrize("partial", [True, False])
def test_generation_goes_on_while_the_actor_trains(
    train: LocalTrain, learned: dict[int, list[GroupReport]], partial: bool
) -> None:
    run = train(
        "runner.max_staleness=2",
        f"runner.partial_rollout={str(partial).lower()}",
        "runner.max_steps=6",
        "runner.val_check_interval=3",
        *FILTERED,
        rollouts=2,
        rewards=2,
    )
    assert run.steps == [1, 2, 3, 4, 5, 6]
    figures = [record.metrics for record in run.metrics]
    assert all(0 <= figure["rollout/staleness_mean"] <= figure["rollout/staleness_max"] <= 2 for figure in figures)
    # Prompts of two later steps are asked for from the start, by the weights of the start.
    assert figures[2]["rollout/staleness_max"] > 0
    assert figures[0]["rollout/buffered"] + figures[0]["rollout/in_flight"] > 0
    assert figures[5]["rollout/buffered"] + figures[5]["rollout/in_flight"] == 0
    problems = Counter(group.problem for groups in learned.values() for group in groups)
    assert set(problems.values()) == {1}


@pytest.mark.usefixtures("held")
def test_a_checkpoint_keeps_what_waits_and_what_is_under_way(
    train: LocalTrain, learned: dict[int, list[GroupReport]], tmp_path: Path
) -> None:
    whole = train(*LONG, "runner.save_interval=2", "runner.max_steps=5", rollouts=2)
    prompts = {step: [group.problem for group in groups] for step, groups in learned.items()}
    override = resume_at(whole, 2, tmp_path / "copy")
    checkpoint = tmp_path / "copy/checkpoints/global_step_2"
    kept = json.loads((checkpoint / "data.json").read_text())
    waiting = {batch["step"]: [report["problem"] for report in batch["reports"]] for batch in kept["batches"]}
    before = {item.problem: item for step in (3, 4) for item in learned[step]}
    under_way = sum(len(batch["places"]) - len(batch["reports"]) for batch in kept["batches"])
    begun = load_unfinished([int(item) for item in kept["unfinished"]], checkpoint)
    drawn = [answer for group in begun for answer in group.answers]
    assert {item.finish_reason for item in drawn} >= {"aborted"}
    learned.clear()

    # Another number of workers: whoever gets the prompt goes on with its answers.
    resumed = train(override, *LONG, "runner.max_steps=5")

    assert resumed.steps == [3, 4, 5]
    assert prompts == {1: prompts[1], 2: prompts[2], **{s: [g.problem for g in learned[s]] for s in learned}}
    restored = [problem for problems in waiting.values() for problem in problems]
    figures = resumed.metrics[-3].metrics
    assert figures["rollout/continued"] == len(begun)
    assert figures["rollout/continued"] + figures["rollout/prompted_again"] == under_way
    # Each prompt that was in flight is named in the manifest, and told of when the run goes on.
    in_flight = json.loads((checkpoint / "manifest.json").read_text())["in_flight"]
    (items,) = [event for event in resumed.events if isinstance(event, events.ItemsResumed)]
    assert (items.step, items.fates) == (2, in_flight)
    counts = {"restored": len(restored), "continued": len(begun), "done again": under_way - len(begun)}
    assert {fate: len(items) for fate, items in in_flight.items()} == {fate: n for fate, n in counts.items() if n}
    for entry in (*learned[3], *learned[4]):
        if entry.problem in restored:
            assert entry.rewards == before[entry.problem].rewards
    # The tokens of the checkpoint are those that were learned from, by the versions that drew them.
    result = learned_from(resumed)
    for entry in drawn:
        assert any(
            tokens[: len(entry.tokens)] == entry.tokens and versions[: len(entry.tokens)] == entry.versions
            for tokens, versions in result
        )


def learned_from(run: LocalRun) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return tokens and versions of all answers that people may read."""
    records = [
        json.loads(line)
        for file in (run.folder.path / "samples").glob("step_*.jsonl")
        for line in file.read_text().splitlines()
    ]
    return [(tuple(record["tokens"]), tuple(record["versions"])) for record in records]


def test_learning_rates_fall_by_the_end_of_the_last_epoch(train: LocalTrain) -> None:
    run = train(
        "runner.max_steps=-1",
        "runner.max_epochs=2",
        "data.rollout_batch_size=47",  # half of all problems
        "actor.optim.lr=1.0e-3",
        "actor.optim.lr_scheduler=linear",
        "actor.optim.lr_warmup_steps=0",
        "actor.optim.min_lr_ratio=0",
    )
    assert [record.metrics["train/actor/lr"] for record in run.metrics] == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])


@pytest.mark.parametrize("skips", [False, True])
def test_what_was_compared_stands_in_the_run_folder(train: LocalTrain, skips: bool) -> None:
    run = train("runner.max_steps=1", f"runner.skip_checks={skips}".lower(), "algorithm.recompute_logprobs=true")
    results = {(comparison.component, comparison.what): comparison for comparison in read_comparisons(run.folder.path)}
    costly = {("actor", "log-probabilities of `Qwen2ForCausalLM`")}
    costly |= {("rollout", "greedy answers of `Qwen2ForCausalLM` by the engine `torch`")}
    cheap = {
        ("actor", "tokens of the tokenizer"),
        ("actor", "log-probabilities of the engine"),
        ("rollout", "rows of `data`"),
    }
    assert costly | cheap <= set(results)
    for key in costly:
        check = results[key]
        assert check.verdict == ("skipped" if skips else "agrees")
        assert (check.seconds is None) is skips
        if not skips:
            assert check.largest_difference is not None
            assert check.bound is not None
            assert check.largest_difference <= check.bound
    gap = results["actor", "log-probabilities of the engine"]
    assert (gap.verdict, gap.bound) == ("agrees", 1e-2)


WORDS = tuple(LanguageFlow(job_config()).rehearsal())


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_step_moves_recorded_answers_and_zeros(
    train: LocalTrain, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    def computes(*_: Any, **__: Any) -> Any:
        raise AssertionError("a rehearsal computes nothing")

    monkeypatch.setattr(LanguagePolicy, "forward", computes)
    monkeypatch.setattr("recipes.language.engines.torch_engine.TorchEngine", computes)
    monkeypatch.setattr(pacing, "active", PacedCalls(Pacing({}, {ANSWER: ((2.0, 1), (3.0, 3))})))
    run = train(*WORDS, "runner.save_interval=-1", f"runner.max_staleness={ahead}", rollouts=2, rewards=2)
    assert run.steps == [1, 2, 3, 4]
    assert all(2.0 < metrics.metrics["rollout/response_length"] < 3.0 for metrics in run.metrics)
    # All answers are learned from, so that an update has as many tokens as were drawn.
    assert all(metrics.metrics["train/actor/learned_fraction"] == 1.0 for metrics in run.metrics)
    group: Any = run.runner.groups["actor"]
    (actor,) = group.workers
    policy = actor._state.policy
    assert isinstance(policy, StandInLanguagePolicy)
    section: Any = actor._config.actor
    true = make_model(section, make_tokenizer(section)).state_dict()
    kinds = {name: (tensor.shape, tensor.dtype) for name, tensor in policy.model.state_dict().items()}
    assert kinds == {name: (tensor.shape, tensor.dtype) for name, tensor in true.items()}
    assert not any(bool(weight.any()) for weight in policy.model.parameters())
    assert bool(torch.isfinite(policy.base).all())


def test_answers_end_before_new_weights_in_recorded_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("rlinf_core.process.pacing.time.sleep", slept.append)
    monkeypatch.setattr(pacing, "active", PacedCalls(Pacing({STEP: Pace(60.0, 10.0)}, {ANSWER: ((3.0, 1),)})))
    engine = StandInEngine()
    engine.submit(Request(request_id="a", prompt=(5, 6), group_size=2))
    assert len(engine.pause("drain")) == 2
    assert [round(seconds, -1) for seconds in slept] == [80.0, 80.0, 80.0]


WHY = "the engine has lost its memory"


@pytest.fixture
def seen_answers(monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """The answers that actors are given to learn from."""
    answers: list[Sequence] = []
    of_groups = RolloutBatch.of_groups

    def noted(groups: list[ScoredAnswers]) -> RolloutBatch:
        answers.extend(answer for group in groups for answer in group.answers)
        return of_groups(groups)

    monkeypatch.setattr(RolloutBatch, "of_groups", noted)
    return answers


def failing(monkeypatch: pytest.MonkeyPatch, share: int, tries: int = 2) -> None:
    """Let the engine fail the answers of every `share`-th number, as often as `tries`."""
    step, failed = TorchEngine.step, dict[tuple[Any, ...], int]()

    def faulty(engine: TorchEngine) -> list[Sequence]:
        answers: list[Sequence] = []
        for answer in step(engine):
            key = (answer.request_id, answer.sample, answer.prompt)
            if answer.sample % share == 0 and failed.setdefault(key, 0) < tries:
                failed[key] += 1
                answer = replace(answer, finish_reason="aborted", failure=WHY)
            answers.append(answer)
        return answers

    monkeypatch.setattr(TorchEngine, "step", faulty)


def spoiling(monkeypatch: pytest.MonkeyPatch, bad: float, samples: set[int]) -> None:
    """Give the answers of these numbers logits that are not finite."""
    draw = TorchEngine._draw

    def faulty(engine: TorchEngine, logits: Tensor, first: int) -> list[Sequence]:
        asked = [row.answer for row in engine._rows._rows[first:]]
        # The first comparisons of a run have other requests.
        spoiled = [one.request.request_id.startswith("train:") and one.sample in samples for one in asked]
        logits = logits.masked_fill(tensor(spoiled)[:, None], bad)
        return draw(engine, logits, first)

    monkeypatch.setattr(TorchEngine, "_draw", faulty)


def test_one_that_fails_again_is_left_out_and_counted(
    train: LocalTrain, monkeypatch: pytest.MonkeyPatch, seen_answers: list[Sequence]
) -> None:
    failing(monkeypatch, 3)
    metrics = train("runner.max_steps=2").metrics
    # One of the three answers to each of five prompts.
    assert [record.metrics["failed/engine"] for record in metrics] == [5.0, 5.0]
    shown = [answer for answer in seen_answers if answer.request_id]
    assert {answer.sample for answer in shown} == {1, 2}
    assert len(shown) == 2 * 2 * 5


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_without_probabilities_is_left_out(
    train: LocalTrain, monkeypatch: pytest.MonkeyPatch, seen_answers: list[Sequence], bad: float
) -> None:
    spoiling(monkeypatch, bad, {1})
    metrics = train("runner.max_steps=2").metrics
    assert [record.metrics["failed/engine"] for record in metrics] == [5.0, 5.0]
    assert {answer.sample for answer in seen_answers if answer.request_id} == {0, 2}
    assert all(math.isfinite(value) for record in metrics for value in record.metrics.values())


def test_a_run_none_of_whose_rows_has_probabilities_ends(train: LocalTrain, monkeypatch: pytest.MonkeyPatch) -> None:
    spoiling(monkeypatch, math.nan, {0, 1, 2})
    with pytest.raises(RunError, match="answers of step 1 failed: engine") as caught:
        train("runner.max_steps=2")
    assert "not finite numbers" in str(caught.value)


@pytest.mark.parametrize("staleness", [0, 1])
def test_a_run_whose_answers_all_fail_ends(
    train: LocalTrain, monkeypatch: pytest.MonkeyPatch, seen_answers: list[Sequence], staleness: int
) -> None:
    failing(monkeypatch, 1, tries=1000)
    with pytest.raises(RunError, match="answers of step 1 failed: engine") as caught:
        train(f"runner.max_staleness={staleness}", "runner.max_steps=2")
    assert WHY in str(caught.value)
    assert [answer for answer in seen_answers if answer.request_id] == []

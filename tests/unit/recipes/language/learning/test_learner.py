"""Learners: passes, advantages, the gap to the engine, right answers shown before training, and several ranks."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from benchmarks.language.bench_memory_ranks import differences, forecast, measure, write_model
from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.config.algorithm_config import KNOWN_ADVANTAGES
from recipes.language.learning.learner import LanguageLearner, LearnerSettings
from recipes.language.learning.token_targets import GAP_LIMITS, TokenTargets, logprob_gap, token_advantages
from recipes.language.learning.warm_start import right_answers
from recipes.language.models.load_model import built_tokenizer
from recipes.language.models.policy import LanguagePolicy
from recipes.training.arrays import NonFiniteError
from recipes.training.sharding import ParallelStrategy
from recipes.training.updater import UntrainedError
from rlinf_core import ConfigError, get_advantage
from rlinf_core.algorithms.advantages import AdvantageSettings, gae, grpo, turn_gae
from rlinf_core.algorithms.loss_inputs import Loss, LossSettings
from rlinf_core.algorithms.options import get_policy_loss
from tests.unit.recipes.language.learning.two_ranks import CASES, train
from tests.unit.recipes.language.tiny import answers, job_config, plain_logprobs, random_batch, sequence, tiny_model
from tests.unit.recipes.two_processes import run_two

HOW = pytest.mark.parametrize(
    "how", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
)


def learner(
    model: Any, settings: LearnerSettings, how: Any = "token-mean", lr: float = 0.0, name: str = "actor", **loss: Any
) -> LanguageLearner:
    policy = LanguagePolicy(model)
    optimizer, strategy = torch.optim.SGD(policy.parameters(), lr=lr), ParallelStrategy(policy, 1)
    losses = get_policy_loss(name), LossSettings(loss_agg_func=how, **loss)
    return LanguageLearner(policy, strategy, optimizer, *losses, settings, torch.device("cpu"))


def targets_of(batch: Any) -> TokenTargets:
    advantages, _ = token_advantages(batch, grpo, AdvantageSettings(group_size=3))
    return TokenTargets(advantages=advantages, old_logprobs=batch.logprobs)


@HOW
def test_micro_batches_add_up_to_the_gradient_of_the_whole(how: Any) -> None:
    batch = random_batch(0, size=3)
    gradients: list[list[torch.Tensor]] = []
    for tokens, masks, most in (
        (10_000, True, None),
        (30, True, None),
        (30, False, None),
        (1, False, None),
        (99, True, 2),
    ):
        model = tiny_model()
        settings = LearnerSettings(max_tokens=tokens, masks=masks, max_answers=most, clip_grad=0.0)
        learner(model, settings, how).train(batch, targets_of(batch), 0)
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for others in gradients[1:]:
        for mine, theirs in zip(gradients[0], others, strict=True):
            torch.testing.assert_close(theirs, mine, atol=1e-5, rtol=1e-3)


@HOW
def test_answers_without_advantage_count_in_the_mean_alone(monkeypatch: pytest.MonkeyPatch, how: Any) -> None:
    batch = random_batch(0, groups=4, size=3)
    advantages = targets_of(batch).advantages.masked_fill((batch.groups < 2).repeat_interleave(batch.answer_lengths), 0)
    targets = TokenTargets(advantages=advantages, old_logprobs=batch.logprobs)
    gradients: list[list[torch.Tensor]] = []
    for leaves_out in (True, False):
        if not leaves_out:
            monkeypatch.setattr(LanguageLearner, "_with_gradient", lambda _, batch, targets, rows: rows)
        model = tiny_model()
        made = learner(model, LearnerSettings(clip_grad=0.0), how)
        with patch.object(made._micro, "pack", wraps=made._micro.pack) as packed:
            made.train(batch, targets, 0)
        assert sorted(row for call in packed.call_args_list for row in call.args[1]) == [*range(6 * leaves_out, 12)]
        gradients.append([weight.grad.clone() for weight in model.parameters() if weight.grad is not None])
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(theirs, mine, atol=1e-6, rtol=1e-4)


def test_nothing_to_learn_leaves_gradients_of_zero() -> None:
    batch, model = random_batch(0, groups=2, size=3), tiny_model()
    nothing = TokenTargets(advantages=torch.zeros(len(batch.logprobs)), old_logprobs=batch.logprobs)
    learner(model, LearnerSettings()).train(batch, nothing, 0)
    # Not None: an optimizer with momentum goes on as it would with the whole batch.
    assert all(weight.grad is not None and not weight.grad.any() for weight in model.parameters())


def test_optimizer_steps_take_dealt_answers_in_seeded_order() -> None:
    batch = random_batch(1, groups=8, size=3)
    batch = replace(batch, minibatches=batch.groups % 4)
    made = learner(tiny_model(), LearnerSettings(minibatches=4))
    orders = [list(made._minibatches(batch, seed)) for seed in range(9)]
    whole = [[row for row in range(24) if batch.minibatches[row] == number] for number in range(4)]
    assert all(sorted(parts) == sorted(whole) for parts in orders)
    assert orders[3] == list(made._minibatches(batch, 3))
    assert any(parts != orders[0] for parts in orders)
    # A rank without answers takes part in every step.
    assert list(made._minibatches(batch.select(torch.empty(0, dtype=torch.int64)), 3)) == [[], [], [], []]


def test_judged_batch_gives_each_answer_its_own_logprobs() -> None:
    batch = random_batch(2, groups=6, size=2)
    result = learner(tiny_model(), LearnerSettings(max_tokens=20)).evaluate(batch)
    torch.testing.assert_close(result, plain_logprobs(tiny_model(), batch).detach(), atol=1e-5, rtol=0)
    nothing = batch.select(torch.empty(0, dtype=torch.int64))
    assert len(learner(tiny_model(), LearnerSettings()).evaluate(nothing)) == 0


def test_a_rank_without_answers_moves_nothing_and_says_nothing() -> None:
    model = tiny_model()
    before = [weight.clone() for weight in model.parameters()]
    nothing = random_batch(3).select(torch.empty(0, dtype=torch.int64))
    targets = TokenTargets(advantages=torch.empty(0), old_logprobs=torch.empty(0))
    figures = learner(model, LearnerSettings(), lr=1.0).train(nothing, targets, 0).means()
    assert figures["actor/policy_loss"] == figures["actor/grad_norm"] == 0
    for mine, theirs in zip(model.parameters(), before, strict=True):
        assert torch.equal(mine, theirs)


def test_nonfinite_update_ends_the_run_or_is_counted() -> None:
    batch, model = random_batch(0, size=3), tiny_model()
    before = [weight.clone() for weight in model.parameters()]
    targets = targets_of(batch)
    targets.advantages[0] = float("nan")
    with pytest.raises(NonFiniteError) as raised:
        learner(model, LearnerSettings(), lr=1.0).train(batch, targets, 0, step=5)
    skipped = learner(model, LearnerSettings(skip_nonfinite=True), lr=1.0).train(batch, targets, 0, step=5)
    assert (raised.value.tensor, raised.value.where) == ("train/actor/policy_loss", "step 5")
    assert skipped.metrics(counts_skipped=True) == {"train/actor/skipped_updates": 1.0}
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))


def test_advantages_of_answers_are_those_of_their_groups() -> None:
    batch = random_batch(4, groups=2, size=3)
    advantages, returns = token_advantages(batch, grpo, AdvantageSettings(group_size=3))
    scores = batch.rewards.reshape(2, 3)
    expected = (scores - scores.mean(1, keepdim=True)) / (scores.std(1, keepdim=True) + 1e-6)
    assert returns is None
    torch.testing.assert_close(advantages, expected.reshape(-1).repeat_interleave(batch.answer_lengths))


@pytest.mark.parametrize("name", KNOWN_ADVANTAGES)
def test_a_rank_without_answers_takes_part_in_sums(name: str) -> None:
    batch = random_batch(4, groups=2, size=3)
    sums: list[torch.Tensor] = []

    def reduce_sum(value: torch.Tensor) -> torch.Tensor:
        sums.append(value)
        return value

    settings = AdvantageSettings(group_size=3, reduce_sum=reduce_sum)
    outcomes: list[Any] = []
    for part in (batch, batch.select(torch.empty(0, dtype=torch.int64))):
        zeros = torch.zeros(len(part.trained))
        advantages, returns = token_advantages(part, get_advantage(name), settings, values=zeros, kl=zeros)
        assert len(advantages) == len(part.trained)
        outcomes.append((None if returns is None else len(returns), [value.shape for value in sums]))
        sums.clear()
    (whole, shapes), (nothing, others) = outcomes
    assert others == shapes
    assert nothing == (None if whole is None else 0)


def test_tokens_that_the_policy_did_not_draw_are_passed_over() -> None:
    """An answer with the words of a tool in its middle and at its end is trained like one without them."""
    whole = RolloutBatch.of(answers(random.Random(0), (5, 6), [7, 7]), 0, [1.0, 0.0])
    drawn = torch.tensor([1, 1, 0, 0, 1, 1, 0]).bool()
    whole = replace(whole, trained=drawn.repeat(2))
    without = RolloutBatch.of(answers(random.Random(0), (5, 6), [4, 4]), 0, [1.0, 0.0])
    values = torch.linspace(0, 1, 14)
    settings = AdvantageSettings(group_size=2, gamma=0.9, gae_lambda=0.8, normalize_advantages=False)
    advantages, returns = token_advantages(whole, gae, settings, values=values)
    expected, wanted = token_advantages(without, gae, settings, values=values[whole.trained])
    assert returns is not None
    assert wanted is not None
    torch.testing.assert_close(advantages[whole.trained], expected)
    torch.testing.assert_close(returns[whole.trained], wanted)
    assert not advantages[~whole.trained].any()
    # Two turns: the first one's value is that of its first token, and it leads to the second's.
    advantages, returns = token_advantages(whole, turn_gae, settings, values=values)
    second = 1.0 - values[4]
    assert returns is not None
    torch.testing.assert_close(advantages[4:6], torch.full((2,), float(second)))
    torch.testing.assert_close(advantages[:2], torch.full((2,), float(0.9 * values[4] - values[0] + 0.72 * second)))
    torch.testing.assert_close(returns[4:6], torch.ones(2))


def test_losses_by_name_train_on_what_the_actor_gives_them() -> None:
    batch = random_batch(6, groups=4, size=3)
    drawn = batch.logprobs - 0.1 * torch.rand(len(batch.logprobs), generator=torch.Generator().manual_seed(0))
    targets = replace(targets_of(batch), behaviour_logprobs=drawn, ref_logprobs=batch.logprobs - 0.05)
    for name in ("actor", "decoupled_actor", "gspo"):
        loss = {"kl_beta": 0.1, "kl_penalty": "k2", "entropy_bonus": 0.01, "tis_cap": 1.5}
        made = learner(tiny_model(), LearnerSettings(max_tokens=60), lr=0.1, name=name, **loss)
        figures = made.train(batch, targets, 0).means()
        assert figures["actor/kl_ref"] > 0
        assert figures["actor/entropy"] > 0
        assert 1 <= figures["actor/behaviour_weight"] <= 1.2
        assert figures["actor/ratio_max"] >= figures["actor/ratio"]


def segment(sample: int, tokens: tuple[int, ...], trained: tuple[bool, ...], rewards: tuple[float, ...] = ()) -> Answer:
    return sequence(tokens, (3, 4), sample, trained=trained, rewards=rewards)


def test_segments_of_a_trajectory_share_its_advantage() -> None:
    first, second = segment(0, (5, 6, 7), (True, False, True)), segment(0, (8, 9), (True, True))
    batch = RolloutBatch.of([first, second, segment(1, (5, 6), (True, True))], 0, [1.0, 1.0, 0.0])
    advantages, returns = token_advantages(batch, grpo, AdvantageSettings(group_size=2))
    assert returns is None
    size = float(advantages[0])
    assert size > 0
    assert advantages.tolist() == pytest.approx([size, 0.0, size, size, size, -size, -size])


def test_rewards_of_turns_come_when_they_were_given() -> None:
    credited = segment(0, (5, 6, 7, 8), (True, False, True, True), (0.5, 0.0, 0.0, 0.0))
    batch = RolloutBatch.of([credited, replace(segment(1, (5,), (True,)))], 0, [1.5, 0.0])
    settings = AdvantageSettings(gae_lambda=0.0, normalize_advantages=False)
    by_turn, _ = token_advantages(batch, turn_gae, settings, values=torch.zeros(5))
    by_outcome, _ = token_advantages(batch, grpo, AdvantageSettings(group_size=2))
    assert by_turn.tolist() == [0.5, 0.0, 1.0, 1.0, 0.0]
    # A comparison of outcomes counts the whole of it.
    assert by_outcome.tolist() == pytest.approx([0.7071, 0, 0.7071, 0.7071, -0.7071], abs=1e-4)


def test_a_loss_without_log_probabilities_is_refused() -> None:
    batch = random_batch(0, size=3)
    model = tiny_model()
    made = learner(model, LearnerSettings(clip_grad=0.0))
    made.policy.pictures = torch.nn.Linear(2, 2)  # as the tower of a model that gets no pictures
    made.train(batch, targets_of(batch), 0)
    blind = learner(tiny_model(), LearnerSettings(clip_grad=0.0))
    spare = torch.nn.Parameter(torch.ones(()))
    blind.policy.spare = spare
    blind._loss = lambda inputs, settings: Loss(spare * inputs.advantages.sum(), {})
    with pytest.raises(UntrainedError, match=r"lm_head.weight` and 26 more train, but have no gradient"):
        blind.train(batch, targets_of(batch), 0)


ALONE = ParallelStrategy(nn.Linear(1, 1), 1)


def test_figures_equal_a_loop() -> None:
    differences = [0.1, -0.3, 0.0, 0.02]
    result = logprob_gap(torch.tensor(differences), ALONE)
    assert result is not None
    assert result.mean == pytest.approx(sum(map(abs, differences)) / 4)
    assert result.largest == pytest.approx(0.3)
    assert result.k3 == pytest.approx(sum(math.exp(d) - 1 - d for d in differences) / 4)
    assert result.tokens == 4
    assert logprob_gap(torch.empty(0), ALONE) is None


def test_the_error_says_how_much_and_what_to_do() -> None:
    result = logprob_gap(torch.tensor([0.5, 0.1]), ALONE)
    assert result is not None
    error = result.error(GAP_LIMITS["fp32"], 3)
    assert "differ by up to 0.5, more than 0.01" in str(error)
    assert error.where == "step 3, 2 tokens, 0.3 on average"
    assert "chat template" in (error.help or "")


@pytest.mark.parametrize("minibatches", [1, 2])
def test_a_training_step_compares_the_weights_before_it(minibatches: int) -> None:
    batch = random_batch(4, groups=4)
    engine = plain_logprobs(tiny_model(), batch).detach()
    engine[0] += 0.25
    comparable = torch.ones(len(engine), dtype=torch.bool)
    comparable[-1] = False
    made = learner(tiny_model(), LearnerSettings(minibatches=minibatches, epochs=2, max_tokens=40), lr=0.5)
    advantages = torch.ones(len(engine))
    targets = TokenTargets(advantages=advantages, old_logprobs=engine, comparable=comparable)
    made.train(replace(batch, logprobs=engine, minibatches=batch.groups % minibatches), targets, 0)
    differences = made.differences
    if minibatches == 1:
        assert len(differences) == len(engine) - 1
        assert differences.abs().max().item() == pytest.approx(0.25, abs=1e-5)
    else:  # those of the first of two updates
        assert 0 < len(differences) < len(engine) - 1
    # Whatever came after the first update has no part.
    assert sum(difference.abs() > 1e-4 for difference in differences) <= 1


LONG = "1+" * 30 + "1="


def answers_of(folder: Path, *prompts: str) -> list[Any]:
    file = folder / "problems.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt, "answer": "2"}) + "\n" for prompt in prompts))
    changes = ["data.type=jsonl", f"data.train_data_paths={file}", f"data.val_data_paths={file}"]
    return right_answers(job_config(*changes, "actor.warm_start.steps=1"), built_tokenizer())


def test_prompts_that_are_too_long_are_left_out(tmp_path: Path) -> None:
    results = answers_of(tmp_path, "1+1=", LONG, "0+2=")
    assert len(results) == 32
    assert len({result.prompt for result in results}) == 2
    assert all(result.prompt for result in results)


def test_without_any_that_fits_there_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty or longer than `data.max_prompt_length` \(24 tokens\)"):
        answers_of(tmp_path, LONG)


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two processes made of every case."""
    return run_two("tests.unit.recipes.language.learning.two_ranks", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_learns(results: list[dict[str, Any]], name: str) -> None:
    first, second = (result[name] for result in results)
    alone = train(CASES[name], 0, 1)
    for number, expected in alone["tokens"].items():
        outcome = first["tokens"].get(number, second["tokens"].get(number))
        torch.testing.assert_close(outcome, expected, atol=1e-5, rtol=0)
    for metric, expected in alone["metrics"].items():
        if metric.endswith("weights_changed"):
            continue  # of a sample, which a shard draws from its own numbers
        both = first["metrics"][metric], second["metrics"][metric]
        mean = max(both) if metric.endswith("_max") else sum(both) / 2
        assert mean == pytest.approx(expected, abs=1e-5, rel=1e-5), metric
    assert alone["metrics"]["actor/grad_norm"] > 0
    for weight, expected in alone["weights"].items():
        torch.testing.assert_close(first["weights"][weight], expected, atol=1e-5, rtol=1e-4)
        assert torch.equal(first["weights"][weight], second["weights"][weight])


@pytest.mark.nightly
def test_ranks_load_send_and_export_what_one_does(tmp_path: Path) -> None:
    write_model(tmp_path, width=64, layers=2)
    results = {count: measure(count, tmp_path, []) for count in (1, 2)}
    losses, norms, equal = differences(results)
    assert equal
    assert losses < 1e-5
    assert norms < 1e-4


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_the_peak_of_a_rank_falls_with_their_number(tmp_path: Path) -> None:
    parameters = write_model(tmp_path, width=512, layers=24)
    diagnostics = {count: measure(count, tmp_path, []) for count in (1, 2, 4)}
    losses, _, equal = differences(diagnostics)
    assert equal
    assert losses < 1e-5
    # What is in no layer, and a layer, each as weights and as gradients of two kinds; and what does not depend on it.
    apart, layer = 2 * 8 * 512**2, (4 + 3 * 11 // 4) * 512**2
    constant = 3 * 4 * (apart + 2 * layer) + (128 << 20)
    for phase in ("load", "sync", "train", "save", "export"):
        one, *_ = (rank["peaks"][phase] for rank in diagnostics[1])
        for count, ranks in diagnostics.items():
            assert max(rank["peaks"][phase] for rank in ranks) < one / count + constant, (phase, count, parameters)
    for count, ranks in diagnostics.items():
        peak = max(rank["peaks"]["train"] for rank in ranks)
        assert 0.85 < forecast(tmp_path, count, []) / peak < 1.15, count

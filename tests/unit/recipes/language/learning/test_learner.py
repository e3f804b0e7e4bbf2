from __future__ import annotations

import random
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("transformers")

import torch

from recipes.language.answers.answer_batch import RolloutBatch
from recipes.language.answers.sequences import Sequence as Answer
from recipes.language.learning.answer_advantages import token_advantages
from recipes.language.learning.learner import LanguageLearner, LearnerSettings, TokenTargets
from recipes.language.models.policy import LanguagePolicy
from recipes.training.arrays import NonFiniteError
from recipes.training.sharding import ParallelStrategy
from recipes.training.updater import UntrainedError
from rlinf_core.algorithms.advantages import AdvantageSettings, gae, grpo, turn_gae
from rlinf_core.algorithms.loss_inputs import Loss, LossSettings
from rlinf_core.algorithms.losses import actor
from rlinf_core.algorithms.options import get_policy_loss
from tests.unit.recipes.language.tiny import answers, plain_logprobs, random_batch, tiny_model


def learner(model: Any, settings: LearnerSettings, how: Any = "token-mean", lr: float = 0.0) -> LanguageLearner:
    policy = LanguagePolicy(model)
    optimizer = torch.optim.SGD(policy.parameters(), lr=lr)
    loss = LossSettings(loss_agg_func=how)
    return LanguageLearner(policy, ParallelStrategy(policy, 1), optimizer, actor, loss, settings, torch.device("cpu"))


def targets_of(batch: Any) -> TokenTargets:
    advantages, _ = token_advantages(batch, grpo, AdvantageSettings(group_size=3))
    return TokenTargets(advantages=advantages, old_logprobs=batch.logprobs)


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
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


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
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
        model = tiny_model()
        policy = LanguagePolicy(model)
        settings = LossSettings(kl_beta=0.1, kl_penalty="k2", entropy_bonus=0.01, tis_cap=1.5)
        made = LanguageLearner(
            policy,
            ParallelStrategy(policy, 1),
            torch.optim.SGD(policy.parameters(), lr=0.1),
            get_policy_loss(name),
            settings,
            LearnerSettings(max_tokens=60),
            torch.device("cpu"),
        )
        figures = made.train(batch, targets, 0).means()
        assert figures["actor/kl_ref"] > 0
        assert figures["actor/entropy"] > 0
        assert 1 <= figures["actor/behaviour_weight"] <= 1.2
        assert figures["actor/ratio_max"] >= figures["actor/ratio"]


def segment(sample: int, tokens: tuple[int, ...], trained: tuple[bool, ...], rewards: tuple[float, ...] = ()) -> Answer:
    (plain,) = answers(random.Random(len(tokens)), (3, 4), [len(tokens)])
    return replace(plain, sample=sample, tokens=tokens, trained=trained, rewards=rewards)


def test_segments_of_a_trajectory_share_its_advantage() -> None:
    parts = [
        segment(0, (5, 6, 7), (True, False, True)),
        segment(0, (8, 9), (True, True)),
        segment(1, (5, 6), (True, True)),
    ]
    batch = RolloutBatch.of(parts, 0, [1.0, 1.0, 0.0])

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

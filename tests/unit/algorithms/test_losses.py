"""Losses against loops written from the papers, and their gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlinf_core.algorithms.loss_inputs import Loss, LossInputs, LossSettings, denominator
from rlinf_core.algorithms.losses import (
    actor,
    actor_critic,
    as_loss,
    cispo,
    clipped_policy_losses,
    clipped_value_loss,
    decoupled_actor,
    gmpo,
    gspo,
    huber,
    sapo,
)

finite = st.floats(-3, 3)


def naive_policy(ratio: float, advantage: float, low: float, high: float, c: float | None) -> float:
    near = min(max(ratio, 1 - low), 1 + high)
    objective = min(ratio * advantage, near * advantage)
    if c is not None and advantage < 0:
        objective = max(objective, c * advantage)
    return -objective


@given(st.floats(0.01, 20), finite, st.floats(0, 0.9), st.floats(0, 2), st.none() | st.floats(1.01, 10))
def test_policy_loss_equals_the_formula(
    ratio: float, advantage: float, low: float, high: float, c: float | None
) -> None:
    result, _, _ = clipped_policy_losses(
        torch.tensor(ratio, dtype=torch.float64), torch.tensor(advantage, dtype=torch.float64), low, high, c
    )
    assert result.item() == pytest.approx(naive_policy(ratio, advantage, low, high, c), abs=1e-9)


@pytest.mark.parametrize(
    ("ratio", "advantage", "gradient"),
    [
        (1.1, 1.0, -1.0),  # inside the bounds
        (1.4, 1.0, 0.0),  # already likelier by more than the upper bound
        (1.25, 1.0, -1.0),  # clip-higher: the upper bound is further away
        (0.5, 1.0, -1.0),  # less likely: the bound does not hold it back
        (0.5, -1.0, 0.0),
        (1.4, -1.0, 1.0),
        (3.5, -1.0, 0.0),  # dual clip
    ],
)
def test_where_the_clip_stops_the_gradient(ratio: float, advantage: float, gradient: float) -> None:
    r = torch.tensor(ratio, requires_grad=True)
    losses, active, dual = clipped_policy_losses(r, torch.tensor(advantage), 0.2, 0.28, 3.0)
    losses.backward()
    assert r.grad is not None
    assert r.grad.item() == gradient
    assert bool(active | dual) == (gradient == 0)


@given(finite, finite, finite, st.none() | st.floats(0.01, 2), st.floats(0.1, 5))
def test_value_loss_equals_the_formula(
    value: float, old: float, target: float, clip: float | None, delta: float
) -> None:
    def one(error: float) -> float:
        return error * error / 2 if abs(error) <= delta else delta * (abs(error) - delta / 2)

    near = value if clip is None else old + min(max(value - old, -clip), clip)
    tensors = [torch.tensor(x, dtype=torch.float64) for x in (value, old, target)]
    result, _ = clipped_value_loss(tensors[0], tensors[1], tensors[2], clip, delta)
    assert result.item() == pytest.approx(max(one(target - value), one(target - near)), abs=1e-9)


def test_huber_equals_torch() -> None:
    errors = torch.linspace(-4, 4, 101)
    expected = torch.nn.functional.huber_loss(errors, torch.zeros(101), reduction="none", delta=1.5)
    torch.testing.assert_close(huber(errors, 1.5), expected)


def batch(seed: int, n: int = 8, tokens: int = 3) -> LossInputs:
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    old = -normal(n, tokens).abs()
    return LossInputs(
        logprobs=(old + 0.3 * normal(n, tokens)).requires_grad_(),
        old_logprobs=old,
        advantages=normal(n, tokens),
        entropy=normal(n, tokens).abs().requires_grad_(),
        ref_logprobs=old + 0.1 * normal(n, tokens),
        mask=torch.rand(n, tokens, generator=random) < 0.7,
        values=normal(n).requires_grad_(),
        old_values=normal(n),
        returns=normal(n),
    )


SETTINGS = LossSettings(
    clip_ratio_high=0.28, entropy_bonus=0.01, kl_beta=0.05, kl_penalty="k3", loss_agg_func="token-mean"
)


@given(st.integers(0, 10_000))
def test_the_whole_loss_equals_a_loop(seed: int) -> None:
    b = batch(seed)
    assert b.mask is not None
    assert b.entropy is not None
    assert b.ref_logprobs is not None
    policy, kl, entropy, approx_kl, clipped = [], [], [], [], []
    for i in range(8):
        for t in range(3):
            if not b.mask[i, t]:
                continue
            log_ratio = (b.logprobs[i, t] - b.old_logprobs[i, t]).item()
            ratio, advantage = math.exp(log_ratio), float(b.advantages[i, t])
            policy.append(naive_policy(ratio, advantage, 0.2, 0.28, 3.0))
            d = (b.logprobs[i, t] - b.ref_logprobs[i, t]).item()
            kl.append(math.exp(-d) - 1 + d)
            entropy.append(b.entropy[i, t].item())
            approx_kl.append(ratio - 1 - log_ratio)
            clipped.append((ratio > 1.28 and advantage > 0) or (ratio < 0.8 and advantage < 0))
    count = max(len(policy), 1)
    result = actor(b, SETTINGS)
    expected = (sum(policy) - 0.01 * sum(entropy) + 0.05 * sum(kl)) / count
    assert result.loss.item() == pytest.approx(expected, abs=1e-6)
    names = ("policy_loss", "approx_kl", "clip_fraction", "entropy", "kl_ref")
    sums = (sum(policy), sum(approx_kl), sum(clipped), sum(entropy), sum(kl))
    for name, value in zip(names, sums, strict=True):
        assert result.metrics[f"actor/{name}"].item() == pytest.approx(value / count, abs=1e-6)
        assert not result.metrics[f"actor/{name}"].requires_grad


def test_actor_critic_adds_the_value_loss() -> None:
    b = batch(1)
    result, alone = actor_critic(b, SETTINGS), actor(b, SETTINGS)
    assert b.values is not None
    assert b.old_values is not None
    assert b.returns is not None
    losses, _ = clipped_value_loss(b.values, b.old_values, b.returns, 0.2, 10.0)
    assert result.loss.item() == pytest.approx((alone.loss + losses.mean()).item(), abs=1e-12)
    assert result.metrics["critic/value_loss"].item() == pytest.approx(losses.mean().item(), abs=1e-12)
    weighted = actor_critic(b, replace(SETTINGS, value_weight=0.25)).loss
    assert weighted.item() == pytest.approx((alone.loss + 0.25 * losses.mean()).item(), abs=1e-12)
    with pytest.raises(ValueError, match="old values"):
        actor_critic(replace(b, old_values=None), SETTINGS)


def test_a_tensor_of_losses_gets_the_rest_of_actor_critic() -> None:
    plain = replace(SETTINGS, clip_ratio_low=9.0, clip_ratio_high=9.0, clip_ratio_c=None)
    expected, b = actor_critic(batch(3), plain), batch(3)
    result = as_loss(-b.ratio * b.advantages, b, plain)
    torch.testing.assert_close(result.loss, expected.loss)
    assert result.metrics.keys() == expected.metrics.keys()
    assert as_loss(expected, b, plain) is expected
    alone = replace(b, values=None, old_values=None, returns=None)
    torch.testing.assert_close(as_loss(-b.ratio * b.advantages, alone, plain).loss, actor(alone, plain).loss)
    with pytest.raises(ValueError, match=r"a tensor \[\]; expected \[8, 3\]"):
        as_loss((-b.ratio * b.advantages).mean(), b, plain)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda b: 0.5, "a loss of your own returned a `float`; expected a tensor"),
        (lambda b: None, "a loss of your own returned a `NoneType`"),
        (lambda b: Loss(0.5, {}), "`Loss.loss` is a `float`"),
        (lambda b: Loss(-b.ratio, {}), r"`Loss.loss` has the shape \[8, 3\]; expected a scalar"),
        (lambda b: Loss(b.ratio.mean(), {"actor/x": 0.5}), "the metric `actor/x` of a loss is not a scalar tensor"),
        (lambda b: Loss(b.ratio.mean(), {"actor/x": b.ratio}), "the metric `actor/x`"),
    ],
)
def test_a_loss_of_ones_own_returns_something_else(returned: Callable[[LossInputs], Any], message: str) -> None:
    inputs = batch(3)
    with pytest.raises((TypeError, ValueError), match=message):
        as_loss(returned(inputs), inputs, SETTINGS)


def test_the_first_step_follows_the_policy_gradient() -> None:
    """Where the policy is still the one that acted, the gradient is -A / n at every sample."""
    old = torch.tensor([-1.0, -0.5, -2.0])
    logprobs = old.clone().requires_grad_()
    advantages = torch.tensor([1.0, -2.0, 0.5])
    actor(LossInputs(logprobs=logprobs, old_logprobs=old, advantages=advantages), LossSettings()).loss.backward()
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -advantages / 3)


@pytest.mark.parametrize("how", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"])
def test_gradients_are_those_of_finite_differences(how: str) -> None:
    b = batch(5)
    settings = replace(SETTINGS, loss_agg_func=how, value_clip=0.5, huber_delta=1.0)
    assert b.values is not None

    def loss(logprobs: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return actor_critic(replace(b, logprobs=logprobs, values=values), settings).loss

    assert torch.autograd.gradcheck(loss, (b.logprobs, b.values))


def test_micro_batches_accumulate_to_the_gradient_of_the_batch() -> None:
    b = batch(2)
    assert b.mask is not None
    assert b.values is not None
    (whole,) = torch.autograd.grad(actor_critic(b, SETTINGS).loss, b.logprobs, retain_graph=True)
    total = denominator(b.mask, b.logprobs.shape, "token-mean")
    for rows in (slice(0, 3), slice(3, 8)):
        part = LossInputs(
            **{
                name: value[rows] if isinstance(value := getattr(b, name), torch.Tensor) else value
                for name in LossInputs.__dataclass_fields__
            }
        )
        actor_critic(replace(part, total=total, value_total=8.0), SETTINGS).loss.backward()
    torch.testing.assert_close(b.logprobs.grad, whole)


def test_an_entropy_of_actions_beside_ratios_of_tokens() -> None:
    b = LossInputs(
        logprobs=torch.zeros(2, 3, 4),
        old_logprobs=torch.zeros(2, 3, 4),
        advantages=torch.ones(2, 3),
        entropy=torch.tensor([[1.0, 2.0, 9.0], [9.0, 9.0, 3.0]]),
        mask=torch.tensor([[1, 1, 0], [0, 0, 1]]),
    )
    assert actor(b, LossSettings()).metrics["actor/entropy"].item() == 2
    by_token = replace(b, mask=torch.tensor([[1, 1, 0], [0, 0, 1]])[..., None].expand(2, 3, 4))
    assert actor(by_token, LossSettings()).metrics["actor/entropy"].item() == 2
    # The end of an episode cuts through the actions: each still counts, once.
    cut = replace(b, mask=by_token.mask & torch.tensor([1, 1, 0, 0]))
    assert actor(cut, LossSettings()).metrics["actor/entropy"].item() == 2
    with pytest.raises(ValueError, match="entropy_total"):
        actor(replace(b, total=12.0), LossSettings())


def test_impossible_ratios_stay_finite() -> None:
    logprobs = torch.tensor([200.0, -200.0], requires_grad=True)
    b = LossInputs(logprobs=logprobs, old_logprobs=torch.zeros(2), advantages=torch.tensor([-1.0, 1.0]))
    result = actor(b, LossSettings(clip_ratio_c=None))
    result.loss.backward()
    assert torch.isfinite(result.loss)
    assert logprobs.grad is not None
    assert torch.isfinite(logprobs.grad).all()
    assert "actor/dual_clip_fraction" not in result.metrics


@pytest.mark.parametrize("cap", [None, 1.5])
@pytest.mark.parametrize("seed", range(5))
def test_a_decoupled_loss_equals_a_loop_over_three_policies(seed: int, cap: float | None) -> None:
    b = replace(batch(seed), entropy=None, ref_logprobs=None)
    behaviour = b.old_logprobs - 0.5 * torch.randn(8, 3, generator=torch.Generator().manual_seed(seed)).double()
    assert b.mask is not None
    losses: list[float] = []
    for i in range(8):
        for t in range(3):
            if b.mask[i, t]:
                now, old, drew = (float(item[i, t]) for item in (b.logprobs.detach(), b.old_logprobs, behaviour))
                weight = min(math.exp(old - drew), cap or math.inf)
                losses.append(weight * naive_policy(math.exp(now - old), float(b.advantages[i, t]), 0.2, 0.28, 3.0))
    settings = replace(SETTINGS, tis_cap=cap)
    inputs = replace(b, behaviour_logprobs=behaviour)
    result = decoupled_actor(inputs, settings)
    assert result.loss.item() == pytest.approx(sum(losses) / len(losses), abs=1e-9)
    if cap is None:  # `actor` takes the weights only where they are truncated
        assert actor(inputs, settings).loss.item() == pytest.approx(actor(b, settings).loss.item(), abs=1e-12)
    else:
        assert actor(inputs, settings).loss.item() == pytest.approx(result.loss.item(), abs=1e-12)
    (gradient,) = torch.autograd.grad(result.loss, b.logprobs)
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(
    ("cap", "low", "high"), [(1.5, None, None), (None, 0.95, 1.05), (1.2, None, 1.05), (None, 0.95, None)]
)
@pytest.mark.parametrize("seed", range(3))
def test_corrections_equal_a_loop_by_token_and_by_sequence(
    seed: int, cap: float | None, low: float | None, high: float | None, level: Any
) -> None:
    b = replace(batch(seed, tokens=6), entropy=None, ref_logprobs=None)
    behaviour = b.old_logprobs - 0.3 * torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)).double()
    assert b.mask is not None
    losses: list[float] = []
    rejected = 0
    for i in range(8):
        places = [t for t in range(6) if b.mask[i, t]]
        gaps = {t: float(b.old_logprobs[i, t] - behaviour[i, t]) for t in places}
        for t in places:
            summed = gaps[t] if level == "token" else sum(gaps.values())
            ratio = math.exp(gaps[t] if level == "token" else summed / len(places))
            weight = 1.0 if cap is None else min(math.exp(summed), cap)
            if (low is not None and ratio < low) or (high is not None and ratio > high):
                weight, rejected = 0.0, rejected + 1
            now, old = float(b.logprobs[i, t].detach()), float(b.old_logprobs[i, t])
            losses.append(weight * naive_policy(math.exp(now - old), float(b.advantages[i, t]), 0.2, 0.28, 3.0))
    settings = replace(SETTINGS, tis_cap=cap, correction_level=level, reject_ratio_low=low, reject_ratio_high=high)
    result = actor(replace(b, behaviour_logprobs=behaviour), settings)
    assert result.loss.item() == pytest.approx(sum(losses) / len(losses), abs=1e-9)
    share = result.metrics.get("actor/rejected_fraction")
    assert (share is None) == (low is None and high is None)
    if share is not None:
        assert share.item() == pytest.approx(rejected / len(losses), abs=1e-6)
        # A whole batch of sequences may be within the limits, or beyond.
        assert 0 < rejected < len(losses) or level == "sequence"


def test_policies_that_are_the_same_need_no_weights() -> None:
    b = replace(batch(1), behaviour_logprobs=batch(1).old_logprobs)
    for loss in (actor, decoupled_actor, gspo):
        capped = loss(b, replace(SETTINGS, tis_cap=2.0))
        assert capped.metrics["actor/behaviour_weight"].item() == pytest.approx(1)
        assert capped.metrics["actor/tis_fraction"].item() == 0
    assert decoupled_actor(b, SETTINGS).loss.item() == pytest.approx(actor(b, SETTINGS).loss.item(), abs=1e-12)


@pytest.mark.parametrize(("loss", "cap"), [(decoupled_actor, None), (actor, 2.0), (gspo, 2.0)])
def test_weights_need_the_policy_that_acted(loss: Any, cap: float | None) -> None:
    with pytest.raises(ValueError, match="drew the samples"):
        loss(batch(1), replace(SETTINGS, tis_cap=cap))


@pytest.mark.parametrize("seed", range(5))
def test_gspo_equals_a_loop_over_sequences_with_its_gradient(seed: int) -> None:
    b = replace(batch(seed, tokens=6), entropy=None, ref_logprobs=None)
    assert b.mask is not None
    b.mask[:, 0] = True
    scores = torch.randn(8, generator=torch.Generator().manual_seed(seed)).double()
    settings = replace(SETTINGS, loss_agg_func="seq-mean-token-mean", clip_ratio_low=0.05, clip_ratio_high=0.08)
    losses = torch.zeros(8, dtype=torch.float64)
    for i in range(8):
        ratios = [b.logprobs[i, t] - b.old_logprobs[i, t] for t in range(6) if b.mask[i, t]]
        ratio = (torch.stack(ratios).sum() / len(ratios)).exp()
        objective = torch.min(ratio * scores[i], ratio.clamp(0.95, 1.08) * scores[i])
        losses[i] = -(objective if scores[i] >= 0 else torch.max(objective, 3.0 * scores[i]))
    (expected,) = torch.autograd.grad(losses.mean(), b.logprobs)

    result = gspo(replace(b, advantages=scores), settings)

    assert result.loss.item() == pytest.approx(losses.mean().item(), abs=1e-9)
    (gradient,) = torch.autograd.grad(result.loss, b.logprobs)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)
    assert 0 < result.metrics["actor/clip_fraction"].item() < 1


@pytest.mark.parametrize("seed", range(5))
def test_gmpo_equals_a_loop_over_sequences_with_its_gradient(seed: int) -> None:
    b = replace(batch(seed, tokens=6), entropy=None, ref_logprobs=None)
    assert b.mask is not None
    b.mask[:, 0] = True
    scores = torch.randn(8, generator=torch.Generator().manual_seed(seed)).double()
    settings = replace(SETTINGS, loss_agg_func="seq-mean-token-mean", clip_ratio_low=0.2, clip_ratio_high=0.3)
    losses = torch.zeros(8, dtype=torch.float64)
    clipped = counted = 0
    for i in range(8):
        product, count = torch.ones((), dtype=torch.float64), 0
        for t in range(6):
            if b.mask[i, t]:
                # Eq. 4: the minimum of both with the sign of the advantage before them.
                ratio, sign = (b.logprobs[i, t] - b.old_logprobs[i, t]).exp(), float(scores[i].sign())
                near = ratio.clamp(math.exp(-0.2), math.exp(0.3))
                least = sign * torch.min(sign * ratio, sign * near)
                product, count = product * least, count + 1
                clipped += int(least.item() != ratio.item())
        losses[i] = -scores[i] * product ** (1 / count)
        counted += count
    (expected,) = torch.autograd.grad(losses.mean(), b.logprobs)

    result = gmpo(replace(b, advantages=scores), settings)

    assert result.loss.item() == pytest.approx(losses.mean().item(), abs=1e-9)
    (gradient,) = torch.autograd.grad(result.loss, b.logprobs)
    torch.testing.assert_close(gradient, expected, atol=1e-9, rtol=1e-9)
    assert 0 < clipped < counted
    assert result.metrics["actor/clip_fraction"].item() == pytest.approx(clipped / counted, abs=1e-6)


def test_metrics_of_parts_add_up_to_those_of_the_whole() -> None:
    b = replace(batch(3), behaviour_logprobs=batch(4).old_logprobs)
    assert b.mask is not None
    settings = replace(SETTINGS, tis_cap=1.2)
    whole = actor(b, settings).metrics
    total = denominator(b.mask, b.logprobs.shape, "token-mean") / 2
    parts: list[dict[str, torch.Tensor]] = []
    for rows in (slice(0, 3), slice(3, 8)):
        part = {name: getattr(b, name) for name in LossInputs.__dataclass_fields__}
        part = {name: value[rows] if isinstance(value, torch.Tensor) else value for name, value in part.items()}
        parts.append(actor(LossInputs(**{**part, "total": total, "token_total": total}), settings).metrics)
    assert set(parts[0]) == set(whole)
    for name, value in whole.items():
        both = [part[name].item() for part in parts]
        result = max(both) if name.endswith("_max") else sum(both) / 2
        assert result == pytest.approx(value.item(), abs=1e-6), name


@pytest.mark.parametrize("ratio", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("advantage", [1.0, -0.5])
def test_gradients_of_losses_without_ppo_s_clip(ratio: float, advantage: float) -> None:
    """By the papers: cispo's weight is clipped and its gradient is not, sapo's fades, gmpo's stops where it clips."""
    near = min(max(ratio, 0.8), 1.28)
    tau = 1.0 if advantage > 0 else 1.05
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    log_ratio = math.log(ratio)
    stops = log_ratio > 0.28 if advantage > 0 else log_ratio < -0.2
    geometric = math.exp(min(log_ratio, 0.28) if advantage > 0 else max(log_ratio, -0.2))
    expected = {cispo: near, sapo: 4 * gate * (1 - gate) * ratio, gmpo: 0.0 if stops else geometric}
    for loss, weight in expected.items():
        logprobs = torch.tensor([[math.log(0.25 * ratio)]], dtype=torch.float64, requires_grad=True)
        inputs = LossInputs(
            logprobs=logprobs,
            old_logprobs=torch.full((1, 1), math.log(0.25), dtype=torch.float64),
            advantages=torch.full((1, 1), advantage, dtype=torch.float64),
        )
        result = loss(inputs, LossSettings(clip_ratio_low=0.2, clip_ratio_high=0.28))
        (gradient,) = torch.autograd.grad(result.loss, logprobs)
        assert gradient.item() == pytest.approx(-advantage * weight, abs=1e-6), loss.__name__
        assert "actor/dual_clip_fraction" not in result.metrics

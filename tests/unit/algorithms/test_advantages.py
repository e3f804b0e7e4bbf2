"""Advantages against Stable-Baselines3's buffer, against loops written from the formulas, and by what must hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf_core.algorithms.advantages import (
    Advantages,
    AdvantageSettings,
    Trajectories,
    discounted_returns,
    distillation,
    dr_grpo,
    estimate,
    gae,
    gae_advantages,
    group_advantages,
    groups_that_vary,
    grpo,
    normalize,
    reinforce_pp,
    reinforce_pp_baseline,
    rloo,
    turn_gae,
    varies,
)

# Made with RolloutBuffer.compute_returns_and_advantage of Stable-Baselines3 2.9.2, gamma 0.97, gae_lambda 0.9.
REWARDS = [
    [0.001, 0.299, -0.274],
    [-0.891, -0.455, -0.992],
    [0.06, 1.34, -0.492],
    [-0.62, 0.49, 0.357],
    [0.105, -0.93, -0.029],
    [0.695, -1.344, -0.458],
    [-1.901, -1.29, -1.842],
    [-0.235, -1.267, 0.271],
]
VALUES = [
    [0.157, -0.187, -2.517],
    [-0.539, -0.049, 0.113],
    [-1.53, -0.478, -0.979],
    [-0.809, 1.061, -0.808],
    [-0.033, 0.884, -0.584],
    [-0.112, 0.11, 0.064],
    [-1.225, 0.076, 1.359],
    [-1.547, 0.859, 0.119],
    [-0.641, 2.0, 0.762],
]
DONES = [[1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 1], [0, 1, 0], [1, 0, 1], [0, 0, 0], [0, 1, 0]]
SB3_ADVANTAGES = [
    [-0.15600000321865082, 0.9861289858818054, 1.1078678369522095],
    [-0.35199999809265137, 0.6273300051689148, -1.425821304321289],
    [1.5016266107559204, 1.714764952659607, 0.7202849984169006],
    [0.7976593971252441, -1.2971420288085938, 1.1649999618530273],
    [0.7338709831237793, -1.8140000104904175, 0.16137389838695526],
    [0.8069999814033508, -3.46567440032959, -0.5220000147819519],
    [-1.5740190744400024, -2.388767957687378, -2.3076045513153076],
    [0.6902300119400024, -2.125999927520752, 0.8911399841308594],
]
SB3_RETURNS = [
    [0.0010000000474974513, 0.7991290092468262, -1.4091321229934692],
    [-0.890999972820282, 0.5783299207687378, -1.3128212690353394],
    [-0.02837339974939823, 1.2367651462554932, -0.2587150037288666],
    [-0.011340600438416004, -0.23614199459552765, 0.3569999039173126],
    [0.7008709907531738, -0.9300000071525574, -0.42262598872184753],
    [0.6949999928474426, -3.3556745052337646, -0.4580000042915344],
    [-2.7990190982818604, -2.31276798248291, -0.9486045837402344],
    [-0.8567699790000916, -1.2669999599456787, 1.010140061378479],
]
seeds = st.integers(0, 10_000)


def sample(seed: int, steps: int = 7, batch: int = 6, end: float = 0.25) -> Trajectories:
    random = torch.Generator().manual_seed(seed)
    return Trajectories(
        rewards=torch.randn(steps, batch, generator=random, dtype=torch.float64),
        values=torch.randn(steps + 1, batch, generator=random, dtype=torch.float64),
        dones=torch.rand(steps, batch, generator=random) < end,
        mask=torch.rand(steps, batch, generator=random) < 0.8,
        kl=torch.rand(steps, batch, generator=random, dtype=torch.float64),
    )


def naive_gae(t: Trajectories, gamma: float, decay: float) -> Tensor:
    """Return the sum of discounted differences up to the end of the episode, one step and trajectory at a time."""
    assert t.values is not None
    steps, batch = t.rewards.shape
    result = torch.zeros(steps, batch, dtype=torch.float64)
    for b in range(batch):
        for start in range(steps):
            weight = 1.0
            for step in range(start, steps):
                ended = bool(t.dones[step, b])
                following = 0.0 if ended else float(t.values[step + 1, b])
                difference = float(t.rewards[step, b]) + gamma * following - float(t.values[step, b])
                result[start, b] += weight * difference
                weight *= gamma * decay
                if ended:
                    break
    return result


def test_gae_equals_stable_baselines3() -> None:
    result = gae(
        Trajectories(rewards=torch.tensor(REWARDS), values=torch.tensor(VALUES), dones=torch.tensor(DONES).bool()),
        AdvantageSettings(gamma=0.97, gae_lambda=0.9, normalize_advantages=False),
    )
    torch.testing.assert_close(result.advantages, torch.tensor(SB3_ADVANTAGES), atol=1e-6, rtol=0)
    torch.testing.assert_close(result.returns, torch.tensor(SB3_RETURNS), atol=1e-6, rtol=0)


@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_gae_equals_the_sum_of_differences(seed: int, gamma: float, decay: float) -> None:
    t = sample(seed)
    assert t.values is not None
    advantages = gae_advantages(t.rewards, t.values, t.dones, gamma, decay)
    torch.testing.assert_close(advantages, naive_gae(t, gamma, decay), atol=1e-9, rtol=1e-9)


@given(seeds)
def test_gae_of_one_is_the_return_less_the_value(seed: int) -> None:
    t = sample(seed, end=0.0)
    assert t.values is not None
    rest = t.values[-1].clone()
    expected = torch.empty_like(t.rewards)
    for step in reversed(range(len(t.rewards))):
        rest = t.rewards[step] + 0.9 * rest
        expected[step] = rest - t.values[step]
    torch.testing.assert_close(gae_advantages(t.rewards, t.values, t.dones, 0.9, 1.0), expected)


@given(seeds)
def test_nothing_after_the_end_of_an_episode_matters(seed: int) -> None:
    t = sample(seed, end=0.0)
    assert t.values is not None
    t.dones[3] = True
    before = gae_advantages(t.rewards, t.values, t.dones, 0.9, 0.8)[:4].clone()
    t.rewards[4:] += 100
    t.values[4:] -= 50
    assert torch.equal(gae_advantages(t.rewards, t.values, t.dones, 0.9, 0.8)[:4], before)


def test_gae_normalizes_what_counts_and_leaves_returns_alone() -> None:
    t = sample(3)
    assert t.values is not None
    assert t.mask is not None
    plain = gae(t, AdvantageSettings(gamma=0.9, gae_lambda=0.8, normalize_advantages=False))
    scaled = gae(t, AdvantageSettings(gamma=0.9, gae_lambda=0.8))
    counted = scaled.advantages[t.mask]
    assert counted.mean().item() == pytest.approx(0, abs=1e-12)
    assert counted.std().item() == pytest.approx(1, abs=1e-6)
    assert plain.returns is not None
    assert scaled.returns is not None
    assert torch.equal(plain.returns, scaled.returns)
    assert torch.equal(plain.returns, plain.advantages + t.values[:-1])


def test_gae_without_values_says_what_is_missing() -> None:
    t = Trajectories(rewards=torch.zeros(2, 2), dones=torch.zeros(2, 2).bool())
    with pytest.raises(ValueError, match="value head"):
        gae(t, AdvantageSettings())


@given(st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12), st.sampled_from([2, 3, 4, 6]))
def test_group_advantages_equal_a_loop(scores: list[float], size: int) -> None:
    expected: list[float] = []
    for start in range(0, len(scores), size):
        group = scores[start : start + size]
        mean = math.fsum(group) / size
        deviation = math.sqrt(math.fsum((score - mean) ** 2 for score in group) / (size - 1))
        same = max(group) - min(group) <= 1e-6 * max(map(abs, group))
        expected += [0.0 if same else (score - mean) / (deviation + 1e-6) for score in group]
    advantages = group_advantages(torch.tensor(scores, dtype=torch.float64), size)
    torch.testing.assert_close(advantages, torch.tensor(expected, dtype=torch.float64), atol=1e-6, rtol=1e-6)


@given(st.floats(-1e6, 1e6, width=32), st.integers(2, 9))
def test_equal_scores_give_exactly_nothing(score: float, size: int) -> None:
    assert torch.equal(group_advantages(torch.full((size,), score), size), torch.zeros(size))


def test_equal_totals_give_zero_however_they_arose() -> None:
    # Differences of a potential, as float32: every way from 0 to 5 adds up to 5, but for rounding.
    potentials = torch.rand(50, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 5
    potentials[0], potentials[-1] = 0, 5
    rewards = potentials.diff(dim=0).float()
    assert rewards.sum(dim=0).unique().numel() > 1
    t = Trajectories(rewards=rewards, dones=torch.zeros(49, 8).bool())
    assert torch.equal(grpo(t, AdvantageSettings(group_size=8)).advantages, torch.zeros(49, 8))
    rewards[10, 3] -= 1e-3
    assert grpo(t, AdvantageSettings(group_size=8)).advantages[0, 3] < -2


@given(seeds, st.floats(0.1, 10), st.floats(-10, 10))
def test_group_advantages_do_not_see_scale_and_shift(seed: int, scale: float, shift: float) -> None:
    scores = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    moved = group_advantages(scores * scale + shift, 4)
    torch.testing.assert_close(moved, group_advantages(scores, 4), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(
    ("count", "size", "message"), [(6, 1, "two members"), (7, 2, "not a multiple of the group size")]
)
def test_groups_must_be_whole_and_have_members(count: int, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.zeros(count), size)


@given(st.lists(st.floats(-5, 5, width=32), min_size=12, max_size=12), st.sampled_from([2, 3, 4, 6]))
def test_differences_and_leave_one_out_equal_loops(scores: list[float], size: int) -> None:
    plain: list[float] = []
    others: list[float] = []
    for start in range(0, len(scores), size):
        group = scores[start : start + size]
        same = max(group) - min(group) <= 1e-6 * max(map(abs, group))
        for index, score in enumerate(group):
            plain.append(0.0 if same else score - math.fsum(group) / size)
            rest = [*group[:index], *group[index + 1 :]]
            others.append(0.0 if same else score - math.fsum(rest) / (size - 1))
    rewards = torch.stack((torch.zeros(12), torch.tensor(scores, dtype=torch.float64)))
    t = Trajectories(rewards=rewards, dones=torch.zeros(2, 12).bool())
    for function, expected in ((dr_grpo, plain), (rloo, others)):
        result = function(t, AdvantageSettings(group_size=size))
        wanted = torch.tensor(expected, dtype=torch.float64).expand(2, 12)
        torch.testing.assert_close(result.advantages, wanted, atol=1e-9, rtol=1e-9)
        assert result.returns is None


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo, reinforce_pp, gae, turn_gae])
def test_a_divergence_is_taken_off_the_rewards(function: Any) -> None:
    t = sample(7, batch=6)
    assert t.kl is not None
    settings = AdvantageSettings(group_size=3, kl_beta=0.3, gamma=0.9, gae_lambda=0.8)
    less = Trajectories(rewards=t.rewards - 0.3 * t.kl, dones=t.dones, values=t.values, mask=t.mask)
    result, expected = function(t, settings), function(less, settings)
    torch.testing.assert_close(result.advantages, expected.advantages)


def test_distillation_is_the_teacher_less_the_policy() -> None:
    t = sample(11, batch=6)
    assert t.kl is not None
    assert t.mask is not None
    result = distillation(t, AdvantageSettings(kl_beta=0.3, gamma=0.5, normalize_advantages=False))
    for step, row in enumerate(t.kl.tolist()):
        for place, divergence in enumerate(row):
            assert result.advantages[step, place].item() == (-divergence if t.mask[step, place] else 0.0)
    assert result.returns is None
    centered = distillation(t, AdvantageSettings()).advantages
    baseline = -t.kl[t.mask].mean()
    torch.testing.assert_close(centered, torch.where(t.mask, -t.kl - baseline, 0))
    with pytest.raises(ValueError, match="teacher"):
        distillation(Trajectories(rewards=t.rewards, dones=t.dones), AdvantageSettings())


@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_gae_passes_over_steps_that_do_not_count(seed: int, gamma: float, decay: float) -> None:
    t = sample(seed, end=0.0)
    assert t.values is not None
    assert t.mask is not None
    advantages = gae_advantages(t.rewards, t.values, t.dones, gamma, decay, t.mask)
    for b in range(t.rewards.shape[1]):
        rows = t.mask[:, b].nonzero()[:, 0]
        if not len(rows):
            continue
        values = torch.cat((t.values[rows, b], t.values[-1:, b]))[:, None]
        alone = Trajectories(rewards=t.rewards[rows, b][:, None], dones=t.dones[rows, b][:, None], values=values)
        torch.testing.assert_close(advantages[rows, b], naive_gae(alone, gamma, decay)[:, 0], atol=1e-9, rtol=1e-9)
    assert torch.equal(advantages[~t.mask], torch.zeros_like(advantages[~t.mask]))


@given(seeds, st.floats(0, 1), st.floats(0, 1))
def test_gae_over_turns_equals_a_loop_over_turns(seed: int, gamma: float, decay: float) -> None:
    t = sample(seed, steps=9)
    assert t.values is not None
    assert t.mask is not None
    expected, targets = torch.zeros_like(t.rewards), torch.zeros_like(t.rewards)
    for b in range(t.rewards.shape[1]):
        turns: list[list[int]] = []
        ended: list[bool] = []  # whether the episode ends before the next turn
        for step in range(len(t.rewards)):
            if t.mask[step, b]:
                if step and t.mask[step - 1, b] and not t.dones[step - 1, b]:
                    turns[-1].append(step)
                else:
                    turns.append([step])
                    ended.append(False)
            if t.dones[step, b] and ended:
                ended[-1] = True
        for first in range(len(turns)):
            weight, total = 1.0, 0.0
            for number in range(first, len(turns)):
                following = float(t.values[turns[number + 1][0] if number + 1 < len(turns) else -1, b])
                reward = math.fsum(float(t.rewards[step, b]) for step in turns[number])
                value = float(t.values[turns[number][0], b])
                total += weight * (reward + (0 if ended[number] else gamma * following) - value)
                weight *= gamma * decay
                if ended[number]:
                    break
            for step in turns[first]:
                expected[step, b] = total
                targets[step, b] = total + float(t.values[turns[first][0], b])
    without = Trajectories(rewards=t.rewards, dones=t.dones, values=t.values, mask=t.mask)
    advantages = turn_gae(without, AdvantageSettings(gamma=gamma, gae_lambda=decay, normalize_advantages=False))
    torch.testing.assert_close(advantages.advantages, expected, atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(advantages.returns, targets, atol=1e-9, rtol=1e-9)


def test_an_answer_without_tools_is_one_turn() -> None:
    t = Trajectories(
        rewards=torch.tensor([[0.0], [0.0], [1.0]]),
        dones=torch.tensor([[False], [False], [True]]),
        values=torch.tensor([[0.4], [0.9], [-3.0], [5.0]]),
    )
    advantages = turn_gae(t, AdvantageSettings(normalize_advantages=False))
    torch.testing.assert_close(advantages.advantages, torch.full((3, 1), 0.6))
    torch.testing.assert_close(advantages.returns, torch.ones(3, 1))


def test_grpo_gives_every_counted_step_the_same() -> None:
    rewards = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 1, 0], [0, 1, 0, 0]]).bool()
    result = grpo(
        Trajectories(rewards=rewards, dones=torch.zeros(3, 4).bool(), mask=mask), AdvantageSettings(group_size=2)
    )
    unit = 0.5 / (math.sqrt(0.5) + 1e-6)
    expected = torch.tensor([[unit, -unit, 0, 0], [unit, -unit, 0, 0], [0, -unit, 0, 0]])
    torch.testing.assert_close(result.advantages, expected, atol=1e-6, rtol=0)
    assert result.returns is None


def naive_reinforce(t: Trajectories, rewards: Tensor, beta: float, gamma: float) -> Tensor:
    assert t.mask is not None
    assert t.kl is not None
    steps, batch = rewards.shape
    returns = torch.zeros_like(rewards)
    for b in range(batch):
        for start in range(steps):
            weight = 1.0
            for step in range(start, steps):
                # What does not count, such as the words of a tool, takes no time.
                if t.mask[step, b]:
                    returns[start, b] += weight * (rewards[step, b] - beta * t.kl[step, b])
                    weight *= gamma
                if t.dones[step, b]:
                    break
    counted = [float(returns[s, b]) for s in range(steps) for b in range(batch) if t.mask[s, b]]
    mean = math.fsum(counted) / len(counted)
    deviation = math.sqrt(math.fsum((x - mean) ** 2 for x in counted) / (len(counted) - 1))
    return torch.where(t.mask, (returns - mean) / (deviation + 1e-8), 0)


@given(seeds, st.floats(0.5, 1), st.floats(0, 0.5))
def test_reinforce_equals_a_loop(seed: int, gamma: float, beta: float) -> None:
    t = sample(seed)
    result = reinforce_pp(t, AdvantageSettings(gamma=gamma, kl_beta=beta))
    torch.testing.assert_close(result.advantages, naive_reinforce(t, t.rewards, beta, gamma), atol=1e-6, rtol=1e-6)


def test_a_tools_words_discount_nothing() -> None:
    """A token, two of a tool, a token with the reward: `gae` without values, and verl, give 0.9, 0, 0, 1."""
    t = Trajectories(
        rewards=torch.tensor([[0.0], [0.0], [0.0], [1.0]]),
        values=torch.zeros(5, 1),
        dones=torch.tensor([[0], [0], [0], [1]]).bool(),
        mask=torch.tensor([[1], [0], [0], [1]]).bool(),
    )
    settings = AdvantageSettings(gamma=0.9, gae_lambda=1.0, normalize_advantages=False)
    for function in (reinforce_pp, gae):
        torch.testing.assert_close(function(t, settings).advantages, torch.tensor([[0.9], [0.0], [0.0], [1.0]]))


def test_an_episode_that_ends_within_a_tools_words_ends_there() -> None:
    rewards = torch.tensor([[1.0], [0.0], [4.0]])
    dones, mask = torch.tensor([[0], [1], [0]]).bool(), torch.tensor([[1], [0], [1]]).bool()
    assert discounted_returns(rewards, dones, 0.5, mask).flatten().tolist() == [1.0, 0.0, 4.0]


@pytest.mark.parametrize("function", [grpo, dr_grpo, rloo, reinforce_pp_baseline])
def test_groups_that_lost_members_are_compared_as_they_are(function: Callable[..., Any]) -> None:
    """Groups of 3, 2 and 1 score as each does by itself."""
    scores = torch.tensor([[1.0, 0.0, 0.5, 2.0, 1.0, 3.0]])
    settings = AdvantageSettings(group_size=3, normalize_advantages=False)

    def advantages(rewards: Tensor, sizes: list[int] | None, size: int) -> Tensor:
        t = Trajectories(rewards=rewards, dones=torch.ones_like(rewards).bool(), group_sizes=sizes)
        return function(t, replace(settings, group_size=size)).advantages

    together = advantages(scores[:, :5], [3, 2], 3)
    apart = [advantages(scores[:, :3], None, 3), advantages(scores[:, 3:5], None, 2)]
    torch.testing.assert_close(together, torch.cat(apart, dim=1))


def test_what_varies_is_told_as_advantages_tell_it() -> None:
    assert not varies([0.1 + 0.2, 0.3])
    assert not varies([])
    assert varies([0.3, 0.30001])
    for scores in ([0.1 + 0.2, 0.3], [0.3, 0.30001], [1.0, 1.0], [1.0, 0.0]):
        advantages = group_advantages(torch.tensor(scores).double(), 2)
        assert bool(advantages.any()) == varies(scores)


@given(seeds)
def test_the_baseline_is_the_group_mean(seed: int) -> None:
    t = sample(seed, end=0.0)
    assert t.mask is not None
    t.mask[0] = True  # a trajectory of which nothing counts has no last step
    rewards = t.rewards.clone()
    for start in range(0, rewards.shape[1], 3):
        members = range(start, start + 3)
        scores = [float(t.rewards[:, b][t.mask[:, b]].sum()) for b in members]
        for b in members:
            last = max(step for step in range(len(rewards)) if t.mask[step, b])
            rewards[last, b] -= math.fsum(scores) / 3
    result = reinforce_pp_baseline(t, AdvantageSettings(group_size=3, kl_beta=0.1))
    torch.testing.assert_close(result.advantages, naive_reinforce(t, rewards, 0.1, 1.0), atol=1e-6, rtol=1e-6)


def test_a_baseline_cancels_what_a_whole_group_gets() -> None:
    rewards = torch.tensor([[0.0] * 4, [5.0, 5.0, 1.0, 0.0]])
    t = Trajectories(rewards=rewards, dones=torch.tensor([[0] * 4, [1] * 4]).bool())
    advantages = reinforce_pp_baseline(t, AdvantageSettings(group_size=2, normalize_advantages=False)).advantages
    assert advantages.tolist() == [[0, 0, 0.5, -0.5], [0, 0, 0.5, -0.5]]


def test_groups_without_variance_are_found() -> None:
    scores = torch.tensor([1.0, 1.0, 0.0, 1.0, 0.0, 0.0])
    assert groups_that_vary(scores, 2).tolist() == [False, False, True, True, False, False]


@given(seeds)
def test_ranks_normalize_together(seed: int) -> None:
    """Two ranks that add up each other's sums get what one rank with everything gets."""
    values = torch.randn(10, generator=torch.Generator().manual_seed(seed)) * 3 + 1
    parts = (values[:3], values[3:])
    mailbox: list[Tensor] = [torch.zeros(()), torch.zeros(())]
    meet = Barrier(2, timeout=30)

    def rank(number: int) -> Tensor:
        def reduce_sum(own: Tensor) -> Tensor:
            mailbox[number] = own
            meet.wait()
            total = mailbox[0] + mailbox[1]
            meet.wait()
            return total

        return normalize(parts[number], None, reduce_sum)

    with ThreadPoolExecutor(2) as pool:
        result = torch.cat(list(pool.map(rank, range(2))))
    torch.testing.assert_close(result, (values - values.mean()) / (values.std() + 1e-8))


def test_settings_take_what_a_section_has() -> None:
    class Section:
        gamma = 0.5
        group_size = 4

    settings = AdvantageSettings.of(Section())
    assert (settings.gamma, settings.group_size, settings.gae_lambda) == (0.5, 4, 1.0)


@given(st.integers(0, 1000), st.floats(0, 1))
def test_discounted_returns_equal_a_loop(seed: int, gamma: float) -> None:
    random = torch.Generator().manual_seed(seed)
    rewards = torch.randn(6, 3, generator=random, dtype=torch.float64)
    dones = torch.rand(6, 3, generator=random) < 0.3
    expected = torch.zeros_like(rewards)
    for b in range(3):
        for start in range(6):
            for step in range(start, 6):
                expected[start, b] += gamma ** (step - start) * rewards[step, b]
                if dones[step, b]:
                    break
    torch.testing.assert_close(discounted_returns(rewards, dones, gamma), expected)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(3, 2), "the advantage function `own` returned a `Tensor`; expected `Advantages`"),
        (Advantages(torch.zeros(2, 3)), r"`advantages` of the advantage function `own` has the shape \[2, 3\]"),
        (Advantages(torch.zeros(2)), r"has the shape \[2\]; expected \[3, 2\]"),
        (Advantages(torch.zeros(3, 2), torch.zeros(4, 2)), "`returns` of the advantage function `own` has the shape"),
        (Advantages(torch.zeros(3, 2, dtype=torch.int64)), "is a tensor of torch.int64; expected floating-point"),
        (Advantages(None), "`advantages` of the advantage function `own` is a `NoneType`"),  # type: ignore[arg-type]
    ],
)
def test_an_advantage_of_ones_own_returns_something_else(returned: Any, message: str) -> None:
    def own(trajectories: Trajectories, settings: AdvantageSettings) -> Any:
        return returned

    trajectories = Trajectories(rewards=torch.zeros(3, 2), dones=torch.zeros(3, 2, dtype=torch.bool))
    with pytest.raises((TypeError, ValueError), match=message):
        estimate(own, trajectories, AdvantageSettings())


def test_an_advantage_of_ones_own_is_taken() -> None:
    trajectories = Trajectories(rewards=torch.ones(3, 2), dones=torch.zeros(3, 2, dtype=torch.bool))
    made = Advantages(torch.ones(3, 2), torch.ones(3, 2))
    assert estimate(lambda _trajectories, _settings: made, trajectories, AdvantageSettings()) is made

"""Losses off policy against loops written from the papers, and their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from recipes.embodied.off_policy.iql import advantage_weighted_loss, expectile_loss
from recipes.embodied.off_policy.losses import bootstrapped_targets, ensemble_loss, move_toward
from recipes.embodied.off_policy.sac import soft_policy_loss, temperature_loss
from recipes.embodied.off_policy.td3 import deterministic_policy_loss
from recipes.embodied.off_policy.td3_bc import cloning_policy_loss

finite = st.floats(-5, 5)
transitions = st.lists(st.tuples(finite, st.sampled_from([0.0, 0.9, 0.99**3]), finite, finite, finite), min_size=1)


def column(rows: list[tuple[float, ...]], index: int) -> Tensor:
    return torch.tensor([row[index] for row in rows], dtype=torch.float64)


@given(transitions, st.floats(0, 1))
def test_targets_equal_the_formula(rows: list[tuple[float, ...]], temperature: float) -> None:
    values = torch.stack((column(rows, 2), column(rows, 3)))
    result = bootstrapped_targets(column(rows, 0), column(rows, 1), values, column(rows, 4), temperature)
    for target, (reward, discount, one, two, logprob) in zip(result.tolist(), rows, strict=True):
        assert target == pytest.approx(reward + discount * (min(one, two) - temperature * logprob), abs=1e-9)
    without = bootstrapped_targets(column(rows, 0), column(rows, 1), values)
    for target, (reward, discount, one, two, _) in zip(without.tolist(), rows, strict=True):
        assert target == pytest.approx(reward + discount * min(one, two), abs=1e-9)


def test_what_comes_after_the_end_of_the_task_counts_nothing() -> None:
    nothing = torch.tensor([[1e6]])
    assert bootstrapped_targets(torch.ones(1), torch.zeros(1), nothing, torch.ones(1), 1.0).tolist() == [1.0]


@given(transitions)
def test_the_loss_of_an_ensemble_is_the_sum_of_its_members(rows: list[tuple[float, ...]]) -> None:
    values = torch.stack((column(rows, 2), column(rows, 3))).requires_grad_()
    targets = column(rows, 0)
    result = ensemble_loss(values, targets)
    expected = sum((value - target) ** 2 / 2 / len(rows) for target, _, *pair, _ in rows for value in pair)
    assert result.loss.item() == pytest.approx(expected, abs=1e-9)
    result.loss.backward()
    assert values.grad is not None
    # Each critic learns as if it were alone.
    torch.testing.assert_close(values.grad, (values.detach() - targets) / len(rows))


def test_the_policy_ascends_the_smallest_value_or_the_mean() -> None:
    for how, expected in (("min", [[1.0, 0.0], [0.0, 1.0]]), ("mean", [[0.5, 0.5], [0.5, 0.5]])):
        values = torch.tensor([[1.0, 4.0], [2.0, 3.0]], requires_grad=True)
        logprobs = torch.tensor([-1.0, 2.0], requires_grad=True)
        result = soft_policy_loss(logprobs, values, 0.1, "min" if how == "min" else "mean")
        chosen = [1.0, 3.0] if how == "min" else [1.5, 3.5]
        assert result.loss.item() == pytest.approx((0.1 * (-1 + 2) - sum(chosen)) / 2)
        assert result.metrics["actor/entropy"].item() == pytest.approx(-0.5)
        result.loss.backward()
        assert values.grad is not None
        assert logprobs.grad is not None
        torch.testing.assert_close(values.grad, -torch.tensor(expected) / 2)
        torch.testing.assert_close(logprobs.grad, torch.full((2,), 0.05))


def test_a_deterministic_policy_ascends_the_first_critic() -> None:
    values = torch.tensor([[1.0, 4.0], [2.0, 3.0]], requires_grad=True)
    deterministic_policy_loss(values).loss.backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[-0.5, -0.5], [0.0, 0.0]]


@pytest.mark.parametrize(("entropy", "rises"), [(-5.0, True), (-1.0, False)])
def test_the_temperature_rises_while_the_entropy_is_too_low(entropy: float, rises: bool) -> None:
    log_temperature = torch.tensor(math.log(0.2), requires_grad=True)
    temperature_loss(log_temperature, torch.tensor([-entropy, -entropy]), target_entropy=-3.0).backward()
    assert log_temperature.grad is not None
    assert (log_temperature.grad.item() < 0) == rises


def test_targets_move_by_their_rate() -> None:
    target, weight = torch.tensor([1.0, 2.0]), torch.tensor([3.0, 2.0], requires_grad=True)
    move_toward([target], [weight], 0.25)
    assert target.tolist() == [1.5, 2.0]


@given(st.lists(st.tuples(finite, finite), min_size=1), st.floats(0.05, 0.95), st.floats(0.1, 20))
def test_iql_weighs_by_expectiles_and_advantages(rows: list[tuple[float, ...]], tau: float, scale: float) -> None:
    one, other, count = column(rows, 0), column(rows, 1), len(rows)
    errors = [second - first for first, second in rows]
    wanted = sum(abs(tau - (error < 0)) * error**2 for error in errors) / count
    assert expectile_loss(one, other, tau).loss.item() == pytest.approx(wanted, rel=1e-6, abs=1e-9)
    weighed = sum(min(math.exp(scale * second), 100.0) * first for first, second in rows) / count
    assert advantage_weighted_loss(one, other, scale).loss.item() == pytest.approx(-weighed, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(finite, finite, finite, finite), min_size=1), st.floats(0.1, 5))
def test_cloning_weighs_values_against_distances(rows: list[tuple[float, ...]], scale: float) -> None:
    values = torch.stack((column(rows, 0) + 1, column(rows, 1))).requires_grad_()
    actions, recorded = column(rows, 2)[:, None], column(rows, 3)[:, None]
    loss = cloning_policy_loss(values, actions, recorded, scale).loss
    count = len(rows)
    size = sum(abs(row[0] + 1) for row in rows) / count
    weight = scale / max(size, 2.220446049250313e-16)
    wanted = sum((row[2] - row[3]) ** 2 - weight * (row[0] + 1) for row in rows) / count
    assert loss.item() == pytest.approx(wanted, abs=1e-6, rel=1e-6)
    loss.backward()
    assert values.grad is not None
    # The size of values is no path for gradients, and the second critic has no say.
    torch.testing.assert_close(values.grad, torch.tensor([[-weight / count], [0]]).double().expand(2, count))

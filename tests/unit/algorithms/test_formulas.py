"""Aggregation, KL divergence, options and the registry of formulas, and those that are frozen."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, cast, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from recipes.sections.algorithm import ADVANTAGES, LOSSES, unknown_options
from rlinf_core.algorithms.advantages import Advantages, AdvantageSettings, Trajectories, gae
from rlinf_core.algorithms.loss_inputs import (
    AGGREGATIONS,
    KlEstimator,
    LossInputs,
    LossSettings,
    aggregate,
    denominator,
    kl_estimate,
    masked_mean,
)
from rlinf_core.algorithms.losses import actor_critic
from rlinf_core.algorithms.options import (
    checked_options,
    get_advantage,
    get_policy_loss,
    options_for,
    options_model,
    register_advantage,
)
from rlinf_core.config.sections.values import LossAggregation
from rlinf_core.errors import ConfigError

how_strategy = st.sampled_from(AGGREGATIONS).map(lambda name: cast("LossAggregation", name))


def naive(losses: torch.Tensor, mask: torch.Tensor, how: str) -> float:
    rows = [[float(x) for x, m in zip(row, marks, strict=True) if m] for row, marks in zip(losses, mask, strict=True)]
    rows = [row for row in rows if row]
    if not rows:
        return 0.0
    if how == "token-mean":
        return sum(map(sum, rows)) / sum(map(len, rows))
    scale = {"seq-mean-token-mean": 0, "seq-mean-token-sum": 1, "seq-mean-token-sum-norm": losses.shape[1]}[how]
    per_row = [sum(row) / (scale or len(row)) for row in rows]
    return sum(per_row) / len(rows)


@given(st.integers(0, 10_000), how_strategy, st.floats(0, 1))
def test_equals_a_loop(seed: int, how: LossAggregation, share: float) -> None:
    random = torch.Generator().manual_seed(seed)
    losses = torch.randn(5, 4, generator=random, dtype=torch.float64)
    mask = torch.rand(5, 4, generator=random) < share
    assert aggregate(losses, mask, how).item() == pytest.approx(naive(losses, mask, how), abs=1e-6)
    full = torch.ones(5, 4)
    assert aggregate(losses, None, how).item() == pytest.approx(naive(losses, full, how), abs=1e-6)


@given(st.integers(0, 10_000), how_strategy, st.integers(1, 5))
def test_parts_add_up_to_the_whole(seed: int, how: LossAggregation, cut: int) -> None:
    random = torch.Generator().manual_seed(seed)
    losses = torch.randn(6, 4, generator=random, dtype=torch.float64)
    mask = torch.rand(6, 4, generator=random) < 0.5
    mask[0, 0] = mask[-1, 0] = True  # no part is empty, which would count as one
    parts = [(losses[:cut], mask[:cut]), (losses[cut:], mask[cut:])]
    total = torch.stack([denominator(marks, part.shape, how) for part, marks in parts]).sum()
    result = sum(aggregate(part, marks, how, total).item() for part, marks in parts)
    assert result == pytest.approx(aggregate(losses, mask, how).item(), abs=1e-6)


def test_a_constant_length_does_not_depend_on_the_batch() -> None:
    for width in (2, 3):
        losses, mask = torch.ones(4, width), torch.tensor([[1] * width, [1] + [0] * (width - 1)] * 2)
        total = denominator(mask, losses.shape, "seq-mean-token-sum-norm", longest=10)
        result = aggregate(losses, mask, "seq-mean-token-sum-norm", total)
        assert result.item() == pytest.approx(2 * (width + 1) / (4 * 10))


def test_what_is_masked_may_be_anything() -> None:
    losses = torch.tensor([[1.0, float("nan")], [float("inf"), 3.0]], requires_grad=True)
    mask = torch.tensor([[1, 0], [0, 1]])
    loss = aggregate(losses, mask)
    loss.backward()
    assert loss.item() == 2
    assert losses.grad is not None
    assert losses.grad.tolist() == [[0.5, 0], [0, 0.5]]


def test_masks_reach_over_trailing_dimensions() -> None:
    losses = torch.arange(12.0).reshape(3, 2, 2)
    assert aggregate(losses, torch.tensor([True, False, False])).item() == 1.5
    assert masked_mean(losses, torch.tensor([[True, False], [False, False], [False, True]])).item() == 5.5
    with pytest.raises(ValueError, match="beginning"):
        aggregate(losses, torch.ones(2))


def test_nothing_counted_is_nothing() -> None:
    for how in AGGREGATIONS:
        assert aggregate(torch.ones(2, 2), torch.zeros(2, 2), cast("LossAggregation", how)).item() == 0
    assert masked_mean(torch.ones(2), torch.zeros(2)).item() == 0


def test_an_unknown_way_is_refused() -> None:
    with pytest.raises(ValueError, match="token-mean"):
        aggregate(torch.ones(2), None, cast("LossAggregation", "mean"))


log = st.floats(-9, 0)


@given(log, log)
def test_estimators_equal_their_formulas(policy: float, reference: float) -> None:
    d = policy - reference
    a, b = torch.tensor([policy], dtype=torch.float64), torch.tensor([reference], dtype=torch.float64)
    assert kl_estimate(a, b, "k1").item() == pytest.approx(d, abs=1e-9)
    assert kl_estimate(a, b, "k2").item() == pytest.approx(d * d / 2, abs=1e-9)
    assert kl_estimate(a, b, "k3").item() == pytest.approx(math.exp(-d) - 1 + d, abs=1e-6)
    assert kl_estimate(a, b, "k3").item() >= 0


def test_expectations_are_the_divergence() -> None:
    """Over all outcomes of a small distribution: k1 and k3 exactly, k2 nearly; the gradient of k2 exactly."""
    logits = torch.tensor([0.2, -0.3, 0.1], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([0.0, 0.0, 0.1], dtype=torch.float64), 0)
    logprobs = torch.log_softmax(logits, 0)
    probabilities = logprobs.exp()
    exact = (probabilities * (logprobs - reference)).sum()
    for name in get_args(KlEstimator):
        mean = (probabilities * kl_estimate(logprobs, reference, cast("KlEstimator", name))).sum()
        assert mean.item() == pytest.approx(exact.item(), abs=1e-12 if name != "k2" else 5e-3)
    (expected,) = torch.autograd.grad(exact, logits, retain_graph=True)
    sampled = (probabilities.detach() * kl_estimate(logprobs, reference, "k2")).sum()
    (result,) = torch.autograd.grad(sampled, logits)
    torch.testing.assert_close(result, expected)


def test_k3_stays_finite() -> None:
    x = torch.tensor([-200.0], requires_grad=True)
    value = kl_estimate(x, torch.zeros(1), "k3")
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert x.grad is not None
    assert torch.isfinite(x.grad).all()


def test_an_unknown_estimator_is_refused() -> None:
    with pytest.raises(ValueError, match="k4"):
        kl_estimate(torch.zeros(1), torch.zeros(1), cast("KlEstimator", "k4"))


class CispoOptions(BaseModel):
    largest_weight: float = Field(gt=0)


class Anything(BaseModel):
    model_config = ConfigDict(extra="allow")


@options_model(CispoOptions)
def cispo(inputs: Any, settings: Any) -> None:
    """A loss with one option."""


def plain(inputs: Any, settings: Any) -> None:
    """A loss that reads its options as a dictionary."""


class Policy:
    options_model = Anything


def test_options_are_declared_by_a_model_in_brackets() -> None:
    with pytest.raises(ConfigError, match="is no pydantic model"):
        options_model(cast("Any", plain))


def test_a_model_s_instance_or_the_dictionary() -> None:
    result = options_for(cispo, {"largest_weight": "2", "of_another": 1})
    assert result == CispoOptions(largest_weight=2)
    written = {"largest_weight": 2}
    assert options_for(plain, written) == written
    assert options_for(Policy, {"depth": 3}).depth == 3


@pytest.mark.parametrize("written", [{}, {"largest_weight": -1}, {"largest_weight": "much"}])
def test_what_the_model_refuses(written: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        options_for(cispo, written)
    with pytest.raises(ConfigError, match="options of `cispo`") as raised:
        checked_options(cispo, written, "algorithm.options")
    assert "`algorithm.options.largest_weight`" in str(raised.value)


def test_option_unknown_to_every_owners_model_is_refused() -> None:
    assert unknown_options([cispo], {"largest_weight": 1, "smallest": 2}) == ["smallest"]
    assert unknown_options([cispo, plain], {"smallest": 2}) == []
    assert unknown_options([cispo, Policy], {"smallest": 2}) == []


def test_every_name_of_the_configuration_is_there() -> None:
    assert all(callable(get_advantage(name)) for name in ADVANTAGES)
    assert all(callable(get_policy_loss(name)) for name in LOSSES)
    assert get_advantage("gae") is gae
    assert get_policy_loss("rlinf_core.algorithms.losses:actor_critic") is actor_critic


def test_users_add_their_own() -> None:
    @register_advantage("test_rewards_themselves")
    def rewards_themselves(trajectories: Trajectories, settings: AdvantageSettings) -> Advantages:
        return Advantages(trajectories.rewards)

    assert get_advantage("test_rewards_themselves") is rewards_themselves


def test_wrong_names_say_what_is_known() -> None:
    with pytest.raises(ConfigError, match="did you mean `grpo`"):
        get_advantage("grpoo")
    with pytest.raises(ConfigError, match=r"no_such_package.*cannot be loaded"):
        get_advantage("no_such_package:thing")


def test_looking_names_up_imports_no_torch() -> None:
    """Environments and configurations use registries in interpreters that have no torch."""
    code = "import sys, rlinf_core.algorithms.options; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


FROZEN: Final[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data" / "formulas.json").read_text())
FROZEN_ADVANTAGES: Final[dict[str, Any]] = FROZEN["advantages"]
FROZEN_LOSSES: Final[dict[str, Any]] = FROZEN["losses"]
CLOSE: Final = 1e-8
# What each table of numbers is; others are given to none of the losses that do not ask for them.
FLAGS: Final = ("dones", "mask")


def tensors(table: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: torch.tensor(table[name], dtype=torch.bool if name in FLAGS else torch.float64) for name in names}


@pytest.mark.parametrize("name", sorted(FROZEN_ADVANTAGES["expected"]))
def test_advantages_are_the_frozen_numbers(name: str) -> None:
    inputs = tensors(FROZEN_ADVANTAGES, "rewards", "values", "dones", "mask", "kl")
    # Those of REINFORCE++ are defined as normalized; the others are compared as they are.
    settings = AdvantageSettings(**FROZEN_ADVANTAGES["settings"], normalize_advantages=name.startswith("reinforce"))

    result = get_advantage(name)(Trajectories(**inputs), settings).advantages

    expected = torch.tensor(FROZEN_ADVANTAGES["expected"][name], dtype=torch.float64)
    torch.testing.assert_close(result, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("case", FROZEN_LOSSES["expected"], ids=lambda case: f"{case['loss']}-{case['settings']}")
def test_losses_are_the_frozen_numbers(case: dict[str, Any]) -> None:
    names = ["logprobs", "old_logprobs", "advantages", "mask", "behaviour_logprobs"]
    if "kl_penalty" in case["settings"]:
        names += ["ref_logprobs", "entropy"]
    inputs = tensors(FROZEN_LOSSES, *names)
    if case["loss"] == "actor_critic":
        inputs |= tensors(FROZEN_LOSSES, "values", "old_values", "returns") | {"value_mask": inputs["mask"]}

    settings = LossSettings(**{**FROZEN_LOSSES["settings"], **case["settings"]})
    loss = get_policy_loss(case["loss"])(LossInputs(**inputs), settings)

    assert loss.loss.item() == pytest.approx(case["value"], abs=CLOSE)

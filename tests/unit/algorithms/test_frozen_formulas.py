"""Formulas as numbers: plain loops over the papers' formulas made them once, without a line of this product."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from rlinf_core.algorithms.advantages import AdvantageSettings, Trajectories
from rlinf_core.algorithms.loss_inputs import LossInputs, LossSettings
from rlinf_core.algorithms.options import get_advantage, get_policy_loss

FROZEN: Final[dict[str, Any]] = json.loads((Path(__file__).parents[2] / "data" / "formulas.json").read_text())
ADVANTAGES: Final[dict[str, Any]] = FROZEN["advantages"]
LOSSES: Final[dict[str, Any]] = FROZEN["losses"]
CLOSE: Final = 1e-8
# What each table of numbers is; others are given to none of the losses that do not ask for them.
FLAGS: Final = ("dones", "mask")


def tensors(table: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: torch.tensor(table[name], dtype=torch.bool if name in FLAGS else torch.float64) for name in names}


@pytest.mark.parametrize("name", sorted(ADVANTAGES["expected"]))
def test_advantages_are_the_frozen_numbers(name: str) -> None:
    inputs = tensors(ADVANTAGES, "rewards", "values", "dones", "mask", "kl")
    # Those of REINFORCE++ are defined as normalized; the others are compared as they are.
    settings = AdvantageSettings(**ADVANTAGES["settings"], normalize_advantages=name.startswith("reinforce"))

    result = get_advantage(name)(Trajectories(**inputs), settings).advantages

    expected = torch.tensor(ADVANTAGES["expected"][name], dtype=torch.float64)
    torch.testing.assert_close(result, expected, atol=CLOSE, rtol=0)


@pytest.mark.parametrize("case", LOSSES["expected"], ids=lambda case: f"{case['loss']}-{case['settings']}")
def test_losses_are_the_frozen_numbers(case: dict[str, Any]) -> None:
    names = ["logprobs", "old_logprobs", "advantages", "mask", "behaviour_logprobs"]
    if "kl_penalty" in case["settings"]:
        names += ["ref_logprobs", "entropy"]
    inputs = tensors(LOSSES, *names)
    if case["loss"] == "actor_critic":
        inputs |= tensors(LOSSES, "values", "old_values", "returns") | {"value_mask": inputs["mask"]}

    settings = LossSettings(**{**LOSSES["settings"], **case["settings"]})
    loss = get_policy_loss(case["loss"])(LossInputs(**inputs), settings)

    assert loss.loss.item() == pytest.approx(case["value"], abs=CLOSE)

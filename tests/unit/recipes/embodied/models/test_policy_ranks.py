"""Two ranks that share a policy begin with the weights that one has, and learn what it learns."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers", reason="the extra `language` is not installed")

import torch

from tests.unit.recipes.embodied.models.two_policy_ranks import CASES, train
from tests.unit.recipes.two_processes import run_two


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return what the first of two processes made of every case."""
    return run_two("tests.unit.recipes.embodied.models.two_policy_ranks", tmp_path_factory.mktemp("ranks"))[0]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_learns(shared: dict[str, Any], name: str) -> None:
    alone, both = train(CASES[name], 0, 1), shared[name]
    assert both["blocks"] == (0 if name == "mlp_policy" else alone["blocks"])
    assert both["before"].keys() == alone["before"].keys()
    for weight, value in alone["before"].items():
        assert torch.equal(both["before"][weight], value), weight
    assert both["norm"] == pytest.approx(alone["norm"], rel=1e-4)
    assert alone["norm"] > 0
    # A first step of Adam is one of the sign: where a gradient is nearly 0 it may be another one.
    for weight, value in alone["after"].items():
        differs = (both["after"][weight] - value).abs() > 1e-6
        assert differs.float().mean() < 0.02, weight


def test_layers_of_both_models_are_gathered_by_themselves(shared: dict[str, Any]) -> None:
    # Three layers that read and three of each tower; in pi0 three of the expert, and five parts of each that reads.
    assert shared["openvla"]["blocks"] == 9
    assert shared["pi0"]["blocks"] == 3 + 3 + 3 * 5

"""Two ranks that share a batch learn what one with all of it learns."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch

from tests.unit.recipes.language.learning.two_ranks import CASES, train
from tests.unit.recipes.two_processes import run_two


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

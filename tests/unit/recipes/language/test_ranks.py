"""Two ranks that share a batch learn what one with all of it learns."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
pytest.importorskip("peft")

import torch

from tests.unit.recipes.language.two_ranks import CASES, train

ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Return what each of two processes made of every case."""
    folder = tmp_path_factory.mktemp("ranks")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.recipes.language.two_ranks", str(rank), str(folder)],
            cwd=ROOT,
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [rank.communicate(timeout=100)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert [rank.returncode for rank in ranks] == [0, 0], "".join(said)
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(2)]


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_learn_what_one_learns(results: list[dict[str, Any]], name: str) -> None:
    first, second = (each[name] for each in results)
    alone = train(CASES[name], 0, 1)

    for number, expected in alone["tokens"].items():
        found = first["tokens"].get(number, second["tokens"].get(number))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
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

"""Statistics of states and actions: what they do, and the way through a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from recipes.embodied.models.folder_facts import STATISTICS
from recipes.embodied.models.normalization import Normalization, Scheme, Statistics
from rlinf_core.errors import ConfigError

ROWS = np.random.default_rng(0).normal([1.0, -2.0, 5.0], [0.5, 3.0, 0.0], size=(2000, 3))


def normalization(scheme: Scheme = "mean_std") -> Normalization:
    return Normalization(scheme, states=Statistics.of(ROWS), actions=Statistics.of(ROWS[:, :2]))


def test_mean_and_deviation_become_0_and_1_and_a_constant_0() -> None:
    normalized = normalization().normalized_states(ROWS)
    np.testing.assert_allclose(normalized.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(normalized.std(axis=0), [1, 1, 0], atol=1e-6)


def test_quantiles_become_minus_1_and_1() -> None:
    normalized = normalization("quantile").normalized_states(ROWS)
    np.testing.assert_allclose(np.quantile(normalized[:, :2], [0.01, 0.99], axis=0), [[-1, -1], [1, 1]], atol=1e-6)


@pytest.mark.parametrize("scheme", ["mean_std", "quantile"])
def test_actions_go_there_and_back_as_arrays_and_tensors(scheme: Scheme) -> None:
    result, actions = normalization(scheme), ROWS[:6, :2].reshape(3, 2, 2).astype(np.float32)
    np.testing.assert_allclose(result.actions_of(result.normalized_actions(actions)), actions, rtol=1e-5)
    tensor = torch.from_numpy(actions)
    torch.testing.assert_close(result.actions_of(result.normalized_actions(tensor)), tensor)
    assert result.normalized_actions(tensor).dtype == torch.float32


def test_without_statistics_nothing_changes() -> None:
    assert Normalization().normalized_states(ROWS) is ROWS
    assert Normalization().actions_of(ROWS) is ROWS


def test_it_is_the_same_after_a_file(tmp_path: Path) -> None:
    result = normalization("quantile")
    result.save(tmp_path)
    assert Normalization.load(tmp_path) == result
    assert result.digest() != normalization().digest()
    assert Normalization.load(tmp_path / "elsewhere") is None


def test_statistics_of_another_environment_are_refused() -> None:
    normalization().check(3, 2, "here")
    with pytest.raises(ConfigError, match="actions in `here` have 2 numbers; the environment needs 7"):
        normalization().check(3, 7, "here")


@pytest.mark.parametrize(
    "change", [{"scheme": "other"}, {"states": {"mean": [0.0]}}, {"states": 3}, {"actions": {"mean": ["x"]}}]
)
def test_a_broken_file_is_refused_by_name(tmp_path: Path, change: dict[str, Any]) -> None:
    normalization().save(tmp_path)
    path = tmp_path / STATISTICS
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ConfigError, match=r"normalization\.json` holds no statistics"):
        Normalization.load(tmp_path)


def test_a_row_short_of_a_number_is_refused(tmp_path: Path) -> None:
    normalization().save(tmp_path)
    path = tmp_path / STATISTICS
    data = json.loads(path.read_text())
    data["states"]["std"].pop()
    path.write_text(json.dumps(data))
    with pytest.raises(ConfigError, match=r"means and . standard deviations"):
        Normalization.load(tmp_path)


@pytest.mark.parametrize("rows", [np.zeros((0, 2)), np.array([[1.0, np.nan]])])
def test_data_without_statistics_are_refused(rows: Any) -> None:
    with pytest.raises(ConfigError, match="statistics of these data"):
        Statistics.of(rows)

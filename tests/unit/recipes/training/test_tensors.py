"""Explained variance."""

from __future__ import annotations

import pytest
import torch

from recipes.training.typed_tensors import explained_variance


def test_explained_variance() -> None:
    returns = torch.tensor([1.0, 2.0, 3.0, 4.0])
    assert explained_variance(returns, returns).item() == 1
    assert explained_variance(torch.zeros(4), returns).item() == 0
    assert explained_variance(-returns, returns).item() == pytest.approx(-3)
    assert explained_variance(returns, torch.ones(4)).item() == 0
    mask = torch.tensor([True, True, True, False])
    assert explained_variance(torch.tensor([1.0, 2.0, 3.0, 99.0]), returns, mask).item() == 1

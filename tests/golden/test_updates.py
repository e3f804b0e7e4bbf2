"""Twenty updates of each off-policy algorithm by seed: their metrics and a sum over the weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import pytest
import torch

from tests.golden.jobs import check_numbers
from tests.unit.recipes.embodied.off_policy.test_dsrl import CHUNK, Learning
from tests.unit.recipes.embodied.off_policy.test_off_policy_learner import METHODS, Loss, Made, bandit

_UPDATES: Final = 20


@pytest.fixture(autouse=True)
def _one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def test_updates_end_as_before(tmp_path: Path) -> None:
    values: dict[str, float] = {}
    for number, (loss, keys) in enumerate(METHODS):
        values |= _numbers(f"{number}.{loss}", _updated(loss, keys))
    for aliases in (False, True):
        (tmp_path / str(aliases)).mkdir()
        made = Learning(tmp_path / str(aliases), aliases=aliases)
        for _ in range(_UPDATES):
            size = CHUNK if aliases else made.policy.action_size
            made.update(made.batch(torch.randn(32, 3), torch.rand(32, size) * 2 - 1, torch.randn(32)))
        values |= _numbers(f"dsrl.{'aliases' if aliases else 'noise'}", made)
    check_numbers("off_policy", values)


def _updated(loss: Loss, keys: dict[str, Any]) -> Made:
    made = Made(loss, policy_interval=2, **keys)
    for _ in range(_UPDATES):
        made.update(bandit(32))
    return made


def _numbers(name: str, made: Made | Learning) -> dict[str, float]:
    weights = [*made.policy.parameters(), *made.learner.critics.parameters()]
    total = sum(float(weight.detach().double().sum()) for weight in weights)
    means = {**made.figures.means(), **made.critic_figures.means(), **made.learner.metrics()}
    return {f"{name}/weights": total, **{f"{name}/{metric}": value for metric, value in sorted(means.items())}}

"""The pages that show an environment, a model and an algorithm of one's own: their examples run, and learn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[3]

# The single-process loop of the benchmarks, on the page's own file.
LEARN = f"""
import sys
from dataclasses import replace

import torch

sys.path.insert(0, {str(REPOSITORY)!r})
from benchmarks.baselines.single_process_ppo import Loop, evaluate
from recipes.embodied.envs.registry import make_env
from rlinf_core.job.load import load_job

torch.set_num_threads(1)
torch.manual_seed(0)
job = load_job("job.yaml")
assert job.ok, job.diagnostics
loop = Loop(job.config.env.train, job.config.actor, job.config.algorithm)
for _ in range(STEPS):
    loop.learn(loop.rollout())
settings = replace(loop.env.settings, num_envs=64, seed=1, group_size=1, auto_reset=True)
print(evaluate(make_env(job.config.env.train.env_type, settings), loop.policy)[0])
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("page", "steps"), [("environments.md", 6), ("models.md", 7), ("embodied.md", 12)])
def test_the_example_of_a_page_runs_and_learns(page: str, steps: int, follow_page: Callable[..., str]) -> None:
    success = float(follow_page(page, then=LEARN.replace("STEPS", str(steps))))
    assert success > 0.7

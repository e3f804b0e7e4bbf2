"""Faults by seed, and ends at any moment: every run ends right, or says why."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest

from tests.integration.cli.interruptions import Case, How, cases, interrupt, measure

EMBODIED: Final = (
    *("embodied/pick-laptop", "env.train.task=reach", "env.train.total_num_envs=8", "env.train.max_episode_steps=25"),
    *("env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40", "actor.model.hidden_dim=16"),
    *("algorithm.update_epoch=2", "runner.max_steps=300", "runner.save_interval=10", "runner.val_check_interval=-1"),
)
MATH: Final = (
    *("math/sums-laptop", "actor.warm_start.steps=5", "actor.model.hidden_dim=32", "actor.model.num_layers=1"),
    *("data.rollout_batch_size=6", "data.val_size=20", "algorithm.group_size=4", "runner.max_steps=60"),
    *("runner.save_interval=5", "runner.val_check_interval=-1", "runner.save_format=dcp"),
)
ASYNC: Final = (*MATH, "runner.max_staleness=2")
# Rollouts run ahead of training.
AHEAD: Final = (*EMBODIED, "runner.max_staleness=1")
# SAC on a simulated Franka arm with contacts.
ARM: Final = (
    *("embodied/pick-laptop", "env.train.env_type=franka_mujoco", "env.train.task=reach", "env.train.total_num_envs=2"),
    *("env.train.max_episode_steps=15", "env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40"),
    *("actor.model.model_type=squashed_policy", "actor.model.hidden_dim=16", "algorithm.loss_type=sac"),
    *(
        "algorithm.learning_starts=40",
        "algorithm.random_steps=20",
        "algorithm.update_to_data=0.5",
        "algorithm.n_steps=3",
    ),
    *("algorithm.replay.capacity=400", "runner.max_steps=100", "runner.save_interval=10"),
    "runner.val_check_interval=-1",
)
AGENT: Final = (
    *("agent/calculator-laptop", "actor.warm_start.steps=5", "actor.model.hidden_dim=32", "actor.model.num_layers=1"),
    *("data.rollout_batch_size=6", "data.val_size=20", "algorithm.group_size=4", "runner.max_steps=40"),
    *("runner.save_interval=5", "runner.val_check_interval=-1", "runner.save_format=dcp"),
)
SFT: Final = (
    *("sft/sums-chat-laptop", "actor.model.hidden_dim=32", "actor.model.num_layers=1", "actor.global_batch_size=8"),
    *("data.train_size=1600", "runner.max_steps=200", "runner.save_interval=10", "runner.val_check_interval=-1"),
)
JOBS: Final = {
    "embodied": EMBODIED,
    "ahead": AHEAD,
    "arm": ARM,
    "math": MATH,
    "async": ASYNC,
    "agent": AGENT,
    "sft": SFT,
}


# A seed takes up to two minutes on a busy machine.
_SEEDS = 20
GOOD = {"equal", "right", "explained", "untouched"}


def chaos(job: str, folder: Path, *options: str) -> list[dict[str, Any]]:
    """Return the records of the disturbed runs."""
    command = [sys.executable, "-m", "tests.chaos", *JOBS[job], "--folder", str(folder), "--json", *options]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode in (0, 1), ended.stderr
    return json.loads(ended.stdout)["runs"]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("job", JOBS)
def test_every_run_ends_right_or_says_why(job: str, tmp_path: Path) -> None:
    runs = chaos(job, tmp_path / "chaos", "--seeds", str(_SEEDS), "--most", "6")
    assert [run["seed"] for run in runs] == list(range(_SEEDS))
    assert [run for run in runs if run["verdict"] not in GOOD] == []
    # Runs without staleness are compared with undisturbed ones, bit by bit.
    finished = {run["verdict"] for run in runs if run["status"] == "finished"}
    assert ("right" if job in ("ahead", "async") else "equal") in finished


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_killed_worker_changes_no_bit(tmp_path: Path) -> None:
    (run,) = chaos("embodied", tmp_path / "chaos", "--seeds", "1", "--first-seed", "3", "--fault", "kill-worker")
    (strike,) = run["strikes"]
    assert (run["verdict"], bool(strike["victim"]), strike["told_after"] is not None) == ("equal", True, True)


KINDS = list(itertools.product(How, (False, True)))
# Of each kind; a hundred take about three hours on two cores.
MOMENTS = int(os.environ.get("RLINF_TEST_MOMENTS", "12"))


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> float:
    """Somewhat more than a run takes to its second step."""
    return 1.5 * measure(tmp_path_factory.mktemp("measured"))


def check(case: Case, folder: Path) -> None:
    outcome = interrupt(case, folder)
    assert not outcome.faults, f"{case} in {outcome.phase}: {outcome.faults}\n{outcome.text}"


@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("how", "detached", "share"),
    [
        (How.SIGTERM, False, 0.25),
        (How.STOP, True, 0.4),
        (How.WARNING, False, 0.9),
        (How.CTRL_C, False, 0.5),
        (How.SIGTERM, False, 0.95),
    ],
)
def test_at_a_few_moments(how: How, detached: bool, share: float, span: float, tmp_path: Path) -> None:
    check(Case(how, detached, share * span), tmp_path)


@pytest.mark.timeout(600)
@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("how", "detached"), KINDS)
def test_at_many_moments(how: How, detached: bool, span: float, tmp_path: Path) -> None:
    # Others every day; a failure names its moment.
    today = int(time.time()) // 86400
    for number, case in enumerate(cases(how, detached, MOMENTS, span, seed=today)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check(case, folder)

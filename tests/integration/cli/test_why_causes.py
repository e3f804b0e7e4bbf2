"""Causes planted in runs as a person starts them, each named by `rlinf why` from the run's folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.runners.storage.run_folder import RunFolder
from tests.kernel import KEEPS_ENDS
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(300)]
RLINF = Path(sys.executable).with_name("rlinf")
ROOT = Path(__file__).parents[3]
PLANTED = "tests.integration.cli.planted_faults"
EMBODIED = (
    *("recipe=embodied", f"env.train.env_type={PLANTED}:FaultyEnv", "env.train.total_num_envs=8"),
    *("env.train.max_episode_steps=10", "env.train.max_steps_per_rollout_epoch=10", "actor.global_batch_size=40"),
    *("actor.model.hidden_dim=16", "algorithm.update_epoch=1", "runner.val_check_interval=-1", "runner.max_steps=12"),
)
MATH = (
    *("math_laptop", "actor.model.hidden_dim=32", "actor.model.num_layers=1", "actor.warm_start.steps=2"),
    *("data.rollout_batch_size=4", "data.val_size=4", "algorithm.group_size=4", "runner.save_format=dcp"),
    *("runner.val_check_interval=-1", "runner.max_steps=12", "actor.optim.lr_warmup_steps=0"),
)
NO_RESTART = "runner.max_restarts=0"


def fault(name: str) -> str:
    return f"env.train.task={name}"


# Of each: the job, the code, and words of its cause.
CAUSES: dict[str, tuple[tuple[str, ...], str, str]] = {
    "killed": ((*EMBODIED, fault("killed"), NO_RESTART), "killed-by-signal", "was killed by SIGKILL"),
    "crashed": ((*EMBODIED, fault("crash"), NO_RESTART), "crashed", "crashed in native code: SIGSEGV"),
    "exit": ((*EMBODIED, fault("exit"), NO_RESTART), "exited", "ended itself with exit code 3"),
    "exception": ((*EMBODIED, fault("broken")), "simulator-raises", "raised KeyError: 'joint' at "),
    "no memory": ((*EMBODIED, fault("memory")), "host-memory", "more memory"),
    "blind": ((*EMBODIED, fault("blind")), "observations-constant", "without seeing"),
    "worthless": ((*EMBODIED, fault("worthless")), "reward-never-varies", "it is 0 for all"),
    "small rate": ((*EMBODIED, "actor.optim.lr=1e-30"), "updates-rounded-away", "rounded away"),
    "diverges": ((*EMBODIED, "actor.optim.lr=1e30"), "not-finite", "NaN or infinite"),
    "reward raises": ((*MATH, f"reward.reward_type={PLANTED}:raising"), "reward-fails", "the reward fails"),
    "reward constant": ((*MATH, f"reward.reward_type={PLANTED}:constant"), "right-answers-fail", "by `reward_type:"),
    "cut off": ((*MATH, "rollout.sampling_params.max_new_tokens=1"), "answers-truncated", "cut off"),
    "long prompts": ((*MATH, "data.max_prompt_length=1"), "refused", "longer than `data.max_prompt_length`"),
    "schedule": (
        (*EMBODIED, "actor.optim.lr_scheduler=linear", "actor.optim.total_training_steps=4"),
        *("learning-rate-zero", "fell to 0"),
    ),
}
# What the kernel does not keep on older machines is not told.
UNKNOWN_ENDS = {"killed-by-signal": "died", "crashed": "died", "exited": "died"}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def rlinf(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([RLINF, *arguments], capture_output=True, text=True, timeout=200, check=False)


def causes() -> list[tuple[str, str]]:
    """The codes and causes of the last run, failures first."""
    record: dict[str, Any] = json.loads(rlinf("why", "--output", "json").stdout)
    return [(finding["code"], finding["what"]) for finding in (*record["failures"], *record["learning"])]


@pytest.mark.parametrize("planted", CAUSES)
def test_planted_cause_is_named_first(home: Path, planted: str) -> None:
    job, code, words = CAUSES[planted]
    trained = rlinf("train", *job)
    (first, what), *_ = causes()
    if not KEEPS_ENDS and code in UNKNOWN_ENDS:
        code, words = UNKNOWN_ENDS[code], "died"
    assert (first, words in what) == (code, True), (what, trained.stderr)
    # The last lines of the run say the same.
    assert what in trained.stderr + trained.stdout


def test_good_run_has_no_cause(home: Path) -> None:
    trained = rlinf("train", *EMBODIED)
    assert trained.returncode == 0, trained.stderr
    assert causes() == []


def near() -> Mapping[str, str]:
    """The environment of a Slurm job that is about to be ended."""
    return {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 60)}


@pytest.fixture
def endless(home: Path, request: pytest.FixtureRequest) -> Any:
    """A run without an end, after a step at least."""
    task, limited = request.param
    environ: Mapping[str, str] = near() if limited else {}
    job = (*EMBODIED, *((fault(task),) if task else ()), "runner.max_steps=-1")
    process = subprocess.Popen([RLINF, "train", *job], stderr=subprocess.DEVNULL, env={**os.environ, **environ})
    until(lambda: (run := RunFolder.latest("runs")) is not None and run.refresh().step >= 1, "a step", 100, 0.2)
    yield process
    if process.poll() is None:
        process.kill()
    process.communicate()


ENDS: list[tuple[tuple[str, bool], signal.Signals, str]] = [
    (("", False), signal.SIGINT, "interrupted"),
    (("", False), signal.SIGTERM, "terminated"),
    (("", True), signal.SIGTERM, "time-limit"),
    (("", False), signal.SIGKILL, "driver-vanished"),
]


@pytest.mark.parametrize(("endless", "number", "code"), ENDS, indirect=["endless"])
def test_end_of_the_driver_is_named(endless: subprocess.Popen[str], number: signal.Signals, code: str) -> None:
    assert causes() == []
    endless.send_signal(number)
    endless.wait(100)
    assert [named for named, _ in causes()] == [code]


@pytest.mark.parametrize("endless", [("stopped", False)], indirect=True)
def test_stopped_worker_is_named_while_the_run_stands(endless: subprocess.Popen[str]) -> None:
    until(causes, "a cause", 60, 0.5)
    ((code, what),) = causes()
    assert code == "stalled"
    assert "`EnvGroup:0` (pid " in what
    assert "is stopped, as by SIGSTOP" in what
    assert endless.poll() is None

"""Failures of simulators are no samples: nothing of a rollout in which one fails reaches an actor."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.env_spec import EnvError, EnvSettings
from recipes.embodied.envs.faults.repeating import SimulatorError
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError
from recipes.embodied.loop.embodied_runner import EmbodiedRunner
from recipes.embodied.loop.env_errors import EnvErrors, EnvironmentRaisedError
from recipes.embodied.loop.episode_figures import EpisodeSums, episode_means
from recipes.embodied.loop.protocols import FAILED_EPISODES, Layout
from recipes.embodied.workers.env_worker import EnvWorker
from rlinf_core.errors import RunError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.load import load_job
from rlinf_core.runners.run_program import death
from rlinf_core.runners.storage.run_events import story_with_faults
from tests.unit.recipes.embodied.envs.fake_simulators import FakeEnv

FAKE = (
    "env.train.env_type=tests.unit.recipes.embodied.envs.fake_simulators:FakeEnv",
    "env.train.task=one",
    "env.train.total_num_envs=2",
    "env.train.num_processes=2",
    "env.train.simulator_timeout=1",
    "env.train.max_episode_steps=5",
    "env.train.max_steps_per_rollout_epoch=4",
    "actor.model.model_type=cnn_policy",
    "actor.global_batch_size=8",
)


class Local(EnvWorker):
    """An env worker in this process, whose messages are kept, and whose policy stands still."""

    worker_info: Any = SimpleNamespace(rank=0, hardware=(), address="EnvGroup:0")

    def __init__(self, config: EmbodiedConfig) -> None:
        self._config = config
        self._train = self._eval = None
        self._films = []
        self._errors = []
        self.sent: list[dict[str, Any]] = []

    def worker_timer(self, tag: str | None = None, *rest: Any) -> Any:
        return nullcontext()

    def _send(self, stages: Any, stage: int, message: dict[str, Any]) -> None:
        self.sent.append(message)

    def _recv_actions(self, stages: Any, stage: int) -> Any:
        return np.zeros((2, 1, 2), np.float32)


@pytest.mark.parametrize("breaks", ["segfault", "exit", "sleep"])
def test_the_step_in_which_a_simulator_fails_is_never_sent(breaks: str) -> None:
    job = load_job("laptop", (*FAKE, f"env.train.options={{breaks: {breaks}, after: 3}}"), environ={})
    worker = Local(cast("EmbodiedConfig", job.config))
    worker.init_worker(Layout(1, 1, 1, "trajectories"))
    try:
        with pytest.raises(SimulatorDiedError):
            worker.interact(1)
    finally:
        worker._close()
    # The first observations, and two steps; the trajectory is never whole, and no episode is counted.
    assert len(worker.sent) == 3
    assert "rewards" not in worker.sent[0]


def test_steps_of_failed_episodes_are_marked_and_counted() -> None:
    job = load_job("laptop", (*FAKE, "env.train.options={breaks: drift, after: 3}"), environ={})
    worker = Local(cast("EmbodiedConfig", job.config))
    worker.init_worker(Layout(1, 1, 1, "trajectories"))
    try:
        sums = worker.interact(1)
    finally:
        worker._close()
    assert "failed" not in worker.sent[2]
    assert worker.sent[3]["failed"].all()
    assert not worker.sent[3]["valid"].any()
    assert sums[FAILED_EPISODES][0] > 0
    assert worker.take_errors() == []
    with pytest.raises(RunError, match=r"the simulators of .* episodes failed, and 0 episodes ended"):
        episode_means("env", [sums])


@pytest.mark.parametrize("processes", [0, 2])
@pytest.mark.parametrize("at", ["step", "observe"])
def test_an_error_of_the_environment_is_a_failed_episode(processes: int, at: str) -> None:
    options = f"env.train.options={{breaks: raise, at: {at}, after: 3}}"
    job = load_job("laptop", (*FAKE, options, f"env.train.num_processes={processes}"), environ={})
    worker = Local(cast("EmbodiedConfig", job.config))
    worker.init_worker(Layout(1, 1, 1, "trajectories"))
    try:
        sums = worker.interact(1)
    finally:
        worker._close()
    ended = worker.sent[3 if at == "step" else 4]
    assert "failed" not in ended
    assert ended["terminations"].all()
    assert ended["valid"].all()
    figures = episode_means("env", [sums])
    assert (figures["env/episodes"], figures["env/env_errors"], figures["env/left_out"]) == (2, 2, 0)
    errors = worker.take_errors()
    assert len({error.episode for error in errors}) == 2
    assert all("fake_simulators.py:" in error.place and "the mesh has 0 faces" in error.text for error in errors)


@pytest.mark.parametrize("processes", [0, 1])
def test_an_error_in_a_reset_is_a_failed_episode_without_steps(processes: int) -> None:
    settings = EnvSettings(
        num_envs=2, task="one", options={"breaks": "odd-start"}, num_processes=processes, repeats=True
    )
    env = FakeEnv(settings)
    try:
        env.reset(0)
        begun = env.first_starts()
        result = env.step(np.zeros((2, 1, 2), np.float32))
    finally:
        env.close()
    odd = [start["seed"] % 2 == 1 for start in begun]
    assert any(odd)
    assert result.terminations[:, 0].tolist() == odd
    assert result.valid[:, 0].tolist() == [not row for row in odd]
    assert result.episodes is not None
    assert result.episodes.erred.all()
    assert [error.began for error in result.errors] == [False] * sum(odd)


def error(seed: int, line: int = 7) -> EnvError:
    return EnvError(
        f"{seed}-0", f"`Ship` raised RuntimeError: engine on fire at ship.py:{line} in step", f"ship.py:{line}"
    )


def test_an_error_ends_the_run_at_once_or_at_the_third_episode() -> None:
    warnings: list[str] = []
    with pytest.raises(EnvironmentRaisedError, match=r"ship.py:7 in step") as caught:
        EnvErrors("stop", warn=warnings.append).take([error(1)], "env.eval", 0, first=True)
    assert "runner.on_env_error: count" in (caught.value.help or "")
    errors = EnvErrors("stop", warn=warnings.append)
    for seeds in ((1,), (1, 1), (1, 2)):  # evaluations begin from the same starts each time
        errors.take([error(seed) for seed in seeds], "env.eval", 5, first=False)
    with pytest.raises(EnvironmentRaisedError, match="engine on fire") as caught:
        errors.take([error(3)], "env.train", 6, first=False)
    assert "in 3 episodes" in (caught.value.why or "")


def test_errors_that_only_count_are_told_once_for_each_line(tmp_path: Path) -> None:
    warnings: list[str] = []
    errors = EnvErrors("count", tmp_path, warnings.append)
    for step in range(4):
        errors.take([error(step), error(step + 9), error(step, line=8)], "env.train", step, first=step == 0)
    assert len(warnings) == 2
    assert [event.kind for event in story_with_faults(tmp_path)[0]] == ["environment"] * 2


def test_only_the_first_episodes_are_missing_in_an_evaluation() -> None:
    sums = EpisodeSums(first_only=True)
    sums.add_failed(np.array([0, 1, 2]))
    assert sums.sums[FAILED_EPISODES] == (1.0, 0)


def test_figures_wait_for_as_many_episodes_as_environments() -> None:
    runner: Any = object.__new__(EmbodiedRunner)
    runner._failed = runner._ended = 0
    runner._most_failed, runner.record = 0.5, SimpleNamespace(step=1)
    runner.env, runner._env_errors = None, EnvErrors("count")
    of: Any = SimpleNamespace(total_num_envs=4, rollout_epoch=1)
    shown = [
        runner._episode_figures("env", [{"return": (2.0, ended), "success_at_end": (2.0, ended)}], of)
        for ended in (2, 1, 2)
    ]
    assert ["env/success_at_end" in figures for figures in shown] == [False, False, True]
    assert [figures["env/episodes"] for figures in shown] == [2, 1, 2]


def test_a_dead_simulator_is_begun_anew_a_faulty_one_ends_all() -> None:
    died = WorkerGroupError("EnvGroup", "interact", {0: SimulatorDiedError("EnvGroup:0", cause="signal 9")}, 1)
    assert isinstance(death(died), WorkerDiedError)
    # A new simulator did so, too.
    assert death(WorkerGroupError("EnvGroup", "interact", {0: SimulatorError("it raised")}, 1)) is None

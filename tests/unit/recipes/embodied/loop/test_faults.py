"""Failures of simulators are no samples: nothing of a rollout in which one fails reaches an actor."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.envs.faults.repeating import SimulatorError
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError
from recipes.embodied.loop.env_messages import FAILED_EPISODES
from recipes.embodied.loop.episode_figures import episode_means
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.workers.env_worker import EnvWorker
from rlinf_core.errors import RunError, WorkerDiedError
from rlinf_core.failures import WorkerGroupError
from rlinf_core.job.load import load_job
from rlinf_core.runners.run_program import death

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
    job = load_job("laptop", (*FAKE, "env.train.options={breaks: raise, after: 3}"), environ={})
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
    with pytest.raises(RunError, match=r"the simulators of .* episodes failed, and 0 episodes ended"):
        episode_means("env", [sums])


def test_a_dead_simulator_is_begun_anew_a_faulty_one_ends_all() -> None:
    died = WorkerGroupError("EnvGroup", "interact", {0: SimulatorDiedError("EnvGroup:0", cause="signal 9")}, 1)
    assert isinstance(death(died), WorkerDiedError)
    # A new simulator did so, too.
    assert death(WorkerGroupError("EnvGroup", "interact", {0: SimulatorError("it raised")}, 1)) is None

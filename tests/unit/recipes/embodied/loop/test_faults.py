"""Failures of simulators are no samples; episodes that processes die of are set aside at the third death."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import SteppedConfig
from recipes.embodied.envs.env_spec import EnvError, EnvSettings, EnvSpec, FinishedEpisodes, Observation
from recipes.embodied.envs.franka.franka_kin import FrankaKinEnv
from recipes.embodied.envs.observation_keys import image_key
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError
from recipes.embodied.envs.processes.simulator import EpisodeAtDeath
from recipes.embodied.envs.repeating import SimulatorError
from recipes.embodied.loop.embodied_runner import EmbodiedRunner
from recipes.embodied.loop.env_errors import EnvErrors, EnvironmentRaisedError, SuspectedEpisodes, replay
from recipes.embodied.loop.protocols import FAILED_EPISODES, EpisodeTotals, Layout, episode_means
from recipes.embodied.workers.env_worker import EnvWorker
from rlinf_core import ConfigError, RLinfError
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.errors import RunError, WorkerDiedError
from rlinf_core.failures import PackedError, WorkerGroupError
from rlinf_core.job.load import load_job
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.run_program import death
from rlinf_core.runners.storage.run_events import QuarantinedItem, quarantine, read_quarantine, story_with_faults
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.known import known
from tests.unit.recipes.embodied.envs.fake_simulators import FakeEnv, PoisonedEnv

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
        return np.zeros((2, 1, stages.batches[stage].action_size), np.float32)


def interacted(*overrides: str) -> tuple[Local, Any]:
    """Return a worker after a pass, and the sums of its episodes; the error that ended it in the place of these."""
    job = load_job("embodied/pick-laptop", (*FAKE, *overrides), environ={})
    worker = Local(cast("EmbodiedConfig", job.config))
    worker.init_worker(Layout(1, 1, 1, "trajectories"))
    try:
        return worker, worker.interact(1)
    except SimulatorDiedError as died:
        return worker, died
    finally:
        worker._close()


def test_evaluation_of_other_observations_is_refused() -> None:
    job = load_job("embodied/pick-laptop", ("env.eval.task=reach",), environ={})
    worker = Local(cast("EmbodiedConfig", job.config))
    worker.init_worker(Layout(1, 1, 1, "trajectories"))
    with pytest.raises(ConfigError, match="the `observations` of"):
        worker.evaluate()


class Filmed(FrankaKinEnv):
    """Observes a camera, too."""

    @property
    def spec(self) -> EnvSpec:
        return replace(super().spec, cameras={"side": (8, 8, 3)})

    def _observe(self) -> Observation:
        return {**super()._observe(), image_key("side"): np.zeros((self.num_envs, 8, 8, 3), np.uint8)}


def test_evaluation_may_observe_more() -> None:
    where = f"env.eval.env_type={__name__}:Filmed"
    others = ("env.eval.task=pick", "env.eval.total_num_envs=2", "env.eval.max_steps_per_rollout_epoch=50")
    job = load_job("embodied/pick-laptop", (where, *others), environ={})
    worker = Local(cast("EmbodiedConfig", job.config))
    worker.init_worker(Layout(1, 1, 1, "trajectories"))
    assert worker.evaluate()["return"][1] == 2


@pytest.mark.parametrize("breaks", ["segfault", "exit", "sleep"])
def test_the_step_in_which_a_simulator_fails_is_never_sent(breaks: str) -> None:
    worker, died = interacted(f"env.train.options={{breaks: {breaks}, after: 3}}")
    assert isinstance(died, SimulatorDiedError)
    # The first observations, and two steps; the trajectory is never whole, and no episode is counted.
    assert len(worker.sent) == 3
    assert "rewards" not in worker.sent[0]


def test_steps_of_failed_episodes_are_marked_and_counted() -> None:
    worker, sums = interacted("env.train.options={breaks: drift, after: 3}")
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
    worker, sums = interacted(options, f"env.train.num_processes={processes}")
    ended = worker.sent[3 if at == "step" else 4]
    assert "failed" not in ended
    assert ended["terminations"].all()
    assert ended["valid"].all()
    figures = episode_means("env", [sums])
    assert (figures["env/episodes"], figures["env/env_errors"], figures["env/left_out"]) == (2, 2, 0)
    errors = worker.take_errors()
    assert len({env_error.episode for env_error in errors}) == 2
    assert all(
        "fake_simulators.py:" in env_error.place and "the mesh has 0 faces" in env_error.text for env_error in errors
    )


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
    assert known(result.episodes).erred.all()
    assert [env_error.began for env_error in result.errors] == [False] * sum(odd)


def env_error(seed: int, line: int = 7) -> EnvError:
    return EnvError(
        f"{seed}-0", f"`Ship` raised RuntimeError: engine on fire at ship.py:{line} in step", f"ship.py:{line}"
    )


def test_an_error_ends_the_run_at_once_or_at_the_third_episode() -> None:
    warnings: list[str] = []
    with pytest.raises(EnvironmentRaisedError, match=r"ship.py:7 in step") as caught:
        EnvErrors("stop", warn=warnings.append).take([env_error(1)], "env.eval", 0, first=True)
    assert "runner.on_env_error: count" in (caught.value.help or "")
    errors = EnvErrors("stop", warn=warnings.append)
    for seeds in ((1,), (1, 1), (1, 2)):  # evaluations begin from the same starts each time
        errors.take([env_error(seed) for seed in seeds], "env.eval", 5, first=False)
    with pytest.raises(EnvironmentRaisedError, match="engine on fire") as caught:
        errors.take([env_error(3)], "env.train", 6, first=False)
    assert "in 3 episodes" in (caught.value.why or "")


def test_errors_that_only_count_are_told_once_for_each_line(tmp_path: Path) -> None:
    warnings: list[str] = []
    errors = EnvErrors("count", tmp_path, warnings.append)
    for step in range(4):
        errors.take([env_error(step), env_error(step + 9), env_error(step, line=8)], "env.train", step, first=step == 0)
    assert len(warnings) == 2
    assert [event.kind for event in story_with_faults(tmp_path)[0]] == ["environment"] * 2


def test_success_is_a_share_of_all_episodes() -> None:
    """An environment may report success only where there is one."""
    reported, unknown = EpisodeTotals(first_only=True), EpisodeTotals(first_only=True)
    for sums, solved in ((unknown, None), (reported, None), (reported, np.array([True]))):
        one = np.zeros(1, np.int64)
        sums.add(FinishedEpisodes(one, one, one.astype(np.float32), one, solved, solved, one > 0))
    assert episode_means("eval", [reported.sums, unknown.sums])["eval/success_once"] == pytest.approx(1 / 3)
    assert "eval/success_once" not in episode_means("eval", [unknown.sums])


def test_only_the_first_episodes_are_missing_in_an_evaluation() -> None:
    sums = EpisodeTotals(first_only=True)
    sums.add_failed(np.array([0, 1, 2]))
    assert sums.sums[FAILED_EPISODES] == (1.0, 0)


def test_figures_wait_for_as_many_episodes_as_environments(caplog: pytest.LogCaptureFixture) -> None:
    runner: Any = object.__new__(EmbodiedRunner)
    runner._failed = runner._ended = 0
    runner._most_failed, runner.record = 0.5, SimpleNamespace(step=1)
    runner.env, runner._env_errors, runner._noted = None, EnvErrors("count"), set()
    runner._environments = SimpleNamespace(train=SimpleNamespace(success_reward=True))
    of: Any = SimpleNamespace(total_num_envs=4, rollout_epoch=1)
    shown = [
        runner._episode_figures("env", [{"return": (2.0, ended), "success_at_end": (2.0, ended)}], of)
        for ended in (2, 1, 2)
    ]
    assert ["env/success_at_end" in figures for figures in shown] == [False, False, True]
    assert [figures["env/episodes"] for figures in shown] == [2, 1, 2]
    assert not caplog.records
    for _ in range(2):
        runner._episode_figures("env", [{"return": (2.0, 3)}], of)
    assert [record.getMessage() for record in caplog.records] == [
        "`env.train.success_reward` depends on success, which the environment has not reported in 3 episodes so far"
    ]


def test_a_dead_simulator_is_begun_anew_a_faulty_one_ends_all() -> None:
    died = WorkerGroupError("EnvGroup", "interact", {0: SimulatorDiedError("EnvGroup:0", cause="signal 9")}, 1)
    assert isinstance(death(died), WorkerDiedError)
    # A new simulator did so, too.
    assert death(WorkerGroupError("EnvGroup", "interact", {0: SimulatorError("it raised")}, 1)) is None


EPISODE = EpisodeAtDeath(environment=3, group=3, seed=1834, number=17, actions=[[0.5], [0.25]])
LAYOUT = Layout(1, 1, 1, "trajectories")


def settings(deadly: int = -1, **extra: Any) -> EnvSettings:
    return EnvSettings(num_envs=3, first_env=6, options={"seed": deadly}, num_processes=1, owner="EnvGroup:0", **extra)


def dying(deadly: int, **extra: Any) -> SimulatorDiedError:
    env = PoisonedEnv(settings(deadly, **extra))
    env.reset()
    env.step(np.zeros((3, 1, 1), np.float32))
    try:
        with pytest.raises(SimulatorDiedError) as caught:
            env.step(np.full((3, 1, 1), 0.25, np.float32))
    finally:
        env.close()
    return caught.value


@pytest.fixture(scope="module")
def deadly() -> int:
    env = PoisonedEnv(settings())
    env.reset()
    env.close()
    return env.first_starts()[1]["seed"]


@pytest.fixture
def record(tmp_path: Path) -> Any:
    runner = RunnerConfig.model_validate({"logger": {"log_path": str(tmp_path)}})
    folder = RunFolder.create(runner, "embodied")
    with RunRecord(folder, MetricsWriter(folder.metrics_file, []), lambda event: None) as opened:
        yield opened


def test_process_that_dies_names_its_episode(deadly: int) -> None:
    error = PackedError.of(dying(deadly, suspects=True)).unpack()
    assert isinstance(error, SimulatorDiedError)
    episode = error.episode
    assert episode is not None
    assert (episode.environment, episode.group, episode.seed) == (7, 7, deadly)
    assert episode.actions == [[0.0], [0.25]]


def test_start_that_is_set_aside_is_never_begun(deadly: int) -> None:
    plain = PoisonedEnv(settings())
    seen = plain.reset()["states"]
    number = plain.first_starts()[1]["number"]
    plain.close()
    env = PoisonedEnv(settings(deadly, set_aside=frozenset({f"{deadly}-{number}"})))
    others = env.reset()["states"]
    for _ in range(3):
        env.step(np.zeros((3, 1, 1), np.float32))
    env.close()
    assert (seen == others).ravel().tolist() == [True, False, True]


def test_episode_is_set_aside_at_its_third_death(record: Any) -> None:
    suspects = SuspectedEpisodes(record)
    error = SimulatorDiedError("EnvGroup:0", cause="signal 11 (SIGSEGV)\n  more", row=1)
    error.episode = EPISODE
    for _ in range(3):
        assert suspects.known_in(LAYOUT).set_aside == frozenset()
        suspects.died(WorkerGroupError("EnvGroup", "interact", {0: error}, 1), 5)
    assert suspects.known_in(LAYOUT) == LAYOUT._replace(suspects=True, set_aside=frozenset({"1834-17"}))
    (item,) = read_quarantine(record.folder.path).values()
    assert (item.kind, item.item, item.step, item.deaths) == ("episode", "1834-17", 5, ["signal 11 (SIGSEGV)"] * 3)
    assert item.replay["actions"] == [[0.5], [0.25]]


def test_death_outside_of_an_episode_suspects_none(record: Any) -> None:
    suspects = SuspectedEpisodes(record)
    for _ in range(3):
        suspects.died(WorkerGroupError("EnvGroup", "interact", {0: SimulatorDiedError("EnvGroup:0", cause="x")}, 1), 5)
    assert suspects.known_in(LAYOUT) == LAYOUT


def replayed(tmp_path: Path, options: Any, kept: Any) -> str:
    tmp_path.mkdir(exist_ok=True)
    quarantine(tmp_path, "episode", "a", 5, ["died"], kept)
    (item,) = read_quarantine(tmp_path).values()
    environments = SimpleNamespace(
        env_type=f"{PoisonedEnv.__module__}:PoisonedEnv",
        task=None,
        options=options,
        in_training=SteppedConfig(simulator_timeout=60.0),
    )
    job: Any = SimpleNamespace(config=SimpleNamespace(env=SimpleNamespace(train=environments)))
    return replay(job, item)


def kept(seed: int) -> dict[str, Any]:
    return {"environment": 7, "group": 7, "seed": seed, "number": 0, "actions": [[0.0], [0.25]]}


def test_replay_dies_of_the_same_episode_and_of_no_other(tmp_path: Path) -> None:
    assert "signal 9 (SIGKILL), stepping environment 0" in replayed(tmp_path / "a", {"seed": 11}, kept(11))
    assert replayed(tmp_path / "b", {"seed": 11}, kept(12)) == ""


def test_replay_refuses_what_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(RLinfError, match="was not kept as a whole"):
        replayed(tmp_path, {}, {"seed": 1})
    assert QuarantinedItem.model_fields["replay"].is_required() is False

"""Episodes that simulator processes die of: named by their starts, set aside at the third death, and done again."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from recipes.embodied.config.env_config import SteppedConfig
from recipes.embodied.envs.env_spec import EnvSettings
from recipes.embodied.envs.processes.process_pool import SimulatorDiedError
from recipes.embodied.envs.processes.simulator import EpisodeAtDeath
from recipes.embodied.loop.env_errors import SuspectedEpisodes, replay
from recipes.embodied.loop.protocols import Layout
from rlinf_core import RLinfError
from rlinf_core.config.sections.runner import RunnerConfig
from rlinf_core.failures import PackedError, WorkerGroupError
from rlinf_core.runners.metrics import MetricsWriter
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.storage.evidence import QuarantinedItem, quarantine, read_quarantine
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.unit.recipes.embodied.envs.faults.poisoned_simulator import PoisonedEnv

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


def test_replay_dies_of_the_same_episode(tmp_path: Path) -> None:
    words = replayed(tmp_path, {"seed": 11}, kept(11))
    assert "signal 9 (SIGKILL), stepping environment 0" in words


def test_replay_of_a_sound_episode_lives(tmp_path: Path) -> None:
    assert replayed(tmp_path, {"seed": 11}, kept(12)) == ""


def test_replay_refuses_what_is_not_whole(tmp_path: Path) -> None:
    with pytest.raises(RLinfError, match="was not kept as a whole"):
        replayed(tmp_path, {}, {"seed": 1})
    assert QuarantinedItem.model_fields["replay"].is_required() is False

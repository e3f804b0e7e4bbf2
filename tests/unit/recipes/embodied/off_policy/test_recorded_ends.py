"""Walks that end in every way, as each kind of record keeps them, against the values that follow from the rewards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray

from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation, Transition
from recipes.embodied.episodes.collector import EpisodeCollector
from recipes.embodied.learning.trajectory import RolloutChunks
from recipes.embodied.off_policy.algorithm import OffPolicyAlgorithm, TransitionTensors
from recipes.embodied.off_policy.sources import (
    add_recording,
    demonstrations_buffer,
    transition_spec,
    transition_steps,
)
from recipes.embodied.replay.buffer import ReplayBuffer
from recipes.embodied.replay.segments import SegmentWriter
from recipes.embodied.using.recording import features_of, to_columns
from tests.unit.recipes.embodied.off_policy.test_dsrl import CHUNK, Learning
from tests.unit.recipes.embodied.off_policy.test_off_policy_learner import DEVICE, Loss, Made

h5py = pytest.importorskip("h5py")
GAMMA: Final = 0.9


class Walk(NamedTuple):
    """A walk through places, which no action changes.

    Attributes:
        places: before each step.
        rewards: of each step.
        values: of each place, with what is earned after it.
        cut: a limit of steps ends it, and not the task.
        solved: in which steps the task is.
    """

    places: tuple[int, ...]
    rewards: tuple[float, ...]
    values: tuple[float, ...]
    cut: bool = False
    solved: tuple[int, ...] = ()


WALKS: Final = (
    Walk((0, 1, 2), (0, 0, -10), (-8.1, -9, -10)),  # falls
    Walk((3, 4, 5), (0, 0, 1), (0.81, 0.9, 1), solved=(2,)),
    Walk((6, 6, 6, 6), (0.1,) * 4, (1, 1, 1, 1), cut=True),  # stays where it is, for ever: 0.1 / (1 - gamma)
    Walk((7,), (-10,), (-10,)),  # falls at once
    Walk((8, 9), (1, -10), (-8, -10), solved=(0,)),  # solves the task, goes on, and falls
)
SPEC: Final = EnvSpec(state_size=10, action_size=1)
VALUES: Final = {place: value for walk in WALKS for place, value in zip(walk.places, walk.values, strict=True)}
Columns = dict[str, NDArray[Any]]


class Walks(VectorEnv):
    """The walks, one in each environment."""

    @property
    def spec(self) -> EnvSpec:
        return SPEC

    def _start(self, rows: NDArray[np.int64], starts: Any) -> None:
        self._at = np.zeros(self.num_envs, np.int64)

    def _advance(self, actions: Any, rows: NDArray[np.int64] | None) -> Transition:
        going = np.ones(self.num_envs, bool) if rows is None else np.isin(np.arange(self.num_envs), rows)
        here = [(walk, min(at, len(walk.places) - 1)) for walk, at in zip(WALKS, self._at.tolist(), strict=True)]
        self._at = self._at + going
        last = np.array([at == len(walk.places) - 1 for walk, at in here])
        cut = np.array([walk.cut for walk in WALKS])
        return Transition(
            np.array([walk.rewards[at] for walk, at in here], np.float32),
            last & ~cut,
            last & cut,
            np.array([at in walk.solved for walk, at in here]),
        )

    def _observe(self) -> Observation:
        at = [walk.places[min(step, len(walk.places) - 1)] for walk, step in zip(WALKS, self._at.tolist(), strict=True)]
        return {"states": seen(*at)}


def seen(*places: int) -> NDArray[np.float32]:
    return np.eye(SPEC.state_size, dtype=np.float32)[list(places)]


def columns_of(walk: Walk, drawn: np.random.Generator) -> Columns:
    count = len(walk.places)
    last = np.arange(count) == count - 1
    return {
        "observation.state": seen(*walk.places),
        "action": drawn.uniform(-1, 1, (count, 1)).astype(np.float32),
        "next.reward": np.array(walk.rewards, np.float32),
        "next.done": last,
        "next.truncated": last & walk.cut,
        "next.success": np.isin(np.arange(count), walk.solved),
    }


def walked(times: int = 1) -> list[Columns]:
    drawn = np.random.default_rng(0)
    return [columns_of(walk, drawn) for _ in range(times) for walk in WALKS]


def lerobot_3(folder: Path, times: int) -> ReplayBuffer:
    with DatasetWriter(folder / "set", 10, features_of(SPEC)) as writer:
        for columns in walked(times):
            writer.add(columns, "walk")
    return read(folder / "set")


def lerobot_2(folder: Path, times: int) -> ReplayBuffer:
    """Write a file for each episode, and lists as JSON lines."""
    (folder / "meta").mkdir()
    (folder / "data/chunk-000").mkdir(parents=True)
    index, listed = 0, list[dict[str, Any]]()
    for number, columns in enumerate(walked(times)):
        length = len(columns["action"])
        rows = [
            {
                "index": index + step,
                "task_index": 0,
                **{name: column[step].tolist() for name, column in columns.items()},
            }
            for step in range(length)
        ]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"data/chunk-000/episode_{number:06d}.parquet")
        listed.append({"episode_index": number, "tasks": ["walk"], "length": length})
        index += length
    features = {name: {"dtype": kind, "shape": list(shape)} for name, (kind, shape, _) in features_of(SPEC).items()}
    info = {
        "codebase_version": "v2.1",
        "total_episodes": len(listed),
        "total_frames": index,
        "total_tasks": 1,
        "fps": 10,
        "data_path": "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet",
        "features": features,
    }
    (folder / "meta/info.json").write_text(json.dumps(info))
    (folder / "meta/tasks.jsonl").write_text(json.dumps({"task_index": 0, "task": "walk"}) + "\n")
    (folder / "meta/episodes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed))
    return read(folder)


def hdf5(folder: Path, times: int) -> ReplayBuffer:
    """Write `terminals` and `timeouts`, and no successes."""
    with h5py.File(folder / "walks.hdf5", "w") as opened:
        for number, columns in enumerate(walked(times)):
            demo = opened.create_group(f"data/demo_{number}")
            demo["actions"], demo["obs/place"] = columns["action"], columns["observation.state"]
            demo["rewards"] = columns["next.reward"]
            demo["terminals"] = columns["next.done"] & ~columns["next.truncated"]
            demo["timeouts"] = columns["next.truncated"]
    return read(folder / "walks.hdf5", state_keys=["place"])


def recorded(folder: Path, times: int) -> ReplayBuffer:
    """Write what `rlinf record` makes of the episodes of an environment."""
    drawn = np.random.default_rng(0)
    env = Walks(EnvSettings(num_envs=len(WALKS), auto_reset=False, max_episode_steps=10))
    with DatasetWriter(folder / "set", 10, features_of(SPEC), origin={"recorded_by": "expert"}) as writer:
        for reset in range(times):
            collector = EpisodeCollector(env, reset, "walk", "everything")
            while not collector.over:
                collector.step(drawn.uniform(-1, 1, (len(WALKS), 1, 1)).astype(np.float32))
            for episode in collector.episodes():
                writer.add(to_columns(episode, SPEC), episode.task)
    return read(folder / "set")


def replay(folder: Path, times: int) -> ReplayBuffer:
    """Write the segments of a training with the walks in lanes, each followed by steps that do not count."""
    longest = max(len(walk.places) for walk in WALKS)
    writer = SegmentWriter(folder)
    for number in range(times):
        lanes = walked(times)[number * len(WALKS) :]
        steps = {name: torch.zeros(longest, len(WALKS), 1) for name in ("rewards", "logprobs")}
        steps |= {name: torch.zeros(longest, len(WALKS), 1, dtype=torch.bool) for name in ("valid", *FLAGS)}
        steps["actions"] = torch.zeros(longest, len(WALKS), 1, 1)
        before, after = (torch.zeros(longest, len(WALKS), SPEC.state_size) for _ in range(2))
        for lane, (walk, columns) in enumerate(zip(WALKS, lanes, strict=False)):
            count = len(walk.places)
            before[:count, lane] = torch.from_numpy(seen(*walk.places))
            after[: count - 1, lane] = before[1:count, lane]
            after[count - 1, lane] = before[count - 1, lane]
            steps["rewards"][:count, lane, 0] = torch.tensor(walk.rewards)
            steps["actions"][:count, lane, 0] = torch.from_numpy(columns["action"])
            steps["valid"][:count, lane] = True
            steps[FLAGS[walk.cut]][count - 1, lane] = True
        chunks = RolloutChunks(0, 0, {"states": before}, {**steps, "next/states": after}, None)
        writer.append(transition_steps(chunks))
    filled = ReplayBuffer(transition_spec(SPEC), len(WALKS), 100 * times)
    add_recording(filled, folder, lambda damage: None)
    return filled


FLAGS: Final = ("terminations", "truncations")
RECORDS: Final = (lerobot_3, lerobot_2, hdf5, recorded, replay)


def read(path: Path, **keys: Any) -> ReplayBuffer:
    return demonstrations_buffer(DemonstrationsConfig(train_data_paths=[str(path)], **keys), SPEC)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("steps", [1, 3])
def test_every_record_has_the_values_of_the_walks(record: Any, steps: int, tmp_path: Path) -> None:
    buffer: ReplayBuffer = record(tmp_path, 1)
    batch = buffer.gather(buffer.rows, steps, GAMMA)
    places, following = (array["states"].argmax(axis=1) for array in (batch.observations, batch.next_observations))
    values = np.zeros(SPEC.state_size)
    for _ in range(200):
        values[places] = batch.rewards + batch.discounts * values[following]
    assert dict(enumerate(values.tolist())) == pytest.approx(VALUES, abs=1e-4)


METHODS: Final[tuple[tuple[Loss, dict[str, Any]], ...]] = (
    ("sac", {}),
    ("sac", {"critics": 4, "critic_norm": "layer", "policy_values": "mean"}),  # RLPD
    ("td3", {}),
    ("td3_bc", {}),
    ("iql", {"expectile": 0.5}),
)


FAST: Final[dict[str, Any]] = {"target_rate": 0.05}
# Of losses with an entropy.
EXACT: Final[dict[str, Any]] = {**FAST, "temperature": 1e-6, "learn_temperature": False}


@pytest.mark.nightly
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(("loss", "keys"), METHODS)
def test_every_loss_learns_the_values_of_the_walks(
    loss: Loss, keys: dict[str, Any], record: Any, tmp_path: Path
) -> None:
    """No action changes a walk, so that its values are those of every policy."""
    made = Made(loss, spec=SPEC, **(EXACT if loss == "sac" else FAST), **keys)
    for batch in batches(record(tmp_path, 8), made.learner):
        made.update(batch)
    inputs = made.learner.prepare({"states": seen(*VALUES)})
    with torch.no_grad():
        check_values(made.critics(inputs, torch.zeros(len(VALUES), 1)).mean(dim=0))
        if loss == "iql":
            check_values(made.critics.of_states(inputs))


@pytest.mark.nightly
def test_crossq_is_near_the_values_of_the_walks(tmp_path: Path) -> None:
    """Actions of each place are recorded closely.

    Nothing holds down what its critics say of actions that are not recorded, as it has no target networks. With eight
    actions of a place, the policy takes one far from all of them, and the place before it is overrated by 3.
    """
    made = Made("sac", spec=SPEC, **EXACT, critic_norm="batch")
    for batch in batches(hdf5(tmp_path, 64), made.learner):
        made.update(batch)
    with torch.no_grad():
        inputs = made.learner.prepare({"states": seen(*VALUES)})
        check_values(made.critics(inputs, torch.zeros(len(VALUES), 1)).mean(dim=0), within=1.0)


@pytest.mark.nightly
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize("aliases", [False, True])
def test_steering_learns_the_values_of_the_walks(aliases: bool, record: Any, tmp_path: Path) -> None:
    (tmp_path / "records").mkdir()
    made = Learning(tmp_path, aliases=aliases, spec=SPEC, **EXACT)
    for batch in batches(record(tmp_path / "records", 8), made.learner):
        made.update(replace(batch, actions=torch.rand(len(batch.actions), CHUNK) * 2 - 1))
    inputs = made.learner.prepare({"states": seen(*VALUES)})
    with torch.no_grad():
        check_values(made.critics[0](inputs, torch.zeros(len(VALUES), CHUNK)).mean(dim=0))


def batches(buffer: ReplayBuffer, learner: OffPolicyAlgorithm[Any]) -> Iterator[TransitionTensors]:
    random = np.random.default_rng(0)
    for _ in range(1500):
        rows = buffer.sample(64, random)
        yield TransitionTensors.of(buffer.gather(rows, 1, GAMMA), learner.prepare, DEVICE)


def check_values(values: torch.Tensor, within: float = 0.4) -> None:
    assert dict(zip(VALUES, values.tolist(), strict=True)) == pytest.approx(VALUES, abs=within)

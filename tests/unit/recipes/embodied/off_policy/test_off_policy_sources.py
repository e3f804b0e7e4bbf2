"""Sources of replay buffers: rollouts, demonstrations, recordings; walks that end in every way as each keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.demonstrations import Demonstrations, Ends
from recipes.demonstrations.lerobot.writer import DatasetWriter
from recipes.embodied.config.data_config import DemonstrationsConfig
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSettings, EnvSpec, Observation, Transition
from recipes.embodied.learning.trajectory import RolloutChunks
from recipes.embodied.loop.protocols import INTERVENTIONS
from recipes.embodied.off_policy import sources
from recipes.embodied.off_policy.algorithm import OffPolicyAlgorithm, TransitionTensors
from recipes.embodied.off_policy.buffer import ReplayBuffer
from recipes.embodied.off_policy.off_policy_actor import split_passes
from recipes.embodied.off_policy.segments import SegmentWriter
from recipes.embodied.off_policy.sources import (
    add_recording,
    add_steps,
    demonstrations_buffer,
    intervened,
    transition_spec,
    transition_steps,
)
from recipes.embodied.off_policy.storage import ReplayBatch, ReplayError
from recipes.embodied.using.collector import EpisodeCollector
from recipes.embodied.using.recording import features_of, to_columns
from tests.unit.recipes.demonstrations.test_others_sets import make
from tests.unit.recipes.embodied.off_policy.test_dsrl import CHUNK, Learning
from tests.unit.recipes.embodied.off_policy.test_off_policy_learner import DEVICE, Loss, Made

READING = EnvSpec(state_size=1, action_size=1, has_instructions=True)
SET = DemonstrationsConfig.model_validate({"train_data_paths": "set"})


def chunks(first: int, environments: int, start: float = 0.0, steps: int = 3, version: int = 0) -> RolloutChunks:
    """Return steps of environments whose state is start + 10 x environment + step; the action is the reward."""
    here = start + 10 * torch.arange(environments) + torch.arange(steps)[:, None]
    flags = torch.zeros(steps, environments, 1, dtype=torch.bool)
    return RolloutChunks(
        first,
        version,
        {"states": here[:, :, None].float()},
        {
            "next/states": here[:, :, None].float() + 1,
            "actions": here[:, :, None, None].float(),
            "logprobs": torch.zeros(steps, environments, 1, 1),
            "rewards": here[:, :, None].float(),
            "terminations": flags,
            "truncations": flags.clone(),
            "valid": ~flags,
        },
        None,
    )


def buffer(lanes: int, capacity: int = 100) -> ReplayBuffer:
    return ReplayBuffer(sources.transition_spec(READING), lanes, capacity)


def everything(of: ReplayBuffer, steps: int = 1) -> ReplayBatch:
    return of.gather(of.rows, steps, 0.5)


def test_pieces_become_passes_in_their_order_of_events() -> None:
    pieces = [chunks(first, 2, start=100.0 * first) for first in (6, 0, 4, 2)]
    results = split_passes(pieces, passes=2, lanes=4)
    assert [result.batch for result in results] == [4, 4]
    assert results[0].inputs["states"][0, :, 0].tolist() == [0, 10, 200, 210]
    assert results[1].inputs["states"][0, :, 0].tolist() == [400, 410, 600, 610]
    with pytest.raises(ValueError, match="2 passes arrived; expected 3"):
        split_passes(pieces, passes=3, lanes=4)


def test_passes_follow_each_other_without_uncounted_steps() -> None:
    filled = buffer(2)
    assert add_steps(filled, transition_steps(chunks(0, 2))) == 6
    following = transition_steps(chunks(0, 2, start=3.0))
    following["valid"][1, 1] = False
    assert add_steps(filled, following) == 5
    contents = everything(filled, steps=2)
    by_state = dict(
        zip(contents.observations["states"][:, 0], zip(contents.rewards, contents.discounts, strict=True), strict=True)
    )
    # From one pass into the next; before the step that is missing the episode counts as cut off.
    assert by_state[2.0] == (2 + 0.5 * 3, 0.25)
    assert by_state[13.0] == (13, 0.5)
    with pytest.raises(ValueError, match="steps of 2 environments, but the buffer has 3"):
        add_steps(buffer(3), following)


def two_episodes(ended: bool, assumed: bool = False) -> Demonstrations:
    """Return two unsolved episodes, of three steps and of one; what ends the first one is given, the second one is
    ended by the task."""
    states = np.array([1, 2, 3, 11], np.float32)[:, None]
    last = np.array([False, False, True, False])
    final = np.array([False, False, False, True])
    return Demonstrations(
        "set",
        20,
        np.array([0, 3, 4]),
        states / 12,
        states,
        {},
        ("do it",),
        np.zeros(4, np.int64),
        rewards=states[:, 0],
        successes=np.zeros(4, np.bool_),
        ends=Ends((last & ended) | final, last & (not ended), (last | final) & assumed),
    )


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ReplayBuffer]:
    """Fills a buffer from demonstrations."""

    def filled(data: Demonstrations) -> ReplayBuffer:
        monkeypatch.setattr(sources, "read_data", lambda config: data)
        return demonstrations_buffer(SET, READING)

    return filled


Read = Callable[[Demonstrations], ReplayBuffer]


@pytest.mark.parametrize("ended", [True, False])
def test_demonstrations_end_as_their_columns_say(ended: bool, read: Read, caplog: pytest.LogCaptureFixture) -> None:
    contents = everything(read(two_episodes(ended)))
    states, following = (part["states"][:, 0].tolist() for part in (contents.observations, contents.next_observations))
    gained = zip(contents.rewards.tolist(), contents.discounts.tolist(), following, strict=True)
    rows = dict(zip(states, gained, strict=True))
    # The only step of the second episode is not lost.
    wanted = {1.0: (1.0, 0.5, 2.0), 2.0: (2.0, 0.5, 3.0), 11.0: (11.0, 0.0, 11.0)}
    assert rows == ({**wanted, 3.0: (3.0, 0.0, 3.0)} if ended else wanted)
    np.testing.assert_allclose(contents.actions, contents.observations["states"] / 12)
    assert ("left out the last steps of 1 of 2 episodes" in caplog.text) == (not ended)


@pytest.mark.parametrize(
    ("kind", "rewards"),
    [("terminations", {1.0: 2.0, 2.0: 2.0, 3.0: 8.5, 11.0: 11.0}), ("truncations", {1.0: 1.0, 3.0: 3.0})],
)
def test_nothing_is_chained_over_an_end_within_a_demonstration(
    kind: str, rewards: dict[float, float], read: Read
) -> None:
    no = np.zeros(4, np.bool_)
    ends = Ends(no, no, no)._replace(**{kind: np.array([False, True, False, True])})
    contents = everything(read(replace(two_episodes(True), bounds=np.array([0, 4]), ends=ends)), steps=2)
    states = contents.observations["states"][:, 0].tolist()
    assert dict(zip(states, contents.rewards.tolist(), strict=True)) == rewards
    assert set(contents.discounts.tolist()) == {0.0 if kind == "terminations" else 0.5}


def test_what_is_assumed_of_ends_is_told(read: Read, caplog: pytest.LogCaptureFixture) -> None:
    read(two_episodes(False, assumed=True))
    assert "1 of 2 episodes are done and not solved, and no `next.truncated` says" in caplog.text
    assert "1 of 2 episodes are not solved at their end, and no column says" in caplog.text


@pytest.mark.parametrize(
    ("valid", "cut", "counts", "reward"),
    [
        ([1, 1, 1, 1], None, True, 10),
        ([1, 1, 0, 0], None, True, 3),  # a success at the second step, what follows it is masked
        ([1, 1, 0, 0], 1, True, 3),  # an end there
        ([1, 0, 0, 0], 3, True, 1),  # the limit ends a masked episode
        ([1, 1, 1, 0], 3, False, 6),  # the end's own step is dropped
        ([1, 0, 1, 1], None, False, 8),
        ([0, 0, 0, 0], None, False, 0),
    ],
)
def test_chunk_of_a_masked_success_counts(valid: list[int], cut: int | None, counts: bool, reward: float) -> None:
    cuts = torch.zeros(1, 1, 4, dtype=torch.bool)
    if cut is not None:
        cuts[..., cut] = True
    flags = {
        "terminations": torch.zeros_like(cuts),
        "truncations": cuts,
        "valid": torch.tensor(valid).bool()[None, None],
    }
    rewards = torch.tensor([[[1.0, 2.0, 3.0, 4.0]]])
    steps = transition_steps(
        RolloutChunks(0, 0, {}, {"actions": rewards[..., None], "rewards": rewards, **flags}, None)
    )
    assert (bool(steps["valid"][0, 0]), float(steps["rewards"][0, 0])) == (counts, reward)
    assert bool(steps["truncations"][0, 0]) is (cut is not None)


def test_what_somebody_does_in_two_episodes_is_no_chain() -> None:
    """The second takeover begins in the state in which the first one ended, of another episode."""
    steps = transition_steps(chunks(0, 1, steps=3))
    steps["observations/states"][:, 0, 0] = [4, 7, 5]
    steps["next_observations/states"][:, 0, 0] = [5, 8, 6]
    steps[INTERVENTIONS] = np.array([[True], [False], [True]])
    helped = buffer(1)
    assert add_steps(helped, intervened(steps)) == 2
    contents = everything(helped, steps=2)
    assert contents.discounts.tolist() == [0.5, 0.5]
    assert contents.rewards.tolist() == [0, 2]


@pytest.mark.parametrize(
    ("change", "words", "absent"),
    [
        ({"ends": None}, "`next.success`", "`next.reward`"),
        ({"rewards": None}, "`next.reward`", "`next.success`"),
        ({"draws": np.ones(5)}, "a replay buffer draws all steps alike", "`next."),
    ],
    ids=["ends", "rewards", "weights"],
)
def test_what_a_replay_buffer_lacks_is_named_alone(change: dict[str, Any], words: str, absent: str, read: Read) -> None:
    with pytest.raises(DatasetError) as caught:
        read(replace(two_episodes(True), **change))
    assert words in caught.value.message
    assert absent not in caught.value.message


@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_recordings_fit_any_number_of_environments(lanes: int, tmp_path: Path) -> None:
    writer = SegmentWriter(tmp_path)
    writer.append(transition_steps(chunks(0, 2)))
    writer.append(transition_steps(chunks(0, 2, start=3.0)))
    filled = buffer(lanes)
    assert add_recording(filled, tmp_path, lambda damage: None) == 12
    contents = everything(filled)
    states = contents.observations["states"][:, 0]
    assert sorted(states) == [*range(6), *range(10, 16)]
    np.testing.assert_array_equal(contents.next_observations["states"][:, 0], states + 1)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("actions", lambda array: array[..., :1], r"`actions` .* float32\[1\]; this job's is float32\[2\]"),
        ("observations/states", lambda array: array.repeat(2, axis=2), r"is float32\[.*; this job's"),
        ("next_observations/states", lambda array: array.astype(np.float64), "is float64"),
        ("observations/states", None, "is missing"),
    ],
)
def test_recordings_of_others_are_refused(name: str, change: Any, said: str, tmp_path: Path) -> None:
    steps = transition_steps(chunks(0, 2))
    steps["actions"] = steps["actions"].repeat(2, axis=2)
    changed = {key: array for key, array in steps.items() if key != name}
    SegmentWriter(tmp_path).append(changed if change is None else {**changed, name: change(steps[name])})
    filled = ReplayBuffer(sources.transition_spec(replace(READING, action_size=2)), 2, 100)
    with pytest.raises(ReplayError, match=said) as caught:
        add_recording(filled, tmp_path, lambda damage: None)
    assert caught.value.where == str(tmp_path)


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
    return read_set(folder / "set")


def lerobot_2(folder: Path, times: int) -> ReplayBuffer:
    walks = walked(times)
    features = {name: (kind, shape) for name, (kind, shape, _) in features_of(SPEC).items()}

    def row(number: int, step: int) -> dict[str, Any]:
        return {name: column[step].tolist() for name, column in walks[number].items()}

    episodes = [(len(columns["action"]), 0) for columns in walks]
    return read_set(Path(make(folder, episodes, row=row, features=features, version="v2.1")))


def hdf5(folder: Path, times: int) -> ReplayBuffer:
    """Write `terminals` and `timeouts`, and no successes."""
    with h5py.File(folder / "walks.hdf5", "w") as opened:
        for number, columns in enumerate(walked(times)):
            demo = opened.create_group(f"data/demo_{number}")
            demo["actions"], demo["obs/place"] = columns["action"], columns["observation.state"]
            demo["rewards"] = columns["next.reward"]
            demo["terminals"] = columns["next.done"] & ~columns["next.truncated"]
            demo["timeouts"] = columns["next.truncated"]
    return read_set(folder / "walks.hdf5", columns={"state": "place"})


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
    return read_set(folder / "set")


def segments(folder: Path, times: int) -> ReplayBuffer:
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
RECORDS: Final = (lerobot_3, lerobot_2, hdf5, recorded, segments)


def read_set(path: Path, **keys: Any) -> ReplayBuffer:
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


# Options of losses with an entropy, by which it does not count.
EXACT: Final[dict[str, Any]] = {"temperature": 1e-6, "learn_temperature": False}
METHODS: Final[tuple[tuple[Loss, dict[str, Any]], ...]] = (
    ("sac", {"options": EXACT}),
    ("sac", {"critics": 4, "critic_norm": "layer", "options": {**EXACT, "policy_values": "mean"}}),  # RLPD
    ("td3", {}),
    ("td3_bc", {}),
    ("iql", {"options": {"expectile": 0.5}}),
)


@pytest.mark.nightly
@pytest.mark.parametrize("record", RECORDS)
@pytest.mark.parametrize(("loss", "keys"), METHODS)
def test_every_loss_learns_the_values_of_the_walks(
    loss: Loss, keys: dict[str, Any], record: Any, tmp_path: Path
) -> None:
    """No action changes a walk, so that its values are those of every policy."""
    made = Made(loss, spec=SPEC, target_rate=0.05, **keys)
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
    made = Made("sac", spec=SPEC, target_rate=0.05, options=EXACT, critic_norm="batch")
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
    made = Learning(tmp_path, aliases=aliases, spec=SPEC, target_rate=0.05, **EXACT)
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

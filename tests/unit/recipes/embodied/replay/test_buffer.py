"""The replay buffer against a slow reference, which keeps whole episodes in lists."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.replay.buffer import ReplayBuffer
from recipes.embodied.replay.storage import ReplayBatch, ReplayError, Transitions, TransitionSpec

SPEC = TransitionSpec.of(EnvSpec(1, 1, cameras={"main": (2, 2, 3)}, has_instructions=True).observations, (1, "float32"))
GOES_ON, TERMINATES, CUT_OFF, BREAKS_OFF = range(4)


def observations(numbers: list[int]) -> dict[str, Any]:
    images = np.array(numbers, np.uint8).reshape(-1, 1, 1, 1) * np.ones((1, 2, 2, 3), np.uint8)
    return {"states": np.array(numbers, np.float32)[:, None], "images.main": images}


class History:
    """A buffer, and beside it everything that was ever added: by lane episodes of (observation, reward, next, end)."""

    def __init__(self, lanes: int, capacity: int, storage: Path | None = None) -> None:
        self.buffer = ReplayBuffer(SPEC, lanes, capacity, storage)
        self.steps: list[list[list[tuple[int, float, int, int]]]] = [[[]] for _ in range(lanes)]
        self.present = [100 * lane for lane in range(lanes)]
        self._number = 0

    def add(self, lane: int, outcome: int) -> None:
        self._number += 1
        here, following = self.present[lane], (self.present[lane] + 1) % 250
        reward = float(self._number % 7)
        self.buffer.add(
            Transitions(
                observations([here]),
                np.full((1, 1), reward, np.float32),
                np.array([reward], np.float32),
                np.array([outcome == TERMINATES]),
                np.array([outcome == CUT_OFF]),
                observations([following]),
            ),
            np.array([lane]),
        )
        self.steps[lane][-1].append((here, reward, following, outcome))
        # After any end, told or not, the next episode begins somewhere else.
        self.present[lane] = following if outcome == GOES_ON else (following + 10) % 250
        if outcome != GOES_ON:
            self.steps[lane].append([])

    def expected(self, episode: list[tuple[int, float, int, int]], at: int, steps: int, discount: float) -> Any:
        """Return observation, return, discount and next observation of a step, one step at a time."""
        total, factor = 0.0, 1.0
        last = at
        for step in range(at, min(at + steps, len(episode))):
            total += factor * episode[step][1]
            factor *= 0.0 if episode[step][3] == TERMINATES else discount
            last = step
        return episode[at][0], total, factor, episode[last][2]

    def kept(self) -> list[tuple[list[tuple[int, float, int, int]], int]]:
        """Return the steps that must still be there, by their rows: a lane has room for that many rows."""
        result: list[tuple[list[tuple[int, float, int, int]], int]] = []
        for episodes in self.steps:
            rows: list[tuple[list[tuple[int, float, int, int]], int] | None] = []
            for episode in episodes:
                if episode:
                    rows += [*((episode, at) for at in range(len(episode))), None]
            result += [row for row in rows[-self.buffer.rows_of_lane :] if row is not None]
        return result


def copied(buffer: ReplayBuffer, folder: Path) -> dict[str, Any]:
    """Save a buffer into a folder, and return the other state as it was then."""
    return {name: value.copy() for name, value in buffer.save(folder).items()}


def everything(buffer: ReplayBuffer, steps: int, discount: float) -> ReplayBatch:
    return buffer.gather(buffer.rows, steps, discount)


moves = st.lists(st.tuples(st.integers(0, 1), st.sampled_from([GOES_ON] * 4 + [1, 2, 3])), min_size=1, max_size=60)


@settings(max_examples=150, deadline=None)
@given(moves, st.integers(4, 12), st.integers(1, 5))
def test_transitions_of_several_steps_are_those_of_the_reference(
    added: list[tuple[int, int]], rows_of_lane: int, steps: int
) -> None:
    history = History(2, 2 * rows_of_lane)
    for lane, outcome in added:
        history.add(lane, outcome)
    contents = everything(history.buffer, steps, 0.5)
    wanted = sorted(history.expected(episode, at, steps, 0.5) for episode, at in history.kept())
    images = contents.observations["images.main"]
    assert (images == images[:, :1, :1, :1]).all()
    states, following = contents.observations["states"][:, 0], contents.next_observations["states"][:, 0]
    assert (images[:, 0, 0, 0] == states).all()
    assert (contents.next_observations["images.main"][:, 1, 1, 2] == following).all()
    got = sorted(zip(states, contents.rewards, contents.discounts, following, strict=True))
    assert len(history.buffer) == len(wanted)
    np.testing.assert_allclose(np.array(got), np.array(wanted), rtol=1e-6)


def test_truncated_episode_has_a_next_value_terminated_has_none() -> None:
    for outcome, discount in ((TERMINATES, 0.0), (CUT_OFF, 0.25), (BREAKS_OFF, 0.25)):
        history = History(1, 8)
        history.add(0, GOES_ON)
        history.add(0, outcome)
        history.add(0, GOES_ON)
        contents = everything(history.buffer, 2, 0.5)
        assert contents.discounts[0] == discount
        # The last observation of its own episode, not the first of the next one.
        assert contents.next_observations["states"][0, 0] == 2


@settings(max_examples=30, deadline=None)
@given(moves, st.integers(0, 2**32 - 1), st.booleans())
def test_restored_buffer_samples_like_the_saved_one(
    tmp_path_factory: pytest.TempPathFactory, added: list[tuple[int, int]], seed: int, stored: bool
) -> None:
    """In files or in memory, whichever it was before."""
    folder = tmp_path_factory.mktemp("buffer")
    history = History(2, 24, folder / "rows" if stored else None)
    for lane, outcome in added:
        history.add(lane, outcome)
    other = ReplayBuffer(SPEC, 2, 24, None if stored else folder / "rows")
    other.load(copied(history.buffer, folder / "saved"), folder / "saved")
    for _ in range(3):
        one, two = (item.sample(16, np.random.default_rng(seed)) for item in (history.buffer, other))
        np.testing.assert_array_equal(one, two)
        first, second = (item.gather(one, 3, 0.9) for item in (history.buffer, other))
        for name in ("actions", "rewards", "discounts"):
            np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
        for name in first.observations:
            np.testing.assert_array_equal(first.next_observations[name], second.next_observations[name])
        flags = np.zeros(2, np.bool_)
        step = Transitions(observations([1, 2]), np.ones((2, 1)), np.ones(2), flags, flags, observations([3, 4]))
        history.buffer.add(step)
        other.add(step)


def test_every_transition_is_drawn_as_often_as_any_other() -> None:
    history = History(2, 40)
    for number in range(37):
        history.add(number % 3 % 2, TERMINATES if number % 5 == 4 else GOES_ON)
    drawn = 40_000
    rows = history.buffer.sample(drawn, np.random.default_rng(0))
    result = np.unique(rows, return_counts=True)[1]
    assert len(result) == len(history.buffer)
    expected = drawn / len(result)
    # Chi-square with as many degrees of freedom: mean k, deviation sqrt(2 k); seeded, so that it is always the same.
    statistic = ((result - expected) ** 2 / expected).sum()
    assert statistic < len(result) + 5 * np.sqrt(2 * len(result))


def test_overwritten_transitions_are_never_drawn() -> None:
    history = History(1, 8)
    for _ in range(30):
        history.add(0, GOES_ON)
        rows = history.buffer.sample(64, np.random.default_rng(1))
        assert np.isin(rows, history.buffer.rows).all()
    assert len(history.buffer) == 7


def test_memory_is_known_beforehand() -> None:
    buffer = ReplayBuffer(SPEC, 4, 1000)
    assert SPEC.row_bytes == 4 + 12 + 4 + 5
    assert (buffer.nbytes, buffer.stored) == (1000 * SPEC.row_bytes, 0)


def test_observations_are_kept_in_files_that_nobody_sees(tmp_path: Path) -> None:
    buffer = ReplayBuffer(SPEC, 4, 1000, tmp_path / "rows")
    assert (buffer.nbytes, buffer.stored) == (1000 * (4 + 5), 1000 * SPEC.observation_bytes)
    assert not list((tmp_path / "rows").iterdir())


def test_observations_among_the_arrays_of_a_checkpoint_are_read(tmp_path: Path) -> None:
    history = History(2, 24)
    for _ in range(5):
        history.add(0, GOES_ON)
    state = copied(history.buffer, tmp_path)
    for file in tmp_path.rglob("*.npy"):
        state[file.relative_to(tmp_path).with_suffix("").as_posix()] = np.load(file)
        file.unlink()
    other = ReplayBuffer(SPEC, 2, 24)
    other.load({**state, "largest": np.array(1.0)}, tmp_path)
    for one, two in zip(
        everything(history.buffer, 2, 0.5).observations.values(),
        everything(other, 2, 0.5).observations.values(),
        strict=True,
    ):
        np.testing.assert_array_equal(one, two)


def test_a_disk_without_room_is_told_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(1, 8)
    history.add(0, GOES_ON)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(ReplayError, match="the replay buffer needs") as caught:
        ReplayBuffer(SPEC, 1, 8, tmp_path)
    assert "`replay.storage`" in str(caught.value.help)
    with pytest.raises(ReplayError, match="a checkpoint of the replay buffer needs"):
        history.buffer.save(tmp_path)
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(ReplayError, match="cannot be created"):
        ReplayBuffer(SPEC, 1, 8, tmp_path / "file")
    with pytest.raises(ReplayError, match="cannot be saved"):
        history.buffer.save(tmp_path / "file")
    history.buffer.save(tmp_path / "saved")
    next((tmp_path / "saved").rglob("*.npy")).write_bytes(b"cut")
    with pytest.raises(ReplayError, match="cannot be read"):
        ReplayBuffer(SPEC, 1, 8).load({}, tmp_path / "saved")


def test_what_cannot_be_is_told(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="too small for 4 environments"):
        ReplayBuffer(SPEC, 4, 12)
    with pytest.raises(ReplayError, match="empty"):
        ReplayBuffer(SPEC, 1, 12).sample(1, np.random.default_rng())
    with pytest.raises(ReplayError, match="does not match this run"):
        ReplayBuffer(SPEC, 1, 12).load(ReplayBuffer(SPEC, 1, 16).save(tmp_path), tmp_path)

"""Replay: the buffer against a slow reference, batches of several sources, and recordings that survive a crash."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.off_policy.buffer import ReplayBuffer, ReplayMixture
from recipes.embodied.off_policy.segments import MAGIC, Damage, SegmentWriter, encode, read_segments, segments_of
from recipes.embodied.off_policy.storage import ColumnSpec, ReplayBatch, ReplayError, Transitions, TransitionSpec

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


NARROW = TransitionSpec({"states": ColumnSpec((1,), "float32")}, ColumnSpec((1,), "float32"))


def filled(mark: float, steps: int = 5) -> ReplayBuffer:
    buffer = ReplayBuffer(NARROW, 1, 10)
    for _ in range(steps):
        here = {"states": np.full((1, 1), mark)}
        flags = np.zeros(1, np.bool_)
        buffer.add(Transitions(here, np.zeros((1, 1)), np.full(1, mark), flags, flags, here))
    return buffer


@given(st.lists(st.integers(0, 20), min_size=1, max_size=4).filter(any), st.integers(1, 300))
def test_shares_are_exact(shares: list[int], total: int) -> None:
    names = [str(number) for number in range(len(shares))]
    mixture = ReplayMixture({name: filled(1) for name in names}, dict(zip(names, shares, strict=True)))
    counts = mixture.counts(total)
    assert sum(counts.values()) == total
    for name, share in zip(names, shares, strict=True):
        exact = total * share / sum(shares)
        assert counts[name] == exact or (abs(counts[name] - exact) < 1 and exact != int(exact))


def test_a_batch_holds_each_source_as_often_as_its_share_says() -> None:
    mixture = ReplayMixture({"online": filled(1), "demonstrations": filled(2)}, {"online": 0.5, "demonstrations": 0.5})
    batch = mixture.sample(64, np.random.default_rng(0), 1, 0.9)
    assert batch.rewards.tolist() == [1.0] * 32 + [2.0] * 32


def test_what_an_empty_source_cannot_give_the_others_do() -> None:
    mixture = ReplayMixture({"online": filled(1, 0), "demonstrations": filled(2)}, {"online": 1, "demonstrations": 1})
    assert mixture.counts(10) == {"online": 0, "demonstrations": 10}
    with pytest.raises(ReplayError, match="empty"):
        ReplayMixture({"online": filled(1, 0)}, {"online": 1}).counts(1)


@pytest.mark.parametrize("shares", [{"a": 1.0}, {"a": -1.0, "b": 2.0}, {"a": 0.0, "b": 0.0}])
def test_shares_that_are_not_those_of_the_sources_are_refused(shares: dict[str, float]) -> None:
    with pytest.raises(ReplayError, match="shares"):
        ReplayMixture({"a": filled(1), "b": filled(2)}, shares)


def record_of(number: int) -> dict[str, Any]:
    return {"states": np.arange(3, dtype=np.float32) + number, "images": np.full((2, 2, 3), number, np.uint8)}


def write_records(folder: Path, count: int) -> None:
    writer = SegmentWriter(folder)
    for number in range(count):
        writer.append(record_of(number))


def of_earlier_version(folder: Path, *counts: int) -> None:
    """Write files of several records each, behind which room was reserved."""
    folder.mkdir(exist_ok=True)
    first = 0
    for index, count in enumerate(counts):
        records = [encode(record_of(number)) for number in range(first, first + count)]
        (folder / f"segment-{index + 1:08d}.rlr").write_bytes(MAGIC + b"".join(records))
        first += count


def numbers_in(folder: Path, damages: list[Damage] | None = None) -> list[int]:
    return [
        int(segment["states"][0]) for segment in read_segments(folder, (damages if damages is not None else []).append)
    ]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    write_records(tmp_path, 5)
    result = list(read_segments(tmp_path))
    assert len(result) == 5
    for number, item in enumerate(result):
        for name, array in record_of(number).items():
            np.testing.assert_array_equal(item[name], array)
            assert item[name].dtype == array.dtype
    with pytest.raises(ReplayError, match="`names` is not numeric"):
        encode({"names": np.array(["a"], object)})


def test_segment_cut_at_any_byte_keeps_earlier_records(tmp_path: Path) -> None:
    of_earlier_version(tmp_path / "whole", 3)
    (file,) = segments_of(tmp_path / "whole")
    content, size = file.read_bytes(), len(encode(record_of(0)))
    for cut in range(len(content) + 1):
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / file.name).write_bytes(content[:cut])
        whole = max(0, cut - len(MAGIC)) // size
        damages: list[Damage] = []
        assert numbers_in(folder, damages) == [*range(whole)], cut
        torn = cut not in {0, *(len(MAGIC) + number * size for number in range(4))}
        assert len(damages) == torn, cut


def test_room_that_was_reserved_is_no_damage(tmp_path: Path) -> None:
    of_earlier_version(tmp_path, 3)
    with segments_of(tmp_path)[0].open("ab") as stream:
        stream.write(bytes(4096))
    damages: list[Damage] = []
    assert numbers_in(tmp_path, damages) == [0, 1, 2]
    assert not damages


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_and_nothing_else_is_lost(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    of_earlier_version(folder, 2, 2)
    first, _ = segments_of(folder)
    content = bytearray(first.read_bytes())
    at = position % len(content)
    content[at] ^= 1 << bit
    first.write_bytes(content)
    damages: list[Damage] = []
    before = 0 if at < len(MAGIC) + len(encode(record_of(0))) else 1
    assert numbers_in(folder, damages) == [*range(before), 2, 3]
    assert [damage.file for damage in damages] == [first]
    assert str(first) in str(damages[0])


def test_a_writer_that_was_killed_has_lost_nothing(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        writer = SegmentWriter(tmp_path)
        for number in range(3):
            writer.append(record_of(number))
        (tmp_path / f".{segments_of(tmp_path)[0].name}.1.ab.part").write_bytes(MAGIC)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    damages: list[Damage] = []
    write_records(tmp_path, 1)
    assert numbers_in(tmp_path, damages) == [0, 1, 2, 0]
    assert not damages
    assert len(segments_of(tmp_path)) == 4
    assert not list(tmp_path.glob(".*.part"))


def test_a_full_disk_is_told_once_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2**30, 2**30, 2**20, 2**20]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=left.pop(0)))
    warnings: list[str] = []
    writer = SegmentWriter(tmp_path, warnings.append)
    for count in (0, 1, 1):
        writer.append(record_of(0))
        assert len(warnings) == count
    assert "recording stops" in warnings[0]


def test_two_runs_do_not_record_over_each_other(tmp_path: Path) -> None:
    one = SegmentWriter(tmp_path)
    one.append(record_of(0))
    unfinished = tmp_path / ".segment-00000002.rlr.1.ab.part"
    unfinished.write_bytes(MAGIC)
    with pytest.raises(ReplayError, match="another run records here"):
        SegmentWriter(tmp_path)
    assert unfinished.exists()
    # Where locks are not kept, as on some network file systems.
    (tmp_path / "segment-00000002.rlr").write_bytes(MAGIC)
    with pytest.raises(ReplayError, match="another run records here"):
        one.append(record_of(1))
    assert numbers_in(tmp_path) == [0]

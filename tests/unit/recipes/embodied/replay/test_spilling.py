"""Replay buffers partly in files: the same transitions and samples as in memory, within the memory they are given."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.embodied.replay import disk, spilling
from recipes.embodied.replay.buffer import Prioritization, ReplayBuffer
from recipes.embodied.replay.observations import spilled_in
from recipes.embodied.replay.replay_types import ColumnSpec, ReplayBatch, ReplayError, Transitions, TransitionSpec
from recipes.embodied.replay.spilling import Spill, SpilledRows, rows_in_memory

SHAPE = (8, 8, 3)
SPEC = TransitionSpec.of({"states": ((1,), "float32"), "images.main": (SHAPE, "uint8")}, (1, "float32"))
IMAGE = 8 * 8 * 3
LANES, CAPACITY = 2, 60
# Actions, rewards, flags and states of all rows, and six images.
MEMORY = (9 + 4) * CAPACITY + 6 * IMAGE


def observed(number: int) -> dict[str, Any]:
    image = np.random.default_rng(number).integers(0, 256, (1, *SHAPE), dtype=np.uint8)
    return {"states": np.full((1, 1), number, np.float32), "images.main": image}


def add(buffer: ReplayBuffer, numbers: range, lane: int = 0) -> None:
    """Add steps from each number to the next; an episode ends with each number that 7 divides."""
    for number in numbers:
        flag = np.array([number % 7 == 0])
        one = np.ones((1, 1), np.float32)
        step = Transitions(observed(number), one * number, one[0] * number, flag, ~flag & False, observed(number + 1))
        buffer.add(step, np.array([lane]))


def filled(spill: Spill | None, prioritized: Prioritization | None = None) -> ReplayBuffer:
    """Return a buffer whose first lane has begun to overwrite its oldest rows."""
    buffer = ReplayBuffer(SPEC, LANES, CAPACITY, prioritized, None, spill)
    add(buffer, range(100, 150))
    add(buffer, range(300, 320), lane=1)
    return buffer


def drawn(buffer: ReplayBuffer, seed: int) -> ReplayBatch:
    return buffer.gather(*buffer.sample(64, np.random.default_rng(seed)), 3, 0.9)


def check_same(first: ReplayBuffer, second: ReplayBuffer) -> None:
    """Compare batches drawn from two buffers by the same seeds, all of their arrays."""
    for seed in range(5):
        ours, theirs = drawn(first, seed), drawn(second, seed)
        for name in ("actions", "rewards", "discounts", "rows", "weights"):
            assert np.array_equal(getattr(ours, name), getattr(theirs, name)), name
        for name in SPEC.observations:
            assert np.array_equal(ours.observations[name], theirs.observations[name]), name
            assert np.array_equal(ours.next_observations[name], theirs.next_observations[name]), name


@pytest.mark.parametrize("prioritized", [None, Prioritization()])
def test_a_spilled_buffer_is_sampled_as_one_in_memory_is(tmp_path: Path, prioritized: Prioritization | None) -> None:
    spilled, whole = filled(Spill(MEMORY, tmp_path), prioritized), filled(None, prioritized)
    assert spilled.nbytes == MEMORY
    assert spilled.spilled == (CAPACITY - 6) * IMAGE
    assert whole.nbytes == spilled.nbytes + spilled.spilled
    check_same(spilled, whole)


def test_what_fits_into_memory_makes_no_file(tmp_path: Path) -> None:
    buffer = filled(Spill(SPEC.bound(CAPACITY), tmp_path / "none"))
    assert buffer.spilled == 0
    assert not (tmp_path / "none").exists()


@given(
    st.dictionaries(st.text(max_size=3), st.integers(1, 500), min_size=1, max_size=5),
    st.integers(1, 200),
    st.integers(0, 10**5),
)
def test_small_columns_are_kept_in_memory_first(sizes: dict[str, int], rows: int, memory: int) -> None:
    kept = rows_in_memory({name: ColumnSpec((size,), "uint8") for name, size in sizes.items()}, rows, memory)
    assert sum(kept[name] * size for name, size in sizes.items()) <= memory
    partly = [name for name in sizes if kept[name] < rows]
    if partly:
        # Not one row more of the smallest of those would have fitted.
        smallest = min(partly, key=lambda name: sizes[name])
        assert sum(kept[name] * size for name, size in sizes.items()) + sizes[smallest] > memory
        assert all(kept[name] == rows for name in sizes if sizes[name] < sizes[smallest])


@pytest.mark.parametrize("memory", [MEMORY, 0], ids=["spilled again", "all in memory"])
def test_a_saved_buffer_goes_on_in_any_memory(tmp_path: Path, memory: int) -> None:
    first = filled(Spill(MEMORY, tmp_path))
    state = first.save(tmp_path / "saved")
    assert "observations/images.main" not in state
    again = Spill(memory + 10 * IMAGE, tmp_path) if memory else None
    other = ReplayBuffer(SPEC, LANES, CAPACITY, None, None, again)
    other.load(state | spilled_in(tmp_path / "saved"))
    check_same(first, other)
    for buffer in (first, other):
        add(buffer, range(150, 160))
    check_same(first, other)


def test_a_buffer_saved_from_memory_can_be_spilled(tmp_path: Path) -> None:
    whole = filled(None)
    spilled = ReplayBuffer(SPEC, LANES, CAPACITY, None, None, Spill(MEMORY, tmp_path))
    spilled.load(whole.save())
    check_same(spilled, whole)


def test_a_saved_buffer_without_its_files_is_refused(tmp_path: Path) -> None:
    first = filled(Spill(MEMORY, tmp_path))
    with pytest.raises(ReplayError, match="does not match this run"):
        filled(Spill(MEMORY, tmp_path)).load(first.save())
    first.save(tmp_path / "saved")
    (file,) = (tmp_path / "saved").rglob("*.npy")
    file.write_bytes(file.read_bytes()[:200])
    with pytest.raises(ReplayError, match="cannot be read"):
        spilled_in(tmp_path / "saved")


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 19), st.lists(st.tuples(st.integers(0, 19), st.integers(0, 255)), max_size=30))
def test_rows_hold_what_was_stored_last(held: int, writes: list[tuple[int, int]]) -> None:
    column = SpilledRows(20, ColumnSpec((3,), "uint8"), held, Path())
    expected = np.zeros((20, 3), np.uint8)
    for row, value in writes:
        expected[row] = value
        column[np.array([row])] = expected[[row]]
    everything = np.arange(20)[::-1]
    assert np.array_equal(column[everything], expected[everything])
    assert not len(column[everything[:0]])


def test_reads_are_announced_once_one_had_to_wait_for_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer, whole = filled(Spill(MEMORY, tmp_path)), filled(None)
    advised: list[int] = []
    waits = 0

    def note(file: int, offset: int, size: int, advice: int) -> None:
        assert (size, advice) == (IMAGE, os.POSIX_FADV_WILLNEED)
        advised.append(offset // IMAGE)

    monkeypatch.setattr(os, "posix_fadvise", note)
    monkeypatch.setattr(spilling, "_page_faults", lambda: waits)
    check_same(buffer, whole)
    assert not advised
    moments = iter(range(1000))
    monkeypatch.setattr(spilling, "_page_faults", lambda: next(moments))
    drawn(buffer, 0)
    advised.clear()
    batch = drawn(buffer, 1)
    assert advised[: sum(batch.rows >= 6)] == [row - 6 for row in batch.rows.tolist() if row >= 6]
    monkeypatch.setattr(spilling, "_page_faults", lambda: waits)
    check_same(buffer, whole)


def test_a_file_that_is_in_no_cache_is_read_from_the_disk(tmp_path: Path) -> None:
    buffer, whole = filled(Spill(MEMORY, tmp_path)), filled(None)
    links = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    file = next(int(link.name) for link in links if str(tmp_path) in os.readlink(link))
    os.fsync(file)
    os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
    check_same(buffer, whole)


class Usage(NamedTuple):
    free: int


def nearly_full(folder: Path) -> Usage:
    """Return what `shutil.disk_usage` says of a disk with a thousand bytes left."""
    return Usage(1000)


def test_a_disk_without_room_is_told_before_anything_is_stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spilling.shutil, "disk_usage", nearly_full)
    with pytest.raises(ReplayError, match="GiB of disk") as caught:
        filled(Spill(MEMORY, tmp_path))
    assert caught.value.where == str(tmp_path)
    assert "spill_path" in str(caught.value.help)
    monkeypatch.undo()

    def full(file: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spilling, "take_room", full)
    with pytest.raises(ReplayError, match="cannot be created") as caught:
        filled(Spill(MEMORY, tmp_path))
    assert str(caught.value.why).startswith("No space left on device")
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_without_room_is_told_before_it_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = filled(Spill(MEMORY, tmp_path))
    monkeypatch.setattr(spilling.shutil, "disk_usage", nearly_full)
    with pytest.raises(ReplayError, match="a checkpoint of the replay buffer needs"):
        buffer.save(tmp_path / "saved")
    assert not list(tmp_path.rglob("*.npy"))


def test_room_is_taken_where_the_disk_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "file").open("wb") as stream:
        disk.take_room(stream.fileno(), 4096)
        assert os.fstat(stream.fileno()).st_size == 4096
        for number in (errno.EOPNOTSUPP, errno.ENOSPC):

            def fail(file: int, begin: int, size: int, number: int = number) -> None:
                raise OSError(number, os.strerror(number))

            monkeypatch.setattr(os, "posix_fallocate", fail)
            disk.take_room(stream.fileno(), 4096)
            if number == errno.ENOSPC:
                with pytest.raises(OSError, match="No space"):
                    disk.take_room(stream.fileno(), 8192)
            else:
                disk.take_room(stream.fileno(), 8192)


def test_memory_for_less_than_actions_and_rewards_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="too few for the actions and rewards of 60 rows") as caught:
        ReplayBuffer(SPEC, LANES, CAPACITY, None, None, Spill(9 * CAPACITY - 1, tmp_path))
    assert str(9 * CAPACITY) in str(caught.value.help)


KILLED = """
import os, signal, sys
from pathlib import Path
from recipes.embodied.replay.spilling import Spill, SpilledRows
from recipes.embodied.replay.replay_types import ColumnSpec
column = SpilledRows(1000, ColumnSpec((1000,), "uint8"), 0, Path(sys.argv[1]))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_file(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], check=False, timeout=60)
    assert done.returncode == -9
    assert not list(tmp_path.iterdir())


def test_unwritable_checkpoint_names_its_folder(tmp_path: Path) -> None:
    buffer = filled(Spill(MEMORY, tmp_path / "rows"))
    (tmp_path / "saved").write_text("no folder")
    with pytest.raises(ReplayError, match="cannot be saved") as caught:
        buffer.save(tmp_path / "saved")
    assert str(caught.value.where).startswith(str(tmp_path / "saved"))
    assert "checkpoints" in str(caught.value.help)

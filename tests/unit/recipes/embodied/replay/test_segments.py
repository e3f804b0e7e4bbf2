"""Segments on disk: whatever a crash leaves, all records before are there."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes.embodied.replay.segments import MAGIC, Damage, SegmentWriter, encode, read_segments, segments_of
from recipes.embodied.replay.storage import ReplayError

SMALL = 4096


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def no_sync(descriptor: int) -> None:
    pass


def record(number: int) -> dict[str, Any]:
    return {"states": np.arange(3, dtype=np.float32) + number, "images": np.full((2, 2, 3), number, np.uint8)}


def written(folder: Path, count: int, segment_bytes: int = SMALL) -> None:
    with SegmentWriter(folder, segment_bytes) as writer:
        for number in range(count):
            writer.append(record(number))


def numbers(folder: Path, damages: list[Damage] | None = None) -> list[int]:
    return [
        int(segment["states"][0]) for segment in read_segments(folder, (damages if damages is not None else []).append)
    ]


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    written(tmp_path, 5)
    result = list(read_segments(tmp_path))
    assert len(result) == 5
    for number, item in enumerate(result):
        for name, array in record(number).items():
            np.testing.assert_array_equal(item[name], array)
            assert item[name].dtype == array.dtype


def test_segment_cut_at_any_byte_keeps_earlier_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Hundreds of files, and no machine loses its power here.
    monkeypatch.setattr(os, "fsync", no_sync)
    written(tmp_path / "whole", 3)
    (file,) = segments_of(tmp_path / "whole")
    content, size = file.read_bytes(), len(encode(record(0)))
    assert len(content) == len(MAGIC) + 3 * size
    for cut in range(len(content) + 1):
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / file.name).write_bytes(content[:cut])
        whole = max(0, cut - len(MAGIC)) // size
        damages: list[Damage] = []
        with SegmentWriter(folder, SMALL, damages.append) as writer:
            writer.append(record(9))
        assert numbers(folder, damages) == [*range(whole), 9], cut
        torn = cut not in {0, *(len(MAGIC) + number * size for number in range(4))}
        assert [damage.torn for damage in damages] == [True] * torn, cut


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_and_nothing_else_is_lost(
    tmp_path_factory: pytest.TempPathFactory, position: int, bit: int
) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    size = len(encode(record(0)))
    written(folder, 4, len(MAGIC) + 2 * size)  # two segments of two records
    first, _ = segments_of(folder)
    content = bytearray(first.read_bytes())
    at = position % len(content)
    content[at] ^= 1 << bit
    first.write_bytes(content)
    damages: list[Damage] = []
    before = 0 if at < len(MAGIC) + size else 1
    assert numbers(folder, damages) == [*range(before), 2, 3]
    assert [damage.file for damage in damages] == [first]
    assert str(first) in str(damages[0])


def test_a_damaged_record_before_whole_ones_is_left_in_its_file(tmp_path: Path) -> None:
    written(tmp_path, 3)
    (file,) = segments_of(tmp_path)
    content = bytearray(file.read_bytes())
    content[len(MAGIC) + 40] ^= 1
    file.write_bytes(content)
    damages: list[Damage] = []
    SegmentWriter(tmp_path, SMALL, damages.append).close()
    assert file.read_bytes() == content
    assert [damage.torn for damage in damages] == [False]


def test_a_writer_that_was_killed_has_lost_nothing(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        writer = SegmentWriter(tmp_path, SMALL)
        for number in range(3):
            writer.append(record(number))
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    # The room that the segment has taken is no damage.
    damages: list[Damage] = []
    written(tmp_path, 1)
    assert numbers(tmp_path, damages) == [0, 1, 2, 0]
    assert not damages


def test_a_full_disk_is_told_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [3 * SMALL, 2 * SMALL, SMALL // 2]

    def usage(path: Path) -> Usage:
        return Usage(0, 0, left.pop(0) if len(left) > 1 else left[0])

    monkeypatch.setattr(shutil, "disk_usage", usage)
    warnings: list[str] = []
    writer = SegmentWriter(tmp_path, SMALL, warn=warnings.append)
    while len(segments_of(tmp_path)) < 3:
        assert not warnings
        writer.append(record(0))
    assert len(warnings) == 1
    assert "recording stops" in warnings[0]
    recorded = len(numbers(tmp_path))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    result: ReplayError | None = None
    while result is None:
        try:
            writer.append(record(0))
            recorded += 1
        except ReplayError as error:
            result = error
    assert "has no space for another segment" in str(result)
    assert "No space left" in str(result)
    # What was recorded before is there, and the segment that found no room is not.
    assert len(numbers(tmp_path)) == recorded
    assert len(segments_of(tmp_path)) == 3
    # Once there is room recording goes on.
    monkeypatch.undo()
    writer.append(record(0))
    writer.close()
    assert len(numbers(tmp_path)) == recorded + 1
    with pytest.raises(ReplayError, match=r"after close\(\)"):
        writer.append(record(0))


def test_a_record_larger_than_a_segment_has_one_of_its_own(tmp_path: Path) -> None:
    with SegmentWriter(tmp_path, SMALL) as writer:
        writer.append({"states": np.zeros(10_000)})
        writer.append(record(7))
    sizes = [len(segment["states"]) for segment in read_segments(tmp_path)]
    assert sizes == [10_000, 3]


def test_objects_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="`names` is not numeric"):
        encode({"names": np.array(["a"], object)})

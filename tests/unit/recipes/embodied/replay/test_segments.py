"""Recordings on disk: whatever a crash leaves, all records before are there."""

from __future__ import annotations

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


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def record(number: int) -> dict[str, Any]:
    return {"states": np.arange(3, dtype=np.float32) + number, "images": np.full((2, 2, 3), number, np.uint8)}


def written(folder: Path, count: int) -> None:
    writer = SegmentWriter(folder)
    for number in range(count):
        writer.append(record(number))


def of_earlier_version(folder: Path, *counts: int) -> None:
    """Write files of several records each, behind which room was reserved."""
    folder.mkdir(exist_ok=True)
    first = 0
    for index, count in enumerate(counts):
        records = [encode(record(number)) for number in range(first, first + count)]
        (folder / f"segment-{index + 1:08d}.rlr").write_bytes(MAGIC + b"".join(records))
        first += count


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


def test_segment_cut_at_any_byte_keeps_earlier_records(tmp_path: Path) -> None:
    of_earlier_version(tmp_path / "whole", 3)
    (file,) = segments_of(tmp_path / "whole")
    content, size = file.read_bytes(), len(encode(record(0)))
    for cut in range(len(content) + 1):
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / file.name).write_bytes(content[:cut])
        whole = max(0, cut - len(MAGIC)) // size
        damages: list[Damage] = []
        assert numbers(folder, damages) == [*range(whole)], cut
        torn = cut not in {0, *(len(MAGIC) + number * size for number in range(4))}
        assert len(damages) == torn, cut


def test_room_that_was_reserved_is_no_damage(tmp_path: Path) -> None:
    of_earlier_version(tmp_path, 3)
    with segments_of(tmp_path)[0].open("ab") as stream:
        stream.write(bytes(4096))
    damages: list[Damage] = []
    assert numbers(tmp_path, damages) == [0, 1, 2]
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
    before = 0 if at < len(MAGIC) + len(encode(record(0))) else 1
    assert numbers(folder, damages) == [*range(before), 2, 3]
    assert [damage.file for damage in damages] == [first]
    assert str(first) in str(damages[0])


def test_a_writer_that_was_killed_has_lost_nothing(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        writer = SegmentWriter(tmp_path)
        for number in range(3):
            writer.append(record(number))
        (tmp_path / f".{segments_of(tmp_path)[0].name}.1.ab.part").write_bytes(MAGIC)
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    damages: list[Damage] = []
    written(tmp_path, 1)
    assert numbers(tmp_path, damages) == [0, 1, 2, 0]
    assert not damages
    assert len(segments_of(tmp_path)) == 4
    assert not list(tmp_path.glob(".*.part"))


def test_a_full_disk_is_told_once_before_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    left = [2**30, 2**30, 2**20, 2**20]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, left.pop(0)))
    warnings: list[str] = []
    writer = SegmentWriter(tmp_path, warnings.append)
    for count in (0, 1, 1):
        writer.append(record(0))
        assert len(warnings) == count
    assert "recording stops" in warnings[0]


def test_two_runs_do_not_record_over_each_other(tmp_path: Path) -> None:
    one = SegmentWriter(tmp_path)
    one.append(record(0))
    unfinished = tmp_path / ".segment-00000002.rlr.1.ab.part"
    unfinished.write_bytes(MAGIC)
    with pytest.raises(ReplayError, match="another run records here"):
        SegmentWriter(tmp_path)
    assert unfinished.exists()
    # Where locks are not kept, as on some network file systems.
    (tmp_path / "segment-00000002.rlr").write_bytes(MAGIC)
    with pytest.raises(ReplayError, match="another run records here"):
        one.append(record(1))
    assert numbers(tmp_path) == [0]


def test_objects_are_never_written(tmp_path: Path) -> None:
    with pytest.raises(ReplayError, match="`names` is not numeric"):
        encode({"names": np.array(["a"], object)})

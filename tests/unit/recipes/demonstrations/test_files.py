"""Files of data sets by their outer form, `recipes.demonstrations.lerobot.set_files`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.lerobot.set_files import check_files, check_hdf5
from recipes.demonstrations.lerobot.set_info import Feature, read_info
from recipes.demonstrations.lerobot.writer import DatasetWriter

FEATURES = {
    "observation.state": Feature("float32", (2,)),
    "observation.images.main": Feature("video", (16, 16, 3)),
    "action": Feature("float32", (1,)),
}
ROWS, TASKS, EPISODES = (
    "data/chunk-000/file-000.parquet",
    "meta/tasks.parquet",
    "meta/episodes/chunk-000/file-000.parquet",
)
VIDEO = "videos/observation.images.main/chunk-000/file-000.mp4"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    with DatasetWriter(tmp_path / "set", 10, FEATURES) as writer:
        columns = {
            name: np.zeros((4, *value.shape), np.uint8 if value.is_camera else np.float32)
            for name, value in FEATURES.items()
        }
        writer.add(columns, "do it")
    return tmp_path / "set"


def box(kind: bytes, content: bytes = b"", wide: bool = False) -> bytes:
    head = struct.pack(">I4sQ", 1, kind, 16 + len(content)) if wide else struct.pack(">I4s", 8 + len(content), kind)
    return head + content


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def test_what_was_recorded_is_whole(folder: Path) -> None:
    check_files(folder, read_info(folder))


@pytest.mark.parametrize("name", [ROWS, TASKS, EPISODES, VIDEO])
@pytest.mark.parametrize(
    "spoil", [None, lambda data: b"", cut, lambda data: bytes(len(data))], ids=["missing", "empty", "cut", "zeros"]
)
def test_a_file_that_is_missing_or_damaged_is_named(
    folder: Path, name: str, spoil: Callable[[bytes], bytes] | None
) -> None:
    file = folder / name
    if spoil is None:
        file.unlink()
    else:
        file.write_bytes(spoil(file.read_bytes()))
    with pytest.raises(DatasetError) as raised:
        check_files(folder, read_info(folder))
    assert raised.value.where is not None
    # Of a missing one the pattern is told, where another could have had its place.
    assert Path(raised.value.where).parent.parent == file.parent.parent or raised.value.where == str(file)
    assert raised.value.help == "copy the complete data set again"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (box(b"ftyp") + box(b"mdat", b"pictures") + box(b"moov"), None),
        (box(b"ftyp") + box(b"mdat", b"pictures", wide=True) + box(b"moov"), None),
        (box(b"ftyp") + box(b"moov") + struct.pack(">I4s", 0, b"mdat") + b"up to the end", None),
        (box(b"ftyp") + box(b"mdat", b"pictures"), "no index of its frames"),
        (box(b"ftyp") + box(b"mdat", b"pictures")[:-3], "cut off: 3 of"),
        (box(b"moov") + box(b"ftyp"), "starts with"),
        (box(b"ftyp") + struct.pack(">I4s", 5, b"mdat") + bytes(16), "damaged"),
        (box(b"ftyp") + struct.pack(">I4sQ", 1, b"mdat", 0) + bytes(16), "damaged"),
        (b"<!DOCTYPE html> not found", "starts with"),
    ],
)
def test_an_mp4_is_judged_by_its_boxes(folder: Path, content: bytes, why: str | None) -> None:
    (folder / VIDEO).write_bytes(content)
    if why is None:
        check_files(folder, read_info(folder))
        return
    with pytest.raises(DatasetError, match="not a complete mp4") as raised:
        check_files(folder, read_info(folder))
    assert why in (raised.value.why or "")


def test_hdf5_is_known_by_its_signature(tmp_path: Path) -> None:
    file = tmp_path / "demo.hdf5"
    for begin in (b"", bytes(512)):
        file.write_bytes(begin + b"\x89HDF\r\n\x1a\n" + bytes(100))
        check_hdf5(file)
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1")
    with pytest.raises(DatasetError, match="not an HDF5 file"):
        check_hdf5(file)

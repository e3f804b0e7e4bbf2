"""Checks of a data set's files by their first and last bytes, without format libraries."""

from __future__ import annotations

import re
import struct
from glob import escape
from pathlib import Path
from typing import Final

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.lerobot.set_info import (
    DATA_FILES,
    EPISODE_LINES,
    EPISODES_FILES,
    TASK_LINES,
    TASKS,
    DatasetInfo,
)
from rlinf_core.foreign.files import open_regular

WHOLE: Final = "copy the complete data set again"
AGREE: Final = "correct the invalid file, or convert the data set again"
_PARQUET: Final = b"PAR1"
_HDF5: Final = b"\x89HDF\r\n\x1a\n"
# A file may begin with a block of the user's own, of one of these sizes.
_HDF5_OFFSETS: Final = (0, 512, 1024, 2048)
# Of a box of an mp4: its length, its kind, and its length again where that needs 64 bits.
_BOX: Final = struct.Struct(">I4sQ")


def check_files(folder: Path, info: DatasetInfo) -> None:
    """Check that the files of a LeRobotDataset exist and are complete by their container format; no row is read.

    Raises:
        DatasetError: one is missing, cut off, or of another kind.
    """
    patterns = [("rows", DATA_FILES), *([] if info.is_listed else [("list of episodes", EPISODES_FILES)])]
    for what, pattern in patterns:
        files = sorted(folder.glob(pattern))
        if not files:
            message = f"the data set has no {what}: it has no Parquet file for them"
            raise DatasetError(message, where=str(folder / pattern), help=WHOLE)
        for file in files:
            _check_parquet(file)
    if info.is_listed:
        for name in (TASK_LINES, EPISODE_LINES):
            if not (folder / name).is_file():
                raise DatasetError("a file of the data set is missing", where=str(folder / name), help=WHOLE)
    else:
        _check_parquet(folder / TASKS)
    if not info.total_frames:
        raise DatasetError("the data set has no rows", where=str(folder), help="record or convert it again")
    for files in videos(folder, info).values():
        for file in files:
            fault = _fault_of_mp4(file) if file.suffix == ".mp4" else None
            if fault is not None:
                raise DatasetError("a video is not a complete mp4 file", where=str(file), why=fault, help=WHOLE)


def videos(folder: Path, info: DatasetInfo) -> dict[str, list[Path]]:
    """Return the video files of each camera with videos, by feature name.

    Raises:
        DatasetError: those of a camera are missing.
    """
    cameras = info.colours(str(folder))
    files: dict[str, list[Path]] = {}
    for name in (name for name in cameras if info.features[name].dtype == "video"):
        numbers = r"\{(chunk_index|file_index|episode_chunk|episode_index)[^}]*\}"
        pattern = re.sub(numbers, "*", info.video_path.replace("{video_key}", escape(name)))
        files[name] = sorted(folder.glob(pattern))
        if not files[name]:
            message = f"the videos of the camera `{cameras[name]}` are missing"
            raise DatasetError(message, where=str(folder / pattern), help=WHOLE)
    return files


def check_hdf5(file: Path) -> None:
    """Check that a file begins as HDF5 does.

    Raises:
        DatasetError: it does not, or cannot be read.
    """
    try:
        with open_regular(file) as opened:
            begin = opened.read(_HDF5_OFFSETS[-1] + len(_HDF5))
    except OSError as error:
        raise _unreadable(file, error) from error
    if not any(begin[offset:].startswith(_HDF5) for offset in _HDF5_OFFSETS):
        raise DatasetError(
            "the file is not an HDF5 file", where=str(file), why=_not_a(begin), help="copy the file again"
        )


def _check_parquet(file: Path) -> None:
    try:
        with open_regular(file) as opened:
            begin = opened.read(len(_PARQUET))
            end = opened.seek(0, 2)
            opened.seek(max(0, end - len(_PARQUET)))
            last = opened.read()
    except FileNotFoundError as error:
        raise DatasetError("a file of the data set is missing", where=str(file), help=WHOLE) from error
    except OSError as error:
        raise _unreadable(file, error) from error
    if begin != _PARQUET or last != _PARQUET or end < 3 * len(_PARQUET):
        why = _not_a(begin) if begin != _PARQUET else "its end is missing"
        raise DatasetError(
            "a file of the data set is not a complete Parquet file", where=str(file), why=why, help=WHOLE
        )


def _fault_of_mp4(file: Path) -> str | None:
    """Return why a file is not a complete mp4, by its boxes (ISO/IEC 14496-12); None: no fault was detected."""
    kinds: set[bytes] = set()
    try:
        with open_regular(file) as opened:
            at, size = 0, opened.seek(0, 2)
            while at < size:
                opened.seek(at)
                header = opened.read(_BOX.size)
                length, kind, large = _BOX.unpack(header.ljust(_BOX.size, b"\0"))
                if at == 0 and kind != b"ftyp":
                    return _not_a(header)
                # 0: up to the end of the file; 1: the length is too large for its place.
                at += {0: size - at, 1: large}.get(length, length)
                if length in range(2, 8) or (length == 1 and large < _BOX.size):
                    return f"at byte {at} of {size} it is damaged"
                if at > size:
                    return f"it is cut off: {at - size} of at least {at} bytes are missing"
                kinds.add(kind)
    except OSError as error:
        raise _unreadable(file, error) from error
    if not kinds:
        return "it is empty"
    return None if b"moov" in kinds else "it has no index of its frames (`moov`): the writer did not finish"


def _not_a(begin: bytes) -> str:
    return f"it starts with {begin[:8]!r}" if begin.strip(b"\0") else "it is empty, or starts with zeros"


def _unreadable(file: Path, error: OSError) -> DatasetError:
    return DatasetError("the file cannot be read", where=str(file), why=error.strerror or str(error))

"""Files of a data set: a completeness check by their first and last bytes, and the tables in them."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping
from glob import escape
from pathlib import Path
from typing import Any, Final, cast

from recipes.demonstrations.columns import DatasetError, needed
from recipes.demonstrations.lerobot.set_info import (
    DATA_FILES,
    EPISODE_LINES,
    EPISODES_FILES,
    TASK_LINES,
    TASKS,
    DatasetInfo,
)
from recipes.training.parquet_claims import take_parquet
from rlinf_core.foreign.budget import VALUE_BYTES, Budget, OverBudgetError
from rlinf_core.foreign.files import open_regular, read_bounded
from rlinf_core.foreign.strict_json import BadJsonError, load_json, wide_encoding

WHOLE: Final = "copy the complete data set again"
AGREE: Final = "correct the invalid file, or convert the data set again"
_PARQUET: Final = b"PAR1"
_HDF5: Final = b"\x89HDF\r\n\x1a\n"
# A file may begin with a block of the user's own, of one of these sizes.
_HDF5_OFFSETS: Final = (0, 512, 1024, 2048)
# The header of an mp4 box: its length, its kind, and its length again if that needs 64 bits.
_BOX: Final = struct.Struct(">I4sQ")


def check_files(folder: Path, info: DatasetInfo) -> None:
    """Check that the files of a LeRobotDataset exist and are complete by their container format; no row is read.

    Raises:
        DatasetError: a file is missing, truncated, or of another format.
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
        DatasetError: the videos of a camera are missing.
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
        DatasetError: the file begins otherwise, or cannot be read.
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
                # Length 0: up to the end of the file. Length 1: the length follows in 64 bits.
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


def entry_of(row: Mapping[str, Any], name: str, file: Path) -> Any:
    """Return the entry `name` of a row of `file`.

    Raises:
        DatasetError: the row has none.
    """
    if row.get(name) is None:
        raise DatasetError(f"an entry has no `{name}`", where=str(file), help=WHOLE)
    return row[name]


def whole_entry_of(row: Mapping[str, Any], name: str, file: Path) -> int:
    """Return the entry `name` of a row of `file`, a whole number.

    Raises:
        DatasetError: the row has none, or something else.
    """
    value = entry_of(row, name, file)
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value // 1:
        raise DatasetError(f"the `{name}` of an entry is `{value}`, not a whole number", where=str(file), help=AGREE)
    return int(value)


def read_json_lines(file: Path) -> list[Mapping[str, Any]]:
    """Return the objects of a file of JSON lines.

    Raises:
        DatasetError: it is missing, or a line is not an object.
    """
    rows: list[Mapping[str, Any]] = []
    try:
        content = read_bounded(file, 1 << 32)
        if (other := wide_encoding(content)) is not None:
            raise BadJsonError(f"the file is {other} text, not UTF-8")
        for number, line in enumerate(content.decode("utf-8-sig").splitlines(), 1):
            row: object = load_json(line, non_finite=True) if line.strip() else {}
            if not isinstance(row, dict):
                raise DatasetError("a line is not a JSON object", where=f"{file}:{number}", help=WHOLE)
            if row:
                rows.append(cast("Mapping[str, Any]", row))
    except FileNotFoundError as error:
        raise DatasetError("a file of the data set is missing", where=str(file), help=WHOLE) from error
    except OSError as error:
        raise DatasetError("a file cannot be read", where=str(file), why=error.strerror, help=WHOLE) from error
    except ValueError as error:
        raise DatasetError("a file cannot be read as JSON lines", where=str(file), why=str(error)) from error
    return rows


def read_schema(file: Path) -> Any:
    """Return the schema of a Parquet file.

    Raises:
        DatasetError: it is missing or damaged.
    """
    return _arrow(file, lambda parquet: parquet.read_schema(str(file)))


def read_parquet(
    file: Path, columns: list[str] | None = None, budget: Budget | None = None, value: int = VALUE_BYTES
) -> Any:
    """Return a Parquet file, or some of its columns, as an Arrow table.

    Args:
        file: the file.
        columns: the columns; None: all.
        budget: the budget of all files of the table; None: one for this file alone.
        value: the bytes of a value, without those of its text.

    Raises:
        DatasetError: it is missing or damaged, or claims more than the budget.
    """

    def read(parquet: Any) -> Any:
        take_parquet(parquet, file, budget or Budget.of_files(file), value, columns=columns)
        return parquet.read_table(str(file), columns=columns, partitioning=None)

    return _arrow(file, read)


def _arrow(file: Path, read: Callable[[Any], Any]) -> Any:
    parquet = needed("pyarrow.parquet", "a LeRobotDataset")
    if not file.is_file():
        raise DatasetError("a file of the data set is missing", where=str(file), help=WHOLE)
    try:
        return read(parquet)
    except OverBudgetError as error:
        raise DatasetError(f"a file of the data set {error}", where=str(file), help=WHOLE) from error
    except Exception as error:  # pyarrow's errors have no common base class
        raise DatasetError(
            "a file of the data set cannot be read",
            where=str(file),
            why=f"{type(error).__name__}: {error}".splitlines()[0],
            help=WHOLE,
        ) from error

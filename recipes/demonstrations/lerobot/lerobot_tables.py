"""Rows and instructions of LeRobotDataset folders, versions 2 and 3, checked against the list of episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError, needed
from recipes.demonstrations.demonstrations import Rows
from recipes.demonstrations.lerobot.episode_list import Episode
from recipes.demonstrations.lerobot.set_files import (
    AGREE,
    WHOLE,
    entry_of,
    read_json_lines,
    read_parquet,
    read_schema,
    whole_entry_of,
)
from recipes.demonstrations.lerobot.set_info import DATA_FILES, TASK_LINES, TASKS, DatasetInfo
from recipes.training.arrays import Array
from rlinf_core.foreign.budget import Budget

_NUMBER_BYTES = 8
# Added columns: the file of a row, and its number in that file.
_FILE, _ROW = "__file", "__row"


class RowTable:
    """The rows of a data set, by `index`.

    Args:
        table: the Arrow table.
        files: the files that the table was read from.
        folder: the folder of the data set.
        info: the description of the data set.
    """

    def __init__(self, table: Any, files: Sequence[Path], folder: Path, info: DatasetInfo) -> None:
        self.table, self.files, self._folder, self._info = table, files, folder, info

    def __len__(self) -> int:
        return len(self.table)

    def __contains__(self, name: str) -> bool:
        return name in self.table.column_names

    def place(self, row: int) -> str:
        """Return the file that holds a row, and the row's number in it."""
        return f"{self.files[self.table.column(_FILE)[row].as_py()]}, row {self.table.column(_ROW)[row].as_py()}"

    def index(self, name: str) -> NDArray[np.int64]:
        """Return one of the index columns, [N].

        Raises:
            DatasetError: a row lacks its number, or has another value.
        """
        column = self.table.column(name)
        if column.null_count:
            raise DatasetError(f"`{name}` is missing in {column.null_count} rows", where=str(self._folder), help=WHOLE)
        values = np.asarray(column).reshape(-1)
        if values.dtype == object:  # lists of one number
            values = np.array([value[0] for value in values])
        if name == "timestamp" and values.dtype.kind in "iuf":
            return values
        with np.errstate(invalid="ignore"):
            whole = values.astype(np.int64) if values.dtype.kind in "iuf" else None
        wrong = [0] if whole is None else np.flatnonzero(whole != values)
        if whole is None or len(wrong):
            row = int(wrong[0])
            message = (
                f"the `{name}` of a row is `{values[row]}`, not a {'time' if name == 'timestamp' else 'whole number'}"
            )
            raise DatasetError(message, where=self.place(row), help=AGREE)
        return whole

    def numbers(self, name: str) -> Array:
        """Return a column of numbers as [N, size].

        Raises:
            DatasetError: a row has another number of values, a missing value, or values that are not numbers.
        """
        column, size = self.table.column(name).combine_chunks(), self._info.features[name].size
        if not len(column):
            raise DatasetError("the data set has no rows", where=str(self._folder))
        lengths = np.ones(len(column), np.int64)
        while hasattr(column.type, "value_type"):
            lengths = _inner_lengths(column, lengths)
            column = column.flatten()
        wrong = np.flatnonzero(lengths != size)
        if len(wrong):
            row = int(wrong[0])
            raise DatasetError(
                f"`{name}` has {lengths[row]} numbers in a row; its description says {size}",
                where=self.place(row),
                help="correct `meta/info.json`, or convert the data set again",
            )
        if column.null_count:
            row = int(np.flatnonzero(np.asarray(column.is_null()))[0]) // size
            raise DatasetError(f"`{name}` is not a number", where=self.place(row), help="leave out its episode")
        values = np.asarray(column)
        if values.dtype.kind not in "fiub":
            message = f"`{name}` holds `{column.type}` instead of numbers"
            raise DatasetError(message, where=str(self._folder), help="convert the data set again")
        return values.reshape(len(self.table), size)


def _inner_lengths(column: Any, outer: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of innermost values per row, one list level below the level that `outer` counts."""
    compute = needed("pyarrow.compute", "a LeRobotDataset")
    sizes = np.asarray(compute.fill_null(compute.list_value_length(column), 0)).astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(sizes)))
    last = np.cumsum(outer)
    return ends[last] - ends[last - outer]


def read_rows(folder: Path, info: DatasetInfo, episodes: Sequence[Episode], *, pictures: bool) -> RowTable:
    """Return the rows of a data set, checked against its list of episodes.

    Args:
        folder: the folder of the data set.
        info: the description of the data set.
        episodes: the episodes by number.
        pictures: also read the images in the Parquet files.

    Raises:
        DatasetError: files are missing or damaged, or contradict each other.
    """
    arrow = needed("pyarrow", "a LeRobotDataset")
    files = sorted(folder.glob(DATA_FILES))
    hidden = {"video"} if pictures else {"video", "image"}
    names = [name for name, feature in info.features.items() if feature.dtype not in hidden]
    tables: list[Any] = []
    budget = Budget.of_files(*files)
    for number, file in enumerate(files):
        schema = read_schema(file)
        missing = next((name for name in (*names, "index") if name not in schema.names), None)
        if missing is not None:
            raise DatasetError(f"the rows have no column `{missing}`", where=str(file), help=WHOLE)
        columns = [*names, *(name for name in _NUMBERED if name in schema.names)]
        table = read_parquet(file, columns, budget, _NUMBER_BYTES)
        table = table.append_column(_FILE, arrow.array(np.full(len(table), number)))
        tables.append(table.append_column(_ROW, arrow.array(np.arange(len(table)))))
    if not tables:
        raise DatasetError("the data set has no rows", where=str(folder / DATA_FILES), help=WHOLE)
    try:
        joined = arrow.concat_tables(tables, promote_options="permissive").sort_by("index")
    except arrow.ArrowException as error:
        raise DatasetError(
            "the data files have different columns", where=str(folder), why=str(error), help=AGREE
        ) from error
    rows = RowTable(joined, files, folder, info)
    _check_counts(folder, info, rows, episodes)
    _check_borders(rows, episodes)
    _check_times(info, rows, episodes)
    return rows


_NUMBERED = ("timestamp", "frame_index", "episode_index", "index", "task_index")


def _check_counts(folder: Path, info: DatasetInfo, rows: RowTable, episodes: Sequence[Episode]) -> None:
    listed = sum(episode.length for episode in episodes)
    if len(rows) != listed or len(rows) != info.total_frames or len(episodes) != info.total_episodes:
        raise DatasetError(
            f"the data set claims {info.total_frames} rows of {info.total_episodes} episodes, but has {len(rows)} rows"
            f" of {len(episodes)}",
            where=str(folder),
            why=None if listed == len(rows) else f"the list of episodes claims {listed} rows",
            help=WHOLE,
        )


def _check_borders(rows: RowTable, episodes: Sequence[Episode]) -> None:
    """Check the file, episode and frame of each row against the list of episodes."""
    index = rows.index("index")
    wrong = np.flatnonzero(index != np.arange(len(rows)))
    if len(wrong):
        row = int(wrong[0])
        message = f"the `index` of a row is {index[row]}, but {row} rows precede it"
        raise DatasetError(message, where=rows.place(row), help=AGREE)
    lengths = [episode.length for episode in episodes]
    for name, listed in (
        ("episode_index", np.repeat([episode.number for episode in episodes], lengths)),
        ("frame_index", np.concatenate([np.arange(length) for length in lengths])),
    ):
        if name not in rows:
            continue
        written = rows.index(name)
        wrong = np.flatnonzero(written != listed)
        if len(wrong):
            row = int(wrong[0])
            raise DatasetError(
                f"the `{name}` of a row is {written[row]}; the list of episodes says {listed[row]}",
                where=rows.place(row),
                help=AGREE,
            )
    files = {file: number for number, file in enumerate(rows.files)}
    held = np.asarray(rows.table.column(_FILE))
    wrong = np.flatnonzero(held != np.repeat([files.get(episode.rows, -1) for episode in episodes], lengths))
    if len(wrong):
        row = int(wrong[0])
        episode = episodes[int(np.searchsorted(np.cumsum(lengths), row, side="right"))]
        message = f"episode {episode.number} is listed with its rows in `{episode.rows}`, but one of them is elsewhere"
        raise DatasetError(message, where=rows.place(row), help=AGREE)


def _check_times(info: DatasetInfo, rows: RowTable, episodes: Sequence[Episode]) -> None:
    """Check that rows are 1 / fps apart."""
    if "timestamp" not in rows:
        return
    times = rows.index("timestamp")
    frames = np.concatenate([np.arange(episode.length) for episode in episodes])
    # A float32 of many seconds is inexact.
    away = np.abs(times - frames / info.fps) - np.abs(times) * 1e-6
    wrong = np.flatnonzero(~(away <= 0.25 / info.fps))
    if len(wrong):
        row = int(wrong[0])
        raise DatasetError(
            f"row {row} is at {times[row]:.3f} s, but {info.fps:g} rows per second would put it at"
            f" {frames[row] / info.fps:.3f} s",
            where=rows.place(row),
            help="correct `fps` in `meta/info.json`, or convert the data set again",
        )


def read_instructions(
    folder: Path, info: DatasetInfo, rows: RowTable, episodes: Sequence[Episode]
) -> tuple[tuple[str, ...], Rows]:
    """Return the distinct instructions, and the index of each row's instruction, int64 [N].

    Raises:
        DatasetError: a row's `task_index` is unknown, or its episode lists other instructions.
    """
    known = _tasks(folder, info)
    texts = tuple(dict.fromkeys(known.values()))
    if "task_index" not in rows:
        if len(known) != 1:
            message = f"the rows have no `task_index`, but the data set has {len(known)} instructions"
            raise DatasetError(message, where=str(folder), help=WHOLE)
        return texts, np.zeros(len(rows), np.int64)
    numbers, task_of = np.unique(rows.index("task_index"), return_inverse=True)
    unknown = next((place for place, number in enumerate(numbers.tolist()) if number not in known), None)
    if unknown is not None:
        row = int(np.flatnonzero(task_of == unknown)[0])
        listed = ", ".join(str(number) for number in sorted(known))
        raise DatasetError(
            f"the `task_index` of a row is {numbers[unknown]}, which has no instruction",
            where=rows.place(row),
            why=f"`{_tasks_file(info)}` has the numbers {listed}",
            help=AGREE,
        )
    position = np.array([texts.index(known[number]) for number in numbers.tolist()])
    instruction_of = position[task_of.reshape(-1)]
    first = 0
    for episode in episodes:
        numbers_shown: list[int] = np.unique(instruction_of[first : first + episode.length]).tolist()
        shown = {texts[index] for index in numbers_shown}
        if episode.tasks is not None and shown != set(episode.tasks):
            raise DatasetError(
                f"episode {episode.number} is listed with the instructions {_quoted(episode.tasks)}, but its rows have"
                f" {_quoted(sorted(shown))}",
                where=rows.place(first),
                help=AGREE,
            )
        first += episode.length
    return texts, instruction_of


def _quoted(texts: Sequence[str]) -> str:
    return ", ".join(f"`{text}`" for text in texts) or "none"


def _tasks_file(info: DatasetInfo) -> str:
    return TASK_LINES if info.is_listed else TASKS


def _tasks(folder: Path, info: DatasetInfo) -> dict[int, str]:
    file = folder / _tasks_file(info)
    column, entries = "task", list[Mapping[str, Any]]()
    if info.is_listed:
        entries = read_json_lines(file)
    else:
        table = read_parquet(file)
        column = "task" if "task" in table.column_names else "__index_level_0__"
        if column not in table.column_names or "task_index" not in table.column_names:
            raise DatasetError("the instructions of the data set are invalid", where=str(file))
        entries = table.to_pylist()
    known: dict[int, str] = {}
    for entry in entries:
        number, text = whole_entry_of(entry, "task_index", file), str(entry_of(entry, column, file))
        if known.setdefault(number, text) != text:
            message = f"`task_index` {number} is both `{known[number]}` and `{text}`"
            raise DatasetError(message, where=str(file), help=AGREE)
    return known

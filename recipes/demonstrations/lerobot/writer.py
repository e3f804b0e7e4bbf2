"""Writes LeRobotDataset folders, version 3.

A data set is written beside its folder, and renamed to it once complete. Rows are in Parquet files of about 100 MB,
with a row group for each episode; images are PNG within them, or an mp4 for each episode and camera.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError, needed
from recipes.demonstrations.demonstrations import Statistics
from recipes.demonstrations.lerobot.set_info import (
    CHUNK_SIZE,
    EPISODES_PATH,
    INDICES,
    INFO,
    ORIGIN,
    STATISTICS,
    TASKS,
    DatasetInfo,
    Feature,
)
from recipes.demonstrations.pictures import encoded, write_video
from recipes.training.arrays import Array
from rlinf_core.foreign.files import write_fault

_FILE_BYTES: Final = 100 * 2**20
QUANTILES: Final[Mapping[str, float]] = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}


def of_numbers(rows: Array) -> Statistics:
    """Return statistics of rows [N, ...], elementwise; with the population standard deviation."""
    values = rows.astype(np.float64).reshape(len(rows), *(rows.shape[1:] or (1,)))
    quantiles = np.quantile(values, list(QUANTILES.values()), axis=0)
    return {
        "min": values.min(axis=0),
        "max": values.max(axis=0),
        "mean": values.mean(axis=0),
        "std": values.std(axis=0),
        "count": np.array([len(rows)]),
        **dict(zip(QUANTILES, quantiles, strict=True)),
    }


class PictureStatistics:
    """Image statistics by color, from exact counts of the 256 values."""

    def __init__(self) -> None:
        self._counts = np.zeros((3, 256), np.int64)
        self._pictures = 0

    def add(self, pictures: NDArray[np.uint8]) -> None:
        """Add pictures [N, H, W, 3]."""
        self._pictures += len(pictures)
        for channel in range(3):
            self._counts[channel] += np.bincount(pictures[..., channel].ravel(), minlength=256)

    def merge(self, other: PictureStatistics) -> None:
        """Add the counts of another object."""
        self._counts += other._counts
        self._pictures += other._pictures

    def statistics(self) -> Statistics:
        """Return the statistics of values scaled to 0 to 1, each [3, 1, 1]."""
        levels = np.arange(256) / 255
        total = self._counts.sum(axis=1)
        mean = (self._counts * levels).sum(axis=1) / total
        variance = (self._counts * levels**2).sum(axis=1) / total - mean**2
        reached = self._counts.cumsum(axis=1) / total[:, None]
        present = self._counts > 0
        values = {
            "min": levels[present.argmax(axis=1)],
            "max": levels[255 - present[:, ::-1].argmax(axis=1)],
            "mean": mean,
            "std": np.sqrt(np.maximum(variance, 0)),
            **{name: levels[(reached >= share).argmax(axis=1)] for name, share in QUANTILES.items()},
        }
        return {**{name: value.reshape(3, 1, 1) for name, value in values.items()}, "count": np.array([self._pictures])}


class DatasetWriter:
    """Writes episodes into a new folder; leaving the block finalizes it with the episodes written so far.

    Args:
        folder: the folder of the data set; must not exist.
        fps: rows per second.
        features: the features by name; the columns of `INDICES` are added.
        robot_type: kind of robot, free text.
        origin: the origin of the episodes, written to `meta/rlinf.json`.

    Raises:
        DatasetError: the folder exists, or cannot be created.
    """

    def __init__(
        self,
        folder: Path,
        fps: float,
        features: Mapping[str, Feature],
        *,
        robot_type: str | None = None,
        origin: Mapping[str, Any] | None = None,
    ) -> None:
        check_new(folder)
        self._target = folder
        self._folder = folder.with_name(f".writing-{folder.name}")
        self._info = DatasetInfo(fps=fps, features=dict(features), robot_type=robot_type)
        self._origin = dict(origin or {})
        self._arrow = needed("pyarrow", "a LeRobotDataset")
        self._parquet = needed("pyarrow.parquet", "a LeRobotDataset")
        self._tasks: dict[str, int] = {}
        self._episodes: list[dict[str, Any]] = []
        self._columns: dict[str, list[Array]] = {}
        self._pictures = {name: PictureStatistics() for name in self._info.cameras}
        self._data: Any = None
        self._data_file = -1
        self._data_bytes = 0
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            (self._folder / "meta").mkdir(parents=True)
        except OSError as error:
            raise DatasetError(
                "the data set cannot be written", where=str(folder), why=write_fault(folder, error)
            ) from error

    def add(self, columns: Mapping[str, Array], tasks: Sequence[str] | str) -> None:
        """Write an episode.

        Args:
            columns: [T, ...] for every feature; images are uint8 [T, H, W, 3].
            tasks: the instruction of all rows, or one for each row.

        Raises:
            DatasetError: a column is missing, or has another shape than its feature; or the disk is full.
        """
        length = self._check(columns)
        texts = [tasks] * length if isinstance(tasks, str) else list(tasks)
        number, first = len(self._episodes), self._info.total_frames
        numbers: dict[str, Array] = {
            "timestamp": (np.arange(length) / self._info.fps).astype(np.float32),
            "frame_index": np.arange(length),
            "episode_index": np.full(length, number),
            "index": np.arange(first, first + length),
            "task_index": np.array([self._tasks.setdefault(text, len(self._tasks)) for text in texts]),
        }
        for name, feature in self._info.features.items():
            if not feature.is_camera:
                numbers[name] = columns[name].astype(feature.dtype)
        statistics: dict[str, Statistics] = {
            name: of_numbers(rows) for name, rows in numbers.items() if rows.dtype.kind in "fiub"
        }
        videos: dict[str, Any] = {}
        for name, feature in self._info.cameras.items():
            mine = PictureStatistics()
            mine.add(columns[name])
            self._pictures[name].merge(mine)
            statistics[name] = mine.statistics()
            if feature.dtype == "video":
                videos |= self._write_video(name, number, columns[name])
        self._write_rows(columns, numbers)
        for name, rows in numbers.items():
            self._columns.setdefault(name, []).append(rows)
        self._episodes.append(
            {
                "episode_index": number,
                "tasks": list(dict.fromkeys(texts)),
                "length": length,
                "data/chunk_index": self._data_file // CHUNK_SIZE,
                "data/file_index": self._data_file % CHUNK_SIZE,
                "dataset_from_index": first,
                "dataset_to_index": first + length,
                **videos,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                **{
                    f"stats/{name}/{key}": value
                    for name, statistic in statistics.items()
                    for key, value in statistic.items()
                },
            }
        )
        self._info = replace(self._info, total_frames=first + length, total_episodes=number + 1)

    def finish(self) -> None:
        """Write the metadata and move the folder into place; without episodes, remove everything.

        Raises:
            DatasetError: the files cannot be written, or the folder has come to exist meanwhile.
        """
        if self._data is not None:
            self._data.close()
            self._data = None
        if not self._episodes:
            shutil.rmtree(self._folder, ignore_errors=True)
            return
        check_new(self._target)
        try:
            self._write_meta()
            self._folder.rename(self._target)
        except OSError as error:
            why = write_fault(self._folder, error)
            raise DatasetError("the data set cannot be written", where=str(self._target), why=why) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.finish()

    def _check(self, columns: Mapping[str, Array]) -> int:
        lengths = {len(rows) for rows in columns.values()}
        if len(lengths) != 1 or lengths == {0}:
            raise DatasetError("an episode needs columns of one length, and at least one row", where=str(self._target))
        for name, feature in self._info.features.items():
            shape = columns[name].shape[1:] if name in columns else None
            if shape != feature.shape and not (shape == () and feature.shape == (1,)):
                has = "is missing" if shape is None else f"has rows of shape {list(shape)}"
                raise DatasetError(
                    f"the column `{name}` {has}; the data set has {list(feature.shape)}", where=str(self._target)
                )
        return lengths.pop()

    def _write_video(self, name: str, number: int, pictures: NDArray[np.uint8]) -> dict[str, Any]:
        chunk, file = divmod(number, CHUNK_SIZE)
        path = self._folder / self._info.video_path.format(video_key=name, chunk_index=chunk, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        info = write_video(path, pictures, self._info.fps)
        self._info = replace(self._info, video_info={**self._info.video_info, name: info})
        return {
            f"videos/{name}/chunk_index": chunk,
            f"videos/{name}/file_index": file,
            f"videos/{name}/from_timestamp": 0.0,
            f"videos/{name}/to_timestamp": len(pictures) / self._info.fps,
        }

    def _write_rows(self, columns: Mapping[str, Array], numbers: Mapping[str, Array]) -> None:
        arrow = self._arrow
        arrays: dict[str, Any] = {}
        for name, feature in self._info.features.items():
            if feature.dtype == "image":
                files = [encoded(picture) for picture in columns[name]]
                kind = arrow.struct([("bytes", arrow.binary()), ("path", arrow.string())])
                arrays[name] = arrow.array([{"bytes": image, "path": None} for image in files], kind)
                self._data_bytes += sum(map(len, files))
            elif not feature.is_camera:
                arrays[name] = _array(arrow, numbers[name], feature)
                self._data_bytes += numbers[name].nbytes
        for name in INDICES:
            arrays[name] = arrow.array(numbers[name])
        table = arrow.table(arrays)
        if self._data is None or self._data_bytes > _FILE_BYTES:
            if self._data is not None:
                self._data.close()
            self._data_file, self._data_bytes = self._data_file + 1, 0
            chunk, file = divmod(self._data_file, CHUNK_SIZE)
            path = self._folder / self._info.data_path.format(chunk_index=chunk, file_index=file)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._data = self._parquet.ParquetWriter(str(path), table.schema, compression="snappy")
        self._data.write_table(table)

    def _write_meta(self) -> None:
        arrow, parquet = self._arrow, self._parquet
        self._info = replace(self._info, total_tasks=len(self._tasks))
        (self._folder / INFO).write_text(json.dumps(self._info.as_json(), indent=4), encoding="utf-8")
        statistics = {name: of_numbers(np.concatenate(rows)) for name, rows in self._columns.items()}
        statistics |= {name: picture.statistics() for name, picture in self._pictures.items()}
        write_statistics(self._folder, statistics)
        parquet.write_table(_task_table(arrow, self._tasks), str(self._folder / TASKS))
        columns = {
            name: [
                value.tolist() if isinstance(value := episode[name], np.ndarray) else value
                for episode in self._episodes
            ]
            for name in self._episodes[0]
        }
        path = self._folder / EPISODES_PATH.format(chunk_index=0, file_index=0)
        path.parent.mkdir(parents=True)
        parquet.write_table(arrow.table(columns), str(path))
        origin = json.dumps({"schema": "rlinf.demonstrations/1", **self._origin}, indent=2)
        (self._folder / ORIGIN).write_text(origin + "\n", encoding="utf-8")


def check_new(folder: Path) -> None:
    """Refuse a folder that exists.

    Raises:
        DatasetError: the folder exists.
    """
    if folder.exists():
        raise DatasetError(
            "there is something at the place of the new data set already",
            where=str(folder),
            help="name another folder, or remove this one",
        )


def write_statistics(folder: Path, statistics: Mapping[str, Statistics]) -> None:
    """Write `meta/stats.json` of a data set."""
    listed = {name: {key: value.tolist() for key, value in statistic.items()} for name, statistic in statistics.items()}
    (folder / STATISTICS).write_text(json.dumps(listed, indent=4), encoding="utf-8")


def _array(arrow: Any, rows: Array, feature: Feature) -> Any:
    """Return a column as an Arrow array: numbers, or fixed-size lists."""
    if feature.shape == (1,):
        return arrow.array(rows.reshape(-1))
    flat = arrow.array(rows.reshape(-1))
    for size in reversed(feature.shape):
        flat = arrow.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _task_table(arrow: Any, tasks: Mapping[str, int]) -> Any:
    """Return the table of instructions, with the pandas metadata that LeRobot expects."""
    table = arrow.table({"task_index": list(tasks.values()), "task": list(tasks)})
    number = {"name": "task_index", "field_name": "task_index", "pandas_type": "int64", "numpy_type": "int64"}
    text = {"name": "task", "field_name": "task", "pandas_type": "unicode", "numpy_type": "object"}
    meaning = {
        "index_columns": ["task"],
        "column_indexes": [],
        "columns": [{**number, "metadata": None}, {**text, "metadata": None}],
        "creator": {"library": "pyarrow", "version": arrow.__version__},
        "pandas_version": "2.2.0",
    }
    return table.replace_schema_metadata({"pandas": json.dumps(meaning)})

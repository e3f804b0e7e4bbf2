"""The description of a LeRobotDataset, `meta/info.json`, and the paths of its files. No heavy imports."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from recipes.demonstrations.columns import (
    ACTION,
    STATE,
    DatasetError,
    DatasetShape,
    Role,
    camera_names,
    column_of,
    is_depth,
    state_of,
)
from rlinf_core.foreign.files import read_bounded
from rlinf_core.foreign.strict_json import load_json_object

VERSION: Final = "v3.0"
# Versions with one file per episode, and a list of episodes in JSON lines.
_LISTED: Final = ("v2.0", "v2.1")
INFO: Final = "meta/info.json"
STATISTICS: Final = "meta/stats.json"
TASKS: Final = "meta/tasks.parquet"
# The origin of the episodes, in data sets that rlinf wrote.
ORIGIN: Final = "meta/rlinf.json"
TASK_LINES: Final = "meta/tasks.jsonl"
EPISODE_LINES: Final = "meta/episodes.jsonl"
EPISODES: Final = "meta/episodes"
EPISODES_FILES: Final = f"{EPISODES}/*/*.parquet"
DATA_FILES: Final = "data/*/*.parquet"
DATA_PATH: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
# The most files in one folder.
CHUNK_SIZE: Final = 1000

# The most values in one row of a feature: an image of 8192 x 8192, larger than any camera's.
_LARGEST_ROW: Final = 1 << 27

HDF5_ENDINGS: Final = (".hdf5", ".h5")

# The columns that every row has besides the features of its data set.
INDICES: Final = ("timestamp", "frame_index", "episode_index", "index", "task_index")


class Feature(NamedTuple):
    """A column of a data set.

    Attributes:
        dtype: a numpy dtype, or `image` (PNG within the Parquet file) or `video` (mp4).
        shape: the shape of one row; (H, W, 3) of an image.
        names: the names of the parts of a row.
    """

    dtype: str
    shape: tuple[int, ...]
    names: list[str] | None = None

    @property
    def is_camera(self) -> bool:
        """Whether its rows are pictures."""
        return self.dtype in ("image", "video")

    @property
    def size(self) -> int:
        """The number of values in a row."""
        return prod(self.shape)


@dataclass(frozen=True)
class DatasetInfo:
    """The content of `meta/info.json`.

    Attributes:
        fps: rows per second, not necessarily whole, as 29.97.
        features: the features by name; those in `INDICES` are left out.
        total_episodes: number of episodes.
        total_frames: number of rows.
        total_tasks: number of distinct instructions.
        robot_type: kind of robot, free text.
        data_path: pattern of Parquet files.
        video_path: pattern of videos.
        video_info: video settings, by feature.
        version: the version of the layout.
        chunk_size: the most files in one folder.
        splits: the range of episodes of each split, `first:end`, by name.
    """

    fps: float
    features: Mapping[str, Feature]
    total_episodes: int = 0
    total_frames: int = 0
    total_tasks: int = 0
    robot_type: str | None = None
    data_path: str = DATA_PATH
    video_path: str = VIDEO_PATH
    video_info: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    version: str = VERSION
    chunk_size: int = CHUNK_SIZE
    splits: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def is_listed(self) -> bool:
        """Whether each episode has its own files and a line in a JSON lines list, as before version 3."""
        return self.version in _LISTED

    @property
    def cameras(self) -> dict[str, Feature]:
        """Features whose rows are pictures, by name."""
        return {name: feature for name, feature in self.features.items() if feature.is_camera}

    def colours(self, where: str) -> dict[str, str]:
        """Return the camera of each feature usable by a policy: color or grey images of the current row.

        Raises:
            DatasetError: two features would be one camera, or images are stored as plain numbers.
        """
        raw = [name for name, feature in self.features.items() if "image" in name and not feature.is_camera]
        plain = next((name for name in raw if len(self.features[name].shape) == 3), None)
        if plain is not None:
            raise DatasetError(
                f"`{plain}` holds images as plain numbers, `{self.features[plain].dtype}`",
                where=where,
                help="convert the data set again, with the feature's dtype `image` or `video`",
            )
        return camera_names([name for name in self.cameras if name not in self.unseen], where)

    @property
    def unseen(self) -> list[str]:
        """Image features that policies do not use: depth, and images from after the action."""
        return [name for name in self.cameras if name.startswith("next.") or self._is_depth(name)]

    def _is_depth(self, name: str) -> bool:
        about = self.video_info.get(name, {})
        flags = [about.get(key) for key in ("video.is_depth_map", "is_depth_map")]
        return any(flag is True for flag in flags) or (is_depth(name) and self.features[name].shape[2:] != (3,))

    def action(self, where: str, columns: Mapping[Role, str]) -> str:
        """Return the name of the feature that holds actions.

        Raises:
            DatasetError: no feature holds actions, or several might.
        """
        name = column_of("action", self.features, columns, where)
        if name is None:
            raise DatasetError(f"the data set has no `{ACTION}`", where=where, help=f"it has {self._listed()}")
        self._check_numbers([name], where)
        return name

    def states(self, where: str, state_keys: Sequence[str]) -> list[str]:
        """Return the features of the state, by default `observation.state`.

        Raises:
            DatasetError: a feature does not exist.
        """
        usual = state_of(self.features)
        keys = [usual if key == STATE and usual else key for key in state_keys] or ([usual] if usual else [])
        missing = next((key for key in keys if key not in self.features), None)
        if missing is not None:
            raise DatasetError(f"the data set has no `{missing}`", where=where, help=f"it has {self._listed()}")
        self._check_numbers(keys, where)
        return keys

    def _check_numbers(self, names: Sequence[str], where: str) -> None:
        camera = next((name for name in names if self.features[name].is_camera), None)
        if camera is not None:
            dtype, shape = self.features[camera].dtype, list(self.features[camera].shape)
            raise DatasetError(
                f"`{camera}` is a camera, `{dtype}` of shape {shape}, and cannot be a part of states or an action",
                where=where,
                help="leave it out of `data.columns`: pictures, also of depth, are no numbers",
            )

    def _listed(self) -> str:
        return ", ".join(f"`{feature}`" for feature in self.features)

    def shape(
        self, where: str, state_keys: Sequence[str] = (), columns: Mapping[Role, str] | None = None
    ) -> DatasetShape:
        """Return the sizes of the rows, with states concatenated from some features.

        Raises:
            DatasetError: there is no such feature, or no `action`.
        """
        action = self.features[self.action(where, columns or {})]
        seen = self.colours(where)
        return DatasetShape(
            where,
            self.fps,
            action.size,
            action.dtype.startswith(("int", "uint")),
            sum(self.features[key].size for key in self.states(where, state_keys)),
            {camera: self.picture_shape(name) for name, camera in seen.items()},
        )

    def picture_shape(self, name: str) -> tuple[int, int, int]:
        """Return (H, W, 3) of a camera's images; grey ones are converted to RGB when read."""
        shape = self.features[name].shape
        return (shape[0], shape[1], 3)

    def as_json(self) -> dict[str, Any]:
        """Return the content of `meta/info.json`."""
        indices = {name: Feature("float32" if name == "timestamp" else "int64", (1,)) for name in INDICES}
        features: dict[str, dict[str, Any]] = {}
        for name, feature in {**self.features, **indices}.items():
            features[name] = {"dtype": feature.dtype, "shape": list(feature.shape), "names": feature.names}
            if name in self.video_info:
                features[name]["info"] = dict(self.video_info[name])
        return {
            "codebase_version": VERSION,
            "robot_type": self.robot_type,
            "total_episodes": self.total_episodes,
            "total_frames": self.total_frames,
            "total_tasks": self.total_tasks,
            "chunks_size": CHUNK_SIZE,
            "data_files_size_in_mb": 100,
            "video_files_size_in_mb": 200,
            "fps": self.fps,
            "splits": {"train": f"0:{self.total_episodes}"},
            "data_path": self.data_path,
            "video_path": self.video_path
            if any(feature.dtype == "video" for feature in self.features.values())
            else None,
            "features": features,
        }


def read_info(folder: Path) -> DatasetInfo:
    """Return the description of a data set.

    Raises:
        DatasetError: the folder holds no data set, one of another version, or a description that cannot be parsed.
    """
    file = folder / INFO
    if not os.path.isdir(folder):
        raise DatasetError(
            "the data set does not exist",
            where=str(folder),
            help="name a LeRobotDataset folder; `rlinf record` makes one",
        )
    if not os.path.isfile(file):
        raise DatasetError(
            f"the folder is not a LeRobotDataset: it has no `{INFO}`",
            where=str(folder),
            help="name the folder that contains `meta` and `data`",
        )
    try:
        said = load_json_object(read_bounded(file), non_finite=True)
        version = f"v{str(said['codebase_version']).removeprefix('v')}"
        if not version.startswith("v3") and version not in _LISTED:
            raise DatasetError(
                f"the data set has version {version}; versions 2.0, 2.1 and 3 are supported",
                where=str(file),
                help="convert it with LeRobot's own scripts",
            )
        fps = float(said["fps"])
        if not 0 < fps < math.inf:
            raise ValueError(f"`fps` is {said['fps']}")
        if not isinstance(said["features"], dict):
            raise ValueError("`features` is not a mapping of columns")
        columns = cast("dict[str, Any]", said["features"])
        described = {name: value for name, value in columns.items() if name not in INDICES}
        return DatasetInfo(
            fps=int(fps) if fps.is_integer() else fps,
            features={name: _feature(value) for name, value in described.items()},
            total_episodes=int(said["total_episodes"]),
            total_frames=int(said["total_frames"]),
            total_tasks=int(said["total_tasks"]),
            robot_type=said.get("robot_type"),
            data_path=str(said["data_path"]),
            video_path=str(said.get("video_path") or VIDEO_PATH),
            video_info={name: about for name, value in described.items() if (about := _about(value))},
            version=version if version in _LISTED else VERSION,
            chunk_size=int(said.get("chunks_size") or CHUNK_SIZE),
            splits={str(name): str(span) for name, span in cast("dict[str, Any]", said.get("splits") or {}).items()},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            "the description of the data set is invalid",
            where=str(file),
            why=str(error) if type(error) is ValueError else f"{type(error).__name__}: {error}",
            help="record or convert the data set again",
        ) from error


def _about(said: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a feature's video settings: `info`, or `video_info` in older data sets."""
    return said.get("info") or said.get("video_info") or {}


def _feature(said: Mapping[str, Any]) -> Feature:
    shape = tuple(int(size) for size in said["shape"])
    if any(size < 1 for size in shape) or prod(shape) > _LARGEST_ROW:
        raise ValueError(f"a feature has the shape {list(shape)}")
    named = cast("object", said.get("names"))
    names = [str(entry) for entry in cast("list[Any]", named)] if isinstance(named, list) else None
    if said["dtype"] in ("image", "video") and len(shape) not in (2, 3):
        raise ValueError(f"an image has the shape {list(shape)}")
    if said["dtype"] in ("image", "video") and len(shape) == 3 and shape[0] in (1, 3) and shape[2] not in (1, 3, 4):
        shape = (shape[1], shape[2], shape[0])  # some descriptions put channels first
    return Feature(str(said["dtype"]), shape, names)

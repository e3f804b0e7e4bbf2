"""The description of a LeRobotDataset, `meta/info.json`, and where its files are. Imports nothing heavy."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.shape import DatasetShape

VERSION: Final = "v3.0"
INFO: Final = "meta/info.json"
STATISTICS: Final = "meta/stats.json"
TASKS: Final = "meta/tasks.parquet"
EPISODES: Final = "meta/episodes"
EPISODES_FILES: Final = f"{EPISODES}/*/*.parquet"
DATA_FILES: Final = "data/*/*.parquet"
DATA_PATH: Final = "data/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
EPISODES_PATH: Final = "meta/episodes/chunk-{chunk_index:03d}/file-{file_index:03d}.parquet"
VIDEO_PATH: Final = "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4"
# Files in one folder, at most.
CHUNK_SIZE: Final = 1000

HDF5_ENDINGS: Final = (".hdf5", ".h5")

ACTION: Final = "action"
STATE: Final = "observation.state"
IMAGES: Final = "observation.images."
REWARD: Final = "next.reward"
SUCCESS: Final = "next.success"
# Whether somebody had taken over from the policy, and the action is theirs.
INTERVENTION: Final = "intervention"
# What every row has besides the features of its data set.
INDICES: Final = ("timestamp", "frame_index", "episode_index", "index", "task_index")


class Feature(NamedTuple):
    """A column of a data set.

    Attributes:
        dtype: of numpy, or `image` (PNG within the Parquet file) or `video` (mp4).
        shape: of one row; of a picture (H, W, 3).
        names: of the parts of a row.
    """

    dtype: str
    shape: tuple[int, ...]
    names: list[str] | None = None

    @property
    def is_camera(self) -> bool:
        """Whether its rows are pictures."""
        return self.dtype in ("image", "video")


@dataclass(frozen=True)
class DatasetInfo:
    """The content of `meta/info.json`.

    Attributes:
        fps: rows in a second.
        features: by name; those in `INDICES` are left out.
        total_episodes: number of episodes.
        total_frames: number of rows.
        total_tasks: number of different instructions.
        robot_type: kind of robot, free text.
        data_path: pattern of Parquet files.
        video_path: pattern of videos.
        video_info: by feature, what is known of its videos.
    """

    fps: int
    features: Mapping[str, Feature]
    total_episodes: int = 0
    total_frames: int = 0
    total_tasks: int = 0
    robot_type: str | None = None
    data_path: str = DATA_PATH
    video_path: str = VIDEO_PATH
    video_info: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])

    @property
    def cameras(self) -> dict[str, Feature]:
        """Features whose rows are pictures, by name."""
        return {name: each for name, each in self.features.items() if each.is_camera}

    def shape(self, where: str, state_keys: Sequence[str] = ()) -> DatasetShape:
        """Return the sizes of the rows, with states that are made up of some features.

        Raises:
            DatasetError: there is no such feature, or no `action`.
        """
        keys = state_keys or [key for key in (STATE,) if key in self.features]
        missing = [key for key in (ACTION, *keys) if key not in self.features]
        if missing:
            known = ", ".join(f"`{each}`" for each in self.features)
            raise DatasetError(f"the data set has no `{missing[0]}`", where=where, help=f"it has {known}")
        action = self.features[ACTION]
        seen = {name: each.shape for name, each in self.cameras.items() if name.startswith(IMAGES)}
        return DatasetShape(
            where,
            self.fps,
            prod(action.shape),
            action.dtype.startswith(("int", "uint")),
            sum(prod(self.features[key].shape) for key in keys),
            {name.removeprefix(IMAGES): cast("tuple[int, int, int]", shape) for name, shape in seen.items()},
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object of the file."""
        indices = {name: Feature("float32" if name == "timestamp" else "int64", (1,)) for name in INDICES}
        features: dict[str, dict[str, Any]] = {}
        for name, each in {**self.features, **indices}.items():
            features[name] = {"dtype": each.dtype, "shape": list(each.shape), "names": each.names}
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
            "video_path": self.video_path if any(each.dtype == "video" for each in self.features.values()) else None,
            "features": features,
        }


def read_info(folder: Path) -> DatasetInfo:
    """Return what a data set says of itself.

    Raises:
        DatasetError: the folder holds no data set, one of another version, or a description that cannot be understood.
    """
    file = folder / INFO
    if not os.path.isdir(folder):
        raise DatasetError(
            "the data set is not there",
            where=str(folder),
            help="name a LeRobotDataset folder; `rlinf record` makes one",
        )
    if not os.path.isfile(file):
        raise DatasetError(
            f"the folder is no LeRobotDataset: it has no `{INFO}`",
            where=str(folder),
            help="name the folder that holds `meta` and `data`",
        )
    try:
        said = cast("dict[str, Any]", json.loads(file.read_text(encoding="utf-8")))
        version = str(said["codebase_version"])
        if not version.startswith("v3"):
            raise DatasetError(
                f"the data set has version {version}, and version 3 is read",
                where=str(file),
                help="convert it with LeRobot's script `convert_dataset_v21_to_v30`",
            )
        described = {name: each for name, each in said["features"].items() if name not in INDICES}
        return DatasetInfo(
            fps=round(float(said["fps"])),
            features={name: _feature(each) for name, each in described.items()},
            total_episodes=int(said["total_episodes"]),
            total_frames=int(said["total_frames"]),
            total_tasks=int(said["total_tasks"]),
            robot_type=said.get("robot_type"),
            data_path=str(said["data_path"]),
            video_path=str(said.get("video_path") or VIDEO_PATH),
            video_info={name: each["info"] for name, each in described.items() if each.get("info")},
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            "the description of the data set cannot be understood",
            where=str(file),
            why=f"{type(error).__name__}: {error}",
            help="record or convert the data set again",
        ) from error


def _feature(said: Mapping[str, Any]) -> Feature:
    shape = tuple(int(size) for size in said["shape"])
    named = cast("object", said.get("names"))
    names = [str(each) for each in cast("list[Any]", named)] if isinstance(named, list) else None
    if said["dtype"] in ("image", "video") and len(shape) == 3 and shape[0] == 3 and shape[2] != 3:
        shape = (shape[1], shape[2], shape[0])  # some are described with their channels first
    return Feature(str(said["dtype"]), shape, names)

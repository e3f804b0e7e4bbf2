"""Cameras of LeRobotDataset folders: images in or beside Parquet files, and videos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.demonstrations import Camera, Rows
from recipes.demonstrations.lerobot.episode_list import Episode, rows_of_videos
from recipes.demonstrations.lerobot.set_files import WHOLE, videos
from recipes.demonstrations.lerobot.set_info import DatasetInfo
from recipes.demonstrations.pictures import decoded, frames_of, read_video
from rlinf_core.foreign.files import read_bounded

# Videos and episodes of a camera that are checked before a run; the others are checked when they are first read.
LOOKED_INTO: Final = 200


def encoded_camera(shape: tuple[int, int, int], folder: Path, name: str, column: Any) -> Camera:
    """Return a camera with encoded images in the Parquet files, or in files that they name.

    Args:
        shape: (H, W, 3).
        folder: the folder of the data set.
        name: the name of the feature.
        column: the Arrow column, with a struct of `bytes` and `path` for each row.
    """

    def read(rows: Rows) -> NDArray[np.uint8]:
        pictures = np.empty((len(rows), *shape), np.uint8)
        for place, row in enumerate(rows):
            cell: object = column[int(row)].as_py()
            try:
                picture = decoded(_bytes_of(cell, folder))
            except (DatasetError, OSError) as error:
                why = error.why or error.message if isinstance(error, DatasetError) else str(error)
                raise DatasetError(
                    f"the image in row {row}, `{name}`, cannot be decoded",
                    where=str(folder),
                    why=why,
                    help=(error.help if isinstance(error, DatasetError) else None) or WHOLE,
                ) from error
            pictures[place] = _of_shape(picture, shape, str(folder), name)
        return pictures

    return Camera(shape, read)


def _bytes_of(cell: object, folder: Path) -> bytes:
    """Return the bytes of the image file in a cell, or of the one below the data set's folder that it names."""
    parts: Mapping[str, Any] = cast("Mapping[str, Any]", cell) if isinstance(cell, Mapping) else {}
    if parts.get("bytes"):
        return parts["bytes"]
    path = parts.get("path")
    if not path:
        raise DatasetError("the row has neither `bytes` of an image nor the `path` of one")
    file = (folder / path).resolve()
    if not file.is_relative_to(folder.resolve()):
        raise DatasetError(f"`{path}` lies outside the data set")
    return read_bounded(file)


class CameraVideos:
    """The videos of one camera: a row's image is the frame at its time.

    Args:
        shape: (H, W, 3).
        name: the name of the feature.
        episodes: the episodes, with their videos.
        fps: rows per second.
    """

    def __init__(self, shape: tuple[int, int, int], name: str, episodes: Sequence[Episode], fps: float) -> None:
        self._shape, self._name, self._episodes, self._fps = shape, name, episodes, fps
        self._bounds = np.cumsum([0, *(episode.length for episode in episodes)])
        self._rows = rows_of_videos(episodes, name)
        self._new = set(self._rows)  # videos that have not been read yet

    def read(self, rows: Rows) -> NDArray[np.uint8]:
        """Return the images of some rows; consecutive rows of an episode are decoded together."""
        pictures = np.empty((len(rows), *self._shape), np.uint8)
        order = np.argsort(rows, kind="stable")
        episodes = np.searchsorted(self._bounds, rows[order], side="right") - 1
        breaks = np.flatnonzero((np.diff(rows[order]) > 1) | (np.diff(episodes) > 0)) + 1
        for places, (number, *_) in zip(np.split(order, breaks), np.split(episodes, breaks), strict=True):
            episode = self._episodes[int(number)]
            self._check(episode.videos[self._name].file)
            frames = rows[places] - self._bounds[number]
            first, last = int(frames[0]), int(frames[-1])
            pictures[places] = self._decoded(episode, first, last)[frames - first]
        return pictures

    def _check(self, file: Path) -> None:
        if file in self._new:
            self.check_count(file)
            for episode in self._episodes:
                if episode.videos[self._name].file == file:
                    self.check_ends(episode)
            self._new.discard(file)

    def check_count(self, file: Path) -> None:
        """Check that a video has a frame for each row of its episodes.

        Raises:
            DatasetError: frames are missing, or the video cannot be read.
        """
        count, rows = frames_of(file), self._rows.get(file, 0)
        if count is not None and count != rows:
            raise DatasetError(
                f"the video has {count} frames, but the episodes in it have {rows} rows",
                where=str(file),
                why="the pictures of episodes would be those of others",
                help="copy the complete data set again, or correct the list of episodes in `meta/episodes`",
            )

    def check_ends(self, episode: Episode) -> None:
        """Check that the first and the last frame of an episode have the right times and can be decoded.

        Raises:
            DatasetError: one of the two frames has another time, or cannot be decoded.
        """
        for frame in {0, episode.length - 1}:
            self._decoded(episode, frame, frame)

    def _decoded(self, episode: Episode, first: int, last: int) -> NDArray[np.uint8]:
        """Return some frames of an episode, uint8 [last - first + 1, H, W, 3]."""
        file, begin, _ = episode.videos[self._name]
        run: list[NDArray[np.uint8]] = []
        for time, picture in read_video(file, begin + first / self._fps, last - first + 1):
            wanted = begin + (first + len(run)) / self._fps
            if abs(time - wanted) > 0.5 / self._fps:
                raise DatasetError(
                    f"frame {first + len(run)} of episode {episode.number} should be at {wanted:.3f} s of its video,"
                    f" but the next frame is at {time:.3f} s",
                    where=str(file),
                    why=f"the data set states {self._fps:g} frames per second",
                    help="correct `fps` in `meta/info.json`, or convert the data set again",
                )
            run.append(_of_shape(picture, self._shape, str(file), self._name))
        if len(run) < last - first + 1:
            message = f"the video ends before frame {last} of episode {episode.number}"
            raise DatasetError(message, where=str(file), help=WHOLE)
        return np.stack(run)


def check_videos(folder: Path, info: DatasetInfo, episodes: Sequence[Episode]) -> None:
    """Check that each video has a frame for each row, and that episodes begin and end at the right frames.

    Damage in the middle of an episode is detected only when its frames are decoded.

    Raises:
        DatasetError: frames are missing, damaged, or at other times; or the package `av` is missing.
    """
    for name, files in videos(folder, info).items():
        camera = CameraVideos(info.picture_shape(name), name, episodes, info.fps)
        for file in files[:LOOKED_INTO]:
            camera.check_count(file)
        for episode in episodes[:LOOKED_INTO]:
            camera.check_ends(episode)


def _of_shape(picture: NDArray[np.uint8], shape: tuple[int, ...], where: str, name: str) -> NDArray[np.uint8]:
    if picture.shape != shape:
        raise DatasetError(
            f"an image of `{name}` is {picture.shape[0]} x {picture.shape[1]}; its description says {shape[0]} x"
            f" {shape[1]}",
            where=where,
            help="correct `meta/info.json`, or convert the data set again",
        )
    return picture

"""The list of episodes of a LeRobotDataset, versions 2 and 3, and the files that it names."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.lerobot.set_files import (
    AGREE,
    WHOLE,
    entry_of,
    read_json_lines,
    read_parquet,
    read_schema,
    whole_entry_of,
)
from recipes.demonstrations.lerobot.set_info import EPISODE_LINES, EPISODES, EPISODES_FILES, DatasetInfo
from rlinf_core.foreign.budget import Budget

# A field of a path pattern, with its format.
_FIELD = re.compile(r"\{(\w+)(?::(0?\d{0,2}d))?\}")


class Clip(NamedTuple):
    """The place of an episode in a video.

    Attributes:
        file: the video.
        begin: the time in the video at which the episode begins, in seconds.
        end: the time at which it ends; None: not listed.
    """

    file: Path
    begin: float
    end: float | None = None


class Episode(NamedTuple):
    """An episode as the list of episodes describes it.

    Attributes:
        number: `episode_index`.
        length: the number of rows.
        tasks: its instructions; None: not listed.
        rows: the file that holds its rows.
        videos: its place in the video of each feature.
    """

    number: int
    length: int
    tasks: tuple[str, ...] | None
    rows: Path
    videos: Mapping[str, Clip]


def read_episodes(folder: Path, info: DatasetInfo) -> list[Episode]:
    """Return the episodes by number.

    Raises:
        DatasetError: the list is missing or damaged, a file of an episode is missing, or an episode is listed twice or
            has no rows.
    """
    episodes = _listed_episodes(folder, info) if info.is_listed else _tabled_episodes(folder, info)
    numbers = [episode.number for episode in episodes]
    twice = next((number for number, after in pairwise(numbers) if number == after), None)
    if twice is not None:
        raise DatasetError(f"episode {twice} is listed twice", where=str(folder / "meta"), help=AGREE)
    empty = next((episode for episode in episodes if episode.length < 1), None)
    if empty is not None:
        message = f"episode {empty.number} is listed with {empty.length} rows"
        raise DatasetError(message, where=str(folder / "meta"), help=AGREE)
    cameras = info.colours(str(folder))
    for episode in episodes:
        for name, clip in episode.videos.items():
            if not clip.file.is_file():
                message = f"the video of episode {episode.number}, camera `{cameras[name]}`, is missing"
                raise DatasetError(message, where=str(clip.file), help=WHOLE)
    return episodes


def rows_of_videos(episodes: Sequence[Episode], name: str) -> dict[Path, int]:
    """Return the number of rows in each video of a camera."""
    rows: dict[Path, int] = {}
    for episode in episodes:
        if name in episode.videos:
            file = episode.videos[name].file
            rows[file] = rows.get(file, 0) + episode.length
    return rows


def check_places(episodes: Sequence[Episode], info: DatasetInfo, where: str) -> None:
    """Check that each episode lasts as long in its videos as its rows do, starts at a frame, and overlaps no other.

    Start times that are sums of rounded durations drift: from half a frame on, rows get the images of other rows.

    Raises:
        DatasetError: two episodes overlap, or one starts between two frames or is longer or shorter than its rows.
    """
    for name, camera in info.colours(where).items():
        last: tuple[Path, int, Episode] | None = None
        for clip, episode in sorted((episode.videos[name], episode) for episode in episodes if name in episode.videos):
            _check_length(clip, episode, camera, info.fps)
            frame = round(clip.begin * info.fps) if math.isfinite(clip.begin) else -1
            about = f"episode {episode.number} of camera `{camera}` begins at {clip.begin:.6g} s of its video"
            if frame < 0 or abs(clip.begin * info.fps - frame) > _BETWEEN:
                why = f"frames are at multiples of {1 / info.fps:.6g} s: the data set has {info.fps:g} rows per second"
                raise DatasetError(f"{about}, where there is no frame", where=str(clip.file), why=why, help=_PLACES)
            if last is not None and last[0] == clip.file and frame < last[1]:
                before = last[2]
                raise DatasetError(
                    f"{about}, which still belongs to episode {before.number}",
                    where=str(clip.file),
                    why=f"that begins at {before.videos[name].begin:.6g} s and has {before.length} rows at"
                    f" {info.fps:g} per second, up to {last[1] / info.fps:.6g} s",
                    help=_PLACES,
                )
            last = (clip.file, frame + episode.length, episode)


def _check_length(clip: Clip, episode: Episode, camera: str, fps: float) -> None:
    if clip.end is not None and not abs((clip.end - clip.begin) * fps - episode.length) <= 0.5:
        raise DatasetError(
            f"episode {episode.number} of camera `{camera}` lasts from {clip.begin:.6g} to {clip.end:.6g} s of its"
            f" video, but its {episode.length} rows last {episode.length / fps:.6g} s",
            where=str(clip.file),
            why=f"the data set has {fps:g} rows per second",
            help=_PLACES,
        )


# The largest distance between an episode's start and the nearest frame, in frames.
_BETWEEN: Final = 0.25
_PLACES: Final = (
    "correct `from_timestamp` and `to_timestamp` in `meta/episodes`, or convert the data set again: the pictures of one"
    " episode would be those of another"
)


def _listed_episodes(folder: Path, info: DatasetInfo) -> list[Episode]:
    """Return the episodes of a data set before version 3, with one file per episode."""
    file, episodes = folder / EPISODE_LINES, list[Episode]()
    videos = _shown_videos(info)
    for row in read_json_lines(file):
        number = whole_entry_of(row, "episode_index", file)
        place = {"episode_chunk": number // info.chunk_size, "episode_index": number}
        rows = folder / _path(info.data_path, place)
        if not rows.is_file():
            raise DatasetError(f"the file with the rows of episode {number} is missing", where=str(rows), help=WHOLE)
        files = {name: Clip(folder / _path(info.video_path, {**place, "video_key": name}), 0.0) for name in videos}
        tasks = row.get("tasks")
        texts = tuple(map(str, cast("list[Any]", tasks))) if isinstance(tasks, list) else None
        episodes.append(Episode(number, whole_entry_of(row, "length", file), texts, rows, files))
    return sorted(episodes, key=lambda episode: episode.number)


def _shown_videos(info: DatasetInfo) -> list[str]:
    return [name for name, feature in info.features.items() if feature.dtype == "video" and name not in info.unseen]


def _path(pattern: str, place: Mapping[str, Any]) -> str:
    """Return the path of a file below the data set's folder.

    Raises:
        DatasetError: the pattern has an unknown field, or leads out of the folder.
    """
    message = f"the path pattern `{pattern}` is invalid"

    def filled(field: re.Match[str]) -> str:
        if field[1] not in place:
            raise DatasetError(message, where="meta/info.json", why=f"`{field[1]}` is not one of {', '.join(place)}")
        return format(place[field[1]], field[2] or "")

    # `str.format` would also read attributes of its arguments.
    path = _FIELD.sub(filled, pattern)
    if "{" in path or "}" in path or Path(path).is_absolute() or ".." in Path(path).parts:
        why = "it must be a path below the folder, with fields such as `{episode_index:06d}`"
        raise DatasetError(message, where="meta/info.json", why=why)
    return path


def _tabled_episodes(folder: Path, info: DatasetInfo) -> list[Episode]:
    """Return the episodes of version 3, where several episodes share a file."""
    files = sorted(folder.glob(EPISODES_FILES))
    if not files:
        raise DatasetError("the list of episodes is missing", where=str(folder / EPISODES), help=WHOLE)
    listed: list[tuple[Path, dict[str, Any]]] = []
    budget = Budget.of_files(*files)
    for file in files:
        names = [name for name in read_schema(file).names if not name.startswith("stats/")]
        listed += [(file, row) for row in read_parquet(file, names, budget).to_pylist()]
    listed.sort(key=lambda pair: entry_of(pair[1], "episode_index", pair[0]))
    videos = _shown_videos(info)
    episodes: list[Episode] = []
    at = 0
    for file, row in listed:
        number, begin, end = (whole_entry_of(row, name, file) for name in _BORDERS)
        place = {key: whole_entry_of(row, f"data/{key}", file) for key in ("chunk_index", "file_index")}
        rows = folder / _path(info.data_path, place)
        if not rows.is_file():
            raise DatasetError(f"the file with the rows of episode {number} is missing", where=str(rows), help=WHOLE)
        length = end - begin if row.get("length") is None else whole_entry_of(row, "length", file)
        if begin != at or end - begin != length:
            raise DatasetError(
                f"episode {number} is listed with rows {begin} to {end}, but has {length} rows, {at} before it",
                where=str(file),
                help=AGREE,
            )
        at = end
        sources = {name: _video(folder, info, name, row, file) for name in videos}
        tasks = row.get("tasks")
        texts = tuple(map(str, cast("list[Any]", tasks))) if isinstance(tasks, list) else None
        episodes.append(Episode(number, length, texts, rows, sources))
    return episodes


_BORDERS = ("episode_index", "dataset_from_index", "dataset_to_index")


def _video(folder: Path, info: DatasetInfo, name: str, row: Mapping[str, Any], file: Path) -> Clip:
    place = {key: whole_entry_of(row, f"videos/{name}/{key}", file) for key in ("chunk_index", "file_index")}
    begin = float(entry_of(row, f"videos/{name}/from_timestamp", file))
    end = row.get(f"videos/{name}/to_timestamp")
    video = folder / _path(info.video_path, {**place, "video_key": name})
    return Clip(video, begin, None if end is None else float(end))

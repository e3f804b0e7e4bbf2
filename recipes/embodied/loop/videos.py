"""Videos of episodes: one for each way in which episodes ended, several of them side by side."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.data_errors import DatasetError
from recipes.demonstrations.pictures import write_video
from recipes.embodied.config import PolicyJob
from recipes.embodied.envs.base import SUCCESS
from recipes.embodied.loop.frames import EpisodeFrames, selected
from rlinf_core.runners.record import RunRecord

LOGGER: Final = logging.getLogger("rlinf")
# Ways of ending that get a video: the most frequent ones.
MOST_KINDS: Final = 6
_TILE_HEIGHT: Final = 128  # pixels, of smaller pictures that are enlarged
_BORDER: Final = 4
_RUNNING, _SOLVED, _NOT_SOLVED = (255, 255, 255), (40, 170, 70), (215, 50, 45)
# Seconds for which the end of the longest episode stays.
_STILL: Final = 0.5


class EvaluationVideos:
    """The videos of a run's evaluations, configured by `env.eval.video_cfg`.

    Args:
        config: the whole file.
        env: the env workers, which have just evaluated.
        record: the record of the run.
    """

    def __init__(self, config: PolicyJob, env: Any, record: RunRecord) -> None:
        self._video, self._env_type = config.env.eval.video_cfg, config.env.eval.env_type
        self._env, self._record = env, record
        # Every reason for missing videos is logged once.
        self._warned: set[str] = set()

    def write(self, step: int) -> None:
        """Write the videos of the evaluation after a step; failures do not stop the run."""
        if not self._video.save_video:
            return
        by_rank: list[list[EpisodeFrames] | None] = self._env.recorded_episodes().wait()
        if all(films is None for films in by_rank):
            self._warn(nothing_to_see(self._env_type))
            return
        recorded_episodes = sorted((film for films in by_rank for film in films or ()), key=lambda film: film.env)
        folder = self._record.folder.path / "videos"
        try:
            write_videos(recorded_episodes, folder, self._video.fps, self._video.episodes, f"step-{step:06d}-")
        except (DatasetError, OSError) as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            LOGGER.warning("videos not written: %s", reason)


def write_videos(
    recorded_episodes: Sequence[EpisodeFrames], folder: Path, fps: int, episodes: int, prefix: str = ""
) -> list[dict[str, Any]]:
    """Write a video `OUTCOME.mp4` for each kind of episode end; success comes first.

    Args:
        recorded_episodes: the episodes.
        folder: is made where it is missing; a file of the same name is replaced.
        fps: frames a second.
        episodes: the number of episodes in one video.
        prefix: the prefix of the names of the files.

    Returns:
        For each video its `file`, `outcome`, `fps`, number of `frames`, and `episodes` with `env` and `reset`.

    Raises:
        DatasetError: the package `av` is missing, or a file cannot be written.
    """
    counts = {film.outcome: 0 for film in recorded_episodes}
    for film in recorded_episodes:
        counts[film.outcome] += 1
    kinds = sorted(counts, key=lambda kind: (kind != SUCCESS, -counts[kind], kind))[:MOST_KINDS]
    videos: list[dict[str, Any]] = []
    for kind in kinds:
        shown = [film for film in recorded_episodes if film.outcome == kind][:episodes]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{prefix}{re.sub(r'[^a-z0-9]+', '-', kind.lower()).strip('-') or 'episodes'}.mp4"
        pictures = list(tiled([film.frames for film in shown], solved=kind == SUCCESS, still=round(_STILL * fps)))
        write_video(file, pictures, fps)
        videos.append(
            {
                "file": file.name,
                "outcome": kind,
                "fps": fps,
                "frames": len(pictures),
                "episodes": [{"env": film.env, "reset": film.reset} for film in shown],
            }
        )
    return videos


def pick_per_outcome(recorded_episodes: Sequence[EpisodeFrames], episodes: int) -> list[EpisodeFrames]:
    """Return the first episodes of each outcome, at most that many of each."""
    return [
        recorded_episodes[number]
        for number in selected([(film.outcome, i) for i, film in enumerate(recorded_episodes)], episodes)
    ]


def tiled(
    films: Sequence[NDArray[np.uint8]], *, solved: bool | Sequence[bool], still: int = 0
) -> Iterator[NDArray[np.uint8]]:
    """Return pictures of several episodes side by side; one that is over stays, within a green or a red border.

    Args:
        films: uint8 [T, H, W, 3] of each episode; T differs.
        solved: whether they ended with success, all or each: green.
        still: how often the last picture is repeated.
    """
    height, width = films[0].shape[1:3]
    scale = max(1, math.ceil(_TILE_HEIGHT / height))
    colors = [
        _SOLVED if is_solved else _NOT_SOLVED
        for is_solved in ([solved] * len(films) if isinstance(solved, bool) else solved)
    ]
    columns = max(1, min(len(films), round(math.sqrt(len(films) * height / width))))
    rows = math.ceil(len(films) / columns)
    high, wide = height * scale + 2 * _BORDER, width * scale + 2 * _BORDER
    # Videos want even sizes: 2 * _BORDER is even, and so is what is enlarged by an even number; else a line is added.
    sheet = np.full((rows * high + (rows * high) % 2, columns * wide + (columns * wide) % 2, 3), 255, np.uint8)
    for step in range(max(len(film) for film in films) + still):
        for number, film in enumerate(films):
            top, left = (number // columns) * high, (number % columns) * wide
            last = len(film) - 1
            if step > last:
                continue  # it stays as it was painted
            sheet[top : top + high, left : left + wide] = colors[number] if step == last else _RUNNING
            picture = film[step].repeat(scale, axis=0).repeat(scale, axis=1)
            sheet[top + _BORDER : top + high - _BORDER, left + _BORDER : left + wide - _BORDER] = picture
        yield sheet.copy()


def nothing_to_see(env_type: str) -> str:
    """Return why an environment gives no pictures, and what to do."""
    remedies = {
        "gymnasium": "write `options: {render_mode: rgb_array}`",
        "franka_robot": "film the arm with a camera",
    }
    remedy = remedies.get(env_type, "give it a camera, as in `options: {cameras: [main]}`, or implement `look`")
    return f"the environment `{env_type}` has no images; {remedy}"

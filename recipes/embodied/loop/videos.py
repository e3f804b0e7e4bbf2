"""Videos of episodes: one for each outcome, with several episodes side by side."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.pictures import write_video
from recipes.embodied.config import PolicyJob
from recipes.embodied.envs.running import SUCCESS
from recipes.embodied.loop.frames import EPISODES, FPS, EpisodeFrames, selected
from rlinf_core.runners.record import RunRecord

LOGGER: Final = logging.getLogger("rlinf")
# The most outcomes that get a video; the most frequent ones are chosen.
MOST_KINDS: Final = 6
_TILE_HEIGHT: Final = 128  # pixels; smaller images are enlarged
_BORDER: Final = 4
_RUNNING, _SOLVED, _NOT_SOLVED = (255, 255, 255), (40, 170, 70), (215, 50, 45)
# Seconds for which the end of the longest episode is shown.
_STILL: Final = 0.5


class EvaluationVideos:
    """The videos of a run's evaluations, configured by `env.eval.video_cfg`.

    Args:
        config: the configuration of the job.
        env: the env workers, which have just evaluated.
        record: the record of the run.
    """

    def __init__(self, config: PolicyJob, env: Any, record: RunRecord) -> None:
        self._wanted, self._env_type = config.env.eval.video_cfg.save_video, config.env.eval.env_type
        self._env, self._record = env, record
        # Reasons for missing videos that have been logged.
        self._warned: set[str] = set()

    def write(self, step: int) -> None:
        """Write the videos of the evaluation after a step; failures do not stop the run."""
        if not self._wanted:
            return
        by_rank: list[list[EpisodeFrames] | None] = self._env.recorded_episodes().wait()
        if all(films is None for films in by_rank):
            self._warn(nothing_to_see(self._env_type))
            return
        recorded_episodes = sorted((film for films in by_rank for film in films or ()), key=lambda film: film.env)
        folder = self._record.folder.path / "videos"
        try:
            write_videos(recorded_episodes, folder, f"step-{step:06d}-")
        except (DatasetError, OSError) as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            LOGGER.warning("videos not written: %s", reason)


def write_videos(recorded_episodes: Sequence[EpisodeFrames], folder: Path, prefix: str = "") -> list[dict[str, Any]]:
    """Write a video `OUTCOME.mp4` for each outcome; success comes first.

    Args:
        recorded_episodes: the episodes.
        folder: the folder, created if missing; a file of the same name is replaced.
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
        shown = [film for film in recorded_episodes if film.outcome == kind][:EPISODES]
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / f"{prefix}{re.sub(r'[^a-z0-9]+', '-', kind.lower()).strip('-') or 'episodes'}.mp4"
        pictures = list(tiled([film.frames for film in shown], solved=kind == SUCCESS, still=round(_STILL * FPS)))
        write_video(file, pictures, FPS)
        videos.append(
            {
                "file": file.name,
                "outcome": kind,
                "fps": FPS,
                "frames": len(pictures),
                "episodes": [{"env": film.env, "reset": film.reset} for film in shown],
            }
        )
    return videos


def pick_per_outcome(recorded_episodes: Sequence[EpisodeFrames]) -> list[EpisodeFrames]:
    """Return the first episodes of each outcome, as many as a video shows."""
    return [
        recorded_episodes[number]
        for number in selected([(film.outcome, i) for i, film in enumerate(recorded_episodes)], EPISODES)
    ]


def tiled(
    films: Sequence[NDArray[np.uint8]], *, solved: bool | Sequence[bool], still: int = 0
) -> Iterator[NDArray[np.uint8]]:
    """Yield images of several episodes side by side; a finished episode stays, with a green or a red border.

    Args:
        films: uint8 [T, H, W, 3] of each episode; T differs.
        solved: whether all or each of them ended with success (green border).
        still: the number of repetitions of the last image.
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
    # Videos need even sizes: enlarged images and borders are even; otherwise a line is added.
    sheet = np.full((rows * high + (rows * high) % 2, columns * wide + (columns * wide) % 2, 3), 255, np.uint8)
    for step in range(max(len(film) for film in films) + still):
        for number, film in enumerate(films):
            top, left = (number // columns) * high, (number % columns) * wide
            last = len(film) - 1
            if step > last:
                continue  # finished, and painted before
            sheet[top : top + high, left : left + wide] = colors[number] if step == last else _RUNNING
            picture = film[step].repeat(scale, axis=0).repeat(scale, axis=1)
            sheet[top + _BORDER : top + high - _BORDER, left + _BORDER : left + wide - _BORDER] = picture
        yield sheet.copy()


def nothing_to_see(env_type: str) -> str:
    """Return why an environment has no images, and the remedy."""
    rendered = "write `options: {render_mode: rgb_array}`, and no `num_processes`"
    remedies = {"gymnasium": rendered, "franka_robot": "film the arm with a camera"}
    others = "give it a camera, as in `options: {cameras: [main]}`"
    if ":" in env_type:
        others = f"{rendered} for a `gymnasium.Env`; in a `VectorEnv`, implement `look`"
    remedy = remedies.get(env_type, others)
    return f"the environment `{env_type}` has no images; {remedy}"

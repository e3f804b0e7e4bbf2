"""Videos of episodes: frames recorded in env workers, and for each outcome a video of several side by side."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from recipes.demonstrations.columns import DatasetError
from recipes.demonstrations.pictures import write_video
from recipes.embodied.config import PolicyJob
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import BoolArray
from recipes.embodied.envs.env_state import State
from recipes.embodied.envs.running import SUCCESS
from rlinf_core.runners.record import RunRecord

# The frames of a video per second, each of one action, and the episodes that it shows side by side.
FPS: Final = 20
EPISODES: Final = 9
# Bytes of frames that one batch of environments keeps; if that is too little, only its first environments are filmed.
_BUDGET: Final = 256 * 2**20
# The assumed steps of an episode without a limit.
_UNLIMITED: Final = 1000


class EpisodeFrames(NamedTuple):
    """Frames of one episode.

    Attributes:
        env: number of the environment within the job.
        reset: number of the reset that began it.
        outcome: how it ended: `success`, a failure by its name, `time out`.
        frames: uint8 [T + 1, H, W, 3], from the start to the last state.
    """

    env: int
    reset: int
    outcome: str
    frames: NDArray[np.uint8]


class FrameRecorder:
    """The frames of the episodes since a reset, one episode per environment.

    Args:
        batch: the batch, which has just been reset.
        reset: number of the reset.
        budget: bytes of frames, see `_BUDGET`.

    Attributes:
        sees: whether the environment has images to show.

    Raises:
        EnvContractError: see `TaskMethods.picture`.
    """

    def __init__(self, batch: VectorEnv, reset: int, budget: int = _BUDGET) -> None:
        self._batch, self._reset = batch, reset
        self._rows = np.arange(0)
        first = batch.look(np.arange(1))
        self.sees = first is not None
        if first is None:
            return
        batch.picture(first)  # raises for what no video takes, now rather than after the episodes
        one = sum(array.nbytes for array in first.values()) * (1 + (batch.max_episode_steps or _UNLIMITED))
        self._rows = np.arange(min(batch.num_envs, max(1, budget // one)))
        # The data of each step, and their rows.
        self._seen: list[tuple[NDArray[np.int64], State]] = []
        self._outcomes: dict[int, str] = {}
        self._take(self._rows)
        batch.watcher = self._watch

    def _watch(self, stepped: BoolArray, terminated: BoolArray, truncated: BoolArray) -> None:
        running = np.array([row for row in self._rows.tolist() if row not in self._outcomes and stepped[row]], np.int64)
        if not len(running):
            return
        self._take(running)
        over = running[(terminated | truncated)[running]]
        if len(over):
            outcomes = self._batch.outcomes(over, ~terminated[over])
            self._outcomes |= dict(zip(over.tolist(), outcomes, strict=True))

    def _take(self, rows: NDArray[np.int64]) -> None:
        seen = self._batch.look(rows)
        if seen is None:
            raise RuntimeError("`look` returned an image before, and returns none now")
        self._seen.append((rows, seen))

    def finish(self, most: int) -> list[EpisodeFrames]:
        """Return the finished episodes, at most `most` of each outcome, and stop recording."""
        if not self.sees:
            return []
        self._batch.watcher = None
        numbers = self._batch.numbers
        chosen = selected([(self._outcomes[row], row) for row in sorted(self._outcomes)], most)
        return [EpisodeFrames(int(numbers[row]), self._reset, self._outcomes[row], self._frames(row)) for row in chosen]

    def _frames(self, row: int) -> NDArray[np.uint8]:
        steps = [{name: array[rows == row] for name, array in seen.items()} for rows, seen in self._seen if row in rows]
        return self._batch.picture({name: np.concatenate([step[name] for step in steps]) for name in steps[0]})


def selected(outcomes: Iterable[tuple[str, int]], most: int) -> list[int]:
    """Return the numbers of the first episodes of each outcome, at most `most` of each."""
    counts: dict[str, int] = {}
    chosen: list[int] = []
    for outcome, number in outcomes:
        counts[outcome] = counts.get(outcome, 0) + 1
        if counts[outcome] <= most:
            chosen.append(number)
    return chosen


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

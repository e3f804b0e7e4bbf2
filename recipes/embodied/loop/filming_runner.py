"""The loop of the recipe, where it writes videos of its evaluations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from recipes.demonstrations.data_errors import DatasetError
from recipes.embodied.config import EmbodiedConfig, PolicyJob
from recipes.embodied.loop.embodied_runner import EmbodiedRunner
from recipes.embodied.loop.frames import EpisodeFrames
from recipes.embodied.loop.protocols import EmbodiedEnv
from recipes.embodied.loop.videos import nothing_to_see, write_videos
from rlinf_core import Channel, WorkerGroup
from rlinf_core.runners.record import RunRecord

LOGGER = logging.getLogger("rlinf")


class FilmedEnv(EmbodiedEnv, Protocol):
    """The methods of an env worker that records videos."""

    def recorded_episodes(self) -> list[EpisodeFrames] | None: ...


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
        folder = Path(self._video.video_base_dir or self._record.folder.path / "videos")
        try:
            write_videos(recorded_episodes, folder, self._video.fps, self._video.episodes, f"step-{step:06d}-")
        except (DatasetError, OSError) as error:
            self._warn(str(error))

    def _warn(self, reason: str) -> None:
        if reason not in self._warned:
            self._warned.add(reason)
            LOGGER.warning("videos not written: %s", reason)


class FilmingRunner(EmbodiedRunner):
    """`EmbodiedRunner` with videos of every evaluation: `env.eval.video_cfg`."""

    def __init__(
        self,
        cfg: EmbodiedConfig,
        actor: WorkerGroup[Any],
        rollout: WorkerGroup[Any],
        env: WorkerGroup[Any],
        record: RunRecord | None = None,
        trajectories: Channel | None = None,
    ) -> None:
        super().__init__(cfg, actor, rollout, env, record, trajectories)
        self._videos = EvaluationVideos(cfg, env, self.record)

    def evaluate_policy(self, step: int) -> dict[str, float]:
        """See `EmbodiedRunner`."""
        metrics = super().evaluate_policy(step)
        self._videos.write(step)
        return metrics

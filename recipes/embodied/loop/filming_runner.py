"""The loop of the recipe, where it writes videos of its evaluations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Protocol

from recipes.demonstrations.data_errors import DatasetError
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.loop.embodied_runner import EmbodiedRunner
from recipes.embodied.loop.frames import Footage
from recipes.embodied.loop.protocols import EmbodiedEnv
from recipes.embodied.loop.videos import nothing_to_see, write_videos
from rlinf_core import Channel, RunRecord, WorkerGroup

LOGGER = logging.getLogger("rlinf")


class FilmedEnv(EmbodiedEnv, Protocol):
    """The methods of a worker that steps environments, and films them."""

    def footage(self) -> list[Footage] | None: ...


class EvaluationVideos:
    """The videos of a run's evaluations, as `env.eval.video_cfg` asks for them.

    Args:
        config: the whole file.
        env: the env workers, which have just evaluated.
        record: of the run.
    """

    def __init__(self, config: EmbodiedConfig, env: Any, record: RunRecord) -> None:
        self._video, self._env_type = config.env.eval.video_cfg, config.env.eval.env_type
        self._env, self._record = env, record
        # A reason for which there are no videos is told once.
        self._told: set[str] = set()

    def write(self, step: int) -> None:
        """Write those of the evaluation after a step; the run goes on without them where that fails."""
        if not self._video.save_video:
            return
        by_rank: list[list[Footage] | None] = self._env.footage().wait()
        if all(found is None for found in by_rank):
            self._tell(nothing_to_see(self._env_type))
            return
        footage = sorted((each for found in by_rank for each in found or ()), key=lambda each: each.env)
        folder = Path(self._video.video_base_dir or self._record.folder.path / "videos")
        try:
            write_videos(footage, folder, self._video.fps, self._video.episodes, f"step-{step:06d}-")
        except (DatasetError, OSError) as error:
            self._tell(str(error))

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            LOGGER.warning("there are no videos: %s", reason)


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

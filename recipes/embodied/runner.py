"""The loop of the recipe, where it writes videos of its evaluations."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

from recipes.demonstrations.errors import DatasetError
from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.filming import Footage
from recipes.embodied.videos import write_videos
from rlinf_core import EmbodiedRunner, RunRecord, WorkerGroup

LOGGER = logging.getLogger("rlinf")


class FilmingRunner(EmbodiedRunner):
    """`EmbodiedRunner` with videos of every evaluation: `env.eval.video_cfg`."""

    def __init__(
        self,
        cfg: EmbodiedConfig,
        actor: WorkerGroup[Any],
        rollout: WorkerGroup[Any],
        env: WorkerGroup[Any],
        record: RunRecord | None = None,
    ) -> None:
        super().__init__(cfg, actor, rollout, env, record)
        self._video = cfg.env.eval.video_cfg
        self._env_type = cfg.env.eval.env_type
        # A reason for which there are no videos is told once.
        self._told: set[str] = set()

    def evaluate_policy(self, step: int) -> dict[str, float]:
        """See `EmbodiedRunner`."""
        metrics = super().evaluate_policy(step)
        if self._video.save_video:
            self._write(step)
        return metrics

    def _write(self, step: int) -> None:
        """Write the videos of an evaluation; the run goes on without them where that fails."""
        by_rank: list[list[Footage] | None] = cast("Any", self.groups["env"]).footage().wait()
        footage = sorted((each for found in by_rank for each in found or ()), key=lambda each: each.env)
        folder = Path(self._video.video_base_dir or self.record.folder.path / "videos")
        if all(found is None for found in by_rank):
            self._tell(f"there are no videos: {nothing_to_see(self._env_type)}")
            return
        try:
            write_videos(footage, folder, self._video.fps, self._video.episodes, f"step-{step:06d}-")
        except (DatasetError, OSError) as error:
            self._tell(f"there are no videos: {error}")

    def _tell(self, reason: str) -> None:
        if reason not in self._told:
            self._told.add(reason)
            LOGGER.warning("%s", reason)


def nothing_to_see(env_type: str) -> str:
    """Return why an environment gives no pictures, and what to do."""
    remedies = {
        "gymnasium": "write `options: {render_mode: rgb_array}`",
        "franka_robot": "film the arm with a camera",
    }
    remedy = remedies.get(env_type, "give it a camera, as in `options: {cameras: [main]}`, or `look` of your own")
    return f"the environment `{env_type}` gives no pictures; {remedy}"

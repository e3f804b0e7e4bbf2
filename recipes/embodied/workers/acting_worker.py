"""Rollout workers that act by the weights of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.models.checkpoint_weights import load_trained
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.training.seeding import Purpose, seed_of


class ActingWorker(MultiStepRolloutWorker):
    """Acts greedily by weights that it reads itself: there is no actor."""

    def init_from(self, layout: Layout, spec: EnvSpec, checkpoint: str | None) -> None:
        """Make the policy, with the weights of a checkpoint where one is given.

        Args:
            layout: of the job.
            spec: of the environments.
            checkpoint: a folder `global_step_N` that this node sees; None: as `actor.model.model_path` has it.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
        """
        # What neither a folder nor the checkpoint has is made as the actor made it.
        torch.manual_seed(seed_of(self._config.actor.seed, Purpose.WEIGHTS))
        self.init_worker(layout, spec)
        if checkpoint is not None:
            load_trained(self.policy, self._config.actor.model, spec, checkpoint)

    def describe_images(self) -> dict[str, Any]:
        """Return what the policy does to images, see `BasePolicy.describe_images`."""
        return self.policy.describe_images()

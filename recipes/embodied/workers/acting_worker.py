"""Rollout workers that act by the weights of a checkpoint."""

from __future__ import annotations

from typing import Any

import torch

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.models.checkpoint_weights import keep_loaded, load_trained
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.training.seeding import Purpose, derive_seed


class ActingWorker(MultiStepRolloutWorker):
    """Acts greedily with weights that it reads itself, without an actor."""

    def init_from(self, layout: Layout, spec: EnvSpec, checkpoint: str | None) -> None:
        """Create the policy, with the weights of a checkpoint if one is named.

        Args:
            layout: the layout of the job.
            spec: the spec of the environments.
            checkpoint: a folder `global_step_N` that this node sees; None: as `actor.model.model_path` has it.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
        """
        # What neither a folder nor the checkpoint has is made as the actor made it.
        torch.manual_seed(derive_seed(self._config.actor.seed, Purpose.WEIGHTS))
        self.init_worker(layout, spec)
        if checkpoint is not None:
            load_trained(self.policy, self._config.actor.model, spec, checkpoint)
        keep_loaded(self._contact, self.policy, checkpoint or self._config.actor.model.model_path)

    def describe_images(self) -> dict[str, Any]:
        """Return the policy's image preprocessing, see `BasePolicy.describe_images`."""
        return self.policy.describe_images()

"""Actors that train the whole policy by one optimizer, in recipes `embodied` and `sft`."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import torch

from recipes.demonstrations.data_facts import DataFacts
from recipes.demonstrations.orientation import PicturesShown
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.models.base_policy import BasePolicy
from recipes.embodied.models.normalization import Normalization
from recipes.embodied.models.policy_folder import load_normalization, load_trained, write_description
from recipes.embodied.models.registry import make_model
from recipes.embodied.workers.actor_base import BaseActor, JobT
from recipes.training.host_memory import keep_freed_memory
from recipes.training.initial.weight_sources import WeightsOfRankZero, WeightSource
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.sharding import is_sharded
from recipes.training.updater import check_weights
from recipes.training.without_memory import hollow_copy, without_memory
from rlinf_core.runners.storage.first_contact import Difference


class PolicyActor(BaseActor[JobT]):
    """A worker that trains a policy, and keeps it in checkpoints."""

    def init_worker(self, layout: Layout, spec: EnvSpec) -> None:
        """Create the policy and the optimizer; all ranks start with the same weights."""
        torch.set_num_threads(1)
        if self.torch_device.type == "cpu":
            keep_freed_memory()
        config = self._config.actor
        policy, weights = self._first_policy(spec)
        if config.fsdp_config.gradient_checkpointing:
            policy.checkpoint_activations()
        self._prepare(layout, spec, policy, methods=("imitation_loss",), initial=weights)
        self._data = self._demonstrations(spec)
        if config.checkpoint_load_path is not None:
            load_trained(policy, config.model, spec, config.checkpoint_load_path)
        elif self._data is not None and policy.normalization == Normalization():
            # Statistics that came with the weights of `model_path` are those that these were trained with.
            policy.normalization = self._data.normalization(policy)
        if self._data is not None:
            data = self._data.demonstrations
            counts = Difference(note=f"{len(data)} rows of {data.episodes} episodes")
            self._contact.keep("rows of `data`", "their description, and the sizes of the environment", counts)

    def _first_policy(self, spec: EnvSpec) -> tuple[BasePolicy, WeightSource | None]:
        """Return the policy with its first weights, in float32; or, where ranks hold shards, without memory and with
        the weights of rank 0, which alone has it whole, on its host, until every rank has its shard.
        """
        config = self._config.actor
        torch.manual_seed(derive_seed(config.seed, Purpose.WEIGHTS))
        if not is_sharded(config.fsdp_config, self._world_size, None):
            return make_model(config.model, spec).to(self.torch_device, torch.float32), None
        # A policy of a user may compute with its weights when it is made.
        makes_whole = self._rank == 0 or ":" in config.model.model_type
        with nullcontext() if makes_whole else without_memory():
            policy = make_model(config.model, spec).to(torch.float32)
        hollow = hollow_copy(policy) if makes_whole else policy
        return hollow, WeightsOfRankZero(policy if self._rank == 0 else None)

    def _demonstrations(self, spec: EnvSpec) -> ImitationData | None:
        """Return the demonstrations that are trained on; None without any."""
        raise NotImplementedError

    def data_facts(self) -> DataFacts | None:
        """Return the facts of the demonstrations that are trained on; None: there are none, or on other ranks."""
        if self._data is None or self._rank:
            return None
        return self._data.facts(reads_instructions=self._policy.reads_instructions)

    def first_pictures(self) -> list[PicturesShown]:
        """Return the pictures with which demonstrations begin, on the first rank; none where it learns from none."""
        return [] if self._data is None or self._rank else self._data.first_pictures()

    def save_checkpoint(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees; env workers keep their episodes."""
        self._state.save(folder)
        if self._rank == 0:
            write_description(Path(folder), self._config.actor.model, self._spec, self._policy.normalization)
            if self._policy.normalization != Normalization():
                self._policy.normalization.save(Path(folder))

    def load_checkpoint(self, folder: str) -> int:
        """Load a checkpoint of `save_checkpoint`, by any number of ranks.

        Returns:
            The version of the weights.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
            NonFiniteError: a weight in it is NaN or infinite.
        """
        self._state.load(folder)
        self._policy.normalization = load_normalization(folder, self._spec)
        check_weights(self._policy, folder)
        return self._state.version

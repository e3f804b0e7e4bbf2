"""The actor: the workers that train the policy."""

from __future__ import annotations

import resource
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipes.embodied.batch import samples_of
from recipes.embodied.batch_sizes import batch_sizes
from recipes.embodied.config import EmbodiedConfig, group_size
from recipes.embodied.envs.base import EnvSpec
from recipes.embodied.layout import rollouts_of, routes_of, trajectory_key
from recipes.embodied.learner import Learner
from recipes.embodied.models.registry import make_model
from recipes.embodied.precision import weight_type
from recipes.embodied.trajectory import RolloutBatch, joined
from recipes.training.checkpoint import load, save
from recipes.training.optimizer import apply_settings, learning_rate_factor, make_optimizer, move_state
from recipes.training.seeding import Purpose, seed_of
from recipes.training.sharding import Sharded, parallelize
from recipes.training.updater import SKIPPED
from recipes.training.weights import FlatWeights
from rlinf_core import Worker
from rlinf_core.runners.embodied_runner import Layout


class EmbodiedFSDPActor(Worker):
    """Trains on trajectories. Several ranks share every batch and the weights, as `actor.fsdp_config` says."""

    config_section = "actor"

    def __init__(self, config: EmbodiedConfig) -> None:
        super().__init__()
        self._config = config
        self._version = 0
        self._copy: FlatWeights | None = None
        self._sending: list[Any] = []

    def init_worker(self, layout: Layout, spec: EnvSpec) -> None:
        """Create the policy and the optimizer; every rank begins with the same weights."""
        torch.set_num_threads(1)
        config = self._config.actor
        self._layout = layout
        self._step = layout.step
        torch.manual_seed(seed_of(config.seed, Purpose.WEIGHTS))
        policy = make_model(config.model, spec).to(self.torch_device, weight_type(config))
        self._outgoing = FlatWeights.adopt(policy)
        self._strategy = parallelize(policy, self._rank, self._world_size, config.fsdp_config, self.torch_device)
        self._policy = policy
        self._optimizer = make_optimizer(policy, config.optim)
        self._learner = Learner(self._config, self._strategy, self._optimizer, self.torch_device)
        self._routes = routes_of(layout, self._config, training=True)
        self._channel = self.connect_channel(layout.trajectories)

    # Weights

    def sync_model_to_rollout(self) -> int:
        """Send the weights to the rollout workers; each actor serves its share of them.

        Returns when they are received; where rollouts go on meanwhile (`runner.max_staleness`) at once, with a copy of
        the weights on its way.

        Returns:
            Their version.
        """
        weights, group = self._gathered(), self._config.rollout.group_name
        self._finish_sending()
        if self._config.runner.max_staleness:
            if self._copy is None:
                self._copy = FlatWeights(weights.views)
            for mine, current in zip(self._copy.buffers, weights.buffers, strict=True):
                mine.copy_(current)
            weights = self._copy
        peers = rollouts_of(self._rank, self._layout)
        if peers:
            # One copy for all workers of a host: each takes the weights out of it.
            groups, source = [(group, peers)], (self._config.actor.group_name, self._rank)
            content = (self._version, weights.buffers)
            self._sending.append(self.broadcast(content, groups, source, async_op=True))
        if weights is not self._copy:
            self._finish_sending()
        return self._version

    def _finish_sending(self) -> None:
        for work in self._sending:
            work.wait()
        self._sending = []

    def _gathered(self) -> FlatWeights:
        """Return the current weights, whole. Without shards it is the memory that the policy computes with."""
        if self._world_size > 1:
            state: dict[str, Tensor] = self._policy.state_dict()
            for name, view in self._outgoing.views.items():
                view.copy_(self._strategy.whole(state[name]))
        return self._outgoing

    # A training step

    def recv_rollout_batch(self, step: int | None = None) -> int:
        """Receive this actor's share of a rollout: all passes of all its environments.

        Args:
            step: the training step; by default the one after the last.

        Returns:
            The staleness of the samples: versions between the acting weights and those here.
        """
        config = self._config
        self._step = step = self._step + 1 if step is None else step
        expected = config.env.train.rollout_epoch * self._routes.total // self._routes.actors
        key = trajectory_key(self._rank, step, config.runner.max_staleness)
        pieces: list[RolloutBatch] = self._channel.get_batch(expected, key=key)
        self._trajectories = joined(pieces)
        return self._version - self._trajectories.version

    def compute_advantages_and_returns(self, step: int | None = None) -> dict[str, float]:
        """Turn the trajectories into training samples.

        Returns:
            Metrics of them, by their full names.
        """
        strategy = self._strategy
        # Every actor of a team has the same trajectories.
        teams = self._routes.actors
        members = self._world_size // teams
        # The mean over ranks, as it is reported, is then the number over all teams.
        steps = float(self._trajectories.steps["valid"].sum()) * teams
        samples, metrics = samples_of(
            self._trajectories,
            self._config.algorithm,
            group_size(self._config, self._config.env.train),
            (lambda value: strategy.reduce_sum(value) / members) if self._world_size > 1 else None,
        )
        del self._trajectories
        samples = samples.part(self._rank // self._routes.actors, members)
        if self._world_size > 1 and strategy.reduce_sum(torch.tensor(float("mask" in samples.tensors))):
            # All ranks compute alike.
            samples = samples.masked()
        self._learner.check_samples(samples, self._step if step is None else step)
        self._samples = samples.to(self.torch_device)
        return {**metrics, "env/steps": steps}

    def run_training(self, step: int | None = None) -> dict[str, float]:
        """Learn from the samples in random batches, several times over.

        Args:
            step: the training step, which the random numbers depend on; by default that of the last batch received.

        Returns:
            Metrics, means over all micro batches, by their full names.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite (`runner.on_nonfinite`).
        """
        config, samples = self._config.actor, self._samples
        step = self._step if step is None else step
        torch.manual_seed(seed_of(config.seed, Purpose.BATCHES, step, self._rank))
        self._move(self.torch_device)
        share, micro = batch_sizes(self._config, self._world_size)
        factor = learning_rate_factor(config.optim, step, self._config.runner.last_step)
        apply_settings(self._optimizer, config.optim, factor)
        began = time.perf_counter()
        found = self._learner.learn(samples, share, micro, step)
        learned = len(samples) * self._config.algorithm.update_epoch * self._world_size
        figures = {
            **found.metrics(counts_skipped=self._config.runner.on_nonfinite == "skip"),
            "speed/samples_per_second": learned / (time.perf_counter() - began),
            "train/actor/lr": self._optimizer.param_groups[0]["lr"],
            **memory(self.torch_device),
        }
        self._version += 1
        del self._samples
        if config.enable_offload:
            self._move(torch.device("cpu"))
        if found.skipped:
            self.log_warning(SKIPPED, step, found.skipped)
        return figures

    def _move(self, device: torch.device) -> None:
        """Move weights and optimizer to a device. Shards stay: `fsdp_config.cpu_offload` moves those."""
        if not isinstance(self._strategy, Sharded):
            self._outgoing.move(device)
            move_state(self._optimizer, device)

    # Checkpoints

    def save_checkpoint(self, folder: str) -> None:
        """Write weights and optimizer into a folder that every rank sees; together, with torch.distributed.checkpoint.

        Random numbers are a function of the step, and env workers keep their episodes themselves: there is no more.
        """
        save(Path(folder), self._policy, self._optimizer, self._version)

    def load_checkpoint(self, folder: str) -> int:
        """Read what `save_checkpoint` wrote, by any number of ranks.

        Returns:
            The version of the weights.

        Raises:
            CheckpointError: it cannot be read, or is of another model.
            NonFiniteError: a weight in it is NaN or infinite.
        """
        self._version = load(Path(folder), self._policy, self._optimizer)
        self._learner.check_weights(folder)
        return self._version


def memory(device: torch.device) -> dict[str, float]:
    """Return the most memory that this process has used so far, in GiB: the host's, and that of its accelerator."""
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    used = {"memory/actor_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30}
    if device.type == "cuda":
        used["memory/actor_accelerator_gib"] = torch.cuda.max_memory_allocated(device) / 2**30
    return used

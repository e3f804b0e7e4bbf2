"""The actor: the workers that train the policy."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Final, TypeVar

import torch
from torch import Tensor

from recipes.embodied.config import EmbodiedConfig, group_size, resets_each_pass
from recipes.embodied.config.algorithm_config import policy_gradient_of
from recipes.embodied.config.embodied_config import batch_sizes
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.observation_keys import STATES
from recipes.embodied.learning.batch import Samples, build_samples, mean_reward
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.learning.learner import Learner
from recipes.embodied.learning.running_returns import RunningReturns, check_running, with_states
from recipes.embodied.learning.trajectory import RolloutChunks, joined
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.workers.actor_base import PolicyActor, memory
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.updater import SKIPPED
from rlinf_core import ConfigError
from rlinf_core.errors import RuntimeFailure
from rlinf_core.runners.storage.first_contact import Difference

T = TypeVar("T")
# The largest gaps of log-probabilities due to rounding, by the precision in which actions are drawn.
_DRAWN_GAPS: Final = {"fp32": 1e-3, "bf16": 1.0, "fp16": 0.5}


class EmbodiedFSDPActor(PolicyActor[EmbodiedConfig]):
    """Trains on trajectories. Several ranks share every batch, and the weights according to `actor.fsdp_config`."""

    # Of the step that is trained, from the method that makes them until the one that uses them.
    _trajectories: RolloutChunks | None = None
    _samples: Samples | None = None

    def init_worker(self, layout: Layout, spec: EnvSpec) -> None:
        """Create the policy and the optimizer; all ranks start with the same weights."""
        super().init_worker(layout, spec)
        state = self._state
        self._learner = Learner(self._config, state.strategy, state.optimizer, self.torch_device, self._data)
        algorithm = policy_gradient_of(self._config.algorithm)
        if algorithm.normalize_observations:
            check_running(self._policy)
        self._compares, self._is_fresh = True, False
        self._returns: RunningReturns | None = None
        if algorithm.normalize_rewards:
            passes = self._config.env.train.rollout_epoch
            self._returns = RunningReturns(algorithm.gamma, passes, resets=resets_each_pass(self._config))

    def _demonstrations(self, spec: EnvSpec) -> ImitationData | None:
        """Return the demonstrations for training besides trajectories; None without any."""
        if not policy_gradient_of(self._config.algorithm).bc_weight:
            return None
        return ImitationData(self._config.data, spec, self._config.actor.model.num_action_chunks)

    def save_checkpoint(self, folder: str) -> None:
        """See `PolicyActor`; each rank also saves the running returns of its environments."""
        super().save_checkpoint(folder)
        if self._returns is not None:
            self._returns.save(Path(folder), self._rank)

    def load_checkpoint(self, folder: str) -> int:
        version = super().load_checkpoint(folder)
        if self._returns is not None:
            self._returns.load(Path(folder), self._rank, self._world_size)
        return version

    # A training step

    def recv_rollout_batch(self, step: int | None = None, attempt: int = 0) -> int:
        """Receive this actor's share of a rollout: all segments of all its environments.

        Args:
            step: the training step; by default the one after the last.
            attempt: see `trajectory_key`.

        Returns:
            The staleness of the samples: versions between the acting weights and those here.
        """
        self._trajectories = trajectories = joined(self._receive(step, attempt))
        staleness = self._state.version - trajectories.version
        self._is_fresh = staleness == 0
        return staleness

    def compute_advantages_and_returns(self, step: int | None = None) -> dict[str, float]:
        """Turn the trajectories into training samples.

        Returns:
            Metrics of the samples, by their full names.

        Raises:
            RuntimeFailure: `recv_rollout_batch` was not called since the last time.
        """
        received = _made(self._trajectories, "trajectories", "recv_rollout_batch")
        strategy = self._state.strategy
        # Every actor of a team has the same trajectories.
        teams = self._routes.actors
        members = self._world_size // teams
        # The reported mean over ranks is then the number over all teams.
        steps = float(received.steps["valid"].sum()) * teams

        def summed(value: Tensor) -> Tensor:
            return strategy.reduce_sum(value) / members

        reduce_sum = summed if self._world_size > 1 else None
        trajectories = received
        if self._returns is not None:
            rewards = self._returns.normalized(trajectories.steps, reduce_sum)
            trajectories = replace(trajectories, steps={**trajectories.steps, "rewards": rewards})
        samples, metrics = build_samples(
            trajectories,
            policy_gradient_of(self._config.algorithm),
            group_size(self._config, self._config.env.train),
            reduce_sum,
        )
        if self._returns is not None:  # the environments' own rewards, not normalized ones
            metrics["rollout/reward"] = mean_reward(received.steps)
        # For the next rollout: this one was normalized with the current statistics.
        self._next_normalization = self._policy.normalization
        if self._config.algorithm.normalize_observations and STATES in received.inputs:
            counted = received.steps["valid"].any(dim=2)
            self._next_normalization = with_states(
                self._policy.normalization, received.inputs[STATES], counted, reduce_sum
            )
        self._trajectories = None
        samples = samples.part(self._rank // self._routes.actors, members)
        if self._world_size > 1 and strategy.reduce_sum(torch.tensor(float("mask" in samples.tensors))):
            # All ranks must use the same loss.
            samples = samples.masked()
        self._learner.check_samples(samples, self._step if step is None else step)
        self._samples = samples.to(self.torch_device)
        return {**metrics, "env/steps": steps}

    def _check_drawn(self, gap: float) -> None:
        """Refuse a custom policy whose `forward` and `act` disagree on log-probabilities under equal weights.

        Args:
            gap: see `Learner.drawn_gap`; NaN is reported by other checks.

        Raises:
            ConfigError: the gap is larger than rounding explains.
        """
        actor, model = self._config.actor, self._config.actor.model
        bound = max(_DRAWN_GAPS[model.precision], _DRAWN_GAPS[actor.fsdp_config.mixed_precision.computing or "fp32"])
        if self._compares:
            self._compares = False
            result = Difference(gap, bound, agrees=not gap > bound)
            self._contact.keep("log-probabilities of drawn actions", "those of `forward`, by equal weights", result)
        if gap > bound:
            raise ConfigError(
                f"`act` and `forward` of `{model.model_type}` differ by {gap:.2g} in the log-probability of an action,"
                " though their weights are the same",
                why="the ratios that the loss clips would be wrong; Dropout and BatchNorm, among others, compute"
                " something else in training",
                help="let `forward` evaluate the distribution that `act` draws from, and leave such layers out",
            )

    def run_training(self, step: int | None = None) -> dict[str, float]:
        """Learn from the samples in random batches, in several passes.

        Args:
            step: the training step, on which random numbers depend; by default that of the last batch received.

        Returns:
            Metrics, means over all micro batches, by their full names.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite (`runner.on_nonfinite`).
            RuntimeFailure: `compute_advantages_and_returns` was not called since the last time.
        """
        config, samples = self._config.actor, _made(self._samples, "samples", "compute_advantages_and_returns")
        step = self._step if step is None else step
        torch.manual_seed(derive_seed(config.seed, Purpose.BATCHES, step, self._rank))
        if config.enable_offload:
            with self.worker_timer("actor/move"):
                self._state.onload()
        share, micro = batch_sizes(self._config, self._world_size)
        rate = self._state.apply_settings(step, self._config.runner.last_step)
        began = time.perf_counter()
        update = self._learner.learn(samples, share, micro, step)
        if self._is_fresh and self._learner.drawn_gap is not None:
            self._check_drawn(self._learner.drawn_gap)
        learned = len(samples) * self._learner.passes * self._world_size
        figures = {
            **update.metrics(counts_skipped=self._config.runner.on_nonfinite == "skip"),
            "speed/samples_per_second": learned / (time.perf_counter() - began),
            "train/actor/lr": rate,
            "train/actor/passes": float(self._learner.passes),
            **memory(self.torch_device),
        }
        self._state.version += 1
        self._policy.normalization = self._next_normalization
        self._samples = None
        if config.enable_offload:
            with self.worker_timer("actor/move"):
                self._state.offload()
        if update.skipped:
            self.log_warning(SKIPPED, step, update.skipped)
        return figures


def _made(value: T | None, what: str, method: str) -> T:
    if value is None:
        raise RuntimeFailure(f"there are no {what} to learn from", help=f"call `{method}` before, in each step")
    return value

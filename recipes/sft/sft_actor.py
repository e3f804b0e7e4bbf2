"""The actor of recipe `sft`: the workers that learn from demonstrations."""

from __future__ import annotations

import time

import torch

from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.learning.policy_precision import computing
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.workers.actor_base import PolicyActor, memory
from recipes.sft.config import SftConfig
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.updater import SKIPPED, Figures, Updater
from rlinf_core import Loss


class SftActor(PolicyActor[SftConfig]):
    """Learns from demonstrations. Several ranks share every batch and the weights, as `actor.fsdp_config` says."""

    def init_actor(self, layout: Layout, spec: EnvSpec | None) -> None:
        """Read the demonstrations and create policy and optimizer.

        Args:
            layout: the layout of the job.
            spec: the spec of the environments that evaluate; None: the one that the data imply.

        Raises:
            DatasetError: the data cannot be read, or are of another environment.
        """
        data = self._config.data
        chunk = self._config.actor.model.num_action_chunks
        self._shown = ImitationData(data, spec, chunk, successes=data.target == "success")
        self.init_worker(layout, self._shown.spec)
        config = self._config
        self._updater = Updater(
            self._state.strategy,
            self._state.optimizer,
            clip_grad=config.actor.optim.clip_grad,
            skip_nonfinite=config.runner.on_nonfinite == "skip",
        )

    def _demonstrations(self, spec: EnvSpec) -> ImitationData | None:
        return self._shown

    def learn(self, step: int) -> dict[str, float]:
        """Take `data.batches_per_step` optimizer steps; the samples depend only on step and rank.

        Returns:
            Metrics, means over all micro batches, by their full names.

        Raises:
            NonFiniteError: a loss, a gradient or a weight is NaN or infinite (`runner.on_nonfinite`).
        """
        config, data = self._config.actor, self._shown
        self._state.onload()
        rate = self._state.apply_settings(step, self._config.runner.last_step)
        torch.manual_seed(derive_seed(config.seed, Purpose.BATCHES, step, self._rank))
        share = max(1, (config.global_batch_size or len(data)) // self._world_size)
        micro = min(config.micro_batch_size or share, share)
        figures, began = Figures(), time.perf_counter()
        for _ in range(self._config.data.batches_per_step):
            self._updater.update([micro] * (share // micro), self._imitate, step, figures)
        self._updater.check_weights(f"step {step}")
        self._state.version += 1
        if config.enable_offload:
            self._state.offload()
        if figures.skipped:
            self.log_warning(SKIPPED, step, figures.skipped)
        learned = share * self._world_size * self._config.data.batches_per_step
        return {
            **figures.metrics(counts_skipped=self._config.runner.on_nonfinite == "skip"),
            "train/epoch": step * learned / len(data),
            "speed/samples_per_second": learned / (time.perf_counter() - began),
            "train/actor/lr": rate,
            **memory(self.torch_device),
        }

    def _imitate(self, rows: int) -> Loss:
        with computing(self._config.actor, self.torch_device):
            loss = self._shown.loss(self._policy, rows)
        return Loss(loss, {"actor/bc_loss": loss.detach()})

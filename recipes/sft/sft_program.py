"""The program that `rlinf train recipe=sft` runs, and the workers that learn from demonstrations."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any, Final, cast

import torch

from recipes.embodied.envs.checks import first_step_check
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.episodes.collector import CollectingEnvWorker
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.learning.policy_precision import computing
from recipes.embodied.loop.data_check import check_data_facts, check_orientation
from recipes.embodied.loop.env_errors import EnvErrors
from recipes.embodied.loop.episode_figures import episode_means
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.loop.videos import EvaluationVideos
from recipes.embodied.models.folder_facts import require_model_folder
from recipes.embodied.workers.actor_base import PolicyActor, memory
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.sft.config import SftConfig, evaluates
from recipes.training.updater import SKIPPED, Figures, Updater
from recipes.training.worker_parts import Purpose, comparisons_of, derive_seed
from rlinf_core import (
    Channel,
    Cluster,
    HybridComponentPlacement,
    Job,
    Loss,
    WorkerGroup,
    WorkerGroupHandle,
    mean_over_ranks,
    run_job,
)
from rlinf_core.runners import events
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.runner import RolloutRunner
from rlinf_core.runners.storage.first_contact import note_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.group.handle import wait_together
from rlinf_core.worker.group.worker_group import launch_together


class SftActor(PolicyActor[SftConfig]):
    """Learns from demonstrations. Several ranks share every batch, and the weights according to `actor.fsdp_config`."""

    def init_actor(self, layout: Layout, spec: EnvSpec | None) -> None:
        """Read the demonstrations and create policy and optimizer.

        Args:
            layout: the layout of the job.
            spec: the spec of the evaluation environments; None: inferred from the data.

        Raises:
            DatasetError: the data cannot be read, or do not fit the environments.
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
        share -= share % micro
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


_numbers: Final = itertools.count()


class SftRunner(RolloutRunner):
    """Trains the actor on demonstrations, and evaluates it in environments if there are any.

    Args:
        cfg: the configuration of the job.
        groups: `actor`, and either both `rollout` and `env` or neither.
        record: see `Runner`.
    """

    def __init__(self, cfg: SftConfig, groups: dict[str, WorkerGroup[Any]], record: RunRecord | None = None) -> None:
        super().__init__(cfg, groups, record)
        # A group forwards the calls of its workers' methods to all ranks.
        self._actor = cast("Any", groups["actor"])
        self._rollout, self._env = cast("Any", groups.get("rollout")), cast("Any", groups.get("env"))
        self._videos = EvaluationVideos(cfg, self._env, self.record)
        self._evaluated = False
        self._env_errors = EnvErrors(cfg.runner.on_env_error, self.record.folder.path)

    def start_workers(self) -> None:
        """Read the data, and create models and environments."""
        name = f"{self.groups['actor'].worker_group_name}-demonstrations-{next(_numbers)}"
        self._channel = Channel.create(name)
        sizes = self.world_sizes
        layout = Layout(sizes["actor"], sizes.get("rollout", 1), sizes.get("env", 1), name, self.record.step)
        if self._env is None:
            self._actor.init_actor(layout, None).wait()
        else:
            spec = self._env.init_worker(layout).wait()[0]
            wait_together(self._actor.init_actor(layout, spec), self._rollout.init_worker(layout, spec))
            if spec.cameras:
                check_orientation(self._actor, self._env, self.record, "env.eval", skips=self.config.skip_checks)
            check_data_facts(self._actor, self._env, self.record, "env.eval", skips=self.config.skip_checks)
        note_comparisons(self.record.folder.path, comparisons_of([self._actor]))

    def train_step(self, step: int) -> dict[str, float]:
        """Take `data.batches_per_step` optimizer steps."""
        with self.phase(step, events.ACTOR_TRAINING):
            return mean_over_ranks(self._actor.learn(step).wait())

    def send_weights(self) -> tuple[WorkerGroupHandle[Any], ...]:
        """Start sending the actor's weights to the rollout workers."""
        return self._rollout.sync_model_from_actor(), self._actor.sync_model_to_rollout()

    @property
    def runs_ahead(self) -> bool:
        return False

    def evaluate_policy(self, step: int) -> dict[str, float] | None:
        """Run greedy evaluation episodes, if there are environments."""
        if self._env is None:
            return None
        self.update_rollout_weights(step)
        self.record.emit(events.PhaseStarted(step, events.EVALUATE))
        episodes, _ = wait_together(self._env.evaluate(), self._rollout.evaluate())
        if not self._evaluated:
            self._evaluated = True
            note_comparisons(self.record.folder.path, [first_step_check("env.eval")])
        self._videos.write(step)
        figures = episode_means("eval", episodes)
        self._env_errors.take_from(self._env, episodes, "env.eval", self.record.step)
        return figures

    def write_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer and statistics."""
        self._actor.save_checkpoint(str(folder)).wait()

    def read_checkpoint(self, folder: Path) -> None:
        """Read what `write_checkpoint` wrote."""
        self.weight_version = self._actor.load_checkpoint(str(folder)).wait()[0]

    def shutdown(self) -> None:
        """End the workers. Leaving the cluster does the same."""
        super().shutdown()
        self._channel.close()


def program(job: Job, folder: RunFolder, listener: Listener) -> None:
    """Learn from demonstrations as configured in `job`, and record the run in `folder`; raises like `run_job`."""
    require_model_folder(cast("SftConfig", job.config))
    run_job(job, folder, listener, launch)


def launch(config: SftConfig, cluster: Cluster, record: RunRecord) -> SftRunner:
    """Place and start the workers, and return the loop over them."""
    placement = HybridComponentPlacement(config, cluster)
    groups: dict[str, WorkerGroup[Any]] = {"actor": SftActor.create_group(config)}
    if evaluates(config) and config.runner.val_check_interval != -1:
        groups["rollout"] = MultiStepRolloutWorker.create_group(config)
        # The evaluation environments only, `env.eval`.
        groups["env"] = CollectingEnvWorker.create_group(config)
    launch_together(cluster, {group: placement.get_strategy(name) for name, group in groups.items()})
    return SftRunner(config, groups, record)

"""The program that `rlinf train recipe=sft` runs, the workers that learn from demonstrations, and their memory."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

import torch

from recipes.demonstrations.columns import DatasetError, DatasetShape
from recipes.demonstrations.lerobot.set_info import DATA_FILES, HDF5_ENDINGS, read_info
from recipes.embodied.embodied_memory import (
    env_forecast,
    environment_spec,
    learner_parts,
    policy_sizes,
    rollout_forecast,
)
from recipes.embodied.envs.checks import first_step_check
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.learning.imitation import ImitationData
from recipes.embodied.learning.policy_precision import computing
from recipes.embodied.loop.data_check import check_data_facts, check_orientation
from recipes.embodied.loop.env_errors import EnvErrors
from recipes.embodied.loop.protocols import Layout, episode_means
from recipes.embodied.loop.videos import EvaluationVideos
from recipes.embodied.models.folder_facts import require_model_folder
from recipes.embodied.using.collector import CollectingEnvWorker
from recipes.embodied.workers.actor_base import PolicyActor, memory
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.sft.config import SftConfig, evaluates
from recipes.training.comparing_worker import comparisons_of
from recipes.training.seeding import Purpose, derive_seed
from recipes.training.updater import SKIPPED, Figures, Updater
from rlinf_core import (
    Channel,
    Cluster,
    ConfigError,
    HybridComponentPlacement,
    Job,
    Loss,
    WorkerGroup,
    WorkerGroupHandle,
    mean_over_ranks,
    run_job,
)
from rlinf_core.job.recipe import ProcessForecast
from rlinf_core.runners import events
from rlinf_core.runners.events import Listener
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.runner import RolloutRunner
from rlinf_core.runners.storage.first_contact import note_comparisons
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.worker.handle import wait_together
from rlinf_core.worker.worker_group import launch_together


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


# Bytes of the packages that read data sets (pyarrow, and av or PIL), measured.
_READERS: Final = 45 * 2**20
# Copies of the rows while they are read: the table of a file, and the arrays made of it.
_READING_COPIES: Final = 2


def forecast(config: SftConfig, world_sizes: Mapping[str, int | None]) -> list[ProcessForecast]:
    """Return the memory that each process of a job will hold, see `Recipe.memory`.

    Raises:
        ConfigError: the policy cannot be made for the environment, or the sizes of the rows are not known.
    """
    sizes = {name: count or 1 for name, count in world_sizes.items()}
    shape, rows, notes = _demonstrations(config)
    acts = evaluates(config)
    spec, of_env = environment_spec(config.env.eval) if acts else (_spec_of_rows(config, shape), ())
    policy, count = policy_sizes(config.actor, spec), sizes.get("actor", 1)
    share = max(1, (config.actor.global_batch_size or 1) // count)
    micro = min(config.actor.micro_batch_size or share, share)
    parts = learner_parts(config, policy, count, sends=acts)
    parts |= {
        "base": parts["base"] + _READERS,
        "batch": micro * policy.sample,  # batches are drawn in parts
        "activations": micro * policy.learning,
        "demonstrations": _READING_COPIES * rows,
    }
    actor = ProcessForecast("actor", count, parts, 0, config.actor.enable_offload, notes)
    if not acts:
        return [actor]
    rollout = rollout_forecast(config, config.env.eval, policy, sizes.get("rollout", 1), 0)
    return [actor, rollout, env_forecast(config.env.eval, spec, sizes.get("env", 1), of_env)]


def _demonstrations(config: SftConfig) -> tuple[DatasetShape | None, int, tuple[str, ...]]:
    """Return the sizes of the first data set's rows (None if it declares none), the bytes of all rows, and notes.

    Numbers count as float32, images as they are encoded; videos stay files and count nothing.
    """
    shape, size, notes = None, 0, list[str]()
    for path in config.data.paths:
        if path.endswith(HDF5_ENDINGS):
            notes.append(f"the rows of `{path}` are not counted: their number is known only after reading the file")
            continue
        try:
            info = read_info(Path(path))
            shape = shape or info.shape(path, config.data.state_columns, config.data.role_columns)
        except DatasetError as error:
            raise ConfigError("the size of the demonstrations is not known", why=str(error)) from error
        numbers = sum(math.prod(feature.shape) for feature in info.features.values() if not feature.is_camera)
        size += 4 * numbers * info.total_frames
        if any(camera.dtype == "image" for camera in info.cameras.values()):
            size += sum(file.stat().st_size for file in Path(path).glob(DATA_FILES))
    return shape, size, tuple(notes)


def _spec_of_rows(config: SftConfig, shape: DatasetShape | None) -> EnvSpec:
    """Return the spec of a policy that learns from rows alone, without environments."""
    if shape is None:
        why = "HDF5 files do not declare them without being read"
        help = "place `rollout` and `env`: their environments define the sizes"
        raise ConfigError("the sizes of the demonstrations' rows are not known", why=why, help=help)
    if config.data.target == "success":
        return EnvSpec(0, 1, num_choices=2, cameras=shape.cameras)
    # Only the rows tell the number of choices; it affects no more than a policy's last layer.
    choices, cameras = 2 if shape.choices else None, shape.cameras
    return EnvSpec(shape.state_size, shape.action_size, num_choices=choices, cameras=cameras, has_instructions=True)

"""The program that `rlinf train recipe=sft` runs."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final, cast

from recipes.embodied.envs.checks import first_step_check
from recipes.embodied.episodes.collector import CollectingEnvWorker
from recipes.embodied.loop.data_check import check_data_facts, check_orientation
from recipes.embodied.loop.env_errors import EnvErrors
from recipes.embodied.loop.episode_figures import episode_means
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.loop.videos import EvaluationVideos
from recipes.embodied.models.folder_facts import require_model_folder
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.sft.config import SftConfig, evaluates
from recipes.sft.sft_actor import SftActor
from recipes.training.comparing_worker import comparisons_of
from rlinf_core import (
    Channel,
    Cluster,
    HybridComponentPlacement,
    Job,
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

_numbers: Final = itertools.count()


class SftRunner(RolloutRunner):
    """Trains the actor on demonstrations, and evaluates it in environments, if there are any.

    Args:
        cfg: the configuration of the job.
        groups: `actor`, and both of `rollout` and `env` or none of them.
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
        """Take some optimizer steps."""
        with self.phase(step, events.ACTOR_TRAINING):
            return mean_over_ranks(self._actor.learn(step).wait())

    def send_weights(self) -> tuple[WorkerGroupHandle[Any], ...]:
        """Have the rollout workers take the weights of the actor."""
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
        # It makes the environments of `env.eval` alone.
        groups["env"] = CollectingEnvWorker.create_group(config)
    launch_together(cluster, {group: placement.get_strategy(name) for name, group in groups.items()})
    return SftRunner(config, groups, record)

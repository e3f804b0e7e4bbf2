"""The training loop of policies that act in environments."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from recipes.embodied.config import EmbodiedConfig
from recipes.embodied.config.env_config import EnvironmentConfig
from recipes.embodied.envs.checks import first_step_check
from recipes.embodied.loop.data_check import check_data_facts, check_orientation
from recipes.embodied.loop.env_errors import EnvErrors, RolloutRecovery
from recipes.embodied.loop.protocols import (
    EPISODES,
    OF_ENDED,
    EmbodiedActor,
    EmbodiedEnv,
    EmbodiedRollout,
    EpisodeSums,
    Layout,
    episode_means,
)
from recipes.embodied.loop.videos import EvaluationVideos
from recipes.training.comparing_worker import comparisons_of
from rlinf_core import Channel, WorkerGroup, WorkerGroupHandle, mean_over_ranks
from rlinf_core.foreign.files import read_bounded
from rlinf_core.runners import events
from rlinf_core.runners.events import ItemFate, ItemFates, item_fates
from rlinf_core.runners.metrics import read_metrics
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.runner import RolloutRunner
from rlinf_core.runners.storage.first_contact import note_comparisons
from rlinf_core.worker.handle import wait_together

_LARGEST_PACK: Final = 1 << 32
LOGGER = logging.getLogger("rlinf")
_OF_ENDED: Final = frozenset(f"env/{name}" for name in OF_ENDED)
# Distinguishes groups and channels of this process from those of an earlier attempt.
_numbers = itertools.count()


class EmbodiedRunner(RolloutRunner):
    """Runs actor, rollout and env workers until the run is over.

    Env and rollout workers exchange messages; a rollout worker puts its trajectories into a channel for the actors.

    With `runner.max_staleness: 0` a step consists of sync, rollout, advantages and training, in turn. With k, the
    rollouts of the next k steps are requested before the step is trained, each with the weights of that moment. Step
    numbers, not relative speeds, therefore determine which weights act in which step, and weights learn from samples
    that are at most k versions older.

    Args:
        cfg: the configuration of the job.
        actor, rollout, env: the workers that train, run the policy, and step environments.
        record: see `Runner`.
        trajectories: a dedicated channel; by default one is created.
    """

    def __init__(
        self,
        cfg: EmbodiedConfig,
        actor: WorkerGroup[EmbodiedActor],
        rollout: WorkerGroup[EmbodiedRollout],
        env: WorkerGroup[EmbodiedEnv],
        record: RunRecord | None = None,
        trajectories: Channel | None = None,
    ) -> None:
        super().__init__(cfg, {"actor": actor, "rollout": rollout, "env": env}, record)
        self._most_failed = cfg.runner.max_failed_fraction
        self.actor, self.rollout, self.env = actor, rollout, env
        self._trajectories = trajectories
        self._told_of_episodes = False
        self._environments = cfg.env
        self._videos = EvaluationVideos(cfg, env, self.record)
        self._noted: set[str] = set()
        # Training episodes that were dropped, and those that ended.
        self._failed = self._ended = 0
        self._env_errors = EnvErrors(cfg.runner.on_env_error, self.record.folder.path)
        # Requested rollouts by step: the calls on env and rollout workers.
        self._rollouts: dict[int, tuple[WorkerGroupHandle[EpisodeSums], WorkerGroupHandle[None]]] = {}
        self._recovery = RolloutRecovery(
            cfg, actor, rollout, env, self.record, self._forget_rollouts, lambda: bool(self._syncing)
        )

    @staticmethod
    def channel_name(actor: str) -> str:
        """Return a name, new in each attempt, for a channel of trajectories to a group."""
        return f"{actor}-trajectories-{next(_numbers)}"

    def start_workers(self) -> None:
        """Create environments and models."""
        if self._trajectories is None:
            self._trajectories = Channel.create(self.channel_name(self.groups["actor"].worker_group_name))
        sizes = self.world_sizes
        layout = Layout(sizes["actor"], sizes["rollout"], sizes["env"], self._trajectories.name, self.record.step)
        layout = self._recovery.suspects.known_in(layout)
        spec = self.env.init_worker(layout).wait()[0]
        self._recovery.starts = layout, spec
        wait_together(self.actor.init_worker(layout, spec), self.rollout.init_worker(layout, spec))
        note_comparisons(self.record.folder.path, comparisons_of([self.groups["env"], self.groups["actor"]]))
        if spec.cameras:
            check_orientation(self.actor, self.env, self.record, "env.train", skips=self.config.skip_checks)
        check_data_facts(self.actor, self.env, self.record, "env.train", skips=self.config.skip_checks)

    def train_step(self, step: int) -> dict[str, float]:
        """Carry out the four phases of a step."""
        began = time.perf_counter()

        def act() -> dict[str, float]:
            self.update_rollout_weights(step)
            return self.generate_rollouts(step)

        metrics = self._recovery.rollouts(step, act)
        self._note_first_step("env.train")
        with self.phase(step, events.ADVANTAGES):
            metrics |= mean_over_ranks(self.actor.compute_advantages_and_returns(step).wait())
        with self.phase(step, events.ACTOR_TRAINING):
            metrics |= mean_over_ranks(self.actor.run_training(step).wait())
        seconds = time.perf_counter() - began
        if "env/steps" in metrics:
            metrics["speed/env_steps_per_second"] = metrics["env/steps"] / seconds
        if self._recovery.suspects.count:
            metrics["env/starts_set_aside"] = self._recovery.suspects.count
        return metrics | self._idle_shares(seconds)

    def _forget_rollouts(self, weights: bool) -> None:
        """Forget a failed attempt; with `weights`, also that the rollout workers have weights."""
        if self._syncing or weights:
            self._synced = None
        self._syncing = ()
        self._rollouts.clear()

    def _note_first_step(self, section: str) -> None:
        """Record that the environments' first observations and step match their spec; else they would have raised."""
        if section not in self._noted:
            self._noted.add(section)
            comparisons = [first_step_check(section), *comparisons_of([self.groups["env"]])]
            note_comparisons(self.record.folder.path, comparisons)

    def _idle_shares(self, seconds: float) -> dict[str, float]:
        """Return the shares of a step in which actors did not train and environments ran no rollout.

        Asynchronous rollouts began in an earlier step, so that only means over several steps are accurate.
        """
        trained = sum(self._times.get(f"time/{phase}", 0.0) for phase in (events.ADVANTAGES, events.ACTOR_TRAINING))
        busy = {"learner": trained, "env": self._times.get("time/env/rollout")}
        return {f"speed/{who}_idle": max(0.0, 1 - spent / seconds) for who, spent in busy.items() if spent is not None}

    def send_weights(self) -> tuple[WorkerGroupHandle[Any], ...]:
        """Start sending the actor's weights to the rollout workers, between two rollouts."""
        return self._recovery.watched(self.rollout.sync_model_from_actor(), self.actor.sync_model_to_rollout())

    @property
    def runs_ahead(self) -> bool:
        return bool(self._rollouts)

    def generate_rollouts(self, step: int | None = None) -> dict[str, float]:
        """Run the policy in the environments while the actors receive the trajectories.

        Also requests rollouts of later steps, as far ahead as `max_staleness` allows, and waits for this step's.

        Returns:
            Means over the ended episodes, once there are as many as environments, and the staleness of the acting
            weights.
        """
        step = self.next_step if step is None else step
        with self.phase(step, events.GENERATE_ROLLOUTS):
            again = self._recovery.attempt
            for ahead in self.steps_ahead(step):
                if ahead not in self._rollouts:
                    self._rollouts[ahead] = (self.env.interact(ahead), self.rollout.generate(ahead, *again))
            env, rollout = self._rollouts[step]
            received = self.actor.recv_rollout_batch(step, *again)
            calls = self._recovery.watched(env, rollout, received, *self._recovery.saving())
            episodes, _, staleness, *saved = wait_together(*calls)
            if saved:
                (self._recovery.episodes,) = saved
            del self._rollouts[step]
        self.add_durations(env, rollout)
        figures = self._episode_figures("env", episodes, self._environments.train)
        return {**figures, "rollout/staleness": float(max(staleness))}

    def evaluate_policy(self, step: int) -> dict[str, float]:
        """Run the policy greedily in the evaluation environments; metrics are under `eval/`."""

        def act() -> list[list[Any]]:
            self.update_rollout_weights(step)
            self.record.emit(events.PhaseStarted(step, events.EVALUATE))
            return wait_together(*self._recovery.watched(self.env.evaluate(), self.rollout.evaluate()))

        episodes, _ = self._recovery.evaluation(act)
        self._note_first_step("env.eval")
        figures = self._episode_figures("eval", episodes, self._environments.eval)
        self._videos.write(step)
        return figures

    def _episode_figures(
        self, namespace: str, episodes: Sequence[EpisodeSums], of: EnvironmentConfig
    ) -> dict[str, float]:
        figures = episode_means(namespace, episodes, self._most_failed, of.total_num_envs * of.rollout_epoch)
        self._failed += int(figures[f"{namespace}/left_out"])
        where = "env.eval" if namespace == "eval" else "env.train"
        self._env_errors.take_from(self.env, episodes, where, self.record.step)
        if namespace == "env":
            self._tell_unknown_success(figures)
            self._ended += int(figures["env/episodes"] + figures["env/left_out"])
            if self._ended < of.total_num_envs:
                return {name: value for name, value in figures.items() if name not in _OF_ENDED}
        return figures

    def _tell_unknown_success(self, figures: Mapping[str, float]) -> None:
        """Warn once if episodes have ended without a report of success, on which a key depends."""
        train, ended = self._environments.train, figures["env/episodes"]
        if not train.success_reward or not ended or "env/success_at_end" in figures or "success" in self._noted:
            return
        self._noted.add("success")
        LOGGER.warning(
            "`env.train.success_reward` depends on success, which the environment has not reported in %d episodes so"
            " far",
            int(ended),
        )

    def finish(self) -> None:
        """Log the failures of simulators once more."""
        if self._failed:
            LOGGER.warning("%d episodes were left out: their simulators failed; see the logs of `env`", self._failed)

    def write_checkpoint(self, folder: Path) -> None:
        """Write weights, optimizer and, unless rollouts run ahead, the state of the environments."""
        self.actor.save_checkpoint(str(folder)).wait()
        if self.config.staleness:
            return  # the environments are ahead of the weights
        states = self._recovery.episodes
        if any(state is None for state in states) and not self._told_of_episodes:
            self._told_of_episodes = True
            LOGGER.warning(
                "the environment cannot save its state (`VectorEnv._save`): a resumed run will start new episodes"
            )
        for rank, state in enumerate(states):
            if state:
                file = folder / EPISODES / f"{rank}.npz"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(state)

    def items_in_flight(self) -> ItemFates:
        """See `Runner`: rollouts that run ahead, and the unfinished episodes of the environments."""
        if not self.config.staleness:
            return {}
        rollouts = [(ItemFate.AGAIN, f"rollout of step {step}") for step in sorted(self._rollouts)]
        ranks = range(self.world_sizes["env"])
        episodes = [(ItemFate.DROPPED, f"unfinished episodes of env worker {rank}") for rank in ranks]
        return item_fates([*rollouts, *episodes])

    def read_checkpoint(self, folder: Path) -> None:
        """Load weights and optimizer, and resume unfinished episodes where possible."""
        self.weight_version = self.actor.load_checkpoint(str(folder)).wait()[0]
        packs = [read_bounded(file, _LARGEST_PACK) for file in sorted((folder / EPISODES).glob("*.npz"))]
        reasons = {reason for reason in self.env.load_state(packs).wait() if reason}
        self._recovery.episodes = packs if packs and not reasons else [b""]
        if packs and not reasons:
            before = (line for line in read_metrics(self.record.folder.metrics_file) if line.step <= self.record.step)
            self._ended = int(sum(line.metrics.get("env/episodes", 0.0) for line in before))
        if reasons:
            LOGGER.warning("environments start new episodes: %s", "; ".join(sorted(reasons)))

    def shutdown(self) -> None:
        """End the workers. Leaving the cluster does the same."""
        super().shutdown()
        if self._trajectories is not None:
            self._trajectories.close()

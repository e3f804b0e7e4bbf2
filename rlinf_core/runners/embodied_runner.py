"""The training loop of policies that act in environments."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

from rlinf_core.channel.channel import Channel
from rlinf_core.runners import events
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.standalone import RunConfig, StandaloneRecord
from rlinf_core.worker.handle import WorkerGroupHandle, wait_together
from rlinf_core.worker.worker_group import WorkerGroup

NEVER: Final = -1
# Folder of a checkpoint that holds the state of the environments, a file for each env worker.
EPISODES: Final = "env"
LOGGER = logging.getLogger("rlinf")
# A group and a channel of this process is told from those of an attempt before it.
_numbers = itertools.count()


class Layout(NamedTuple):
    """What every worker is told of the others when a run begins.

    Attributes:
        actors: processes of the actor.
        rollouts: processes of the rollout.
        envs: processes of the env.
        trajectories: name of the channel from rollout to actor; its keys are those of `trajectory_key`.
        step: the last training step that is done: 0, or more where the run continues from a checkpoint.
    """

    actors: int
    rollouts: int
    envs: int
    trajectories: str
    step: int = 0


def trajectory_key(actor: int, step: int, max_staleness: int) -> str:
    """Under which key of the channel an actor finds the rollout of a step, while at most k others are on their way."""
    return f"{actor}:{step % (max_staleness + 1)}"


class EmbodiedRunner:
    """Runs actor, rollout and env workers until the run is over.

    The groups have the methods of `EmbodiedFSDPActor`, `MultiStepRolloutWorker` and `EnvWorker` in recipes/embodied.
    Env and rollout workers send to each other; a rollout worker puts what it has seen into a channel for the actors.

    With `runner.max_staleness: 0` a step is sync, rollout, advantages, training, one after the other. With k the
    rollouts of the next k steps are asked for before the step is trained, and each acts with the weights that are there
    when it is asked for. Which weights act in which step is so decided here, by numbers of steps and not by who is
    faster, and a sample is never learned from by weights more than k versions newer than those that made it.

    Args:
        cfg: the configuration of the job.
        actor: the workers that learn.
        rollout: the workers that run the policy.
        env: the workers that step environments.
        record: keeps what happens; training begins after its step. Without one the runner makes a run folder with a
            record of its own, and closes it when the run is over or has failed.
    """

    def __init__(
        self,
        cfg: RunConfig,
        actor: WorkerGroup[Any],
        rollout: WorkerGroup[Any],
        env: WorkerGroup[Any],
        record: RunRecord | None = None,
    ) -> None:
        self.config = cfg.runner
        self.actor = actor
        self.rollout = rollout
        self.env = env
        self._own_record = StandaloneRecord.create(cfg) if record is None else None
        self.record: RunRecord = record or cast("RunRecord", self._own_record)
        self._times: dict[str, float] = {}
        self._told_of_episodes = False
        # How often the weights have changed, and which of them the rollout has.
        self._version = 0
        self._synced: int | None = None
        self._syncing: tuple[WorkerGroupHandle[Any], ...] = ()
        # Rollouts that were asked for, by step: the calls on env and rollout.
        self._rollouts: dict[int, tuple[WorkerGroupHandle[Any], WorkerGroupHandle[Any]]] = {}

    @property
    def world_sizes(self) -> dict[str, int]:
        """Processes of each component."""
        return {
            "actor": self.actor.world_size,
            "rollout": self.rollout.world_size,
            "env": self.env.world_size,
        }

    @property
    def _groups(self) -> tuple[WorkerGroup[Any], ...]:
        return self.env, self.rollout, self.actor

    @property
    def last_step(self) -> int | None:
        """The step after which the run ends; None: it has no end."""
        return self.config.last_step

    def init_workers(self) -> None:
        """Make environments and models, and load the checkpoint that the run continues from."""
        with self._closing_after_failure():
            self._init_workers()

    def _init_workers(self) -> None:
        name = f"{self.actor.worker_group_name}-trajectories-{next(_numbers)}"
        self._channel = Channel.create(name)
        sizes = self.world_sizes
        layout = Layout(sizes["actor"], sizes["rollout"], sizes["env"], name, self.record.step)
        spec = self.env.init_worker(layout).wait()[0]
        wait_together(self.actor.init_worker(layout, spec), self.rollout.init_worker(layout, spec))
        source = self.record.source
        if source is not None:
            self._version = self.actor.load_checkpoint(str(source.path)).wait()[0]
            self._load_episodes(source.path)

    def run(self) -> None:
        """Train to the end, or evaluate once with `only_eval`."""
        with self._closing_after_failure():
            self._run()
        self._close_record()

    def _run(self) -> None:
        record, last = self.record, self.last_step
        if self.config.only_eval:
            record.started(record.step, self.world_sizes)
            self.evaluate(record.step)
            return
        record.started(last, self.world_sizes)
        if self.config.val_before_train and self.config.val_check_interval != NEVER and record.step == 0:
            self.evaluate(0)
        for step in itertools.count(record.step + 1):
            if last is not None and step > last:
                return
            try:
                self.train(step)
                if self._is_due(self.config.val_check_interval, step):
                    self.evaluate(step)
                if self._is_due(self.config.save_interval, step):
                    self.save_checkpoint(step)
            except (KeyboardInterrupt, SystemExit):
                # Between its training and the next step's the actor is as the step has left it.
                if self.config.save_on_interrupt and record.has_unsaved(step):
                    self.save_checkpoint(step)
                raise
            record.collect_trace(*self._groups, last=step == last)

    @property
    def _next_step(self) -> int:
        return self.record.step + 1

    @contextmanager
    def _closing_after_failure(self) -> Generator[None, None, None]:
        """Close a record of the runner's own when the block raises."""
        try:
            yield
        except BaseException as error:
            self._close_record(error)
            raise

    def _close_record(self, error: BaseException | None = None) -> None:
        if self._own_record is not None:
            self._own_record.close(error)

    def _is_due(self, interval: int, step: int) -> bool:
        return interval != NEVER and (step % interval == 0 or step == self.last_step)

    def train(self, step: int | None = None) -> None:
        """Train for one step; by default for the one after the last."""
        step = self._next_step if step is None else step
        began = time.perf_counter()
        if self._synced is None or (step - 1) % self.config.weight_sync_interval == 0:
            self.update_rollout_weights(step)
        metrics = self.generate_rollouts(step)
        with self._phase(step, events.ADVANTAGES):
            metrics |= _means(self.actor.compute_advantages_and_returns(step).wait())
        with self._phase(step, events.ACTOR_TRAINING):
            metrics |= _means(self.actor.run_training(step).wait())
        self._version += 1
        self._times["time/step"] = elapsed = time.perf_counter() - began
        if "env/steps" in metrics:
            metrics["speed/env_steps_per_second"] = metrics["env/steps"] / elapsed
        # With the weights that an evaluation since the last step has sent.
        times, self._times = self._times, {}
        self.record.step_finished(step, {**metrics, **times})

    def update_rollout_weights(self, step: int | None = None) -> None:
        """Give the rollout workers the weights of the actor, unless they have them.

        They take them between two rollouts. Where rollouts go on while the actor trains nobody waits for that.
        """
        if self._synced == self._version:
            return
        step = self._next_step if step is None else step
        with self._phase(step, events.SYNC_WEIGHTS):
            self._finish_sync()
            self._syncing = (self.rollout.sync_model_from_actor(), self.actor.sync_model_to_rollout())
            if not self._rollouts:
                self._finish_sync()
        self._synced = self._version

    def _finish_sync(self) -> None:
        wait_together(*self._syncing)
        self._syncing = ()

    def generate_rollouts(self, step: int | None = None) -> dict[str, float]:
        """Have the policy act in the environments while the actors receive what happens.

        Asks for the rollouts of later steps too, as far ahead as `max_staleness` allows, and waits for this step's.

        Returns:
            Means over the episodes that ended, and how old the acting weights were, by their full names.
        """
        step = self._next_step if step is None else step
        with self._phase(step, events.GENERATE_ROLLOUTS):
            newest = step + self.config.max_staleness
            for ahead in range(max(self._rollouts, default=step - 1) + 1, newest + 1):
                if self.last_step is None or ahead <= self.last_step:
                    self._rollouts[ahead] = (self.env.interact(ahead), self.rollout.generate(ahead))
            env, rollout = self._rollouts.pop(step)
            episodes, _, staleness = wait_together(env, rollout, self.actor.recv_rollout_batch(step))
        self._spent(env, rollout)
        return {**_episode_means("env", episodes), "rollout/staleness": float(max(staleness))}

    def evaluate(self, step: int | None = None) -> None:
        """Have the policy act greedily in environments that it is not trained in; by default after the last step."""
        step = self.record.step if step is None else step
        self.update_rollout_weights(step)
        self.record.tell(events.PhaseStarted(step, events.EVALUATE))
        began = time.perf_counter()
        episodes, _ = wait_together(self.env.evaluate(), self.rollout.evaluate())
        metrics = _episode_means("eval", episodes)
        self.record.evaluated(step, {**metrics, "time/evaluate": time.perf_counter() - began})

    def save_checkpoint(self, step: int | None = None) -> None:
        """Keep everything that training after `step`, by default the last one, depends on."""
        step = self.record.step if step is None else step
        self.record.save(
            step,
            self._write_checkpoint,
            weight_version=self._version,
            world_sizes=self.world_sizes,
        )

    def _write_checkpoint(self, path: Path) -> None:
        wait_together(self.actor.save_checkpoint(str(path)))
        if self.config.max_staleness:
            return  # the environments are ahead of the weights by then
        states = self.env.save_state().wait()
        if any(state is None for state in states) and not self._told_of_episodes:
            self._told_of_episodes = True
            LOGGER.warning(
                "the environment cannot save its state (`VectorEnv._save`): a resumed run will begin new episodes"
            )
        for rank, state in enumerate(states):
            if state:
                file = path / EPISODES / f"{rank}.npz"
                file.parent.mkdir(exist_ok=True)
                file.write_bytes(state)

    def _load_episodes(self, path: Path) -> None:
        """Continue the episodes that the env workers were in the middle of, where that is possible."""
        packs = [file.read_bytes() for file in sorted((path / EPISODES).glob("*.npz"))]
        reasons = {reason for reason in self.env.load_state(packs).wait() if reason}
        if reasons:
            LOGGER.warning("environments begin new episodes: %s", "; ".join(sorted(reasons)))

    @contextmanager
    def _phase(self, step: int, name: str) -> Generator[None, None, None]:
        self.record.tell(events.PhaseStarted(step, name))
        began = time.perf_counter()
        yield
        self._times[f"time/{name}"] = time.perf_counter() - began

    def _spent(self, *handles: WorkerGroupHandle[Any]) -> None:
        """Where the time of workers went, the longest of the ranks."""
        for handle in handles:
            for tag, seconds in handle.consume_durations().items():
                self._times[f"time/{tag}"] = seconds

    def shutdown(self) -> None:
        """End the workers. Leaving the cluster does the same."""
        self._close_record()
        for group in self._groups:
            group.shutdown()
        self._channel.close()


def _means(by_rank: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Figures of equally many samples each, as their mean."""
    figures = list(by_rank)
    return {name: sum(each[name] for each in figures) / len(figures) for name in figures[0]}


def _episode_means(namespace: str, by_rank: Iterable[Mapping[str, tuple[float, int]]]) -> dict[str, float]:
    """Return sums and counts of episodes as the mean over all episodes, and how many these are."""
    totals: dict[str, tuple[float, int]] = {}
    for sums in by_rank:
        for name, (total, count) in sums.items():
            before = totals.get(name, (0.0, 0))
            totals[name] = (before[0] + total, before[1] + count)
    _, episodes = totals.get("return", (0.0, 0))
    means = {f"{namespace}/{name}": total / count for name, (total, count) in totals.items()}
    return {**means, f"{namespace}/episodes": float(episodes)}

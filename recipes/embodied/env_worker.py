"""The workers that step environments."""

from __future__ import annotations

from typing import Any

from recipes.embodied.config import EmbodiedConfig, group_size
from recipes.embodied.envs.base import EnvSettings, EnvSpec, StepResult, VectorEnv
from recipes.embodied.envs.registry import make_env
from recipes.embodied.episodes import EpisodeSums, Sums
from recipes.embodied.layout import chunks_of, routes_of
from recipes.embodied.routing import Routes
from recipes.embodied.trajectory import OUTCOME, sliced, stacked
from rlinf_core import Worker
from rlinf_core.config.fragments.env import EnvironmentConfig
from rlinf_core.runners.embodied_runner import Layout


class Stages:
    """The environments of one worker, a batch for each pipeline stage, and where their observations go.

    Args:
        config: the whole file.
        environments: `env.train` or `env.eval`.
        worker: whose they are.
        layout: of the job.
        training: whether they are those of `env.train`.
    """

    def __init__(
        self, config: EmbodiedConfig, environments: EnvironmentConfig, worker: Worker, layout: Layout, *, training: bool
    ) -> None:
        info = worker.worker_info
        self.routes: Routes = routes_of(layout, config, training=training)
        self.passes = environments.rollout_epoch
        # Values are asked for where episodes are cut off, or wherever they end.
        self._values = training and config.actor.model.add_value_head
        self._always = config.algorithm.bootstrap_type == "always"
        self.chunks = chunks_of(config, environments, training=training)
        self.shares = [self.routes.of_env(info.rank, stage) for stage in range(self.routes.stages)]
        self.batches: list[VectorEnv] = [
            make_env(
                environments.env_type,
                EnvSettings.of(
                    environments,
                    num_envs=self.routes.batch,
                    first_env=self.routes.first_env(info.rank, stage),
                    group_size=group_size(config, environments),
                    hardware=info.hardware,
                ),
            )
            for stage in range(self.routes.stages)
        ]

    def message(self, result: StepResult) -> dict[str, Any]:
        """Return what rollout workers are told of a step; final observations only where it is asked what they are
        worth.
        """
        message: dict[str, Any] = {name: getattr(result, name) for name in OUTCOME}
        message["observations"] = result.observations
        if result.final_observations is not None and self._values and (self._always or result.truncations.any()):
            message["final_observations"] = result.final_observations
        return message

    def close(self) -> None:
        """Give back what the environments hold."""
        for batch in self.batches:
            batch.close()


class EnvWorker(Worker):
    """Steps batches of environments with the actions that rollout workers send.

    For every stage and chunk one message goes to each rollout worker that acts for some of the stage's environments,
    and one comes back. With two stages the one steps while the actions of the other are on their way.
    """

    config_section = "env"

    def __init__(self, config: EmbodiedConfig) -> None:
        super().__init__()
        self._config = config
        self._train: Stages | None = None
        self._eval: Stages | None = None

    def init_worker(self, layout: Layout) -> EnvSpec:
        """Make the environments.

        Returns:
            What a policy must know of them.
        """
        self._layout = layout
        self._step = layout.step
        self._rollout = self._config.rollout.group_name
        self._train = Stages(self._config, self._config.env.train, self, layout, training=True)
        return self._train.batches[0].spec

    def interact(self, step: int | None = None) -> Sums:
        """Step all environments for one rollout: `rollout_epoch` passes, each from new episodes.

        Args:
            step: the training step, which the starts depend on; by default the one after the last.

        Returns:
            Sums over the episodes that ended.
        """
        stages = self._train
        if stages is None:
            raise RuntimeError("called before init_worker()")
        self._step = step = self._step + 1 if step is None else step
        return self._passes(stages, step * stages.passes)

    def evaluate(self) -> Sums:
        """As `interact`, in the environments of `env.eval`, from the same starts every time."""
        if self._eval is None:
            self._eval = Stages(self._config, self._config.env.eval, self, self._layout, training=False)
        return self._passes(self._eval, 0)

    def _passes(self, stages: Stages, first_reset: int) -> Sums:
        sums = EpisodeSums()
        for number in range(stages.passes):
            for stage, batch in enumerate(stages.batches):
                self._send(stages, stage, {"observations": batch.reset(first_reset + number)})
            for _ in range(stages.chunks):
                for stage, batch in enumerate(stages.batches):
                    with self.worker_timer("env/wait"):
                        actions = self._recv_actions(stages, stage)
                    with self.worker_timer("env/step"):
                        result = batch.step(actions)
                    self._send(stages, stage, stages.message(result))
                    if result.episodes is not None:
                        sums.add(result.episodes)
        return sums.sums

    def _send(self, stages: Stages, stage: int, message: dict[str, Any]) -> None:
        for share in stages.shares[stage]:
            part = sliced(message, share.start, share.stop, stages.routes.batch)
            self.send(part, self._rollout, share.peer)

    def _recv_actions(self, stages: Stages, stage: int) -> Any:
        parts = [{"actions": self.recv(self._rollout, share.peer)} for share in stages.shares[stage]]
        return stacked(parts)["actions"]

    def _close(self) -> None:
        """Give back what the environments hold: a robot must not be left without its driver in motion."""
        for stages in (self._train, self._eval):
            if stages is not None:
                stages.close()
        super()._close()

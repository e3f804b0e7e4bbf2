"""Env workers that collect whole episodes without training. Imports no torch."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

from recipes.embodied.config.env_config import InterventionConfig
from recipes.embodied.config.intervention_types import NONE
from recipes.embodied.envs.base import VectorEnv
from recipes.embodied.envs.env_spec import EnvSpec
from recipes.embodied.envs.simulators.packages import versions_of
from recipes.embodied.episodes.collector import CollectedEpisode, EpisodeCollector, Keep
from recipes.embodied.loop.frames import FrameRecorder
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.workers.env_worker import EnvWorker, attach
from recipes.training.arrays import Array
from rlinf_core import ConfigError

# The actor of steps without interventions.
Actor: TypeAlias = Literal["policy", "expert", "nobody"]


class CollectingEnvWorker(EnvWorker):
    """Carries out one episode in each of the environments of `env.eval`."""

    def init_worker(self, layout: Layout, intervention: InterventionConfig | None = None) -> EnvSpec:
        """Make the environments; return the facts that a policy needs about them.

        Args:
            layout: the layout of the job.
            intervention: the source that takes over from the actor; None: no interventions.
        """
        self._rollout = self._config.rollout.group_name
        self._eval = self._made(self._config.env.eval, layout, training=False)
        if intervention is not None and intervention.source != NONE:
            for batch in self._eval.batches:
                attach(batch, intervention)
        return self._eval.batches[0].spec

    def describe(self) -> dict[str, Any]:
        """Return what an episode depends on besides the configuration: horizon, images, package versions."""
        batch = self._batches[0]
        return {
            "max_episode_steps": batch.max_episode_steps,
            "control_hz": batch.control_hz,
            "state_size": batch.spec.state_size,
            "action_size": batch.spec.action_size,
            "aged_cameras": list(batch.frame_ages()),
            "cameras": {name: list(shape) for name, shape in batch.spec.cameras.items()},
            "versions": {"numpy": np.__version__, **versions_of(self._config.env.eval.env_type)},
        }

    @property
    def _batches(self) -> list[VectorEnv]:
        if self._eval is None:
            raise RuntimeError("called before init_worker()")
        return self._eval.batches

    def collect(self, reset: int, keep: Keep, *, actor: Actor = "policy", film: bool = False) -> list[CollectedEpisode]:
        """Carry out the episodes that begin with a reset.

        Args:
            reset: its number.
            keep: what is kept of every step.
            actor: the source of actions in which nobody intervenes: the environment's scripted expert, the policy by
                the rollout workers' `evaluate`, or nobody: the arm stands still until the person moves it, and an
                episode begins with the first motion.
            film: keep what `recorded_episodes` returns.

        Raises:
            ConfigError: there is no expert for this task.
        """
        stages = self._eval
        if stages is None:
            raise RuntimeError("called before init_worker()")
        environments = self._config.env.eval
        task = environments.task or environments.env_type
        collectors = [EpisodeCollector(batch, reset, task, keep) for batch in stages.batches]
        if film:
            self._films = [FrameRecorder(batch, reset) for batch in stages.batches]
        if actor != "policy":
            for batch, collector in zip(stages.batches, collectors, strict=True):
                if actor == "nobody" and batch.intervention is not None:
                    batch.intervention.wait_for_person()
                still = np.zeros((batch.num_envs, 1, batch.action_size), np.float32)
                while not collector.over:
                    collector.step(_expert_actions(batch) if actor == "expert" else still)
        else:
            for stage, collector in enumerate(collectors):
                self._send(stages, stage, stages.first_message(collector.observations))
            for _ in range(stages.chunks):
                for stage, collector in enumerate(collectors):
                    actions = self._recv_actions(stages, stage)
                    self._send(stages, stage, {"observations": collector.step(actions)})
        self._errors += [error for collector in collectors for error in collector.errors]
        return [episode for collector in collectors for episode in collector.episodes()]


def _expert_actions(batch: VectorEnv) -> Array:
    """Return the expert's actions, [B, 1, A]."""
    actions = batch.expert()
    if actions is None:
        kind = batch.settings.task or type(batch).__name__
        raise ConfigError(
            f"the task `{kind}` has no scripted expert",
            help="record with a policy (`--checkpoint`), or give your environment an `expert`",
        )
    return np.asarray(actions)[:, None]

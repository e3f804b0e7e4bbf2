"""Collection of episodes by the workers of a job, shared by recordings and evaluations."""

from __future__ import annotations

import itertools
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, cast

from recipes.embodied.config import PolicyJob
from recipes.embodied.config.env_config import EnvironmentConfig, EvalEnvironmentConfig, InterventionConfig
from recipes.embodied.config.intervention_types import drives_one
from recipes.embodied.envs.checks import first_step_check
from recipes.embodied.envs.env_spec import EnvError, EnvSpec
from recipes.embodied.loop.env_errors import EnvErrors
from recipes.embodied.loop.protocols import Layout
from recipes.embodied.loop.videos import EPISODES, EpisodeFrames
from recipes.embodied.models.policy_folder import keep_loaded, load_trained
from recipes.embodied.rules.data_rules import check_given
from recipes.embodied.using.collector import Actor, CollectedEpisode, CollectingEnvWorker, Keep
from recipes.embodied.workers.rollout_worker import MultiStepRolloutWorker
from recipes.training.comparing_worker import comparisons_of
from rlinf_core import Channel, Cluster, HybridComponentPlacement
from rlinf_core.runners.run_program import claim_components
from rlinf_core.runners.storage.first_contact import ContactCheck
from rlinf_core.worker.handle import wait_together

_numbers: Final = itertools.count()


class Collection:
    """The worker groups of a job that collects episodes.

    Args:
        config: the configuration of the job; `env.eval` describes the episodes.
        cluster: the cluster of the workers.
        checkpoint: the checkpoint whose policy acts; None: the environment's scripted expert, unless `pretrained`.
        intervention: the source that takes over; without a policy, a person who chooses all actions.
        pretrained: whether, without a checkpoint, the policy in `actor.model.model_path` acts.

    Attributes:
        spec: the spec of the environments.
        facts: the facts of the environments, see `CollectingEnvWorker.describe`.
        num_envs: environments that share a reset.
        images: the policy's image preprocessing, see `BasePolicy.describe_images`; empty without a policy.
        errors: the errors of the environments' own code so far.
    """

    def __init__(
        self,
        config: PolicyJob,
        cluster: Cluster,
        checkpoint: Path | None,
        intervention: InterventionConfig | None = None,
        *,
        pretrained: bool = False,
    ) -> None:
        placement = HybridComponentPlacement(config, cluster)
        acts = pretrained or checkpoint is not None
        claim_components(cluster, config, ["env", *(["rollout"] if acts else [])])
        # A group forwards the calls of its workers' methods to all ranks.
        self._env = cast(
            "Any",
            CollectingEnvWorker.create_group(config).launch(cluster, placement_strategy=placement.get_strategy("env")),
        )
        self._rollout: Any = None
        self._alone: Actor = "expert" if intervention is None else "nobody"
        rollouts = 1
        if acts:
            group = ActingWorker.create_group(config).launch(
                cluster, placement_strategy=placement.get_strategy("rollout")
            )
            self._rollout, rollouts = cast("Any", group), group.world_size
        name = f"{config.env.group_name}-episodes-{next(_numbers)}"
        self._channel = Channel.create(name)
        layout = Layout(1, rollouts, self._env.world_size, name)
        self.spec: EnvSpec = self._env.init_worker(layout, intervention).wait()[0]
        self.facts: dict[str, Any] = self._env.describe().wait()[0]
        self.num_envs = config.env.eval.total_num_envs
        self.images: dict[str, Any] = {}
        self.errors: list[EnvError] = []
        self._told = EnvErrors(config.runner.on_env_error)
        if acts:
            self._rollout.init_from(layout, self.spec, None if checkpoint is None else str(checkpoint)).wait()
            self.images = self._rollout.describe_images().wait()[0]

    def comparisons(self) -> list[ContactCheck]:
        """Return the comparisons before and in the first episodes."""
        acts = comparisons_of([self._env] if self._rollout is None else [self._env, self._rollout])
        return [first_step_check("env.eval"), *acts]

    def recorded_episodes(self, most: int = EPISODES) -> list[EpisodeFrames] | None:
        """Return the recorded frames of the last reset, by environment, of at most `most` episodes of each outcome;
        None if the environments have no images.
        """
        by_rank: list[list[EpisodeFrames] | None] = self._env.recorded_episodes(most).wait()
        if all(films is None for films in by_rank):
            return None
        return sorted((film for films in by_rank for film in films or ()), key=lambda film: film.env)

    def episodes(self, keep: Keep, *, film: bool = False) -> Iterator[list[CollectedEpisode]]:
        """Yield the episodes of one reset after another, endlessly; each list is ordered by environment.

        Raises:
            EnvironmentRaisedError: the environments' code raises, and `runner.on_env_error` is `stop`.
        """
        for reset in itertools.count():
            if self._rollout is None:
                by_rank = self._env.collect(reset, keep, actor=self._alone, film=film).wait()
            else:
                by_rank, _ = wait_together(self._env.collect(reset, keep, film=film), self._rollout.evaluate())
            errors: list[EnvError] = [error for rank in self._env.take_errors().wait() for error in rank]
            self.errors += errors
            self._told.take(errors, "env.eval", 0, first=reset == 0)
            yield sorted((episode for rank in by_rank for episode in rank), key=lambda episode: episode.env)


@contextmanager
def collecting(
    config: PolicyJob,
    environments: EnvironmentConfig,
    episodes: int,
    checkpoint: Path | None,
    intervention: InterventionConfig | None = None,
    *,
    pretrained: bool = False,
) -> Generator[Collection, None, None]:
    """Start the workers that collect episodes, on their own cluster, within the block.

    Args:
        config: the configuration of the job.
        environments: `env.train` or `env.eval`, with the seed of the starts.
        episodes: the number of episodes wanted, which bounds the number of environments.
        checkpoint: see `Collection`.
        intervention: see `Collection`; a person drives one environment of each env worker.
        pretrained: see `Collection`.

    Raises:
        ConfigError: the environments cannot be made, or an episode has no end.
        CheckpointError: the checkpoint cannot be read, or is of another model.
    """
    if checkpoint is not None:
        check_given(config, environments, checkpoint)
    with Cluster(cluster_cfg=config.cluster) as cluster:
        workers = HybridComponentPlacement(config, cluster).get_world_size("env")
        shares = workers * config.rollout.pipeline_stage_num
        one = intervention is not None and drives_one(intervention.source)
        most = shares if one else min(environments.total_num_envs, -(-episodes // shares) * shares)
        update: dict[str, Any] = {"rollout_epoch": 1, "total_num_envs": most}
        if isinstance(environments, EvalEnvironmentConfig):
            counted = environments.in_training.model_copy(update={"auto_reset": False})
            chosen = environments.model_copy(update=update).counted_as(counted)
        else:
            chosen = environments.model_copy(update={**update, "auto_reset": False})
        env = config.env.model_copy(update={"eval": chosen})
        filled = config.model_copy(update={"env": env})
        yield Collection(filled, cluster, checkpoint, intervention, pretrained=pretrained)


class ActingWorker(MultiStepRolloutWorker):
    """A worker that acts greedily with weights that it reads itself, without an actor."""

    def init_from(self, layout: Layout, spec: EnvSpec, checkpoint: str | None) -> None:
        """Create the policy, with the weights of a checkpoint if one is named; others are drawn as by the actor.

        Args:
            layout: the layout of the job.
            spec: the spec of the environments.
            checkpoint: a folder `global_step_N` that this node sees; None: the weights of `actor.model.model_path`.

        Raises:
            CheckpointError: the checkpoint cannot be read, or is of another model.
        """
        self.init_worker(layout, spec)
        if checkpoint is not None:
            load_trained(self.policy, self._config.actor.model, spec, checkpoint)
        keep_loaded(self._contact, self.policy, checkpoint or self._config.actor.model.model_path)

    def describe_images(self) -> dict[str, Any]:
        """Return the policy's image preprocessing, see `BasePolicy.describe_images`."""
        return self.policy.describe_images()

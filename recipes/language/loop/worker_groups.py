"""The worker groups of a language job, with their placement and start.

Each call returns a handle of all ranks' values. Workers are named, not imported, as only their processes need torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from recipes.language.answers.prompt_messages import Assignment, GenerationReport, Prompt, ScoredGroup
from recipes.language.config.language_config import LanguageConfig
from recipes.language.config.language_no_effect import OPTIONAL
from recipes.training.comparing_worker import Comparing
from rlinf_core import Cluster, HybridComponentPlacement, WorkerGroup, WorkerGroupHandle
from rlinf_core.worker.worker import WorkerReference
from rlinf_core.worker.worker_group import launch_together


class LanguageLayout(NamedTuple):
    """The groups of a job and the channels between them.

    Attributes:
        actors, rollouts, rewards: processes of each group.
        answers: channel from rollout to reward workers; the key is the reward worker's rank. If generation never stops,
            all reward workers share one key, and the runner's prompts use the channel, too.
        scored: channel from reward to actor workers, keyed by a group's slot, and of reports to the runner, if
            generation never stops.
        critics, references, teachers: processes of the groups that evaluate the actors' batches; 0: no such group.
        judges: processes whose models score for the reward workers, asked through the channel `answers`.
    """

    actors: int
    rollouts: int
    rewards: int
    answers: str
    scored: str
    critics: int = 0
    references: int = 0
    teachers: int = 0
    judges: int = 0


Metrics: TypeAlias = Mapping[str, float]
Nothing: TypeAlias = WorkerGroupHandle[None]


class PreparedGroup(Comparing, Protocol):
    """Workers that load a model or data before the first step."""

    def init_worker(self, layout: Any, /) -> Nothing: ...


class LanguageActorGroup(PreparedGroup, Protocol):
    """The workers that train."""

    def sync_model_to_rollout(self) -> WorkerGroupHandle[int]: ...
    def recv_rollout_batch(self, step: int, assignment: Assignment, /) -> Nothing: ...
    def compute_advantages_and_returns(self, step: int, /) -> WorkerGroupHandle[Metrics]: ...
    def run_training(self, step: int, last_step: int | None, /) -> WorkerGroupHandle[Metrics]: ...
    def save_checkpoint(self, folder: str, /) -> Nothing: ...
    def load_checkpoint(self, folder: str, /) -> WorkerGroupHandle[int]: ...
    def save_buffered(self, folder: str, slots: tuple[int, ...], /) -> Nothing: ...
    def load_buffered(self, folder: str, slots: tuple[int, ...], /) -> Nothing: ...
    def save_unfinished(self, folder: str, /) -> WorkerGroupHandle[Mapping[int, int | None]]: ...
    def load_unfinished(self, folder: str, positions: tuple[int, ...], /) -> Nothing: ...
    def save_model(self, folder: str, /) -> Nothing: ...


class EngineGroup(PreparedGroup, Protocol):
    """The workers that hold engines."""

    def sync_model_from_actor(self) -> WorkerGroupHandle[int]: ...
    def offload(self, weights_follow: bool, /) -> Nothing: ...


class AnsweringGroup(PreparedGroup, Protocol):
    """The workers that answer prompts."""

    def problem_counts(self) -> WorkerGroupHandle[tuple[int, int]]: ...
    def generate(self, prompts: tuple[Prompt, ...], /) -> WorkerGroupHandle[GenerationReport]: ...
    def put_again(self, slots: tuple[int, ...], /) -> WorkerGroupHandle[tuple[int, ...]]: ...


class GenerationGroup(EngineGroup, AnsweringGroup, Protocol):
    """The workers that answer prompts with their own engines."""

    def generate_forever(self) -> Nothing: ...
    def try_alone(self, prompt: Prompt, /) -> Nothing: ...


class RewardGroup(PreparedGroup, Protocol):
    """The workers that score answers."""

    def score(self, slots: tuple[int, ...], /) -> WorkerGroupHandle[list[ScoredGroup]]: ...
    def send_rollout_batch(self, step: int, assignment: Assignment, /) -> Nothing: ...
    def score_forever(self) -> Nothing: ...


class ReferenceGroup(PreparedGroup, Protocol):
    """The workers that hold the reference model, or a teacher."""

    def evaluate(self, step: int, /) -> Nothing: ...


class CriticGroup(ReferenceGroup, Protocol):
    """The workers that estimate values. They exchange tokens with the actors directly."""

    def run_training(self, step: int, last_step: int | None, /) -> WorkerGroupHandle[Metrics]: ...
    def save_checkpoint(self, folder: str, /) -> Nothing: ...
    def load_checkpoint(self, folder: str, /) -> Nothing: ...


class JudgeGroup(PreparedGroup, Protocol):
    """The workers that judge answers by a model."""

    def serve(self) -> Nothing: ...


ACTOR = WorkerReference[LanguageActorGroup](
    "recipes.language.workers.actor_worker:LanguageActor", LanguageActorGroup, "actor"
)
REWARD = WorkerReference[RewardGroup]("recipes.language.workers.reward_worker:RewardWorker", RewardGroup, "reward")
CRITIC = WorkerReference[CriticGroup](
    "recipes.language.workers.evaluation_workers:LanguageCritic", CriticGroup, "critic"
)
REFERENCE = WorkerReference[ReferenceGroup](
    "recipes.language.workers.evaluation_workers:LanguageReference", ReferenceGroup, "reference"
)
TEACHER = WorkerReference[ReferenceGroup](
    "recipes.language.workers.evaluation_workers:LanguageTeacher", ReferenceGroup, "teacher"
)
JUDGE = WorkerReference[JudgeGroup]("recipes.language.workers.reward_worker:JudgeWorker", JudgeGroup, "judge")


def launch_groups(
    config: LanguageConfig, cluster: Cluster, rollout: WorkerReference[Any], **others: WorkerReference[Any]
) -> dict[str, WorkerGroup[Any]]:
    """Place and start the workers of a job, and return their groups by component.

    Args:
        config: the configuration of the job.
        cluster: the cluster.
        rollout: the workers that hold engines.
        others: further workers of the recipe, by component.
    """
    named: dict[str, WorkerReference[Any]] = dict(zip(OPTIONAL, (CRITIC, REFERENCE, TEACHER, JUDGE), strict=True))
    optional = {name: named[name] for name in optional_components(config)}
    common: dict[str, WorkerReference[Any]] = {"actor": ACTOR, "rollout": rollout, "reward": REWARD}
    groups = {name: reference.create_group(config) for name, reference in {**common, **others, **optional}.items()}
    placement = HybridComponentPlacement(config, cluster)
    launch_together(cluster, {group: placement.get_strategy(name) for name, group in groups.items()})
    return groups


def optional_components(config: LanguageConfig) -> list[str]:
    """Return the optional components (critic, reference, teacher, judge) that are placed and needed."""
    placed = config.cluster.component_placement
    return [name for name, component in OPTIONAL.items() if name in placed and not component.unneeded(config)]

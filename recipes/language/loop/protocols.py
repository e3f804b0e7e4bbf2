"""The methods that the loop of language models calls, each named once: a worker returns a value, a group a handle.

What methods return is therefore a parameter of their protocol: the value of a worker, the handle of a group.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from recipes.language.prompts.prompt_messages import Assignment, Prompt, ScoredGroup
from recipes.training.comparing_worker import Comparing
from rlinf_core import WorkerGroupHandle

Metrics: TypeAlias = Mapping[str, float]
Slots: TypeAlias = Mapping[int, "int | None"]

# The value that a worker returns, or the handle of a group: nothing, a count or a version, metrics, ...
Nothing = TypeVar("Nothing", covariant=True)
Number = TypeVar("Number", covariant=True)
Figures = TypeVar("Figures", covariant=True)
Unfinished = TypeVar("Unfinished", covariant=True)
Counts = TypeVar("Counts", covariant=True)
Generated = TypeVar("Generated", covariant=True)
Scored = TypeVar("Scored", covariant=True)
Again = TypeVar("Again", covariant=True)


class Generation(Protocol):
    """Figures of one worker's share of a generation: tokens drawn, and seconds that its engine worked."""

    @property
    def tokens(self) -> int: ...
    @property
    def seconds(self) -> float: ...


class LanguageActorMethods(Protocol[Nothing, Number, Figures, Unfinished]):
    """The methods of workers that train."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def sync_model_to_rollout(self) -> Number: ...
    def recv_rollout_batch(self, step: int, assignment: Assignment, /) -> Nothing: ...
    def compute_advantages_and_returns(self, step: int, /) -> Figures: ...
    def run_training(self, step: int, last_step: int | None, /) -> Figures: ...
    def save_checkpoint(self, folder: str, /) -> Nothing: ...
    def load_checkpoint(self, folder: str, /) -> Number: ...
    def save_buffered(self, folder: str, slots: tuple[int, ...], /) -> Nothing: ...
    def load_buffered(self, folder: str, slots: tuple[int, ...], /) -> Nothing: ...
    def save_unfinished(self, folder: str, /) -> Unfinished: ...
    def load_unfinished(self, folder: str, positions: tuple[int, ...], /) -> Nothing: ...
    def save_model(self, folder: str, /) -> Nothing: ...


class EngineMethods(Protocol[Nothing, Number]):
    """The methods of workers that hold engines."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def sync_model_from_actor(self) -> Number: ...
    def offload(self, weights_follow: bool, /) -> Nothing: ...


class AnsweringMethods(Protocol[Nothing, Counts, Generated, Again]):
    """The methods of workers that answer prompts."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def problem_counts(self) -> Counts: ...
    def generate(self, prompts: tuple[Prompt, ...], /) -> Generated: ...
    def put_again(self, slots: tuple[int, ...], /) -> Again: ...


class GenerationMethods(
    EngineMethods[Nothing, Number],
    AnsweringMethods[Nothing, Counts, Generated, Again],
    Protocol[Nothing, Number, Counts, Generated, Again],
):
    """The methods of workers that answer prompts by their own engines."""

    def generate_forever(self) -> Nothing: ...
    def try_alone(self, prompt: Prompt, /) -> Nothing: ...


class RewardMethods(Protocol[Nothing, Scored]):
    """The methods of workers that score answers."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def score(self, slots: tuple[int, ...], /) -> Scored: ...
    def send_rollout_batch(self, step: int, assignment: Assignment, /) -> Nothing: ...
    def score_forever(self) -> Nothing: ...


class ReferenceMethods(Protocol[Nothing]):
    """The methods of workers that hold the reference model."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def evaluate(self, step: int, /) -> Nothing: ...


class JudgeMethods(Protocol[Nothing]):
    """The methods of workers that judge answers by a model."""

    def init_worker(self, layout: Any, /) -> Nothing: ...
    def serve(self) -> Nothing: ...


class CriticMethods(ReferenceMethods[Nothing], Protocol[Nothing, Figures]):
    """The methods of workers that estimate values. They exchange tokens with the actors directly."""

    def run_training(self, step: int, last_step: int | None, /) -> Figures: ...
    def save_checkpoint(self, folder: str, /) -> Nothing: ...
    def load_checkpoint(self, folder: str, /) -> Nothing: ...


class ReasoningActor(LanguageActorMethods[None, int, Metrics, Slots], Comparing, Protocol):
    """A worker that trains."""


class ReasoningRollout(GenerationMethods[None, int, tuple[int, int], Generation, tuple[int, ...]], Comparing, Protocol):
    """A worker that answers prompts."""


class ReasoningReward(RewardMethods[None, list[ScoredGroup]], Comparing, Protocol):
    """A worker that scores answers."""


class ReasoningCritic(CriticMethods[None, Metrics], Comparing, Protocol):
    """A worker that estimates values."""


class ReasoningReference(ReferenceMethods[None], Comparing, Protocol):
    """A worker that holds the reference model."""


class ReasoningJudge(JudgeMethods[None], Comparing, Protocol):
    """A worker that judges answers by a model."""


class LanguageActorGroup(
    LanguageActorMethods[
        WorkerGroupHandle[None], WorkerGroupHandle[int], WorkerGroupHandle[Metrics], WorkerGroupHandle[Slots]
    ],
    Protocol,
):
    """The workers that train, called on all ranks at once."""


class EngineGroup(EngineMethods[WorkerGroupHandle[None], WorkerGroupHandle[int]], Protocol):
    """The workers that hold engines."""


class AnsweringGroup(
    AnsweringMethods[
        WorkerGroupHandle[None],
        WorkerGroupHandle[tuple[int, int]],
        WorkerGroupHandle[Generation],
        WorkerGroupHandle[tuple[int, ...]],
    ],
    Protocol,
):
    """The workers that answer prompts."""


class GenerationGroup(
    EngineGroup,
    AnsweringGroup,
    GenerationMethods[
        WorkerGroupHandle[None],
        WorkerGroupHandle[int],
        WorkerGroupHandle[tuple[int, int]],
        WorkerGroupHandle[Generation],
        WorkerGroupHandle[tuple[int, ...]],
    ],
    Protocol,
):
    """The workers that answer prompts by their own engines."""


class RewardGroup(RewardMethods[WorkerGroupHandle[None], WorkerGroupHandle[list[ScoredGroup]]], Protocol):
    """The workers that score answers."""


class CriticGroup(CriticMethods[WorkerGroupHandle[None], WorkerGroupHandle[Metrics]], Protocol):
    """The workers that estimate values."""


class ReferenceGroup(ReferenceMethods[WorkerGroupHandle[None]], Protocol):
    """The workers that hold the reference model."""


class JudgeGroup(JudgeMethods[WorkerGroupHandle[None]], Protocol):
    """The workers that judge answers by a model."""

"""The methods of the workers that the loop of recipe `sft_chat` calls, and what they return."""

from __future__ import annotations

from typing import NamedTuple, Protocol, TypeAlias

from recipes.training.comparing_worker import Comparing


class ExampleCounts(NamedTuple):
    """The numbers of examples for training and for evaluation."""

    training: int
    evaluation: int


Metrics: TypeAlias = dict[str, float]


class ChatTraining(Comparing, Protocol):
    """A worker that learns from conversations."""

    def init_worker(self) -> ExampleCounts: ...
    def learn(self, step: int, last_step: int | None, /) -> Metrics: ...
    def evaluate(self) -> Metrics: ...
    def save_checkpoint(self, folder: str, /) -> None: ...
    def load_checkpoint(self, folder: str, /) -> int: ...
    def save_model(self, folder: str, /) -> None: ...

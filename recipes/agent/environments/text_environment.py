"""The interface of environments that are played by text."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple


class TextStep(NamedTuple):
    """An answer of an environment: what the model is told, the reward of its turn, and whether the episode is over."""

    text: str
    reward: float = 0.0
    done: bool = False


class TextEnvironment(ABC):
    """An environment that tells and is told texts; one object plays one episode.

    Attributes:
        stop: texts that end a turn of the model.
    """

    stop: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    async def reset(self, seed: int) -> str:
        """Begin the episode of a seed, and return what the model is told first."""

    @abstractmethod
    async def step(self, text: str) -> TextStep:
        """Do what the model says."""

    def example(self, chance: random.Random, skill: float) -> str:
        """Return something that may be said now, with which models that are built on the spot begin; "": there is none.

        Args:
            chance: decides.
            skill: share of examples that lead to the end; others are only understood.
        """
        return ""

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give back what the episode held."""

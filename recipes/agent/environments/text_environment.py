"""The interface of environments that are played by text."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple


class TextStep(NamedTuple):
    """A step of an environment: the text for the model, the reward of its turn, and whether the episode is over."""

    text: str
    reward: float = 0.0
    done: bool = False


class TextEnvironment(ABC):
    """A text environment; one object plays one episode.

    Attributes:
        stop: texts that end a turn of the model.
    """

    stop: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    async def reset(self, seed: int) -> str:
        """Start the episode of a seed, and return the initial text for the model."""

    @abstractmethod
    async def step(self, text: str) -> TextStep:
        """Do what the model says."""

    def example(self, chance: random.Random, skill: float) -> str:
        """Return a valid action for the warm start of models built from scratch; "": none.

        Args:
            chance: decides.
            skill: share of examples that lead to the end; others are only understood.
        """
        return ""

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the resources of the episode."""

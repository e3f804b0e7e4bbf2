"""The interface of text environments, and an example: a search for treasure in a house of nine rooms."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import ClassVar, Final, NamedTuple


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
        """Perform the model's action."""

    def example(self, chance: random.Random, skill: float) -> str:
        """Return a valid action for the warm start of models built from scratch; "": none.

        Args:
            chance: the random numbers.
            skill: the share of examples that lead to success; the others are only valid.
        """
        return ""

    async def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Release the resources of the episode."""


_SIDE: Final = 3
_MOST_MOVES: Final = 12
# The share of the other examples that say `take` in any room.
_TAKES: Final = 0.3
_MOVES: Final = {"north": (0, -1), "south": (0, 1), "west": (-1, 0), "east": (1, 0)}
_ROOMS: Final = "123456789"


class Treasure(TextEnvironment):
    """A house of nine rooms with numbers. A turn is a direction, or `take`; the reward is 1 for the treasure.

    The first text names the room of the treasure; each text names the model's room and its doors: `7 (north, west).`
    The model must remember the goal and find the way.
    """

    stop: ClassVar[tuple[str, ...]] = (".", "\n")

    async def reset(self, seed: int) -> str:
        chance = random.Random(f"treasure {seed}")
        self._rooms = chance.sample(_ROOMS, len(_ROOMS))
        places = [(x, y) for x in range(_SIDE) for y in range(_SIDE)]
        self._at, self._goal = chance.sample(places, 2)
        self._moves = 0
        return f"find room {self._room(self._goal)} and take. {self._seen()}"

    async def step(self, text: str) -> TextStep:
        said = text.strip(" .\n").lower()
        self._moves += 1
        over = self._moves >= _MOST_MOVES
        if said == "take":
            reached = self._at == self._goal
            return TextStep("you have it. " if reached else "it is not here. ", float(reached), reached or over)
        if said not in _MOVES:
            return TextStep(f"say {', '.join(_MOVES)} or take. ", 0.0, over)
        (x, y), (right, down) = self._at, _MOVES[said]
        if not (0 <= x + right < _SIDE and 0 <= y + down < _SIDE):
            return TextStep("there is a wall. ", 0.0, over)
        self._at = (x + right, y + down)
        return TextStep(self._seen(), 0.0, over)

    def example(self, chance: random.Random, skill: float) -> str:
        """See `TextEnvironment`: a direction with a door, or `take`, which succeeds at the treasure."""
        take = self._at == self._goal if chance.random() < skill else chance.random() < _TAKES
        return "take." if take else f"{chance.choice(self._doors())}."

    def _doors(self) -> list[str]:
        x, y = self._at
        return [name for name, (right, down) in _MOVES.items() if 0 <= x + right < _SIDE and 0 <= y + down < _SIDE]

    def _room(self, place: tuple[int, int]) -> str:
        return self._rooms[place[1] * _SIDE + place[0]]

    def _seen(self) -> str:
        return f"{self._room(self._at)} ({', '.join(self._doors())}). "

"""Problems, sets of them, and the order in which training takes them."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from rlinf_core import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """A question and its right answer.

    Attributes:
        prompt: text of the question.
        answer: text of the right answer.
        row: everything that its source says of it, for reward functions.
        difficulty: label by which evaluations are told apart, or "".
        source: name of the data set.
        messages: the question as messages of a chat, each with `role` and `content`; empty where it is a text.
    """

    prompt: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    difficulty: str = ""
    source: str = ""
    messages: tuple[Mapping[str, str], ...] = ()


def require_text(problem: Problem) -> None:
    """Check that a question can be written without a chat template.

    Raises:
        ConfigError: it is messages.
    """
    if problem.messages:
        raise ConfigError(
            "the prompts are messages of a chat, and `data.apply_chat_template` is off",
            help="write `data.apply_chat_template: true`, or give texts as prompts",
        )


class ProblemSet(Protocol):
    """Numbered problems; the same number is always the same problem."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Problem: ...


@lru_cache(maxsize=4)
def _order(size: int, seed: int, epoch: int) -> tuple[int, ...]:
    numbers = list(range(size))
    random.Random(f"{seed} {epoch}").shuffle(numbers)
    return tuple(numbers)


def training_order(size: int, start: int, count: int, *, seed: int, shuffle: bool) -> list[int]:
    """Return which problems training takes from its `start`-th on, `count` of them.

    Every epoch takes each problem once, in an order that depends on the seed and the epoch alone: a run that resumes
    needs to know `start` and nothing else.
    """
    taken: list[int] = []
    for position in range(start, start + count):
        epoch, index = divmod(position, size)
        taken.append(_order(size, seed, epoch)[index] if shuffle else index)
    return taken

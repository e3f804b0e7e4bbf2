"""Problems, problem sets, and the order of training."""

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
        source_answer: the right answer as its source has it, such as a number; None: the text.
        row: all fields of the problem in its source, for reward functions.
        difficulty: the label by which evaluations are reported separately, or "".
        source: name of the data set.
        messages: the question as chat messages, each with `role` and `content`; empty if it is a text.
    """

    prompt: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict[str, Any])
    difficulty: str = ""
    source: str = ""
    messages: tuple[Mapping[str, str], ...] = ()
    source_answer: Any = None


def require_text(problem: Problem) -> None:
    """Check that a question can be written without a chat template.

    Raises:
        ConfigError: the question is given as messages.
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
    """Return the numbers of `count` training problems, from position `start` on.

    Every epoch uses each problem once, in an order that depends only on seed and epoch: a resumed run needs only
    `start`.
    """
    taken: list[int] = []
    for position in range(start, start + count):
        epoch, index = divmod(position, size)
        taken.append(_order(size, seed, epoch)[index] if shuffle else index)
    return taken

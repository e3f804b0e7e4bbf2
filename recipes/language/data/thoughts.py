"""Thoughts that a model writes before its answer: their marks, and what stands outside of them."""

from __future__ import annotations

import re
from typing import Final

# As families of models write them; in some they are special tokens.
THOUGHT_MARKS: Final = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("◁think▷", "◁/think▷"),
)
ANSWER_MARKS: Final = ("<answer>", "</answer>")
_BEGIN: Final = re.compile("|".join(re.escape(begin) for begin, _ in THOUGHT_MARKS))
_END: Final = re.compile("|".join(re.escape(end) for _, end in THOUGHT_MARKS))
_THOUGHT: Final = re.compile(rf".*(?:{_END.pattern})(?=.*\S)", re.DOTALL)


def without_thought(text: str) -> str:
    """Return a text without the thought before its answer; a thought that nothing follows stays."""
    return _THOUGHT.sub("", text)


def opens_thought(prompt: str) -> bool:
    """Return whether a prompt ends within a thought, which the model goes on with."""
    return prompt.rstrip().endswith(tuple(begin for begin, _ in THOUGHT_MARKS))


class Spoken:
    """The parts of a turn that are not thoughts, asked for in the order of the text.

    A mark within a call that was passed is a part of its arguments.

    Args:
        text: the text of the turn.
        thinking: whether it begins within a thought.
    """

    def __init__(self, text: str, *, thinking: bool = False) -> None:
        self._text = text
        self._at = self._end_of_thought(0) if thinking else 0
        self._last = -1

    def has(self, start: int, end: int) -> bool:
        """Return whether the call from `start` to `end` stands outside of thoughts; of several at one place, each."""
        if start == self._last:
            return True
        begin = _BEGIN.search(self._text, self._at)
        while begin is not None and begin.start() < start:
            self._at = self._end_of_thought(begin.end())
            begin = _BEGIN.search(self._text, self._at)
        if start < self._at:
            return False
        self._at, self._last = max(self._at, end), start
        return True

    def _end_of_thought(self, start: int) -> int:
        end = _END.search(self._text, start)
        return len(self._text) if end is None else end.end()

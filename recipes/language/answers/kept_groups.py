"""Groups of answers that the worker that drew them keeps, until the step that learns from them is over."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Sequence

from recipes.language.answers.answer_group import AnswerGroup
from recipes.language.prompts.prompt_messages import Prompt


class KeptGroups:
    """Answers of the present step, for reward workers that take the place of dead ones.

    Args:
        keeps: whether any are kept; else all of them are lost with a reward worker.
    """

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._step = 0
        # Pickled, which takes a quarter of the memory.
        self._groups: dict[int, bytes] = {}

    def begin(self, prompts: Sequence[Prompt]) -> None:
        """Forget the answers of other steps than that of `prompts`, which are of one, and those of evaluations."""
        if prompts and not (prompts[0].trains and prompts[0].step == self._step):
            self._step = prompts[0].step
            self._groups.clear()

    def add(self, groups: Sequence[AnswerGroup]) -> None:
        """Keep groups that are whole."""
        if self._keeps:
            self._groups |= {group.prompt.slot: pickle.dumps(group) for group in groups}

    def of(self, slots: Collection[int]) -> list[AnswerGroup]:
        """Return the groups of these slots, as far as they are here."""
        wanted = [content for slot, content in self._groups.items() if slot in slots]
        return [pickle.loads(content) for content in wanted]  # noqa: S301 - pickled above

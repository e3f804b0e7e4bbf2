"""Prompts that rollout workers died of: named by their problems, tried alone, and set aside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from recipes.language.data.problems import training_order
from recipes.language.prompts.prompt_messages import Prompt
from recipes.language.prompts.prompt_plan import PromptPlan
from rlinf_core.runners.record import RunRecord
from rlinf_core.runners.recovery import Suspects, all_deaths


class SuspectedPrompts:
    """The prompts of a run that rollout workers died of, over all its attempts.

    Args:
        record: the record of the run, which keeps them.
        data: the section `data` of the file.

    Attributes:
        problems: the number of problems for training.
    """

    def __init__(self, record: RunRecord, data: Any) -> None:
        self._record = record
        self._data = data
        self.problems = 0
        self._suspects: Suspects[Prompt] = record.suspects

    @property
    def count(self) -> int:
        """The number of problems that are set aside."""
        return len(self._suspects.set_aside)

    def died_of(self, prompts: Iterable[Prompt], reason: str) -> None:
        """Note the death of a worker that had these prompts."""
        self._suspects.died_of({self._name(prompt): prompt for prompt in prompts}, reason)

    @property
    def due(self) -> bool:
        """Whether prompts are to be tried alone."""
        return bool(self._suspects.due())

    def died_with(self, error: BaseException, group: str, plan: PromptPlan) -> None:
        """Record the prompts held by the workers of a group whose deaths a failure reports."""
        for address, cause in all_deaths(error).items():
            name, _, rank = address.rpartition(":")
            if name == group and rank.isdigit():
                self.died_of(plan.given_to({int(rank)}), str(cause).partition("\n")[0])

    def marked(self, prompts: Sequence[Prompt]) -> tuple[Prompt, ...]:
        """Return prompts with those marked that are set aside."""
        aside = self._suspects.set_aside
        if not aside:
            return tuple(prompts)
        return tuple(prompt._replace(set_aside=self._name(prompt) in aside) for prompt in prompts)

    def try_each(self, dies_of: Callable[[Prompt], str]) -> None:
        """Try each prompt alone that is due.

        Args:
            dies_of: has a worker answer one prompt; returns how it died, or "" where it lives.
        """
        for name, prompt in self._suspects.due().items():
            reason = dies_of(prompt)
            if reason:
                deaths = self._suspects.killed(name, reason)
                self._record.set_aside("prompt", name, prompt.step, deaths)
            else:
                self._suspects.lived(name)

    def problem_of(self, prompt: Prompt) -> int:
        """Return the number of a prompt's problem in its set."""
        index = prompt.position
        if prompt.trains and self.problems:
            data = self._data
            (index,) = training_order(self.problems, index, 1, seed=data.seed, shuffle=data.reshuffles)
        return index

    def _name(self, prompt: Prompt) -> str:
        number = self.problem_of(prompt)
        return f"{number}" if prompt.trains else f"evaluation-{number}"

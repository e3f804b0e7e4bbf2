"""The names and sizes that the workers of a language model's job share."""

from __future__ import annotations

from typing import NamedTuple


class LanguageLayout(NamedTuple):
    """The groups of a job and the channels between them.

    Attributes:
        actors, rollouts, rewards: processes of each group.
        answers: channel from rollout to reward workers; the key is the rank of the reward worker, or where generation
            never stops one key for all of them. The runner's prompts go through it then, too.
        scored: channel from reward to actor workers where generation never stops; the key is a group's slot. Reports
            for the runner go through it, too.
        critics, references, teachers: processes of the groups that evaluate what the actors got; 0: there is no such
            group.
        judges: processes whose models score for the reward workers; they are asked through the channel `answers`.
    """

    actors: int
    rollouts: int
    rewards: int
    answers: str
    scored: str
    critics: int = 0
    references: int = 0
    teachers: int = 0
    judges: int = 0

"""The channel names and group sizes of a language job, which its workers share."""

from __future__ import annotations

from typing import NamedTuple


class LanguageLayout(NamedTuple):
    """The groups of a job and the channels between them.

    Attributes:
        actors, rollouts, rewards: processes of each group.
        answers: channel from rollout to reward workers; the key is the reward worker's rank. If generation never stops,
            all reward workers share one key, and the runner's prompts use the channel, too.
        scored: channel from reward to actor workers, keyed by a group's slot, and of reports to the runner, if
            generation never stops.
        critics, references, teachers: processes of the groups that evaluate the actors' batches; 0: no such group.
        judges: processes whose models score for the reward workers, asked through the channel `answers`.
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

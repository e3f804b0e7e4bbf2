"""The scorer of a rehearsal, which judges nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from recipes.language.rewards.scoring import Item, Score


class StandInScorer:
    """A scorer that gives the answers of a group rewards that differ, so that all of them are learned from."""

    convention = ""

    def start(self) -> None:
        """Do nothing."""

    def score_all(self, items: Sequence[Item]) -> list[Score]:
        """Return one score for each answer."""
        seen = Counter[str]()
        scores: list[Score] = []
        for item in items:
            scores.append(Score(float(seen[item.prompt] % 2), "a rehearsal"))
            seen[item.prompt] += 1
        return scores

    def close(self) -> None:
        """Do nothing."""

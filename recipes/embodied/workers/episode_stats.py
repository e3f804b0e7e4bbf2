"""Sums and counts over finished episodes, which can be added up over workers."""

from __future__ import annotations

from typing import TypeAlias

from recipes.embodied.envs.env_spec import BoolArray, FinishedEpisodes, IntArray
from recipes.embodied.loop.env_messages import ALL_ERRORS, ERRED_EPISODES, FAILED_EPISODES

# Name -> the sum over episodes, and how many there were.
Sums: TypeAlias = dict[str, tuple[float, int]]


class EpisodeSums:
    """Adds up episodes as they end.

    Args:
        first_only: count the first episode of every environment since its reset only, as is fair where every pass
            resets: of the later episodes the short ones end within the pass and the long ones do not.
    """

    def __init__(self, *, first_only: bool) -> None:
        self.sums: Sums = {}
        self._first_only = first_only

    def add(self, episodes: FinishedEpisodes) -> None:
        """Add those that ended in one step of one batch."""
        counted = self._counted(episodes.number)
        count = int(counted.sum())
        if not count:
            return
        self._add("return", float(episodes.returns[counted].sum()), count)
        self._add("episode_len", float(episodes.lengths[counted].sum()), count)
        for name in ("success_once", "success_at_end"):
            solved = getattr(episodes, name)
            if solved is not None:
                self._add(name, float(solved[counted].sum()), count)
        self._add(ERRED_EPISODES, float(episodes.erred[counted].sum()), 0)

    def _counted(self, numbers: IntArray) -> BoolArray:
        return numbers == 0 if self._first_only else numbers >= 0

    def add_figures(self, figures: Sums) -> None:
        """Add what environments measured besides episodes; the mean is over these measurements."""
        for name, (total, count) in figures.items():
            if count:
                self._add(name, total, count)

    def add_failed(self, numbers: IntArray) -> None:
        """Count episodes whose simulators failed, which are in no sum, by their numbers since the reset."""
        self._add(FAILED_EPISODES, float(self._counted(numbers).sum()), 0)

    def add_errors(self, count: int) -> None:
        """Count errors of environments, also of episodes that do not count."""
        self._add(ALL_ERRORS, float(count), 0)

    def _add(self, name: str, total: float, count: int) -> None:
        before = self.sums.get(name, (0.0, 0))
        self.sums[name] = (before[0] + total, before[1] + count)

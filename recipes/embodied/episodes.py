"""What is known of the episodes that ended: sums and counts, so that those of all workers can be added up."""

from __future__ import annotations

from typing import TypeAlias

from recipes.embodied.envs.base import Episodes

# Name -> the sum over episodes, and how many there were.
Sums: TypeAlias = dict[str, tuple[float, int]]


class EpisodeSums:
    """Adds up episodes as they end.

    Only the first episode of every environment in a pass counts: of the later ones the short ones end within the pass
    and the long ones do not, so that their mean would say too little.
    """

    def __init__(self) -> None:
        self.sums: Sums = {}

    def add(self, episodes: Episodes) -> None:
        """Those that ended in one step of one batch."""
        first = episodes.number == 0
        count = int(first.sum())
        if not count:
            return
        self._add("return", float(episodes.returns[first].sum()), count)
        self._add("episode_len", float(episodes.lengths[first].sum()), count)
        for name in ("success_once", "success_at_end"):
            solved = getattr(episodes, name)
            if solved is not None:
                self._add(name, float(solved[first].sum()), count)

    def _add(self, name: str, total: float, count: int) -> None:
        before = self.sums.get(name, (0.0, 0))
        self.sums[name] = (before[0] + total, before[1] + count)

"""Figures of the episodes of a step, and the bound on those whose simulators failed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from recipes.embodied.envs.env_spec import BoolArray, FinishedEpisodes, IntArray
from recipes.embodied.loop.protocols import ALL_ERRORS, ERRED_EPISODES, FAILED_EPISODES
from rlinf_core.errors import RunError

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


_MOST_FAILED: Final = 0.5
# Figures of episodes that have ended: among the first of those that go on over several passes these are the short ones.
OF_ENDED: Final = ("return", "episode_len", "success_once", "success_at_end")


def episode_means(
    namespace: str,
    by_rank: Iterable[Mapping[str, tuple[float, int]]],
    most_failed: float = _MOST_FAILED,
    environments: int = 1,
) -> dict[str, float]:
    """Return sums and counts of episodes as the mean over all episodes, and how many these are, how many were left out
    and in how many of those that count the environment had an error.

    Args:
        namespace: `env` or `eval`.
        by_rank: the sums of each env worker.
        most_failed: share of the episodes whose simulators may fail, `runner.max_failed_fraction`.
        environments: the environments that ran; a share is one of as many episodes at least.

    Raises:
        RunError: the simulators of more episodes failed.
    """
    totals: dict[str, tuple[float, int]] = {}
    for sums in by_rank:
        for name, (total, count) in sums.items():
            before = totals.get(name, (0.0, 0))
            totals[name] = (before[0] + total, before[1] + count)
    failed, _ = totals.pop(FAILED_EPISODES, (0.0, 0))
    erred, _ = totals.pop(ERRED_EPISODES, (0.0, 0))
    totals.pop(ALL_ERRORS, None)
    _, episodes = totals.get("return", (0.0, 0))
    if failed > most_failed * max(environments, episodes + failed):
        raise RunError(
            f"the simulators of {failed:g} episodes failed, and {episodes} episodes ended",
            where=f"{namespace}.train" if namespace == "env" else "env.eval",
            why="they raised, and the episodes came out otherwise when new simulators repeated them; the log of the env"
            " worker has environments, action and traceback",
            help="mend the simulator; `runner.max_failed_fraction` of the episodes may fail",
            code="simulators-fail",
        )
    means = {f"{namespace}/{name}": total / count for name, (total, count) in totals.items()}
    if failed:
        means[FAILED_EPISODES if namespace == "env" else f"{namespace}/{FAILED_EPISODES}"] = failed
    counts = {"episodes": float(episodes), "left_out": failed, "env_errors": erred}
    return means | {f"{namespace}/{name}": count for name, count in counts.items()}

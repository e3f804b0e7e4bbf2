"""Metrics of the episodes of a step, and the limit on failed simulators."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, TypeAlias

from recipes.embodied.envs.env_spec import BoolArray, FinishedEpisodes, IntArray
from recipes.embodied.loop.env_messages import ALL_ERRORS, ERRED_EPISODES, FAILED_EPISODES
from rlinf_core.errors import RunError

# By name: the sum over episodes, and their number.
Sums: TypeAlias = dict[str, tuple[float, int]]


class EpisodeSums:
    """Adds up episodes as they end.

    Args:
        first_only: count only the first episode of every environment since its reset. If every rollout segment resets,
            this avoids a bias: of later episodes, mainly short ones end within the segment.
    """

    def __init__(self, *, first_only: bool) -> None:
        self.sums: Sums = {}
        self._first_only = first_only

    def add(self, episodes: FinishedEpisodes) -> None:
        """Add the episodes that ended in one step of one batch."""
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
        """Add further measurements of environments; the mean is over these measurements."""
        for name, (total, count) in figures.items():
            if count:
                self._add(name, total, count)

    def add_failed(self, numbers: IntArray) -> None:
        """Count episodes whose simulators failed, which no sum includes, by their numbers since the reset."""
        self._add(FAILED_EPISODES, float(self._counted(numbers).sum()), 0)

    def add_errors(self, count: int) -> None:
        """Count errors of environments, including those of episodes that do not count."""
        self._add(ALL_ERRORS, float(count), 0)

    def _add(self, name: str, total: float, count: int) -> None:
        before = self.sums.get(name, (0.0, 0))
        self.sums[name] = (before[0] + total, before[1] + count)


_MOST_FAILED: Final = 0.5
# Metrics of ended episodes: of the first episodes that span several rollout segments, these are the short ones.
OF_ENDED: Final = ("return", "episode_len", "success_once", "success_at_end")


def episode_means(
    namespace: str,
    by_rank: Iterable[Mapping[str, tuple[float, int]]],
    most_failed: float = _MOST_FAILED,
    environments: int = 1,
) -> dict[str, float]:
    """Return the means over all episodes, their number, the number of dropped ones, and the number of counted ones with
    an error of the environment.

    Args:
        namespace: `env` or `eval`.
        by_rank: the sums of each env worker.
        most_failed: largest share of episodes whose simulators may fail, `runner.max_failed_fraction`.
        environments: the number of environments, the least denominator of the share.

    Raises:
        RunError: the simulators of a larger share of episodes failed.
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
    # An environment may report success only where there is one: the episodes before that were not solved either.
    means = {
        f"{namespace}/{name}": total / (episodes if name in OF_ENDED else count)
        for name, (total, count) in totals.items()
    }
    if failed:
        means[FAILED_EPISODES if namespace == "env" else f"{namespace}/{FAILED_EPISODES}"] = failed
    counts = {"episodes": float(episodes), "left_out": failed, "env_errors": erred}
    return means | {f"{namespace}/{name}": count for name, count in counts.items()}

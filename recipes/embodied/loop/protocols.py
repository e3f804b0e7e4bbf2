"""The exchange between the groups of the embodied loop: calls, messages, and the sums of ended episodes.

A group of workers returns a handle for the values of all. Messages between env and rollout workers are arrays by name.
Imports no torch, which simulators' interpreters lack.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from recipes.embodied.envs.env_spec import BoolArray, EnvError, FinishedEpisodes, IntArray
from recipes.training.comparing_worker import Comparing
from rlinf_core.errors import RunError

# The results of a step, by their names in `StepResult`; each [B, C].
OUTCOME = ("rewards", "terminations", "truncations", "valid")
# In messages of environments with interventions or altered actions: the executed actions [B, C, A], and which of them
# somebody else chose, bool [B, C].
EXECUTED = "executed"
INTERVENTIONS = "interventions"
# In messages of environments whose simulators failed: bool [B], see `StepResult`.
FAILED = "failed"
# Counts in episode sums, without a mean: episodes dropped because their simulators failed, episodes that count as
# failed by an error of the environment, and all such errors.
FAILED_EPISODES = "failed/simulator"
ERRED_EPISODES = "env_errors"
ALL_ERRORS = "all_env_errors"
# Folder of a checkpoint that holds the state of the environments, a file for each env worker.
EPISODES = "env"
# In the first message of a rollout segment: its number of action chunks, equal for all environments, int64 [B].
CHUNKS = "chunks"


def stacked(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return messages of several workers as one, concatenated along environments."""
    parts = list(parts)
    if len(parts) == 1:
        return parts[0]
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: _stack([part.get(name) for part in parts]) for name in names}


def _stack(values: list[Any]) -> Any:
    if isinstance(values[0], dict):
        return stacked(cast("list[dict[str, Any]]", values))
    return np.concatenate(values)


def sliced(message: dict[str, Any], start: int, stop: int, total: int) -> dict[str, Any]:
    """Return rows `start` to `stop` of a message of `total` environments."""
    if (start, stop) == (0, total):
        return message
    return {
        name: sliced(cast("dict[str, Any]", value), start, stop, total)
        if isinstance(value, dict)
        else value[start:stop]
        for name, value in message.items()
    }


# By name: the sum over episodes, and their number.
EpisodeSums: TypeAlias = Mapping[str, tuple[float, int]]
Metrics: TypeAlias = Mapping[str, float]


class Layout(NamedTuple):
    """The number of processes per component, sent to every worker when a run starts.

    Attributes:
        trajectories: name of the channel from rollout to actor.
        step: the last finished training step; above 0 if the run resumes from a checkpoint.
        suspects: whether simulator processes have died in episodes of this run.
        set_aside: the names of quarantined starts, in which processes died three times.
    """

    actors: int
    rollouts: int
    envs: int
    trajectories: str
    step: int = 0
    suspects: bool = False
    set_aside: frozenset[str] = frozenset()


class EmbodiedActor(Comparing, Protocol):
    """A worker that trains."""

    def init_worker(self, layout: Layout, spec: Any, /) -> None: ...
    def first_pictures(self) -> Sequence[Any]: ...
    def data_facts(self) -> Any: ...
    def sync_model_to_rollout(self) -> int: ...
    def recv_rollout_batch(self, step: int | None = None, attempt: int = 0, /) -> int: ...
    def compute_advantages_and_returns(self, step: int | None = None, /) -> Metrics: ...
    def run_training(self, step: int | None = None, /) -> Metrics: ...
    def save_checkpoint(self, folder: str, /) -> None: ...
    def load_checkpoint(self, folder: str, /) -> int: ...


class EmbodiedRollout(Protocol):
    """A worker that runs the policy."""

    def init_worker(self, layout: Layout, spec: Any, /) -> None: ...
    def sync_model_from_actor(self) -> int: ...
    def generate(self, step: int | None = None, attempt: int = 0, /) -> None: ...
    def evaluate(self) -> None: ...


class EmbodiedEnv(Protocol):
    """A worker that steps environments.

    `save_state` returns None if a state cannot be saved; `load_state` returns why a state cannot be loaded.
    """

    def init_worker(self, layout: Layout, /) -> Any: ...
    def first_pictures(self) -> Mapping[str, Any]: ...
    def env_facts(self) -> Any: ...
    def interact(self, step: int | None = None, /) -> EpisodeSums: ...
    def evaluate(self) -> EpisodeSums: ...
    def take_errors(self) -> Sequence[EnvError]: ...
    def recorded_episodes(self, most: int = ..., /) -> Any: ...
    def save_state(self) -> bytes | None: ...
    def load_state(self, packs: Sequence[bytes], /) -> str | None: ...


class EpisodeTotals:
    """Adds up episodes as they end.

    Args:
        first_only: count only the first episode of every environment since its reset. If every rollout segment resets,
            this avoids a bias: of later episodes, mainly short ones end within the segment.
    """

    def __init__(self, *, first_only: bool) -> None:
        self.sums: dict[str, tuple[float, int]] = {}
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

    def add_figures(self, figures: EpisodeSums) -> None:
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
    by_rank: Iterable[EpisodeSums],
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

"""The methods of workers that the embodied loop calls, and the messages between environment and rollout workers.

A group of workers returns a handle for the values of all. A message is a plain dict of arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np

from recipes.embodied.envs.env_spec import EnvError
from recipes.training.comparing_worker import Comparing

# The results of a step, by their names in `StepResult`; each [B, C].
OUTCOME = ("rewards", "terminations", "truncations", "valid")
# In messages of environments in which not only the policy acts: the actions that were carried out [B, C, A], and which
# of them somebody else chose, bool [B, C].
EXECUTED = "executed"
INTERVENTIONS = "interventions"
# In messages of environments whose simulators failed: bool [B], see `StepResult`.
FAILED = "failed"
# Counts in sums of episodes, without a mean: those that were left out because their simulators failed, those that count
# and failed by an error of the environment, and all such errors.
FAILED_EPISODES = "failed/simulator"
ERRED_EPISODES = "env_errors"
ALL_ERRORS = "all_env_errors"
# In the first message of a pass: how many chunks of actions it has, the same number for each environment, int64 [B].
CHUNKS = "chunks"


def stacked(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Messages of several workers as one: arrays and observations concatenated along environments."""
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
    """Rows `start` to `stop` of a message of `total` environments."""
    if (start, stop) == (0, total):
        return message
    return {
        name: sliced(cast("dict[str, Any]", value), start, stop, total)
        if isinstance(value, dict)
        else value[start:stop]
        for name, value in message.items()
    }


# Sums over episodes and how many these are, by name.
EpisodeSums: TypeAlias = Mapping[str, tuple[float, int]]
Metrics: TypeAlias = Mapping[str, float]


class Layout(NamedTuple):
    """The number of processes per component, sent to every worker when a run starts.

    Attributes:
        trajectories: name of the channel from rollout to actor.
        step: the last training step that is done: 0, or more where the run continues from a checkpoint.
        suspects: simulator processes died of episodes of this run.
        set_aside: the names of episode starts that they died of thrice.
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

    `save_state` returns None if a state cannot be saved, `load_state` why one cannot be loaded.
    """

    def init_worker(self, layout: Layout, /) -> Any: ...
    def first_pictures(self) -> Mapping[str, Any]: ...
    def env_facts(self) -> Any: ...
    def interact(self, step: int | None = None, /) -> EpisodeSums: ...
    def evaluate(self) -> EpisodeSums: ...
    def take_errors(self) -> Sequence[EnvError]: ...
    def recorded_episodes(self) -> Any: ...
    def save_state(self) -> bytes | None: ...
    def load_state(self, packs: Sequence[bytes], /) -> str | None: ...

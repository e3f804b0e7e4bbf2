"""The methods that the embodied loop calls, each named once: a worker returns a value, a group a handle for all ranks.

What methods return is therefore a parameter of their protocol: the value of a worker, the handle of a group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from recipes.embodied.envs.env_spec import EnvError
from recipes.training.comparing_worker import Comparing
from rlinf_core import WorkerGroupHandle

# Sums over episodes and how many these are, by name.
EpisodeSums: TypeAlias = Mapping[str, tuple[float, int]]
Metrics: TypeAlias = Mapping[str, float]

# The value that a worker returns, or the handle of a group: nothing, a count or a version, metrics, ...
Nothing = TypeVar("Nothing", covariant=True)
Number = TypeVar("Number", covariant=True)
Figures = TypeVar("Figures", covariant=True)
Pictures = TypeVar("Pictures", covariant=True)
Spec = TypeVar("Spec", covariant=True)
Sums = TypeVar("Sums", covariant=True)
State = TypeVar("State", covariant=True)
Reason = TypeVar("Reason", covariant=True)
Errors = TypeVar("Errors", covariant=True)


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


class ActorMethods(Protocol[Nothing, Number, Figures, Pictures]):
    """The methods of workers that train."""

    def init_worker(self, layout: Layout, spec: Any, /) -> Nothing: ...
    def first_pictures(self) -> Pictures: ...
    def data_facts(self) -> Any: ...
    def sync_model_to_rollout(self) -> Number: ...
    def recv_rollout_batch(self, step: int | None = None, attempt: int = 0, /) -> Number: ...
    def compute_advantages_and_returns(self, step: int | None = None, /) -> Figures: ...
    def run_training(self, step: int | None = None, /) -> Figures: ...
    def save_checkpoint(self, folder: str, /) -> Nothing: ...
    def load_checkpoint(self, folder: str, /) -> Number: ...


class RolloutMethods(Protocol[Nothing, Number]):
    """The methods of workers that run the policy."""

    def init_worker(self, layout: Layout, spec: Any, /) -> Nothing: ...
    def sync_model_from_actor(self) -> Number: ...
    def generate(self, step: int | None = None, attempt: int = 0, /) -> Nothing: ...
    def evaluate(self) -> Nothing: ...


class EnvMethods(Protocol[Spec, Pictures, Sums, State, Reason, Errors]):
    """The methods of workers that step environments.

    `save_state` returns None if a state cannot be saved, `load_state` why one cannot be loaded.
    """

    def init_worker(self, layout: Layout, /) -> Spec: ...
    def first_pictures(self) -> Pictures: ...
    def env_facts(self) -> Any: ...
    def interact(self, step: int | None = None, /) -> Sums: ...
    def evaluate(self) -> Sums: ...
    def take_errors(self) -> Errors: ...
    def recorded_episodes(self) -> Any: ...
    def save_state(self) -> State: ...
    def load_state(self, packs: Sequence[bytes], /) -> Reason: ...


class EmbodiedActor(ActorMethods[None, int, Metrics, Sequence[Any]], Comparing, Protocol):
    """A worker that trains."""


class EmbodiedRollout(RolloutMethods[None, int], Protocol):
    """A worker that runs the policy."""


class EmbodiedEnv(
    EnvMethods[Any, Mapping[str, Any], EpisodeSums, bytes | None, str | None, Sequence[EnvError]], Protocol
):
    """A worker that steps environments."""


class ActorGroup(
    ActorMethods[
        WorkerGroupHandle[None], WorkerGroupHandle[int], WorkerGroupHandle[Metrics], WorkerGroupHandle[Sequence[Any]]
    ],
    Protocol,
):
    """The workers that train, called on all ranks at once."""


class RolloutGroup(RolloutMethods[WorkerGroupHandle[None], WorkerGroupHandle[int]], Protocol):
    """The workers that run the policy, called on all ranks at once."""


class EnvGroup(
    EnvMethods[
        WorkerGroupHandle[Any],
        WorkerGroupHandle[Mapping[str, Any]],
        WorkerGroupHandle[EpisodeSums],
        WorkerGroupHandle[bytes | None],
        WorkerGroupHandle[str | None],
        WorkerGroupHandle[Sequence[EnvError]],
    ],
    Protocol,
):
    """The workers that step environments, called on all ranks at once."""

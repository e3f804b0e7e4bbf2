"""Events that a runner tells of its run as it goes. Listeners render them: the live view, plain lines, a test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from rlinf_core.topology import ClusterTopology

# The phases of a training step, by the names that their times have under `time/`.
SYNC_WEIGHTS: Final = "sync_weights"
GENERATE_ROLLOUTS: Final = "generate_rollouts"
ADVANTAGES: Final = "cal_adv_and_returns"
ACTOR_TRAINING: Final = "actor_training"
# What a run does besides.
LAUNCH: Final = "launch"
EVALUATE: Final = "evaluate"
SAVE_CHECKPOINT: Final = "save_checkpoint"


class RunStarted(NamedTuple):
    """The workers are there and training begins. Told once: workers that are started again follow a `RunRestarted`.

    Attributes:
        folder: the run folder.
        first_step: 1, or more where the run was resumed.
        last_step: the step after which it ends; None while no limit is known.
        components: number of processes of each component.
        resumed_from: the checkpoint it continues from.
    """

    folder: Path
    first_step: int
    last_step: int | None
    components: Mapping[str, int]
    resumed_from: Path | None = None


class PhaseStarted(NamedTuple):
    """The run is now busy with `phase`, one of the names above."""

    step: int
    phase: str


class Waiting(NamedTuple):
    """From now on the run waits for `what` outside it, as in `actor: 2 processes`, for `seconds` at most where that is
    known.
    """

    what: str
    seconds: float | None = None


class StepFinished(NamedTuple):
    """A training step is over. `metrics` has full names, as in `train/actor/policy_loss`; times are seconds."""

    step: int
    metrics: Mapping[str, float]


class Evaluated(NamedTuple):
    """The policy was evaluated after `step`; `metrics` has names under `eval/`."""

    step: int
    metrics: Mapping[str, float]


class CheckpointSaved(NamedTuple):
    """Everything after `step` can be continued from `path`."""

    step: int
    path: Path


class ClusterReady(NamedTuple):
    """The machines are there, and workers are launched on them next; told again by each attempt."""

    topology: ClusterTopology


class RunRestarted(NamedTuple):
    """Something died, and the run goes back to `step`, the last that counts (0 without a checkpoint).

    Attributes:
        restart: which restart this is, from 1.
        reason: what died, in one line.
    """

    step: int
    restart: int
    max_restarts: int
    reason: str


class RunFinished(NamedTuple):
    """The run is over, as it was meant to be.

    Attributes:
        metrics: the newest value of every metric.
        seconds: from `RunStarted` to the end of its work: ending the workers is not counted.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float


class CurveDrawn(NamedTuple):
    """The learning curve was drawn, however the run ended: `path` is the picture."""

    path: Path


Event: TypeAlias = (
    RunStarted
    | PhaseStarted
    | Waiting
    | ClusterReady
    | StepFinished
    | Evaluated
    | CheckpointSaved
    | RunRestarted
    | RunFinished
    | CurveDrawn
)
Listener: TypeAlias = Callable[[Event], None]


def nobody(event: Event) -> None:
    """Ignore an event: the listener of a run that nobody follows."""

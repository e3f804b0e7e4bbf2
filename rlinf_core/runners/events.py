"""Events that a runner emits. Listeners render them: the live view, plain lines, a test."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from rlinf_core.topology import ClusterTopology

# The phases of a training step, named as in the `time/` metrics.
SYNC_WEIGHTS: Final = "sync_weights"
GENERATE_ROLLOUTS: Final = "generate_rollouts"
ADVANTAGES: Final = "cal_adv_and_returns"
ACTOR_TRAINING: Final = "actor_training"
# Other phases of a run.
LAUNCH: Final = "launch"
EVALUATE: Final = "evaluate"
SAVE_CHECKPOINT: Final = "save_checkpoint"


class ItemFate(StrEnum):
    """The fate of an item that was buffered or in flight when a checkpoint was written: a prompt, rollout or episode.

    A checkpoint lists them in its manifest, as it can bring them back; a run that continues from it reports what became
    of each, which differs where it may use less of what is there.
    """

    RESTORED = "restored"
    """It was done, and is used as it is."""
    CONTINUED = "continued"
    """It goes on where it was."""
    AGAIN = "done again"
    """It begins anew; what there was of it is lost."""
    WAITING = "not yet asked"
    """It was set aside, and nobody had begun it."""
    DROPPED = "left out"
    """It is neither kept nor done again."""


ItemFates: TypeAlias = Mapping[str, Sequence[str]]
"""The items of each fate, each named as in `prompt 17 for step 5`."""


def item_fates(items: Iterable[tuple[ItemFate, str]]) -> ItemFates:
    """Return items by their fates, in order; fates without an item are left out."""
    by_fate: dict[str, list[str]] = {}
    for fate, name in items:
        by_fate.setdefault(fate.value, []).append(name)
    return {fate.value: by_fate[fate.value] for fate in ItemFate if fate.value in by_fate}


def fates_line(fates: ItemFates) -> str:
    """Return `in flight at the checkpoint: 4 restored, 2 continued, 1 done again, 3 not yet asked`."""
    counts = ", ".join(f"{len(items)} {fate}" for fate, items in fates.items())
    return f"in flight at the checkpoint: {counts}"


class RunStarted(NamedTuple):
    """The workers have started and training begins. Emitted once: restarts are announced by `RunRestarted`.

    Attributes:
        folder: the run folder.
        first_step: 1, or more for a resumed run.
        last_step: the step after which it ends; None while unknown.
        components: number of processes of each component.
        resumed_from: the checkpoint it resumes from.
    """

    folder: Path
    first_step: int
    last_step: int | None
    components: Mapping[str, int]
    resumed_from: Path | None = None


class PhaseStarted(NamedTuple):
    """The run enters `phase`, one of the names above."""

    step: int
    phase: str


class PhaseProgress(NamedTuple):
    """The run has got some way in its phase, as in `12 of 64 answers`."""

    step: int
    text: str


class Waiting(NamedTuple):
    """The run starts waiting for `what`, as in `actor: 2 processes`, for at most `seconds` if known.

    With `again` it waits as before, and there is news of it. `instead` says what its user can do instead of waiting.
    """

    what: str
    seconds: float | None = None
    again: bool = False
    instead: str = ""


class StepFinished(NamedTuple):
    """A training step has finished. `metrics` has full names, as in `train/actor/policy_loss`; times are in seconds."""

    step: int
    metrics: Mapping[str, float]


class Evaluated(NamedTuple):
    """The policy was evaluated after `step`; `metrics` has names under `eval/`."""

    step: int
    metrics: Mapping[str, float]


class CheckpointSaved(NamedTuple):
    """Training after `step` can be resumed from `path`; from a snapshot, until the next checkpoint is saved."""

    step: int
    path: Path
    snapshot: bool = False


class ClusterReady(NamedTuple):
    """The cluster is ready, and workers are launched next; emitted by each attempt."""

    topology: ClusterTopology


class NodesChanged(NamedTuple):
    """The nodes of this attempt are others than before: a spare serves as a lost node, or a node is back.

    Attributes:
        step: the last finished step.
        text: who serves as whom, in one line.
        details: why, one line each.
    """

    step: int
    text: str
    details: tuple[str, ...] = ()


class RunRestarted(NamedTuple):
    """A worker or node died, and the run goes back to `step` (0 without a checkpoint).

    Attributes:
        restart: the number of this restart, from 1.
        reason: what died, in one line.
        details: the rest of the error, and the folder of evidence, one line each.
    """

    step: int
    restart: int
    max_restarts: int
    reason: str
    details: tuple[str, ...] = ()


class WorkersRelaunched(NamedTuple):
    """Workers died and were started again alone; the others went on, and no finished step is lost.

    Attributes:
        step: the last finished step.
        restart: its number among the restarts that count, from 1.
        reason: what died, in one line.
        seconds: the seconds from the notice of the death until the new processes were prepared.
        repeated: what is done again, as in `the rollouts of step 3`; empty for nothing.
        details: the rest of the error, and the folder of evidence, one line each.
    """

    step: int
    restart: int
    max_restarts: int
    reason: str
    seconds: float
    repeated: str = ""
    details: tuple[str, ...] = ()


class ItemsResumed(NamedTuple):
    """The run continues from a checkpoint after `step`, at which items were buffered or in flight.

    Attributes:
        step: the step of the checkpoint.
        fates: every item by what becomes of it.
    """

    step: int
    fates: ItemFates


class RunFinished(NamedTuple):
    """The run has finished normally.

    Attributes:
        metrics: the newest value of every metric.
        seconds: the seconds from `RunStarted` to the end of training, without ending the workers.
    """

    step: int
    metrics: Mapping[str, float]
    seconds: float


Event: TypeAlias = (
    RunStarted
    | PhaseStarted
    | PhaseProgress
    | Waiting
    | ClusterReady
    | NodesChanged
    | StepFinished
    | Evaluated
    | CheckpointSaved
    | RunRestarted
    | WorkersRelaunched
    | ItemsResumed
    | RunFinished
)
Listener: TypeAlias = Callable[[Event], None]


def nobody(event: Event) -> None:
    """Ignore an event: the default listener."""

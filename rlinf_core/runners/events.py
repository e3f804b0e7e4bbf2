"""The events of a run, for listeners such as the live view, plain lines, or a test."""

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

    The manifest of a checkpoint lists the fates that the checkpoint allows. A run that continues from it reports the
    actual fates, which differ if the run can use less of the saved data.
    """

    RESTORED = "restored"
    """It was done, and its result is used."""
    CONTINUED = "continued"
    """It continues where it was."""
    AGAIN = "done again"
    """It starts again; its progress is lost."""
    WAITING = "not yet asked"
    """It was queued, and no process had started it."""
    DROPPED = "left out"
    """It is neither kept nor done again."""


ItemFates: TypeAlias = Mapping[str, Sequence[str]]
"""The names of the items of each fate, for example `prompt 17 for step 5`."""


def item_fates(items: Iterable[tuple[ItemFate, str]]) -> ItemFates:
    """Return the names of items by their fates, in the order of `ItemFate`; fates without items are left out."""
    by_fate: dict[str, list[str]] = {}
    for fate, name in items:
        by_fate.setdefault(fate.value, []).append(name)
    return {fate.value: by_fate[fate.value] for fate in ItemFate if fate.value in by_fate}


def fates_line(fates: ItemFates) -> str:
    """Return a text such as `in flight at the checkpoint: 4 restored, 2 continued, 1 done again, 3 not yet asked`."""
    counts = ", ".join(f"{len(items)} {fate}" for fate, items in fates.items())
    return f"in flight at the checkpoint: {counts}"


class RunStarted(NamedTuple):
    """The event that the workers have started and training begins. Emitted once; `RunRestarted` announces restarts.

    Attributes:
        folder: the run folder.
        first_step: 1, or more for a resumed run.
        last_step: the step after which the run ends; None while unknown.
        components: the number of processes of each component.
        resumed_from: the checkpoint from which it resumes.
    """

    folder: Path
    first_step: int
    last_step: int | None
    components: Mapping[str, int]
    resumed_from: Path | None = None


class PhaseStarted(NamedTuple):
    """The event that the run enters `phase`, one of the names above."""

    step: int
    phase: str


class PhaseProgress(NamedTuple):
    """The event of progress within a phase; `text` is, for example, `12 of 64 answers`."""

    step: int
    text: str


class Waiting(NamedTuple):
    """The event that the run waits for `what`, for example `actor: 2 processes`, for at most `seconds` if known.

    `again` marks an update about the same wait. `instead` describes what the user can do instead of waiting.
    """

    what: str
    seconds: float | None = None
    again: bool = False
    instead: str = ""


class StepFinished(NamedTuple):
    """The event that a step has finished; `metrics` has full names (`train/actor/policy_loss`), times in seconds."""

    step: int
    metrics: Mapping[str, float]


class Evaluated(NamedTuple):
    """The event that the policy was evaluated after `step`; the names in `metrics` are under `eval/`."""

    step: int
    metrics: Mapping[str, float]


class CheckpointSaved(NamedTuple):
    """The event that training after `step` can be resumed from `path`; a snapshot lasts until the next checkpoint."""

    step: int
    path: Path
    snapshot: bool = False


class ClusterReady(NamedTuple):
    """The event that the cluster is ready, and workers are launched next; emitted by each attempt."""

    topology: ClusterTopology


class NodesChanged(NamedTuple):
    """The event that this attempt has other nodes than before: a spare replaces a lost node, or a node is back.

    Attributes:
        step: the last finished step.
        text: the changes, in one line.
        details: the reasons, one line each.
    """

    step: int
    text: str
    details: tuple[str, ...] = ()


class RunRestarted(NamedTuple):
    """The event that a worker or node died, and the run goes back to `step` (0 without a checkpoint).

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
    """The event that only dead workers were started again; the others continued, and no finished step is lost.

    Attributes:
        step: the last finished step.
        restart: its number among the restarts that count, from 1.
        reason: what died, in one line.
        seconds: the seconds from the notice of the death until the new processes were prepared.
        repeated: the work that is repeated, for example `the rollouts of step 3`; empty for none.
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
    """The event that the run continues from a checkpoint with items that were buffered or in flight.

    Attributes:
        step: the step of the checkpoint.
        fates: the items by their fates.
    """

    step: int
    fates: ItemFates


class RunFinished(NamedTuple):
    """The event that the run has finished normally.

    Attributes:
        metrics: the newest value of every metric.
        seconds: the seconds from `RunStarted` to the end of training, before the workers are ended.
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

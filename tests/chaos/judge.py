"""The judge: whether a disturbed run ended right, or said why it did not. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, NamedTuple

from rlinf_core.runners.storage.run_status import RunStatus
from tests.chaos.fault_table import FAULTS, Deed, Target
from tests.chaos.outcomes import RunEnding, Struck

# Counts of what recovery itself does, which an undisturbed run does not do.
_OF_RECOVERY: Final = frozenset(
    {"agent/processes_lost", "agent/tasks_moved", "rollout/continued", "rollout/prompted_again"}
)
# Metrics of the machine, which may be equal twice by chance.
_OF_MACHINE: Final = ("memory/", "time/")
_MOST_NAMED: Final = 5


class RunVerdict(StrEnum):
    """The verdict on a disturbed run."""

    EQUAL = "equal"
    """It finished, with the very results of the undisturbed run."""
    RIGHT = "right"
    """It finished, every step once; results of this job differ from run to run, and cannot be compared."""
    EXPLAINED = "explained"
    """It ended early, and its folder names the process that was hit."""
    UNTOUCHED = "untouched"
    """No fault hit it."""
    WRONG = "wrong"
    """It finished with other results, or without a step."""
    UNEXPLAINED = "unexplained"
    """It ended early, and its folder does not name what was hit; or a stopped process was not named."""
    HUNG = "hung"
    """It neither went on nor ended within the deadline."""
    UNCLEAN = "unclean"
    """It ended right, and left processes or files behind, or printed a fault of rlinf."""


GOOD: Final = frozenset({RunVerdict.EQUAL, RunVerdict.RIGHT, RunVerdict.EXPLAINED, RunVerdict.UNTOUCHED})


class UndisturbedRuns(NamedTuple):
    """The figures that every undisturbed run of a job has.

    Attributes:
        steps: the steps of the run.
        digests: the digests of the files of the last checkpoint that are equal in two undisturbed runs.
        metrics: the metrics of each step, those that are equal in them, without times and memory.
        launch: seconds from the command to the first step.
    """

    steps: tuple[int, ...]
    digests: Mapping[str, str]
    metrics: tuple[Mapping[str, float], ...]
    launch: float

    @property
    def comparable(self) -> bool:
        """Whether results can be compared bit by bit: weights and all else, as the job says nothing by chance."""
        return bool(self.digests)


def reference_of(one: RunEnding, other: RunEnding, launch: float) -> UndisturbedRuns:
    """Return what is equal in two undisturbed runs.

    The files of the checkpoint are compared only where the policy's weights are equal: a job whose weights differ from
    run to run has nothing that must be equal.
    """
    equal = {name: digest for name, digest in one.digests.items() if other.digests.get(name) == digest}
    # The description of a format holds names of processes, or times.
    data = {name for name in one.digests if not name.rpartition("/")[2].startswith(".")}
    if not data <= equal.keys() or one.steps != other.steps:
        return UndisturbedRuns(one.steps, {}, (), launch)
    metrics = tuple(
        {
            name: value
            for name, value in mine.items()
            if _same(theirs.get(name), value) and not name.startswith(_OF_MACHINE)
        }
        for mine, theirs in zip(one.metrics, other.metrics, strict=True)
    )
    return UndisturbedRuns(one.steps, equal, metrics, launch)


def judge(outcome: RunEnding, reference: UndisturbedRuns, max_restarts: int = 0) -> tuple[RunVerdict, str]:
    """Return the verdict on a disturbed run, and what is wrong in words; empty where all is well.

    Args:
        outcome: the end of the run.
        reference: the figures of the undisturbed runs.
        max_restarts: the restarts that it was allowed; a run with restarts left must not end of a death.
    """
    if outcome.code is None:
        return RunVerdict.HUNG, f"it neither went on nor ended: {outcome.status} after step {len(outcome.steps)}"
    verdict, why = _of_end(outcome, reference, max_restarts)
    if verdict not in GOOD:
        return verdict, why
    unnamed = [struck.victim for struck in outcome.hit if _is_unnamed(struck)]
    if unnamed:
        return RunVerdict.UNEXPLAINED, f"stopped, and not named: {', '.join(unnamed)}"
    unclean = [*(f"left behind: {left}" for left in outcome.left), *(f"printed: {line}" for line in outcome.bugs)]
    return (RunVerdict.UNCLEAN, "; ".join(unclean[:_MOST_NAMED])) if unclean else (verdict, why)


def _of_end(outcome: RunEnding, reference: UndisturbedRuns, max_restarts: int) -> tuple[RunVerdict, str]:
    if outcome.status == RunStatus.FINISHED and outcome.code == 0:
        wrong = _differences(outcome, reference)
        if wrong:
            return RunVerdict.WRONG, wrong
        if not outcome.hit:
            return RunVerdict.UNTOUCHED, ""
        return (RunVerdict.EQUAL if reference.comparable else RunVerdict.RIGHT), ""
    if outcome.code == 0:
        return RunVerdict.WRONG, f"its exit code is 0, and the run is {outcome.status}"
    if _refused(outcome):
        return RunVerdict.EXPLAINED, ""
    if not outcome.hit:
        return RunVerdict.WRONG, f"nothing was hit, and it ended with {outcome.code}: {outcome.reason}"
    if len(outcome.hit) <= max_restarts and not any(_may_end(struck) for struck in outcome.hit):
        return RunVerdict.WRONG, f"it was not restarted, although it might have been: {outcome.reason}"
    if _explained(outcome):
        return RunVerdict.EXPLAINED, ""
    words = outcome.why[-1][1].partition("\n")[0] if outcome.why else "nothing"
    return RunVerdict.UNEXPLAINED, f"exit code {outcome.code}, {outcome.reason}; `rlinf why` says: {words}"


def _differences(outcome: RunEnding, reference: UndisturbedRuns) -> str:
    """Return in words in what a finished run differs from the undisturbed one; empty for nothing."""
    if outcome.steps != reference.steps:
        return f"its steps are {_short(outcome.steps)}, not {_short(reference.steps)}"
    files = [name for name, digest in reference.digests.items() if outcome.digests.get(name) != digest]
    if files:
        return f"files of the last checkpoint differ: {', '.join(files[:_MOST_NAMED])}"
    for step, expected, values in zip(reference.steps, reference.metrics, outcome.metrics, strict=False):
        names = [
            name for name, value in expected.items() if name not in _OF_RECOVERY and not _same(values.get(name), value)
        ]
        if names:
            shown = ", ".join(f"{name} {values.get(name)} not {expected[name]}" for name in names[:_MOST_NAMED])
            return f"metrics of step {step} differ: {shown}"
    return ""


def _explained(outcome: RunEnding) -> bool:
    """Return whether the last failure that the folder records is the fault that ended the run."""
    if not outcome.why:
        return False
    code, words = outcome.why[-1]
    return any(_names(struck, code, words) for struck in outcome.hit)


def _names(struck: Struck, code: str, words: str) -> bool:
    fault = FAULTS[struck.strike.fault]
    match fault.deed:
        case Deed.FILL:
            return any(text in words for text in ("No space left", "File too large", "disk"))
        case _ if fault.ends_command:
            return code in ("driver-vanished", "terminated")
        case _:
            # A child dies as a part of its worker, and Ray's agents take their raylet with them.
            name = struck.victim.removeprefix("child of ")
            lost = code == "node-lost" and fault.target in (Target.RAYLET, Target.RAY_AGENT)
            return lost or name in words or str(fault.target) in words


def _refused(outcome: RunEnding) -> bool:
    """Return whether its last command did not begin and the folder says so: a busy machine starts no Ray in time."""
    last = outcome.hit[-1:]
    begun = any(not FAULTS[struck.strike.fault].ends_command for struck in last)
    return not begun and bool(outcome.why) and outcome.why[-1][0] == "cluster"


def _may_end(struck: Struck) -> bool:
    """Return whether a strike may end a run that has restarts left: what cannot be written cannot be made again."""
    return FAULTS[struck.strike.fault].deed is Deed.FILL


def _is_unnamed(struck: Struck) -> bool:
    return FAULTS[struck.strike.fault].deed is Deed.FREEZE and struck.named is None and not struck.gone


def _same(one: float | None, other: float | None) -> bool:
    """Return whether two numbers are the same, NaN included."""
    return one == other or (one is not None and other is not None and one != one and other != other)


def _short(steps: tuple[int, ...]) -> str:
    if list(steps) == list(range(steps[0], steps[-1] + 1)) if steps else False:
        return f"{steps[0]} to {steps[-1]}"
    return str(list(steps[:50]))

"""The incidents of a run in order, from evidence, events and state: restarts, standstills, and the end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import pairwise, takewhile
from statistics import median
from typing import Final, NamedTuple

from rlinf_cli.why.facts import RunFacts
from rlinf_core.runners.metrics import EVALUATION_TIME
from rlinf_core.runners.step_clock import FIRST_LOOK, NO_STEP, SLOW, STEPS
from rlinf_core.runners.storage import run_events
from rlinf_core.runners.storage.evidence import FAILURE, FOLDER, Bundle, FailedProcess
from rlinf_core.runners.storage.run_events import RunEvent
from rlinf_core.runners.storage.run_status import RunStatus

# The kind of an incident without an event: an active run that finishes no steps.
STALLED: Final = "stalled"
_ENDS: Final = (run_events.FAILED, run_events.INTERRUPTED)
_KINDS: Final = (run_events.RESTARTED, run_events.RELAUNCHED, *_ENDS)
_STATE: Final = "run.json"
_EVIDENCE: Final = f"{run_events.EVIDENCE}: "
# Text about a job that reaches the time limit of its scheduler.
REACHED: Final = "reaches its time limit"
# Schedulers send a signal at most this many seconds before the limit; `sbatch --signal` can make it earlier.
_BEFORE_LIMIT: Final = 600.0
# Texts in the driver's warnings about waits.
_WAITS: Final = ("is stopped", "waiting for", " waits ", "deadlock", NO_STEP)


class Incident(NamedTuple):
    """A failure, an interruption or a standstill of a run.

    Attributes:
        kind: the kind of its event, or `stalled`.
        what: the first failure in one line.
        source: the file that records it.
        time: the time in seconds since 1970; None if only the state records the incident.
        step: the last finished step.
        process: the first process that failed, if there is evidence of it.
        others: descriptions of the workers that failed with it.
        lines: further lines of the event: location, cause, remedy.
        bundle: the evidence of the incident.
        nodes: descriptions of the nodes that were replaced after it.
        has_checkpoint: whether the run has a checkpoint to continue from.
    """

    kind: str
    what: str
    source: str
    time: float | None
    step: int
    process: FailedProcess | None = None
    others: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    bundle: Bundle | None = None
    nodes: tuple[str, ...] = ()
    has_checkpoint: bool = True

    @property
    def ended(self) -> bool:
        """Whether the incident ended the run."""
        return self.kind in _ENDS

    @property
    def alone(self) -> bool:
        """Whether only the dead processes were started again, and the others continued."""
        return self.kind == run_events.RELAUNCHED

    @property
    def restarted(self) -> bool:
        """Whether the whole run was started again."""
        return self.kind == run_events.RESTARTED

    @property
    def text(self) -> str:
        """All text about the incident, for matching the words of errors."""
        process = self.process
        parts = [self.what, *self.lines]
        return "\n".join(parts if process is None else [*parts, process.text, process.why])


def incidents(facts: RunFacts) -> list[Incident]:
    """Return the incidents of a run, oldest first."""
    # An end before a resumption is not the cause of the run's current state. The order of events is that of the file,
    # whatever the clock was set to.
    resumed = max((place for place, event in enumerate(facts.story) if event.kind == run_events.RESUMED), default=-1)
    since = facts.story[resumed].time if resumed >= 0 else 0.0
    bundles = {f"{FOLDER}/{bundle.path.name}": bundle for bundle in facts.bundles}
    ordered: list[Incident] = []
    for place, event in enumerate(facts.story):
        if event.kind in _KINDS:
            incident = _of_event(event, bundles)._replace(nodes=_nodes_after(event, facts))
            # What is left has no event: the driver was killed during the failure.
            bundles = {name: bundle for name, bundle in bundles.items() if bundle is not incident.bundle}
            ordered += [incident] if place > resumed or not incident.ended else []
    ordered += [_of_bundle(bundle) for bundle in bundles.values() if bundle.content.time >= since]
    ordered.sort(key=lambda incident: incident.time or 0.0)
    if facts.status in _ENDS and not (ordered and ordered[-1].ended):
        what, lines = facts.reason or f"the run is {facts.status}", tuple(facts.driver_end)
        ordered.append(Incident(facts.status, what, _STATE, facts.ended, facts.step, lines=lines))
    ordered = [incident._replace(has_checkpoint=facts.has_checkpoint) for incident in ordered]
    standstill = _standstill(facts)
    return ordered if standstill is None else [*ordered, standstill]


def seconds_without_step(facts: RunFacts) -> float | None:
    """Return the seconds since the last step of an active run; None while the step is not overdue."""
    usual = _usual_seconds(facts)
    if facts.status != RunStatus.RUNNING or usual is None:
        return None
    quiet = facts.looked - max(facts.moments[-1], *(event.time for event in facts.story), 0.0)
    return quiet if quiet >= max(FIRST_LOOK, SLOW * usual) else None


def _usual_seconds(facts: RunFacts) -> float | None:
    """Return the median duration of the last steps or, during an evaluation, of the last evaluations, or None."""
    if facts.evaluates:
        durations = facts.column(EVALUATION_TIME).last(STEPS).values
    else:
        durations = [after - before for before, after in pairwise(facts.moments[-STEPS:])]
    return median(durations) if durations else None


def _standstill(facts: RunFacts) -> Incident | None:
    """Return the standstill of an active run whose step takes much longer than usual, if some process holds it up:
    an asked process, or else one in the driver's warnings."""
    quiet, usual = seconds_without_step(facts), _usual_seconds(facts)
    waits = facts.held_up or [line for line in facts.warnings if any(word in line for word in _WAITS)][::-1]
    if quiet is None or usual is None or not waits:
        return None
    of_what = "evaluations" if facts.evaluates else "ones"
    what = f"{NO_STEP} for {quiet:.0f} s; the last {of_what} took {usual:.2g} s each"
    source = "asked of the run's processes" if facts.held_up else "logs/driver/rank_0.log"
    return Incident(STALLED, what, source, facts.looked - quiet, facts.step, lines=tuple(waits))


def _of_event(event: RunEvent, bundles: dict[str, Bundle]) -> Incident:
    named = (line.removeprefix(_EVIDENCE) for line in event.details if line.startswith(_EVIDENCE))
    bundle = next((bundles[name] for name in named if name in bundles), None)
    source = run_events.FILE if bundle is None else f"{FOLDER}/{bundle.path.name}/{FAILURE}"
    process, others = _processes(bundle)
    # The evidence is exact: an event comes after all processes have ended, and a restart's has its checkpoint's step.
    at, step = (event.time, event.step) if bundle is None else (bundle.content.time, bundle.content.step)
    return Incident(event.kind, event.text, source, at, step, process, others, event.details, bundle)


def _nodes_after(event: RunEvent, facts: RunFacts) -> tuple[str, ...]:
    """Return lines on the nodes that were missing at the restart after an incident, and on their replacements."""
    if event.kind != run_events.RESTARTED:
        return ()
    later = takewhile(lambda other: other.kind not in _KINDS, facts.story[facts.story.index(event) + 1 :])
    # An event about a returned node has no details.
    lost = [other for other in later if other.kind == run_events.NODES and other.details]
    return tuple("; ".join((other.text, *other.details)) for other in lost)


def _of_bundle(bundle: Bundle) -> Incident:
    content = bundle.content
    source = f"{FOLDER}/{bundle.path.name}/{FAILURE}"
    process, others = _processes(bundle)
    return Incident(run_events.FAILED, content.what, source, content.time, content.step, process, others, (), bundle)


def _processes(bundle: Bundle | None) -> tuple[FailedProcess | None, tuple[str, ...]]:
    if bundle is None or bundle.first is None:
        return None, ()
    _, *others = bundle.content.failures
    return bundle.first, tuple(f"`{other.name}`: {_short(other)}" for other in others)


def _short(process: FailedProcess) -> str:
    if process.died:
        return "died"
    first = process.text.strip().partition("\n")[0]
    name = process.type.rpartition(".")[2]
    return f"{name}: {first[:160]}" if first else name


def limit_reached(environ: Mapping[str, str], now: float) -> str | None:
    """Return a sentence if a Slurm job reaches its time limit at about `now` (seconds since 1970), else None."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    if not end.isascii() or not end.isdigit() or not -_BEFORE_LIMIT < now - float(end) < _BEFORE_LIMIT:
        return None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(end)))
    return f"Slurm job {environ.get('SLURM_JOB_ID', '')} {REACHED} at {at}"

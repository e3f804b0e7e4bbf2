"""The incidents of a run in order, from evidence, events and state: setbacks, delays, and its end."""

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

# The kind of an incident that no event reports: an active run finishes no steps.
STALLED: Final = "stalled"
_ENDS: Final = (run_events.FAILED, run_events.INTERRUPTED)
_KINDS: Final = (run_events.RESTARTED, run_events.RELAUNCHED, *_ENDS)
_STATE: Final = "run.json"
_EVIDENCE: Final = f"{run_events.EVIDENCE}: "
# The words for a job at the time limit of its scheduler.
REACHED: Final = "reaches its time limit"
# Schedulers warn by a signal that long before they kill; `sbatch --signal` asks for more.
_BEFORE_LIMIT: Final = 600.0
# Words of the driver's warnings about waits.
_WAITS: Final = ("is stopped", "waiting for", " waits ", "deadlock", NO_STEP)


class Incident(NamedTuple):
    """One failure of a run, its interruption, or its standstill.

    Attributes:
        kind: the kind of its event, or `stalled`.
        what: the first failure in one line.
        source: the file that records it.
        time: the time in seconds since 1970; None where only the state records it.
        step: the last finished step.
        process: the first process that failed, in full, where there is evidence of it.
        others: the workers that failed with it, in words.
        lines: further lines of the event: location, cause, remedy.
        bundle: the evidence of it.
        nodes: which nodes served as others after it, in words.
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
        """Whether it ended the run."""
        return self.kind in _ENDS

    @property
    def alone(self) -> bool:
        """Whether only what had died was started again, and the others went on."""
        return self.kind == run_events.RELAUNCHED

    @property
    def restarted(self) -> bool:
        """Whether the whole run was started again."""
        return self.kind == run_events.RESTARTED

    @property
    def text(self) -> str:
        """All that is known in words, to look for what an error says."""
        process = self.process
        parts = [self.what, *self.lines]
        return "\n".join(parts if process is None else [*parts, process.text, process.why])


def incidents(facts: RunFacts) -> list[Incident]:
    """Return what happened to a run, oldest first."""
    events = [event for event in facts.story if event.kind in _KINDS]
    bundles = {f"{FOLDER}/{bundle.path.name}": bundle for bundle in facts.bundles}
    ordered = [_of_event(event, bundles)._replace(nodes=_nodes_after(event, facts)) for event in events]
    known = {incident.bundle.path for incident in ordered if incident.bundle is not None}
    # A driver that was killed while it failed has evidence without an event.
    ordered += [_of_bundle(bundle) for bundle in facts.bundles if bundle.path not in known]
    ordered.sort(key=lambda incident: incident.time or 0.0)
    # Ends of a run that was resumed afterwards are not the cause of its current state.
    resumed = max((event.time for event in facts.story if event.kind == run_events.RESUMED), default=0.0)
    ordered = [incident for incident in ordered if not incident.ended or (incident.time or resumed) >= resumed]
    if facts.status in _ENDS and not (ordered and ordered[-1].ended):
        what, lines = facts.reason or f"the run is {facts.status}", tuple(facts.driver_end)
        ordered.append(Incident(facts.status, what, _STATE, facts.ended, facts.step, lines=lines))
    ordered = [incident._replace(has_checkpoint=facts.has_checkpoint) for incident in ordered]
    standstill = _standstill(facts)
    return ordered if standstill is None else [*ordered, standstill]


def seconds_without_step(facts: RunFacts) -> float | None:
    """Return the time since the last step of an active run; None while that is no longer than it may take."""
    usual = _usual_seconds(facts)
    if facts.status != RunStatus.RUNNING or usual is None:
        return None
    quiet = facts.looked - max(facts.moments[-1], *(event.time for event in facts.story), 0.0)
    return quiet if quiet >= max(FIRST_LOOK, SLOW * usual) else None


def _usual_seconds(facts: RunFacts) -> float | None:
    """Return what the last steps took, or the last evaluations while one runs; None while that is not known."""
    if facts.evaluates:
        durations = facts.column(EVALUATION_TIME).last(STEPS).values
    else:
        durations = [after - before for before, after in pairwise(facts.moments[-STEPS:])]
    return median(durations) if durations else None


def _standstill(facts: RunFacts) -> Incident | None:
    """Return that an active run has not finished a step for much longer than usual, and who holds it up: processes
    that were looked at, else those that its driver warns of."""
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
    # The event comes when all processes have ended; that of a restart has the step that the run went back to.
    at, step = (event.time, event.step) if bundle is None else (bundle.content.time, bundle.content.step)
    return Incident(event.kind, event.text, source, at, step, process, others, event.details, bundle)


def _nodes_after(event: RunEvent, facts: RunFacts) -> tuple[str, ...]:
    """Return which nodes the restart after an incident did not find, and who serves instead."""
    if event.kind != run_events.RESTARTED:
        return ()
    later = takewhile(lambda other: other.kind not in _KINDS, facts.story[facts.story.index(event) + 1 :])
    # That a node is back has no reason.
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
    """Return, in words, that a Slurm job reaches its time limit about `now` (seconds since 1970); else None."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    if not end.isascii() or not end.isdigit() or not -_BEFORE_LIMIT < now - float(end) < _BEFORE_LIMIT:
        return None
    at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(end)))
    return f"Slurm job {environ.get('SLURM_JOB_ID', '')} {REACHED} at {at}"

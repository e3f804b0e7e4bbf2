"""The failures of a run in order, from evidence, events and state: those that sent it back, the one that ended it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from rlinf_cli.run import run_events
from rlinf_cli.run.run_events import StoryEvent
from rlinf_cli.why.facts import RunFacts
from rlinf_core.runners.storage.evidence import FAILURE, FOLDER, Bundle, FailedProcess
from rlinf_core.runners.storage.run_status import RunStatus

_FAILURES: Final = (run_events.RESTARTED, run_events.RELAUNCHED, run_events.FAILED)


class Incident(NamedTuple):
    """One failure of a run.

    Attributes:
        what: the first failure in one line.
        source: the file that tells of it.
        time: in seconds since 1970; None where only the state tells.
        step: the last finished step.
        process: the first process that failed, in full, where there is evidence of it.
        others: that failed with it, in words.
        lines: further lines of the event: location, cause, remedy.
        ended: whether it ended the run; otherwise the run, or what had died, was started again.
        bundle: the evidence of it.
        alone: whether only what had died was started again, and the others went on.
    """

    what: str
    source: str
    time: float | None
    step: int
    process: FailedProcess | None = None
    others: tuple[str, ...] = ()
    lines: tuple[str, ...] = ()
    ended: bool = True
    bundle: Bundle | None = None
    alone: bool = False

    @property
    def text(self) -> str:
        """All that is known in words, to look for what an error says."""
        process = self.process
        parts = [self.what, *self.lines]
        return "\n".join(parts if process is None else [*parts, process.text, process.why])

    def is_a(self, *names: str) -> bool:
        """Return whether the first error is of one of these types, or derives from one."""
        return self.process is not None and not set(names).isdisjoint(self.process.bases)


def incidents(facts: RunFacts) -> list[Incident]:
    """Return the failures of a run, oldest first."""
    events = [event for event in facts.story if event.kind in _FAILURES]
    bundles = {f"{FOLDER}/{bundle.path.name}": bundle for bundle in facts.bundles}
    ordered = [_of_event(event, bundles) for event in events]
    known = {incident.bundle.path for incident in ordered if incident.bundle is not None}
    # A driver that was killed while it failed has evidence without an event.
    ordered += [_of_bundle(bundle) for bundle in facts.bundles if bundle.path not in known]
    ordered.sort(key=lambda incident: incident.time or 0.0)
    if facts.status == RunStatus.FAILED and not (ordered and ordered[-1].ended):
        ordered.append(Incident(facts.reason or "the run failed", "run.json", facts.ended, facts.step))
    return ordered


def _of_event(event: StoryEvent, bundles: dict[str, Bundle]) -> Incident:
    bundle = next((bundles[name] for name in _named(event) if name in bundles), None)
    source = run_events.FILE if bundle is None else f"{FOLDER}/{bundle.path.name}/{FAILURE}"
    process, others = _processes(bundle)
    ended, alone = event.kind == run_events.FAILED, event.kind == run_events.RELAUNCHED
    return Incident(event.text, source, event.time, event.step, process, others, event.details, ended, bundle, alone)


def _of_bundle(bundle: Bundle) -> Incident:
    content = bundle.content
    source = f"{FOLDER}/{bundle.path.name}/{FAILURE}"
    return Incident(content.what, source, content.time, content.step, *_processes(bundle), bundle=bundle)


def _named(event: StoryEvent) -> Iterator[str]:
    prefix = f"{run_events.EVIDENCE}: "
    return (line.removeprefix(prefix) for line in event.details if line.startswith(prefix))


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

"""Ends and standstills that are not a failure of a process of the run: signals, time limits, a driver that vanished."""

from __future__ import annotations

from typing import Final

from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_cli.why.incidents import STALLED, Incident
from rlinf_cli.why.time_limit import REACHED
from rlinf_core.runners.storage.run_events import INTERRUPTED

_VANISHED: Final = "its process vanished"
_GO_ON: Final = "`runner.resume_dir=auto` goes on from the last checkpoint"
_AGAIN: Final = "run it again from the beginning: there is no checkpoint to go on from"


def time_limit(incident: Incident) -> RunFinding | None:
    """Name the time limit of a scheduler, which sends a signal before it kills."""
    limit = next((line for line in incident.lines if REACHED in line), None)
    if incident.kind != INTERRUPTED or limit is None:
        return None
    return _finding(
        incident,
        FindingKind.INTERRUPTION,
        "time-limit",
        f"the scheduler ended the run at its time limit: {limit}",
        f"ask for more time, or submit the same job again: {_go_on(incident)}",
    )


def interrupted(incident: Incident) -> RunFinding | None:
    """Report that somebody ended the run."""
    if incident.kind != INTERRUPTED:
        return None
    if incident.what == "interrupted":
        code, what = "interrupted", "somebody pressed Ctrl-C, or sent SIGINT to the driver"
    elif "--force" in incident.what:
        code, what = "stopped", f"somebody ended it: {incident.what}"
    else:
        code, what = "terminated", "the driver was asked to end by SIGTERM: `rlinf stop`, a scheduler, or a shutdown"
        if incident.what != "terminated":
            what = f"the driver was asked to end: {incident.what}"
    return _finding(incident, FindingKind.INTERRUPTION, code, what, _go_on(incident))


def stalled(incident: Incident) -> RunFinding | None:
    """Tell who holds up a run that finishes no steps."""
    if incident.kind != STALLED:
        return None
    first, *others = incident.lines
    return RunFinding(
        FindingKind.STANDSTILL,
        "stalled",
        first,
        (incident.what, *others, f"source: {incident.source}"),
        (
            "`rlinf ps --stacks` shows the whole stacks of all processes; one that cannot go on is ended by `kill -9`,"
            " and the run starts it again",
        ),
        step=incident.step,
        time=incident.time,
    )


def driver_vanished(incident: Incident) -> RunFinding | None:
    """Tell the end of a run whose driver could not write how it ended, with what its machine knows of it."""
    if _VANISHED not in incident.what:
        return None
    go_on = _go_on(incident)
    if any("memory" in line for line in incident.lines):
        code, what = "out-of-memory", "the kernel killed the driver of the run for lack of memory"
        do = f"give its machine or container more memory, or place less on it; {go_on}"
    elif any("was restarted since" in line for line in incident.lines):
        code, what = "machine-restarted", "the machine of the driver went down or was restarted during the run"
        do = f"look why (`last -x`, `journalctl -b -1 -k`); {go_on}"
    else:
        code, what = "driver-vanished", "the driver of the run was killed (SIGKILL, or a crash): it wrote no last word"
        do = f"look at the kernel's log of its machine (`dmesg`, `journalctl -k`) for a kill at that time; {go_on}"
    gone = "run.json: the status is still `running`, and the process that it names is gone"
    return _finding(incident, FindingKind.FAILURE, code, what, do, gone)


RULES: Final = (time_limit, interrupted, stalled, driver_vanished)


def _go_on(incident: Incident) -> str:
    return _GO_ON if incident.has_checkpoint else _AGAIN


def _finding(incident: Incident, kind: FindingKind, code: str, what: str, do: str, *shown: str) -> RunFinding:
    evidence = (*shown, *(line for line in incident.lines if line.strip()), f"file: {incident.source}")
    return RunFinding(kind, code, what, evidence, (do,), step=incident.step, time=incident.time)

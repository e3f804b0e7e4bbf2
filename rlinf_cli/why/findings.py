"""The findings of `rlinf why`, and the failures (interruptions, deaths, errors) that rows of `causes.toml` describe.

An error of rlinf has a code (`RLinfError.code`), and so has its evidence. Errors of other libraries, and evidence from
a version of rlinf without codes, are recognized by their types and words.
"""

from __future__ import annotations

import re
import tomllib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Final

from rlinf_cli.why.facts import REACHED, Incident
from rlinf_core.runners.storage.run_events import FailedProcess

_TABLE: Final = Path(__file__).with_name("causes.toml")


@cache
def causes() -> dict[str, Any]:
    """Return the table of causes."""
    return tomllib.loads(_TABLE.read_text(encoding="utf-8"))


class FindingKind(StrEnum):
    """The kind of a finding."""

    FAILURE = "failure"
    """A failure ended the run, or restarted it."""
    INTERRUPTION = "interruption"
    """A user or a scheduler ended the run, and nothing failed."""
    STANDSTILL = "standstill"
    """The run is active, but finishes no steps."""
    LEARNING = "learning"
    """The run continues, or ended well, but does not learn, or learns something else than it should."""
    SPEED = "speed"
    """The run's steps take longer than necessary, without any fault."""
    FIGURES = "figures"
    """The run's metrics leave out requested items, or count items that are not the policy's doing."""


@dataclass(frozen=True, slots=True)
class RunFinding:
    """A cause with its evidence and remedy.

    Attributes:
        code: a stable name, as in `killed-by-signal`.
        what: the cause in one sentence.
        evidence: lines of evidence, each with its file.
        do: the remedies, each a sentence or a command.
        step: the last finished step at the time of a failure, or the first step with the sign.
        time: the time in seconds since 1970, if known.
        followed: the failures that it caused.
    """

    kind: FindingKind
    code: str
    what: str
    evidence: tuple[str, ...]
    do: tuple[str, ...]
    step: int | None = None
    time: float | None = None
    followed: tuple[str, ...] = ()


# The start of a description of a death, as written by `ProcessEnd`.
_KILLED: Final = re.compile(r"it was killed by (SIG[A-Z]+)\b")
_FIRST: Final = re.compile(r"the first: ([^\n]+)")
# Errors about answers of a step that could not be scored or generated.
_UNSCORED: Final = re.compile(r"could (not )?be scored|answers of(?s:.*)max_failed_fraction")
_NO_SAMPLES: Final = "has no samples to learn from"
_SHOWN: Final = 12
_SHOWN_OF_DEATH: Final = 8
# The codes of errors without a code, by type.
_TYPES: Final[Mapping[str, str]] = {
    "SimulatorDiedError": "simulator-died",
    "OutOfMemoryError": "accelerator-memory",
    "MemoryError": "host-memory",
    "SimulatorError": "simulator-raises",
    "NonFiniteError": "not-finite",
    "UntrainedError": "untrained",
    "DeadlockError": "deadlock",
    "CommunicationTimeoutError": "timed-out",
    "CheckpointError": "checkpoint",
    "ClusterError": "cluster",
    "RLinfError": "refused",
}


@dataclass(frozen=True, slots=True)
class FailureCause:
    """A row of the table of failures: the conditions for a failure, and its description; see `causes.toml`."""

    code: str
    what: str
    do: str
    words: str = ""
    when: Mapping[str, str] | None = None
    shown: str = "error_lines"
    kind: str = FindingKind.FAILURE
    own_help: bool = False

    def finding(self, incident: Incident, fields: Mapping[str, str]) -> RunFinding | None:
        """Return the finding about an incident with these fields; None if the row does not match."""
        match = re.search(self.words, incident.text) if self.words else None
        known = match is not None or self.code in _codes(incident) or (self.when is not None and not self.words)
        if not known or not all(re.search(words, fields[name]) for name, words in (self.when or {}).items()):
            return None
        texts = defaultdict[str, str](str, fields, **(match.groupdict("") if match else {}))
        help = incident.process.help if self.own_help and incident.process is not None else ""
        return RunFinding(
            FindingKind(self.kind),
            self.code,
            self.what.format_map(texts),
            (*(line for line in EVIDENCE[self.shown](incident) if line.strip()), f"file: {incident.source}"),
            tuple((help or self.do.format_map(texts)).splitlines()),
            step=incident.step,
            time=incident.time,
            followed=incident.others,
        )


@cache
def failure_causes() -> Sequence[FailureCause]:
    """Return the table of failures."""
    return [FailureCause(**row) for row in causes()["failures"]]


def named_failure(incident: Incident) -> RunFinding:
    """Return the cause of an incident from the first row that matches; the last row matches every incident."""
    fields = fields_of(incident)
    return next(finding for row in failure_causes() if (finding := row.finding(incident, fields)) is not None)


def _codes(incident: Incident) -> set[str]:
    """Return the code of the first error, and the codes of its base types."""
    # Ray may report a lost node only after the run has learned of a death of a process there.
    codes = {"node-lost"} if incident.nodes else set[str]()
    process = incident.process
    return codes if process is None else {*codes, process.code, *(_TYPES.get(base, "") for base in process.bases)}


def fields_of(incident: Incident) -> Mapping[str, str]:
    """Return the fields for texts and conditions of the table.

    `name` is the failed process with its method, `named` also has its place; `line` is the first line of its error,
    `fault` the part of that line before the list of environments.
    """
    process = incident.process or FailedProcess(name="")
    line = (process.text if incident.process is not None else incident.what).strip().partition("\n")[0]
    first = _FIRST.search(incident.text)
    called = f" in `{process.method}`" if process.method else ""
    named = f"`{process.name}`{called}" + (f" on {process.place}" if process.place else "")
    named = named if process.name else "a worker"
    saved = incident.has_checkpoint
    again = "start the run again" + (" with `runner.resume_dir=auto`" if saved else "")
    died = "died" in incident.what if incident.process is None else process.died
    return {
        "kind": incident.kind,
        "what": incident.what,
        "lines": "\n".join(incident.lines),
        "text": incident.text,
        "line": line,
        "fault": line.partition(" (environment")[0],
        "name": (f"`{process.name}`{called}" if called else process.name) or "the run",
        "named": named,
        "died": (incident.what if incident.process is None else f"{named} died") if died else "",
        "of": "for the answers of a whole step"
        if _NO_SAMPLES in incident.text
        else "for more answers than `runner.max_failed_fraction` allows",
        "answers": "failed" if "reward-fails" in _codes(incident) or _UNSCORED.search(incident.text) else "",
        "process": process.name,
        "why": process.why,
        "last": process.why.partition("; its last words:")[0].partition("\n")[0],
        "signal": _signal_of(incident) or "",
        "exit_code": "" if process.exit_code is None else str(process.exit_code),
        "memory": process.out_of_memory or "",
        "type": process.type.removeprefix("builtins."),
        "at": f" at {process.position}" if process.position else "",
        "first": f": {first[1]}" if first is not None else "",
        "limit": next((text for text in incident.lines if REACHED in text), ""),
        "holder": next(iter(incident.lines), ""),
        "help": process.help or "the log of the worker has its traceback",
        "go_on": "`runner.resume_dir=auto` continues from the last checkpoint"
        if saved
        else "run it again from the beginning: there is no checkpoint to go on from",
        "again": again if incident.ended else "nothing: the run was started again",
    }


def error_lines(incident: Incident) -> Sequence[str]:
    """Return the message of an error and its position in the code."""
    process = incident.process
    if process is None:
        return (incident.what, *incident.lines)[:_SHOWN]
    # The help of an rlinf error is shown as the remedy.
    text = process.text.partition("\n  help: ")[0] if process.help else process.text
    position = [f"at {process.position}"] if process.position else []
    return [*text.strip().splitlines()[:_SHOWN], *position][:_SHOWN]


def incident_lines(incident: Incident) -> Sequence[str]:
    """Return the lines of the incident itself."""
    return incident.lines


def standstill_lines(incident: Incident) -> Sequence[str]:
    """Return the duration of a standstill, and the other waits."""
    return incident.what, *incident.lines[1:]


def vanished_lines(incident: Incident) -> Sequence[str]:
    """Return the evidence that the driver is gone."""
    return "run.json: the status is still `running`, and the process that it names is gone", *incident.lines


def death_lines(incident: Incident, *lines: str) -> Sequence[str]:
    """Return lines on the death of a process, as far as known."""
    process = incident.process
    if process is None:
        return *incident.lines, *lines
    ends = [f"signal: {process.signal}"] if process.signal else []
    return _with_log(incident, *(process.why.splitlines()[:_SHOWN_OF_DEATH] or ends), *lines)


def kill_lines(incident: Incident) -> Sequence[str]:
    """Return lines on the death of a process by an external signal."""
    return death_lines(
        incident,
        "the kernel log, as far as it can be read there, has no line about a lack of memory for this process",
        *_memory(incident),
    )


def unknown_death_lines(incident: Incident) -> Sequence[str]:
    """Return lines on a death whose exit state the kernel did not keep."""
    unknown = "how it ended is not known: the kernel of its machine does not keep exit states of processes (Linux 6.15)"
    return death_lines(incident, unknown)


def memory_kill_lines(incident: Incident) -> Sequence[str]:
    """Return lines on a kill for lack of memory, with the kernel's message."""
    kernel = incident.process.out_of_memory if incident.process is not None else None
    return _with_log(incident, f"kernel: {kernel}", *_memory(incident))


def last_lines(incident: Incident) -> Sequence[str]:
    """Return the last output of a process that died."""
    last = incident.process.why.partition("; its last words:")[2] if incident.process is not None else ""
    return _with_log(incident, *last.strip("\n").splitlines()[:_SHOWN_OF_DEATH])


def node_lines(incident: Incident) -> Sequence[str]:
    """Return lines on lost nodes."""
    lines = (line.strip() for line in incident.text.splitlines() if "node" in line or "sign of life" in line)
    return _with_log(incident, *incident.nodes, *lines)


def _memory(incident: Incident) -> Sequence[str]:
    return [] if incident.bundle is None else [f"memory then: evidence/{incident.bundle.path.name}/memory.json"]


def _with_log(incident: Incident, *lines: str) -> Sequence[str]:
    process = incident.process
    if process is None or process.component is None or process.rank is None:
        return lines
    return *lines, f"its log: logs/{process.component}/rank_{process.rank}.log"


def _signal_of(incident: Incident) -> str | None:
    """Return the signal that ended a process, from its record or from the description of its death."""
    process = incident.process
    if process is None or not process.died:
        return None
    match = _KILLED.match(process.why)
    return process.signal or (match[1] if match is not None else None)


# The functions that return the evidence of a failure, by the names that rows use.
EVIDENCE: Final[Mapping[str, Callable[[Incident], Iterable[str]]]] = {
    function.__name__: function
    for function in (
        *(error_lines, incident_lines, standstill_lines, vanished_lines, death_lines, kill_lines),
        *(unknown_death_lines, memory_kill_lines, last_lines, node_lines),
    )
}

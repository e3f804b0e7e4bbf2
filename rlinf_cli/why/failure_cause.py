"""A row of the table of failures: how it is recognized, its texts, and the lines that show it.

An error of rlinf's own carries its code (`RLinfError.code`), and so does its evidence. Errors of other libraries, and
the evidence of an rlinf that kept no codes, are recognized by their types and words.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_cli.why.incidents import REACHED, Incident
from rlinf_core.runners.storage.evidence import FailedProcess

# The first words of a death, as `ProcessEnd` spells them.
_KILLED: Final = re.compile(r"it was killed by (SIG[A-Z]+)\b")
_FIRST: Final = re.compile(r"the first: ([^\n]+)")
NO_SAMPLES: Final = "has no samples to learn from"
_SHOWN: Final = 12
_SHOWN_OF_DEATH: Final = 8
# The codes of errors that carry none, by their types.
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

Test: TypeAlias = Callable[[Incident], object]
Evidence: TypeAlias = Callable[[Incident], Iterable[str]]


@dataclass(frozen=True, slots=True)
class FailureCause:
    """A row of the table: how a failure is recognized, and what is said of it.

    Texts have fields in braces, see `_fields`, and the named groups of `words`.

    Attributes:
        code: its stable name, and that of errors that carry it.
        what: the cause in one sentence.
        do: the remedy; a line for each sentence or command.
        words: an expression for it among the words of an incident.
        when: what must hold; beside the words, if it has any.
        shown: the lines that show it; by default those of the error.
        own_help: whether a remedy that the error brings along replaces `do`.
    """

    code: str
    what: str
    do: str
    words: str = ""
    when: Test | None = None
    shown: Evidence | None = None
    kind: FindingKind = FindingKind.FAILURE
    own_help: bool = False

    def finding(self, incident: Incident) -> RunFinding | None:
        """Return what is said of an incident; None if it is another failure."""
        match = re.search(self.words, incident.text) if self.words else None
        known = match is not None or self.code in incident.codes(_TYPES) or not (self.words or self.when is None)
        if not known or (self.when is not None and not self.when(incident)):
            return None
        fields = defaultdict[str, object](str, _fields(incident), **(match.groupdict("") if match else {}))
        help = incident.process.help if self.own_help and incident.process is not None else ""
        evidence = (self.shown or _quoted)(incident)
        return RunFinding(
            self.kind,
            self.code,
            self.what.format_map(fields),
            (*(line for line in evidence if line.strip()), f"file: {incident.source}"),
            tuple((help or self.do.format_map(fields)).splitlines()),
            step=incident.step,
            time=incident.time,
            followed=incident.others,
        )


def _fields(incident: Incident) -> Mapping[str, object]:
    """Return what texts of the table may name.

    `name` is the process that failed with its method, `named` also with its place; `line` is the first line of its
    error, `fault` the part of that before the list of environments.
    """
    process = incident.process or FailedProcess(name="")
    line = (process.text if incident.process is not None else incident.what).strip().partition("\n")[0]
    first = _FIRST.search(incident.text)
    called = f" in `{process.method}`" if process.method else ""
    named = f"`{process.name}`{called}" + (f" on {process.place}" if process.place else "")
    named = named if process.name else "a worker"
    saved = incident.has_checkpoint
    again = "start the run again" + (" with `runner.resume_dir=auto`" if saved else "")
    return {
        "what": incident.what,
        "line": line,
        "fault": line.partition(" (environment")[0],
        "name": (f"`{process.name}`{called}" if called else process.name) or "the run",
        "named": named,
        "died": incident.what if incident.process is None else f"{named} died",
        "of": "for the answers of a whole step"
        if NO_SAMPLES in incident.text
        else "for more answers than `runner.max_failed_fraction` allows",
        "process": process.name,
        "last": process.why.partition("; its last words:")[0].partition("\n")[0],
        "signal": signal_of(incident),
        "exit_code": process.exit_code,
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


def _quoted(incident: Incident) -> Sequence[str]:
    """Return the words of an error and its place in the code."""
    process = incident.process
    if process is None:
        return (incident.what, *incident.lines)[:_SHOWN]
    # The remedy in an error of rlinf's own is shown as such.
    text = process.text.partition("\n  help: ")[0] if process.help else process.text
    position = [f"at {process.position}"] if process.position else []
    return [*text.strip().splitlines()[:_SHOWN], *position][:_SHOWN]


def incident_lines(incident: Incident) -> Sequence[str]:
    """Return the lines of the incident itself."""
    return incident.lines


def vanished_lines(incident: Incident) -> Sequence[str]:
    """Return how it shows that the driver is gone."""
    return "run.json: the status is still `running`, and the process that it names is gone", *incident.lines


def death_lines(incident: Incident, *lines: str) -> Sequence[str]:
    """Return how a process died, as far as known."""
    process = incident.process
    if process is None:
        return *incident.lines, *lines
    ends = [f"signal: {process.signal}"] if process.signal else []
    return _with_log(incident, *(process.why.splitlines()[:_SHOWN_OF_DEATH] or ends), *lines)


def kill_lines(incident: Incident) -> Sequence[str]:
    """Return how a process died of a signal from outside."""
    return death_lines(
        incident,
        "the kernel log, as far as it can be read there, has no line about a lack of memory for this process",
        *_memory(incident),
    )


def unknown_death_lines(incident: Incident) -> Sequence[str]:
    """Return what is known of a death whose end no kernel kept."""
    unknown = "how it ended is not known: the kernel of its machine does not keep exit states of processes (Linux 6.15)"
    return death_lines(incident, unknown)


def memory_kill_lines(incident: Incident) -> Sequence[str]:
    """Return the kernel's words about a kill for lack of memory."""
    kernel = incident.process.out_of_memory if incident.process is not None else None
    return _with_log(incident, f"kernel: {kernel}", *_memory(incident))


def last_lines(incident: Incident) -> Sequence[str]:
    """Return the last words of a process that died."""
    last = incident.process.why.partition("; its last words:")[2] if incident.process is not None else ""
    return _with_log(incident, *last.strip("\n").splitlines()[:_SHOWN_OF_DEATH])


def node_lines(incident: Incident) -> Sequence[str]:
    """Return what was said of nodes that are lost."""
    lines = (line.strip() for line in incident.text.splitlines() if "node" in line or "sign of life" in line)
    return _with_log(incident, *incident.nodes, *lines)


def _memory(incident: Incident) -> Sequence[str]:
    return [] if incident.bundle is None else [f"memory then: evidence/{incident.bundle.path.name}/memory.json"]


def _with_log(incident: Incident, *lines: str) -> Sequence[str]:
    process = incident.process
    if process is None or process.component is None or process.rank is None:
        return lines
    return *lines, f"its log: logs/{process.component}/rank_{process.rank}.log"


def signal_of(incident: Incident) -> str | None:
    """Return the signal that ended a process, also where only the words of its death name it."""
    process = incident.process
    if process is None or not process.died:
        return None
    match = _KILLED.match(process.why)
    return process.signal or (match[1] if match is not None else None)


def driver_gone(*words: str) -> Test:
    """Return a test for a driver that vanished, where its machine says so in one of these words."""
    return lambda incident: (
        "its process vanished" in incident.what
        and (not words or any(word in line for line in incident.lines for word in words))
    )


def answers_failed(incident: Incident) -> bool:
    """Return whether the answers of a step could not be scored, or made."""
    words = r"could (not )?be scored|answers of(?s:.*)max_failed_fraction"
    return "reward-fails" in incident.codes() or re.search(words, incident.text) is not None

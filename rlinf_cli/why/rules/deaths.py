"""Processes that ended: by a signal, for memory, by themselves, with their machine. Only what was observed is said."""

from __future__ import annotations

import re
from typing import Final

from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_cli.why.incidents import Incident
from rlinf_core.runners.step_clock import GIVEN_UP
from rlinf_core.runners.storage.evidence import FailedProcess

_CRASHES: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"})
_ENGINE: Final = ("gcs_server", "raylet", "manager")
_SHOWN: Final = 8
# The first words of a death, as `ProcessEnd` spells them.
_KILLED: Final = re.compile(r"it was killed by (SIG[A-Z]+)\b")


def out_of_memory(incident: Incident) -> RunFinding | None:
    """Name a kill for memory, which the kernel reported of this very process or of its control group."""
    process = incident.process
    if process is None or not process.out_of_memory:
        return None
    return _finding(
        incident,
        "out-of-memory",
        f"{_named(process)} was killed by the kernel for lack of memory",
        [f"kernel: {process.out_of_memory}", *_memory(incident)],
        "give it less to hold (fewer environments, smaller batches) or its machine or container more memory;"
        " `rlinf inspect memory` shows what each process held at most",
    )


def crashed(incident: Incident) -> RunFinding | None:
    """Name a crash in native code, by the signal that it raises."""
    process = incident.process
    if process is None or not process.died or _signal(process) not in _CRASHES:
        return None
    return _finding(
        incident,
        "crashed",
        f"{_named(process)} crashed in native code: {_signal(process)}",
        _cause(process),
        "look at the innermost call of the stack: the crash is in that library, or in its arguments",
    )


def killed(incident: Incident) -> RunFinding | None:
    """Name the signal that ended a process."""
    process = incident.process
    signal = None if process is None or not process.died else _signal(process)
    if process is None or signal is None:
        return None
    return _finding(
        incident,
        "killed-by-signal",
        f"{_named(process)} was killed by {signal}",
        [
            *_cause(process),
            "the kernel log has no line about a lack of memory for this process",
            *_memory(incident),
        ],
        f"{signal} came from outside the run: check the scheduler's logs and memory watchdogs of that machine",
    )


def hung(incident: Incident) -> RunFinding | None:
    """Name a worker that was ended because it held up the run."""
    process = incident.process
    cause = "" if process is None or not process.died else process.why
    if process is None or GIVEN_UP not in cause:
        return None
    return _finding(
        incident,
        "hung",
        f"{_named(process)} held up the run, and was ended",
        [cause],
        "look at the frame that it names: what it waits for there did not come; `stacks.txt` in the evidence has the"
        " stacks of the others",
    )


def exited(incident: Incident) -> RunFinding | None:
    """Name a process that ended itself with an exit code."""
    process = incident.process
    if process is None or not process.died or process.exit_code is None:
        return None
    return _finding(
        incident,
        "exited",
        f"{_named(process)} ended itself with exit code {process.exit_code}",
        _cause(process),
        "look in its code and libraries for `sys.exit`, `os._exit` or `exit`: a worker raises an exception instead",
    )


def of_ray(incident: Incident) -> RunFinding | None:
    """Name the death of a process that the run is watched by."""
    process = incident.process
    name = next((name for name in _ENGINE if process is not None and process.name == name), None)
    if process is None or name is None:
        return None
    again = "start the run again" + (" with `runner.resume_dir=auto`" if incident.has_checkpoint else "")
    do = again if incident.ended else "nothing: the run was started again"
    return _finding(
        incident,
        "watcher-died",
        f"`{name}`, which the workers of the run depend on, died",
        _cause(process),
        f"{do}; `ray/` in the evidence has the end of its log",
    )


def node_lost(incident: Incident) -> RunFinding | None:
    """Name a machine that does not answer."""
    text = incident.text
    gone = "its node left the cluster" in text or "no sign of life" in text
    # Ray may name the node only after the run was notified of a death of a process there.
    if not gone and not incident.nodes:
        return None
    return _finding(
        incident,
        "node-lost",
        f"the machine of {_named(incident.process)} cannot be reached any more",
        [*incident.nodes, *(line.strip() for line in text.splitlines() if "node" in line or "sign of life" in line)],
        "`rlinf status` and `rlinf doctor` show which machines answer; check that it is up and that its network works",
        "`rlinf up FILE` starts its Ray again",
    )


def simulator_died(incident: Incident) -> RunFinding | None:
    """Name the death of a simulator process, which its worker reports with the environment that it was at."""
    if not incident.is_a("SimulatorDiedError") or incident.process is None:
        return None
    words, _, last = incident.process.why.partition("; its last words:")
    return _finding(
        incident,
        "simulator-died",
        f"a process of `{incident.process.name}` died: {words.partition(chr(10))[0]}",
        last.strip("\n").splitlines()[:_SHOWN],
        "look at the end of its log, where a simulator says why it crashed; after three crashes the episode is"
        " quarantined",
    )


def died(incident: Incident) -> RunFinding | None:
    """Tell a death of which nothing else is known."""
    process = incident.process
    if not (process.died if process is not None else "died" in incident.what):
        return None
    unknown = "how it ended is not known: the kernel of its machine does not keep exit states of processes (Linux 6.15)"
    cause = _cause(process) if process is not None else [*incident.lines]
    return _finding(
        incident,
        "died",
        f"{_named(process)} died" if process is not None else incident.what,
        [*cause, unknown],
        "look at the end of its log, and at the kernel's log of its machine (`dmesg`) at that time",
    )


RULES: Final = (out_of_memory, of_ray, simulator_died, hung, crashed, killed, exited, node_lost, died)


def _finding(incident: Incident, code: str, what: str, evidence: list[str], *do: str) -> RunFinding:
    shown = [line for line in evidence if line.strip()]
    process = incident.process
    if process is not None and process.component is not None and process.rank is not None:
        shown.append(f"its log: logs/{process.component}/rank_{process.rank}.log")
    return RunFinding(
        FindingKind.FAILURE,
        code,
        what,
        (*shown, f"file: {incident.source}"),
        do,
        step=incident.step,
        time=incident.time,
        followed=incident.others,
    )


def _named(process: FailedProcess | None) -> str:
    if process is None:
        return "a worker"
    called = f" in `{process.method}`" if process.method else ""
    place = f" on {process.place}" if process.place else ""
    return f"`{process.name}`{called}{place}"


def _cause(process: FailedProcess) -> list[str]:
    ends = [f"signal: {process.signal}"] if process.signal else []
    return process.why.splitlines()[:_SHOWN] or ends


def _signal(process: FailedProcess) -> str | None:
    """Return the signal that ended a process, also where only the words of its death name it."""
    match = _KILLED.match(process.why)
    return process.signal or (match[1] if match is not None else None)


def _memory(incident: Incident) -> list[str]:
    bundle = incident.bundle
    return [] if bundle is None else [f"memory then: evidence/{bundle.path.name}/memory.json"]

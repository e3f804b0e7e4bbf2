"""The table of failures: interruptions, standstills, deaths and errors. Only what was observed is said.

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
from rlinf_cli.why.incidents import REACHED, STALLED, Incident
from rlinf_core.runners.step_clock import GIVEN_UP
from rlinf_core.runners.storage.evidence import FailedProcess
from rlinf_core.runners.storage.run_events import INTERRUPTED

_CRASHES: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"})
# Processes that all workers depend on.
_WATCHERS: Final = ("gcs_server", "raylet", "manager")
# The first words of a death, as `ProcessEnd` spells them.
_KILLED: Final = re.compile(r"it was killed by (SIG[A-Z]+)\b")
_FIRST: Final = re.compile(r"the first: ([^\n]+)")
_NOTHING: Final = "has no samples to learn from"
_THAT_LINE: Final = "look at that line: the same input raises it again, so the run was not started again"
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


def named_failure(incident: Incident) -> RunFinding:
    """Return the cause of an incident: that of the first row which knows it; the last row knows everything."""
    return next(finding for row in FAILURES if (finding := row.finding(incident)) is not None)


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
        if _NOTHING in incident.text
        else "for more answers than `runner.max_failed_fraction` allows",
        "process": process.name,
        "last": process.why.partition("; its last words:")[0].partition("\n")[0],
        "signal": _signal(incident),
        "exit_code": process.exit_code,
        "type": process.type.removeprefix("builtins."),
        "at": f" at {process.position}" if process.position else "",
        "first": f": {first[1]}" if first is not None else "",
        "limit": next((text for text in incident.lines if REACHED in text), ""),
        "holder": next(iter(incident.lines), ""),
        "help": process.help or "the log of the worker has its traceback",
        "go_on": "`runner.resume_dir=auto` goes on from the last checkpoint"
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


def _lines(incident: Incident) -> Sequence[str]:
    return incident.lines


def _vanished(incident: Incident) -> Sequence[str]:
    return "run.json: the status is still `running`, and the process that it names is gone", *incident.lines


def _death(incident: Incident, *lines: str) -> Sequence[str]:
    """Return how a process died, as far as known."""
    process = incident.process
    if process is None:
        return *incident.lines, *lines
    ends = [f"signal: {process.signal}"] if process.signal else []
    return _with_log(incident, *(process.why.splitlines()[:_SHOWN_OF_DEATH] or ends), *lines)


def _kill(incident: Incident) -> Sequence[str]:
    return _death(incident, "the kernel log has no line about a lack of memory for this process", *_memory(incident))


def _unknown_death(incident: Incident) -> Sequence[str]:
    unknown = "how it ended is not known: the kernel of its machine does not keep exit states of processes (Linux 6.15)"
    return _death(incident, unknown)


def _out_of_memory(incident: Incident) -> Sequence[str]:
    kernel = incident.process.out_of_memory if incident.process is not None else None
    return _with_log(incident, f"kernel: {kernel}", *_memory(incident))


def _last_words(incident: Incident) -> Sequence[str]:
    last = incident.process.why.partition("; its last words:")[2] if incident.process is not None else ""
    return _with_log(incident, *last.strip("\n").splitlines()[:_SHOWN_OF_DEATH])


def _of_nodes(incident: Incident) -> Sequence[str]:
    lines = (line.strip() for line in incident.text.splitlines() if "node" in line or "sign of life" in line)
    return _with_log(incident, *incident.nodes, *lines)


def _memory(incident: Incident) -> Sequence[str]:
    return [] if incident.bundle is None else [f"memory then: evidence/{incident.bundle.path.name}/memory.json"]


def _with_log(incident: Incident, *lines: str) -> Sequence[str]:
    process = incident.process
    if process is None or process.component is None or process.rank is None:
        return lines
    return *lines, f"its log: logs/{process.component}/rank_{process.rank}.log"


def _signal(incident: Incident) -> str | None:
    """Return the signal that ended a process, also where only the words of its death name it."""
    process = incident.process
    if process is None or not process.died:
        return None
    match = _KILLED.match(process.why)
    return process.signal or (match[1] if match is not None else None)


def _is_gone(*words: str) -> Test:
    """Return whether the driver vanished, and its machine says so in these words."""
    return lambda incident: (
        "its process vanished" in incident.what
        and (not words or any(word in line for line in incident.lines for word in words))
    )


def _answers_failed(incident: Incident) -> bool:
    """Return whether the answers of a step could not be scored, or made."""
    words = r"could (not )?be scored|answers of(?s:.*)max_failed_fraction"
    return "reward-fails" in incident.codes() or re.search(words, incident.text) is not None


def _interruption(code: str, what: str, when: Test, do: str = "{go_on}") -> FailureCause:
    return FailureCause(code, what, do, when=when, shown=_lines, kind=FindingKind.INTERRUPTION)


# The first row that knows a failure names it.
FAILURES: Final = (
    _interruption(
        "time-limit",
        "the scheduler ended the run at its time limit: {limit}",
        do="ask for more time, or submit the same job again: {go_on}",
        when=lambda it: it.kind == INTERRUPTED and any(REACHED in line for line in it.lines),
    ),
    _interruption(
        "interrupted",
        "somebody pressed Ctrl-C, or sent SIGINT to the driver",
        when=lambda it: it.kind == INTERRUPTED and it.what == "interrupted",
    ),
    _interruption(
        "stopped",
        "somebody ended it: {what}",
        when=lambda it: it.kind == INTERRUPTED and "--force" in it.what,
    ),
    _interruption(
        "terminated",
        "the driver was asked to end by SIGTERM: `rlinf stop`, a scheduler, or a shutdown",
        when=lambda it: it.kind == INTERRUPTED and it.what == "terminated",
    ),
    _interruption("terminated", "the driver was asked to end: {what}", when=lambda it: it.kind == INTERRUPTED),
    FailureCause(
        "stalled",
        "{holder}",
        "`rlinf ps --stacks` shows the whole stacks of all processes; one that cannot go on is ended by `kill -9`,"
        " and the run starts it again",
        when=lambda it: it.kind == STALLED,
        shown=lambda it: (it.what, *it.lines[1:]),
        kind=FindingKind.STANDSTILL,
    ),
    FailureCause(
        "out-of-memory",
        "the kernel killed the driver of the run for lack of memory",
        "give its machine or container more memory, or place less on it; {go_on}",
        when=_is_gone("memory"),
        shown=_vanished,
    ),
    FailureCause(
        "machine-restarted",
        "the machine of the driver went down or was restarted during the run",
        "look why (`last -x`, `journalctl -b -1 -k`); {go_on}",
        when=_is_gone("was restarted since"),
        shown=_vanished,
    ),
    FailureCause(
        "driver-vanished",
        "the driver of the run was killed (SIGKILL, or a crash): it wrote no last word",
        "look at the kernel's log of its machine (`dmesg`, `journalctl -k`) for a kill at that time; {go_on}",
        when=_is_gone(),
        shown=_vanished,
    ),
    FailureCause(
        "out-of-memory",
        "{named} was killed by the kernel for lack of memory",
        "give it less to hold (fewer environments, smaller batches) or its machine or container more memory;"
        " `rlinf inspect memory` shows what each process held at most",
        when=lambda it: it.process and it.process.out_of_memory,
        shown=_out_of_memory,
    ),
    FailureCause(
        "watcher-died",
        "`{process}`, which the workers of the run depend on, died",
        "{again}; `ray/` in the evidence has the end of its log",
        when=lambda it: it.process and it.process.name in _WATCHERS,
        shown=_death,
    ),
    FailureCause(
        "simulator-died",
        "a process of `{process}` died: {last}",
        "look at the end of its log, where a simulator says why it crashed; after three crashes the episode is"
        " quarantined",
        shown=_last_words,
    ),
    FailureCause(
        "hung",
        "{named} held up the run, and was ended",
        "look at the frame that it names: what it waits for there did not come; `stacks.txt` in the evidence has the"
        " stacks of the others",
        when=lambda it: it.process and it.process.died and GIVEN_UP in it.process.why,
        shown=_death,
    ),
    FailureCause(
        "crashed",
        "{named} crashed in native code: {signal}",
        "look at the innermost call of the stack: the crash is in that library, or in its arguments",
        when=lambda it: _signal(it) in _CRASHES,
        shown=_death,
    ),
    FailureCause(
        "killed-by-signal",
        "{named} was killed by {signal}",
        "{signal} came from outside the run: check the scheduler's logs and memory watchdogs of that machine",
        when=_signal,
        shown=_kill,
    ),
    FailureCause(
        "exited",
        "{named} ended itself with exit code {exit_code}",
        "look in its code and libraries for `sys.exit`, `os._exit` or `exit`: a worker raises an exception instead",
        when=lambda it: it.process and it.process.died and it.process.exit_code is not None,
        shown=_death,
    ),
    FailureCause(
        "node-lost",
        "the machine of {named} cannot be reached any more",
        "`rlinf status` and `rlinf doctor` show which machines answer; check that it is up and that its network works\n"
        "`rlinf up FILE` starts its Ray again",
        # Ray may name the node only after the run was notified of a death of a process there.
        when=lambda it: it.nodes or re.search("its node left the cluster|no sign of life", it.text),
        shown=_of_nodes,
    ),
    FailureCause(
        "died",
        "{died}",
        "look at the end of its log, and at the kernel's log of its machine (`dmesg`) at that time",
        when=lambda it: it.process.died if it.process is not None else "died" in it.what,
        shown=_unknown_death,
    ),
    FailureCause(
        "disk-full",
        "there is no room on /dev/shm, which processes share memory by",
        "give the container more of it (`--shm-size`), or hold less in flight",
        words="No space left on device|Disk quota exceeded",
        when=lambda it: "/dev/shm" in it.text,
    ),
    FailureCause(
        "disk-full",
        "there is no room on the disk",
        "free some space, keep fewer checkpoints (`runner.keep_checkpoints`), or write elsewhere"
        " (`runner.logger.log_path`, `actor.checkpoint_save_path`)",
        words="No space left on device|Disk quota exceeded",
    ),
    FailureCause(
        "accelerator-memory",
        "the memory of the accelerator of {name} was used up",
        "use smaller micro batches (`actor.micro_batch_size`), shard or offload the actor, or give the engine less;"
        " `rlinf inspect memory FILE` forecasts what each needs",
        words="CUDA out of memory",
    ),
    FailureCause(
        "host-memory",
        "{name} asked for more memory than there is",
        "make what it was about to allocate smaller, or give its machine or container more memory",
        words="Cannot allocate memory|raised MemoryError",
    ),
    FailureCause(
        "weights-not-arrived",
        "the actor's weights of version {version} did not arrive in the engine: their fingerprints differ",
        "let actor and rollout have the same model, precision and adapter; an engine that reports an adapter as loaded"
        " and answers without it needs another version",
        words=r"the engine's weights of version (?P<version>\d+) differ",
    ),
    FailureCause(
        "tool-fails",
        "the tool `{tool}` fails: {reason}",
        "call it by hand; one that takes long needs a longer `agent.tool_timeout`",
        words=r"the tool `(?P<tool>[^`]+)`: (?P<reason>[^\n]+)",
        when=_answers_failed,
    ),
    FailureCause(
        "reward-fails",
        "the reward fails {of}{first}",
        "score one answer by hand with the same function; `rlinf report --samples` shows answers with the reasons",
        when=_answers_failed,
    ),
    FailureCause(
        "groups-equal",
        "all answers to a prompt have the same reward, for every prompt of a step",
        "use other problems, a larger `algorithm.group_size` or a higher temperature, or `filter_groups: false`",
        words=f"{_NOTHING}(?s:.*)equal rewards",
    ),
    FailureCause(
        "prompts-skipped",
        "no prompt of a step could be used",
        "raise `data.max_prompt_length`, or use shorter prompts",
        words=_NOTHING,
    ),
    FailureCause(
        "simulator-raises",
        "{name}: {fault}",
        "look at that line of its code: the same episode raises there again\n{help}",
    ),
    FailureCause(
        "simulators-fail",
        "simulators raise in more episodes than `runner.max_failed_fraction` allows",
        "the log of the env worker has environments, action and traceback: look at the line that raised",
        words="the simulators of(?s:.*)max_failed_fraction",
    ),
    FailureCause(
        "not-finite",
        "{name} met a number that is NaN or infinite: {line}",
        "lower `actor.optim.lr`, or bound gradients by `actor.optim.clip_grad`",
        own_help=True,
    ),
    FailureCause(
        "untrained",
        "{name} trains tensors that the loss does not reach: {line}",
        "use in the loss what the model returns, or freeze the tensor",
        own_help=True,
    ),
    FailureCause(
        "deadlock",
        "Deadlock: {line}",
        "let one of them send before it receives; `waits.json` and `stacks.txt` in the evidence show where each waits",
    ),
    FailureCause(
        "timed-out",
        "{name} waited too long: {line}",
        "`stacks.txt` in the evidence shows what its peer was doing; a slow one needs a longer `timeout`",
        own_help=True,
    ),
    FailureCause("checkpoint", "{line}", "`runner.resume_dir=auto` takes the newest one that is whole", own_help=True),
    FailureCause(
        "cluster",
        "the cluster refused: {line}",
        "`rlinf doctor FILE` looks for what is wrong on all machines",
        own_help=True,
    ),
    FailureCause("refused", "{name} failed: {line}", _THAT_LINE, own_help=True),
    FailureCause("exception", "{name} raised {type}{at}", _THAT_LINE, when=lambda it: it.process is not None),
    FailureCause("failed", "{what}", "`rlinf logs` has the lines of every process", when=lambda it: True, shown=_lines),
)

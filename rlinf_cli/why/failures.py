"""The table of failures: interruptions, standstills, deaths and errors. Only what was observed is said."""

from __future__ import annotations

import re
from typing import Final

from rlinf_cli.why.failure_cause import (
    NO_SAMPLES,
    FailureCause,
    Test,
    answers_failed,
    death_lines,
    driver_gone,
    incident_lines,
    kill_lines,
    last_lines,
    memory_kill_lines,
    node_lines,
    signal_of,
    unknown_death_lines,
    vanished_lines,
)
from rlinf_cli.why.finding import FindingKind, RunFinding
from rlinf_cli.why.incidents import REACHED, STALLED, Incident
from rlinf_core.runners.step_clock import GIVEN_UP
from rlinf_core.runners.storage.run_events import INTERRUPTED

_CRASHES: Final = frozenset({"SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE"})
# Processes that all workers depend on.
_WATCHERS: Final = ("gcs_server", "raylet", "manager")
_THAT_LINE: Final = "look at that line: the same input raises it again, so the run was not started again"


def named_failure(incident: Incident) -> RunFinding:
    """Return the cause of an incident: that of the first row which knows it; the last row knows everything."""
    return next(finding for row in FAILURES if (finding := row.finding(incident)) is not None)


def _interruption(code: str, what: str, when: Test, do: str = "{go_on}") -> FailureCause:
    return FailureCause(code, what, do, when=when, shown=incident_lines, kind=FindingKind.INTERRUPTION)


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
        when=driver_gone("memory"),
        shown=vanished_lines,
    ),
    FailureCause(
        "machine-restarted",
        "the machine of the driver went down or was restarted during the run",
        "look why (`last -x`, `journalctl -b -1 -k`); {go_on}",
        when=driver_gone("was restarted since"),
        shown=vanished_lines,
    ),
    FailureCause(
        "driver-vanished",
        "the driver of the run was killed (SIGKILL, or a crash): it wrote no last word",
        "look at the kernel's log of its machine (`dmesg`, `journalctl -k`) for a kill at that time; {go_on}",
        when=driver_gone(),
        shown=vanished_lines,
    ),
    FailureCause(
        "out-of-memory",
        "{named} was killed by the kernel for lack of memory",
        "give it less to hold (fewer environments, smaller batches) or its machine or container more memory;"
        " `rlinf inspect memory` shows what each process held at most",
        when=lambda it: it.process and it.process.out_of_memory,
        shown=memory_kill_lines,
    ),
    FailureCause(
        "watcher-died",
        "`{process}`, which the workers of the run depend on, died",
        "{again}; `ray/` in the evidence has the end of its log",
        when=lambda it: it.process and it.process.name in _WATCHERS,
        shown=death_lines,
    ),
    FailureCause(
        "simulator-died",
        "a process of `{process}` died: {last}",
        "look at the end of its log, where a simulator says why it crashed; after three crashes the episode is"
        " quarantined",
        shown=last_lines,
    ),
    FailureCause(
        "hung",
        "{named} held up the run, and was ended",
        "look at the frame that it names: what it waits for there did not come; `stacks.txt` in the evidence has the"
        " stacks of the others",
        when=lambda it: it.process and it.process.died and GIVEN_UP in it.process.why,
        shown=death_lines,
    ),
    FailureCause(
        "crashed",
        "{named} crashed in native code: {signal}",
        "look at the innermost call of the stack: the crash is in that library, or in its arguments",
        when=lambda it: signal_of(it) in _CRASHES,
        shown=death_lines,
    ),
    FailureCause(
        "killed-by-signal",
        "{named} was killed by {signal}",
        "{signal} came from outside the run: check the scheduler's logs and memory watchdogs of that machine",
        when=signal_of,
        shown=kill_lines,
    ),
    FailureCause(
        "exited",
        "{named} ended itself with exit code {exit_code}",
        "look in its code and libraries for `sys.exit`, `os._exit` or `exit`: a worker raises an exception instead",
        when=lambda it: it.process and it.process.died and it.process.exit_code is not None,
        shown=death_lines,
    ),
    FailureCause(
        "node-lost",
        "the machine of {named} cannot be reached any more",
        "`rlinf status` and `rlinf doctor` show which machines answer; check that it is up and that its network works\n"
        "`rlinf up FILE` starts its Ray again",
        # Ray may name the node only after the run was notified of a death of a process there.
        when=lambda it: it.nodes or re.search("its node left the cluster|no sign of life", it.text),
        shown=node_lines,
    ),
    FailureCause(
        "died",
        "{died}",
        "look at the end of its log, and at the kernel's log of its machine (`dmesg`) at that time",
        when=lambda it: it.process.died if it.process is not None else "died" in it.what,
        shown=unknown_death_lines,
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
        when=answers_failed,
    ),
    FailureCause(
        "reward-fails",
        "the reward fails {of}{first}",
        "score one answer by hand with the same function; `rlinf report --samples` shows answers with the reasons",
        when=answers_failed,
    ),
    FailureCause(
        "groups-equal",
        "all answers to a prompt have the same reward, for every prompt of a step",
        "use other problems, a larger `algorithm.group_size` or a higher temperature, or `filter_groups: false`",
        words=f"{NO_SAMPLES}(?s:.*)equal rewards",
    ),
    FailureCause(
        "prompts-skipped",
        "no prompt of a step could be used",
        "raise `data.max_prompt_length`, or use shorter prompts",
        words=NO_SAMPLES,
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
    FailureCause(
        "failed", "{what}", "`rlinf logs` has the lines of every process", when=lambda it: True, shown=incident_lines
    ),
)

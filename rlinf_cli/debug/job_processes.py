"""The answer of `rlinf ps`: what the processes of a job do, their stacks, and a terminal at a breakpoint."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from rlinf_cli.cluster.jobs import Inspector, find_job, job_of
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.debug.attaching import attach as attach_to
from rlinf_cli.debug.attaching import chosen_processes, components_of
from rlinf_cli.debug.stack_report import stacks_record, stacks_text
from rlinf_cli.debug.worker_table import workers_record, workers_text
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.runs.run_lookup import active_run, all_runs, run_at, run_of_words
from rlinf_core.cluster.driver_folder import JobRecord
from rlinf_core.errors import ConfigError
from rlinf_core.node.stacks.process_stacks import install_spy, py_spy
from rlinf_core.supervision.job_view import JobSnapshot, answers_of_both, job_processes, waits_at_breakpoint


def processes_of(words: Sequence[str], job: str | None, *, stacks: bool, attach: bool, native: bool) -> Result | None:
    """Return what processes do, or their stacks; None after a terminal was attached to one.

    Args:
        words: a run, and processes of it.
        job: the name of a job without a run folder.
        stacks: whether their stacks are wanted.
        attach: whether a process that waits at a breakpoint is to be debugged; others show their stacks.
        native: whether frames of native code are shown, too.

    Raises:
        RLinfError: there is no such run, job or process.
    """
    if native and py_spy() is None:
        raise ConfigError("`--native` needs py-spy, which is not installed", help=install_spy())
    record, words, groups = _meant(words, job)
    with Inspector(record) as inspector:
        snapshot = inspector.snapshot(stacks=stacks or attach)
        names = chosen_processes(_names(snapshot), words, groups, f"job {record.job}")
        if not (stacks or attach):
            return Result(lambda: workers_text(snapshot, names), lambda: workers_record(snapshot, names))
        if any(name in snapshot.peers and name not in snapshot.answers for name in names):
            # On a busy machine one may answer late; only those that answer nothing are read from outside.
            snapshot = answers_of_both(snapshot, inspector.snapshot(stacks=True))
        place = waits_at_breakpoint(snapshot, names[0]) if len(names) == 1 else None
        if attach and words and place is not None and not (stacks or console.verbosity.json):
            attach_to(names[0], place, snapshot.peers[names[0]], f"rlinf {' '.join(sys.argv[1:])}")
            return None
        shown = job_processes(snapshot, names, native=native, remotely=inspector.read_stacks)
    complete = all(process.complete for process in shown)
    return Result(
        lambda: stacks_text(shown),
        lambda: stacks_record(snapshot.job, shown),
        ExitCode.OK if complete else ExitCode.FAILED,
    )


def _meant(words: Sequence[str], job: str | None) -> tuple[JobRecord, list[str], Mapping[str, str]]:
    """Return a job, the words that name processes of it, and its groups by component."""
    of_run = job is None and (active_run() is not None or any(run_at(word) is not None for word in words))
    if not of_run and (job is not None or not words or not all_runs()):
        # A program without a run folder.
        return find_job(job), list(words), {}
    folder, rest = run_of_words(
        words, lambda run: [name for pair in components_of(run.config_file).items() for name in pair]
    )
    return job_of(folder), rest, components_of(folder.config_file)


def _names(snapshot: JobSnapshot) -> list[str]:
    return [*(name for name in snapshot.peers if name not in snapshot.workers), *snapshot.workers]

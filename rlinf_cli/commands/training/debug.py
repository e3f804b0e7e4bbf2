"""`rlinf debug`: the stacks of an active run's processes, and breakpoints in its workers."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Run, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlinf_cli.bootstrap.inspection import Inspector
    from rlinf_core.supervision.job_view import JobSnapshot


def debug(
    run: Run = None,
    processes: Annotated[list[str] | None, typer.Argument(metavar="COMPONENT[:RANK]", hidden=True)] = None,
    job: Annotated[
        str | None,
        typer.Option(
            "--job",
            metavar="NAME",
            help="A job without a run folder, such as your own program; `rlinf inspect workers` names it.",
            show_default=False,
        ),
    ] = None,
    native: Annotated[
        bool,
        typer.Option(
            "--native", help="Also show frames of C, C++ and CUDA libraries; needs py-spy.", show_default=False
        ),
    ] = False,
    stacks: Annotated[
        bool,
        typer.Option("--stacks", help="Show the stacks of a process that waits at a breakpoint.", show_default=False),
    ] = False,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the stacks of an active run's processes, or attach to a breakpoint.

    RUN is a run folder or its name in the folder of runs; by default the active run. COMPONENT[:RANK] names processes
    of it, as `env` or `EnvGroup:0`, also without RUN; by default all. Run it on the machine of the run's driver.

    A process that does not answer, as its native code holds the interpreter's lock, is read from outside, within 2 s;
    so are the processes that workers started, as simulators. Where a worker's code has reached `breakpoint()`, naming
    that worker attaches this terminal to Python's debugger. The exit code is 1 where a process has no stacks.
    """
    from rlinf_cli.bootstrap.inspection import Inspector, find_job, job_of
    from rlinf_cli.debug.attaching import chosen_processes, components_of, run_and_processes
    from rlinf_core.supervision.job_view import answers_of_both, waits_at_breakpoint

    _check_native(native)
    words = list(processes or [])
    groups: Mapping[str, str] = {}
    if job is not None:
        record, words = find_job(job), [*([run] if run is not None else []), *words]
    else:
        folder, words = run_and_processes(run, words, log_path)
        record, groups = job_of(folder), components_of(folder.config_file)
    with Inspector(record) as inspector:
        snapshot = inspector.snapshot(stacks=True)
        names = chosen_processes(_names(snapshot), words, groups, f"job {record.job}")
        if any(name in snapshot.peers and name not in snapshot.answers for name in names):
            # On a busy machine one may answer late; only those that answer nothing are read from outside.
            snapshot = answers_of_both(snapshot, inspector.snapshot(stacks=True))
        place = waits_at_breakpoint(snapshot, names[0]) if len(names) == 1 else None
        if words and place is not None and not (stacks or native) and output is Output.TEXT:
            from rlinf_cli.debug.attaching import attach

            attach(names[0], place, snapshot.peers[names[0]], f"rlinf {' '.join(sys.argv[1:])}")
            return
        _show(inspector, snapshot, names, native, output)


app = command(
    debug,
    examples=(
        "rlinf debug",
        "rlinf debug env:0",
        "rlinf debug runs/embodied-20260314-101502 EnvGroup:0",
        "rlinf debug --native --output json",
    ),
)


def _names(snapshot: JobSnapshot) -> list[str]:
    return [*(name for name in snapshot.peers if name not in snapshot.workers), *snapshot.workers]


def _show(inspector: Inspector, snapshot: JobSnapshot, names: list[str], native: bool, output: Output) -> None:
    from rlinf_cli.debug.stack_report import stacks_record, stacks_text
    from rlinf_cli.exit_codes import ExitCode
    from rlinf_core.supervision.job_view import job_processes

    shown = job_processes(snapshot, names, native=native, remotely=inspector.read_stacks)
    if output is Output.JSON:
        console.result_json(stacks_record(snapshot.job, shown))
    else:
        console.result(stacks_text(shown))
    if not all(process.complete for process in shown):
        raise typer.Exit(ExitCode.FAILED)


def _check_native(native: bool) -> None:
    from rlinf_core.errors import ConfigError
    from rlinf_core.node.stacks.process_stacks import install_spy, py_spy

    if native and py_spy() is None:
        raise ConfigError("`--native` needs py-spy, which is not installed", help=install_spy())

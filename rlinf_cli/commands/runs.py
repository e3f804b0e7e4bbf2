"""Commands about runs: the table of a folder, and the processes of active ones."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from rlinf_cli.arguments import options
from rlinf_cli.arguments.options import Processes, Recipe, Run, Runs
from rlinf_cli.command import Result, arg, command, group, opt
from rlinf_core.runners.storage.run_status import RunStatus

Sort = Literal["age", "name", "step", "result", "size"]
Statuses = Annotated[
    list[RunStatus] | None,
    opt("--status STATUS", f"Only runs with this status: {', '.join(RunStatus)}. May be repeated."),
]

runs = group("List the runs of a folder, newest first; `prune` deletes some.", default="list")


@command("rlinf runs list --status failed --sort result", app=runs, name="list")
def list_(
    status: Statuses = None,
    recipe: Recipe = None,
    sort: Annotated[Sort, opt("--sort", "Sort key: age puts the newest first, numbers the largest.")] = "age",
    reverse: Annotated[bool, opt("--reverse", "Reverse the order.")] = False,
) -> Result:
    """List runs: recipe, status, step, result, age and size.

    The result is that of the last evaluation, or without evaluations that of the last training step.
    """
    from rlinf_cli.runs.run_table import listed_runs

    return listed_runs(status, recipe, sort, reverse=reverse)


@command("rlinf runs prune --status failed --older-than 7d", app=runs)
def prune(
    names: Runs = None,
    status: Statuses = None,
    recipe: Recipe = None,
    older_than: Annotated[str | None, opt("--older-than AGE", "Only runs started longer ago: 36h, 7d.")] = None,
    keep: Annotated[int, opt("--keep N", "Keep the newest N of the selected runs.", min=0)] = 0,
    delete: Annotated[bool, opt("--delete", "Delete the runs; by default they are only listed.")] = False,
) -> Result:
    """List the runs that would be deleted; --delete deletes them.

    RUN... are run folders or their names in the folder of runs; by default all that the options select. A run that is
    active, or may be active on another machine, is never deleted, nor one whose files another run of the folder names,
    as in `actor.model.model_path`. Checkpoints outside of the run folder are deleted only if they bear the mark of that
    run.
    """
    from rlinf_cli.runs.upkeep import age_in_seconds, pruned

    seconds = age_in_seconds(older_than)
    if not (names or status or recipe or seconds is not None or keep):
        raise typer.BadParameter("name the runs, or select them with --status, --recipe, --older-than or --keep")
    return pruned(names, status, recipe, seconds, keep, delete=delete)


@command("rlinf runs convert runs/embodied-20260728-101500", app=runs)
def convert(run: Annotated[str, arg("RUN", options.runs)]) -> Result:
    """Convert the checkpoints of a run that an earlier version wrote.

    What they pickled is no longer read. Each is replaced, in place, once the new one is complete: that needs room for
    the largest.
    """
    from rlinf_cli.runs.upkeep import converted

    return converted(run)


@command(
    "rlinf ps",
    "rlinf ps runs/embodied-20260314-101502",
    "rlinf ps --stacks env:0",
    "rlinf ps --attach EnvGroup:0",
    excludes={"--attach": "--stacks --native"},
)
def ps(
    words: Processes = None,
    stacks: Annotated[
        bool, opt("--stacks", "Show the stacks of the processes, and of those that they started.")
    ] = False,
    attach: Annotated[bool, opt("--attach", "Attach to a process that waits at a breakpoint.")] = False,
    native: Annotated[
        bool, opt("--native", "With --stacks, also frames of C, C++ and CUDA libraries; needs py-spy.")
    ] = False,
    job: Annotated[str | None, opt("--job NAME", "A job without a run folder, such as your own program.")] = None,
) -> Result | None:
    """Show what each process of an active run does, or its stacks.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the newest job of this
    machine. COMPONENT[:RANK] names processes of it, as `env` or `EnvGroup:0`; by default all. Run it on the machine of
    the run's driver.

    A process that does not answer, as its native code holds the interpreter's lock, has its stacks read from outside,
    within 2 s. Where a worker's code has reached `breakpoint()`, --attach connects this terminal to Python's debugger;
    other processes show their stacks. The exit code is 1 where a process has no stacks.
    """
    from rlinf_cli.job_processes import processes_of

    return processes_of(words or [], job, stacks=stacks or native, attach=attach, native=native)


@command("rlinf logs -f", "rlinf logs actor", "rlinf logs runs/embodied-20260314-101502 actor:0", record=False)
def logs(
    words: Processes = None,
    lines: Annotated[int, opt("--lines -n N", "Number of last lines; -1 for all.", min=-1)] = 50,
    follow: Annotated[bool, opt("--follow -f", "Keep printing until the run ends.")] = False,
) -> Result:
    """Show the logs of a run's processes, merged by time.

    RUN is a run folder or its name in the folder of runs; by default the active run (if several are active, you are
    asked to choose), else the last one. COMPONENT[:RANK] names processes, as `actor` or `env:0`; `driver` is the run
    itself, `:0` the rank 0 of each component.
    """
    from rlinf_cli.runs.logs import show_logs

    return show_logs(words or [], lines, follow=follow)


@command("rlinf stop", "rlinf stop runs/embodied-20260314-101502", record=False)
def stop(
    run: Run = None,
    force: Annotated[
        bool,
        opt("--force", "Kill the run; the current step is lost. Also releases a run whose machine no longer exists."),
    ] = False,
    timeout: Annotated[float, opt("--timeout SECONDS", "Seconds to wait for the run to end.", min=0.0)] = 60.0,
) -> Result:
    """End an active run, and wait until it has ended.

    RUN is a run folder or its name in the folder of runs; by default the active run. If several are active, you are
    asked to choose. Checkpoints are kept; rerun the training command with `runner.resume_dir=auto` to resume.
    """
    from rlinf_cli.runs.stopping import stop_run

    return stop_run(run, timeout, force=force)

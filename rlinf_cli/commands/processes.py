"""Commands for the processes of active runs."""

from __future__ import annotations

from typing import Annotated

from rlinf_cli.arguments.options import Processes, Run
from rlinf_cli.command import Result, command, opt


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
    from rlinf_cli.debug.job_processes import processes_of

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
    from rlinf_cli.runs.log_reading import show_logs

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

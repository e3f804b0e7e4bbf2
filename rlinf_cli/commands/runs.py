"""Commands about runs: the table of a folder, the processes of active ones, and their results."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from rlinf_cli import options
from rlinf_cli.command import Result, arg, command, group, opt
from rlinf_cli.options import Processes, Recipe, Run, Runs
from rlinf_cli.runs.x_axis import XAxis
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
    from rlinf_cli.runs.active import stop_run

    return stop_run(run, timeout, force=force)


@command(
    "rlinf why",
    "rlinf why --bundle failure.tar.gz",
    "rlinf why --replay episode-1834123-17",
    excludes={"--replay": "--bundle"},
)
def why(
    run: Run = None,
    replay: Annotated[
        str | None,
        opt("--replay ITEM", "Do a quarantined item again, alone: a file of `quarantine/`, as `episode-1834123-17`."),
    ] = None,
    bundle: Annotated[
        Path | None,
        opt(
            "--bundle FILE",
            "Also write the run's evidence, events, metrics and configuration into FILE, a tar.gz for a bug report,"
            " with secret values masked.",
        ),
    ] = None,
) -> Result:
    """Explain why a run failed, or does not learn, and what to do.

    What failed first, what followed, the evidence. RUN is a run folder or its name in the folder of runs; by default
    the active run, else the last one. Reads that folder; if an active run finishes no steps, also what its processes
    do. The exit code is 0 where nothing is wrong, and 1 where a cause was named, or where a replayed item kills the
    process again.
    """
    if replay is not None:
        from rlinf_cli.run.policies import replayed

        return replayed(run, replay)
    from rlinf_cli.why.diagnosis import explained

    return explained(run, bundle)


Order = Literal["written", "best", "worst", "random"]


@command(
    "rlinf report",
    "rlinf report --watch",
    "rlinf report runs/sweep-20260314-101502 -o sweep.html",
    needs={"--samples": "--step --order --count --at-least --at-most --logprobs"},
    excludes={"--samples": "--text --watch -o", "--text": "--watch -o"},
)
def report(
    runs: Runs = None,
    out: Annotated[
        Path | None, opt("-o FILE", "Output file; by default report.html in the run folder, or here for several runs.")
    ] = None,
    watch: Annotated[bool, opt("--watch", "Write it again every few seconds, until the run ends or Ctrl-C.")] = False,
    text: Annotated[bool, opt("--text", "Print the summary of the run instead.")] = False,
    samples: Annotated[bool, opt("--samples", "Print sampled answers of a language model instead.")] = False,
    step: Annotated[int | None, opt("--step N", "With --samples: training step; by default the last.", min=0)] = None,
    order: Annotated[Order, opt("--order", "With --samples: sort order by reward.")] = "written",
    count: Annotated[int, opt("--count -n N", "With --samples: maximum number.", min=1)] = 10,
    at_least: Annotated[float | None, opt("--at-least REWARD", "With --samples: minimum reward.")] = None,
    at_most: Annotated[float | None, opt("--at-most REWARD", "With --samples: maximum reward.")] = None,
    logprobs: Annotated[bool, opt("--logprobs", "With --samples: colour tokens by their log-probability.")] = False,
) -> Result | None:
    """Write an HTML report of a run: curves, failures, samples, times.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the last one. The page is one
    self-contained file. `rlinf train` writes it at the end of a run. Several RUNs, or the folder of a sweep, are shown
    side by side.

    With --watch a browser that shows the page loads it again by itself. Only folders of runs are read.
    """
    if samples:
        from rlinf_cli.report.content import samples_result

        name = _one(runs, "--samples")
        return samples_result(name, step, order, count, at_least, at_most, logprobs=logprobs)
    if text:
        from rlinf_cli.why.diagnosis import summary

        return summary(_one(runs, "--text"))
    from rlinf_cli.report.page import report_runs

    return report_runs(runs, out, watch=watch)


def _one(runs: list[str] | None, option: str) -> str | None:
    """Return the only run, None for the default one."""
    if runs and len(runs) > 1:
        raise typer.BadParameter("it shows one run", param_hint=f"'{option}'")
    return runs[0] if runs else None


@command("rlinf compare runs/fast-* runs/slow-*", "rlinf compare runs/sweep-20260314-101502 -o sweep.png")
def compare(
    runs: Annotated[list[str], arg("RUN...", options.runs)],
    metrics: Annotated[
        list[str] | None,
        opt(
            "--metric NAME",
            "Metric to compare, a name in metrics.jsonl; by default the headline metric of evaluations, else of steps."
            " May be repeated: further ones are only drawn.",
        ),
    ] = None,
    out: Annotated[
        list[Path] | None,
        opt(
            "-o FILE",
            "Also write an HTML page, or draw the curves as .png, .svg or .pdf, several seeds as mean and range. May be"
            " repeated.",
        ),
    ] = None,
    x: Annotated[
        XAxis, opt("--x", "What results and curves are laid over: steps of different runs differ.")
    ] = XAxis.STEP,
) -> Result:
    """Compare runs: what differs, and whether by more than chance.

    RUN... are run folders, their names in the folder of runs, or folders of sweeps, whose runs are compared. The
    differences are listed with the most important first. Runs that differ only in their seeds form one set; with
    several runs in both sets the noise is estimated between seeds.
    """
    from rlinf_cli.report.page import compared_result

    return compared_result(runs, metrics or (), out or (), x)

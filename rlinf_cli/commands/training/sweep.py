"""`rlinf sweep`: one file with several values and seeds, as a queue of runs."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.lazy import command

if TYPE_CHECKING:
    from rlinf_cli.file.job_file import SoundJob
    from rlinf_cli.sweep.grid import Point
    from rlinf_cli.sweep.plan import SweepPlan
    from rlinf_cli.sweep.sweep_folder import PointState


Seeds = Annotated[
    int,
    typer.Option(
        "--seeds",
        min=0,
        metavar="N",
        help="Run each combination with N seeds: every seed of training in the file, plus 0 to N-1.",
        show_default=False,
    ),
]
Parallel = Annotated[
    int, typer.Option("--parallel", min=1, metavar="N", help="Run N at the same time; they share the machine.")
]
Folder = Annotated[
    Path | None,
    typer.Option(
        "--folder",
        metavar="FOLDER",
        help="New folder, or that of this sweep to continue. Default: a new one in the folder of runs.",
        show_default=False,
    ),
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Validate every run, list them, start nothing.", show_default=False)
]


def sweep(
    arguments: Annotated[
        list[str],
        typer.Argument(metavar="FILE|recipe=NAME", hidden=True, autocompletion=completion.training),
    ],
    seeds: Seeds = 0,
    parallel: Parallel = 1,
    folder: Folder = None,
    dry_run: DryRun = False,
    output: OutputOption = Output.TEXT,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Train a file with every combination of several values, one run after the other.

    FILE is as for `rlinf train`. KEY=A,B,C gives a key several values, KEY=VALUE one for all runs; a list is written in
    brackets. Every run is validated before the first one starts, and has a folder in that of the sweep. A failed run
    does not end the sweep. Ctrl-C does, cleanly; the same command with --folder continues from the checkpoints.
    """
    from rlinf_cli.file.job_file import split_files
    from rlinf_cli.sweep.plan import config_ids, plan_of
    from rlinf_cli.sweep.sweep_folder import new_folder

    files, overrides = split_files(arguments)
    if len(files) != 1 or files[0] == "-":
        raise typer.BadParameter("name one file or a recipe, as in `rlinf sweep laptop actor.optim.lr=1e-4,3e-4`")
    plan = plan_of(files[0], overrides, seeds)
    if len(plan.points) == 1:
        raise typer.BadParameter("that is one run: set several values for a key, or use `--seeds` or `rlinf train`")
    place = (folder or new_folder(plan.log_path)).absolute()
    ids = config_ids(plan, place)
    if dry_run:
        _list(plan.points, output)
        return
    current = _train(plan, place, ids, parallel)
    _show(plan, place, current, output)
    again = ["rlinf", "sweep", *arguments, *(["--seeds", str(seeds)] if seeds else []), "--folder", str(place)]
    raise typer.Exit(_end(place, current, again))


app = command(
    sweep,
    examples=(
        "rlinf sweep laptop actor.optim.lr=1e-4,3e-4 --seeds 3",
        "rlinf sweep cartpole algorithm.gamma=0.95,0.99 --parallel 2",
    ),
    no_args_is_help=True,
)


def _train(plan: SweepPlan, place: Path, ids: Mapping[str, str], parallel: int) -> Mapping[str, PointState]:
    """Run what is not finished yet, and return how each run ended."""
    from rlinf_cli.run.remote_driver import choose_cluster
    from rlinf_cli.run.runnable import check_installed
    from rlinf_cli.sweep.run_queue import RunQueue
    from rlinf_cli.sweep.sweep_folder import check_visible, opened, states
    from rlinf_cli.sweep.sweep_table import SweepView, counts_text

    _check_here(plan.parts, plan.file)
    check_installed()
    choose_cluster(plan.parts, plan.file, already_shown=False)
    with opened(place, plan, ids) as there:
        current = states(place, plan)
        check_visible(place, current)
        console.message(f"{'continued' if there else 'new'} sweep {place}: {counts_text(current)}")
        with SweepView(plan.points) as view:
            return RunQueue(plan, place, parallel, view.show).work()


def _show(plan: SweepPlan, place: Path, current: Mapping[str, PointState], output: Output) -> None:
    from rlinf_cli.sweep.sweep_table import counts_text, sweep_record, sweep_text

    if output is Output.JSON:
        console.result_json(sweep_record(place, plan.points, current))
    else:
        console.result(sweep_text(plan.points, current))
    console.message(counts_text(current))


def _check_here(parts: SoundJob, file: str) -> None:
    """Refuse a job whose cluster has its head on another machine: its runs would be written there."""
    from rlinf_cli.run.remote_driver import cluster_elsewhere
    from rlinf_core.errors import ConfigError

    if cluster_elsewhere(parts, file) is not None:
        raise ConfigError(
            "the head of this file's cluster is another machine, and the runs would be written there",
            where=parts.name,
            help="log in to the head, and start the sweep there",
        )


def _list(points: Sequence[Point], output: Output) -> None:
    if output is Output.JSON:
        console.result_json(
            {"schema": "rlinf.sweep_plan/1", "runs": [{"name": point.name, "values": point.values} for point in points]}
        )
        return
    from rlinf_cli.sweep.grid import short_keys

    heads = ("run", *short_keys(list(points[0].values)).values())
    console.result(console.table(heads, [(point.name, *point.values.values()) for point in points]))
    console.message(f"\n{len(points)} runs are valid; nothing was started, and nothing written")


def _end(place: Path, current: Mapping[str, PointState], again: Sequence[str]) -> ExitCode:
    """Say what can be done next, and return the exit code."""
    from rlinf_cli.console.interrupts import command_signals
    from rlinf_core.runners.storage.run_status import RunStatus

    statuses = [state.status for state in current.values()]
    if any(status != RunStatus.FINISHED for status in statuses):
        console.message(f"continue with: {shlex.join(again)}")
    if statuses.count(RunStatus.FINISHED) > 1:
        console.message(f"compare with: {shlex.join(['rlinf', 'compare', str(place), '--plot', 'sweep.png'])}")
    if command_signals.code is not None:
        return command_signals.code
    return ExitCode.OK if all(status == RunStatus.FINISHED for status in statuses) else ExitCode.FAILED

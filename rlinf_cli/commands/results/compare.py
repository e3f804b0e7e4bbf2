"""`rlinf compare`: differences between runs, and their significance."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH


def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN...", hidden=True, autocompletion=completion.runs)],
    metrics: Annotated[
        list[str] | None,
        typer.Option(
            "--metric",
            metavar="NAME",
            help="Metric to compare, a name in metrics.jsonl; by default the headline metric of evaluations, else of"
            " steps. May be repeated: further ones are only drawn.",
            show_default=False,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            "--plot",
            metavar="FILE",
            help="Draw the curves to this file (.png, .svg or .pdf), several seeds as mean and range.",
            show_default=False,
        ),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option("--html", metavar="FILE", help="Also write a self-contained HTML page.", show_default=False),
    ] = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Compare runs: their differences, most important first, and whether their results differ by more than chance.

    RUN... are run folders, their names in the folder of runs, or folders of sweeps, whose runs are compared. Runs that
    differ only in their seeds form one set; with several runs in both sets the noise is estimated between seeds.
    """
    if html is not None:
        from rlinf_cli.report.script import require_modules

        require_modules("no page was written")
    from rlinf_cli.render.comparison_table import comparison_record, comparison_text
    from rlinf_cli.runs.run_comparison import compare_runs
    from rlinf_cli.runs.run_lookup import find_runs, warn_of_damaged

    folders = [folder for run in runs for folder in find_runs(run, log_path)]
    if len({folder.path for folder in folders}) < len(folders) or len(folders) < 2:
        raise typer.BadParameter("name two or more different runs", param_hint="'RUN...'")
    warn_of_damaged(folders)
    comparison = compare_runs(folders, metrics[0] if metrics else None)
    if output is Output.JSON:
        console.result_json(comparison_record(comparison))
    else:
        console.result(comparison_text(comparison))
    if plot is not None:
        from rlinf_cli.report.curves import draw_comparison

        draw_comparison(comparison, plot, metrics or ())
        console.message(f"curves: {plot}")
    if html is not None:
        from rlinf_cli.console.outfile import write_whole
        from rlinf_cli.report.page import compared_page

        write_whole(html, compared_page(comparison))
        console.message(f"page: {html}")


app = command(
    compare,
    examples=(
        "rlinf compare runs/fast-* runs/slow-*",
        "rlinf compare runs/sweep-20260314-101502 --plot sweep.png",
    ),
    no_args_is_help=True,
)

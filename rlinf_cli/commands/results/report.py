"""`rlinf report`: HTML report of a run."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Run, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder

SCHEMA = "rlinf.report/1"
# Seconds between rewrites of a page, and between checks of the run's state.
_RENEW_SECONDS = 15.0
_LOOK_SECONDS = 0.5


def report(
    run: Run = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Output file; by default report.html in the run folder."),
    ] = None,
    live: Annotated[
        bool, typer.Option("--live", help="Rewrite it periodically while the run is active.", show_default=False)
    ] = False,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write an HTML report of a run: result, curves, times, placement, failures, samples, configuration, versions.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the last one. The page is one
    self-contained file. `rlinf train` writes it at the end of a run.
    """
    from rlinf_cli.live.run_summary import shown
    from rlinf_cli.report.script import require_modules
    from rlinf_cli.run.report_writing import NAME
    from rlinf_cli.runs.run_lookup import find_run

    require_modules("no report was written")
    folder = find_run(run, log_path)
    path = (out or folder.path / NAME).absolute()
    _write(folder, path, live=live and folder.state.going_on)
    if output is Output.JSON:
        console.result_json({"schema": SCHEMA, "run": str(folder.path), "report": str(path)})
    else:
        console.result(shown(path))
    while live and folder.state.going_on:
        console.message(
            f"step {folder.state.step}; rewritten every {_RENEW_SECONDS:.0f} s until the run ends, or Ctrl-C"
        )
        _wait(folder)
        _write(folder, path, live=folder.state.going_on)


app = command(report, examples=("rlinf report", "rlinf report runs/embodied-20260314-101502"))


def _wait(folder: RunFolder) -> None:
    """Wait until the next rewrite is due, or the run has ended."""
    deadline = time.monotonic() + _RENEW_SECONDS
    while folder.refresh().going_on and time.monotonic() < deadline:
        time.sleep(_LOOK_SECONDS)


def _write(folder: RunFolder, path: Path, *, live: bool) -> None:
    from rlinf_cli.console.outfile import write_whole
    from rlinf_cli.report.gathering import gather
    from rlinf_cli.report.page import report_page
    from rlinf_core.errors import RunError

    try:
        page = report_page(gather(folder), path, live=live)
    except OSError as error:
        raise RunError(
            "the report cannot be created", where=str(error.filename or folder.path), why=error.strerror or str(error)
        ) from error
    write_whole(path, page)

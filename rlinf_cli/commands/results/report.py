"""`rlinf report`: HTML pages of runs."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Runs, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder

SCHEMA = "rlinf.report/1"
# A long run's page takes seconds to make: it takes at most a tenth of one core.
_PAUSE_SECONDS: Final = 5.0
_PAUSES_PER_PAGE: Final = 9.0
_RELOAD_SECONDS: Final = 10


def report(
    run: Runs = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            metavar="FILE",
            help="Output file; by default report.html in the run folder, or here for several runs.",
        ),
    ] = None,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", help="Write it again every few seconds, until the run ends or Ctrl-C.", show_default=False
        ),
    ] = False,
    live: Annotated[bool, typer.Option("--live", hidden=True)] = False,
    port: Annotated[int | None, typer.Option("--port", hidden=True)] = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write an HTML report of a run: result, curves, times, placement, failures, samples, configuration, versions.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the last one. The page is one
    self-contained file. `rlinf train` writes it at the end of a run. Several RUNs, or the folder of a sweep, are shown
    side by side.

    With --watch a browser that shows the page loads it again by itself. Only folders of runs are read.
    """
    from rlinf_cli.report.report_writing import NAME
    from rlinf_cli.report.script import require_modules
    from rlinf_cli.runs.run_lookup import find_run, find_runs

    require_modules("no report was written")
    if live or port is not None:
        console.warn("`--live` is now `--watch`, which writes a file and serves nothing; `--port` has no effect")
        watch = True
    folders = [folder for name in run for folder in find_runs(name, log_path)] if run else [find_run(None, log_path)]
    path = (out or (folders[0].path / NAME if len(folders) == 1 else Path(NAME))).absolute()
    began = time.monotonic()
    active = _write(folders, path, watch=watch)
    if output is Output.JSON:
        paths = [str(folder.path) for folder in folders]
        shown_runs = {"run": paths[0]} if len(paths) == 1 else {"runs": paths}
        console.result_json({"schema": SCHEMA, **shown_runs, "report": str(path)})
    else:
        from rlinf_cli.live.run_summary import shown

        console.result(shown(path))
    if watch and active:
        console.message("written again every few seconds while the run lasts; Ctrl-C ends it")
    while watch and active:
        time.sleep(max(_PAUSE_SECONDS, _PAUSES_PER_PAGE * (time.monotonic() - began)))
        began = time.monotonic()
        active = _write(folders, path, watch=True)


app = command(
    report,
    examples=(
        "rlinf report",
        "rlinf report runs/embodied-20260314-101502",
        "rlinf report --watch",
        "rlinf report runs/sweep-20260314-101502 --out sweep.html",
    ),
)


def _write(folders: Sequence[RunFolder], path: Path, *, watch: bool) -> bool:
    """Write the page; return whether a run that it shows is active.

    Args:
        watch: whether the page of an active run is to be loaded again by browsers.
    """
    from rlinf_cli.console.outfile import write_whole
    from rlinf_cli.report.gathering import gather
    from rlinf_cli.report.overview import overview_page
    from rlinf_cli.report.page import report_page
    from rlinf_core.errors import RunError
    from rlinf_core.runners.storage.run_status import RunStatus

    for folder in folders:
        folder.refresh()
    active = any(folder.state.outcome[0] == RunStatus.RUNNING for folder in folders)
    refresh = _RELOAD_SECONDS if watch and active else 0
    try:
        if len(folders) == 1:
            page = report_page(gather(folders[0]), path, refresh=refresh)
        else:
            page = overview_page(folders, path, refresh=refresh)
    except OSError as error:
        where = str(error.filename or folders[0].path)
        raise RunError("the report cannot be created", where=where, why=error.strerror or str(error)) from error
    write_whole(path, page)
    return active

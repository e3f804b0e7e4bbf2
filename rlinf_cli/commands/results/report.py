"""`rlinf report`: HTML report of a run, and live pages of runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Runs, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder

SCHEMA = "rlinf.report/1"


def report(
    run: Runs = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Output file; by default report.html in the run folder."),
    ] = None,
    live: Annotated[
        bool,
        typer.Option(
            "--live", help="Serve it on this machine, updated while the run lasts, until Ctrl-C.", show_default=False
        ),
    ] = False,
    port: Annotated[
        int,
        typer.Option(
            "--port", min=0, max=65535, metavar="N", help="With --live: the port to serve on; 0: any free one."
        ),
    ] = 0,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Write an HTML report of a run: result, curves, times, placement, failures, samples, configuration, versions.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the last one. The page is one
    self-contained file. `rlinf train` writes it at the end of a run.

    With --live it is served instead, at an address of this machine that holds a secret, and shows each step as it ends.
    Several RUNs, or the folder of a sweep, are shown side by side. Only their folders are read.
    """
    from rlinf_cli.report.script import require_live_modules, require_modules
    from rlinf_cli.runs.run_lookup import find_run, find_runs

    if live:
        if out is not None:
            raise typer.BadParameter("--live writes no file: leave --out out")
        require_live_modules()
        folders = (
            [folder for name in run for folder in find_runs(name, log_path)] if run else [find_run(None, log_path)]
        )
        _serve(folders, port, output)
        return
    if run is not None and len(run) > 1:
        raise typer.BadParameter(
            "a report covers one run: show several with --live, or compare them with `rlinf compare --html FILE`"
        )
    if port:
        raise typer.BadParameter("--port needs --live")
    require_modules("no report was written")
    folder = find_run(run[0] if run else None, log_path)
    path = _write(folder, out)
    if output is Output.JSON:
        console.result_json({"schema": SCHEMA, "run": str(folder.path), "report": str(path)})
    else:
        from rlinf_cli.live.run_summary import shown

        console.result(shown(path))


app = command(
    report,
    examples=(
        "rlinf report",
        "rlinf report runs/embodied-20260314-101502",
        "rlinf report --live",
        "rlinf report runs/sweep-20260314-101502 --live --port 8800",
    ),
)


def _write(folder: RunFolder, out: Path | None) -> Path:
    from rlinf_cli.console.outfile import write_whole
    from rlinf_cli.report.gathering import gather
    from rlinf_cli.report.page import report_page
    from rlinf_cli.run.report_writing import NAME
    from rlinf_core.errors import RunError

    path = (out or folder.path / NAME).absolute()
    try:
        page = report_page(gather(folder), path)
    except OSError as error:
        raise RunError(
            "the report cannot be created", where=str(error.filename or folder.path), why=error.strerror or str(error)
        ) from error
    write_whole(path, page)
    return path


def _serve(folders: Sequence[RunFolder], port: int, output: Output) -> None:
    # The help of `rlinf` imports all commands, and would wait for the hashes of this module.
    import secrets

    from rlinf_cli.report.serving.followed_run import FollowedRun
    from rlinf_cli.report.serving.server import HOST, listening, serve
    from rlinf_core.errors import RunError

    try:
        listener = listening(port)
    except OSError as error:
        raise RunError(
            f"the page cannot be served at port {port}",
            why=error.strerror or str(error),
            help="choose another one with `--port`, or leave it out",
        ) from error
    token = secrets.token_urlsafe(24)
    url = f"http://{HOST}:{listener.getsockname()[1]}/{token}/"
    if output is Output.JSON:
        console.result_json({"schema": SCHEMA, "runs": [str(folder.path) for folder in folders], "url": url})
    else:
        console.result(url)
    console.message("open this address in a browser of this machine; Ctrl-C ends it")
    serve([FollowedRun(folder) for folder in folders], listener, token)

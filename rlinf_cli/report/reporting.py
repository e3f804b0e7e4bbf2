"""The work of `rlinf report`, `rlinf compare`, and drawing a placement."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import typer

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.console.console import write_whole
from rlinf_cli.live.run_summary import shown
from rlinf_cli.placement.picture import Picture, picture_record
from rlinf_cli.report.charts import require_modules
from rlinf_cli.report.curves import draw_comparison
from rlinf_cli.report.page import compared_page, overview_page, placement_page, report_page
from rlinf_cli.report.report_writing import NAME
from rlinf_cli.runs.run_comparison import compare_runs, comparison_record, comparison_text
from rlinf_cli.runs.run_lookup import find_run, find_runs, warn_of_damaged
from rlinf_cli.runs.x_axis import XAxis
from rlinf_core.errors import RunError
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus

SCHEMA: Final = "rlinf.report/1"
# A long run's page takes seconds to make. Pauses limit the work to a tenth of one core.
_PAUSE_SECONDS: Final = 5.0
_PAUSES_PER_PAGE: Final = 9.0
_RELOAD_SECONDS: Final = 10
_PAGE: Final = (".html", ".htm")


def report_runs(runs: Sequence[str] | None, out: Path | None, *, watch: bool) -> Result | None:
    """Write the page of one run or several; with `watch`, write it repeatedly while a run is active."""
    require_modules("no report was written")
    folders = [folder for name in runs for folder in find_runs(name)] if runs else [find_run(None)]
    path = (out or (folders[0].path / NAME if len(folders) == 1 else Path(NAME))).absolute()
    began = time.monotonic()
    active = _write(folders, path, watch=watch)
    paths = [str(folder.path) for folder in folders]
    shown_runs = {"run": paths[0]} if len(paths) == 1 else {"runs": paths}
    result = Result(shown(path), {"schema": SCHEMA, **shown_runs, "report": str(path)})
    if not (watch and active):
        return result
    result.show()
    console.message("written again every few seconds while the run lasts; Ctrl-C ends it")
    while active:
        time.sleep(max(_PAUSE_SECONDS, _PAUSES_PER_PAGE * (time.monotonic() - began)))
        began = time.monotonic()
        active = _write(folders, path, watch=True)
    return None


def compared(runs: Sequence[str], metrics: Sequence[str], out: Sequence[Path], x: XAxis) -> Result:
    """Return the comparison of runs, and write its page or picture.

    Args:
        runs: run folders, names of runs, or folders of sweeps.
        metrics: the metric to compare, and others that are only drawn.
        out: files to write: an HTML page, or a picture of the curves.
        x: the horizontal axis of the curves.
    """
    if any(file.suffix in _PAGE for file in out):
        require_modules("no page was written")
    folders = [folder for run in runs for folder in find_runs(run)]
    if len({folder.path.resolve() for folder in folders}) < len(folders) or len(folders) < 2:
        raise typer.BadParameter("name two or more different runs", param_hint="'RUN...'")
    if len(metrics) > 1 and all(file.suffix in _PAGE for file in out):
        raise typer.BadParameter("further metrics are only drawn: add `-o curves.png`", param_hint="'--metric'")
    warn_of_damaged(folders)
    comparison = compare_runs(folders, metrics[0] if metrics else None, x)
    for file in out:
        if file.suffix in _PAGE:
            write_whole(file, compared_page(comparison))
        else:
            draw_comparison(comparison, file, metrics)
    return Result(
        lambda: comparison_text(comparison),
        lambda: comparison_record(comparison),
        notes=tuple(f"wrote {file}" for file in out),
    )


def draw_placement(result: Result, picture: Picture, out: Path) -> Result:
    """Write the page of a placement; return the result with a note, or the page itself if `out` is `-`."""
    require_modules("no picture was written", ("jinja2",))
    page = placement_page(picture_record(picture))
    if str(out) == "-":
        return Result(page)
    write_whole(out, page)
    return result._replace(notes=(f"wrote {out}",))


def _write(folders: Sequence[RunFolder], path: Path, *, watch: bool) -> bool:
    """Write the page; return whether one of its runs is active.

    Args:
        watch: whether browsers reload the page while a run is active.
    """
    for folder in folders:
        folder.refresh()
    active = any(folder.state.outcome[0] == RunStatus.RUNNING for folder in folders)
    refresh = _RELOAD_SECONDS if watch and active else 0
    try:
        if len(folders) == 1:
            page = report_page(folders[0], path, refresh=refresh)
        else:
            page = overview_page(folders, path, refresh=refresh)
    except OSError as error:
        where = str(error.filename or folders[0].path)
        raise RunError("the report cannot be created", where=where, why=error.strerror or str(error)) from error
    write_whole(path, page)
    return active

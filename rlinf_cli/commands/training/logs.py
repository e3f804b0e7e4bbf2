"""`rlinf logs`: the logs of a run's processes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments import completion
from rlinf_cli.arguments.options import LogPath, Quiet, Run, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from rlinf_cli.runs.log_files import Follower, LogFile
    from rlinf_core.runners.storage.run_folder import RunFolder

_LOOK_EVERY = 0.2


def logs(
    run: Run = None,
    component: Annotated[
        str | None,
        typer.Option(
            "--component",
            metavar="NAME",
            help="Only this component, such as `actor`; `driver` is the run itself.",
            autocompletion=completion.logged_components,
            show_default=False,
        ),
    ] = None,
    rank: Annotated[
        int | None, typer.Option("--rank", metavar="N", min=0, help="Only this rank.", show_default=False)
    ] = None,
    lines: Annotated[
        int, typer.Option("--lines", "-n", metavar="N", min=-1, help="Number of last lines; -1 for all.")
    ] = 50,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.", show_default=False)
    ] = False,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Show the logs of a run's processes, merged by time.

    RUN is a run folder or its name in the folder of runs; by default the active run (if several are active, you are
    asked to choose), else the last one.
    """
    from rlinf_cli.runs.run_lookup import find_run

    folder = find_run(run, log_path)
    files = _chosen(folder, component, rank, follow)
    followers = _show_last(files, lines)
    if follow:
        _follow(folder, component, rank, {file.path: follower for file, follower in zip(files, followers, strict=True)})
        return
    console.message(_ending(folder, how="`--follow` continues" if folder.state.going_on else ""))


app = command(
    logs, examples=("rlinf logs --follow", "rlinf logs runs/embodied-20260314-101502 --component actor --rank 0")
)


def _chosen(folder: RunFolder, component: str | None, rank: int | None, follow: bool) -> list[LogFile]:
    from rlinf_cli.runs.log_files import chosen, log_files
    from rlinf_core.errors import RunError
    from rlinf_core.suggest import did_you_mean, quoted

    files = log_files(folder.logs)
    chosen_files = chosen(files, component, rank)
    if chosen_files or (follow and folder.state.going_on):
        return chosen_files
    if not files:
        raise RunError("this run has logged nothing", where=str(folder.path))
    components = sorted({file.component for file in files})
    if component is not None and component not in components:
        raise RunError(
            f"this run has no log of `{component}`",
            where=str(folder.path),
            why="logs of workers on other machines stay there unless the run folder is on shared storage",
            help=did_you_mean(component, components) or f"it has logs of {quoted(components)}",
        )
    ranks = sorted({file.rank for file in chosen(files, component, None)}, key=lambda text: text.split("_"))
    raise RunError(
        f"this run has no log of rank {rank}", where=str(folder.path), help=f"it has logs of ranks {', '.join(ranks)}"
    )


def _show_last(files: list[LogFile], lines: int) -> list[Follower]:
    """Print the end of the logs; return followers for what comes after."""
    from rlinf_cli.runs.log_files import ALL, Follower, entries, merged, moment_of, tail

    parts: list[str] = []
    followers: list[Follower] = []
    read = [tail(file.path, lines) for file in files]
    parts = merged(entries(lines, moment_of(file.path)) for file, (lines, _, _) in zip(files, read, strict=True))
    followers = [Follower(file.path, end) for file, (_, _, end) in zip(files, read, strict=True)]
    console.results(parts if lines == ALL else parts[-lines:] if lines else [])
    return followers


def _follow(folder: RunFolder, component: str | None, rank: int | None, followers: dict[object, Follower]) -> None:
    """Print appended lines, also of new files, until the run has ended."""
    from rlinf_cli.runs.log_files import Follower, chosen, entries, log_files, merged

    while True:
        # Checked before reading, so that the last lines are printed.
        going_on = folder.refresh().going_on
        for file in chosen(log_files(folder.logs), component, rank):
            followers.setdefault(file.path, Follower(file.path, 0))
        console.results(merged(entries(follower.read()) for follower in followers.values()))
        if not going_on:
            console.message(_ending(folder))
            return
        time.sleep(_LOOK_EVERY)


def _ending(folder: RunFolder, how: str = "") -> str:
    """`runs/embodied-...: running, step 12 was the last; `--follow` continues`."""
    from rlinf_cli.live.run_summary import shown

    status, reason = folder.state.outcome
    text = f"{shown(folder.path)}: {status}, {f'step {folder.state.step}' if folder.state.step else 'no step'} done"
    return "; ".join(part for part in (text, reason, how) if part)

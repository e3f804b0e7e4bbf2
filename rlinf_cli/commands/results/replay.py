"""`rlinf replay`: an item that killed processes, done again alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Run, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH


def replay(
    item: Annotated[str, typer.Argument(metavar="ITEM", help="A file of `quarantine/`, as `episode-1834123-17`.")],
    run: Run = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Replay an item that killed processes of a run and was set aside, alone.

    ITEM is a file in the run's `quarantine/`, or its name. RUN is a run folder or its name in the folder of runs; by
    default the active run, else the last one. The exit code is 1 where the process dies again, and 0 where it lives.
    """
    from rlinf_cli.exit_codes import ExitCode
    from rlinf_cli.run.policy_source import used_job
    from rlinf_cli.runs.run_lookup import find_run
    from rlinf_core.errors import RLinfError
    from rlinf_core.runners.storage.evidence import read_quarantine
    from rlinf_core.suggest import did_you_mean, quoted

    folder = find_run(run, log_path)
    items = read_quarantine(folder.path)
    name = Path(item).name.removesuffix(".json")
    kept = items.get(f"{name}.json")
    if kept is None:
        names = [known.removesuffix(".json") for known in items]
        help = did_you_mean(name, names) or (f"set aside: {quoted(names)}" if names else "it has set nothing aside")
        raise RLinfError(f"there is no item `{name}`", where=str(folder.path), help=help)
    used = used_job(str(folder.path), [], log_path, "replay", None) if kept.replay else None
    function = None if used is None else used.recipe.load(used.recipe.replay)
    if used is None or function is None:
        raise RLinfError(
            f"a {kept.kind} cannot be replayed alone",
            where=f"quarantine/{name}.json",
            help=f"look up {kept.kind} {kept.item} in the data by that number, and train with it alone",
        )
    words = function(used.job, kept, emit=console.message)
    if output is Output.JSON:
        console.result_json({"schema": "rlinf.replay/1", "item": name, "died": bool(words), "words": words})
    else:
        console.result(words or f"{kept.kind} {kept.item} did no harm: something else killed the processes")
    if words:
        raise typer.Exit(ExitCode.FAILED)


app = command(
    replay,
    examples=("rlinf replay episode-1834123-17", "rlinf replay episode-1834123-17 runs/embodied-20260314-101502"),
    no_args_is_help=True,
)

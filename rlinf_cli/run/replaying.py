"""A quarantined item of a run, done again alone: `rlinf why --replay`."""

from __future__ import annotations

from pathlib import Path

from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.run.policy_source import used_job
from rlinf_cli.runs.run_lookup import find_run
from rlinf_core.errors import RLinfError
from rlinf_core.runners.storage.evidence import read_quarantine
from rlinf_core.suggest import did_you_mean, quoted


def replayed(run: str | None, item: str) -> Result:
    """Return whether an item kills the process again.

    Args:
        run: the run's folder or name; None for the active one, else the last.
        item: a file of its `quarantine/`, or its name.

    Raises:
        RLinfError: there is no such item, or its kind cannot be done alone.
    """
    folder = find_run(run)
    items = read_quarantine(folder.path)
    name = Path(item).name.removesuffix(".json")
    kept = items.get(f"{name}.json")
    if kept is None:
        names = [known.removesuffix(".json") for known in items]
        listed = f"quarantined: {quoted(names)}" if names else "the run has no quarantined items"
        raise RLinfError(f"there is no item `{name}`", where=str(folder.path), help=did_you_mean(name, names) or listed)
    used = used_job(str(folder.path), [], "why --replay", None) if kept.replay else None
    function = None if used is None else used.recipe.load(used.recipe.replay)
    if used is None or function is None:
        raise RLinfError(
            f"a {kept.kind} cannot be replayed alone",
            where=f"quarantine/{name}.json",
            help=f"look up {kept.kind} {kept.item} in the data by that number, and train with it alone",
        )
    words = function(used.job, kept, emit=console.message)
    return Result(
        words or f"Not reproduced: {kept.kind} {kept.item} ran without a crash.",
        {"schema": "rlinf.replay/1", "item": name, "died": bool(words), "words": words},
        ExitCode.FAILED if words else ExitCode.OK,
    )

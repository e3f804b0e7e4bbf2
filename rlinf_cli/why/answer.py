"""The answer of `rlinf why` about a run, and the summary of `rlinf report --text`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rlinf_cli.cluster.jobs import Inspector, job_of
from rlinf_cli.command import Result
from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_cli.live.run_summary import shown
from rlinf_cli.runs.run_lookup import find_run
from rlinf_cli.runs.run_table import rows_of
from rlinf_cli.why.diagnosis import diagnose
from rlinf_cli.why.facts import read_facts
from rlinf_cli.why.incidents import seconds_without_step
from rlinf_cli.why.why_page import why_brief, why_record, why_text
from rlinf_core.errors import RLinfError
from rlinf_core.runners.step_clock import NO_STEP, SURE_AFTER
from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.supervision.verdicts import held_up


def explained(run: str | None, bundle: Path | None) -> Result:
    """Return why a run failed or does not learn.

    Args:
        run: its folder or name; None for the active one, else the last.
        bundle: a file that the run's evidence is written to.
    """
    folder = find_run(run)
    facts = read_facts(folder)
    waited = seconds_without_step(facts)
    # The driver may have looked already.
    if waited is not None and not any(NO_STEP in line for line in facts.warnings):
        facts = replace(facts, held_up=_held_up(folder, certain_only=waited < SURE_AFTER))
    diagnosis = diagnose(facts)
    record = why_record(diagnosis)
    text = why_text(diagnosis, shown(folder.path))
    code = ExitCode.OK if diagnosis.clean else ExitCode.FAILED
    if bundle is None:
        return Result(text, record, code)
    from rlinf_cli.why.bundle import write_bundle

    for name in write_bundle(folder.path, bundle, text, record):
        console.warn(f"{name} is not in {shown(bundle)}")
    record["bundle"] = str(bundle)
    return Result(text, record, code, (f"bundle: {shown(bundle)}; look through it before you publish it",))


def summary(run: str | None) -> Result:
    """Return the outcome of a run in a few lines."""
    folder = find_run(run)
    (row,) = rows_of([folder])
    lines = [
        ("run", shown(folder.path)),
        ("recipe", folder.state.recipe),
        ("status", f"{row.status}: {row.reason}" if row.reason else str(row.status)),
        ("step", str(folder.state.step)),
        *([("result", row.result)] if row.result else []),
        *why_brief(diagnose(read_facts(folder))),
    ]
    width = max(len(label) for label, _ in lines)
    return Result("\n".join(f"{label.ljust(width)}  {text}" for label, text in lines), row.record())


def _held_up(folder: RunFolder, *, certain_only: bool) -> list[str]:
    """Return the processes that hold up an active run, in words; none of a run of another machine, or whose manager
    does not answer."""
    try:
        with Inspector(job_of(folder)) as inspector:
            return [standing.how for standing in held_up(inspector, certain_only=certain_only)]
    except (RLinfError, OSError):
        return []

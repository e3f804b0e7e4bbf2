"""`rlinf why`: the cause of a failure, or of a run that does not learn."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlinf_cli.arguments.options import LogPath, Output, OutputOption, Quiet, Run, Verbose
from rlinf_cli.console import console
from rlinf_cli.lazy import command
from rlinf_cli.runs.run_lookup import DEFAULT_LOG_PATH

if TYPE_CHECKING:
    from rlinf_core.runners.storage.run_folder import RunFolder


def why(
    run: Run = None,
    bundle: Annotated[
        Path | None,
        typer.Option(
            "--bundle",
            metavar="FILE",
            help="Also write the run's evidence, events, metrics and configuration into FILE, a tar.gz for a bug"
            " report, with secret values masked.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = Output.TEXT,
    log_path: LogPath = DEFAULT_LOG_PATH,
    quiet: Quiet = False,
    verbose: Verbose = False,
) -> None:
    """Explain why a run failed, or does not learn: what failed first, what followed, the evidence, what to do.

    RUN is a run folder or its name in the folder of runs; by default the active run, else the last one. Reads that
    folder; if an active run finishes no steps, also what its processes do. The exit code is 0 where nothing is wrong,
    and 1 where a cause was named.
    """
    from dataclasses import replace

    from rlinf_cli.exit_codes import ExitCode
    from rlinf_cli.live.run_summary import shown
    from rlinf_cli.runs.run_lookup import find_run
    from rlinf_cli.why.diagnosis import diagnose
    from rlinf_cli.why.facts import read_facts
    from rlinf_cli.why.incidents import seconds_without_step
    from rlinf_cli.why.why_page import why_record, why_text
    from rlinf_core.runners.step_clock import NO_STEP, SURE_AFTER

    folder = find_run(run, log_path)
    facts = read_facts(folder)
    waited = seconds_without_step(facts)
    # The driver may have looked already.
    if waited is not None and not any(NO_STEP in line for line in facts.warnings):
        facts = replace(facts, held_up=_held_up(folder, certain_only=waited < SURE_AFTER))
    diagnosis = diagnose(facts)
    record = why_record(diagnosis)
    text = why_text(diagnosis, shown(folder.path))
    if bundle is not None:
        from rlinf_cli.why.bundle import write_bundle

        left_out = write_bundle(folder.path, bundle, text, record)
        record["bundle"] = str(bundle)
        for name in left_out:
            console.warn(f"{name} is not in {shown(bundle)}")
    if output is Output.JSON:
        console.result_json(record)
    else:
        console.result(text)
        if bundle is not None:
            console.message(f"bundle: {shown(bundle)}; look through it before you publish it")
    if not diagnosis.clean:
        raise typer.Exit(ExitCode.FAILED)


def _held_up(folder: RunFolder, *, certain_only: bool) -> list[str]:
    """Return the processes that hold up an active run, in words; none of a run of another machine, or whose manager
    does not answer."""
    from rlinf_cli.bootstrap.inspection import Inspector, job_of
    from rlinf_core.errors import RLinfError
    from rlinf_core.supervision.verdicts import held_up

    try:
        with Inspector(job_of(folder)) as inspector:
            return [standing.how for standing in held_up(inspector, certain_only=certain_only)]
    except (RLinfError, OSError):
        return []


app = command(
    why,
    examples=(
        "rlinf why",
        "rlinf why runs/embodied-20260314-101502 --output json",
        "rlinf why --bundle failure.tar.gz",
    ),
)

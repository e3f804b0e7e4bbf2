"""The part of `rlinf inspect placement` that gives advice."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlinf_cli.advice.advice_patch import as_overrides, changes_of, write_patch
from rlinf_cli.advice.advice_text import advice_record, advice_text
from rlinf_cli.advice.advising import Advice, Judged, advise
from rlinf_cli.advice.recorded_runs import read_runs
from rlinf_cli.arguments.options import assumed
from rlinf_cli.command import Result
from rlinf_core.config.diagnostics import Diagnostic, Severity

_PATCH: Final = "advice.yaml"


def placement_advice(
    file: str,
    overrides: Sequence[str],
    assume: Sequence[str] | None,
    runs: str,
    staleness: int | None,
    patch: Path | None,
) -> Result:
    """Return the advice on a file, and write the placement that is surely better into `patch`.

    Args:
        file: a file, or a run whose file is meant.
        overrides, assume: the arguments of the command line.
        runs: names or folders of runs, separated by commas; empty: the run that `file` names.
        staleness: the most steps that rollouts may run ahead; None: as many as the file says.
        patch: where a file that extends `file` is written, if a change is advised; None: `advice.yaml`.

    Raises:
        RLinfError: there is no advice, and why.
    """
    from rlinf_cli.job.job_file import check_apart, load, sound, viewed
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.run.policy_source import config_of

    name, patch = config_of(file), patch or Path(_PATCH)
    job = viewed(load(name, overrides, assume))
    parts = sound(job)
    check_apart(patch, parts.files, "--patch")
    layout = lay_out(parts, "placement", file, arguments=(*overrides, *assumed(assume)))
    advice = advise(job, parts, layout, read_runs((runs or file).split(","), assume or ()), staleness)
    words = [file, *overrides]
    advice = _checked(advice, name, overrides, assume)
    chosen: Judged | None = advice.change or advice.leaner
    written, notes = None, ()
    if chosen is not None:
        about = f"{chosen.seconds:.3g} s a step, now {advice.now.seconds:.3g}"
        try:
            write_patch(patch, name, overrides, changes_of(advice, chosen.ranked.arrangement), about)
            written = str(patch)
        except ValueError as error:
            changed = shlex.join(as_overrides(advice, chosen.ranked.arrangement))
            notes = (f"no file was written: {error}; the changes are {changed}",)
    return Result(lambda: advice_text(advice, words, written), lambda: advice_record(advice, written), notes=notes)


def _checked(advice: Advice, file: str, overrides: Sequence[str], assume: Sequence[str] | None) -> Advice:
    """Return the advice without placements that the rules of the job refuse, as `rlinf validate` would."""
    from dataclasses import replace

    from rlinf_cli.job.job_file import load, viewed

    kept: list[Judged] = []
    faults: list[Diagnostic] = []
    for judged in advice.best:
        job = viewed(load(file, [*overrides, *as_overrides(advice, judged.ranked.arrangement)], assume))
        if job.ok:
            kept.append(judged)
        else:
            faults.append(next(finding for finding in job.diagnostics if finding.severity is Severity.ERROR))
    return replace(advice, best=kept, faults=faults)

"""The part of `rlinf inspect placement` that gives advice."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rlinf_cli.advice.advice_patch import as_overrides, changes_of, write_patch
from rlinf_cli.advice.advice_text import advice_record, advice_text
from rlinf_cli.advice.advising import Advice, Judged, advise
from rlinf_cli.command import Result

# Placements that are checked as `rlinf validate` does, before they are shown.
_CHECKED: Final = 3


def placement_advice(
    file: str,
    overrides: Sequence[str],
    assume: Sequence[str] | None,
    runs: str,
    staleness: int | None,
    patch: Path,
) -> Result:
    """Return the advice on a file, and write the placement that is surely better into `patch`.

    Args:
        file: a file, or a run whose file is meant.
        overrides, assume: the arguments of the command line.
        runs: names or folders of runs, separated by commas; empty: the run that `file` names.
        staleness: the most steps that rollouts may run ahead; None: as many as the file says.
        patch: where a file that extends `file` is written, if a change is advised.

    Raises:
        RLinfError: there is no advice, and why.
    """
    from rlinf_cli.job.job_file import load, sound, without_training_data
    from rlinf_cli.placement.job_layout import lay_out
    from rlinf_cli.run.policy_source import config_of

    job = without_training_data(load(config_of(file), overrides, assume))
    parts = sound(job)
    layout = lay_out(parts, "placement", file, arguments=tuple(overrides))
    advice = advise(job, parts, layout, [name for name in (runs or file).split(",") if name], staleness)
    words = " ".join((file, *overrides))
    advice = _checked(advice, config_of(file), overrides, assume)
    chosen: Judged | None = advice.change or advice.leaner
    written, notes = None, ()
    if chosen is not None:
        about = f"{chosen.seconds:.3g} s a step, now {advice.now.seconds:.3g}"
        try:
            write_patch(patch, config_of(file), overrides, changes_of(advice, chosen.ranked.arrangement), about)
            written = str(patch)
        except ValueError as error:
            changed = " ".join(f"'{word}'" for word in as_overrides(advice, chosen.ranked.arrangement))
            notes = (f"no file was written: {error}; the changes are {changed}",)
    return Result(lambda: advice_text(advice, words, written), lambda: advice_record(advice, written), notes=notes)


def _checked(advice: Advice, file: str, overrides: Sequence[str], assume: Sequence[str] | None) -> Advice:
    """Return the advice without placements that the rules of the job refuse."""
    from dataclasses import replace

    from rlinf_cli.job.job_file import load, without_training_data

    kept: list[Judged] = []
    for number, judged in enumerate(advice.best):
        words = as_overrides(advice, judged.ranked.arrangement)
        if number >= _CHECKED or without_training_data(load(file, [*overrides, *words], assume)).ok:
            kept.append(judged)
    return replace(advice, best=kept)

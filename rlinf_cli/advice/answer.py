"""The result of `rlinf inspect placement --advise`: text, data, and a file that extends the job's."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

import typer

from rlinf_cli.advice.advising import Advice, Judged, advise
from rlinf_cli.advice.job_devices import free_of, holders_of, ranks_of
from rlinf_cli.advice.recorded_runs import read_runs
from rlinf_cli.command import Result
from rlinf_cli.console import write_whole
from rlinf_cli.job.job_file import check_apart, load, sound, viewed
from rlinf_cli.job.job_layout import lay_out
from rlinf_cli.options import assumed
from rlinf_cli.runs.run_lookup import config_of
from rlinf_core.config.diagnostics import Diagnostic, Severity
from rlinf_core.config.ranks import format_ranks
from rlinf_core.config.shipped import shipped_config
from rlinf_core.errors import RLinfError
from rlinf_core.job.arrangements import Arrangement

_MADE_BY: Final = "# Made by `rlinf inspect placement --advise`"


def changes_of(advice: Advice, arrangement: Arrangement) -> dict[str, Any]:
    """Return the values that the file needs for an arrangement, by key, without unchanged placements."""
    changed: dict[str, Any] = {}
    for name, seats in arrangement.seats:
        now = advice.devices.seats[name]
        if seats == now or seats.kind is None:
            continue
        changed[f"cluster.component_placement.{name}"] = advice.devices.placed(name, seats)
    return {**changed, **advice.flow.changes(arrangement)}


def as_overrides(advice: Advice, arrangement: Arrangement) -> list[str]:
    """Return an arrangement as command-line overrides."""
    words: list[str] = []
    for name, seats in arrangement.seats:
        if seats.kind is not None:
            entry = json.dumps(advice.devices.placed(name, seats))
            words.append(f"cluster.component_placement.{name}={entry}")
    return words + [f"{key}={json.dumps(value)}" for key, value in advice.flow.changes(arrangement).items()]


def write_patch(file: Path, base: str, overrides: Sequence[str], changes: Mapping[str, Any], about: str) -> None:
    """Write a file for `rlinf train` that extends the job's file with the overrides and the changes.

    Args:
        file: the file; a file that this function wrote before is replaced.
        base: the file of the job, or the name of a shipped configuration.
        overrides: the `KEY=VALUE` arguments of the command.
        changes: values by key.
        about: a line on the effect.

    Raises:
        RLinfError: another file exists at this path, or the file cannot be written.
        ValueError: a file cannot express an override, such as one that deletes a key.
    """
    lines = [*_extends(file, base), *_tree(overrides, changes)]
    if file.is_file() and not _is_advice(file):
        help = "name another one: `--patch FILE`"
        raise RLinfError("the advice is not written over another file", where=str(file), help=help)
    write_whole(file, "\n".join((f"{_MADE_BY}: {about}", *lines)) + "\n")


def _is_advice(file: Path) -> bool:
    with suppress(OSError), file.open("rb") as content:
        return content.read(len(_MADE_BY)) == _MADE_BY.encode()
    return False


def _extends(file: Path, base: str) -> list[str]:
    if base.startswith("recipe="):
        return [f"recipe: {json.dumps(base.partition('=')[2])}"]
    is_file = os.path.isfile(base)
    if not is_file and shipped_config(base) is not None:
        return [f"extends: {base}"]
    return [f"extends: {json.dumps(os.path.relpath(base, file.absolute().parent))}"]


def _tree(overrides: Sequence[str], changes: Mapping[str, Any]) -> list[str]:
    tree: dict[str, Any] = {}
    pairs = [(word.partition("=")[0], word.partition("=")[2]) for word in overrides]
    for key, text in [*pairs, *((key, json.dumps(value)) for key, value in changes.items())]:
        if key.startswith(("~", "+")) or "[" in key or '"' in key:
            raise ValueError(f"a file that extends another cannot have the override `{key}`")
        *parents, last = key.split(".")
        node = tree
        for parent in parents:
            below = node.setdefault(parent, {})
            if not isinstance(below, dict):
                raise ValueError(f"`{key}` changes a part of another override")
            node = cast("dict[str, Any]", below)
        if isinstance(node.get(last), dict):
            raise ValueError(f"`{key}` changes a part of another override")
        node[last] = text
    return _lines(tree, "")


def _lines(tree: Mapping[str, Any], indent: str) -> list[str]:
    lines: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", *_lines(cast("dict[str, Any]", value), f"{indent}  ")]
        else:
            lines.append(f"{indent}{key}: {value}")
    return lines


# The number of placements shown.
_SHOWN: Final = 5


def advice_text(advice: Advice, words: Sequence[str], patch: str | None) -> str:
    """Return the advice as text.

    Args:
        advice: the advice.
        words: the arguments of a command about the same job.
        patch: the file that was written, or None.
    """
    result = advice.result
    proven = "proven" if result.proven else "the first of which are not proven"
    left_out = f", {result.unfit} left out for memory" if result.unfit else ""
    left_out += f", {len(advice.faults)} refused by `rlinf validate`" if advice.faults else ""
    fixed = [f"{name}: left where it is" for name in advice.devices.fixed]
    lines = [
        f"now  {_place(advice, advice.now)}   {_seconds(advice.now)}{_idle(advice.now)}",
        f"best of {result.judged:,} legal placements{left_out}, {result.simulated} simulated, {proven}",
        *(
            f"  {number}  {_place(advice, judged)}   {_seconds(judged)}{_idle(judged)}"
            for number, judged in enumerate(advice.best[:_SHOWN], 1)
        ),
        *fixed,
        *_free(advice),
        *advice.refused,
        *dict.fromkeys(f"refused: {finding.message} [{finding.code}]" for finding in advice.faults),
        *_verdict(advice),
        *_doubts(advice, words),
    ]
    if patch is not None:
        lines.append(f"wrote {patch}: `{shlex.join(['rlinf', 'train', patch])}`")
    return "\n".join(lines)


def _verdict(advice: Advice) -> list[str]:
    change, leaner = advice.change, advice.leaner
    if change is not None and advice.blocked:
        return [
            f"another job holds accelerators of this placement: 1 is the fastest on free ones, {change.seconds:.3g} s"
        ]
    if change is not None:
        return [f"1 is {advice.now.seconds / change.seconds:.2f}x as fast as now"]
    best = advice.best[0] if advice.best else None
    if best is None and advice.faults:
        return ["`rlinf validate` refuses the fastest placements: no change advised"]
    if best is None:
        return ["no legal placement fits into memory" if advice.result.unfit else "no placement is legal"]
    if leaner is not None:
        freed = advice.now.ranked.arrangement.accelerators - leaner.ranked.arrangement.accelerators
        return [f"{_place(advice, leaner)} is about as fast as now, and frees {freed} accelerators"]
    if best.seconds >= advice.now.seconds * 0.999:
        return ["nothing to change: no legal placement is faster"]
    return ["1 is not surely better than now: no change advised"]


def _free(advice: Advice) -> list[str]:
    """Return lines on the free accelerators, and on the holders of the others."""
    if advice.free is None:
        return []
    ranges = [f"{format_ranks(numbers)} of {label}" for label, numbers in advice.free.ranges.items() if numbers]
    return [f"free now, in a row: {', '.join(ranges)}", *(f"held: {words}" for words in advice.free.holders)]


def _doubts(advice: Advice, words: Sequence[str]) -> list[str]:
    doubts: list[str] = []
    sizes = advice.durations.one_sized()
    if sizes:
        measure = shlex.join(["rlinf", "inspect", "placement", *words, "--measure"])
        known = "seconds are from proportional to no dependence"
        doubts.append(f"one size was seen of {', '.join(sizes)}: {known}; `{measure}` sees three")
    unseen = dict.fromkeys(text for judged in (advice.now, *advice.best[:1]) for text in judged.unseen)
    if unseen:
        doubts.append(f"not known: {'; '.join(unseen)}")
    doubts += [
        f"{run.name} was recorded on a busy machine: load {run.load:.0f} on {run.cpus} processors"
        for run in advice.runs
        if run.busy
    ]
    best = advice.best[0] if advice.best else None
    if (sizes or unseen) and best is not None and advice.change is None and best.seconds < advice.now.seconds:
        train = shlex.join(["rlinf", "train", *words, *as_overrides(advice, best.ranked.arrangement)])
        doubts.append(f"to decide, run a few steps of 1 and give both runs: `{train}`")
    return doubts


def _seconds(judged: Judged) -> str:
    return f"{judged.seconds:.3g} s a step ({judged.low:.3g} to {judged.high:.3g})"


def _idle(judged: Judged) -> str:
    busy = judged.ranked.step.busy
    if not busy:
        return ""
    used = [device for _, seats in judged.ranked.arrangement.seats for device in seats.devices if device is not None]
    shares = [busy.get(device, 0.0) for device in dict.fromkeys(used) if device in busy]
    return f"   accelerators idle {100 * (1 - sum(shares) / len(shares)):.0f} %" if shares else ""


def _place(advice: Advice, judged: Judged) -> str:
    """Return a placement in words, as in `env, rollout 0-3; actor 4-7; max_staleness 1`."""
    where = judged.ranked.arrangement
    several = len(advice.devices.kinds) > 1
    together: dict[str, list[str]] = {}
    for name, seats in where.seats:
        if seats.kind is not None:
            place = f"{seats.kind}:{ranks_of(seats)}" if several else ranks_of(seats)
            together.setdefault(place, []).append(name)
    parts = [f"{', '.join(names)} {place}" for place, names in together.items()]
    parts += [f"stages {where.stages}"] if where.stages > 1 else []
    parts += [f"max_staleness {where.staleness}"] if where.staleness else []
    return "; ".join(parts)


def advice_record(advice: Advice, patch: str | None) -> dict[str, Any]:
    """Return the advice as data: the seconds of steps, and the keys to change."""
    result = advice.result
    return {
        "schema": "rlinf.advice/1",
        "runs": [run.name for run in advice.runs],
        "now": _record(advice, advice.now),
        "best": [_record(advice, judged) for judged in advice.best],
        "legal": result.judged,
        "unfit": result.unfit,
        "simulated": result.simulated,
        "proven": result.proven,
        "change_advised": advice.change is not None,
        "leaner": None if advice.leaner is None else _record(advice, advice.leaner),
        "faults": [{"code": finding.code, "message": finding.message} for finding in advice.faults],
        "one_size": advice.durations.one_sized(),
        "refused": list(advice.refused),
        "free": None
        if advice.free is None
        else {label: list(numbers) for label, numbers in advice.free.ranges.items()},
        "blocked": advice.blocked,
        "patch": patch,
    }


def _record(advice: Advice, judged: Judged) -> dict[str, Any]:
    where: Arrangement = judged.ranked.arrangement
    return {
        "seconds": round(judged.seconds, 4),
        "low": round(judged.low, 4),
        "high": round(judged.high, 4),
        "bound": round(judged.ranked.bound, 4),
        "components": {
            name: {"group": None, "ranks": None}
            if seats.kind is None
            else {"group": advice.devices.groups[name][seats.kind], "ranks": ranks_of(seats)}
            for name, seats in where.seats
        },
        "stages": where.stages,
        "max_staleness": where.staleness,
        "accelerators": where.accelerators,
        "unseen": list(judged.unseen),
        "changes": changes_of(advice, where),
    }


_PATCH: Final = "advice.yaml"


def placement_advice(
    file: str,
    overrides: Sequence[str],
    assume: Sequence[str] | None,
    runs: str,
    staleness: int | None,
    patch: Path | None,
    *,
    free: bool = False,
) -> Result:
    """Return the advice on a file, and write an advised placement into `patch`.

    Args:
        file: a file, or a run whose file is meant.
        overrides, assume: the arguments of the command line.
        runs: names or folders of runs, separated by commas.
        staleness: the maximum number of steps that rollouts may run ahead; None: the file's.
        patch: the path of a file that extends `file`, written if a change is advised; None: `advice.yaml`.
        free: whether to use only accelerators that no job holds now.

    Raises:
        typer.BadParameter: the name of a run is empty.
        RLinfError: no advice is possible.
    """
    names = [run.strip() for run in runs.split(",")]
    if not all(names):
        raise typer.BadParameter("name the runs, separated by commas: `--advise RUN,RUN`", param_hint="'--advise'")
    name, patch = config_of(file), patch or Path(_PATCH)
    job = viewed(load(name, overrides, assume))
    parts = sound(job)
    check_apart(patch, parts.files, "--patch")
    layout = lay_out(parts, "placement", file, arguments=(*overrides, *assumed(assume)))
    holders = holders_of(parts, name) if free else {}
    usable = partial(free_of, topology=parts.topology, by_node=holders) if free else None
    advice = advise(job, parts, layout, read_runs(names, assume or ()), staleness, usable)
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
    """Return the advice without placements that the job's rules reject, as in `rlinf validate`."""
    kept: list[Judged] = []
    faults: list[Diagnostic] = []
    for judged in advice.best:
        job = viewed(load(file, [*overrides, *as_overrides(advice, judged.ranked.arrangement)], assume))
        if job.ok:
            kept.append(judged)
        else:
            faults.append(next(finding for finding in job.diagnostics if finding.severity is Severity.ERROR))
    return replace(advice, best=kept, faults=faults)

"""Advice as text and as data."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from rlinf_cli.advice.advice_patch import as_overrides, changes_of, ranks_of

if TYPE_CHECKING:
    from rlinf_cli.advice.advising import Advice, Judged
    from rlinf_core.advice.arrangements import Arrangement

# Placements that are shown, of those that are proven.
_SHOWN: Final = 5


def advice_text(advice: Advice, words: Sequence[str], patch: str | None) -> str:
    """Return the advice for people.

    Args:
        advice: the advice.
        words: the arguments of a command about the same job.
        patch: the file that was written, if one was.
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


def _doubts(advice: Advice, words: Sequence[str]) -> list[str]:
    doubts: list[str] = []
    sizes = advice.durations.one_sized()
    if sizes:
        doubts.append(f"one size was seen of {', '.join(sizes)}: seconds are from proportional to no dependence")
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
    """Return `env, rollout 0-3, actor 4-7, max_staleness 1`."""
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
    """Return the advice as data: seconds of steps, and the keys to be changed."""
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
            name: {"group": seats.kind, "ranks": None if seats.kind is None else ranks_of(seats)}
            for name, seats in where.seats
        },
        "stages": where.stages,
        "max_staleness": where.staleness,
        "accelerators": where.accelerators,
        "unseen": list(judged.unseen),
        "changes": changes_of(advice, where),
    }

"""Texts about a process that holds a device or waits for one, from its own reply, which is only displayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rlinf_core.config.diagnostics import visible
from rlinf_core.config.ranks import format_ranks
from rlinf_core.node.device_claims import LABEL, HolderInfo
from rlinf_core.suggest import clipped


def job_words(one: HolderInfo) -> str:
    """Return a text for its job: the run folder (relative if below the working folder), or the command."""
    about = one.about or {}
    run, command = _text(about, "run"), _text(about, "command")
    if run:
        return _shown(run)
    if command:
        return f"{command}, process {one.pid}"
    if one.stopped:
        return f"process {one.pid}, which is stopped (`kill -CONT {one.pid}` there lets it go on)"
    return f"process {one.pid}, which does not answer or has ended" if one.pid else "a process that does not answer"


def device_words(one: HolderInfo) -> str:
    """Return a text for its device: `NVIDIA 0`."""
    return device_label(one).replace(":", " ", 1)


def device_label(one: HolderInfo) -> str:
    """Return the readable name of the device, `NVIDIA:0`, as its holder tells; else the name in the claim."""
    label = _text(one.about or {}, LABEL)
    vendor, _, _ = one.device.partition(":")
    return label if label.startswith(f"{vendor}:") else visible(one.device)


def holder_record(one: HolderInfo) -> dict[str, Any]:
    """Return the facts about a holder as plain data."""
    about = one.about or {}
    return {
        "device": device_label(one) or None,
        "identity": visible(one.device) or None,
        "pid": one.pid,
        "user": one.user,
        "answers": one.about is not None,
        "stopped": one.stopped,
        "run": _text(about, "run") or None,
        "command": _text(about, "command") or None,
        "host": _text(about, "host") or None,
        "since": since(one),
        "step": _number(about, "step"),
        "steps": _number(about, "total"),
        "seconds_left": _number(about, "left"),
        "waits_for": waits_for(one) or None,
    }


def progress_words(one: HolderInfo) -> str:
    """Return its progress, for example `step 12 of 30, about 2 min`; empty if unknown."""
    about = one.about or {}
    step, total, left = _number(about, "step"), _number(about, "total"), _number(about, "left")
    if step is None:
        return "no step yet" if about else ""
    text = f"step {step:.0f}" if total is None else f"step {step:.0f} of {total:.0f}"
    return text if left is None else f"{text}, about {rough_seconds(left)}"


def held_words(rank: int, devices: Mapping[str, str], others: Sequence[HolderInfo]) -> str:
    """Return a text such as `accelerators 0-1 of node 0: runs/a, step 12 of 30, about 2 min`, for each holder.

    Args:
        devices: the readable name of each device, by its name in claims.
    """
    by_holder: dict[int, list[HolderInfo]] = {}
    for one in others:
        by_holder.setdefault(one.pid, []).append(one)
    texts: list[str] = []
    for holdings in by_holder.values():
        what = _together([devices.get(one.device, one.device) for one in holdings])
        parts = [job_words(holdings[0]), progress_words(holdings[0])]
        texts.append(f"{what} of node {rank}: {', '.join(part for part in parts if part)}")
    return "; ".join(texts) or f"{_together(list(devices.values()))} of node {rank}: processes that end or start"


def since(one: HolderInfo) -> float | None:
    """Return the time since which it holds or waits, in seconds since 1970; None if unknown."""
    return _number(one.about or {}, "since")


def waits_for(one: HolderInfo) -> str:
    """Return its description of what it waits for, or an empty text."""
    return _text(one.about or {}, "waits_for")


def rough_seconds(seconds: float) -> str:
    """Return a rounded duration: `40 s`, `2 min`, `3 h`. Estimates do not deserve the precision of `spell_seconds`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    return f"{round(seconds / 60)} min" if seconds < 5400 else f"{round(seconds / 3600)} h"


def _together(names: Sequence[str]) -> str:
    names = list(dict.fromkeys(names))
    numbers = [name.removeprefix("accelerator ") for name in names]
    if len(names) > 1 and all(number.isdecimal() for number in numbers):
        return f"accelerators {format_ranks(sorted(map(int, numbers)))}"
    return ", ".join(names)


def _text(about: Mapping[str, Any], key: str) -> str:
    value = about.get(key)
    return clipped(visible(value)) if isinstance(value, str) else ""


def _number(about: Mapping[str, Any], key: str) -> float | None:
    value = about.get(key)
    return float(value) if isinstance(value, int | float) and 0 <= value < 1e12 else None


def _shown(run: str) -> str:
    try:
        return str(Path(run).relative_to(Path.cwd()))
    except (ValueError, OSError):
        return run

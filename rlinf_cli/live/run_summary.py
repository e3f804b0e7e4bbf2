"""The summary of a finished run: a few lines of text, and the format `rlinf.train/1`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_core.config.diagnostics import Diagnostic
from rlinf_core.config.tree import format_path
from rlinf_core.process.known_secrets import hidden
from rlinf_core.runners.storage.first_contact import FILE, comparisons_text, read_comparisons

SCHEMA = "rlinf.train/1"


# The number of keys without effect that a summary names.
_NAMED: Final = 4


def summary_text(
    progress: RunProgress,
    folder: Path,
    report: Path | None = None,
    unread: Sequence[Diagnostic] = (),
    causes: Sequence[tuple[str, str]] = (),
) -> str:
    """Return the summary of a finished run.

    Args:
        unread: the keys of the run's file without effect.
        causes: the short answer of `rlinf why`: labels and lines.
    """
    rows = [("steps", _steps(progress))]
    if progress.evaluation is not None:
        headline = labels.figures_text(labels.headlines(progress.evaluation.metrics, "eval"))
        rows.append(("evaluation", f"{headline} (step {progress.evaluation.step})"))
    training = labels.headlines(progress.metrics, "env", "rollout")
    if training:
        rows.append(("training", labels.figures_text(training)))
    if progress.restart is not None:
        rows.append(("restarts", f"{progress.restarts}, the last because {hidden(progress.restart.reason)}"))
    if progress.checkpoint is not None:
        rows.append(("checkpoint", shown(progress.checkpoint.path)))
    if progress.curve is not None:
        rows.append(("curve", shown(progress.curve)))
    if unread:
        named = ", ".join(
            f"{format_path(diagnostic.path)} ({diagnostic.span.source.name}:{diagnostic.span.begin.line})"
            for diagnostic in unread[:_NAMED]
        )
        others = f" and {len(unread) - _NAMED} more; see `rlinf validate`" if len(unread) > _NAMED else ""
        rows.append(("no effect", f"{named}{others}"))
    if checks := read_comparisons(folder):
        rows.append(("first contact", f"{comparisons_text(checks)} ({FILE})"))
    rows += [(label, hidden(line)) for label, line in causes]
    if causes:
        rows.append(("", f"`rlinf why {shlex.quote(shown(folder))}` shows the evidence, and what to do"))
    if report is not None:
        rows.append(("report", shown(report)))
    rows.append(("run folder", shown(folder)))
    width = max(len(label) for label, _ in rows)
    lines = [console.style("finished", "green")]
    return "\n".join([*lines, *(f"  {label.ljust(width)}  {text}" for label, text in rows)])


def summary_record(
    status: str,
    recipe: str,
    folder: Path,
    progress: RunProgress | None = None,
    *,
    reason: str = "",
    pid: int | None = None,
    report: Path | None = None,
    unread: Sequence[Diagnostic] = (),
) -> dict[str, Any]:
    """Return the format `rlinf.train/1`. Seconds are wall-clock."""
    begun = progress if progress is not None and progress.started is not None else None
    evaluation, checkpoint = (begun.evaluation, begun.checkpoint) if begun else (None, None)
    return {
        "schema": SCHEMA,
        "status": status,
        "reason": hidden(reason),
        "recipe": recipe,
        "folder": str(folder),
        "pid": os.getpid() if pid is None else pid,
        "step": progress.step if progress else 0,
        "last_step": begun.total if begun else None,
        "launch_seconds": round(progress.launch_seconds, 3) if progress else None,
        "seconds": round(begun.train_seconds, 3) if begun else 0.0,
        "metrics": dict(sorted(begun.metrics.items())) if begun else {},
        "evaluation": {"step": evaluation.step, "metrics": dict(sorted(evaluation.metrics.items()))}
        if evaluation
        else None,
        "checkpoint": str(checkpoint.path) if checkpoint else None,
        "curve": str(progress.curve) if progress and progress.curve else None,
        "report": str(report) if report else None,
        "restarts": begun.restarts if begun else 0,
        "no_effect": [
            {"key": format_path(diagnostic.path), "place": str(diagnostic.span), "message": diagnostic.message}
            for diagnostic in unread
        ],
    }


def shown(path: Path) -> str:
    """Return a path as a user would type it: relative to the working folder if it is below it."""
    try:
        return str(path.relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(path)


def _steps(progress: RunProgress) -> str:
    first = progress.started.first_step if progress.started else 1
    done = progress.step - first + 1
    seconds = progress.train_seconds
    if done < 1:
        return f"none, {labels.clock(seconds)}"
    again = f", {done} of them now" if first > 1 else ""
    return f"{progress.step}{again}, in {labels.clock(seconds)} ({labels.speed(done / max(seconds, 1e-9))})"

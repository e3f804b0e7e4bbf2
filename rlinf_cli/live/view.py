"""The base class of the views of a run, the plain view for pipes and files, and the summary of a finished run."""

from __future__ import annotations

import os
import shlex
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Self

from rlinf_cli import console
from rlinf_cli.console import shown
from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_core.config.diagnostics import Diagnostic
from rlinf_core.config.tree import format_path
from rlinf_core.process.known_secrets import hidden
from rlinf_core.process.proc import sigterm_deferred
from rlinf_core.runners import events
from rlinf_core.runners.storage.first_contact import FILE, comparisons_text, read_comparisons

ENDING = "ending; press Ctrl-C again to end at once"


class View(ABC):
    """A view of a run, active within its `with` block. Events come from one thread; views may draw from others.

    Args:
        progress: the run's state; it takes an event before `show` is called with it.
    """

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress

    @abstractmethod
    def show(self, event: events.Event) -> None:
        """Show the changes caused by `event`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Finish drawing and restore the streams."""
        return


def line_of(event: events.Event, progress: RunProgress) -> str | None:
    """Return an event as a self-contained line, or None if it needs no line.

    Args:
        progress: the state after the event.
    """
    match event:
        case events.RunStarted():
            return _start_line(event, progress)
        case events.Waiting():
            if event.again:
                return None
            limit = f", at most {labels.duration(event.seconds)}" if event.seconds is not None else ""
            return f"waiting for {event.what}{limit}{f'; {event.instead}' if event.instead else ''}"
        case events.StepFinished():
            return step_line(progress)
        case events.Evaluated():
            return f"evaluated at step {event.step}: {labels.figures_text(labels.headlines(event.metrics, 'eval'))}"
        case events.CheckpointSaved():
            return None if event.snapshot else f"saved {event.path.name}"
        case events.RunRestarted():
            back = f"back to step {event.step}" if event.step else "from the beginning, without a checkpoint"
            return f"restart {event.restart} of {event.max_restarts}, {back}: {event.reason}"
        case events.WorkersRelaunched():
            return f"restart {event.restart} of {event.max_restarts}: {event.reason}: {relaunched(event)}"
        case events.ItemsResumed():
            return events.fates_line(event.fates)
        case events.NodesChanged():
            return "; ".join((event.text, *event.details))
        case _:
            return None


def relaunched(event: events.WorkersRelaunched) -> str:
    """Describe a relaunch, as in `started again in 2.1 s; done again: the rollout of step 3`."""
    again = f"; done again: {event.repeated}" if event.repeated else ""
    return f"started again in {event.seconds:.1f} s{again}"


def step_line(progress: RunProgress) -> str:
    """Return the progress, as in `step 12/300  success 0.02, return 1.23  7.1 steps/s  0:02, 0:41 left`."""
    total = f"/{progress.total}" if progress.total is not None else ""
    parts = [f"step {progress.step}{total}"]
    headlines = labels.training(progress.metrics) + labels.conversations(progress.metrics)
    if headlines:
        parts.append(labels.figures_text(headlines))
    if progress.steps_per_second is not None:
        parts.append(labels.speed(progress.steps_per_second))
    parts.append(times(progress))
    return "  ".join(parts)


def times(progress: RunProgress) -> str:
    """Return the elapsed and the remaining time, as in `0:02, 0:41 left`."""
    left = progress.seconds_left
    gone = labels.clock(progress.train_seconds)
    return gone if left is None else f"{gone}, {labels.clock(left)} left"


def processes(started: events.RunStarted) -> str:
    """Return the number of processes by component, as in `actor 1, rollout 2, env 2`."""
    return ", ".join(f"{name} {count}" for name, count in started.components.items())


def _start_line(event: events.RunStarted, progress: RunProgress) -> str:
    text = f"started in {labels.duration(progress.launch_seconds)}"
    if event.components:
        text += f": {processes(event)}"
    text += f"; {_steps(event)}"
    return f"{text}; continued from {shown(event.resumed_from)}" if event.resumed_from else text


def _steps(event: events.RunStarted) -> str:
    if event.last_step is None:
        return f"from step {event.first_step}"
    if event.last_step < event.first_step:
        # The run only evaluates, or was already complete.
        return "no steps left to train"
    return f"steps {event.first_step} to {event.last_step}"


# Seconds between two step lines; the first and the last step always get one.
_STEPS_EVERY = 5.0
# After this many silent seconds, a line reports the current phase.
_SILENCE = 30.0


class PlainView(View):
    """A line for each event, and for steps at readable intervals; for every step with `--verbose`."""

    def __init__(self, progress: RunProgress, write: Callable[[str], None] = console.message) -> None:
        super().__init__(progress)
        self._write = write
        self._clock = progress.clock
        self._last_line = self._clock()
        self._last_step_line: float | None = None
        self._unsaid: int | None = None
        self._said_ending = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._ticker = threading.Thread(target=self._tick, name="rlinf-plain-view", daemon=True)

    def __enter__(self) -> Self:
        with sigterm_deferred():
            self._ticker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._ticker.join()

    def show(self, event: events.Event) -> None:
        with self._lock:
            self._show(event)

    def _show(self, event: events.Event) -> None:
        if isinstance(event, events.StepFinished) and not self._is_due():
            self._unsaid = event.step
            return
        if isinstance(event, events.RunFinished | events.Evaluated) and self._unsaid is not None:
            self._line(step_line(self.progress))
            self._unsaid, self._last_step_line = None, self._clock()
        line = line_of(event, self.progress)
        if line is not None:
            self._line(line)
        if isinstance(event, events.StepFinished):
            self._unsaid, self._last_step_line = None, self._clock()

    def _is_due(self) -> bool:
        last = self._last_step_line
        return console.verbosity.verbose or last is None or self._clock() - last >= _STEPS_EVERY

    def _tick(self) -> None:
        while not self._ended.wait(1.0):
            self.break_silence()

    def break_silence(self) -> None:
        """Report a requested end once; report the current activity after a long silence."""
        with self._lock:
            if self.progress.ending and not self._said_ending:
                self._said_ending = True
                self._line(ENDING)
            elif self._clock() - self._last_line >= _SILENCE:
                self._line(still_line(self.progress))

    def _line(self, text: str) -> None:
        self._last_line = self._clock()
        self._write(text)


def still_line(progress: RunProgress) -> str:
    """Return a line on the current activity of a silent run."""
    if progress.waiting is not None:
        limit = progress.waiting.seconds
        of = f" of at most {labels.duration(limit)}" if limit is not None else ""
        return f"still waiting for {progress.waiting.what}: {labels.duration(progress.waiting_seconds)}{of}"
    doing = labels.doing(progress.phase, progress.done)
    step = f"after step {progress.step}, " if progress.started is not None else ""
    return f"{step}{doing}{',' if progress.done else ''} for {labels.duration(progress.phase_seconds)}"


SCHEMA: Final = "rlinf.train/1"
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
    rows = [("steps", _taken(progress))]
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


def _taken(progress: RunProgress) -> str:
    first = progress.started.first_step if progress.started else 1
    done = progress.step - first + 1
    seconds = progress.train_seconds
    if done < 1:
        return f"none, {labels.clock(seconds)}"
    again = f", {done} of them now" if first > 1 else ""
    return f"{progress.step}{again}, in {labels.clock(seconds)} ({labels.speed(done / max(seconds, 1e-9))})"

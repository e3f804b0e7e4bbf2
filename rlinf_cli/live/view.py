"""The base class of the views of a run, the lines that they share, and the plain view for pipes and files."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Self

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.run_summary import shown
from rlinf_core.process.proc import sigterm_deferred
from rlinf_core.runners import events

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

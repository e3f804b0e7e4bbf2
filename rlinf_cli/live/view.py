"""The base class of the views of a run, and the lines that they share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self

from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.run_summary import shown
from rlinf_core.runners.events import (
    CheckpointSaved,
    Evaluated,
    Event,
    ItemsResumed,
    NodesChanged,
    RunRestarted,
    RunStarted,
    StepFinished,
    Waiting,
    WorkersRelaunched,
    fates_line,
)

ENDING = "ending; press Ctrl-C again to end at once"


class View(ABC):
    """A view of a run, active within its `with` block. Events come from one thread; views may draw from others.

    Args:
        progress: the run's state; it takes an event before `show` is called with it.
    """

    def __init__(self, progress: RunProgress) -> None:
        self.progress = progress

    @abstractmethod
    def show(self, event: Event) -> None:
        """Show the changes caused by `event`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Finish drawing and restore the streams."""
        return


def line_of(event: Event, progress: RunProgress) -> str | None:
    """Return an event as a self-contained line; None for one that needs no line.

    Args:
        progress: the state after the event.
    """
    match event:
        case RunStarted():
            return _start_line(event, progress)
        case Waiting():
            limit = f", at most {labels.duration(event.seconds)}" if event.seconds is not None else ""
            return f"waiting for {event.what}{limit}"
        case StepFinished():
            return step_line(progress)
        case Evaluated():
            return f"evaluated at step {event.step}: {labels.figures_text(labels.headlines(event.metrics, 'eval'))}"
        case CheckpointSaved():
            return None if event.snapshot else f"saved {event.path.name}"
        case RunRestarted():
            back = f"back to step {event.step}" if event.step else "from the beginning, without a checkpoint"
            return f"restart {event.restart} of {event.max_restarts}, {back}: {event.reason}"
        case WorkersRelaunched():
            return f"restart {event.restart} of {event.max_restarts}: {event.reason}: {relaunched(event)}"
        case ItemsResumed():
            return fates_line(event.fates)
        case NodesChanged():
            return "; ".join((event.text, *event.details))
        case _:
            return None


def relaunched(event: WorkersRelaunched) -> str:
    """Return `started again in 2.1 s; done again: the rollout of step 3`."""
    again = f"; done again: {event.repeated}" if event.repeated else ""
    return f"started again in {event.seconds:.1f} s{again}"


def step_line(progress: RunProgress) -> str:
    """Return `step 12/300  success 0.02, return 1.23  7.1 steps/s  0:02, 0:41 left`."""
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


def processes(started: RunStarted) -> str:
    """Return `actor 1, rollout 2, env 2`."""
    return ", ".join(f"{name} {count}" for name, count in started.components.items())


def _start_line(event: RunStarted, progress: RunProgress) -> str:
    text = f"started in {labels.duration(progress.launch_seconds)}"
    if event.components:
        text += f": {processes(event)}"
    text += f"; {_steps(event)}"
    return f"{text}; continued from {shown(event.resumed_from)}" if event.resumed_from else text


def _steps(event: RunStarted) -> str:
    if event.last_step is None:
        return f"from step {event.first_step}"
    if event.last_step < event.first_step:
        # Evaluation only, or a run that was already complete.
        return "no steps left to train"
    return f"steps {event.first_step} to {event.last_step}"

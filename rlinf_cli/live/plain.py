"""The plain view of a run: lines for pipes, files and dumb terminals."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import TracebackType
from typing import Self

from rlinf_cli.console import console
from rlinf_cli.live import labels
from rlinf_cli.live.progress import RunProgress
from rlinf_cli.live.view import ENDING, View, line_of, step_line
from rlinf_core.process.signal_mask import sigterm_deferred
from rlinf_core.runners.events import Evaluated, Event, RunFinished, StepFinished

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._ticker.join()

    def show(self, event: Event) -> None:
        with self._lock:
            self._show(event)

    def _show(self, event: Event) -> None:
        if isinstance(event, StepFinished) and not self._is_due():
            self._unsaid = event.step
            return
        if isinstance(event, RunFinished | Evaluated) and self._unsaid is not None:
            self._line(step_line(self.progress))
            self._unsaid, self._last_step_line = None, self._clock()
        line = line_of(event, self.progress)
        if line is not None:
            self._line(line)
        if isinstance(event, StepFinished):
            self._unsaid, self._last_step_line = None, self._clock()

    def _is_due(self) -> bool:
        last = self._last_step_line
        return console.verbosity.verbose or last is None or self._clock() - last >= _STEPS_EVERY

    def _tick(self) -> None:
        while not self._ended.wait(1.0):
            self.break_silence()

    def break_silence(self) -> None:
        """Report the current activity after a long silence, or a slow end."""
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

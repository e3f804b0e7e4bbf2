"""Ctrl-C and SIGTERM while a job runs: the first ends it cleanly, the second at once."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from rlinf_cli import console
from rlinf_cli.exit_codes import ExitCode

# How long a job may take to end cleanly.
GRACE_SECONDS = 20.0


class Interrupts:
    """Within the block the first signal raises in the main thread, `KeyboardInterrupt` or `SystemExit`, and a job can
    give back what it holds; the second one, or the grace period, ends the process as it is.

    Args:
        on_first: called in the signal handler of the first one: it must neither wait nor print.
        before_hard: what is still to be done before the process ends hard: fast, and without an exception.
        grace: seconds from the first signal to the hard end.

    Attributes:
        code: how the process ends because of a signal, or None before one.
    """

    def __init__(
        self,
        on_first: Callable[[], None],
        before_hard: Callable[[ExitCode], None],
        grace: float = GRACE_SECONDS,
    ) -> None:
        self._on_first = on_first
        self._before_hard = before_hard
        self._grace = grace
        self._earlier: dict[signal.Signals, Any] = {}
        self._timer: threading.Timer | None = None
        self.code: ExitCode | None = None

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            earlier = signal.getsignal(number)
            # Under nohup a hangup is nobody's business, and stays so.
            if earlier is not signal.SIG_IGN:
                self._earlier[number] = earlier
                signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)
        if self._timer is not None:
            self._timer.cancel()

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.code is not None:
            self.end_hard()
        self.code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        self._on_first()
        self._timer = threading.Timer(self._grace, self._give_up)
        self._timer.daemon = True
        self._timer.start()
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(ExitCode.TERMINATED)

    def _give_up(self) -> None:
        console.error_block(f"the job did not end within {self._grace:g} s", do="it is ended hard")
        self.end_hard()

    def end_hard(self) -> None:
        """End this process now; what it started outside itself is ended by whoever watches it."""
        code = self.code or ExitCode.TERMINATED
        self._before_hard(code)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except OSError:
                continue
        os._exit(code)

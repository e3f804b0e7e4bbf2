"""Signals that end a command: it ends with their exit code, and a run ends cleanly, at the second signal at once.

An exception that a signal handler raises can be lost: while a module is imported it may become another one, and in
callbacks of C code it is only printed. So the signal is remembered besides, nothing is raised in such places, and a run
is told again at its next event.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import CodeType, FrameType, TracebackType
from typing import Any, NoReturn, Self

from rlinf_cli.console import console
from rlinf_cli.exit_codes import ExitCode
from rlinf_core.process.signal_mask import SCHEDULER_WARNINGS, sigterm_deferred

# SIGTSTP and SIGCONT stop a run and let it go on, as they do with any process.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *SCHEDULER_WARNINGS)
# How long a job may take to end cleanly.
GRACE_SECONDS = 20.0
# How long it may take longer once it writes a checkpoint.
SAVING_SECONDS = 60.0
# How long the end of the step under way is waited for.
STEP_SECONDS = 10.0
_POKE_SECONDS = 0.05

# While nothing has started yet but modules are imported, that is not waited for any longer.
_IMPORT_SECONDS = 0.5
_IMPORTS = "<frozen importlib"
# Functions whose exceptions Python prints and drops: finalizers, and what logging registers for parents at `os.fork`.
_LOSING = frozenset({"__del__", "_acquireLock", "_releaseLock"})


class CommandSignals:
    """Record of the signals that tell the command under way to end.

    Attributes:
        code: the exit code of the first signal, or None before one.
    """

    def __init__(self) -> None:
        self.code: ExitCode | None = None
        self.process = os.getpid()

    def take(self, number: int, frame: FrameType | None) -> None:
        """End the command by an exception, during an import at once."""
        if _is_forked(self.process, number):
            return
        code = _code_of(number)
        if self.code is None:
            self.code = code
        if is_importing(frame):
            # A command that still imports holds nothing, and the exception would not come out of it as it is.
            os._exit(code)
        _raise(code)

    def check(self) -> None:
        """End the command if a signal came whose exception was lost."""
        if self.code is not None:
            _raise(self.code)


command_signals = CommandSignals()


@contextmanager
def ending_commands() -> Generator[None, None, None]:
    """Within the block signals end the command. What is ignored, as in the background, stays so."""
    command_signals.code = None
    command_signals.process = os.getpid()
    earlier: dict[signal.Signals, Any] = {}
    for number in ENDING_SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            earlier[number] = signal.signal(number, command_signals.take)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


class Interrupts:
    """End a run at the first signal as cleanly as the grace period allows, at the second at once.

    `KeyboardInterrupt` or `SystemExit` is raised in the main thread, within one function only: outside of it a signal
    is remembered, so that how the run ended can be written undisturbed.

    Args:
        within: the code of the function that runs the job.
        on_first: called in the signal handler of the first signal: it must neither wait nor print.
        patience: seconds that what is under way is waited for, until `check` is called, before anything is raised;
            called like `on_first`.
        holds_nothing: whether the process may end without any cleaning up.
        before_hard: what is still to be done before the process ends hard: fast, and without an exception.
        grace: seconds from the first signal to the hard end.

    Attributes:
        code: how the process ends because of a signal, or None before one.
    """

    def __init__(
        self,
        within: CodeType,
        on_first: Callable[[], None],
        patience: Callable[[], float],
        holds_nothing: Callable[[], bool],
        before_hard: Callable[[ExitCode], None],
        grace: float = GRACE_SECONDS,
    ) -> None:
        self._within = within
        self._on_first = on_first
        self._patience = patience
        self._holds_nothing = holds_nothing
        self._before_hard = before_hard
        self._grace = grace
        self._earlier: dict[signal.Signals, Any] = {}
        self._process = os.getpid()
        # Started before any signal: a handler must not start threads, whose lock the main thread may hold.
        self._watch = threading.Thread(target=self._watch_end, name="rlinf-interrupts", daemon=True)
        self._came = threading.Event()
        self._left = threading.Event()
        self._number = signal.SIGTERM
        self._poked = False
        self._raised = False
        self._imports = False
        # Moments: of the first signal, from which on it may raise, and at which the process ends hard.
        self._began = self._raise_at = self._hard_at = 0.0
        self.code: ExitCode | None = None

    def __enter__(self) -> Self:
        with sigterm_deferred():
            self._watch.start()
        for number in ENDING_SIGNALS:
            earlier = signal.getsignal(number)
            # Under nohup a hangup is nobody's business, and stays so.
            if earlier is not signal.SIG_IGN:
                self._earlier[number] = earlier
                signal.signal(number, self._take)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._left.set()
        self._came.set()
        for number, earlier in self._earlier.items():
            signal.signal(number, earlier)

    def check(self, *, again: bool = False) -> None:
        """Raise what the first signal has not raised yet, at a moment that suits the run.

        Args:
            again: raise it also where it was raised before, and was lost.
        """
        if self.code is not None and (again or not self._raised):
            self._end_run()

    def extend(self) -> None:
        """Give a run that is to end, and has begun to write a checkpoint, the time to finish it."""
        now = time.monotonic()
        self._raise_at = max(self._raise_at, now + SAVING_SECONDS)
        self._hard_at = max(self._hard_at, self._raise_at + self._grace / 2)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if _is_forked(self._process, number):
            return
        if self._poked:
            self._poked = False
        elif self.code is not None:
            self.end_hard()
        else:
            self._number = signal.Signals(number)
            self._began = now = time.monotonic()
            self._raise_at = now + self._patience()
            self._hard_at = max(now + self._grace, self._raise_at + self._grace / 2)
            self.code = _code_of(number)
            self._on_first()
            self._came.set()
        if not self._raised and time.monotonic() >= self._raise_at and self._is_interruptible(frame):
            self._end_run()

    def _end_run(self) -> NoReturn:
        self._raised = True
        _raise(self.code or ExitCode.TERMINATED)

    def _is_interruptible(self, frame: FrameType | None) -> bool:
        self._imports = is_importing(frame)
        if self._imports or (frame is not None and frame.f_code.co_name in _LOSING):
            return False
        return _holds(frame, lambda each: each.f_code is self._within)

    def _watch_end(self) -> None:
        """Have the handler look again until it could raise, and end the process when the grace period is over."""
        self._came.wait()
        while not self._left.wait(_POKE_SECONDS):
            now = time.monotonic()
            if now >= self._hard_at:
                console.error_block(f"the job did not end within {now - self._began:.0f} s", do="it is ended hard")
                self.end_hard()
            if not self._raised and now >= self._raise_at:
                if self._imports and now >= self._began + _IMPORT_SECONDS and self._holds_nothing():
                    self.end_hard()
                self._poked = True
                signal.pthread_kill(threading.main_thread().ident or 0, self._number)

    def end_hard(self) -> None:
        """End this process now; what it started outside itself is ended by whoever watches it."""
        code = self.code or ExitCode.TERMINATED
        self._before_hard(code)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, RuntimeError):
                continue  # nobody reads it any more, or it is just being written
        os._exit(code)


def _is_forked(process: int, number: int) -> bool:
    """Return whether this process was forked from the one that handles signals, and is no program of its own yet.

    Ctrl-C reaches the parent, too, which ends its children; any other signal does there what it does by default. An
    exception would be lost in what packages register for the child at `os.fork`, and printed.
    """
    if os.getpid() == process:
        return False
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return True


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported at `frame`."""
    return _holds(frame, lambda each: each.f_code.co_filename.startswith(_IMPORTS))


def _holds(frame: FrameType | None, condition: Callable[[FrameType], bool]) -> bool:
    while frame is not None:
        if condition(frame):
            return True
        frame = frame.f_back
    return False


def _code_of(number: int) -> ExitCode:
    return ExitCode(128 + number)


def _raise(code: ExitCode) -> NoReturn:
    if code is ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    raise SystemExit(code)

"""The handling of terminating signals: exit codes, and the end of a run, clean at a signal, hard at a second Ctrl-C.

An exception raised by a signal handler can be lost: an import may replace it, and callbacks from C code only print it.
Therefore the signal is also recorded, nothing is raised in such places, and a run checks again at its next event.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from enum import IntEnum
from types import CodeType, FrameType
from typing import NoReturn, Self

from rlinf_cli import console
from rlinf_core.errors import ClusterError, ConfigError, PlacementError, RLinfError
from rlinf_core.process.proc import SCHEDULER_WARNINGS, sigterm_deferred


class ExitCode(IntEnum):
    """The exit status that the shell sees."""

    OK = 0
    """Done; warnings do not change that."""
    FAILED = 1
    """The job or the operation failed, or rlinf itself has a bug."""
    INVALID = 2
    """Wrong usage, or a file that is invalid, missing or unreadable."""
    UNREACHABLE = 3
    """The cluster is not reachable or not whole."""
    HUNG_UP = 129
    """SIGHUP: the terminal was closed."""
    INTERRUPTED = 130
    """Ctrl-C."""
    USER_SIGNAL_1 = 138
    """SIGUSR1, as schedulers send before a job's time is over."""
    USER_SIGNAL_2 = 140
    """SIGUSR2, likewise."""
    TERMINATED = 143
    """SIGTERM."""
    CPU_LIMIT = 152
    """SIGXCPU: the limit of processor time is near."""


# The first matching class decides.
_BY_ERROR: tuple[tuple[type[RLinfError], ExitCode], ...] = (
    (ConfigError, ExitCode.INVALID),
    (PlacementError, ExitCode.INVALID),
    (ClusterError, ExitCode.UNREACHABLE),
)


def code_of(error: RLinfError) -> ExitCode:
    """Return the exit code of a command that ends with `error`."""
    return next((code for class_, code in _BY_ERROR if isinstance(error, class_)), ExitCode.FAILED)


# SIGTSTP and SIGCONT suspend and resume a run, as with any process.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, *SCHEDULER_WARNINGS)
# Seconds for a clean end of a job.
GRACE_SECONDS = 20.0
# Seconds for a checkpoint that the job writes meanwhile.
SAVING_SECONDS = 60.0
# Seconds to wait for the end of the current step.
STEP_SECONDS = 10.0
_POKE_SECONDS = 0.05

# Seconds to wait for imports at startup.
_IMPORT_SECONDS = 0.5
_IMPORTS = "<frozen importlib"
# Functions whose exceptions Python prints and drops: finalizers, and logging's `os.fork` hooks.
_LOSING = frozenset({"__del__", "_acquireLock", "_releaseLock"})


class CommandSignals:
    """The record of the terminating signals of the current command.

    Attributes:
        code: the exit code for the first signal, or None before it.
    """

    def __init__(self) -> None:
        self.code: ExitCode | None = None
        self.process = os.getpid()
        self._on_first: Callable[[], object] | None = None

    @contextmanager
    def calling(self, on_first: Callable[[], object]) -> Generator[None, None, None]:
        """Make the first signal within the block call `on_first` in the handler; of later ones only Ctrl-C raises."""
        self._on_first = on_first
        try:
            yield
        finally:
            self._on_first = None

    @contextmanager
    def cancelling_task(self) -> Generator[None, None, None]:
        """Let the first signal within the block cancel the current task instead of raising.

        An exception raised while asyncio starts a process would lose that process, and leave it running.
        """
        import asyncio

        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        with self.calling(lambda: task and loop.call_soon_threadsafe(task.cancel)):
            yield

    def take(self, number: int, frame: FrameType | None) -> None:
        """End the command with an exception, or at once during an import."""
        if _is_forked(self.process, number):
            return
        code = ExitCode(128 + number)
        if self.code is None:
            self.code = code
        if is_importing(frame):
            # A command that is still importing holds no resources, and the import could replace an exception.
            os._exit(code)
        if self._on_first is None or (self._on_first is _ends_already and number == signal.SIGINT):
            _raise(code)
        on_first, self._on_first = self._on_first, _ends_already
        on_first()

    def check(self) -> None:
        """End the command if the exception of a signal was lost."""
        if self.code is not None:
            _raise(self.code)


def _ends_already() -> None:
    """Do nothing at a further signal, see `Interrupts`."""


command_signals = CommandSignals()


@contextmanager
def ending_commands() -> Generator[None, None, None]:
    """Make terminating signals end the command within the block."""
    command_signals.code = None
    command_signals.process = os.getpid()
    with _handled_by(command_signals.take):
        yield


@contextmanager
def _handled_by(handler: Callable[[int, FrameType | None], None]) -> Generator[None, None, None]:
    """Handle terminating signals within the block. Ignored ones, as under nohup or in the background, stay ignored."""
    numbers = [number for number in ENDING_SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    earlier = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, before in earlier.items():
            signal.signal(number, before)


class Interrupts:
    """A handler that ends a run cleanly at the first signal, within a grace period, and at once at a later Ctrl-C.

    Other signals may come twice without anybody's impatience: a closing terminal sends SIGHUP from shell and kernel,
    and a scheduler SIGTERM after its warning. A checkpoint that is being written then must not be lost.

    `KeyboardInterrupt` or `SystemExit` is raised in the main thread, and only within one function: elsewhere a signal
    is only recorded, so that the end status can be written undisturbed.

    Args:
        within: the code object of the function that runs the job.
        on_first: called in the handler of the first signal; it must neither wait nor print.
        patience: returns the seconds to wait for `check` before raising; called like `on_first`.
        holds_nothing: whether the process may end without cleanup.
        before_hard: called before a hard end; it must be fast and not raise.

    Attributes:
        code: the exit code for the first signal, or None before it.
    """

    def __init__(
        self,
        within: CodeType,
        on_first: Callable[[], None],
        patience: Callable[[], float],
        holds_nothing: Callable[[], bool],
        before_hard: Callable[[ExitCode], None],
    ) -> None:
        self._within = within
        self._on_first = on_first
        self._patience = patience
        self._holds_nothing = holds_nothing
        self._before_hard = before_hard
        self._handled = ExitStack()
        self._process = os.getpid()
        # Started before any signal: a handler must not start threads, as the main thread may hold the lock for that.
        self._watch = threading.Thread(target=self._watch_end, name="rlinf-interrupts", daemon=True)
        self._came = threading.Event()
        self._left = threading.Event()
        self._number = signal.SIGTERM
        self._poked = False
        self._raised = False
        self._imports = False
        # The times of the first signal, of the earliest raise, and of the hard end.
        self._began = self._raise_at = self._hard_at = 0.0
        self.code: ExitCode | None = None

    def __enter__(self) -> Self:
        with sigterm_deferred():
            self._watch.start()
        self._handled.enter_context(_handled_by(self._take))
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        self._came.set()
        self._handled.close()

    def check(self, *, again: bool = False) -> None:
        """Raise the pending exception of the first signal, at a safe point of the run.

        Args:
            again: whether to raise even if the exception was raised before, and lost.
        """
        if self.code is not None and (again or not self._raised):
            self._end_run()

    def extend(self) -> None:
        """Extend the grace period of a run that has begun to write a checkpoint."""
        now = time.monotonic()
        self._raise_at = max(self._raise_at, now + SAVING_SECONDS)
        self._hard_at = max(self._hard_at, self._raise_at + GRACE_SECONDS / 2)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if _is_forked(self._process, number):
            return
        if self._poked:
            self._poked = False
        elif self.code is None:
            self._number = signal.Signals(number)
            self._began = now = time.monotonic()
            self._raise_at = now + self._patience()
            self._hard_at = max(now + GRACE_SECONDS, self._raise_at + GRACE_SECONDS / 2)
            self.code = ExitCode(128 + number)
            self._on_first()
            self._came.set()
        elif number == signal.SIGINT:
            self.end_hard()
        if not self._raised and time.monotonic() >= self._raise_at and self._is_interruptible(frame):
            self._end_run()

    def _end_run(self) -> NoReturn:
        self._raised = True
        _raise(self.code or ExitCode.TERMINATED)

    def _is_interruptible(self, frame: FrameType | None) -> bool:
        self._imports = is_importing(frame)
        if self._imports or (frame is not None and frame.f_code.co_name in _LOSING):
            return False
        return _holds(frame, lambda caller: caller.f_code is self._within)

    def _watch_end(self) -> None:
        """Send the signal again until the handler could raise, and end the process after the grace period."""
        self._came.wait()
        while not self._left.wait(_POKE_SECONDS):
            now = time.monotonic()
            if now >= self._hard_at:
                console.error_block(f"the job did not end within {now - self._began:.0f} s", do="it was killed")
                self.end_hard()
            if not self._raised and now >= self._raise_at:
                if self._imports and now >= self._began + _IMPORT_SECONDS and self._holds_nothing():
                    self.end_hard()
                self._poked = True
                signal.pthread_kill(threading.main_thread().ident or 0, self._number)

    def end_hard(self) -> None:
        """End this process now; its external processes are ended by their guardians."""
        code = self.code or ExitCode.TERMINATED
        self._before_hard(code)
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, RuntimeError):
                continue  # its reader is gone, or the main thread is writing to it
        os._exit(code)


def _is_forked(process: int, number: int) -> bool:
    """Return whether this process is a fork, before `exec`, of the process that handles signals.

    Ctrl-C also reaches the parent, which ends its children; any other signal has its default action. An exception would
    only be printed in the `os.fork` hooks of packages.
    """
    if os.getpid() == process:
        return False
    if number != signal.SIGINT:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    return True


def is_importing(frame: FrameType | None) -> bool:
    """Return whether `frame` or one of its callers is importing a module."""
    return _holds(frame, lambda caller: caller.f_code.co_filename.startswith(_IMPORTS))


def _holds(frame: FrameType | None, condition: Callable[[FrameType], bool]) -> bool:
    while frame is not None:
        if condition(frame):
            return True
        frame = frame.f_back
    return False


def _raise(code: ExitCode) -> NoReturn:
    if code is ExitCode.INTERRUPTED:
        raise KeyboardInterrupt
    raise SystemExit(code)


@contextmanager
def signals_held() -> Generator[Callable[[], None], None, None]:
    """Hold terminating signals back within the block, until the yielded function is called.

    A run can be stopped (`rlinf stop`) once its folder exists. Without handlers it would then die and leave the status
    `running` forever.
    """
    command_signals.check()
    came: list[int] = []
    released = False

    def release() -> None:
        nonlocal released
        released = True
        if came:
            signal.raise_signal(came.pop(0))

    try:
        with _handled_by(lambda number, _: came.append(number)):
            yield release
    finally:
        # A signal after the end of the run has no effect.
        if not released:
            release()

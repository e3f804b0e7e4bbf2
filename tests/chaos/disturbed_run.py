"""The injector: one run to its end, struck as its plan says."""

from __future__ import annotations

import contextlib
import math
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Final

from rlinf_cli.console import COMMAND
from rlinf_cli.why.facts import RunFacts, read_facts
from rlinf_core.node.process_life import has_ended, send
from rlinf_core.runners.storage import run_events
from tests.chaos.fault_table import FAULTS, Deed
from tests.chaos.life_signs import LifeSigns
from tests.chaos.outcomes import RunEnding, Struck, outcome_of
from tests.chaos.run_processes import RunProcess
from tests.chaos.started_run import PAUSE, StartedRun
from tests.chaos.strike_plan import Strike, StrikePlan

STACKS: Final = "stacks.txt"
_STACK_SECONDS: Final = 30.0
# A file is changed here: behind its head, where a format keeps its description.
_FLIPPED: Final = 0.7
# Seconds between two looks for the name of a stopped process.
_NAME_PAUSE: Final = 0.5
_EVENTS: Final = frozenset({run_events.RESTARTED, run_events.RELAUNCHED, run_events.FAILED, run_events.INTERRUPTED})
# Seconds that processes of a run may take to end after its command.
_GONE_SECONDS: Final = 20.0


class DisturbedRun:
    """A run with the faults of a plan.

    Args:
        started: the run, whose command has been started.
        plan: the plan of its seed.
        launch: the usual seconds from the command to the first step.
        deadline: seconds without a step, an event, a line or an end, after which it counts as hung.
    """

    def __init__(self, started: StartedRun, plan: StrikePlan, launch: float, deadline: float) -> None:
        self._started, self._plan, self._launch, self._deadline = started, plan, launch, deadline
        self._struck: list[Struck] = []
        self._signs = LifeSigns(deadline, time.monotonic())
        self._hung = False
        self._left: list[str] = []

    def to_end(self) -> RunEnding:
        """Strike as planned, wait for the end, and return what came of it."""
        began = time.monotonic()
        for strike in self._plan.strikes:
            if not self._wait(lambda strike=strike: self._due(strike)):
                break
            self._struck.append(self._strike(strike))
            if FAULTS[strike.fault].ends_command and self._struck[-1].victim:
                self._wait(lambda: False)
                if self._hung:
                    break
                self._look_for_left()
                self._started.start(resumed=True)
        if not self._hung:
            self._wait(lambda: False)
        if self._hung:
            self._keep_stacks()
            self._started.end()
        self._look_for_left()
        code = None if self._hung else self._started.code
        return outcome_of(self._started.folder, code, self._with_words(), self._left, time.monotonic() - began)

    def _due(self, strike: Strike) -> bool:
        """Return whether the moment of a strike has come."""
        started = self._started
        if strike.step == 0:
            return started.step > 0 or time.monotonic() - started.began >= strike.delay * self._launch
        if started.step < strike.step:
            return False
        time.sleep(strike.delay)
        return True

    def _wait(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition, and return whether it came about before the end of the command."""
        while self._started.code is None:
            self._signs.note(self._started.look(), self._started.printed, time.monotonic())
            if condition():
                return True
            if self._signs.are_gone(time.monotonic()):
                self._hung = True
                return False
            time.sleep(PAUSE)
        return False

    def _strike(self, strike: Strike) -> Struck:
        fault = FAULTS[strike.fault]
        victims = self._started.processes.of(fault.target)
        missed = Struck(strike, "", 0, time.time(), self._started.step)
        if not victims:
            return missed
        victim = victims[int(strike.pick * len(victims))]
        named: float | None = None
        with self._started.processes.held(victim) as handle:
            if handle is None or (fault.deed is Deed.DAMAGE and not self._damage(strike)):
                return missed
            struck = Struck(strike, victim.name, victim.identity.pid, time.time(), self._started.step)
            with contextlib.suppress(ProcessLookupError):
                named = self._do(fault.deed, handle, victim, strike)
            gone = fault.deed is Deed.FREEZE and named is None and has_ended(handle)
        self._signs.disturbed(time.monotonic())
        return struck._replace(named=named, gone=gone)

    def _do(self, deed: Deed, handle: int, victim: RunProcess, strike: Strike) -> float | None:
        match deed:
            case Deed.KILL | Deed.DAMAGE:
                send(handle, signal.SIGKILL)
            case Deed.TERMINATE:
                send(handle, signal.SIGTERM)
            case Deed.PAUSE:
                self._stopped(handle, lambda: time.sleep(strike.seconds))
            case Deed.FREEZE:
                return self._stopped(handle, lambda: self._named(victim, handle))
            case Deed.FILL:
                with without_room(victim.identity.pid):
                    time.sleep(strike.seconds)
        return None

    def _stopped(self, handle: int, meanwhile: Callable[[], float | None]) -> float | None:
        send(handle, signal.SIGSTOP)
        try:
            return meanwhile()
        finally:
            with contextlib.suppress(ProcessLookupError):
                send(handle, signal.SIGCONT)

    def _named(self, victim: RunProcess, handle: int) -> float | None:
        """Return after how many seconds the run's folder named a stopped process; None if never, in the deadline."""
        began = time.monotonic()
        while time.monotonic() - began < self._deadline and not has_ended(handle):
            facts = self._facts()
            warnings = () if facts is None else facts.warnings
            if any(
                f"pid {victim.identity.pid}" in line or victim.name in line for line in warnings if "stopped" in line
            ):
                return time.monotonic() - began
            self._started.look()
            time.sleep(_NAME_PAUSE)
        return None

    def _damage(self, strike: Strike) -> bool:
        """Flip one bit of the newest checkpoint; return whether there is one."""
        run = self._started.run
        newest = None if run is None else run.checkpoints.latest()
        if newest is None or not newest.manifest.files:
            return False
        names = sorted(name for name, size in newest.manifest.files.items() if size)
        flip_bit(newest.path / names[int(strike.pick * len(names))])
        return True

    def _look_for_left(self) -> None:
        """Note processes and folders of the run that outlive its command."""
        deadline = time.monotonic() + _GONE_SECONDS
        processes = self._started.processes
        while (left := processes.left()) and time.monotonic() < deadline:
            time.sleep(PAUSE)
        self._left += [f"process {pid}" for pid in left]
        self._left += [str(folder) for folder in processes.folders() if folder.exists()]

    def _keep_stacks(self) -> None:
        """Keep what the processes of a hung run do, for the one who looks why."""
        run = self._started.run
        if run is None:
            return
        with (self._started.folder / STACKS).open("wb") as file, contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(
                [*COMMAND, "ps", "--stacks", str(run.path)],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                timeout=_STACK_SECONDS,
                check=False,
            )

    def _facts(self) -> RunFacts | None:
        run = self._started.run
        return None if run is None else read_facts(run)

    def _with_words(self) -> list[Struck]:
        """Return the strikes, each with the first event that came after it and before the next one."""
        facts = self._facts()
        if facts is None:
            return self._struck
        times = [*(struck.time for struck in self._struck[1:]), math.inf]
        words: list[Struck] = []
        for struck, until in zip(self._struck, times, strict=False):
            event = next(
                (event for event in facts.story if event.kind in _EVENTS and struck.time <= event.time < until), None
            )
            words.append(
                struck if event is None else struck._replace(event=event.text, seconds=event.time - struck.time)
            )
        return words


@contextlib.contextmanager
def without_room(pid: int) -> Generator[None, None, None]:
    """Let a process write no file within the block: what it gets is the error of a limit, as of a full disk."""
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


def flip_bit(path: Path) -> None:
    """Flip one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(_FLIPPED * len(content))] ^= 1
    path.write_bytes(content)

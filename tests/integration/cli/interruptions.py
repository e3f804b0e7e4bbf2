"""One run that is ended at a chosen moment, and a check of how truthfully it ended."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple

from rlinf_core.runners.storage.run_folder import RunFolder
from rlinf_core.runners.storage.run_status import RunStatus
from tests.rlinf_command import REACH

RLINF = Path(sys.executable).with_name("rlinf")
# Without an end.
SMALL = (
    "recipe=embodied",
    *REACH,
    *("algorithm.update_epoch=1", "runner.max_steps=-1", "runner.val_check_interval=-1"),
)
_MARK = "RLINF_INTERRUPTION"
# The interpreter was still starting, or read the first line of the script: none of our code can answer for that.
_BEFORE_OURS = ("init_import_site", "from rlinf_cli.launcher import launch")
# Far beyond the grace period of a run: a limit for the harness, not a promise of the product.
_END_SECONDS = 120.0


class How(StrEnum):
    """What ends the run."""

    SIGTERM = "sigterm"
    CTRL_C = "ctrl-c"
    STOP = "stop"
    WARNING = "sigusr1"
    """A scheduler's warning, which reaches every process of the job."""


# To all processes of the group.
_SIGNALS = {How.CTRL_C: signal.SIGINT, How.WARNING: signal.SIGUSR1}


class Case(NamedTuple):
    """One moment of one run."""

    how: How
    detached: bool
    seconds: float


class Outcome(NamedTuple):
    """How the run ended.

    Attributes:
        faults: every promise that was broken, in words; empty where all were kept.
        phase: how far the run had come.
        seconds: from the signal to the end.
    """

    faults: list[str]
    phase: str
    seconds: float
    text: str


def cases(how: How, detached: bool, count: int, span: float, seed: int) -> Iterator[Case]:
    """Return random moments from the beginning of the command to `span` seconds after it."""
    moments = random.Random(f"{seed}-{how}-{detached}")
    return (Case(how, detached, moments.uniform(0.0, span)) for _ in range(count))


def interrupt(case: Case, folder: Path) -> Outcome:
    """Start a run in `folder`, end it at the case's moment, and judge how it ended."""
    home = Path(tempfile.mkdtemp(dir="/tmp"))
    mark = home.name
    environment = dict(os.environ) | {_MARK: mark, "TMPDIR": str(home)}
    command = [str(RLINF), "train", *(["--detach"] if case.detached else []), *SMALL]
    began = time.monotonic()
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=out, stderr=err, start_new_session=True)
    try:
        _wait(lambda: time.monotonic() - began >= case.seconds or process.poll() not in (None, 0), case.seconds + 60)
        if case.how is How.STOP:
            _wait(lambda: _run(folder) is not None or process.poll() not in (None, 0), 90)
        phase = _phase(folder, process)
        sent = time.monotonic()
        faults = _end(case, folder, process, environment)
        faults += _left(mark, home)
        seconds = time.monotonic() - sent
        return Outcome(faults, phase, seconds, _text(folder))
    finally:
        for pid in _marked(mark):
            os.kill(pid, signal.SIGKILL)
        process.wait()
        shutil.rmtree(home, ignore_errors=True)


def _end(case: Case, folder: Path, process: subprocess.Popen[bytes], environment: dict[str, str]) -> list[str]:
    """End the run, wait until it is over, and return what is not as it should be."""
    faults: list[str] = []
    number = _SIGNALS.get(case.how, signal.SIGTERM)
    code = 128 + number
    at_command = process.poll() is None
    if case.how is How.STOP:
        stopped = subprocess.run(
            [RLINF, "stop"], cwd=folder, env=environment, capture_output=True, text=True, timeout=180, check=False
        )
        if stopped.returncode != 0:
            faults.append(f"`rlinf stop` ended with {stopped.returncode}: {stopped.stderr}")
    else:
        target = process.pid if at_command else _run_or_fail(folder).state.pid
        (os.killpg if at_command and case.how in _SIGNALS else os.kill)(target, number)
    try:
        ended = process.wait(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        return [*faults, "the command did not end"]
    run = _run(folder)
    if run is not None:
        try:
            _wait(lambda: not run.refresh().alive, _END_SECONDS)
        except TimeoutError:
            return [*faults, "the run did not end"]
    # The command that starts a detached run may have returned before the signal came.
    expected = {code, -number} if at_command else {0}
    if case.detached and (case.how is How.STOP or ended == 0):
        expected = {0, *expected}
    if ended not in expected:
        faults.append(f"exit status {ended} instead of {sorted(expected)}")
    word = {How.CTRL_C: "interrupted", How.WARNING: "terminated by SIGUSR1"}.get(case.how, "terminated")
    if run is not None:
        state = run.refresh()
        if (state.status, state.reason) != (RunStatus.INTERRUPTED, word):
            faults.append(f"run.json says {state.status} ({state.reason})")
        faults += _kept(folder, run)
    text = _text(folder)
    if any(sign in text for sign in _BEFORE_OURS):
        return []
    for bad in ("Traceback", "bug in rlinf", "terminate called", "Fatal Python", "Exception ignored", "core dumped"):
        if bad in text:
            faults.append(f"it printed `{bad}`")
    return faults


def _kept(folder: Path, run: RunFolder) -> list[str]:
    """Check that the newest checkpoint is that of the last step that was done."""
    latest = run.checkpoints.latest()
    kept = latest.step if latest else 0
    return [] if kept == run.state.step else [f"step {run.state.step} is done, and step {kept} kept"]


def _left(mark: str, home: Path) -> list[str]:
    """Wait until nothing of the run is left, and return what is."""
    try:
        _wait(lambda: not _marked(mark) and not list(home.glob("rlinf-*/*")), 40)
    except TimeoutError:
        names = [Path(f"/proc/{pid}/cmdline").read_bytes()[:60] for pid in _marked(mark)]
        return [f"left: {names} {[str(path) for path in home.glob('rlinf-*/*')]}"]
    return []


def _marked(mark: str) -> list[int]:
    result: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and f"{_MARK}={mark}".encode() in (entry / "environ").read_bytes():
                result.append(int(entry.name))
        except OSError:
            continue
    return result


def _run(folder: Path) -> RunFolder | None:
    return RunFolder.latest(folder / "runs")


def _run_or_fail(folder: Path) -> RunFolder:
    run = _run(folder)
    if run is None:
        raise AssertionError(f"there is no run: {_text(folder)}")
    return run


def _phase(folder: Path, process: subprocess.Popen[bytes]) -> str:
    run = _run(folder)
    if run is None:
        return "before the run folder" if process.poll() is None else f"ended: {process.returncode}"
    return f"step {run.state.step}" if run.state.step else "launch"


def _text(folder: Path) -> str:
    files = [folder / "out", folder / "err", *folder.glob("runs/*/logs/output/*"), *folder.glob("runs/*/logs/driver/*")]
    return "".join(file.read_text(errors="replace") for file in files if file.exists())


def _wait(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:g} s")
        time.sleep(0.01)


def measure(folder: Path) -> float:
    """Return the seconds from the beginning of a command to its second step, on this machine at this moment."""
    with tempfile.TemporaryFile() as nowhere:
        process = subprocess.Popen([RLINF, "train", *SMALL], cwd=folder, stdout=nowhere, stderr=nowhere)
        began = time.monotonic()
        try:
            _wait(lambda: (run := _run(folder)) is not None and run.state.step >= 2, _END_SECONDS)
            return time.monotonic() - began
        finally:
            process.terminate()
            process.wait(timeout=_END_SECONDS)


def main() -> None:
    """Run COUNT random moments of each kind, in turns, and print what was seen.

    python -m tests.integration.cli.interruptions COUNT [SEED]
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # So it is in the background of a shell, and so would the runs have it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    count, seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    with tempfile.TemporaryDirectory() as folder:
        span = 1.5 * measure(Path(folder))
    kinds = {(how, detached): cases(how, detached, count, span, seed) for how in How for detached in (False, True)}
    well = dict.fromkeys(kinds, 0)
    for number in range(count):
        for kind, moments in kinds.items():
            case = next(moments)
            with tempfile.TemporaryDirectory() as folder:
                outcome = interrupt(case, Path(folder))
            well[kind] += not outcome.faults
            name = f"{case.how} {'detached' if case.detached else 'attached'}"
            print(
                f"{name} {number} at {case.seconds:.2f} s, {outcome.phase}, ended in {outcome.seconds:.1f} s:"
                f" {outcome.faults or 'ok'}; {well[kind]} of {number + 1} well",
                flush=True,
            )
            if outcome.faults:
                print(outcome.text[-3000:], flush=True)


if __name__ == "__main__":
    main()

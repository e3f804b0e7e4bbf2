"""Signals during a run: raised where they end it cleanly, remembered elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_cli.interrupts import ENDING_SIGNALS, ExitCode, Interrupts, is_importing
from rlinf_core.process.proc import SCHEDULER_WARNINGS, warnings_blocked

Work = Callable[["Job"], None]
# Far beyond what a signal takes to be raised.
LONG = 30.0


class Job:
    """A run that does what a test wants, and notes how it was ended."""

    def __init__(self, work: Work, patience: float = 0.0, holds_nothing: bool = False) -> None:
        self.work = work
        self.notices = 0
        self.hard: list[ExitCode] = []
        self.interrupts = Interrupts(
            within=Job.run.__code__,
            on_first=self.tell,
            patience=lambda: patience,
            holds_nothing=lambda: holds_nothing,
            before_hard=self.hard.append,
        )

    def tell(self) -> None:
        self.notices += 1

    def run(self) -> None:
        self.work(self)


def wait(_: Job) -> None:
    time.sleep(LONG)


def ended(error: type[BaseException], work: Work, **how: Any) -> Job:
    """Return a run that was ended by a signal."""
    job = Job(work, **how)
    with job.interrupts, pytest.raises(error):
        job.run()
    return job


def test_a_signal_ends_what_waits() -> None:
    def interrupted(job: Job) -> None:
        signal.raise_signal(signal.SIGINT)
        wait(job)

    job = ended(KeyboardInterrupt, interrupted)
    assert (job.interrupts.code, job.notices) == (ExitCode.INTERRUPTED, 1)
    # A step that takes too long is cut short.
    ended(KeyboardInterrupt, interrupted, patience=0.2)


def test_outside_of_the_run_it_is_remembered() -> None:
    job = Job(wait)
    with job.interrupts:
        signal.raise_signal(signal.SIGTERM)
        assert (job.interrupts.code, job.notices) == (ExitCode.TERMINATED, 1)
        with pytest.raises(SystemExit, match="143"):
            job.interrupts.check()
        job.interrupts.check()


@pytest.mark.parametrize("number", ENDING_SIGNALS)
def test_exit_code_of_a_signal_names_it(number: signal.Signals) -> None:
    job = Job(wait)
    # The tests may run under nohup, which ignores SIGHUP, as a job there should.
    before = signal.signal(number, signal.SIG_DFL)
    try:
        with job.interrupts:
            signal.raise_signal(number)
            assert job.interrupts.code == 128 + number
            with pytest.raises((SystemExit, KeyboardInterrupt)):
                job.interrupts.check()
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", SCHEDULER_WARNINGS)
def test_started_processes_survive_a_warning(number: signal.Signals) -> None:
    sleep = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]
    with warnings_blocked(), subprocess.Popen(sleep, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(number)
        process.terminate()
        assert process.wait() == -signal.SIGTERM


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Writes a module, and returns its name."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(text: str) -> str:
        name = f"imported_by_{tmp_path.name}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(text))
        monkeypatch.delitem(sys.modules, name, raising=False)
        return name

    return write


def test_an_import_is_ended_first(module: Callable[[str], str]) -> None:
    """An exception in `__set_name__` comes out of an import as a `RuntimeError`."""
    name = module("""
        import signal
        class Field:
            def __set_name__(self, owner, name):
                signal.raise_signal(signal.SIGTERM)
        class Owner:
            field = Field()
        done = True
    """)
    seen: list[Any] = []

    def importing(job: Job) -> None:
        seen.append(__import__(name).done)
        wait(job)

    ended(SystemExit, importing)
    assert seen == [True]


def test_a_finalizer_is_ended_first(capfd: pytest.CaptureFixture[str]) -> None:
    """Python prints and drops what is raised in a finalizer."""

    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGTERM)

    def finalizing(job: Job) -> None:
        Finalized()
        wait(job)

    ended(SystemExit, finalizing)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 7 << 8), (signal.SIGTERM, signal.SIGTERM)])
def test_a_forked_child_leaves_ctrl_c_to_its_parent(number: signal.Signals, status: int) -> None:
    def forking(_: Job) -> None:
        child = os.fork()
        if child == 0:
            try:
                signal.raise_signal(number)
                os._exit(7)
            finally:
                os._exit(8)
        assert os.waitpid(child, 0)[1] == status

    job = Job(forking)
    with job.interrupts:
        job.run()
    assert (job.interrupts.code, job.notices) == (None, 0)


def test_what_was_lost_is_raised_again_where_it_suits() -> None:
    def losing(job: Job) -> None:
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            job.interrupts.check()
        job.interrupts.check(again=True)

    ended(KeyboardInterrupt, losing)


def test_a_step_is_waited_for_until_it_is_done() -> None:
    steps: list[int] = []

    def stepping(job: Job) -> None:
        signal.raise_signal(signal.SIGINT)
        steps.append(1)
        job.interrupts.check()

    ended(KeyboardInterrupt, stepping, patience=LONG)
    assert steps == [1]


@pytest.mark.parametrize(("second", "codes"), [(signal.SIGINT, [143]), (signal.SIGTERM, []), (signal.SIGHUP, [])])
def test_only_a_later_ctrl_c_ends_the_process(
    second: signal.Signals, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second `rlinf stop`, or a scheduler that repeats itself, does not cost the checkpoint."""
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)

    def twice(_: Job) -> None:
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(second)

    job = Job(twice, patience=LONG)
    with job.interrupts:
        job.run()
    assert (ended, job.hard) == (codes, [ExitCode.TERMINATED] * len(codes))


def test_long_import_of_an_idle_run_is_not_waited_for(
    module: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module("""
        import signal, time
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 30
        while not ended and time.monotonic() < deadline:
            time.sleep(0.01)
    """)
    codes: list[int] = []
    monkeypatch.setattr("builtins.ended", codes, raising=False)
    monkeypatch.setattr("os._exit", codes.append)

    def importing(job: Job) -> None:
        __import__(name)
        # Here the process would have ended.
        wait(job)

    job = ended(KeyboardInterrupt, importing, holds_nothing=True)
    assert (codes[0], job.hard[0]) == (130, ExitCode.INTERRUPTED)


def test_importing_is_seen_from_within() -> None:
    assert not is_importing(sys._getframe())

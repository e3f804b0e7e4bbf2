"""Lives of workers: births, deaths and breakpoints."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from rlinf_core.address import WorkerAddress
from rlinf_core.errors import (
    ChannelError,
    CommunicationTimeoutError,
    DeadlockError,
    InvalidNameError,
    PeerNotFoundError,
    RuntimeFailure,
    UnknownGroupError,
    WorkerDiedError,
)
from rlinf_core.node.process_life import identity_here, own_identity
from rlinf_core.node.stacks import StackRequest
from rlinf_core.supervision.deaths import describe_death, exit_reason
from rlinf_core.supervision.job_view import views
from rlinf_core.supervision.waits import Pauses
from rlinf_core.waiting import OperationKind
from tests.unit.supervision.rig import Job, cause_of_death, die
from tests.waiting import until


def test_a_lookup_waits_until_the_worker_is_there(job: Job) -> None:
    driver = job.join("driver")
    incarnation = driver.open_group("actor", 1, 5)
    result: list[str] = []
    looking = threading.Thread(
        target=lambda: result.append(driver.lookup(WorkerAddress("actor", 0), 10).incarnation), daemon=True
    )
    looking.start()
    worker = job.join("actor:0", incarnation)
    looking.join(10)
    assert result == [worker.endpoint.info.incarnation]
    assert driver.group_size("actor", 5) == 1
    assert driver.group_life("actor", 5).nodes == ("node 0 (127.0.0.1)",)


@pytest.mark.parametrize("later", [False, True])
def test_a_channel_is_no_worker_and_a_worker_no_channel(job: Job, later: bool) -> None:
    driver, other = job.join("driver"), job.join("other")
    errors: dict[str, Exception] = {}

    def look_up(name: str, channel: bool) -> None:
        try:
            other.lookup(WorkerAddress(name, 0), 10, channel=channel)
        except RuntimeFailure as error:
            errors[name] = error

    threads = [threading.Thread(target=look_up, args=args, daemon=True) for args in (("actor", True), ("steps", False))]
    if later:
        for thread in threads:
            thread.start()
        until(lambda: len(other.operations.publication().operations) == 2)
    driver.open_group("actor", 1, 5)
    driver.open_group("steps", 1, 5, channel=True)
    for thread in threads:
        if not later:
            thread.start()
        thread.join(10)
    assert isinstance(errors["actor"], ChannelError)
    assert "`actor` is a worker group, not a channel" in str(errors["actor"])
    assert isinstance(errors["steps"], PeerNotFoundError)
    assert "`steps` is a channel, not a worker group" in str(errors["steps"])
    assert not any(hasattr(error, "__notes__") for error in errors.values()), "where the manager says so is no help"


def test_what_cannot_be_found(job: Job) -> None:
    driver = job.join("driver")
    driver.open_group("actor", 1, 5)
    with pytest.raises(PeerNotFoundError, match=r"`actro:0` did not appear within 0\.2 s(.|\n)*did you mean `actor`"):
        driver.lookup(WorkerAddress("actro", 0), 0.2)
    with pytest.raises(PeerNotFoundError, match="`actor:0` is launching"):
        driver.lookup(WorkerAddress("actor", 0), 0.2)
    with pytest.raises(PeerNotFoundError, match="has no rank 3"):
        driver.lookup(WorkerAddress("actor", 3), 5)
    with pytest.raises(InvalidNameError, match="a group named `actor` is running"):
        driver.open_group("actor", 1, 5)
    driver.declare(["actor"])
    with pytest.raises(UnknownGroupError):
        driver.lookup(WorkerAddress("actro", 0), 5)


@pytest.mark.parametrize("launches", [True, False])
def test_only_a_name_that_stays_unknown_is_warned_of(
    job: Job, launches: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    driver, other = job.join("driver"), job.join("other")
    driver.open_group("actor", 1, 5)
    looking = threading.Thread(target=lambda: other.lookup(WorkerAddress("actro", 0), 30), daemon=True)
    looking.start()
    until(lambda: other.operations.publication().operations)
    # Groups start in parallel: nothing is said of one whose launch begins a moment later.
    incarnation = driver.open_group("actro", 1, 5) if launches else 0
    began = time.monotonic()
    monkeypatch.setattr("rlinf_core.supervision.client.FIRST_WORD_AFTER", 0.0)
    until(lambda: caplog.records or (launches and time.monotonic() - began > 1.5))
    incarnation = incarnation if launches else driver.open_group("actro", 1, 5)
    job.join("actro:0", incarnation)
    looking.join(10)
    assert not looking.is_alive()
    warnings = [
        message for message in caplog.messages if "no group is named `actro`; it may still be launched" in message
    ]
    assert len(warnings) == len(caplog.messages) == (0 if launches else 1)


def test_name_without_a_possible_launch_is_refused_early(job: Job) -> None:
    driver = job.join("driver")
    worker = job.join("actor:0", driver.open_group("actor", 1, 5))
    errors: list[Exception] = []

    def look() -> None:
        try:
            worker.lookup(WorkerAddress("actro", 0), 600)
        except UnknownGroupError as error:
            errors.append(error)

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    # The driver runs, and could launch it.
    looking.join(4)
    assert looking.is_alive()
    with driver.operations.during(OperationKind.CALL, "actor.run()", peers=("actor:0",)):
        looking.join(60)
    (error,) = errors
    assert "did you mean `actor`" in str(error)


def test_the_word_of_a_past_life_does_not_count(job: Job) -> None:
    driver = job.join("driver")
    first = driver.open_group("actor", 1, 5)
    driver.close_group("actor")
    assert driver.open_group("actor", 1, 5) == first + 1
    job.join("actor:0", first)
    with pytest.raises(PeerNotFoundError, match="is launching"):
        driver.lookup(WorkerAddress("actor", 0), 0.3)


def test_a_death_is_told_with_its_cause(job: Job) -> None:
    driver = job.join("driver")
    worker = job.join("actor:0", driver.open_group("actor", 1, 5))
    driver.lookup(WorkerAddress("actor", 0), 5)
    worker.tell_exit_reason("it called `sys.exit(4)`")
    die(worker)
    assert cause_of_death(driver, "actor:0", 1) == "it called `sys.exit(4)`"
    with pytest.raises(WorkerDiedError, match=r"sys\.exit\(4\)"):
        driver.lookup(WorkerAddress("actor", 0), 5)


def test_a_knot_is_failed_in_all_its_members(job: Job) -> None:
    driver = job.join("driver")
    incarnation = driver.open_group("actor", 2, 5)
    workers = [job.join(f"actor:{rank}", incarnation) for rank in range(2)]
    errors: list[BaseException | None] = [None, None]

    def wait(rank: int) -> None:
        endpoint = workers[rank].endpoint
        with endpoint.waits.operations.during(OperationKind.METHOD, "train"):
            work = endpoint.work(OperationKind.RECV, f"actor:{1 - rank}")
            with pytest.raises(DeadlockError) as caught:
                work.wait()
            errors[rank] = caught.value

    threads = [threading.Thread(target=wait, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(15)
    for error in errors:
        assert isinstance(error, DeadlockError)
        assert error.members == ("actor:0", "actor:1")
        assert "actor:1 waits in recv from actor:0" in error.picture


def test_the_picture_of_a_job(job: Job) -> None:
    driver = job.join("driver")
    incarnation = driver.open_group("actor", 3, 5)
    worker = job.join("actor:0", incarnation)
    gone = job.join("actor:1", incarnation)
    driver.lookup(WorkerAddress("actor", 1), 5)
    die(gone)
    assert cause_of_death(driver, "actor:1", incarnation) is None
    serial = worker.operations.begin(OperationKind.RECV, "actor:1", task_key="a task")
    visitor = job.join("inspect-1")
    snapshot = visitor.snapshot()
    shown = {view.name: view for view in views(snapshot)}
    assert list(shown) == ["driver", "actor:0", "actor:1", "actor:2"]
    assert shown["driver"].doing == "runs"
    assert shown["actor:0"].doing == "waits in recv from actor:1"
    assert shown["actor:0"].waits_for == ("actor:1",)
    assert shown["actor:1"].state == "dead"
    assert shown["actor:2"].state == "launching"
    worker.operations.end(serial)
    with_stacks = visitor.snapshot(stacks=True)
    assert snapshot.answers["actor:0"].recent == ""
    assert with_stacks.answers["actor:0"].recent.endswith("recv from actor:1")


def test_a_group_may_be_named_like_an_inspector(job: Job) -> None:
    driver = job.join("driver")
    job.worker(driver, "inspectors:0")
    assert set(job.join("inspect-1").snapshot().answers) == {"driver", "inspectors:0"}


def test_nothing_is_asked_of_a_manager_that_is_gone(job: Job) -> None:
    driver = job.join("driver")
    driver.open_group("actor", 1, 5)
    job.end_manager()
    until(lambda: driver.lost_manager() is not None)
    with pytest.raises(RuntimeFailure, match="its manager is gone") as caught:
        driver.open_group("rollout", 1, 600)
    assert not isinstance(caught.value, TimeoutError)


def test_who_is_dismissed_is_told(job: Job) -> None:
    driver = job.join("driver")
    worker = job.join("actor:0", driver.open_group("actor", 1, 5))
    output: list[object] = []
    worker.on_cancel = output.append
    driver.lookup(WorkerAddress("actor", 0), 5)
    assert output == []
    driver.dismiss({"actor:0": 1})
    until(lambda: len(output) > 0)
    assert output == [None]


def test_shutdown_of_an_ended_group_spares_its_successor(job: Job) -> None:
    driver, other = job.join("driver"), job.join("launcher:0")
    first = job.join("actor:0", driver.open_group("actor", 1, 5))
    driver.lookup(WorkerAddress("actor", 0), 5)
    die(first)
    assert cause_of_death(driver, "actor:0", 1) is None
    second = job.join("actor:0", other.open_group("actor", 1, 5))
    output: list[object] = []
    second.on_cancel = output.append
    assert driver.lookup(WorkerAddress("actor", 0), 5) == second.endpoint.info
    driver.dismiss({"actor:0": 1})
    driver.close_group("actor", 1)
    assert driver.group_life("actor", 5).incarnation == 2
    driver.dismiss({"actor:0": 2})
    until(lambda: bool(output))
    assert output == [None]


def test_the_news_of_a_death_is_not_taken_for_the_next_one(job: Job) -> None:
    driver = job.join("driver")
    for incarnation, cause in ((1, "it called `sys.exit(4)`"), (2, "it called `sys.exit(5)`")):
        assert driver.open_group("actor", 1, 5) == incarnation
        worker = job.join("actor:0", incarnation)
        worker.tell_exit_reason(cause)
        die(worker)
        assert cause_of_death(driver, "actor:0", incarnation) == cause


def test_without_a_manager_nothing_waits(job: Job) -> None:
    driver = job.join("driver")
    assert driver.open_group("actor", 1, 5) == 1
    errors: list[BaseException] = []

    def look() -> None:
        with pytest.raises(RuntimeFailure) as caught:
            driver.lookup(WorkerAddress("other", 0), 30)
        errors.append(caught.value)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    until(lambda: bool(driver.operations.publication().operations))
    job.end_manager()
    thread.join(5)
    assert "the job has ended" in str(errors[0])


def test_death_reaches_the_driver_and_those_who_asked(job: Job) -> None:
    driver = job.join("driver")
    actor = job.worker(driver, "actor:0")
    env, other = job.worker(driver, "env:0"), job.worker(driver, "other:0")
    env.lookup(WorkerAddress("actor", 0), 5)
    waiting = env.endpoint.work(OperationKind.RECV, "actor:0", 30)
    failed: list[str] = []

    def wait() -> None:
        with pytest.raises(WorkerDiedError) as caught:
            waiting.wait()
        failed.append(caught.value.where or "")

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    until(lambda: env.operations.publication().operations)
    actor.tell_exit_reason("it has had enough")
    die(actor)
    thread.join(10)
    assert failed == ["env:0"]
    for client in (driver, env):
        assert cause_of_death(client, "actor:0", 1) == "it has had enough"
    assert other.deaths.of("actor:0") is None


def test_groups_end_with_the_worker_that_launched_them(job: Job) -> None:
    driver = job.join("driver")
    launcher = job.worker(driver, "env:0")
    inner = job.join("env:0:0", launcher.open_group("env:0", 1, 5))
    inner.lookup(WorkerAddress("env", 0), 5)
    die(launcher)
    until(lambda: driver.deaths.of("env:0:0"), "the end of the inner group")
    assert cause_of_death(driver, "env:0:0", 1) == "its group was shut down"
    with pytest.raises(UnknownGroupError):
        driver.group_life("env:0", 5)


def test_successor_is_found_in_the_place_of_the_dead(job: Job) -> None:
    driver = job.join("driver")
    first = job.worker(driver, "actor:0")
    die(first)
    until(lambda: driver.deaths.of("actor:0"), "the news")
    incarnation = driver.reopen_worker("actor:0", 5)
    assert incarnation == 2
    with pytest.raises(PeerNotFoundError, match="is launching"):
        driver.lookup(WorkerAddress("actor", 0), 0.2)
    second = job.join("actor:0", incarnation)
    assert driver.lookup(WorkerAddress("actor", 0), 5) == second.endpoint.info
    assert driver.deaths.of("actor:0") is None


def test_cancelled_calls_reach_their_workers_alone(job: Job) -> None:
    driver = job.join("driver")
    workers = [job.worker(driver, name) for name in ("actor:0", "env:0")]
    heard: list[list[object]] = [[], []]
    for worker, words in zip(workers, heard, strict=True):
        worker.on_cancel = words.append
    driver.cancel({"env:0": ("call 7",)})
    until(lambda: heard[1])
    assert heard == [[], [("call 7",)]]


CRASH = """\
:actor_name:env
something printed before
[2026-11-21 04:21:36,679 E 14178 14178] logging.cc:474: *** SIGSEGV received
Fatal Python error: Segmentation fault

Thread 0x00007f87 (most recent call first):
  File "/lib/threading.py", line 982 in run

Current thread 0x00007f88 (most recent call first):
  File "/lib/ctypes/__init__.py", line 519 in string_at
  File "/home/me/env.py", line 13 in step
  File "/site/rlinf_core/worker/process.py", line 145 in call
  File "/site/ray/worker.py", line 1 in main_loop

Extension modules: a, b (total: 2)
"""


def test_a_crash_is_told_with_the_users_part_of_the_stack(tmp_path: Path) -> None:
    log = tmp_path / "err"
    log.write_text(CRASH)
    assert exit_reason(str(log)) == (
        "it crashed: Segmentation fault; its stack, innermost call first:\n"
        "    /lib/ctypes/__init__.py:519 in string_at\n"
        "    /home/me/env.py:13 in step"
    )


def test_else_the_last_lines_are_told_without_the_engines(tmp_path: Path) -> None:
    log = tmp_path / "err"
    log.write_text(":actor_name:env\n" + "".join(f"line {n}\n" for n in range(20)) + "[2026-01-01 E] logging.cc\n")
    output = exit_reason(str(log))
    assert output is not None
    assert output.splitlines() == ["the last lines of its log:", *(f"    line {n}" for n in range(12, 20))]


def test_nothing_is_made_up(tmp_path: Path) -> None:
    (tmp_path / "err").write_text(":job_id:01\n")
    assert exit_reason(str(tmp_path / "err")) is None
    assert exit_reason(str(tmp_path / "missing")) is None
    assert exit_reason(None) is None


@pytest.mark.parametrize(
    ("said", "signal", "words"),
    [
        ("exit code -9", "SIGKILL", "it was killed by SIGKILL"),
        ("Worker unexpectedly exits with exit code -11.", "SIGSEGV", "it was killed by SIGSEGV"),
        ("exit code -1000", "signal 1000", "it was killed by signal 1000"),
        ("exit code 3", None, "it ended with exit code 3"),
        ("the node was running low on memory; exit code -9", None, "its node ran out of memory"),
        ("its process is gone: exit code 1 of another", None, "its process is gone"),
    ],
)
def test_an_exit_code_is_told_in_words(said: str, signal: str | None, words: str) -> None:
    error = describe_death(None, RuntimeError(said), "actor:1", "node 0", 0)
    assert words in str(error)
    assert (error.end.signal if error.end else None) == signal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_of_several_processes_count_once() -> None:
    clock = Clock()
    pauses = Pauses(clock)
    pauses.begin("a:0")
    clock.now = 103.0
    pauses.begin("b:0")
    pauses.end("a:0")
    clock.now = 105.0
    assert pauses.within(100.0) == 5.0
    assert pauses.within(2.0) == 2.0
    pauses.end("b:0")
    pauses.end("c:0")
    clock.now = 110.0
    assert pauses.within(7.0) == 2.0
    pauses.begin("a:0")
    clock.now = 111.0
    assert pauses.within(100.0) == 6.0


def test_wait_does_not_expire_while_a_breakpoint_is_waited_at(job: Job) -> None:
    client = job.worker(job.join("driver"), "actor:0")
    client.stops_at("x.py:3")
    until(lambda: client.wait_reports.paused("env:0", 1.0) > 0)
    work = client.endpoint.work(OperationKind.RECV, "env:0", 1.0)
    outcome: list[object] = []
    waiting = threading.Thread(target=lambda: outcome.append(work.wait()), daemon=True)
    waiting.start()
    until(lambda: time.monotonic() > work.deadline + 0.3)
    assert waiting.is_alive()
    work.finish(None)
    waiting.join(20)
    assert outcome == [None]


def test_wait_expires_after_the_breakpoint_is_left(job: Job) -> None:
    client = job.worker(job.join("driver"), "actor:0")
    client.stops_at("x.py:3")
    until(lambda: client.wait_reports.paused("env:0", 1.0) > 0)
    work = client.endpoint.work(OperationKind.RECV, "env:0", 1.0)
    client.stops_at(None)
    with pytest.raises(CommunicationTimeoutError):
        work.wait()


def test_short_waits_are_not_extended(job: Job) -> None:
    client = job.worker(job.join("driver"), "actor:0")
    client.stops_at("x.py:3")
    until(lambda: client.wait_reports.paused("env:0", 1.0) > 0)
    assert client.wait_reports.paused("env:0", 0.5) == 0.0
    assert client.wait_reports.paused("manager", 5.0) == 0.0


def test_end_of_a_process_ends_its_pause(job: Job) -> None:
    driver = job.join("driver")
    client, other = job.worker(driver, "actor:0"), job.worker(driver, "env:0")
    client.stops_at("x.py:3")
    until(lambda: other.wait_reports.paused("actor:0", 1.0) > 0)
    client.close(linger=0.0)
    # It grows no more.
    until(lambda: other.wait_reports.paused("actor:0", 1000.0) == other.wait_reports.paused("actor:0", 1000.0))
    assert other.wait_reports.paused("actor:0", 1000.0) > 0


def test_helper_reads_a_known_process_alone(job: Job) -> None:
    job.worker(job.join("driver"), "actor:0")
    asking = job.join("inspect-1")
    stacks = asking.read_stacks("actor:0", StackRequest(own_identity(), own=True, native=False))
    assert next(iter(stacks)).pid == os.getpid()
    unknown = identity_here(os.getppid())
    with pytest.raises(RuntimeFailure, match=f"process {unknown.pid}"):
        asking.read_stacks("actor:0", StackRequest(unknown, own=True, native=False))
    with pytest.raises(RuntimeFailure, match="`env:0`"):
        asking.read_stacks("env:0", StackRequest(own_identity(), own=True, native=False))


def test_driver_is_told_the_command(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    worker = job.worker(job.join("driver"), "actor:0")
    worker.stops_at("x.py:3")
    until(lambda: "actor:0 waits at a breakpoint, x.py:3; `rlinf ps --attach --job job actor:0`" in caplog.text)
    worker.stops_at("x.py:4", attached=True)
    worker.stops_at("x.py:5")
    until(lambda: "x.py:5" in caplog.text)
    assert "x.py:4" not in caplog.text


def test_command_names_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    job = Job(log_folder=str(tmp_path / "runs" / "first" / "logs"))
    job.worker(job.join("driver"), "env:0").stops_at("x.py:3")
    until(lambda: "env:0 waits at a breakpoint" in caplog.text)
    job.close()
    assert "env:0 waits at a breakpoint, x.py:3; `rlinf ps --attach runs/first env:0` attaches to it" in caplog.text

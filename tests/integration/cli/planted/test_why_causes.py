"""Causes planted in runs as a person starts them, each named by `rlinf why` from the run's folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from rlinf_core.node.process_life import identity_here, send
from rlinf_core.runners.step_clock import NO_STEP
from rlinf_core.runners.storage.run_events import EVIDENCE, MOST_BUNDLE_BYTES
from rlinf_core.runners.storage.run_folder import RunFolder
from tests.chaos.disturbed_run import flip_bit
from tests.chaos.fault_table import Target
from tests.chaos.run_processes import RunProcesses
from tests.integration.cli.planted.planted_causes import CAUSES, EMBODIED, FAULTS, MATH, NO_RESTART, WORKERS, env_job
from tests.integration.cli.planted.planted_faults import GROUP_BYTES, MEMORY_GROUP
from tests.kernel import KEEPS_ENDS
from tests.waiting import until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
RLINF = Path(sys.executable).with_name("rlinf")
ROOT = Path(__file__).parents[4]
# What the kernel does not keep on older machines is not told.
UNKNOWN_ENDS = {"killed-by-signal": "died", "crashed": "died", "exited": "died"}
ENDLESS = "runner.max_steps=-1"
TWO_ACTORS = 'cluster.component_placement.actor={node_group: node, placement: "0:0-1"}'


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    return tmp_path


def rlinf(*arguments: str, worker: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", WORKERS, worker] if worker else [RLINF]
    return subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=500, check=False)


def causes() -> list[tuple[str, str]]:
    """The codes and causes of the last run, failures first."""
    record: dict[str, Any] = json.loads(rlinf("why", "--json").stdout)
    return [(finding["code"], finding["what"]) for finding in (*record["failures"], *record["learning"])]


def evidence_sizes() -> list[int]:
    """The bytes of each bundle of evidence of the last run."""
    run = RunFolder.latest("runs")
    folders = [] if run is None else sorted((run.path / EVIDENCE).glob("[!.]*"))
    return [sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()) for folder in folders]


@pytest.mark.parametrize("planted", CAUSES)
def test_planted_cause_is_named_first(home: Path, planted: str) -> None:
    job, code, words, worker = CAUSES[planted]
    trained = rlinf("train", *job, worker=worker)
    print(rlinf("why").stdout)
    (first, what), *_ = causes()
    if not KEEPS_ENDS and code in UNKNOWN_ENDS:
        code, words = UNKNOWN_ENDS[code], "died"
    assert (first, words in what) == (code, True), (what, trained.stderr)
    # The last lines of the run say the same, unless it went on without the item.
    assert what in trained.stderr + trained.stdout or code == "items-set-aside"
    assert all(size <= MOST_BUNDLE_BYTES for size in evidence_sizes())


def test_planted_causes_are_as_many_as_promised() -> None:
    assert len(CAUSES) + len(ENDS) + len(STANDING) >= 25


def near() -> Mapping[str, str]:
    """The environment of a Slurm job that is about to be ended."""
    return {"SLURM_JOB_ID": "17", "SLURM_JOB_END_TIME": str(int(time.time()) + 60)}


@pytest.fixture
def start(home: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts a run without an end, and returns it after a step at least."""
    started: list[subprocess.Popen[bytes]] = []

    def starting(*job: str, environ: Mapping[str, str] | None = None) -> subprocess.Popen[bytes]:
        command = [RLINF, "train", *job, ENDLESS]
        process = subprocess.Popen(command, stderr=subprocess.DEVNULL, env={**os.environ, **(environ or {})})
        started.append(process)
        until(lambda: (run := RunFolder.latest("runs")) is not None and run.refresh().step >= 1, "a step", 300, 0.2)
        return process

    yield starting
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


ENDS: list[tuple[bool, signal.Signals, str]] = [
    (False, signal.SIGINT, "interrupted"),
    (False, signal.SIGTERM, "terminated"),
    (True, signal.SIGTERM, "time-limit"),
    (False, signal.SIGKILL, "driver-vanished"),
]


@pytest.mark.parametrize(("limited", "number", "code"), ENDS)
def test_end_of_the_driver_is_named(
    start: Callable[..., subprocess.Popen[bytes]], limited: bool, number: signal.Signals, code: str
) -> None:
    process = start(*EMBODIED, environ=near() if limited else {})
    assert causes() == []
    process.send_signal(number)
    process.wait(100)
    print(rlinf("why").stdout)
    assert [named for named, _ in causes()] == [code]


# Of each: the job, and words of its cause: the process, how it stands, and its frame.
STANDING: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "stopped": (env_job("stopped"), ("`EnvGroup:0` (pid ", "is stopped, as by SIGSTOP")),
    "hangs": (env_job("hangs"), ("`EnvGroup:0` (pid ", "runs `interact`", "planted_faults.py", " in _fail")),
    "locked in C": (env_job("locked"), ("`EnvGroup:0` (pid ", "holds the interpreter's lock", " in hold_a_lock")),
    "zombie": (env_job("zombie"), ("`EnvGroup:0` (pid ", "is a zombie")),
    "lost reply": (env_job("lost reply"), ("`EnvGroup:0` (pid ", "does not run the method", "its reply is lost")),
    "enters no all-reduce": (
        (*EMBODIED, f"algorithm.loss_type={FAULTS}:lone_loss", TWO_ACTORS),
        ("`ActorGroup:1` (pid ", " in lone_loss", "`ActorGroup:0` waits for it in a collective operation"),
    ),
}


@pytest.mark.parametrize("planted", STANDING)
def test_process_that_holds_a_run_up_is_named(start: Callable[..., subprocess.Popen[bytes]], planted: str) -> None:
    job, words = STANDING[planted]
    process = start(*job)
    until(causes, "a cause", 120, 0.5)
    print(rlinf("why").stdout)
    ((code, what),) = causes()
    assert (code, [word for word in words if word not in what]) == ("stalled", []), what
    assert process.poll() is None


def test_killed_channel_is_named(start: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = start(*EMBODIED, NO_RESTART)
    processes = RunProcesses(identity_here(process.pid), {})
    victim = next(iter(processes.of(Target.CHANNEL)))
    with processes.held(victim) as handle:
        assert handle is not None
        send(handle, signal.SIGKILL)
    process.wait(200)
    ((code, what),) = causes()
    assert code in ("killed-by-signal", "died")
    assert "trajectories" in what


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system")
def test_full_disk_is_named(home: Path) -> None:
    small = home / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(small)], check=True)
    try:
        # A checkpoint does not fit: its weights alone are half a megabyte.
        wide = "actor.model.hidden_dim=256"
        rlinf("train", *EMBODIED, wide, f"actor.checkpoint_save_path={small}", "runner.save_interval=2")
        print(rlinf("why").stdout)
        (code, what), *_ = causes()
    finally:
        subprocess.run(["umount", str(small)], check=True)
    assert (code, what) == ("disk-full", "there is no room on the disk")


@pytest.mark.skipif(not os.access(MEMORY_GROUP.parent, os.W_OK), reason="needs control groups of memory (v1)")
def test_kill_for_memory_is_named(home: Path) -> None:
    MEMORY_GROUP.mkdir()
    try:
        (MEMORY_GROUP / "memory.limit_in_bytes").write_text(str(GROUP_BYTES))
        rlinf("train", *env_job("group memory"), NO_RESTART)
        print(rlinf("why").stdout)
        (code, what), *_ = causes()
    finally:
        MEMORY_GROUP.rmdir()
    assert (code, "lack of memory" in what) == ("out-of-memory", True), what


def test_damaged_checkpoint_is_named(home: Path) -> None:
    rlinf("train", *EMBODIED)
    run = RunFolder.latest("runs")
    assert run is not None
    newest = run.checkpoints.latest()
    assert newest is not None
    flip_bit(newest.path / max(newest.manifest.files))
    trained = rlinf("train", *EMBODIED, "runner.max_steps=20", f"runner.resume_dir={newest.path}")
    assert newest.path.name in trained.stderr
    assert "damaged" in trained.stderr


# Each five times.
GOOD: dict[str, tuple[str, ...]] = {
    "embodied": EMBODIED,
    "shipped environment": ("embodied/pick-laptop", *EMBODIED[2:], "env.train.task=reach"),
    "GRPO": ("embodied/pick-grpo-laptop", "runner.max_steps=10", "runner.val_check_interval=-1"),
    "rollouts ahead": (*EMBODIED, "runner.max_staleness=1"),
    "evaluations": (*EMBODIED, "runner.val_check_interval=4"),
    "math": (*MATH, f"reward.reward_type={FAULTS}:by_length"),
    "math ahead": (*MATH, f"reward.reward_type={FAULTS}:by_length", "runner.max_staleness=2"),
    "sft": ("sft/sums-chat-laptop", "actor.model.hidden_dim=32", "actor.model.num_layers=1", "runner.max_steps=12"),
    "embodied/cartpole-laptop": ("embodied/cartpole-laptop", "runner.max_steps=10", "runner.val_check_interval=-1"),
    "shipped math": ("math/sums-laptop", "runner.max_steps=12", "runner.val_check_interval=-1"),
}


# Words of a driver's warnings that name somebody.
ALARMS = (NO_STEP, "is stopped", "is a zombie", "deadlock", "does not answer")


@pytest.fixture(scope="module")
def load() -> Iterator[None]:
    """Twice as many busy processes as there are processors."""
    count = 2 * len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-I", "-S", "-c", "while True: pass"]) for _ in range(count)]
    yield
    for process in busy:
        process.kill()
        process.wait()


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.parametrize("job", GOOD)
def test_good_run_under_load_has_no_cause(home: Path, load: None, job: str, turn: int) -> None:
    trained = rlinf("train", *GOOD[job])
    assert trained.returncode == 0, (turn, trained.stderr)
    assert causes() == []
    run = RunFolder.latest("runs")
    assert run is not None
    log = run.log_file("driver", 0).read_text()
    assert [line for line in log.splitlines() if any(word in line for word in ALARMS)] == []
